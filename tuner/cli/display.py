"""What a run looks like in a terminal: progress while it works, tables at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from tuner.budget import Countdown
from tuner.records import (
    STAGES,
    Failure,
    Interval,
    Measurement,
    Outcome,
    Trial,
    Winner,
    Workload,
    format_value,
)
from tuner.space.feasible import FeasibleSet
from tuner.space.kernel import KernelSpec
from tuner.space.template import TemplateSpec

if TYPE_CHECKING:
    from tuner.study import Study


NOT_SEARCHED = "not searched, only the default was timed"
"""What is said of a workload where the default had no challenger."""

_PLAIN_WIDTH = 160


def make_console(*, stderr: bool = False) -> Console:
    """Return where to print; output that goes to no terminal is wide enough for a table's row."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


class Progress:
    """Shows a run: one moving line in a terminal, plain lines where the output is none.

    Args:
        console: Where to print.
        card: What it shows, where several are shown at a time: then its lines do not move.
    """

    def __init__(self, console: Console, card: str = "") -> None:
        self._console = console
        self._card = f"{card} " if card else ""
        self._status: Status | None = None
        self._study: Study | None = None
        self._countdown: Countdown | None = None
        self.outcomes: dict[Workload, Counter[str]] = {}

    def begin(self, study: Study, workload: Workload, countdown: Countdown) -> None:
        """Announce the search of a workload."""
        self._study, self._countdown = study, countdown
        self.outcomes[workload] = Counter(outcome_word(trial.outcome) for trial in study.trials)
        known = f", {len(study.trials)} trials are known" if study.trials else ""
        size = f"{len(study.feasible):,} candidates"
        name = f"{self._card}[bold]{workload.kernel}[/bold] {workload}"
        self._console.print(f"{name}: {size}{known}")
        if self._console.is_terminal and not self._card:
            self._status = self._console.status("compiling the default")
            self._status.start()

    def trial(self, trial: Trial) -> None:
        """Show a finished trial."""
        self.outcomes[trial.workload][outcome_word(trial.outcome)] += 1
        line = self._line(trial)
        if self._status is not None:
            self._status.update(line)
        else:
            self._console.print(f"  {self._card}{line}")

    def final(self, workload: Workload, contenders: int) -> None:
        """Announce the final."""
        line = f"{workload.kernel}: the best {contenders} race against the rival"
        if self._status is not None:
            self._status.update(line)
        else:
            self._console.print(f"  {self._card}{line}")

    def end(self, result: Winner | Failure) -> None:
        """Show how a workload ended."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if isinstance(result, Failure):
            self._console.print(f"  {self._card}[red]no winner[/red]: {escape(result.reason)}")
        elif result.searched:
            gain = f"{spell_interval(result.gain)} of the default"
            self._console.print(f"  {self._card}winner: {result.candidate}, {gain}")
        else:
            self._console.print(f"  {self._card}{NOT_SEARCHED}: the budget was up")

    def lost(self, workload: Workload, reason: str) -> None:
        """Announce that the card is gone and another one takes its workload."""
        name = f"{workload.kernel} {workload}"
        line = f"{self._card}is gone ({reason}): {name} waits for another card"
        self._console.print(f"  [yellow]{escape(line)}[/yellow]")

    def _line(self, trial: Trial) -> str:
        assert self._study is not None
        parts = [f"trial {trial.number}: {escape(describe_outcome(trial.outcome))}"]
        best, default = self._study.best_ms, self._study.default_ms
        if best is not None and default is not None:
            parts.append(f"best {best:.4g} ms ({default / best:.2f}x the default)")
        counts = self.outcomes[trial.workload]
        if failures := [f"{counts[stage]} {stage}" for stage in STAGES if counts[stage]]:
            parts.append("failed: " + ", ".join(failures))
        if self._countdown is not None:
            parts.append(f"{self._countdown.left} left")
        return " | ".join(parts)


def outcomes_of(cards: Sequence[Progress]) -> dict[Workload, Counter[str]]:
    """Return how the trials of each workload ended, on whatever card."""
    found: dict[Workload, Counter[str]] = {}
    for item in cards:
        for workload, counts in item.outcomes.items():  # a lost card's count is part of another's
            found[workload] = max(found.get(workload, Counter()), counts, key=Counter.total)
    return found


def outcome_word(outcome: Outcome) -> str:
    """Return the stage of a rejection, or ``"timed"``."""
    return "timed" if isinstance(outcome, Measurement) else outcome.stage


def describe_outcome(outcome: Outcome) -> str:
    """Return a time or the first line of a reason."""
    if isinstance(outcome, Measurement):
        return f"{outcome.median_ms:.4g} ms"
    first = (outcome.reason.splitlines() or [""])[0]
    return f"rejected at {outcome.stage}: {first[:100]}"


def spell_interval(interval: Interval) -> str:
    """Return a ratio with its interval, such as ``1.52x [1.49, 1.55]``."""
    return f"{interval.value:.2f}x \\[{interval.low:.2f}, {interval.high:.2f}]"


def results_table(
    results: Sequence[Winner | Failure],
    outcomes: dict[Workload, Counter[str]],
    title: str = "Winners",
) -> Table:
    """Return the table at the end of a run."""
    table = Table(title=title, caption="gain: default / winner; against rival: rival / winner")
    for heading in ("workload", "default", "winner", "gain", "rival", "against rival", "trials"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("gain", "against rival"))
    for result in results:
        counts = outcomes.get(result.workload, Counter())
        trials = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        name = f"{result.workload.kernel} {result.workload}"
        if isinstance(result, Failure):
            table.add_row(name, "", f"none: {escape(result.reason)}", "", "", "", trials)
            continue
        rival, ratio = "", ""
        if result.rival and result.rival_measurement and result.rival_ratio:
            rival = f"{result.rival} {result.rival_measurement.median_ms:.4g} ms"
            ratio = spell_interval(result.rival_ratio)
        table.add_row(
            name,
            f"{result.default_measurement.median_ms:.4g} ms",
            *_won(result),
            rival,
            ratio,
            trials,
        )
    return table


def _won(winner: Winner) -> tuple[str, str]:
    """Return the cells that say who won, and by how much."""
    if not winner.searched:
        return NOT_SEARCHED, ""
    name = f"{winner.measurement.median_ms:.4g} ms {winner.candidate.template}"
    return name, spell_interval(winner.gain)


def kernel_tables(spec: KernelSpec, feasible: FeasibleSet | None) -> list[Table]:
    """Return what `tune show` prints of a kernel: parameters, constraints, workloads."""
    parameters = Table(title=f"{spec.kernel}: {spec.summary}")
    for heading in ("template", "parameter", "values", "default"):
        parameters.add_column(heading, overflow="fold")
    constraints = Table(title="Constraints")
    for heading in ("template", "must hold", "why"):
        constraints.add_column(heading, overflow="fold")
    for template in spec.templates:
        defaults = dict(template.default.parameters)
        for name, values in template.parameters:
            spelled = ", ".join(map(format_value, values))
            parameters.add_row(template.name, name, spelled, format_value(defaults[name]))
        for text, why in _conditions(template):
            constraints.add_row(template.name, text, why)
    workloads = Table(title="Workloads")
    workloads.add_column("set")
    workloads.add_column("workload", overflow="fold")
    for name, items in spec.workloads.items():
        for workload in items:
            workloads.add_row(name, str(workload))
    sizes = Table(title="Size of the space")
    for heading in ("template", "combinations", "feasible on this device"):
        sizes.add_column(heading, justify="right")
    for part in feasible.templates if feasible else ():
        about = "" if part.exact else "about "
        sizes.add_row(part.spec.name, f"{part.product:,}", f"{about}{part.size:,}")
    return [parameters, constraints, workloads, *([sizes] if feasible else [])]


def _conditions(template: TemplateSpec) -> Iterator[tuple[str, str]]:
    """Yield what a candidate must satisfy, and then what its compiled form must, with reasons."""
    for constraint in template.constraints:
        yield constraint.require.text, constraint.why
    for constraint in template.compiled:
        yield f"compiled: {constraint.require.text}", constraint.why
