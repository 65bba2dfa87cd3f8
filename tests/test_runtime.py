"""What runs beside a kernel: verdicts on variants, the compiler, names of devices."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tuner.runtime import cpp
from tuner.runtime.architecture import cpu_architecture, slug
from tuner.runtime.cases import edge_cases, flag_choices
from tuner.runtime.check import Case, Example, check, difference
from tuner.runtime.dispatch import Entry
from tuner.runtime.signature import Signature
from tuner.runtime.tensor_spec import TensorSpec
from tuner.runtime.timing import Ratio, compare
from tuner.runtime.variant import load_variant

ROWS = Signature(
    "rows",
    inputs=(TensorSpec("x", ("M", "N")),),
    outputs=(TensorSpec("y", ("M", "N")), TensorSpec("lse", ("M",), "float32")),
    flags=(("shift", (False, True)), ("mode", ("plain", "other"))),
    scalars=(("scale", "N ** -0.5 if N else 1.0"),),
)


def rows_reference(x: Tensor, shift: bool, mode: str, scale: float) -> dict[str, Tensor]:
    assert x.dtype == torch.float64
    y = scale * x + (1 if shift else 0)
    return {"y": y, "lse": y.logsumexp(1)}


def rows_tolerance(dims, flags, dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5}


PROBLEM = SimpleNamespace(reference=rows_reference, tolerance=rows_tolerance)


def behave(tensors: dict[str, Tensor]) -> None:
    pass


class PythonVariant:
    """Computes rows with torch, then misbehaves."""

    def __init__(self, misbehave: Callable = behave, strided=()) -> None:
        self.misbehave, self.strided = misbehave, frozenset(strided)

    def bind(self, tensors, _dims, options) -> Callable[[], None]:
        def call() -> None:
            y = options["scale"] * tensors["x"] + (1 if options["shift"] else 0)
            tensors["y"].copy_(y)
            tensors["lse"].copy_(y.logsumexp(1))
            self.misbehave(tensors)

        return call


def outside(tensor: Tensor, offset: int) -> Tensor:
    """Return the element before or after a tensor's memory."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset() + offset, (1,))


CASE = Case({"M": 3, "N": 5}, {"shift": False, "mode": "plain"}, "float32")


def spoil(name: str, index: tuple[int, ...], value: float) -> Callable:
    def misbehave(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] = value

    return misbehave


@pytest.mark.parametrize(
    "misbehave, reason",
    [
        (behave, None),
        (spoil("y", (1, 2), 7.0), r"y\[1, 2\] is 7 but must be .* 1 of 15 elements are wrong"),
        (spoil("y", (2, 4), math.nan), r"y\[2, 4\] is nan but must be"),
        (spoil("lse", (0,), math.inf), r"lse\[0\] is inf but must be"),
        (
            spoil("x", (0, 0), 9.0),
            r"changed x \(M=3,N=5,shift=false,mode=plain,.*dtype=float32,seed=0\)$",
        ),
        (
            lambda tensors: outside(tensors["y"], 15).fill_(0),
            "wrote out of bounds of y: 4 bytes after its end, the nearest 1 away",
        ),
        (
            lambda tensors: outside(tensors["lse"], -1).fill_(0),
            "wrote out of bounds of lse: 4 bytes before its start, the nearest 1 away",
        ),
        (
            lambda tensors: outside(tensors["x"], 20).fill_(0),
            "wrote out of bounds of x: 4 bytes after its end, the nearest 21 away",
        ),
    ],
)
@pytest.mark.parametrize("misaligned", [False, True])
def test_verdicts(misbehave: Callable, reason: str | None, misaligned: bool) -> None:
    case = Case(CASE.extents, CASE.flags, "float32", misaligned=misaligned)
    example = Example(ROWS, PROBLEM, case)
    found = example.check(PythonVariant(misbehave))
    assert found is None if reason is None else re.search(reason, found)
    assert example.check(PythonVariant()) is None  # the example is as good as new


