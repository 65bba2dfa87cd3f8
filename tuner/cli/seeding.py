"""What a run says of others' results: what it takes over from them, and how good that was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tuner.landing import landing
from tuner.records import Trial
from tuner.seeds import Seed, fit
from tuner.session import Subject

_MOST_REASONS = 12


def seeded(
    console: Console, subjects: Sequence[Subject], files: Mapping[Path, Sequence[Seed]]
) -> Iterator[Subject]:
    """Yield the subjects with what they take over from others; say what they do not.

    Args:
        console: Where to print.
        subjects: What is tuned for.
        files: Others' configurations by file, of any kernels.
    """
    total = sum(map(len, files.values()))
    left_out: Counter[str] = Counter()
    for subject in subjects:
        workload = subject.task.workload
        fits = [fit(workload, subject.feasible, seeds) for seeds in files.values()]
        first = dict.fromkeys(item for found in fits for item in found.candidates)
        if files:
            console.print(
                f"{workload.kernel} {workload}: {len(first)} first candidates of "
                f"{total} configurations"
            )
        for found in fits:
            left_out.update(found.left_out)
        yield replace(subject, seeds=tuple(first))
    for reason, count in left_out.most_common(_MOST_REASONS):
        console.print(f"  left out {count} x {reason}", markup=False)
    if (more := len(left_out) - _MOST_REASONS) > 0:
        console.print(f"  and for {more} further reasons")


def print_landings(
    console: Console,
    seeds: Mapping[Path, Sequence[Seed]],
    ended: Sequence[tuple[Subject, object]],
    trials: Sequence[Trial],
) -> None:
    """Say for each workload how good the configurations of each file were.

    Args:
        console: Where to print.
        seeds: Configurations by file.
        ended: The workloads that were begun, and how they ended.
        trials: What was tried.
    """
    for subject, _ in ended:
        workload = subject.task.workload
        for path, given in seeds.items():
            found = landing(subject, given, trials)
            if found.total:
                line = f"{path} for {workload.kernel} {workload}: {found}"
                console.print(line, markup=False, soft_wrap=True)
