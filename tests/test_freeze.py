"""Winners to a package: same bytes, merged, whole at every moment, drifts found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from frozen import DEVICE, MIX, MIX_BACKWARD, TEMPLATES, Project

from tuner.package import drift, freeze
from tuner.package.freeze import Autograd
from tuner.package.functions import check_backward, functions_of
from tuner.records import UsageError

OTHER = dataclasses.replace(DEVICE, arch="x86_64_intel_6_143")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def freeze_into(output: Path, project: Project, *winners) -> None:
    freeze.freeze(winners, project.kernels, output, templates=TEMPLATES)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def manifest_of(output: Path, arch: str = DEVICE.arch, kernel: str = "mix") -> dict:
    return json.loads((output / kernel / arch / "manifest.json").read_text())


def drifts(output: Path, project: Project) -> list[str]:
    return drift.check(output, project.kernels, project.renderer, templates=TEMPLATES)


def test_layout_and_evidence(output: Path, project: Project) -> None:
    winner = project.winner()
    freeze_into(output, project, winner)
    names = {name for name in contents(output) if not name.startswith("_runtime/")}
    file, default = (f"cpu_{source.sha256[:8]}.cpp" for source in (winner.source, winner.default))
    assert names == {
        *("__init__.py", "__main__.py", "moe.py", "py.typed", "mix/kernel.json"),
        "mix/problem.py",
        *(f"mix/{DEVICE.arch}/{name}" for name in (file, default, "manifest.json")),
    }
    assert (output / "mix" / DEVICE.arch / file).read_text() == winner.source.text
    manifest = manifest_of(output)
    (entry,) = manifest["workloads"]
    assert entry["sha256"] == winner.source.sha256
    assert entry["default"]["measurement"]["median_ms"] == 2.0
    assert entry["rival"]["ratio"]["low"] == 1.4
    assert entry["versions"] == {"torch": "2.13.0", "g++": "12.2.0"}
    assert manifest["defaults"]["float32"]["file"] == default
    assert manifest["device"]["limits"] == {"threads": 2, "l1_bytes": 32768}
    assert (output / "mix" / "problem.py").read_bytes() == project.kernels[0].problem.read_bytes()


def test_runtime_is_copied(output: Path, project: Project) -> None:
    freeze_into(output, project, project.winner())
    copied = contents(output / "_runtime")
    sources = ROOT / "tuner" / "runtime"
    assert copied == {
        str(path.relative_to(sources)): path.read_bytes() for path in sources.rglob("*.py")
    }
    imports = re.findall(
        r"^\s*(?:from|import) ([\w.]+)", b"\n".join(copied.values()).decode(), re.M
    )
    outside = {name.split(".")[0] for name in imports if not name.startswith(".")}
    assert outside <= {"torch", "triton", "numpy", *sys.stdlib_module_names}


def test_freezing_twice_gives_the_same_bytes(tmp_path: Path, project: Project) -> None:
    winners = [project.winner(), project.winner(M=9), project.winner("mix_backward")]
    freeze_into(tmp_path / "one", project, *winners)
    before = contents(tmp_path / "one")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").rglob("*.*")}
    freeze_into(tmp_path / "one", project, *winners)
    assert contents(tmp_path / "one") == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
    for winner in reversed(winners):
        freeze_into(tmp_path / "two", project, winner)
    assert contents(tmp_path / "two") == before
    assert all(data.endswith(b"\n") for name, data in before.items() if name != "py.typed")
    assert drifts(tmp_path / "one", project) == []


def test_merges(output: Path, project: Project) -> None:
    freeze_into(output, project, project.winner(), project.winner(M=9, waste=1))
    freeze_into(output, project, project.winner(device=OTHER, waste=2))
    freeze_into(output, project, project.winner("mix_backward"))
    freeze_into(output, project, project.winner(waste=3, negate=True))
    freeze_into(output, project, project.winner(M=9, waste=4, date="2026-02-03"))
    found = [
        (entry["workload"]["dims"]["M"], entry["candidate"]["parameters"]["WASTE"], entry["date"])
        for entry in manifest_of(output)["workloads"]
    ]
    assert found == [(8, 0, "2026-01-02"), (9, 4, "2026-02-03"), (8, 3, "2026-01-02")]
    assert len(manifest_of(output, OTHER.arch)["workloads"]) == 1
    assert "def blend(" in (output / "__init__.py").read_text()
    # the variant that lost its workload is gone, all others are there
    used = {
        item["file"]
        for entry in manifest_of(output)["workloads"]
        for item in (entry, entry["default"])
    }
    assert {path.name for path in (output / "mix" / DEVICE.arch).glob("*.cpp")} == used


def test_defaults_are_kept_per_dtype(output: Path, project: Project) -> None:
    kernel = dataclasses.replace(project.kernels[0], dtypes={"cpu": ("float32", "float64")})
    winners = [project.winner()]
    freeze.freeze(winners, [kernel], output, templates=TEMPLATES)
    defaults = manifest_of(output)["defaults"]
    assert list(defaults) == ["float32", "float64"]
    assert defaults["float32"] == defaults["float64"]


@pytest.mark.parametrize("name", ["my-kernels", "1kernels", "class", "a.b"])
def test_refuses_a_name_that_cannot_be_imported(
    tmp_path: Path, project: Project, name: str
) -> None:
    with pytest.raises(UsageError, match=f"'{name}' cannot be imported"):
        freeze_into(tmp_path / name, project, project.winner())


@pytest.mark.parametrize("name", ["torch", "json"])
def test_refuses_the_name_of_what_packages_import(
    tmp_path: Path, project: Project, name: str
) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is the name of another module"):
        freeze_into(tmp_path / name, project, project.winner())


def test_refuses_a_folder_of_something_else(output: Path, project: Project) -> None:
    output.mkdir()
    freeze_into(output, project, project.winner())  # an empty folder will do
    other = output.with_name("other")
    (other / "_runtime").mkdir(parents=True)
    (other / "_runtime" / "__init__.py").write_text('"""Somebody else\'s."""\n')
    before = contents(other)
    with pytest.raises(UsageError, match="other is not a package of frozen kernels"):
        freeze_into(other, project, project.winner())
    with pytest.raises(UsageError, match="other is not a package of frozen kernels"):
        drifts(other, project)
    assert contents(other) == before


