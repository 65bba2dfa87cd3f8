"""Binaries stored in a package: first calls without a compiler, and with one where they differ."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from frozen import DEVICE, TEMPLATES, Project

from tuner.builders._triton_binaries import driver_library
from tuner.catalog import Catalog
from tuner.cli.packaging import prebuild_package
from tuner.package import drift
from tuner.package.freeze import freeze
from tuner.plan import frozen_kernel
from tuner.runtime import prebuilt
from tuner.runtime.triton_module import import_file
from tuner.space.kernel import load_space

ROOT = Path(__file__).parent.parent
FROZEN = ROOT / "kernels_generated"
CARD = "sm90"


def python(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run python where no compiler is to be found."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PATH": "", "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# C++


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, project: Project) -> Path:
    output = tmp_path_factory.mktemp("built") / "cpu_kernels"
    elsewhere = dataclasses.replace(DEVICE, arch="x86_64_intel_6_143")
    winners = [project.winner(), project.winner(M=64), project.winner(device=elsewhere)]
    freeze(winners, project.kernels, output, templates=TEMPLATES)
    assert prebuild_package(output, os.environ) == 0
    return output


@pytest.fixture
def package(tmp_path: Path, built: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / built.name))


CALL = (
    "import torch, cpu_kernels\n"
    "y, total = cpu_kernels.mix(torch.ones(8, 8), torch.ones(8), factor=3.0)\n"
    "assert (y == 3.0).all()\n"
)


def call(package: Path, *, change: str = "") -> subprocess.CompletedProcess:
    cache = package.parent / "cache"
    return python("-c", change + CALL, folder=package.parent, XDG_CACHE_HOME=str(cache))


def drifts(package: Path, project: Project) -> list[str]:
    return drift.check(package, project.kernels, project.renderer, templates=TEMPLATES)


def test_first_call_needs_no_cpp_compiler(package: Path, project: Project) -> None:
    result = call(package)
    assert result.returncode == 0, result.stderr
    assert not (package.parent / "cache").exists()
    assert drifts(package, project) == []


def test_another_cpu_asks_its_compiler(package: Path) -> None:
    change = (
        "import cpu_kernels._runtime.prebuilt as prebuilt\n"
        "prebuilt.cpu_flags = lambda: 'flags : fewer'\n"
    )
    result = call(package, change=change)
    assert "no C++ compiler: looked for g++" in result.stderr


def test_another_source_asks_the_compiler(package: Path) -> None:
    for path in package.glob(f"mix/{DEVICE.arch}/*.cpp"):
        path.write_text(path.read_text() + "\n")
    assert "no C++ compiler: looked for g++" in call(package).stderr


def test_a_library_that_does_not_load_is_built_again(package: Path, project: Project) -> None:
    (library,) = package.glob("mix/*/aot/*/*/*.so")
    library.write_bytes(b"no library")
    assert drifts(package, project) == [f"{library}: changed since it was built"]
    assert "no C++ compiler: looked for g++" in call(package).stderr


def test_what_is_for_another_cpu_is_left_to_its_compiler(tmp_path, project, capsys) -> None:
    elsewhere = dataclasses.replace(DEVICE, arch="x86_64_intel_6_143")
    winners = [project.winner(device=elsewhere)]
    freeze(winners, project.kernels, tmp_path / "other", templates=TEMPLATES)
    assert prebuild_package(tmp_path / "other", os.environ) == 1
    said = capsys.readouterr().err
    assert "left to the compiler: a compiler builds for the CPU that it runs on, which is" in said
    assert not list(tmp_path.glob("other/*/*/aot"))


def test_binaries_stay_as_long_as_their_variant(package: Path, project: Project) -> None:
    aot = package / "mix" / DEVICE.arch / "aot"
    before = sorted(aot.rglob("*"))
    freeze([project.winner(M=32)], project.kernels, package, templates=TEMPLATES)
    assert sorted(aot.rglob("*")) == before
    stray = aot / "stray.so"
    stray.write_bytes(b"")
    assert drifts(package, project) == [f"{stray}: nothing refers to it"]
    changed = [project.winner(M=m, waste=1) for m in (8, 32, 64)]
    freeze(changed, project.kernels, package, templates=TEMPLATES)
    assert not aot.exists()
    assert drifts(package, project) == []


def test_a_missing_binary_is_a_drift(package: Path, project: Project) -> None:
    (library,) = package.glob("mix/*/aot/*/*/*.so")
    library.unlink()
    assert drifts(package, project) == [f"{library}: missing"]
    assert prebuild_package(package, os.environ) == 0
    assert drifts(package, project) == []


# Triton


KERNELS = ("softmax_backward", "matmul")


@pytest.fixture(scope="module")
def triton_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a package of another name with one variant of each language, and binaries."""
    output = tmp_path_factory.mktemp("triton") / "card_kernels"
    for name in ("_runtime", *(f"{kernel}/{CARD}" for kernel in KERNELS)):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(FROZEN / name, output / name, ignore=ignored)
    for kernel in KERNELS:
        for name in ("kernel.json", "problem.py"):
            shutil.copy(FROZEN / kernel / name, output / kernel)
        path = output / kernel / CARD / "manifest.json"
        data = json.loads(path.read_text())
        languages = {entry["language"]: entry for entry in reversed(data["workloads"])}
        path.write_text(json.dumps({**data, "workloads": list(languages.values())}))
    catalog = Catalog()
    kernels = [frozen_kernel(catalog, load_space(catalog.space_path(name))) for name in KERNELS]
    freeze([], kernels, output, templates=TEMPLATES)
    assert prebuild_package(output, os.environ) == 0
    return output


