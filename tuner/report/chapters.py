"""What a report tells of: every workload of a store or of a package, with all that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tuner.catalog import Catalog
from tuner.cost import Cost, costs_of
from tuner.package.freeze import RUNTIME
from tuner.package.reading import package_winners
from tuner.records import Measurement, Rejection, Trial, UsageError, Winner, Workload
from tuner.report.insight import Step, importances, progress
from tuner.store import open_stores


@dataclass(frozen=True)
class Chapter:
    """One workload on one architecture.

    Attributes:
        arch: The architecture, by which stores and packages are divided.
        workload: What was tuned for.
        trials: Its trials in the order in which they ended; a package has none.
        winner: The latest winner, None before its first final.
        cost: What the workload needs at least, where its problem says so.
    """

    arch: str
    workload: Workload
    trials: tuple[Trial, ...] = ()
    winner: Winner | None = None
    cost: Cost | None = None

    @property
    def name(self) -> str:
        """Kernel and workload."""
        return f"{self.workload.kernel} {self.workload}"

    @property
    def title(self) -> str:
        """Kernel and workload as words that a narrow place can break between."""
        return f"{self.workload.kernel} {self.short}"

    @property
    def short(self) -> str:
        """The workload in such words."""
        return str(self.workload).replace("dtype=", "").replace(",", " ")

    @cached_property
    def timed(self) -> tuple[tuple[Trial, Measurement], ...]:
        """The measured trials, the fastest first."""
        found = [(item, item.outcome) for item in self.trials]
        timed = [(item, out) for item, out in found if isinstance(out, Measurement)]
        return tuple(sorted(timed, key=lambda pair: pair[1].median_ms))

    @cached_property
    def rejected(self) -> tuple[tuple[Trial, Rejection], ...]:
        """The rejected trials in their order."""
        found = [(item, item.outcome) for item in self.trials]
        return tuple((item, out) for item, out in found if isinstance(out, Rejection))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The state of the search after each trial."""
        return tuple(progress(self.trials))

    @cached_property
    def importances(self) -> dict[str, float]:
        """How much each parameter matters."""
        return importances(self.trials)

    @property
    def best_ms(self) -> float | None:
        """The winner's time, or the best trial's where there is no winner yet."""
        if self.winner is not None:
            return self.winner.measurement.median_ms
        return self.timed[0][1].median_ms if self.timed else None


def contenders(winner: Winner) -> list[tuple[str, str, Measurement]]:
    """Return role, name and time of the winner, the default and the rival, where they raced."""
    found = [("winner", str(winner.candidate), winner.measurement)]
    if winner.candidate != winner.default_candidate:
        found.append(("default", str(winner.default_candidate), winner.default_measurement))
    if winner.rival is not None and winner.rival_measurement is not None:
        found.append(("rival", winner.rival, winner.rival_measurement))
    return found


def read_chapters(
    path: Path, catalog: Catalog, environment: Mapping[str, str]
) -> tuple[Chapter, ...]:
    """Return the chapters of a store or of a package, by kernel and architecture.

    Args:
        path: The folder of a store or of a frozen package.
        catalog: Where the problems of a store's kernels are.
        environment: For the process that is asked for the workloads' costs.

    Raises:
        UsageError: The folder is neither, or it is damaged.
    """
    chapters = _of_package(path) if (path / RUNTIME).is_dir() else _of_store(path)
    if not chapters:
        raise UsageError(f"{path}: there is nothing to report; run `tune` first")
    problems = {}
    for kernel in {chapter.workload.kernel for chapter in chapters}:
        own = path / kernel / "problem.py"
        if own.is_file():
            problems[kernel] = own
        elif kernel in catalog.kernels:
            problems[kernel] = catalog.problem_path(kernel)
    known = [chapter for chapter in chapters if chapter.workload.kernel in problems]
    requests = [(problems[item.workload.kernel], item.workload) for item in known]
    found = zip(known, costs_of(requests, environment), strict=True)
    costs = {(chapter.arch, chapter.workload): cost for chapter, cost in found}
    return tuple(replace(item, cost=costs.get((item.arch, item.workload))) for item in chapters)


def _of_package(path: Path) -> list[Chapter]:
    winners = package_winners(path)
    return [Chapter(item.device.arch, item.workload, winner=item) for item in winners]


def _of_store(path: Path) -> list[Chapter]:
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such store or package")
    chapters = []
    for store in open_stores(path):
        groups: dict[Workload, list[Trial]] = {}
        for trial in store.trials:
            groups.setdefault(trial.workload, []).append(trial)
        winners = {winner.workload: winner for winner in store.winners}
        for workload in dict.fromkeys([*groups, *winners]):
            trials = tuple(groups.get(workload, ()))
            winner = winners.get(workload)
            chapters.append(Chapter(store.folder.name, workload, trials, winner))
    return sorted(chapters, key=lambda item: (item.workload.kernel, item.arch))
