"""Files that are whole at every moment, whoever is killed while writing them."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.records import UsageError

_SUFFIXES = frozenset(
    (".csv", ".db", ".gz", ".html", ".journal", ".json", ".jsonl", ".log", ".py", ".txt", ".yaml")
)

PARTIAL = ".part"
"""Suffix of a file that is being written: one that is left over may be removed."""


def replace(path: Path, content: str | bytes) -> None:
    """Give a file its content in one step; one that has it already is left alone."""
    data = content.encode() if isinstance(content, str) else content
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")  # others may write, too
    partial.write_bytes(data)
    partial.replace(path)


def require_file(option: str, path: Path) -> None:
    """Raise UsageError unless a file may be written, for which folders may be made.

    Nothing is left behind, so that a command can ask before it does anything else.

    Args:
        option: What the user gave it for, such as ``"--output"``.
        path: The file.
    """
    _require_place(f"{option} {path}", path.parent, path.name)
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file")


def require_folder(option: str, path: Path) -> None:
    """Raise UsageError unless a folder may be written to, or made; nothing is left behind.

    Args:
        option: What the user gave it for, such as ``"--store"``.
        path: The folder.
    """
    _require_place(f"{option} {path}", path)
    if looks_like_a_file(path) and not path.exists():
        raise UsageError(f"{option} {path}: looks like a file, but a folder is written: name one")


def looks_like_a_file(path: Path) -> bool:
    """Return whether a name ends as those of files do."""
    return path.suffix.lower() in _SUFFIXES


def _require_place(what: str, folder: Path, name: str = "") -> None:
    """Raise UsageError unless files can be made in a folder, or in the nearest above it."""
    try:
        (folder / name).exists()  # raises where the name is too long
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{what}: cannot be written: {folder}: {error.strerror}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write into a folder; the system unlocks what is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
