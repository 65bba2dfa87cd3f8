"""What the wheel and the sdist contain, and that an installed wheel needs no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

SHIPPED = ("tuner", "kernels_generated", "templates", "search_spaces")
MOVED = {"templates": "tuner/_data/templates", "search_spaces": "tuner/_data/search_spaces"}


def tracked() -> list[str]:
    """Return the files that git has or would take, the deleted ones left out."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the list of files comes from git, and this is no clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Build a copy of the checkout with stray files in it; return the wheel and the sdist."""
    copy, output = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for folder in SHIPPED:
        for stray in ("__pycache__/stray.pyc", ".stray.part", ".tuner/stray.json"):
            (copy / folder / stray).parent.mkdir(parents=True, exist_ok=True)
            (copy / folder / stray).write_text("left behind by a run")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Install the wheel without its dependencies; return the folder."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-compile", "--target", str(folder), str(built[0])]
    subprocess.run(command, check=True)
    return folder


def python(installed: Path, *arguments: str) -> str:
    """Run Python where the installed wheel and its dependencies are found, and no checkout."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *packages])}
    done = subprocess.run(
        [sys.executable, "-S", *arguments],  # -S: an editable install adds the checkout in `site`
        cwd=installed.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_tracked_file_at_its_place_and_no_other(built):
    expected = set()
    for name in tracked():
        folder, _, rest = name.partition("/")
        if folder in SHIPPED:
            expected.add(f"{MOVED.get(folder, folder)}/{rest}")
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_sdist_has_no_file_that_git_does_not_have(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    shipped = {name for name in tracked() if name.partition("/")[0] in SHIPPED}
    assert shipped <= names
    assert names - set(tracked()) == {"PKG-INFO"}


def test_an_installed_wheel_lists_and_renders_without_the_checkout(installed):
    where = python(installed, "-c", "import tuner; print(tuner.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    kernels = {Path(name).stem for name in tracked() if name.startswith("search_spaces/")}
    listed = python(installed, "-m", "tuner", "list").splitlines()
    assert {line.partition(":")[0] for line in listed if not line.startswith(" ")} == kernels
    assert 'extern "C" void matmul(' in python(installed, "-m", "tuner", "render", "matmul")
