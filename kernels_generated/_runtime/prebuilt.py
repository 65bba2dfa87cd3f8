"""Binaries that were stored when the package was frozen: found before a compiler is asked.

Beside a variant's file, ``aot/NAME/KEY/`` holds what compiling it gave, where NAME is the file's
without its suffix. KEY says all that the binaries depend on, so that where something differs
(another source, another Triton, another CPU) nothing is found, and the compiler is asked as ever.
"""

from __future__ import annotations

import hashlib
import threading
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from .cpp import FLAGS, cpu_flags

FOLDER = "aot"
LIBRARY = "kernel.so"

_lock = threading.Lock()


def folder_of(variant: Path) -> Path:
    """Return where the binaries of a variant's file lie, if it has any."""
    return variant.parent / FOLDER / variant.stem


def library_of(variant: Path, folder: Path | None = None) -> Path:
    """Return where the shared object of a C++ file lies if it was built for a CPU like this one.

    Which compiler built it does not matter.

    Args:
        variant: The C++ file.
        folder: Where the variant's binaries lie; None stands for `folder_of` it.
    """
    key = "\0".join((variant.read_text(encoding="utf-8"), *FLAGS, cpu_flags()))
    digest = hashlib.sha256(key.encode()).hexdigest()
    return (folder or folder_of(variant)) / digest / LIBRARY


def offer_to_triton(variant: Path) -> None:
    """Let Triton's lookups in its cache find the binaries of a variant's file, if it has any.

    What is not among them is looked up and written where it would have been without us.

    Args:
        variant: The Triton or Gluon file.
    """
    folder = folder_of(variant)
    if not folder.is_dir():
        return
    try:
        from triton import knobs
        from triton.runtime.cache import FileCacheManager

        with _lock:
            PackageCache.folders.setdefault(folder)
            if PackageCache.other is None:  # once: another package may have come before it since
                PackageCache.other = knobs.cache.manager_class or FileCacheManager
                knobs.cache.manager_class = PackageCache
    except (ImportError, AttributeError):  # another Triton, whose cache has another interface
        return


class PackageCache:
    """What Triton asks for the files of one key: the packages' folders, then the other cache.

    Args:
        key: The key, Triton's hash of all that a binary depends on.
        options: What else Triton tells a cache: such lookups are not for compiled kernels.
    """

    folders: ClassVar[dict[Path, None]] = {}
    other: ClassVar[Any] = None

    def __init__(self, key: str, **options: bool) -> None:
        self._key, self._options = key, options
        found = (folder / key for folder in list(self.folders) if not any(options.values()))
        self._stored = next((folder for folder in found if folder.is_dir()), None)

    @cached_property
    def _other(self) -> Any:
        """The other cache, which makes a folder as soon as it is asked."""
        return self.other(self._key, **self._options)

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, or None."""
        stored = self._stored and self._stored / filename
        found: str | None = (
            str(stored) if stored and stored.is_file() else self._other.get_file(filename)
        )
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files that belong together with one, by name; or None."""
        if self._stored and (self._stored / filename).is_file():
            return {path.name: str(path) for path in sorted(self._stored.iterdir())}
        found: dict[str, str] | None = self._other.get_group(filename)
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file into the other cache and return its path."""
        return str(self._other.put(data, filename, binary=binary))

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Write into the other cache which files belong together."""
        return self._other.put_group(filename, group)
