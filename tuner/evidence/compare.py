"""Files of measured times side by side: ratios whose intervals hold what both files left open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.evidence.results import ContenderTimes, ResultsFile, WorkloadTimes
from tuner.records import Interval, UsageError
from tuner.timing.race import SURE
from tuner.timing.statistics import ratio_interval

Named = tuple[str, ResultsFile]
"""A file and its name."""


@dataclass(frozen=True, slots=True)
class ComparedTime:
    """One contender of one file beside the first file's.

    Attributes:
        workload: Kernel and workload.
        file: Name of the file.
        label: Label of the contender.
        device: Where it was measured.
        median_ms: Its time of a call.
        ratio: That time over the reference's, with an interval of at least 95 %.
        floor: Ratio that two measurements of the same kernel came apart in their runs.
        verdict: ``"faster"``, ``"slower"`` or ``"tied"``; ``"reference"`` for the reference.
    """

    workload: str
    file: str
    label: str
    device: str
    median_ms: float
    ratio: Interval
    floor: float
    verdict: str

    @property
    def efficiency(self) -> float:
        """The reference's time as a percentage of this one: above 100 this one is faster."""
        return 100 / self.ratio.value

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            **{name: getattr(self, name) for name in ("workload", "file", "label", "device")},
            "median_ms": self.median_ms,
            "ratio": self.ratio.value,
            "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high,
            "efficiency_percent": self.efficiency,
            "noise_floor": self.floor,
            "verdict": self.verdict,
        }


def compare(files: Sequence[Named]) -> list[ComparedTime]:
    """Return every contender of every file beside the first file's own kernel.

    Args:
        files: The files with their names, the reference first.

    Raises:
        UsageError: They hold other kernels or workloads, or times of another protocol.
    """
    (first_name, first), *others = files
    for name, file in others:
        _require_same(first_name, first, name, file)
    rows: list[ComparedTime] = []
    for reference in first.workloads:
        for name, file in files:
            times = next(item for item in file.workloads if item.name == reference.name)
            rows += _rows(reference, times, name, file.device.name)
    return rows


def _rows(
    reference: WorkloadTimes, times: WorkloadTimes, file: str, device: str
) -> Iterator[ComparedTime]:
    base = reference.contenders[0]
    for contender in times.contenders:
        ratio = _ratio(contender, base, same_run=times is reference)
        floor = _floor(reference) * (1.0 if times is reference else _floor(times))
        yield ComparedTime(
            workload=times.name,
            file=file,
            label=contender.label,
            device=device,
            median_ms=contender.median_ms,
            ratio=ratio,
            floor=floor,
            verdict="reference" if contender is base else _verdict(ratio, floor),
        )


def _ratio(over: ContenderTimes, under: ContenderTimes, *, same_run: bool) -> Interval:
    """Return a ratio of medians with its interval.

    Within a run the blocks pair the times. Between runs nothing does: each median lies in its own
    interval with the probability `SURE`, so that both do, and their ratio lies between the extreme
    quotients, with at least 95 % (Bonferroni).
    """
    if same_run:
        return ratio_interval(over.times_ms, under.times_ms)
    top, bottom = over.median(SURE), under.median(SURE)
    return Interval(top.value / bottom.value, top.low / bottom.high, top.high / bottom.low)


def _floor(times: WorkloadTimes) -> float:
    """Return how far a kernel and its own copy came apart, as a ratio of at least 1."""
    value, _, _ = times.noise
    return max(value, 1 / value)


def _verdict(ratio: Interval, floor: float) -> str:
    if ratio.high < 1 / floor:
        return "faster"
    return "slower" if ratio.low > floor else "tied"


def _require_same(first_name: str, first: ResultsFile, name: str, other: ResultsFile) -> None:
    """Raise UsageError unless two files hold the same workloads in the same protocol."""
    ours = {item.name: item for item in first.workloads}
    theirs = {item.name: item for item in other.workloads}
    kernels, their_kernels = (
        sorted({item.kernel for item in file.workloads}) for file in (first, other)
    )
    if kernels != their_kernels:
        raise UsageError(
            f"{first_name} is of the kernel {', '.join(kernels)}, {name} of "
            f"{', '.join(their_kernels)}: only times of the same kernels can be compared"
        )
    if ours.keys() != theirs.keys():
        raise UsageError(
            f"the workloads differ: only {first_name} has {_list(ours.keys() - theirs.keys())}; "
            f"only {name} has {_list(theirs.keys() - ours.keys())}: run `tune bench` on the same"
        )
    for key, item in ours.items():
        if item.protocol != theirs[key].protocol:
            raise UsageError(
                f"{key}: the protocols differ: {first_name} has {str(item.protocol)!r}, {name} "
                f"has {str(theirs[key].protocol)!r}: their times mean different things"
            )


def _list(names: set[str]) -> str:
    return "; ".join(sorted(names)) or "none"
