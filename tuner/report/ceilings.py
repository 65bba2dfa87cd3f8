"""The two ceilings that a workload's rate lies under: computing and moving."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tuner.cost import Cost
from tuner.report.chapters import Chapter


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that a device does.

    Attributes:
        flops_per_s: Floating-point operations in a second.
        bytes_per_s: Bytes of memory moved in a second.
        origin: Where the two come from, for the reader.
    """

    flops_per_s: float
    bytes_per_s: float
    origin: str

    def at(self, intensity: float) -> float:
        """Return the most operations in a second at an intensity in operations per byte."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)


Probed = Callable[[str, str, set[str]], Ceilings | None]
"""Returns what `tune probe` measured on an architecture for a dtype, if it did.

The last argument holds the names of the devices that were tuned for, empty where none is known.
"""


def ceilings_of(
    chapters: Iterable[Chapter], arch: str, dtype: str, probed: Probed
) -> Ceilings | None:
    """Return the ceilings of an architecture for a dtype, None if nothing is known.

    They are the device's own, where its card has them; else the best of all that was timed here,
    the rival included. A rate above the former is possible: what caches keep is not moved.
    """
    mine = [item for item in chapters if (item.arch, item.workload.dtype) == (arch, dtype)]
    names = {item.winner.device.name for item in mine if item.winner is not None}
    if (found := probed(arch, dtype, names)) is not None:
        return found
    flops, moved = [], []
    for chapter in mine:
        cost = chapter.cost
        if cost is None:
            continue
        for time_ms in _times_ms(chapter):
            flops.append(rate(cost, time_ms))
            moved.append(cost.bytes / time_ms * 1e3)
    if not flops:
        return None
    return Ceilings(max(flops), max(moved), "the best that anything here reached")


def rate(cost: Cost, time_ms: float) -> float:
    """Return floating-point operations in a second."""
    return cost.flops / time_ms * 1e3


def _times_ms(chapter: Chapter) -> Iterable[float]:
    yield from (measured.median_ms for _, measured in chapter.timed)
    if chapter.winner is not None:
        yield chapter.winner.measurement.median_ms
        yield chapter.winner.default_measurement.median_ms
        if chapter.winner.rival_measurement is not None:
            yield chapter.winner.rival_measurement.median_ms
