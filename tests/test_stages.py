"""`tune explain KERNEL`: twins that lack or repeat a stage, and what they say of its cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT

from tuner.catalog import Catalog
from tuner.render import Renderer, Twin
from tuner.runtime.cpp import find_compiler
from tuner.space.kernel import load_space
from tuner.space.template import TemplateSpec

CATALOG = Catalog()
RENDERER = Renderer(CATALOG.template_folders)

STAGED = {
    ("matmul", "cpu"): {"matrix products", "reads of B", "stores of C"},
    ("softmax", "cpu"): {"maximum", "exponentials", "scaling", "stores"},
    ("attention_forward", "cpu"): {"scores", "softmax", "exponentials", "values", "stores of O"},
    ("attention_backward", "cpu"): {"scores", "gradients of Q", "gradients of K and V"},
    ("matmul", "triton"): {"matrix products", "reads of a and b", "stores of c"},
    ("matmul", "triton_tma"): {"matrix products", "reads of a and b", "stores of c"},
    ("softmax", "triton"): {"reads of x", "maximum", "exponentials", "sum", "stores of y"},
    ("rms_norm", "triton"): {"reads of x", "sum", "stores of y"},
    ("matmul", "triton_split_k"): {"reads of a and b"},
    ("matmul", "gluon_sm90"): {"matrix products", "reads of a and b", "stores of c"},
    ("softmax", "triton_split"): {"reads of x", "exponentials", "stores of y"},
    ("softmax_backward", "triton"): {"reads of y and dy", "sum", "stores of dx"},
    ("rms_norm_backward", "triton"): {"reads of x and dy", "sum of dweight", "stores of dx"},
    ("rms_norm_backward", "triton_columns"): {"reads of rows of x and dy", "stores of dx"},
    ("attention_forward", "triton"): {"reads of k and v", "scores", "maximum", "exponentials"},
    ("attention_forward", "gluon_sm90"): {"reads of k and v", "scores", "values", "stores of o"},
    ("attention_backward", "triton"): {"reads of q and do", "exponentials", "gradients of v"},
    ("attention_backward", "triton_add"): {"gradients of k", "gradients of q", "sums of dq"},
    ("attention_backward", "gluon_sm90"): {"gradients of p", "gradients of k", "sums of dq"},
}


def template_of(kernel: str, name: str) -> TemplateSpec:
    return load_space(CATALOG.space_path(kernel)).template(name)


@pytest.mark.parametrize(("kernel", "name"), STAGED)
def test_twins_differ_from_the_kernel_and_say_that_they_are_wrong(kernel, name):
    spec = template_of(kernel, name)
    for candidate in (spec.default, *spec.seeds):
        source = RENDERER.render(kernel, spec.language, candidate)
        twins = RENDERER.twins(kernel, spec.language, candidate)
        assert "@stage" not in source.text
        assert len({source.sha256, *(twin.sha256 for twin in twins.values())}) == len(twins) + 1
        for twin, item in twins.items():
            first, rest = item.text.split("\n", 1)
            assert f"{twin}: wrong on purpose" in first
            assert rest != source.text
            assert "@stage" not in rest
            if name != "cpu":
                compile(item.text, "twin", "exec")
    twins = RENDERER.twins(kernel, spec.language, spec.default)
    assert {twin.stage for twin in twins} >= STAGED[kernel, name]


def test_what_only_other_shapes_run_is_no_stage():
    spec = template_of("attention_forward", "gluon_sm90")
    twins = RENDERER.twins("attention_forward", spec.language, spec.default)
    whole = RENDERER.render("attention_forward", spec.language, spec.default).text
    fallback = whole[whole.index("def attend(") :]
    assert all(fallback in twin.text for twin in twins.values())


@pytest.mark.parametrize(
    "kernel", ["matmul", "softmax", "attention_forward", "attention_backward"]
)
def test_every_twin_in_cpp_is_valid(kernel, tmp_path):
    spec = template_of(kernel, "cpu")
    paths = []
    candidates = (spec.default, *(spec.seeds if kernel == "matmul" else ()))
    for number, candidate in enumerate(candidates):
        twins = RENDERER.twins(kernel, "cpp", candidate).values()
        for place, source in enumerate(twins):
            paths.append(tmp_path / f"{number}_{place}.cpp")
            paths[-1].write_text(source.text)
    flags = ("-std=c++17", "-march=native", "-fopenmp", "-fsyntax-only")
    command = [*find_compiler(), *flags, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


COUNT = """
import sys
from pathlib import Path
import tuner.builders.triton as builder
from tuner.catalog import Catalog, device_class
from tuner.plugins import BuildTask
from tuner.render import Renderer, Twin
from tuner.space.kernel import load_space

built = []
resources = builder._resources
builder._resources = lambda kernels, limit: built.extend(kernels) or resources(kernels, limit)
catalog, device, folder = Catalog(), device_class("cuda").target("90"), Path(sys.argv[1])
kernel, template, workload, *words = sys.argv[2:]
spec = load_space(catalog.space_path(kernel))
template, renderer = spec.template(template), Renderer(catalog.template_folders)
sources = {"whole": renderer.render(kernel, template.language, template.default)}
sources |= renderer.twins(kernel, template.language, template.default)
workload = spec.workload(workload)
for name, source in sources.items():
    path = folder / f"{source.sha256}.py"
    path.write_text(source.text)
    task = BuildTask(path, spec.signature, workload, device, folder)
    builder.TritonBuilder().compile(task)
    text = "".join(kernel.asm["ptx"] for kernel in built)
    built.clear()
    print(name, *(text.count(word) for word in words), sep=";")
