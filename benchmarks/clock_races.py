"""Races between equals, and between two that are 2 % apart: how often the clock is wrong."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from clock_hardware import Begun, by_workload
from contest import reason
from hardware import Hardware
from rows import OwnRows
from variants import Built, Place, load

from tuner.serve.bench import Bench, Call
from tuner.timing.finals import pick
from tuner.timing.race import race

RACE_S = 1.0
"""The least that a final takes."""

SPIN_ROUNDS = {"cpu": (102_000, 100_000), "gpu": (4080, 4000)}
"""Multiples of 16, so that triton compiles the same code for both."""


_Pair = tuple[str, dict[str, Sequence[Call]]]
"""A workload, and two contenders of which the first, ``"0"``, is the default."""


def hold_races(
    options: argparse.Namespace, built: Sequence[Built], place: Place, output: OwnRows
) -> int:
    """Race a variant against its own copy, and two that are 2 % apart; return the exit status."""
    place.calibrate()
    end_s = time.monotonic() + options.seconds
    begun = Begun(options.folder / "races.begun")
    benches: list[Bench] = []  # hold the buffers
    equal = _equals(place, built, benches)
    planted = _planted(place, options.folder, benches)
    # Both kinds take turns, so that time that runs out costs both alike.
    turns = [("race of equals", equal, turn) for turn in range(options.races)]
    turns += [("race of two 2 % apart", planted, turn) for turn in range(options.planted)]
    for op, pairs, turn in sorted(turns, key=lambda item: item[2]):
        if not pairs or time.monotonic() > end_s or not begun.first_time(op, turn):
            continue
        workload, contenders = pairs[turn % len(pairs)]
        try:
            row = _race(place, contenders, turn, equal=pairs is equal)
        except Exception as error:
            row = {"note": reason(error), "outcome": "failed"}
        output.add({"op": op, "workload": workload, **row})
        if row["outcome"] == "failed" and not place.device.answers():
            return 1
    print("races:", len([row for row in output.rows if row["op"].startswith("race")]), flush=True)
    return 0


def _equals(place: Place, built: Sequence[Built], benches: list[Bench]) -> list[_Pair]:
    """Return a variant of each kernel beside its own copy, on a workload of middling length."""
    groups = by_workload(built)
    found: list[_Pair] = []
    for kernel in dict.fromkeys(kernel for kernel, _ in groups):
        workloads = [workload for name, workload in groups if name == kernel]
        item = groups[kernel, workloads[len(workloads) // 2]][0]
        with suppress(Exception):
            benches.append(place.bench(item.kernel, item.workload))
            contenders = {label: place.calls(benches[-1], item) for label in ("0", "1")}
            found.append((f"{item.kernel} {item.workload} {item.variant}", contenders))
    return found


def _planted(place: Place, folder: Path, benches: list[Bench]) -> list[_Pair]:
    """Return pairs of which the second, that is no default, takes 2 % less."""
    kind = "cpu" if place.device.kind == "cpu" else "gpu"
    found: list[_Pair] = []
    with suppress(Exception):
        if kind == "cpu":
            from spin import build
        else:
            from spin_triton import build
        spin = build(folder) if kind == "cpu" else build(place.device.torch_device)
        found.append(("spin", {str(n): [spin(r)] for n, r in enumerate(SPIN_ROUNDS[kind])}))
    with suppress(Exception):
        more, less = load(folder / "planted.json")
        benches += [place.bench(item.kernel, item.workload) for item in (more, less)]
        calls = [place.calls(*pair) for pair in zip(benches[-2:], (more, less), strict=True)]
        name = f"matmul {more.workload} {less.workload}"
        found.append((name, dict(zip("01", calls, strict=True))))
    return [(_with_truth(place, *pair), pair[1]) for pair in found]


def _with_truth(place: Place, workload: str, contenders: Mapping[str, Sequence[Call]]) -> str:
    """Return the pair's name with what the hardware says of it."""
    try:
        more, less = (
            median([Hardware(place, calls).stamps().call_us for _ in range(3)])
            for calls in contenders.values()
        )
    except Exception as error:  # the race can be held all the same
        return f"{workload}: {reason(error)}"
    return f"{workload}: {100 * (more / less - 1):.2f} % by the hardware"


def _race(
    place: Place, contenders: Mapping[str, Sequence[Call]], seed: int, *, equal: bool
) -> dict[str, object]:
    result = race(place.clock, contenders, budget_s=RACE_S, seed=seed, reference="0")
    verdict = pick(result, lambda _: (0.0,))
    outcome = {True: ("kept", "false winner"), False: ("missed", "found")}[equal]
    return {
        "regime": result.regime,
        "outcome": outcome[verdict.winner != "0"],
        "note": f"{result.end} after {len(result.copy_ms)} blocks; the default takes "
        f"{median(dict(result.times_ms)['0']) * 1e3:.4g} us, {verdict.gain.value:.4f} of the pick",
    }