def workload_of(package: Path, kernel: str, language: str) -> tuple[str, dict]:
    """Return the file of a language with its workload."""
    data = json.loads((package / kernel / CARD / "manifest.json").read_text())
    return next(
        (entry["file"], entry["workload"])
        for entry in data["workloads"]
        if entry["language"] == language
    )


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the launchers link with."""
    from triton.backends.nvidia import driver

    header = Path(driver.__file__).parent / "include" / "cuda.h"
    return driver_library(header, tmp_path_factory.mktemp("libcuda"))


def launch(
    package: Path,
    kernel: str,
    libcuda: Path,
    *version: str,
    language: str = "triton",
    **environment: str,
) -> subprocess.CompletedProcess:
    """Call a variant up to the card's driver, in a process where asking a compiler is an error."""
    file, workload = workload_of(package, kernel, language)
    path = package / kernel / CARD / file
    return python(
        ROOT / "tests" / "prebuilt_child.py",
        *(package, kernel, path, json.dumps(workload), *version),
        folder=package.parent,
        TRITON_CACHE_DIR=str(package.parent / "triton_cache"),
        LD_LIBRARY_PATH=str(libcuda),
        **environment,
    )


@pytest.mark.parametrize(
    "kernel, language",
    [("softmax_backward", "triton"), ("matmul", "triton"), ("matmul", "gluon")],
)
def test_first_launch_needs_no_compiler(
    triton_package: Path, libcuda: Path, kernel: str, language: str
) -> None:
    result = launch(triton_package, kernel, libcuda, language=language)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)
    assert not (triton_package.parent / "triton_cache").exists()


AHEAD = """
import json, sys
from pathlib import Path
from tuner.builders.triton import TritonBuilder
from tuner.catalog import Catalog
from tuner.devices.cuda import Cuda
from tuner.plugins import BuildTask
from tuner.records import Workload
from tuner.space.kernel import load_space

kernel, path, text = sys.argv[1:]
values = json.loads(text)
pairs = {name: tuple(values[name].items()) for name in ("dims", "flags")}
TritonBuilder().compile(
    BuildTask(
        path=Path(path),
        signature=load_space(Catalog().space_path(kernel)).signature,
        workload=Workload(kernel, dtype=values["dtype"], **pairs),
        device=Cuda.target("90"),
        cache=Path(path).parent,
    )
)
"""


