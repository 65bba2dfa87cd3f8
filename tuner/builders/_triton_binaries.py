"""What a package stores of Triton's kernels: the files that its cache would hold for them."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from tuner.plugins import RejectedBuild
from tuner.records import DeviceInfo

_SUFFIXES = (".cubin", ".hsaco", ".json", ".so")
_LINKAGES = ("ELF", "")
"""What Python's `platform` says of itself where the program `file` is installed, and where not."""

_GROUP = "__grp__"
"""Beginning of the names of files that hold absolute paths, which a package cannot."""


@contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Have triton keep in a folder what a launch needs, and no more."""
    from triton import knobs

    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir, knobs.compilation.store_binary_only = str(folder), True
        yield


def build_own_launchers(kernels: Sequence[Any], device: DeviceInfo) -> None:
    """Compile the C functions that load and launch kernels on a card of this machine's.

    Triton would compile them at the first launch, which is the measuring child's. Nothing is
    compiled where the card's driver is not installed.

    Args:
        kernels: The compiled kernels.
        device: What they are compiled for.

    Raises:
        RejectedBuild: There is no C compiler, or it lacks Python's headers.
    """
    if device.kind == "cuda" and _driver_is_here():
        from triton.backends.nvidia import driver

        with _rejecting_failures():
            _build_launchers(driver, kernels)


def build_launchers(kernels: Sequence[Any], scratch: Path) -> None:
    """Compile the C functions that load and launch kernels, for any machine with NVIDIA's cards.

    Args:
        kernels: The compiled kernels.
        scratch: A folder to write into.

    Raises:
        RejectedBuild: There is no C compiler, or it lacks Python's headers.
    """
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.runtime import build

    own = build.platform_key, build._build
    try:
        with _rejecting_failures():
            build._build = partial(_build_without_paths, build._build)
            header = Path(driver.__file__).parent / "include" / "cuda.h"
            knobs.nvidia.libcuda_path = str(driver_library(header, scratch / "libcuda"))
            for linkage in _LINKAGES:
                build.platform_key = partial(_platform, linkage)
                _build_launchers(driver, kernels)
    finally:
        build.platform_key, build._build = own


def keep(cache: Path, folder: Path) -> None:
    """Copy what a package can hold of a cache."""
    for path in sorted(cache.glob("*/*")):
        if path.suffix in _SUFFIXES and not path.name.startswith(_GROUP):
            target = folder / path.relative_to(cache)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


@contextmanager
def _rejecting_failures() -> Iterator[None]:
    try:
        yield
    except (AssertionError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise RejectedBuild(
            f"launching needs a C compiler and Python's headers once, here: {error}"
        ) from error


@cache
def _driver_is_here() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _build_launchers(driver: Any, kernels: Sequence[Any]) -> None:
    with contextlib.suppress(ImportError):  # built, but not to be loaded without a card
        driver.CudaUtils()
    if hasattr(driver, "make_launcher"):  # until Triton 3.6: one for each signature
        for kernel in kernels:
            with contextlib.suppress(ImportError):
                driver.CudaLauncher(kernel.src, kernel.metadata)


def _build_without_paths(
    own: Callable[..., str], name: str, source: str, folder: str, *options: list[str]
) -> str:
    """Compile as triton does, but for the name of the temporary folder in the result."""
    *others, flags = options
    return own(name, source, folder, *others, [*flags, f"-ffile-prefix-map={folder}=."])


def _platform(linkage: str) -> str:
    """Return what triton's keys of C sources say of this machine."""
    return ",".join((platform.machine(), platform.system(), "64bit", linkage))


def driver_library(header: Path, folder: Path) -> Path:
    """Return a folder with a stand-in for the driver's library: what a linker wants of it.

    It defines every name of the header, so that no linker leaves it out as not needed.
    """
    target = folder / "libcuda.so.1"
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header.read_text(encoding="utf-8"))))
    with tempfile.TemporaryDirectory(dir=folder) as own:
        source, built = Path(own, "libcuda.c"), Path(own, target.name)
        source.write_text("".join(f"char {name};\n" for name in names))
        options = ("-shared", "-fPIC", f"-Wl,-soname,{target.name}")
        subprocess.run([_c_compiler(), *options, "-o", str(built), str(source)], check=True)
        built.replace(target)
    return folder


def _c_compiler() -> str:
    from triton import knobs

    found = knobs.build.cc or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise RuntimeError("there is neither gcc nor clang: install one or set CC")
    return str(found)
