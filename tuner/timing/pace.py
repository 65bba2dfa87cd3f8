"""A device's pace: how fast it is right now, by a variant whose usual time is known.

A card changes its clock by its load and power within tens of milliseconds, by 15 % and more for
what keeps it busiest: short measurements see another card than long ones. What is timed beside a
pacer takes what it would take at the pacer's usual pace.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.timing.meter import VISIT_S, Meter


@dataclass(frozen=True, slots=True)
class Pacer:
    """A variant that is visited before and after every visit to another one.

    Attributes:
        name: What it is known by.
        meter: Times it.
        usual_s: Seconds of one call at its usual pace.
        budget_s: Seconds that all visits to it may take.
    """

    name: str
    meter: Meter
    usual_s: float
    budget_s: float

    def slowness(self) -> float:
        """Return how many times as long as usual a call of it takes now."""
        samples = self.meter.samples_per_visit(self.budget_s, VISIT_S)
        return max(self.meter.visit(samples) / self.usual_s, 1e-3)