def test_what_is_compiled_ahead_is_launched_without_a_compiler(
    tmp_path: Path, triton_package: Path, libcuda: Path
) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "aot")
    package = tmp_path / triton_package.name
    shutil.copytree(triton_package, package, ignore=ignored)
    file, workload = workload_of(package, "matmul", "gluon")
    options = {"language": "gluon", "PATH": os.environ["PATH"]}
    assert launch(package, "matmul", libcuda, **options).stderr == "a compiler was asked\n"
    result = python(
        *("-c", AHEAD, "matmul", package / "matmul" / CARD / file, json.dumps(workload)),
        folder=ROOT,
        PATH=os.environ["PATH"],
        TRITON_CACHE_DIR=str(tmp_path / "triton_cache"),
        LD_LIBRARY_PATH=str(libcuda),
    )
    assert result.returncode == 0, result.stderr
    result = launch(package, "matmul", libcuda, **options)
    assert result.returncode == 0, result.stderr


def test_building_again_gives_the_same_bytes(triton_package: Path) -> None:
    def contents() -> dict[Path, bytes]:
        files = triton_package.glob("*/*/aot/**/*")
        return {path: path.read_bytes() for path in files if path.is_file()}

    before = contents()
    assert any(path.suffix == ".so" for path in before)
    for folder in triton_package.glob("*/*/aot"):
        shutil.rmtree(folder)
    assert prebuild_package(triton_package, os.environ) == 0
    assert contents() == before


def test_packages_share_a_process_and_the_users_cache(tmp_path: Path, monkeypatch) -> None:
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    monkeypatch.setattr(knobs.cache, "manager_class", None)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    key = "00" * 32
    name = get_cache_manager(key).key
    shutil.rmtree(tmp_path / "cache")
    runtimes = [import_file(Path(prebuilt.__file__), f"tuner.runtime.of_{n}") for n in range(2)]
    for number, runtime in enumerate([*runtimes, runtimes[0]]):
        variant = tmp_path / f"kernel_{number}.py"
        folder = prebuilt.folder_of(variant)
        folder.mkdir(parents=True)
        if number == 1:
            (folder / name).mkdir()
            (folder / name / "f.json").write_bytes(b"binary")
        runtime.offer_to_triton(variant)
    cache = get_cache_manager(key)
    stored = str(tmp_path / "aot" / "kernel_1" / name / "f.json")
    assert cache.get_group("f.json") == {"f.json": stored}
    assert cache.get_file("f.json") == stored
    assert not (tmp_path / "cache").exists()
    assert cache.get_file("g.json") is None
    assert Path(cache.put("text", "g.json", binary=False)).parent == tmp_path / "cache" / name
    assert Path(get_cache_manager(key).get_file("g.json")).read_text() == "text"


def test_another_triton_asks_its_compiler(triton_package: Path, libcuda: Path) -> None:
    result = launch(triton_package, "softmax_backward", libcuda, "another version")
    assert (result.returncode, result.stderr) == (1, "a compiler was asked\n")


CALLS = """
import json, sys
from pathlib import Path
import torch
from triton import knobs
import card_kernels

seen = []
knobs.compilation.listener = lambda **facts: seen.append(facts["cache_hit"])
for kernel, workload in json.loads(sys.argv[1]):
    own = card_kernels._package.kernels[kernel]
    dtype = getattr(torch, workload["dtype"])
    inputs = [
        torch.randn(shape, device="cuda").to(dtype)
        for _, shape in own.signature.shapes(own.signature.inputs, workload["dims"])
    ]
    output = getattr(card_kernels, kernel)(*inputs)
    if kernel == "matmul":
        torch.testing.assert_close(output, inputs[0] @ inputs[1], rtol=0.02, atol=0.5)
torch.cuda.synchronize()
print(json.dumps(seen))
"""


@pytest.mark.gpu
def test_first_calls_on_the_card_compile_nothing(triton_package: Path) -> None:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"what is frozen here is for {CARD}")
    calls = [
        (kernel, entry["workload"])
        for kernel in KERNELS
        for entry in json.loads((triton_package / kernel / CARD / "manifest.json").read_text())[
            "workloads"
        ]
    ]
    cache = triton_package.parent / "empty_cache"
    result = python(
        *("-c", CALLS, json.dumps(calls)),
        folder=triton_package.parent,
        TRITON_CACHE_DIR=str(cache),
    )
    assert result.returncode == 0, result.stderr
    hits = json.loads(result.stdout)
    assert len(hits) >= len(calls)
    assert all(hits)
    assert not cache.exists()