def test_what_a_variant_raises_passes_through() -> None:
    def misbehave(tensors: dict[str, Tensor]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        check(PythonVariant(misbehave), ROWS, PROBLEM, CASE)


def test_an_output_left_out_is_wrong() -> None:
    def bind(tensors, dims, options) -> Callable[[], None]:
        return lambda: tensors["lse"].fill_(0.0)

    variant = PythonVariant()
    variant.bind = bind
    found = check(variant, ROWS, PROBLEM, CASE)
    assert found.startswith("y[0, 0] is nan but must be ")
    assert "15 of 15 elements are wrong" in found


def test_infinities_of_empty_rows_are_equal() -> None:
    case = Case({"M": 2, "N": 0}, CASE.flags, "float32")
    assert Example(ROWS, PROBLEM, case).check(PythonVariant()) is None


def test_scalars_flags_and_seeds_reach_the_variant() -> None:
    seen = []
    variant = PythonVariant(lambda tensors: seen.append(tensors["x"].clone()))
    for flags in flag_choices(ROWS):
        for seed in (1, 2):
            case = Case(CASE.extents, flags, "float32", seed=seed, scalars={"scale": 3.0})
            example = Example(ROWS, PROBLEM, case)
            assert example.options == {**flags, "scale": 3.0}
            assert example.check(variant) is None
    assert len(seen) == 8
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_strided_inputs_come_transposed_where_tensors_are_unusual() -> None:
    strides = []
    variant = PythonVariant(lambda tensors: strides.append(tensors["x"].stride()), strided=("x",))
    for misaligned in (False, True):
        case = Case(CASE.extents, CASE.flags, "float32", misaligned=misaligned)
        assert check(variant, ROWS, PROBLEM, case) is None
    assert strides == [(5, 1), (1, 3)]


def test_difference() -> None:
    inf, nan = math.inf, math.nan
    reference = torch.tensor([1.0, -inf, nan, 1e9, 0.0], dtype=torch.float64)
    near = torch.tensor([1.001, -inf, nan, 1.001e9, 0.0009])
    assert difference(near, reference, rtol=1e-3, atol=1e-3) is None
    for index, value in ((0, 1.1), (1, inf), (1, -1e38), (1, nan), (2, 0.0), (4, 0.01), (0, inf)):
        wrong = near.clone()
        wrong[index] = value
        reason = difference(wrong, reference, rtol=1e-3, atol=1e-3)
        assert reason is not None and f"[{index}] is " in reason
    assert "has the shape [5]" in difference(near, reference[:4], rtol=0, atol=0)
    assert difference(torch.zeros(0, 3), torch.zeros(0, 3).double(), rtol=0, atol=0) is None


def test_signature() -> None:
    assert ROWS.dims == ("M", "N")
    assert Signature.from_json(ROWS.to_json()) == ROWS
    assert ROWS.default_scalars({"M": 1, "N": 16}) == {"scale": 0.25}
    assert ROWS.complete_flags({"shift": True}) == {"shift": True, "mode": "plain"}
    with pytest.raises(ValueError, match="unknown flag causal; known: shift, mode"):
        ROWS.complete_flags({"causal": True})


LINEAR = Signature(
    "linear",
    (
        TensorSpec("a", ("M", "K")),
        TensorSpec("b", ("K", "N"), transposed="flip"),
        TensorSpec("bias", ("N",), optional=True),
    ),
    (TensorSpec("c", ("M", "N")),),
    options=(("act", ("none", "relu")), ("flip", (False, True))),
)


def test_options_and_optional_inputs() -> None:
    assert Signature.from_json(LINEAR.to_json()) == LINEAR
    assert "options" not in ROWS.to_json()
    assert LINEAR.complete_flags({"act": "none", "bias": False}) == {}
    flags = LINEAR.complete_flags({"flip": True, "bias": True})
    assert flags == {"bias": True, "flip": True}
    assert len(list(flag_choices(LINEAR))) == 8
    a, b, bias = torch.empty(2, 3), torch.empty(5, 3), torch.empty(5)
    assert LINEAR.bind({"a": a, "b": b, "bias": bias}, flags) == {"M": 2, "K": 3, "N": 5}
    assert LINEAR.bind({"a": a, "b": b.T, "bias": None}) == {"M": 2, "K": 3, "N": 5}
    for tensors, message in (
        ({"a": a, "b": b}, "K of b is 5, but the inputs before it say K=3"),
        ({"a": a, "b": b.T, "bias": a}, r"bias must have the shape \[N\], but got \[2, 3\]"),
        ({"a": a, "bias": bias}, "b must be given"),
    ):
        with pytest.raises(ValueError, match=message):
            LINEAR.bind(tensors)
    shapes = dict(LINEAR.shapes(LINEAR.inputs, {"M": 2, "K": 3, "N": 5}, {"flip": True}))
    assert {spec.name: shape for spec, shape in shapes.items()} == {"a": (2, 3), "b": (5, 3)}


def test_an_edge_shape_that_names_flags_comes_with_those_alone() -> None:
    shape = {"M": 1, "K": 2, "N": 3}
    problem = SimpleNamespace(EDGE_SHAPES=({**shape, "act": "relu"}, shape))
    (_, first, alone), (number, second, every) = edge_cases(LINEAR, problem)
    assert first == second == shape and alone == [{"act": "relu"}]
    assert number == 1 and len(every) == 8 and {} in every
    (_, _, alone), (_, _, every) = edge_cases(ASKED, problem, ["deterministic"])
    assert alone == [{"act": "relu", "deterministic": True}]
    assert len(every) == 8 and all(flags["deterministic"] for flags in every)


ASKED = dataclasses.replace(LINEAR, guarantees=("deterministic",))


def test_a_guarantee_is_an_option_that_variants_are_not_told() -> None:
    assert Signature.from_json(ASKED.to_json()) == ASKED
    assert [name for name, _ in ASKED.keywords] == ["act", "flip", "deterministic"]
    assert ASKED.complete_flags({"deterministic": False}) == {}
    flags = ASKED.complete_flags({"deterministic": True, "act": "relu", "bias": True})
    assert list(flags.items()) == [("bias", True), ("act", "relu"), ("deterministic", True)]
    assert ASKED.arguments(flags, {"M": 2, "K": 3, "N": 5}) == {"act": "relu"}
    assert list(flag_choices(ASKED)) == list(flag_choices(LINEAR))
    with pytest.raises(ValueError, match="deterministic must be one of False, True, but got 2"):
        ASKED.complete_flags({"deterministic": 2})


def test_a_variant_for_other_guarantees_is_nearer_than_one_for_other_options() -> None:
    entry = Entry({"M": 2, "K": 3, "N": 5}, "float32", {"act": "relu"}, {})
    assert entry.unlike({"act": "relu"}) == 0
    assert entry.unlike({"act": "relu", "deterministic": True}) == 1
    assert entry.unlike({}) == entry.unlike({"act": "relu", "flip": True}) == 2


@pytest.mark.parametrize(
    "text, arch",
    [
        ("vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 1\nmodel name : x", "amd_25_1"),
        ("vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143", "intel_6_143"),
        ("vendor_id : HygonGenuine\ncpu family : 24\nmodel : 4", "hygongenuine_24_4"),
        ("CPU implementer : 0x41\nCPU part : 0xd40", "0x41_0xd40"),
    ],
)
def test_cpu_architecture(tmp_path: Path, monkeypatch, text: str, arch: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    path = tmp_path / "cpuinfo"
    path.write_text(text + "\n\n" + text.replace("1", "2"))
    assert cpu_architecture(path) == f"x86_64_{arch}"
    assert cpu_architecture(tmp_path / "none") == "x86_64"


def test_slug() -> None:
    assert slug(" Some GPU (R) 9-X/2 ") == "some_gpu_r_9_x_2"


COPY = """\
#include <cstdint>
extern "C" void copy(const float* x, float* y, int64_t N, int32_t mode, double factor) {
  for (int64_t i = 0; i < N; ++i) y[i] = static_cast<float>(factor * x[i] + mode);
}
"""
COPY_SIGNATURE = Signature(
    "copy",
    (TensorSpec("x", ("N",)),),
    (TensorSpec("y", ("N",)),),
    flags=(("mode", ("none", "one")),),
    scalars=(("factor", "1.0"),),
)


def test_compile_once_and_call(tmp_path: Path) -> None:
    path = tmp_path / "copy.cpp"
    path.write_text(COPY)
    cache = tmp_path / "cache"
    cache.mkdir()
    variant = load_variant(COPY_SIGNATURE, "cpp", path=path, cache=cache)
    x, y = torch.arange(3.0), torch.empty(3)
    variant.bind({"x": x, "y": y}, {"N": 3}, {"mode": "one", "factor": 2.0})()
    assert y.tolist() == [1.0, 3.0, 5.0]
    (library,) = cache.iterdir()
    before = library.stat().st_mtime_ns
    assert cpp.compile_source(path, cache=cache) == library
    assert library.stat().st_mtime_ns == before
    path.write_text(COPY + "\n")
    assert cpp.compile_source(path, cache=cache) != library


def test_compile_error_is_the_compilers(tmp_path: Path) -> None:
    path = tmp_path / "wrong.cpp"
    path.write_text("int main( {")
    with pytest.raises(cpp.CompileError, match=r"wrong\.cpp:1:\d+: error:"):
        cpp.compile_source(path, cache=tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["wrong.cpp"]


def test_compiler_command(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    command = cpp.find_compiler(f"{wrapper} g++")
    assert command == (str(wrapper), "g++")
    assert cpp.compiler_version(command) == cpp.compiler_version(cpp.find_compiler("g++"))
    with pytest.raises(FileNotFoundError, match=r"looked for nonesuch; install g\+\+"):
        cpp.find_compiler("nonesuch")


def test_user_cache_is_private(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cpp.user_cache()
    assert folder == tmp_path / "cache" / "tuner" / "objects"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)  # readable by others: closed again
    assert cpp.user_cache().stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)  # writable by others: not to be trusted any more
    with pytest.raises(PermissionError, match="can be written by others"):
        cpp.user_cache()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a folder of this user"):
        cpp.user_cache()


def test_user_cache_without_a_home(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cpp.user_cache() == tmp_path / f"tuner-{os.getuid()}"


def test_compare(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def takes(milliseconds: float) -> Callable[[], None]:
        def call() -> None:
            now[0] += milliseconds * 1e-3

        return call

    ratio = compare(takes(1.0), takes(3.0), device=torch.device("cpu"))
    assert ratio.value == pytest.approx(3.0)
    assert ratio.low <= ratio.value <= ratio.high
    assert str(Ratio(1.5, 1.25, 2.0)) == "1.50x [1.25, 2.00]"
