"""One workload of a kernel that exchanges tokens, in the measuring child of rank 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tuner import codec
from tuner.plugins import Builder, BuildTask, Device
from tuner.records import ChildError, UsageError
from tuner.runtime.variant import Variant
from tuner.serve.bench import Bench
from tuner.serve.blame import blamed
from tuner.serve.ranks.rank import ROUNDS
from tuner.serve.ranks.team import FollowerError, Team, TeamDevice
from tuner.timing.race import RaceResult

Call = Callable[[], None]


class TeamVariant:
    """A file that every rank has loaded.

    Args:
        team: The ranks.
        file: The file.
    """

    def __init__(self, team: Team, file: str) -> None:
        self._team, self._file = team, file
        self.strided = frozenset[str]()

    def bind(self, *_: object) -> Call:
        """Return the call that plays on all ranks, with tensors that they have of their own."""
        return lambda: self._team.play(self._file)


class TeamVerifier:
    """Checks the file that was loaded last, on the workload, each rank its own share.

    Args:
        team: The ranks.
    """

    def __init__(self, team: Team) -> None:
        self._team, self.file = team, ""

    def check(self, variant: object) -> str | None:
        """Return what is wrong with what some rank got, or None."""
        del variant
        team, file = self._team, self.file
        ask = blamed(lambda: team.ask("check", lambda: team.rank.check(file), file=file))
        return next(filter(None, ask()), None)

    def check_edges(self, variant: object) -> str | None:
        """Return None: odd shapes are checked where one device runs all ranks."""
        del variant
        return None


class TeamBench(Bench):
    """Verifies and times variants on all ranks; there is no rival."""

    def make_verifier(self) -> TeamVerifier:
        """Let all ranks make their inputs, and return what checks variants on them."""
        if not hasattr(self.problem, "share"):
            raise UsageError(
                f"{self._signature.kernel} does not exchange anything between ranks: tune it "
                "without --ranks"
            )
        assert isinstance(self._device, TeamDevice)
        self._team = self._device.team
        message = {
            "workload": codec.to_json(self._workload),
            "signature": self._signature.to_json(),
            "problem": self.problem.__file__,
        }
        try:
            self._team.ask("prepare", lambda: self._team.rank.prepare(message), **message)
        except FollowerError as error:  # there is no variant yet to blame
            raise ChildError(str(error)) from error
        return TeamVerifier(self._team)

    def load(self, builder: Builder, task: BuildTask) -> Variant:
        """Let all ranks read a source, and if all can, open a buffer for it."""
        del builder
        file, team = str(task.path), self._team
        blamed(lambda: team.ask("read", lambda: team.rank.read(file), file=file))()
        blamed(lambda: team.ask("open", lambda: team.rank.open(file), file=file))()
        self.verifier.file = file
        return TeamVariant(team, file)

    def follow(self, *_: object) -> None:
        """Measure as it comes: a rank has one buffer open."""

    def measure(
        self, variant: Variant, *, give_up_ms: float | None, ceilings: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], str | None]:
        """Return the timing of a round as JSON.

        Args:
            variant: What to time.
            give_up_ms: Stop early when a round is far slower than this.
            ceilings: Ignored: they are of one device, not of the link between several.
        """
        del ceilings
        patience_ms = give_up_ms and ROUNDS * give_up_ms
        timing, _ = super().measure(variant, give_up_ms=patience_ms, ceilings=None)
        for name in ("median_ms", "low_ms", "high_ms"):
            timing[name] /= ROUNDS
        return timing, None

    def race(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the result of a race, in times of a round."""
        reply = super().race(*arguments, **options)
        result = codec.from_json(RaceResult, reply["race"])
        times = tuple(
            (label, tuple(time / ROUNDS for time in times_ms))
            for label, times_ms in result.times_ms
        )
        copy = tuple(time / ROUNDS for time in result.copy_ms)
        result = dataclasses.replace(result, times_ms=times, copy_ms=copy)
        return {**reply, "race": codec.to_json(result)}

    @property
    def sets(self) -> list[dict[str, Any]]:
        """One set of nothing: every rank has its own inputs."""
        return [{}]

    def rival_calls(self) -> list[Call]:
        """Return no calls."""
        return []


def bench_kind(device: Device) -> type[Bench]:
    """Return the bench for a device, which may stand for those of several ranks."""
    return TeamBench if isinstance(device, TeamDevice) else Bench
