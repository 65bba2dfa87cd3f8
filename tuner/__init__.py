"""Tune kernels on an accelerator that has no profiler, only a clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.recording.recorder import Recorder

__version__ = "0.1.0"


def capture(
    output: str | Path | None = None, *, kernels: Sequence[Path] = ()
) -> AbstractContextManager[Recorder]:
    """Record what the program inside spends on operations that our kernels do.

    Args:
        output: A file for ``tune --workloads``, written at the end.
        kernels: Folders of kernels of your own.

    Returns:
        A context whose value has ``workloads``, with calls and seconds.
    """
    from tuner.recording.recorder import recording  # torch, which nothing else here needs

    return recording(None if output is None else Path(output), kernels, "")
