"""Files that are whole at every moment, whoever is killed while writing them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time write into a folder; the system unlocks what is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
