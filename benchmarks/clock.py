"""What choosing by the tuner's race costs and loses, beside timing everyone 100 times.

Contenders with known times: how far the chosen one is from the best (regret), how often something
that is no faster than the default is chosen in its place, and how long choosing takes.

Example:
    python benchmarks/clock.py --output benchmarks/results/clock/cpu.csv
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median

from rows import Result, ResultsFile, Spread
from spin import Spin, build, busy_neighbour, cpu_clock

from tuner.devices.cpu import Cpu
from tuner.timing.clock import Clock
from tuner.timing.finals import pick
from tuner.timing.race import race
from tuner.timing.statistics import median_interval

ROUNDS = 400_000
"""Rounds of the default: about half a millisecond."""

FIELDS: Mapping[str, Sequence[float]] = {
    "planted": (1.0, 1.05, 1.01, 0.99, 0.98),
    "equal": (1.0, 1.0, 1.0, 1.0, 1.0),
}
"""True times of the contenders over the default's, which comes first.

The best comes last, since of those that tie the race picks the first.
"""

SAMPLES = 100
WARM_UP = 10
BUDGET_S = 2.0

Choose = Callable[[Clock, Spin, Sequence[float], int], int]


def by_race(clock: Clock, spin: Spin, factors: Sequence[float], seed: int) -> int:
    """Return whom the tuner's final would freeze."""
    calls = {str(place): [spin(round(ROUNDS * item))] for place, item in enumerate(factors)}
    result = race(clock, calls, budget_s=BUDGET_S, seed=seed, reference="0")
    return int(pick(result, lambda _: (0.0,)).winner)


def by_samples(average: Callable[[Sequence[float]], float]) -> Choose:
    """Return the choice of the least average over single calls, each contender by itself."""

    def choose(clock: Clock, spin: Spin, factors: Sequence[float], seed: int) -> int:
        del seed
        averages = []
        for factor in factors:
            call = spin(round(ROUNDS * factor))
            for _ in range(WARM_UP):
                call()
            times_s = []
            for _ in range(SAMPLES):
                start_s = clock.now()
                call()
                times_s.append(clock.now() - start_s)
            averages.append(average(times_s))
        return averages.index(min(averages))

    return choose


METHODS: Mapping[str, Choose] = {
    "tuner": by_race,
    f"{SAMPLES} samples, mean": by_samples(mean),
    f"{SAMPLES} samples, median": by_samples(median),
    f"{SAMPLES} samples, least": by_samples(min),
}


def contest(
    spin: Spin, factors: Sequence[float], methods: Mapping[str, Choose], repeats: int
) -> list[Result]:
    """Return what each method costs and loses; they take turns."""
    clock = cpu_clock()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    chosen: dict[str, list[int]] = {name: [] for name in methods}
    for repeat in range(repeats):
        for name, choose in methods.items():
            start_s = time.perf_counter()
            chosen[name].append(choose(clock, spin, factors, repeat))
            seconds[name].append(time.perf_counter() - start_s)
    results = []
    for name in methods:
        regrets = [100 * (factors[place] / min(factors) - 1) for place in chosen[name]]
        best = sum(factors[place] == min(factors) for place in chosen[name])
        replaced = sum(place > 0 for place in chosen[name])
        cost = median_interval([1e3 * item for item in seconds[name]])
        results.append(
            Result(
                name,
                Spread(cost.value, cost.low, cost.high),
                mean(regrets),
                "% regret",
                f"{repeats} choices: one of the best in {best}, not the default in {replaced}; "
                f"largest regret {max(regrets):.1f} %; the times are those of choosing; "
                f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
            )
        )
    return results


def false_winners(spin: Spin, races: int, *, budget_s: float = BUDGET_S) -> int:
    """Return in how many races between equals anyone but the default wins."""
    clock, wrong = cpu_clock(), 0
    for seed in range(races):
        calls = {str(place): [spin(ROUNDS)] for place in range(4)}
        result = race(clock, calls, budget_s=budget_s, seed=seed, reference="0")
        wrong += pick(result, lambda _: (0.0,)).winner != "0"
    return wrong


def main() -> None:
    """Replace the rows of every field of contenders, quiet and beside a busy neighbour."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    file = ResultsFile(options.output, Cpu().info().name)
    with tempfile.TemporaryDirectory() as folder:
        spin = build(Path(folder))
        for neighbour in ("none", "busy"):
            for field, factors in FIELDS.items():
                with busy_neighbour() if neighbour == "busy" else nullcontext():
                    results = contest(spin, factors, METHODS, options.repeats)
                workload = f"contenders={field},neighbour={neighbour}"
                file.replace("selection", workload, results)
                for item in results:
                    assert item.spread
                    print(
                        f"{workload}: {item.contender}: {item.rate:.2f} % regret, "
                        f"{item.spread.median_ms:.0f} ms; {item.note}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
