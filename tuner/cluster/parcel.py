"""What travels between machines that share no file system: requests with the files they name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import Any

Message = dict[str, Any]
Files = dict[str, bytes]
"""Contents by name, relative to a folder that each machine has of its own."""

_PATHS = ("problem", "path")
_DIGEST_CHARACTERS = 16
_PARTIAL = ".part"
_ROOT = b"@CACHE@"
"""Stands for the cache's folder in the files in which triton names others by absolute paths."""


def pack(message: Mapping[str, Any]) -> tuple[Message, Files]:
    """Return a request whose paths are names, and the files of these names."""
    files: Files = {}

    def name_of(path: str) -> str:
        content = Path(path).read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:_DIGEST_CHARACTERS]
        name = f"{digest}/{Path(path).name}"
        files[name] = content
        return name

    return _with_paths(message, name_of), files


def unpack(message: Mapping[str, Any], files: Files, folder: Path) -> Message:
    """Return a packed request whose names are paths again, the files written to a folder."""
    write_files(files, folder)
    return _with_paths(message, lambda name: str(folder / name))


def names_in(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the sources in a packed request."""
    items = (message, *message.get("contenders", ()), message.get("pace") or {})
    return [item["path"] for item in items if "path" in item]


def _with_paths(message: Mapping[str, Any], change: Callable[[str], str]) -> Message:
    """Return a request with its paths changed, and those of the variants that it names."""
    changed: Message = {}
    for key, item in message.items():
        if key in _PATHS:
            changed[key] = change(item)
        elif key == "contenders":
            changed[key] = [_with_paths(contender, change) for contender in item]
        elif key == "pace" and item is not None:
            changed[key] = _with_paths(item, change)
        else:
            changed[key] = item
    return changed


def write_files(files: Files, folder: Path) -> None:
    """Write files that are not there; a reader sees each whole or not at all."""
    for name, content in files.items():
        path = folder / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile(dir=path.parent, suffix=_PARTIAL, delete=False) as scratch:
            scratch.write(content)
        Path(scratch.name).replace(path)


class Harvest:
    """What a compile child has written into its cache since it was asked last.

    Args:
        cache: The folder.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._known: set[str] = set()

    def gather(self) -> Files:
        """Return the new files; paths to the cache itself in them are replaced."""
        found: Files = {}
        for path in sorted(self._cache.rglob("*")):
            name = str(path.relative_to(self._cache))
            if name in self._known or path.suffix == _PARTIAL or not path.is_file():
                continue
            found[name] = path.read_bytes()
            if path.suffix == ".json":
                found[name] = found[name].replace(bytes(self._cache), _ROOT)
        self._known.update(found)
        return found


def plant(files: Files, cache: Path) -> None:
    """Write what was gathered on another machine into the cache of this one."""
    write_files(
        {
            name: content.replace(_ROOT, bytes(cache)) if name.endswith(".json") else content
            for name, content in files.items()
        },
        cache,
    )


class Depot:
    """Compiled files on their way from the nodes that made them to those that measure.

    Args:
        folder: Where they lie in between.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, set[str]] = {}
        self._lock = Lock()

    def add(self, source: str, files: Files) -> None:
        """Keep what compiling a source has made."""
        write_files(files, self._folder)
        with self._lock:
            self._names.setdefault(source, set()).update(files)

    def fetch(self, sources: Iterable[str], known: set[str]) -> Files:
        """Return what was made of sources, without names that are known; they are from now on."""
        with self._lock:
            names = set().union(*(self._names.get(source, ()) for source in sources)) - known
        known.update(names)
        return {name: (self._folder / name).read_bytes() for name in sorted(names)}