"""


def counted(tmp_path: Path, *arguments: str) -> dict[str, list[int]]:
    """Return how often the twins of a template's default have some words, compiled for sm_90."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(tmp_path), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(";") for line in done.stdout.splitlines()]
    return {name: list(map(int, row)) for name, *row in rows}


def test_a_compiled_twin_differs_in_its_stage_alone(tmp_path):
    counts = counted(
        tmp_path,
        *("softmax", "triton", "M=64,N=1024,dtype=bfloat16"),
        *("ex2", "ld.global", "st.global", "shfl"),
    )
    powers, loads, stores, shuffles = counts["whole"]
    assert counts["exponentials, left out"] == [0, loads, stores, shuffles]
    assert counts["exponentials, doubled"] == [2 * powers, loads, stores, shuffles]
    assert counts["maximum, left out"] == [powers, loads, stores, shuffles // 2]
    # the stores are still there, behind a mask that is never true: nothing else went with them
    assert counts["stores of y, left out"] == counts["whole"]
    assert counts["reads of x, left out"] == counts["whole"]


def test_twins_of_products_on_warpgroups_have_all_or_twice_as_many(tmp_path):
    words = ("wgmma.mma_async", "cp.async.bulk.tensor")
    counts = counted(tmp_path, "matmul", "gluon_sm90", "M=256,N=256,K=256,dtype=bfloat16", *words)
    products, copies = counts.pop("whole")
    assert counts.pop("matrix products, doubled") == [2 * products, copies]
    assert set(counts) == {"reads of a and b, left out", "stores of c, left out"}
    assert all(found == [products, copies] for found in counts.values())


@pytest.mark.alone
def test_the_dearest_stage_of_a_product_is_its_products(tune, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else a busy neighbour decides what threads cost
    done = tune(
        *("explain", "matmul", "--workload", "M=192,N=192,K=192"),
        *("--device", "cpu", "--budget", "3", "--json"),
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    shares = {(item["stage"], item["mode"]): item["share"] for item in found["stages"]}
    # alone on the machine it is a quarter; beside others the interval is wide
    assert shares["matrix products", "doubled"]["high"] > 0.1
    assert found["origin"] == "not tuned here, the default"
    assert 0 < found["products_ms"] < 1.5 * found["time_ms"]["value"]
    assert not list(tmp_path.rglob("trials.jsonl"))
    assert not (tmp_path / "kernels_generated").exists()


SPACE = """\
kernel: twice
summary: y = 2 x, with stages of every kind
signature:
  inputs: {x: [N]}
  outputs: {y: [N]}
templates:
  cpu:
    language: cpp
    devices: [cpu]
    dtypes: [float32]
    parameters:
      STAGED: [true, false]
    default: {STAGED: true}
workloads:
  starter: ["N=100000,dtype=float32"]
"""

TEMPLATE = """\
{% from "common/stages.cpp.j2" import stage with context %}
#include <cstdint>

extern "C" void twice(const float* x, float* y, int64_t N) {
{% if STAGED %}
{% call stage("nothing", ["doubled"]) %}
{% endcall %}
{% call stage("life", ["left out"], "  *reinterpret_cast<volatile int*>(8) = 1;") %}
{% endcall %}
{% call stage("grammar", ["left out"], "  this does not compile;") %}
{% endcall %}
{% call stage("work", ["doubled"]) %}
  for (int64_t i = 0; i < N; ++i) y[i] = 2 * x[i];
{% endcall %}
{% else %}
  for (int64_t i = 0; i < N; ++i) y[i] = 2 * x[i];
{% endif %}
}
"""

PROBLEM = """\
RIVAL = "torch.mul"
EDGE_SHAPES = ({"N": 1}, {"N": 3}, {"N": 7})

def reference(x):
    return {"y": 2 * x}

def rival(x):
    return None

def tolerance(dims, flags, dtype):
    return {"rtol": 1e-6, "atol": 1e-6}

def cost(dims, flags, itemsize):
    return dims["N"], 2 * dims["N"] * itemsize
"""


@pytest.mark.alone
def test_a_twin_that_crashes_or_does_not_compile_is_reported_beside_the_others(tune, tmp_path):
    for name, text in (
        ("search_spaces/twice.yaml", SPACE),
        ("templates/twice/cpu.cpp.j2", TEMPLATE),
        ("problems/twice.py", PROBLEM),
    ):
        path: Path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = ("--kernels", "own", "--device", "cpu", "--budget", "1")
    done = tune("explain", "twice", *own, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert "SIGSEGV" in found["refused"]["life, left out"]
    assert "error" in found["refused"]["grammar, left out"]
    shares = {item["stage"]: item["share"]["value"] for item in found["stages"]}
    assert shares["work"] > 0.1
    assert shares["nothing"] < shares["work"]


def test_a_template_without_stages_has_no_twins():
    catalog = Catalog([KERNELS])
    spec = load_space(catalog.space_path("scale")).template("cpu")
    assert Renderer(catalog.template_folders).twins("scale", "cpp", spec.default) == {}


def test_bad_requests_are_one_line(tune):
    for arguments, said in (
        (("nope",), "unknown kernel 'nope'"),
        (("matmul", "--device", "interpreter"), "never times"),
        (("matmul", "--budget", "-1"), "-1"),
        (("12",), "there are no trials"),
        (("matmul", "--kernels", "nowhere"), "no such folder"),
    ):
        done = tune("explain", *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_a_twin_spells_its_stage_and_mode():
    assert str(Twin("stores", "left out")) == "stores, left out"
