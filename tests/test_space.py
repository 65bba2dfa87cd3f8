"""Kernel files, workloads and feasible sets."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tuner.guesses import guesses
from tuner.records import Candidate, Resources, UsageError
from tuner.session import Subject
from tuner.space.feasible import ABSENT
from tuner.space.kernel import load_space

TEXT = """
kernel: attention
summary: O = softmax(Q K^T) V
signature:
  inputs:
    q: [B, H, S, D]
    k: [B, KV, T, D]
  outputs:
    o: [B, H, S, D]
    lse: {shape: [B, H, S], dtype: float32}
  flags: {causal: [false, true]}
  scalars: {scale: "D ** -0.5"}
  defaults: {T: S, KV: H}
  valid: ["H % KV == 0"]
templates:
  cpu:
    language: cpp
    devices: [cpu]
    dtypes: [float32, float64]
    parameters:
      TILE: [16, 32, 64]
      MICRO: [1, 2, 6]
      LAYOUT: [none, packed]
    constraints:
      - require: "TILE % MICRO == 0"
        why: "a tile holds whole micro tiles"
      - require: "TILE * TILE * itemsize <= l1_bytes"
        why: "a tile fits the first cache"
    default: {TILE: 32, MICRO: 2, LAYOUT: none}
    seeds: [{TILE: 64, MICRO: 1, LAYOUT: packed}]
  simple:
    language: cpp
    devices: [cpu, cuda]
    dtypes: [float32]
    parameters:
      UNROLL: [1, 2]
    default: {UNROLL: 1}
workloads:
  starter: ["B=2,H=8,S=1024,D=64,causal=true"]
  wide: ["B=1,H=8,KV=2,S=16,T=99,D=64,dtype=float64"]
