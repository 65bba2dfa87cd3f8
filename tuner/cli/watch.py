"""`tune watch`: how a store grows, while a run works on it or after."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tuner.cli.display import NOT_SEARCHED, describe_outcome, make_console, spell_interval
from tuner.records import STAGES, Measurement, Trial, Winner, Workload
from tuner.store import Store, open_stores

_PAUSE_S = 0.5
_RECENT_S = 60.0
"""A store with a younger trial is taken to be in use; the pace is that of this time."""


@dataclass(slots=True)
class _Progress:
    """What is known of one workload."""

    trials: int = 0
    stages: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    default_ms: float | None = None
    best_ms: float | None = None
    best_at: int | None = None
    winner: Winner | None = None

    def add(self, trial: Trial) -> None:
        """Count a trial: the first one is the default's."""
        self.trials += 1
        if not isinstance(trial.outcome, Measurement):
            self.stages[trial.outcome.stage] += 1
            return
        time_ms = trial.outcome.median_ms
        if self.trials == 1:
            self.default_ms = time_ms
        if self.best_ms is None or time_ms < self.best_ms:
            self.best_ms, self.best_at = time_ms, trial.number


class Watch:
    """The state of the stores under a folder, as far as it was read.

    Args:
        root: Folder of the stores.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stores: dict[str, tuple[Store, int, int]] = {}
        self.workloads: defaultdict[tuple[str, Workload], _Progress] = defaultdict(_Progress)
        self.ended_s: list[float] = []

    def news(self) -> Iterator[str]:
        """Read what is new and yield a line for each trial and winner.

        Raises:
            UsageError: The folder holds no store.
        """
        for name in [store.folder.name for store in self._opened()]:
            store, seen, inode = self._stores[name]
            store.refresh()
            for trial in store.trials[seen:]:
                yield self._add(name, trial)
            self._stores[name] = (store, len(store.trials), inode)
            for winner in store.winners:
                state = self.workloads[name, winner.workload]
                if state.winner != winner:
                    state.winner = winner
                    yield f"{name} {_name(winner.workload)}: {_result(winner)}"

    def _opened(self) -> Sequence[Store]:
        """Return the stores that are there now; one that was begun anew is opened anew."""
        paths = {path.parent.name: path for path in self._root.glob("*/trials.jsonl")}
        for name, (_, _, inode) in list(self._stores.items()):
            if name not in paths or paths[name].stat().st_ino != inode:
                del self._stores[name]
                for key in [key for key in self.workloads if key[0] == name]:
                    del self.workloads[key]
        if not self._stores or paths.keys() - self._stores.keys():
            for store in open_stores(self._root):
                inode = store.path.stat().st_ino
                self._stores.setdefault(store.folder.name, (store, 0, inode))
        return [store for store, _, _ in self._stores.values()]

    def _add(self, name: str, trial: Trial) -> str:
        state = self.workloads[name, trial.workload]
        state.add(trial)
        if trial.ended_s is not None:
            self.ended_s.append(trial.ended_s)
        best = f" | best {state.best_ms:.4g} ms" if state.best_ms is not None else ""
        outcome = describe_outcome(trial.outcome)
        return f"{name} {_name(trial.workload)}: trial {trial.number}: {outcome}{best}"

    def pace(self, now_s: float) -> str:
        """Return when the last trial ended and how many ended in the last minute."""
        if not self.ended_s:
            return "no trial says when it ended"
        age_s = max(now_s - self.ended_s[-1], 0.0)
        recent = sum(now_s - at <= _RECENT_S for at in self.ended_s)
        if age_s > _RECENT_S:
            return f"idle: the last trial ended {_spell_age(age_s)} ago"
        return f"running: {recent} trials in the last minute"


def watch_store(root: Path, *, once: bool) -> None:
    """Show a store until interrupted, or once.

    Args:
        root: Folder of the stores.
        once: Show what is there and return.
    """
    console = make_console()
    watch = Watch(root)
    if once:
        for _ in watch.news():
            pass  # the table says it all
        console.print(_view(watch))
        return
    try:
        (_live if console.is_terminal else _lines)(console, watch)
    except KeyboardInterrupt:
        console.print(f"stopped watching {root}")


def _live(console: Console, watch: Watch) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            for _ in watch.news():
                pass
            live.update(_view(watch), refresh=True)
            time.sleep(_PAUSE_S)


def _lines(console: Console, watch: Watch) -> None:
    while True:
        for line in watch.news():
            console.print(line, soft_wrap=True, markup=False)
        time.sleep(_PAUSE_S)


def _view(watch: Watch) -> RenderableType:
    table = Table()
    several = len({arch for arch, _ in watch.workloads}) > 1
    headings = ("workload", "trials", "rejected", "default", "best", "gain", "found at", "winner")
    for heading in headings:
        right = heading in ("trials", "default", "best", "gain", "found at")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for (arch, workload), state in watch.workloads.items():
        name = f"{arch} {_name(workload)}" if several else _name(workload)
        rejected = [f"{count} {stage}" for stage, count in state.stages.items() if count]
        known = state.default_ms is not None and state.best_ms is not None
        table.add_row(
            name,
            str(state.trials),
            ", ".join(rejected) or "none",
            _spell_ms(state.default_ms),
            _spell_ms(state.best_ms),
            f"{state.default_ms / state.best_ms:.2f}x" if known else "",  # type: ignore[operator]
            "" if state.best_at is None else f"trial {state.best_at}",
            _spell_winner(state.winner),
        )
    return Group(table, Text(watch.pace(time.time())))


def _result(winner: Winner) -> str:
    if not winner.searched:
        return NOT_SEARCHED
    return f"winner {winner.candidate}, {winner.gain.value:.2f}x of the default"


def _spell_winner(winner: Winner | None) -> str:
    if winner is None:
        return "not yet"
    return spell_interval(winner.gain) if winner.searched else NOT_SEARCHED


def _name(workload: Workload) -> str:
    return f"{workload.kernel} {workload}"


def _spell_ms(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.4g} ms"


def _spell_age(age_s: float) -> str:
    for unit, seconds in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} seconds"
