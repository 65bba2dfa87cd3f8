"""No child outlives its parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(role: str, parent: int) -> None:
    """Ask the kernel to end this process when its parent is killed.

    A compile child ends its whole process group, since the compilers that it started would
    outlive it. A measuring child may be stuck in machine code and cannot handle a signal.
    """
    end = signal.SIGTERM if role == "compile" else signal.SIGKILL
    if role == "compile":
        signal.signal(signal.SIGTERM, _end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end)
    if os.getppid() != parent:
        sys.exit(1)


def _end_group(number: int, frame: object) -> NoReturn:
    del number, frame
    os.killpg(0, signal.SIGKILL)
    raise SystemExit