def test_refuses_another_version_of_the_format(output: Path, project: Project) -> None:
    freeze_into(output, project, project.winner())
    path = output / "mix" / DEVICE.arch / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    with pytest.raises(UsageError, match="schema_version 7, but this tuner writes 1"):
        freeze_into(output, project, project.winner())


def test_a_changed_signature_drops_old_variants(output: Path, project: Project) -> None:
    freeze_into(output, project, project.winner(), project.winner(M=9))
    signature = dataclasses.replace(MIX, scalars=(("factor", "1.0"),))
    project.kernels[0] = dataclasses.replace(project.kernels[0], signature=signature)
    freeze_into(output, project, project.winner(M=10))
    assert [item["workload"]["dims"]["M"] for item in manifest_of(output)["workloads"]] == [10]
    freeze_into(output, project, project.winner(device=OTHER))
    project.kernels[0] = dataclasses.replace(project.kernels[0], signature=MIX)
    before = contents(output)
    with pytest.raises(UsageError, match=f"variants of {OTHER.arch} have the old one"):
        freeze_into(output, project, project.winner())
    assert contents(output) == before


def assert_whole(output: Path) -> None:
    """Every file that the package refers to is there and is the one that was timed."""
    if not output.exists():
        return
    assert (output / "__init__.py").is_file()
    kernels = re.findall(r'register\("(\w+)"\)', (output / "__init__.py").read_text())
    assert kernels
    for kernel in kernels:
        assert json.loads((output / kernel / "kernel.json").read_text())["signature"]
        assert (output / kernel / "problem.py").is_file()
        manifests = list((output / kernel).glob("*/manifest.json"))
        assert manifests
        for path in manifests:
            manifest = json.loads(path.read_text())
            items = [*manifest["defaults"].values(), *manifest["workloads"]]
            items += [entry["default"] for entry in manifest["workloads"]]
            for item in items:
                data = (path.parent / item["file"]).read_bytes()
                assert hashlib.sha256(data).hexdigest() == item["sha256"]


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the file system fail for good after some changes of it; return the cure."""
    left = [steps]

    def counted(function):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*arguments, **options)

        return call

    for name in ("write_bytes", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    return monkeypatch.undo


@pytest.mark.parametrize("fresh", [True, False])
def test_killed_at_every_step(tmp_path: Path, project: Project, fresh: bool) -> None:
    new = [project.winner(waste=5), project.winner(M=9), project.winner("mix_backward")]
    for steps in range(200):
        output = tmp_path / f"kernels_{steps}"
        if not fresh:
            freeze_into(output, project, project.winner(), project.winner(M=9, waste=1))
            (output / "_runtime" / "kernel.py").write_text("an older version")
        with pytest.MonkeyPatch.context() as monkeypatch:
            undo = killed_after(steps, monkeypatch)
            try:
                freeze_into(output, project, *new)
                finished = True
            except Killed:
                finished = False
            undo()
        assert_whole(output)
        freeze_into(output, project, *new)
        assert drifts(output, project) == []
        if finished:
            return
    raise AssertionError("200 steps were not enough")


@pytest.mark.parametrize("seed", range(3))
def test_killed_for_good(tmp_path: Path, project: Project, seed: int) -> None:
    code = (
        "import itertools, sys; from pathlib import Path\n"
        "from tests.frozen import Project, TEMPLATES; from tuner.package.freeze import freeze\n"
        "folder = Path(sys.argv[1]); project = Project(folder / 'copy'); print('go', flush=True)\n"
        "for i in itertools.count():\n"
        "    winners = [project.winner(M=i % 7, waste=i % 11), project.winner('mix_backward')]\n"
        "    freeze(winners, project.kernels, folder / 'kernels', templates=TEMPLATES)\n"
    )
    (tmp_path / "copy").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert_whole(tmp_path / "kernels")
    freeze_into(tmp_path / "kernels", project, project.winner())
    assert_whole(tmp_path / "kernels")
    assert not list(tmp_path.rglob("*.part"))


def test_two_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.frozen import Project, TEMPLATES; from tuner.package.freeze import freeze\n"
        "folder, first = Path(sys.argv[1]), int(sys.argv[2])\n"
        "project = Project(folder / sys.argv[2])\n"
        "for i in range(first, first + 10):\n"
        "    freeze([project.winner(M=i)], project.kernels, folder / 'k', templates=TEMPLATES)\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), first], cwd=ROOT)
        for first in ("0", "100")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(manifest_of(tmp_path / "k")["workloads"]) == 20


def append(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize(
    "pattern, change, message",
    [
        ("kernels/_runtime/cpp.py", append, "cpp.py: out of date"),
        ("kernels/_runtime/cpp.py", Path.unlink, "cpp.py: missing"),
        ("kernels/__init__.py", append, "__init__.py: out of date"),
        ("kernels/mix/problem.py", append, "problem.py: out of date"),
        ("kernels/mix/kernel.json", append, "kernel.json: out of date"),
        ("mix.py", append, "problem.py: out of date"),
        ("kernels/mix/*/cpu_*.cpp", append, "changed since it was timed"),
        ("kernels/mix/*/cpu_*.cpp", Path.unlink, ".cpp: missing"),
        (
            "templates/mix/cpu.cpp.j2",
            lambda path: path.write_text("{{ WASTE }}"),
            "cpu(WASTE=0) renders to another text since it was timed",
        ),
        (
            "templates/mix/cpu.cpp.j2",
            lambda path: path.write_text("{{ WOOD }}"),
            "cpu(WASTE=0) does not render any more",
        ),
    ],
)
def test_drift(
    tmp_path: Path, output: Path, project: Project, pattern: str, change: Callable, message: str
) -> None:
    freeze_into(output, project, project.winner())
    assert drifts(output, project) == []
    change(sorted(tmp_path.glob(pattern))[0])
    assert any(message in item for item in drifts(output, project)), drifts(output, project)


def test_drift_of_kernels_and_files_nobody_knows(output: Path, project: Project) -> None:
    freeze_into(output, project, project.winner())
    stray = output / "mix" / DEVICE.arch / "cpu_00000000.cpp"
    stray.write_text("")
    project.kernels.clear()
    assert drifts(output, project) == [
        f"{output / 'mix'}: there is no kernel 'mix'; is its --kernels missing?",
        f"{stray}: nothing refers to it",
    ]


@pytest.mark.parametrize(
    "autograd, backward, message",
    [
        (Autograd("blend", ("x",), "mix_backward"), MIX_BACKWARD, "returns 'x' must be one of y"),
        (Autograd("blend", ("total",), "mix_backward"), MIX_BACKWARD, "input 'dy' must be one of"),
        (
            Autograd("blend", ("y",), "mix_backward"),
            dataclasses.replace(MIX_BACKWARD, outputs=MIX_BACKWARD.inputs),
            "mix_backward's output 'a' must be one of da, db",
        ),
        (
            Autograd("blend", ("y",), "mix_backward"),
            dataclasses.replace(MIX_BACKWARD, scalars=(("power_of_two", "1.0"),)),
            "flag or scalar 'power_of_two' must be one of negate, power, factor",
        ),
    ],
)
def test_autograd_that_does_not_fit(autograd: Autograd, backward, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_backward(MIX, backward, autograd)


def test_two_functions_of_one_name() -> None:
    autograd = Autograd("mix_backward", ("y",), "mix_backward")
    kernels = {"mix": (MIX, "", autograd), "mix_backward": (MIX_BACKWARD, "", None)}
    with pytest.raises(UsageError, match="two functions named 'mix_backward'"):
        functions_of(kernels)


def test_a_winner_needs_its_kernel(output: Path, project: Project) -> None:
    with pytest.raises(UsageError, match="kernels that are not given: mix_backward"):
        freeze.freeze(
            [project.winner("mix_backward")], project.kernels[:1], output, templates=TEMPLATES
        )


def test_no_winners(output: Path, project: Project) -> None:
    with pytest.raises(UsageError, match="there are no winners"):
        freeze_into(output, project)
    freeze_into(output, project, project.winner())
    (output / "_runtime" / "cpp.py").unlink()
    (output / "mix" / "problem.py").write_text("EDGE_SHAPES = ()\n")
    assert len(drifts(output, project)) == 2
    freeze_into(output, project)  # brings the package up to date
    assert drifts(output, project) == []


def test_init_is_as_recorded(output: Path, project: Project, request) -> None:
    freeze_into(output, project, project.winner(), project.winner("mix_backward"))
    golden = Path(__file__).parent / "data" / "package_init.py.txt"
    text = (output / "__init__.py").read_text()
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(map(len, text.splitlines())) <= 99


def test_loads_no_torch() -> None:
    code = (
        "import sys, tuner.package.freeze, tuner.package.drift, tuner.package.export\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ})