"""
LIMITS = {"l1_bytes": 32768}


def load(folder, *changes):
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "attention.yaml"
    path.write_text(text)
    return load_space(path)


def test_a_file_says_what_it_says(tmp_path):
    spec = load(tmp_path)
    assert spec.kernel == "attention"
    assert spec.dtypes == ("float32", "float64")
    assert spec.signature.dims == ("B", "H", "S", "D", "KV", "T")
    assert spec.signature.outputs[1].dtype == "float32"
    assert [template.name for template in spec.templates] == ["cpu", "simple"]
    assert dict(spec.template("cpu").default.parameters)["TILE"] == 32
    assert str(spec.workloads["wide"][0]) == (
        "B=1,H=8,S=16,D=64,KV=2,T=99,causal=false,dtype=float64"
    )
    with pytest.raises(UsageError, match="no template 'gpu'; it has: cpu, simple"):
        spec.template("gpu")


PROBLEMS = [
    ("kernel: attention", "kernal: x", "the file: unknown key 'kernal'; allowed: kernel, summary"),
    ("summary: O", "kernel: O", "found the key 'kernel' twice"),
    ("workloads:", "workloads: [", "is not YAML"),
    ("language: cpp", "language: c", r"templates.cpu.language: .*'cpp', 'triton'.* got 'c'"),
    ("language: cpp", "extra: 1", "templates.cpu: unknown key 'extra'; allowed: language, dev"),
    ("devices: [cpu]", "devices: cpu", "templates.cpu.devices: .*list, got 'cpu'"),
    ("dtypes: [float32, ", "dtypes: [float31, ", "cpu.dtypes: unknown dtype 'float31'; known: "),
    ("[16, 32, 64]", "[]", r"templates.cpu.parameters.TILE: .* at least 1"),
    ("[16, 32, 64]", "16", r"templates.cpu.parameters.TILE: .* list, got 16"),
    ("[16, 32, 64]", "[16, 16]", "templates.cpu.parameters.TILE: holds 16 twice"),
    ("[16, 32, 64]", "[16, big]", "templates.cpu.parameters.TILE: must hold values of one type"),
    ("[16, 32, 64]", "[16, null]", r"parameters.TILE\[1\]: must be a boolean, .* got None"),
    ("UNROLL: [1", "itemsize: [1", "simple.parameters: the name 'itemsize' is taken"),
    ("UNROLL: [1", "min: [1", "simple.parameters: the name 'min' is taken"),
    ("TILE % MICRO", "TILE % BLOCK_X", r"cpu.constraints\[0\]: unknown name 'BLOCK_X' in .*TILE"),
    ("TILE % MICRO", "TILE % (", r"cpu.constraints\[0\]: .* is not an expression"),
    (
        'why: "a tile fits',
        'way: "a tile fits',
        r"constraints\[1\]: unknown key 'way'; allowed: re",
    ),
    ("MICRO: 2, LAYOUT: none", "LAYOUT: none", "cpu.default: lacks MICRO; the parameters: TILE"),
    ("{UNROLL: 1}", "{UNROLL: 1, X: 2}", "simple.default: has the unknown X"),
    ("{UNROLL: 1}", "{UNROLL: 3}", r"simple.default: UNROLL=3 is not one of \[1, 2\]"),
    ("{UNROLL: 1}", "{UNROLL: true}", r"simple.default: UNROLL=True is not one of \[1, 2\]"),
    ("MICRO: 2,", "MICRO: 6,", r"cpu.default: breaks `TILE % MICRO == 0` \(a tile holds whole"),
    ("MICRO: 1, L", "MICRO: 6, L", r"cpu.seeds\[0\]: breaks `TILE % MICRO == 0`"),
    ("k: [B, KV", "o: [B, KV", "signature: the name 'o' stands for two things"),
    ("lse: {shape: [B, H, S]", "lse: {shape: [B, H, X]", "outputs.lse: no input has the dim 'X'"),
    ("T: S, KV: H", "T: S, KX: H", "signature.defaults: no input has the dim 'KX'"),
    ("T: S, KV: H", "T: R, KV: H", "signature.defaults.T: unknown name 'R'"),
    ("H % KV == 0", "H % KY == 0", r"signature.valid\[0\]: unknown name 'KY'"),
    ("starter:", "small:", "workloads: needs a set named 'starter'"),
    (
        'causal=true"]',
        'causal=true", "D=64,B=2,H=8,S=1024,causal=true"]',
        r"starter\[1\]: .*twice",
    ),
    ("starter: [", 'starter: ["B=1", ', r"workloads.starter\[0\]: .*H, S, D must be given"),
]


@pytest.mark.parametrize(("old", "new", "message"), PROBLEMS)
def test_a_problem_is_an_error_with_file_key_value_and_choices(tmp_path, old, new, message):
    with pytest.raises(UsageError, match="attention.yaml: .*" + message):
        load(tmp_path, (old, new))


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"none.yaml: cannot be read: No such file"):
        load_space(tmp_path / "none.yaml")


def test_workload_defaults_and_round_trip(tmp_path):
    spec = load(tmp_path)
    workload = spec.workload("B=2, H=8, S=128, D=64")
    assert dict(workload.dims) == {"B": 2, "H": 8, "S": 128, "D": 64, "KV": 8, "T": 128}
    assert workload.flags == (("causal", False),)
    assert workload.dtype == "float32"
    assert spec.workload(str(workload)) == workload


OPTIONS = (
    "flags: {causal: [false, true]}",
    "flags: {causal: [false, true]}\n  options: {act: [none, relu], flip: [false, true]}\n"
    "  guarantees: [deterministic]",
)
OPTIONAL = (
    "k: [B, KV, T, D]",
    "k: {shape: [B, KV, T, D], transposed: flip}\n    mask: {shape: [S, T], optional: true}",
)


def test_a_workload_leaves_options_and_optional_inputs_out(tmp_path):
    spec = load(tmp_path, OPTIONS, OPTIONAL)
    plain, more = "B=2,H=8,S=8,D=4,KV=8,T=8,causal=true,dtype=float32", "mask=true,act=relu"
    assert str(spec.workload(plain)) == plain
    assert str(spec.workload(f"{plain},mask=false,act=none,deterministic=false")) == plain
    asked = f"{plain},act=relu,deterministic=true"
    assert spec.workload(asked).flags[1:] == (("act", "relu"), ("deterministic", True))
    given = spec.workload(f"{plain},flip=true,{more}")
    assert given.flags == (("causal", True), ("mask", True), ("act", "relu"), ("flip", True))
    assert spec.workload(str(given)) == given
    with pytest.raises(UsageError, match="act=gelu is not one of none, relu"):
        spec.workload(f"{plain},act=gelu")
    with pytest.raises(UsageError, match="deterministic=1 is not one of false, true"):
        spec.workload(f"{plain},deterministic=1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("transposed: flip", "transposed: act", "k.transposed: 'act' must be a flag or option"),
        ("transposed: flip", "transposed: flop", "k.transposed: 'flop' must be a flag"),
        ("[S, T], opt", "[S, X], opt", "inputs.mask: no input has the dim 'X'"),
        ("q: [B, H, S, D]", "q: {shape: [B, H, S, D], optional: true}", "must come last"),
        ("dtype: float32}", "optional: true}", "outputs.lse: only an input may be optional"),
        ("act: [", "mask: [", "the name 'mask' stands for two things"),
        ("act: [none, relu]", "deterministic: [false, true]", "the name 'deterministic' stands"),
        ("[deterministic]", "[deterministic, deterministic]", "the name 'deterministic' stands"),
        ("transposed: flip", "transposed: deterministic", "'deterministic' must be a flag or"),
        ("act: [none, relu], flip", "few: [1], more: [1, 2], flip", "few, more must have as many"),
    ],
)
def test_a_wrong_option_or_optional_input_is_an_error(tmp_path, old, new, message):
    with pytest.raises(UsageError, match="attention.yaml: .*" + message):
        load(tmp_path, OPTIONS, OPTIONAL, (old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not of the form NAME=VALUE"),
        ("B=2,H", "'H' is not of the form NAME=VALUE"),
        ("B=2,Q=3", "unknown name 'Q'; known: B, H, S, D, KV, T, causal, dtype"),
        ("B=2,B=2", "B is given twice"),
        ("B=2,S=8", "H, D must be given"),
        ("B=0,H=8,S=8,D=8", "B=0 is not a whole number above 0"),
        ("B=2.5,H=8,S=8,D=8", "B=2.5 is not a whole number above 0"),
        ("B=true,H=8,S=8,D=8", "B=True is not a whole number above 0"),
        ("B=2,H=8,S=8,D=8,causal=yes", "causal=yes is not one of false, true"),
        ("B=2,H=8,S=8,D=8,dtype=int8", "dtype=int8 is not one of float32, float64"),
        ("B=2,H=8,S=8,D=8,KV=3", "`H % KV == 0` must hold, but got B=2, H=8"),
    ],
)
def test_a_malformed_workload_is_an_error(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        load(tmp_path).workload(text)


def test_a_template_says_which_workloads_it_suits(tmp_path):
    suits = ("    default: {UNROLL: 1}", '    suits: "S * T <= 64"\n    default: {UNROLL: 1}')
    spec = load(tmp_path, suits)
    for text, names in (("B=2,H=8,S=8,D=8", ["cpu", "simple"]), ("B=2,H=8,S=9,D=8", ["cpu"])):
        workload = spec.workload(text)
        feasible = spec.feasible(LIMITS, "cpu", "float32", dims=dict(workload.dims))
        assert [part.spec.name for part in feasible.templates] == names
        found = guesses(Subject(spec, SimpleNamespace(workload=workload), feasible), ())
        assert found[0] == spec.template("cpu").default
        assert (spec.template("simple").default in found) is ("simple" in names)
    with pytest.raises(UsageError, match="simple.suits: unknown name 'TILE'"):
        load(tmp_path, (suits[0], suits[1].replace("S * T", "TILE")))


def test_the_first_template_is_for_every_workload(tmp_path):
    spec = load(tmp_path, ("    seeds: [{TILE", '    suits: "S > 64"\n    seeds: [{TILE'))
    dims = dict(spec.workload("B=2,H=8,S=8,D=8").dims)
    feasible = spec.feasible(LIMITS, "cpu", "float32", dims=dims)
    assert feasible.default == spec.template("cpu").default


def test_circular_defaults_are_an_error(tmp_path):
    with pytest.raises(UsageError, match="the defaults of KV, T are circular"):
        load(tmp_path, ("T: S, KV: H", "T: KV, KV: T"))


def test_the_feasible_set_is_what_brute_force_finds(tmp_path):
    spec = load(tmp_path)
    feasible = spec.feasible(LIMITS, "cpu", "float64")
    expected = [
        Candidate.of("cpu", {"TILE": tile, "MICRO": micro, "LAYOUT": layout})
        for tile, micro, layout in itertools.product((16, 32, 64), (1, 2, 6), ("none", "packed"))
        if tile % micro == 0 and tile * tile * 8 <= 32768
    ]
    assert list(feasible) == expected
    assert len(feasible) == len(expected) == 12
    assert feasible.exact
    for candidate in expected:
        assert candidate in feasible
        assert feasible.candidate(feasible.key(candidate)) == candidate
    assert Candidate.of("cpu", {"TILE": 16, "MICRO": 6, "LAYOUT": "none"}) not in feasible
    assert Candidate.of("cpu", {"TILE": 16}) not in feasible
    assert Candidate.of("gpu", {"TILE": 16}) not in feasible


def test_the_union_of_templates(tmp_path):
    spec = load(tmp_path)
    feasible = spec.feasible(LIMITS, "cpu", "float32")
    assert len(feasible) == 14
    assert feasible.features == (
        "template",
        "cpu.TILE",
        "cpu.MICRO",
        "cpu.LAYOUT",
        "simple.UNROLL",
    )
    assert feasible.default == spec.template("cpu").default
    assert feasible.defaults == tuple(template.default for template in spec.templates)
    assert feasible.seeds == spec.template("cpu").seeds
    last = feasible.keys[-1:]
    assert feasible.codes(last).tolist() == [[1, -1, -1, -1, 1]]
    assert feasible.coordinates(last).tolist() == [[1, ABSENT, ABSENT, ABSENT, 1]]
    assert len(spec.feasible(LIMITS, "cpu", "float32", only=["simple"])) == 2
    assert len(spec.feasible({}, "cuda", "float32")) == 2


def test_neighbours_differ_in_one_parameter(tmp_path):
    feasible = load(tmp_path).feasible(LIMITS, "cpu", "float32")
    for candidate in feasible:
        near = {feasible.candidate(int(k)) for k in feasible.neighbours(feasible.key(candidate))}
        expected = {
            other
            for other in feasible
            if other.template == candidate.template
            and len(set(other.parameters) ^ set(candidate.parameters)) == 2
        }
        assert near == expected


def test_a_limit_decides_about_defaults_and_seeds(tmp_path):
    feasible = load(tmp_path).feasible({"l1_bytes": 1024}, "cpu", "float32")
    assert not feasible.seeds
    assert [candidate.template for candidate in feasible.defaults] == ["simple"]
    with pytest.raises(UsageError, match=r"constraints\[1\]: .*first cache.* rejects the default"):
        _ = feasible.default


def test_no_feasible_candidate_names_the_constraint_that_rejects_most(tmp_path):
    spec = load(tmp_path)
    with pytest.raises(UsageError, match=r"cpu.constraints\[1\]: .*first cache.* rejects 100.0%"):
        spec.feasible({"l1_bytes": 16}, "cpu", "float64")
    with pytest.raises(
        UsageError, match="no template is for cuda with float64; there is cpu: cpu"
    ):
        spec.feasible({}, "cuda", "float64")
    with pytest.raises(UsageError, match=r"constraints\[1\]: the device states no 'l1_bytes'"):
        spec.feasible({}, "cpu", "float64")


def test_a_constraint_that_raises_is_an_error(tmp_path):
    spec = load(tmp_path, ("TILE * TILE * itemsize", "TILE // (MICRO - 1)"))
    with pytest.raises(UsageError, match=r"constraints\[1\]: 'TILE // .* failed with .*l1_bytes"):
        spec.feasible(LIMITS, "cpu", "float32")


def wide(folder, count, constraints):
    """Return the feasible set of a template with `count` parameters of ten values each."""
    values = list(range(1, 11))
    lines = [f"      P{place}: {values}" for place in range(count)]
    lines += ["    constraints:"]
    lines += [f'      - {{require: "{text}", why: because}}' for text in constraints]
    lines += ["    default: {" + ", ".join(f"P{place}: 1" for place in range(count)) + "}"]
    head, tail = TEXT.split("      TILE: ")[0], TEXT.split("packed}]\n")[1]
    path = folder / "attention.yaml"
    path.write_text(head + "\n".join(lines).removeprefix("      ").join(["      ", "\n"]) + tail)
    return load_space(path).feasible(LIMITS, "cpu", "float64")


def test_ten_million_combinations_are_counted_and_walked(tmp_path):
    started = time.process_time()
    feasible = wide(tmp_path, 7, ["P0 * P1 <= 50 or P2 == 1", "P0 % P3 == 0 or P3 % P0 == 0"])
    seconds = time.process_time() - started
    assert feasible.exact
    assert feasible.keys is None
    grid = np.arange(1, 11)
    p0, p1, p2, p3 = np.meshgrid(grid, grid, grid, grid, indexing="ij")
    good = ((p0 * p1 <= 50) | (p2 == 1)) & ((p0 % p3 == 0) | (p3 % p0 == 0))
    assert len(feasible) == good.sum() * 1000
    drawn = feasible.sample(5000, np.random.default_rng(0))
    assert len(np.unique(drawn)) == 5000
    assert feasible.feasible(drawn).all()
    assert feasible.candidate(int(drawn[0])) in feasible
    assert feasible.feasible(feasible.neighbours(int(drawn[0]))).all()
    assert seconds < 2


def test_few_feasible_of_ten_million_are_listed(tmp_path):
    feasible = wide(tmp_path, 7, ["P0 + P1 + P2 + P3 + P4 + P5 + P6 <= 9"])
    assert feasible.exact
    assert len(feasible) == len(feasible.keys) == 36


def test_a_trillion_combinations_are_estimated(tmp_path):
    feasible = wide(tmp_path, 12, ["P0 <= P1"])
    assert not feasible.exact
    assert len(feasible) == pytest.approx(0.55e12, rel=0.01)
    assert feasible.feasible(feasible.sample(100, np.random.default_rng(0))).all()


def test_reading_a_space_loads_no_torch():
    code = (
        "import sys, tuner.space.kernel; print({'torch', 'triton', 'optuna'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


CONDITION = (
    "    default: {TILE: 32",
    """    compiled:
      - {require: "spills <= 48 and not serialized", why: "it would be slow"}
    default: {TILE: 32""",
)


def test_conditions_on_what_the_compiler_reports(tmp_path):
    template = load(tmp_path, CONDITION).template("cpu")
    assert template.unfit(Resources(spills=48, serialized=False)) is None
    assert template.unfit(Resources(spills=49)) is None  # not all of it is reported
    for resources in (
        Resources(spills=49, serialized=False),
        Resources(spills=0, serialized=True),
    ):
        assert template.unfit(resources).why == "it would be slow"


def test_a_condition_names_what_a_compiler_reports(tmp_path):
    with pytest.raises(UsageError, match=r"cpu\.compiled\[0\]: unknown name 'TILE'.*spills"):
        load(tmp_path, CONDITION, ("spills <= 48", "TILE <= 48"))
