"""A folder for what a process on a node writes, gone with it or soon after."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "tuner-node-"
_LOCK = "lock"


class Scratch:
    """A temporary folder that nobody but this user can enter.

    Ray ends processes without notice, and then nothing in them can remove a folder. So each holds
    a lock on its own, which ends with it, and removes those that nobody holds.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        scratch = self.path / f"{_LOCK}.part"
        self._lock = scratch.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        scratch.rename(self.path / _LOCK)  # held before anybody sees it
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        atexit.unregister(self.close)


def _sweep(root: Path) -> None:
    """Remove the folders of this user whose process has ended."""
    for path in root.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if path.parent.stat().st_uid != os.getuid():
                continue
            with path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # it is in use, or another process removes it
            continue
