"""Races on simulated machines: who is found, who is dropped, and when it ends."""

from __future__ import annotations

import math
import time
from statistics import median

import numpy as np
import pytest
from simulated import Machine

from tuner import codec
from tuner.timing import finals
from tuner.timing.blocks import ERROR
from tuner.timing.calibration import BelowFloor
from tuner.timing.clock import Clock
from tuner.timing.race import RaceResult, race


def drifting(time_s):
    """Return a clock that swings by 10 % within seconds, as a card that is getting warm does."""
    return 1 + 0.1 * math.sin(2 * time_s)


def run(machine, *, budget_s=6.0, seed=0, rival=None, **times_s):
    clock = Clock(machine, now=machine.now)
    contenders = {label: [machine.kernel(true_s)] for label, true_s in times_s.items()}
    return race(clock, contenders, budget_s=budget_s, seed=seed, reference="default", rival=rival)


def winner(result):
    return finals.pick(result, equally_simple).winner


def equally_simple(_label):
    return (0.0,)


def blocks(result):
    return {label: len(times_ms) for label, times_ms in result.times_ms}


def ratio(result, label):
    times_ms = dict(result.times_ms)
    return median(np.divide(times_ms[label], times_ms["default"][: len(times_ms[label])]))


def test_a_planted_difference_of_two_percent_is_found():
    found = 0
    for seed in range(100):
        machine = Machine(noise=0.01, hiccups=0.5, drift=drifting, seed=seed)
        result = run(machine, seed=seed, default=5e-3, faster=4.9e-3, slower=5.5e-3)
        found += winner(result) == "faster"
    assert found >= 95


def test_copies_of_the_default_do_not_beat_it():
    false_winners = 0
    for seed in range(100):
        machine = Machine(noise=0.02, hiccups=0.5, drift=drifting, seed=seed)
        result = run(machine, seed=seed, default=5e-3, one=5e-3, two=5e-3, three=5e-3)
        false_winners += winner(result) != "default"
    assert false_winners <= 5


def test_windows_in_which_the_reference_moved_are_discarded():
    def throttled(time_s):
        return 1.3 if time_s % 1.0 < 0.1 else 1.0

    machine = Machine(noise=0.003, drift=throttled)
    result = run(machine, budget_s=20.0, default=5e-3, equal=5e-3 * 0.999, faster=4.95e-3)
    assert result.discarded > 0
    assert len(result.copy_ms) == blocks(result)["default"] == blocks(result)["faster"]
    assert max(result.copy_ms) < 5e-3 * 1e3 * 1.05
    assert ratio(result, "faster") == pytest.approx(0.99, rel=0.002)


def test_waits_in_most_samples_leave_the_times_alone():
    machine = Machine(noise=0.01, hiccups=1400)  # one of 5 ms in 60 % of the calls
    result = run(machine, default=4.3e-4, faster=4.0e-4, equal=4.3e-4)
    assert winner(result) == "faster"
    times_ms = dict(result.times_ms)
    assert median(times_ms["default"]) == pytest.approx(0.43, rel=0.05)
    assert median(times_ms["faster"]) == pytest.approx(0.40, rel=0.05)


def test_many_looks_share_the_error():
    early = run(Machine(noise=0.003), budget_s=60.0, default=5e-3, faster=4e-3)
    late = run(Machine(noise=0.2), budget_s=20.0, default=5e-3, equal=5e-3)
    assert early.error == ERROR / 2
    assert late.error < ERROR / 50


def test_who_is_dropped_keeps_its_times_when_the_machine_finds_another_pace():
    def settled(time_s):
        return 1.3 if time_s < 0.8 else 1.0

    machine = Machine(noise=0.02, drift=settled)
    result = run(machine, budget_s=20.0, default=5e-3, near=4.97e-3, far=8e-3)
    assert blocks(result)["far"] == 10
    assert blocks(result)["near"] > 40
    assert ratio(result, "far") == pytest.approx(1.6, rel=0.02)


def test_a_loser_is_no_longer_sampled():
    result = run(Machine(noise=0.05), default=5e-3, near=5.02e-3, far=8e-3)
    assert blocks(result)["far"] < 20 < blocks(result)["near"]


def test_a_clear_winner_ends_the_race():
    machine = Machine(noise=0.005)
    result = run(machine, budget_s=60.0, default=5e-3, faster=4e-3)
    assert result.end == "separated"
    assert machine.time_s < 10.0  # 6 s of which are spent warming up
    assert winner(result) == "faster"


def test_equals_end_in_a_tie_that_the_default_wins():
    result = run(Machine(noise=0.003), budget_s=60.0, default=5e-3, equal=5e-3)
    assert result.end == "tied"
    assert winner(result) == "default"


def test_the_budget_ends_an_open_race():
    machine = Machine(noise=0.2)
    result = run(machine, budget_s=2.0, default=5e-3, equal=5e-3)
    assert result.end == "budget"
    assert machine.time_s < 2.1


def test_a_race_has_one_block_whatever_its_budget():
    result = run(Machine(), budget_s=0.0, default=5e-3, faster=4e-3)
    assert blocks(result) == {"default": 1, "faster": 1}
    assert winner(result) == "default"


def test_the_rival_neither_wins_nor_drops_anyone():
    result = run(Machine(noise=0.003), rival="library", default=5e-3, faster=4e-3, library=1e-3)
    assert winner(result) == "faster"
    assert len(set(blocks(result).values())) == 1
    assert finals.ratio(result, "library", "faster").value == pytest.approx(0.25, rel=0.01)


def test_a_contender_under_the_floor_is_refused_by_name():
    machine = Machine(launch_s=2e-6)
    clock = Clock(machine, now=machine.now)
    clock.calibrate(machine.kernel(0.0))
    contenders = {"default": [machine.kernel(1e-4)], "empty": [machine.kernel(1e-8)]}
    result = race(clock, contenders, budget_s=1.0, seed=0, reference="default")
    assert [label for label, _ in result.refused] == ["empty"]
    assert blocks(result).keys() == {"default"}
    with pytest.raises(BelowFloor, match="too short"):
        race(clock, contenders, budget_s=1.0, seed=0, reference="empty")


def test_the_same_seed_gives_the_same_race():
    results = [run(Machine(noise=0.02), seed=3, default=5e-3, other=4.9e-3) for _ in range(2)]
    assert results[0] == results[1]


def test_a_result_survives_json():
    result = run(Machine(noise=0.02), default=5e-3, other=4.9e-3)
    assert codec.from_json(RaceResult, codec.to_json(result)) == result


@pytest.mark.alone
def test_half_as_much_work_again_is_found_on_this_machine():
    class Host:
        def synchronize(self):
            pass

        def capture(self, _call, _count):
            return None

    values = np.linspace(0.0, 1.0, 100_000, dtype=np.float32)
    results = np.empty_like(values)

    def work(count):
        return [lambda: np.exp(values[:count], out=results[:count])]

    clock = Clock(Host())
    clock.calibrate()
    contenders = {"default": work(90_000), "faster": work(60_000), "equal": work(90_000)}
    start_s = time.perf_counter()
    result = race(clock, contenders, budget_s=5.0, seed=0, reference="default")
    pick = finals.pick(result, equally_simple)
    assert pick.winner == "faster"
    assert pick.gain.value == pytest.approx(1.5, rel=0.1)
    assert time.perf_counter() - start_s < 20.0
