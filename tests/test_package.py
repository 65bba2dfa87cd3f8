"""The frozen package, imported and called: torch, a C++ compiler and no tuner."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from frozen import DEVICE, TEMPLATES, Project
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.package.freeze import freeze
from tuner.records import Source
from tuner.runtime.architecture import cpu_architecture

ARCH = cpu_architecture()
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def object_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def folder(tmp_path: Path, project: Project) -> Path:
    """Return a package of its own name, so that its operations meet no others."""
    output = tmp_path / f"frozen_{next(_numbers)}"
    winners = [
        project.winner(),
        project.winner(M=64, N=64, waste=1, negate=True),
        project.winner("mix_backward"),
    ]
    freeze(winners, project.kernels, output, templates=TEMPLATES)
    return output


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(folder.parent))
    return importlib.import_module(folder.name)


def expected(a: Tensor, b: Tensor, *, negate=False, power="linear", factor=None) -> Tensor:
    factor = a.shape[1] ** -0.5 if factor is None else factor
    return (-factor if negate else factor) * (a * a if power == "square" else a) * b


def run_python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_needs_no_tuner_and_compiles_nothing(folder: Path, tmp_path: Path) -> None:
    code = (
        f"import sys, {folder.name} as package\n"
        "assert not {'tuner', 'triton', 'jinja2'} & set(sys.modules), 'loads too much'\n"
        "assert callable(package.mix)\n"
    )
    result = run_python(
        folder.parent, "-c", code, PATH="", XDG_CACHE_HOME=str(tmp_path / "elsewhere")
    )
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_public_names(package: ModuleType) -> None:
    assert package.__all__ == ["blend", "mix", "mix_backward"]
    assert "mix of a and b." in package.mix.__doc__
    assert package.mix.__annotations__["a"] == "Tensor"


def test_another_name_and_a_parent_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = tmp_path / f"parent_{folder.name}" / "kernels"
    folder.rename(tmp_path / "moved")
    nested.parent.mkdir()
    (tmp_path / "moved").rename(nested)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(f"{nested.parent.name}.kernels")
    a, b = torch.randn(3, 5), torch.randn(5)
    torch.testing.assert_close(package.blend(a, b), expected(a, b))
    assert package.mix.op.namespace == f"{nested.parent.name}_kernels"


@pytest.mark.parametrize(
    "options",
    [{}, {"negate": True}, {"power": "square"}, {"factor": 3.0}, {"factor": 2, "negate": True}],
    ids=str,
)
def test_results(package: ModuleType, options: dict) -> None:
    a, b = torch.randn(5, 6), torch.randn(6)
    y, total = package.mix(a, b, **options)
    torch.testing.assert_close(y, expected(a, b, **options))
    torch.testing.assert_close(total, y.sum(1))
    torch.testing.assert_close(package.mix.op(a, b, **options)[0], y, rtol=0, atol=0)


@pytest.mark.parametrize("m, n", [(0, 4), (3, 0), (0, 0), (1, 1), (7, 97)])
def test_shapes(package: ModuleType, m: int, n: int) -> None:
    a, b = torch.randn(m, n), torch.randn(n)
    y, total = package.mix(a, b, factor=1.0)
    torch.testing.assert_close(y, a * b)
    torch.testing.assert_close(total, (a * b).sum(1))


def test_strides_and_alignment(package: ModuleType) -> None:
    a, b = torch.randn(6, 4).T, torch.randn(12)[::2]
    torch.testing.assert_close(package.blend(a, b), expected(a, b))
    a, b = torch.randn(25)[1:].view(4, 6), torch.randn(7)[1:]
    torch.testing.assert_close(package.blend(a, b), expected(a, b))
    a, b = torch.randn(6).expand(4, 6), torch.randn(1).expand(6)
    torch.testing.assert_close(package.blend(a, b), expected(a, b))


def test_negative_bit(package: ModuleType) -> None:
    a = torch.randn(4, 6, dtype=torch.complex64).conj().imag
    b = torch.randn(6)
    assert a.is_neg()
    torch.testing.assert_close(package.blend(a, b), expected(a, b))


@pytest.mark.parametrize(
    "a, b, options, error, message",
    [
        ((3, 4), (5,), {}, ValueError, "N of b is 5, but the inputs before it say N=4"),
        ((3,), (3,), {}, ValueError, r"a must have the shape \[M, N\], but got \[3\]"),
        (
            (3, 201),
            (201,),
            {},
            ValueError,
            "`N % 2 == 0 or N < 100` must hold, but got M=3, N=201",
        ),
        ((3, 4), (4,), {"power": "cube"}, ValueError, "power must be one of 'linear', 'square'"),
    ],
)
def test_wrong_arguments(
    package: ModuleType, a: tuple, b: tuple, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        package.mix(torch.randn(a), torch.randn(b), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32, torch.bfloat16])
def test_no_variant_for_a_dtype(package: ModuleType, dtype: torch.dtype) -> None:
    a, b = torch.ones(2, 2, dtype=dtype), torch.ones(2, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(NotImplementedError, match=f"mix has no variant for {name} on .*; it has "):
        package.mix(a, b)


def test_mixed_dtypes_and_devices(package: ModuleType) -> None:
    a, b = torch.ones(2, 2), torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="b must be float32 here, but got bfloat16$"):
        package.mix(a, b)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match="autocast does not convert its inputs"),
    ):
        package.mix(a, b)
    with pytest.raises(ValueError, match="must be on one device, but b is on meta"):
        package.mix(a, torch.ones(2, device="meta"))


def test_chosen(package: ModuleType) -> None:
    exact = package.mix.chosen(M=8, N=8)
    assert exact.reason == "exact"
    assert exact.workload == "M=8,N=8,negate=false,power=linear,dtype=float32"
    assert (exact.median_ms, exact.low_ms, exact.high_ms) == (1.0, 0.9, 1.1)
    assert str(exact) == (
        f"mix/{ARCH}/{exact.file} (exact M=8,N=8,negate=false,power=linear,dtype=float32, "
        "1 ms [0.9, 1.1])"
    )
    near = package.mix.chosen(M=50)  # N is 2 * M by default
    assert (near.reason, near.file) == ("nearest", exact.file)
    assert "nearest: tuned for M=8,N=8" in str(near)
    other_flags = package.mix.chosen(M=60, N=60, power="square")
    assert other_flags.reason == "nearest"
    assert other_flags.workload.startswith("M=64,N=64,negate=true")
    assert package.blend.chosen(M=8, N=8) == exact


def test_chosen_asks_for_no_dtype_that_only_another_kind_of_device_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / "mix" / ARCH
    data = json.loads((own / "manifest.json").read_text())
    data["device"]["kind"] = "cuda"
    data["defaults"] = dict.fromkeys(("bfloat16", "float16"), data["defaults"]["float32"])
    for entry in data["workloads"]:
        entry["workload"]["dtype"] = "bfloat16"
    (folder / "mix" / "sm00").mkdir()
    (folder / "mix" / "sm00" / "manifest.json").write_text(json.dumps(data))
    monkeypatch.syspath_prepend(str(folder.parent))
    mix = importlib.import_module(folder.name).mix
    assert mix.chosen(M=8, N=8, device="cpu").reason == "exact"
    assert mix.chosen(M=8, N=8, dtype="float32", device="cpu").reason == "exact"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"M": 8, "K": 1}, "unknown dim K; known: M, N"),
        ({"N": 8}, "no extent for M"),
        ({"M": 8, "power": "cube"}, "power must be one of 'linear', 'square', but got 'cube'"),
    ],
)
def test_chosen_wrong_arguments(package: ModuleType, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        package.mix.chosen(**values)


def test_unknown_architecture_warns_once(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = importlib.import_module(f"{package.__name__}._runtime.dispatch")
    monkeypatch.setattr(dispatch, "architecture", lambda _: "sparc_1")
    a, b = torch.randn(8, 8), torch.randn(8)
    with pytest.warns(
        UserWarning, match="mix was not tuned for float32 on sparc_1.*`tune --device cpu`"
    ):
        torch.testing.assert_close(package.blend(a, b), expected(a, b))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package.mix(torch.randn(9, 8), b)
        choice = package.mix.chosen(M=8, N=8)
    assert (choice.reason, choice.workload) == ("default", None)
    manifest = json.loads(
        Path(package.__file__).with_name("mix").joinpath(ARCH, "manifest.json").read_text()
    )
    assert choice.file == manifest["defaults"]["float32"]["file"]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(package: ModuleType, requires_grad: bool) -> None:
    a = torch.randn(5, 6, requires_grad=requires_grad)
    b = torch.randn(6, requires_grad=requires_grad)
    opcheck(package.mix.op, (a, b))
    opcheck(package.mix.op, (a, b), {"negate": True, "power": "square", "factor": 0.3})
    opcheck(package.mix_backward.op, (a.detach(), b.detach(), torch.randn(5, 6)))


def test_compile(package: ModuleType) -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        y = package.blend(a.relu(), b, power="square", factor=0.5)
        return package.mix(y, b, negate=True)[1] * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for m, n in ((4, 6), (9, 8)):
        a, b = torch.randn(m, n), torch.randn(n)
        torch.testing.assert_close(compiled(a, b), step(a, b))


def test_compiled_gradients(package: ModuleType) -> None:
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    compiled = torch.compile(
        lambda a, b: package.blend(a, b, power="square").sin().sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    got = torch.autograd.grad(compiled(a, b), (a, b))
    wanted = torch.autograd.grad(expected(a, b, power="square").sin().sum(), (a, b))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("options", [{}, {"negate": True, "power": "square", "factor": 0.3}])
def test_gradients(package: ModuleType, options: dict) -> None:
    a, b = torch.randn(5, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    gradient = torch.randn(6, 5).T
    got = torch.autograd.grad(package.blend(a, b, **options), (a, b), gradient)
    wanted = torch.autograd.grad(expected(a, b, **options), (a, b), gradient)
    torch.testing.assert_close(got, wanted)
    (got,) = torch.autograd.grad(package.blend(a, b.detach(), **options).sum(), a)
    (wanted,) = torch.autograd.grad(expected(a, b, **options).sum(), a)
    torch.testing.assert_close(got, wanted)


def test_what_has_no_gradient(package: ModuleType) -> None:
    a, b = torch.randn(5, 6, requires_grad=True), torch.randn(6)
    y, total = package.mix(a, b)
    assert y.requires_grad
    assert not total.requires_grad
    (da,) = torch.autograd.grad(package.blend(a, b).sum(), a, create_graph=True)
    da.requires_grad_()
    a.requires_grad_()
    dy = torch.randn(5, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match="mix_backward has no derivative"):
        package.mix_backward(a, b, dy)[0].sum().backward()


def test_second_derivative_is_refused(package: ModuleType) -> None:
    a, b = torch.randn(5, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    loss = package.blend(a, b, power="square").square().sum()
    (da,) = torch.autograd.grad(loss, a, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not available"):
        da.sum().backward()


def test_a_package_without_the_backward_kernel_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / "mix_backward")
    monkeypatch.syspath_prepend(str(folder.parent))
    freeze([], [], folder, templates=TEMPLATES)
    mix = importlib.import_module(folder.name).mix
    a, b = torch.randn(5, 6, requires_grad=True), torch.randn(6)
    with pytest.raises(RuntimeError, match="lacks mix_backward: `tune mix_backward` adds it"):
        mix(a, b)[0].sum().backward()


def test_modes_and_profilers_see_the_operation(package: ModuleType) -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    a, b = torch.randn(4, 6), torch.randn(6)
    with Watch():
        package.mix(a, b)
    assert seen == [package.mix.op]
    with torch.profiler.profile() as profile:
        package.mix(a, b)
    name = f"{package.__name__}::mix"
    assert name in {event.name for event in profile.events()}
    assert package.mix(a.to("meta"), b.to("meta"))[0].shape == (4, 6)
    exported = torch.export.export(_Mixer(package.mix), (a, b))
    torch.testing.assert_close(exported.module()(a, b), package.mix(a, b)[0])


class _Mixer(torch.nn.Module):
    def __init__(self, mix) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.mix(a, b)[0]


def test_first_calls_in_many_threads(package: ModuleType) -> None:
    a, b = torch.randn(8, 8), torch.randn(8)
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(package.blend(a, b))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results:
        torch.testing.assert_close(result, expected(a, b))


PYTHON_TEXT = '''\
"""Stands for a Triton file: a host function that writes its outputs."""

STRIDED = ("a",)
seen = []


def mix(a, b, y, total, *, negate, power, factor):
    seen.append((a.stride(), b.stride()))
    y.copy_((-factor if negate else factor) * (a * a if power == "square" else a) * b)
    total.copy_(y.sum(1))
'''


def test_a_host_function_gets_strided_what_it_asks_for(
    project: Project, folder: Path, package: ModuleType, capsys
) -> None:
    source = Source("mix", "triton", PYTHON_TEXT)
    freeze([project.winner(source=source)], project.kernels, folder, templates=TEMPLATES)
    assert package.mix.chosen(M=8, N=8).file == f"cpu_{source.sha256[:8]}.py"
    a, b = torch.randn(8, 8).T, torch.randn(16)[::2]
    torch.testing.assert_close(package.mix(a, b)[0], expected(a, b))
    seen = next(iter(package._package.kernels["mix"]._variants.values())).module.seen
    assert seen == [((1, 8), (1,))]
    verify(package, "--kernel", "mix")  # torch is slower than the default, and as right
    file = package.mix.chosen(M=8, N=8).file
    assert f"mix edge-shapes,dtype=float32 {ARCH}/{file} PASS 16 cases" in capsys.readouterr().out


def test_another_torch_without_the_inner_names(package: ModuleType, monkeypatch) -> None:
    shortcut = importlib.import_module(f"{package.__name__}._runtime.shortcut")
    monkeypatch.setattr(shortcut, "_C", object())
    assert shortcut.with_shortcut(package.mix.op, None, label="x") is package.mix.op


def test_reload(package: ModuleType) -> None:
    package = importlib.reload(package)
    a, b = torch.randn(8, 8), torch.randn(8)
    torch.testing.assert_close(package.mix.op(a, b)[0], expected(a, b))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("PATH", "/nonexistent", "no C++ compiler: looked for g++, clang++; install g++"),
        ("CXX", "nonesuch -O1", "no C++ compiler: looked for nonesuch"),
    ],
)
def test_without_a_compiler(
    package: ModuleType, monkeypatch, capsys, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        package.mix(torch.ones(2, 2), torch.ones(2))
    assert verify(package) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def verify(package: ModuleType, *arguments: str) -> int:
    selftest = importlib.import_module(f"{package.__name__}._runtime.selftest")
    return selftest.main(package._package, ["verify", *arguments])


def test_verify(folder: Path) -> None:
    result = run_python(folder.parent, "-m", folder.name, "verify", "--kernel", "mix")
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert lines[-1] == f"5 passed, 0 failed on {ARCH}"
    assert lines[0].startswith("mix M=8,N=8,negate=false,power=linear,dtype=float32 ")
    assert all(" PASS " in line for line in lines[:-1])


def test_verify_finds_what_changed_or_is_wrong_or_slow(
    folder: Path, project: Project, package: ModuleType, capsys
) -> None:
    foreign = dataclasses.replace(DEVICE, kind="cuda", arch="sm90")
    winners = [project.winner(M=256, N=256, waste=3000), project.winner(device=foreign)]
    freeze(winners, project.kernels, folder, templates=TEMPLATES)
    changed = folder / "mix" / ARCH / file_of(folder, waste=1)
    changed.write_text(changed.read_text() + "\n")
    problem = folder / "mix_backward" / "problem.py"
    problem.write_text(problem.read_text().replace('"da": da', '"da": da + 1'))
    assert verify(package) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if " FAIL " in line]
    for kernel, subject, note in (
        ("mix", "M=64,", "the file is not the one that was timed: its sha256 differs"),
        ("mix", "edge-shapes", "the file is not the one that was timed: its sha256 differs"),
        ("mix", "M=256,", "the default's speed, slower"),
        ("mix_backward", "M=8,", "64 of 64 elements are wrong"),
        ("mix_backward", "edge-shapes", "elements are wrong"),
    ):
        assert any(line.startswith(f"{kernel} {subject}") and note in line for line in failed), (
            subject,
            lines,
        )
    assert lines[-1].endswith(f"failed on {ARCH}; not here: sm90")


def file_of(folder: Path, *, waste: int) -> str:
    manifest = json.loads((folder / "mix" / ARCH / "manifest.json").read_text())
    return next(
        entry["file"]
        for entry in manifest["workloads"]
        if entry["candidate"]["parameters"] == {"WASTE": waste}
    )
