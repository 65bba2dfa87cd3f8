"""Compile a C++ variant once with the system's compiler and call it on torch tensors."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .flags import Scalar
    from .signature import Signature

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")

Command = tuple[str, ...]
"""A compiler's command: the program and what always follows it."""


class CompileError(Exception):
    """The compiler refused a source, or it lacks what is called; the message says which."""


def find_compiler(preferred: str | None = None) -> Command:
    """Return the command of the C++ compiler: the preferred one, else g++ or clang++.

    Args:
        preferred: What the user set as CXX, such as ``clang++-18`` or ``ccache g++``.

    Raises:
        FileNotFoundError: There is none; the message says what to install.
    """
    commands = (shlex.split(preferred),) if preferred else (["g++"], ["clang++"])
    for program, *arguments in commands:
        if path := shutil.which(program):
            return (path, *arguments)
    raise FileNotFoundError(
        f"no C++ compiler: looked for {', '.join(words[0] for words in commands)}; install g++ "
        "(Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`) or set CXX"
    )


@cache
def compiler_version(compiler: Command) -> str:
    """Return the first line that the compiler prints about itself.

    Raises:
        FileNotFoundError: It is no compiler: it fails or prints nothing.
    """
    command = [*compiler, "--version"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return printed.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise FileNotFoundError(
            f"no C++ compiler: `{shlex.join(command)}` fails or prints nothing: set CXX to one"
        ) from error


@cache
def cpu_flags() -> str:
    """Return the feature flags of this CPU, which decide what -march=native emits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    wanted = ("flags", "Features", "model name", "vendor_id")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def user_cache() -> Path:
    """Return a folder for compiled objects that nobody but this user can write or read.

    Raises:
        PermissionError: The folder is somebody else's or was open to others.
    """
    folders = [Path(tempfile.gettempdir()) / f"tuner-{os.getuid()}"]
    root = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no HOME and no entry in the password database
        folders.insert(0, Path(root or Path.home() / ".cache") / "tuner" / "objects")
    for folder in folders:
        with contextlib.suppress(OSError):  # a container's home may be missing or read-only
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            break
    return private_folder(folder)


def private_folder(folder: Path) -> Path:
    """Return the folder after making sure that only this user can enter it.

    Code is loaded from it, so whatever others could have planted there must not run.

    Raises:
        PermissionError: The folder is somebody else's or was open to others.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} is not a folder of this user: remove it or set XDG_CACHE_HOME"
        )
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o}): "
            "remove it or set XDG_CACHE_HOME"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def object_path(text: str, compiler: Command, folder: Path) -> Path:
    """Return where the object of a source lies: keyed by source, compiler and CPU."""
    key = "\0".join((text, *compiler, compiler_version(compiler), *FLAGS, cpu_flags()))
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.so"


def compile_source(path: Path, *, cache: Path, compiler: str | None = None) -> Path:
    """Compile a C++ file into a shared object, or return the one compiled before.

    Args:
        path: The source file.
        cache: Folder of compiled objects.
        compiler: Command of the compiler; None looks for g++ and clang++.

    Raises:
        CompileError: The compiler refused the source.
        FileNotFoundError: There is no compiler.
    """
    command = find_compiler(compiler)
    target = object_path(path.read_text(encoding="utf-8"), command, cache)
    if target.exists():
        return target
    handle, scratch = tempfile.mkstemp(dir=cache, suffix=".part")
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, *FLAGS, "-o", scratch, str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode:
            raise CompileError(result.stderr.strip() or f"{command[0]} exited {result.returncode}")
        Path(scratch).replace(target)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return target


class CppVariant:
    """A compiled C++ kernel, called by position through its C ABI.

    The C function takes pointers to the inputs and outputs (null where an optional input is left
    out), then the dims as int64_t, the flags and options as int32_t (0 and 1 for booleans, a whole
    number as it is, else the index of the choice) and the scalars as double.

    Args:
        signature: Signature of the kernel; its name is the entry point.
        library: The shared object.

    Raises:
        CompileError: It has no function of the kernel's name.
        OSError: There is no such file, or it cannot be loaded.
    """

    strided: frozenset[str] = frozenset()

    def __init__(self, signature: Signature, library: Path) -> None:
        self._names = tuple(spec.name for spec in (*signature.inputs, *signature.outputs))
        self._dims = signature.dims
        self._flags = (*signature.flags, *signature.options)
        self._scalars = tuple(name for name, _ in signature.scalars)
        try:
            entry = getattr(ctypes.CDLL(str(library)), signature.kernel)
        except AttributeError as error:
            name = signature.kernel
            raise CompileError(
                f'it has no function {name}: write extern "C" void {name}(...)'
            ) from error
        entry.restype = None
        entry.argtypes = (
            [ctypes.c_void_p] * len(self._names)
            + [ctypes.c_int64] * len(self._dims)
            + [ctypes.c_int32] * len(self._flags)
            + [ctypes.c_double] * len(self._scalars)
        )
        self._entry: Callable[..., None] = entry

    def bind(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        dims: Mapping[str, int],
        options: Mapping[str, Scalar],
    ) -> Callable[[], None]:
        """Return the call on these tensors with its arguments converted once.

        Args:
            tensors: Inputs and outputs by name, contiguous, of the signature's shapes.
            dims: Extent of every dim.
            options: Value of every flag and scalar.
        """
        arguments = (
            *[_address(tensors.get(name)) for name in self._names],
            *[dims[name] for name in self._dims],
            *[_flag_code(options.get(name, choices[0]), choices) for name, choices in self._flags],
            *[float(options[name]) for name in self._scalars],
        )
        entry = self._entry
        return lambda: entry(*arguments)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _flag_code(value: Scalar, choices: tuple[Scalar, ...]) -> int:
    return int(value) if isinstance(value, int) else choices.index(value)
