"""How long a run may take: seconds or trials, and what is left of it."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass

from tuner.records import UsageError

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount of search: one of the two is set.

    Attributes:
        seconds: Wall-clock time.
        trials: Number of evaluated candidates.
    """

    seconds: float | None = None
    trials: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Return the budget that is spelled ``90`` or ``90s``, ``5m``, ``1h`` or ``200trials``.

        Raises:
            UsageError: It is spelled otherwise or is zero.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|trials|)", text.strip())
        if match is None or float(match[1]) == 0:
            raise UsageError(
                f"--budget {text!r}: write seconds, minutes, hours or trials, such "
                "as 90, 90s, 5m, 1h or 200trials"
            )
        if match[2] == "trials":
            return cls(trials=int(float(match[1])))
        return cls(seconds=float(match[1]) * _UNITS_S[match[2]])

    def share(self, part: float) -> Budget:
        """Return a part of the budget between 0 and 1, at least one trial."""
        if self.trials is not None:
            return Budget(trials=max(int(self.trials * part + 1e-9), 1))
        assert self.seconds is not None
        return Budget(seconds=self.seconds * part)

    def less(self, seconds: float) -> Budget:
        """Return what is left after so many seconds, half of it at least; trials stay."""
        if self.seconds is None:
            return self
        return Budget(seconds=max(self.seconds - seconds, self.seconds / 2))


class Countdown:
    """Counts a budget down from now on.

    Args:
        budget: What may be spent.
        stop: Set when nothing may be spent any more.
    """

    def __init__(self, budget: Budget, stop: threading.Event | None = None) -> None:
        self._budget = budget
        self._stop = stop or threading.Event()
        self._started = time.monotonic()
        self._trials = 0

    def count_trial(self) -> None:
        """Take one trial off."""
        self._trials += 1

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left; None for a budget in trials that was not stopped."""
        if self._stop.is_set():
            return 0.0
        if self._budget.seconds is None:
            return None
        return max(self._budget.seconds - self.seconds, 0.0)

    @property
    def trials_left(self) -> int | None:
        """Trials that are left; None for a budget in seconds."""
        if self._budget.trials is None:
            return None
        return max(self._budget.trials - self._trials, 0)

    @property
    def left(self) -> str:
        """What is left, as people say it."""
        if self.trials_left is not None:
            return f"{self.trials_left} trials"
        return f"{self.seconds_left:.0f} s"

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.seconds_left == 0 or self.trials_left == 0
