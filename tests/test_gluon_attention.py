"""The Gluon templates of attention: right in an emulator, and compiled for an absent card.

One child emulates a sample of candidates in which every value of every parameter occurs, on odd
lengths, groups of heads and masks; and files with a mistake each, which the emulator must see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from cover import LIMITS, cover
from test_triton_templates import CATALOG, VARIANTS, compiled, resources, write

from tuner.children.task import Compiled
from tuner.records import Candidate, Resources
from tuner.session import Subject
from tuner.space.kernel import load_space
from tuner.space.template import TemplateSpec

ROOT = Path(__file__).parent.parent
TEMPLATE = "gluon_sm90"
KERNELS = ("attention_backward", "attention_forward")
SHAPES = [
    {"B": 1, "H": 4, "S": 150, "D": 64, "KV": 2, "T": 131},
    {"B": 1, "H": 1, "S": 150, "D": 96, "KV": 1, "T": 270},
    {"B": 2, "H": 1, "S": 1, "D": 40, "KV": 1, "T": 1},
]
WIDE = [
    {"B": 1, "H": 2, "S": 150, "D": 256, "KV": 1, "T": 131},
    {"B": 1, "H": 1, "S": 70, "D": 136, "KV": 1, "T": 200},
]
POINTERS = [{"B": 1, "H": 2, "S": 17, "D": 136, "KV": 1, "T": 20}]
MISTAKES = {
    "attention_backward": {
        "default": (
            ("fence_async_shared()\n    cta_barrier()\n    dq =", "cta_barrier()\n    dq ="),
            ("    fence_async_shared()\n    tma_store(dv", "    tma_store(dv"),
            ("warpgroup_mma_wait(1, deps=(scores,))", "warpgroup_mma_wait(2, deps=(scores,))"),
            ("warpgroup_mma_wait(1, deps=(dv, p_operand))", "(dv, p_operand)"),
            ("    arrive(q_free.index(q_slot))\n", ""),
            ("4 * BLOCK_M", "8 * BLOCK_M"),
            ("(number // 2) & 1) ^ 1", "(number // 2) & 1)"),
            ("            tma.store_wait(0)\n", ""),
            ("head = kv_head * group + member", "head = kv_head * group"),
            ("seen += first + 1 - S", "seen += first + 1"),
            ("= gl.cdiv(S - first, BLOCK_M)", "= gl.cdiv(S - first, BLOCK_M) - 1"),
        ),
        "linear_writer": (
            ("    fence_async_shared()\n    # a slot", "    # a slot"),
            ("mbarrier.wait(others_ready.index(ds_slot)", "mbarrier.wait(ds_ready.index(ds_slot)"),
            ("    mbarrier.wait(k_read.index(0), 0)\n", ""),
            ("warpgroup_mma_wait(2, deps=(dv, p_operand))", "(dv, p_operand)"),
            ("                tma.store_wait(1)\n", ""),
            ("[(place + part) * ROWS, 0]", "[place * ROWS, 0]"),
            ("use_acc=half == 1", "use_acc=half == 0"),
        ),
        "linear_finisher": (
            ("mbarrier.wait(v_free.index(0), (tiles_taken & 1) ^ 1)", "pass"),
            ("mbarrier.wait(k_free.index(0), (tiles_taken & 1) ^ 1)", "pass"),
            ("arrive(v_free.index(0), last)", "arrive(v_free.index(0))"),
            ("tma.store_wait(0)\n        out.store((dk", "out.store((dk"),
            ("tiles_taken)\n    tma.store_wait(0)\n", "tiles_taken)\n"),
            ("mbarrier.wait(tile_ready.index(slot), (number // 2) & 1)", "pass"),
            ("mbarrier.arrive(tile_free.index(slot), count=1)", "pass"),
            ("turn * most + place % together", "place % together"),
            ("ds_ring.index(2 * ds_slot + PART).store(nothing)", "pass"),
            ("unseen = 1", "unseen = 0"),
            ("if seen + BLOCK_M <= 1:", "if seen <= 1:"),
            ("    tma_sum_wait(0)\n    cta_barrier()\n", ""),
            ("< gl.cdiv(keys, BLOCK_N)", "< gl.cdiv(keys, BLOCK_N) - 1"),
            ("quad // 4 % 8", "quad // 4 % 4"),
            ("(member // 2 * 8, 0)", "(member // 2, 0)"),
        ),
        "linear_atomic": (
            (" + PART * 4096", ""),
            ("permute((3, 0, 4, 2, 5, 1, 6))", "permute((3, 0, 4, 2, 5, 6, 1))"),
            ("(row + off_m).to(gl.int64)", "(row + row + off_m).to(gl.int64)"),
            ("dq = warpgroup_mma_wait(1, deps=(dq,))\n", ""),
            ("    arrive(do_free.index(do_slot))\n", ""),
        ),
    },
    "attention_forward": {
        "default": (
            ("    fence_async_shared()\n    tma_store(o", "    tma_store(o"),
            ("warpgroup_mma_wait(1, deps=(scores,))", "warpgroup_mma_wait(2, deps=(scores,))"),
            ("= warpgroup_mma_wait(0, deps=(accumulator, p))", "= (accumulator, p)"),
            ("    mbarrier.arrive(v_free.index(v_slot), count=1)\n", ""),
            ("kv_head = head // group", "kv_head = head"),
            ("off_m + (T - S) + gl", "off_m + gl"),
            ("blocks - seen_by_all // BLOCK_N", "blocks - seen_by_all // BLOCK_N - 1"),
        ),
        "PERSISTENT=true": (
            ("q_slot = PART + 2 * (tiles_taken % 2)", "q_slot = PART"),
            ("tiles_taken)\n    tma.store_wait(0)\n", "tiles_taken)\n"),
            ("tma.store_wait(0)  # what was written before has left", "pass"),
            ("turn * most + place % together", "place % together"),
        ),
        "EPILOGUE=overlapped": (
            ("    if not FIRST:\n", "    if True:\n"),
            ("*(CAUSAL or HAS_TAIL, CAUSAL, True)", "*(False, CAUSAL, True)"),
            ("lse_ptr + o_head.to", "lse_ptr + head.to"),
            ("+ gl.log2(o_total)", "+ gl.log2(total)"),
            (
                "            else:\n                slot",
                "            if tile < -1:\n                slot",
            ),
        ),
        "Q_STAGES=1": (("mbarrier.wait(q_free.index(part), (tiles_taken & 1) ^ 1)", "pass"),),
        "TILES=static": (
            ("programs - 1 - program", "programs - program"),
            ("number * programs +", "(number + 1) * programs +"),
        ),
    },
}
"""What to change in the file of the first seed with a value, or of the default."""

# The first test waits for the child.
pytestmark = pytest.mark.timeout(900)


def spec_of(kernel: str) -> TemplateSpec:
    return load_space(CATALOG.space_path(kernel)).template(TEMPLATE)


def sample(kernel: str) -> list[Candidate]:
    return cover(spec_of(kernel), {**LIMITS, "itemsize": 2})


def child(work: str, folder: Path, **variables: str) -> dict:
    """Return what a process of its own found: triton reads its environment once."""
    paths = (ROOT, ROOT / "tests", ROOT / "tests" / "conformance")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, __file__, work, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    return child("emulate", tmp_path_factory.mktemp("gluon"), TRITON_INTERPRET="1")


@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_with_every_value_are_right(report, kernel):
    faults = report[kernel]["candidates"]
    assert len(faults) == len(sample(kernel))
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_additions_in_the_order_of_registers_are_right_on_every_schedule(report):
    faults = report["attention_backward"]["atomic"]
    assert len(faults) == 5
    assert set(faults) == {None}


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_tma_cannot_move_is_right(report, kernel):
    assert report[kernel]["pointers"] is None


def test_narrow_and_wide_heads_are_right(report):
    faults = report["attention_forward"]["widths"]
    templates = ("gluon_sm90_narrow", "gluon_sm90_wide")
    assert len(faults) == sum(len(VARIANTS["attention_forward", name]) for name in templates)
    assert set(faults) == {None}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_emulator_sees_every_mistake(report, kernel):
    found = report[kernel]["mistakes"]
    assert len(found) == sum(map(len, MISTAKES[kernel].values()))
    assert [change for change, fault in found if not fault] == []


def test_products_that_wait_for_each_other_are_refused(tmp_path):
    spec = load_space(CATALOG.space_path("attention_backward"))
    found = [Resources(**each) for each in child("reports", tmp_path)["attention_backward"]]
    fit, serialized, from_cache = found
    assert fit.serialized is False
    assert fit.registers
    assert spec.template(TEMPLATE).unfit(fit) is None
    assert serialized.serialized is True
    assert from_cache == serialized
    candidate = spec.template(TEMPLATE).default
    verdict = Subject(spec, None, None).judge(candidate, Compiled(1.0, serialized))
    assert verdict.stage == "compile"
    assert "`not serialized`" in verdict.reason


@pytest.mark.slow
def test_candidates_with_every_value_compile(tmp_path):
    for kernel, results in child("build", tmp_path).items():
        assert len(results) == len(sample(kernel))
        assert [result for result in results if isinstance(result, str)] == []


def build(kernel: str, folder: Path) -> list[int | str]:
    """Return the shared bytes of each candidate of the sample, or why it does not compile."""
    spec = load_space(CATALOG.space_path(kernel))
    paths = [write(kernel, TEMPLATE, dict(item.parameters), folder) for item in sample(kernel)]
    return [compiled(spec, path, "cuda:90") for path in paths]


def reports(kernel: str, folder: Path) -> list[dict]:
    """Return what the compiler says of a good candidate, and of a bad one, twice."""
    if kernel != "attention_backward":
        return []
    spec = load_space(CATALOG.space_path(kernel))
    good, seeds = spec.template(TEMPLATE).default, spec.template(TEMPLATE).seeds
    bad = next(dict(seed.parameters) for seed in seeds if "independent" in str(seed))
    bad |= {"DQ_SPLIT": 1, "DQ_STAGES": 1, "PRODUCTS": "dq_first"}
    paths = [write(kernel, TEMPLATE, values, folder) for values in (dict(good.parameters), bad)]
    return [asdict(resources(spec, path, "cuda:90")) for path in (*paths, paths[1])]


def emulate(kernel: str, folder: Path) -> dict:
    """Return what is wrong with each candidate, with the pointers' kernel, and with mistakes."""
    candidates = sample(kernel)
    paths = [write(kernel, TEMPLATE, dict(item.parameters), folder) for item in candidates]
    wrong = []
    for number, (text, (old, new)) in enumerate(mistakes(kernel, folder)):
        assert old in text, old
        path = folder / f"mistake{number}.py"
        path.write_text(text.replace(old, new))
        # a race shows in some orders of the threads only
        found = (fault(kernel, path, SHAPES[:2]) for _ in range(5))
        wrong.append((old, next(filter(None, found), None)))
    return {
        "candidates": {
            str(candidate): fault(kernel, path, SHAPES)
            for candidate, path in zip(candidates, paths, strict=True)
        },
        "pointers": fault(kernel, paths[0], POINTERS)
        or fault(kernel, paths[0], SHAPES[1:2], misaligned=True),
        "mistakes": wrong,
        "widths": other_widths(folder) if kernel == "attention_forward" else [],
        "atomic": atomic(folder) if kernel == "attention_backward" else [],
    }


