"""Times that cannot be: below what moving the bytes or doing the operations takes at best.

A kernel has to move its compulsory bytes and to do its least operations, whatever its design. Two
ceilings bound how fast that goes, and both are measured by a probe, since a table of a vendor's
figures knows neither the card nor its neighbours:

* Memory. Buffers that rotate through W bytes with caches of C bytes find at most C of them there,
  so that at least the share 1 - C / W of the bytes comes from memory in every call. Where all fits
  the caches (W <= C) nothing is known: caches are faster than memory, by how much depends.
* Products. The library's matrix product in the fastest type that is as wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.space.template import ITEMSIZES

MARGIN = 1.5
"""How much faster than the measured ceiling a time may be before it is impossible.

A copy on a CPU moves three bytes for two that are counted, since a line that is written is read
before (3 / 2); libraries reach at least two thirds of a card's peak on large matrices (3 / 2), and
short batches run at boost clocks that a longer product does not hold (up to 1.4). What a broken
variant leaves out makes it faster by more, or it leaves out so little that verification has to
find it.
"""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device was measured to do at most; None where that is not known.

    Attributes:
        gbytes: 10^9 bytes a second to or from memory.
        gflops: 10^9 operations a second.
    """

    gbytes: float | None
    gflops: float | None

    def raised(self, other: Ceilings) -> Ceilings:
        """Return the higher of two measurements of each: whatever disturbs one lowers it."""
        return Ceilings(_higher(self.gbytes, other.gbytes), _higher(self.gflops, other.gflops))


@dataclass(frozen=True, slots=True)
class Work:
    """What a call does at least, and what it finds in the cache.

    Attributes:
        flops: Least operations.
        bytes: Least bytes read and written.
        held_bytes: Bytes of all buffers that the calls rotate through.
        cache_bytes: Size of the last-level cache.
    """

    flops: float
    bytes: float
    held_bytes: int
    cache_bytes: int

    @property
    def caches(self) -> Literal["cold", "warm"]:
        """``"cold"`` where the buffers overflow the last-level cache, else ``"warm"``."""
        return "cold" if self.held_bytes > self.cache_bytes else "warm"

    @property
    def memory_bytes(self) -> float:
        """Bytes of a call that no cache can have kept."""
        return self.bytes * max(1 - self.cache_bytes / max(self.held_bytes, 1), 0.0)


def impossible(time_ms: float, work: Work, ceilings: Ceilings) -> str | None:
    """Return why a time cannot be, with the figure and the ceiling, or None if it can.

    Args:
        time_ms: Time of a call.
        work: What a call does.
        ceilings: What the device was measured to do at most.
    """
    for amount, ceiling, unit in (
        (work.memory_bytes, ceilings.gbytes, "GB/s from memory"),
        (work.flops, ceilings.gflops, "GFLOP/s"),
    ):
        rate = amount / max(time_ms, 1e-9) * 1e-6
        if ceiling is not None and rate > MARGIN * ceiling:
            return (
                f"impossible: {time_ms:.4g} ms a call would be {rate:.4g} {unit}, more than "
                f"{MARGIN:g} times the {ceiling:.4g} that the device was measured to reach"
            )
    return None


def as_wide(dtype: str) -> set[str]:
    """Return the types that a kernel may compute in: those at least as wide as its own.

    Args:
        dtype: Torch's name of the element type; ``"tf32"`` stands in for float32.
    """
    width = ITEMSIZES.get(dtype, 0)
    wide = {name for name, size in ITEMSIZES.items() if size >= width}
    return wide | ({"tf32"} if width <= ITEMSIZES["float32"] else set())


def _higher(one: float | None, other: float | None) -> float | None:
    return max((item for item in (one, other) if item is not None), default=None)