def mistakes(kernel: str, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """Return files with what to change in each."""
    found = []
    for value, changes in MISTAKES[kernel].items():
        candidates = (item for item in spec_of(kernel).seeds if value in str(item))
        candidate = spec_of(kernel).default if value == "default" else next(candidates)
        text = write(kernel, TEMPLATE, dict(candidate.parameters), folder).read_text()
        found += [(text, change) for change in changes]
    return found


def other_widths(folder: Path) -> list[str | None]:
    """Return what is wrong with each variant for narrow and wide heads, on those and on others."""
    faults = []
    tried = {"gluon_sm90_narrow": SHAPES, "gluon_sm90_wide": WIDE + SHAPES[1:]}
    for template, shapes in tried.items():
        variants = VARIANTS["attention_forward", template]
        paths = [write("attention_forward", template, values, folder) for values in variants]
        faults += [fault("attention_forward", path, shapes) for path in paths]
    return faults


def atomic(folder: Path) -> list[str | None]:
    """Return what is wrong with each variant whose consumers add dq up in registers' order."""
    variants = VARIANTS["attention_backward", TEMPLATE]
    taken = [values for values in variants if values["DQ_MODE"] == "linear_atomic"]
    paths = [write("attention_backward", TEMPLATE, values, folder) for values in taken]
    return [fault("attention_backward", path, SHAPES) for path in paths]


_examples: dict[str, object] = {}


def fault(kernel: str, path: Path, shapes: list[dict], *, misaligned: bool = False) -> str | None:
    """Return the first thing that is wrong with a file, or None."""
    from gluon_emulator import emulated

    from tuner.runtime.cases import flag_choices
    from tuner.runtime.check import Case, Example, load_problem
    from tuner.runtime.variant import load_variant

    signature = load_space(CATALOG.space_path(kernel)).signature
    problem = load_problem(CATALOG.problem_path(kernel))
    with emulated():
        variant = load_variant(signature, "triton", path=path)
    for shape in shapes:
        for flags in flag_choices(signature):
            case = Case(shape, flags, "float16", misaligned=misaligned)
            key = f"{kernel}{case}"
            if key not in _examples:
                _examples[key] = Example(signature, problem, case)
            try:
                found = _examples[key].check(variant)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found:
                return found
    return None


if __name__ == "__main__":
    work = {"emulate": emulate, "build": build, "reports": reports}[sys.argv[1]]
    print(json.dumps({kernel: work(kernel, Path(sys.argv[2])) for kernel in KERNELS}))
