"""The wall clock against simulated machines whose kernels' true times are known."""

from __future__ import annotations

import pytest
from simulated import Machine

from tuner.timing.calibration import BelowFloor
from tuner.timing.clock import Clock
from tuner.timing.pace import Pacer

ACCELERATOR = {"launch_s": 5e-6, "queue_s": 4e-6}
GRAPHS = {**ACCELERATOR, "gap_s": 0.5e-6}


def clock_of(machine):
    clock = Clock(machine, now=machine.now)
    clock.calibrate(machine.kernel(0.0))
    return clock


def test_calibration_finds_the_costs_of_a_host():
    calibration = clock_of(Machine(launch_s=2e-6)).calibration
    assert calibration.resolution_s == pytest.approx(50e-9)
    assert calibration.plain.launch_s == pytest.approx(2e-6, rel=0.02)
    assert calibration.graph is None
    assert not calibration.asynchronous


def test_calibration_finds_the_costs_of_an_accelerator():
    calibration = clock_of(Machine(**GRAPHS)).calibration
    assert calibration.asynchronous
    assert calibration.call_s == pytest.approx(9e-6, rel=0.1)
    assert calibration.plain.launch_s == pytest.approx(5e-6, rel=0.02)
    assert calibration.graph.launch_s == pytest.approx(0.5e-6, rel=0.02)
    assert calibration.graph.batch_s == pytest.approx(9e-6, rel=0.1)


@pytest.mark.parametrize("costs", [{}, GRAPHS], ids=["host", "graphs"])
@pytest.mark.parametrize("sets", [1, 7])
@pytest.mark.parametrize("true_s", [2e-6, 6e-6, 20e-6, 150e-6, 5e-3])
def test_a_kernel_is_timed_within_one_percent(costs, sets, true_s):
    machine = Machine(noise=0.001, **costs)
    calls = [machine.kernel(true_s)] * sets
    timing = clock_of(machine).measure(calls, budget_s=0.2, give_up_ms=None)
    assert timing.median_ms == pytest.approx(true_s * 1e3, rel=0.01)
    assert timing.low_ms <= timing.median_ms <= timing.high_ms
    assert timing.samples >= 10
    assert timing.regime == ("warm" if sets == 1 else "cold")
    assert timing.method.startswith("captured calls" if costs else "calls")


@pytest.mark.parametrize("true_s", [8e-6, 30e-6, 2e-3])
def test_without_graphs_launches_hide_behind_longer_kernels(true_s):
    machine = Machine(**ACCELERATOR)
    timing = clock_of(machine).measure([machine.kernel(true_s)], budget_s=0.2, give_up_ms=None)
    assert timing.median_ms == pytest.approx(true_s * 1e3, rel=0.01)


def test_hiccups_do_not_move_the_median():
    machine = Machine(noise=0.01, hiccups=100)
    timing = clock_of(machine).measure([machine.kernel(3e-4)], budget_s=0.5, give_up_ms=None)
    assert timing.median_ms == pytest.approx(0.3, rel=0.02)


def test_a_coarse_clock_takes_longer_batches():
    machine = Machine(tick_s=1e-3)
    timing = clock_of(machine).measure([machine.kernel(1e-4)], budget_s=5.0, give_up_ms=None)
    assert timing.median_ms == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(("costs", "true_s"), [({}, 50e-9), (ACCELERATOR, 2e-6), (GRAPHS, 0.2e-6)])
def test_work_below_the_floor_is_refused_with_the_reason(costs, true_s):
    machine = Machine(**costs)
    with pytest.raises(BelowFloor, match="a call takes .* us, of which its launch takes .* us"):
        clock_of(machine).measure([machine.kernel(true_s)], budget_s=0.2, give_up_ms=None)


def test_work_that_takes_no_time_is_refused(monkeypatch):
    monkeypatch.setattr("tuner.timing.clock.MOST_CALLS", 1000)
    machine = Machine(launch_s=0.0)
    with pytest.raises(BelowFloor, match="1000 calls take .* us in all: nothing beside"):
        clock_of(machine).measure([machine.kernel(0.0)], budget_s=0.2, give_up_ms=None)


def test_a_clock_that_stands_still_is_refused():
    with pytest.raises(BelowFloor, match="did not move in 1000000 looks"):
        Clock(Machine(), now=lambda: 1.0).calibrate()


def test_a_far_slower_variant_is_stopped_early():
    machine = Machine(noise=0.01)
    clock = clock_of(machine)
    start_s = machine.time_s
    timing = clock.measure([machine.kernel(0.5)], budget_s=10.0, give_up_ms=1.0)
    assert timing.gave_up
    assert timing.median_ms == pytest.approx(500, rel=0.02)
    assert machine.time_s - start_s <= 3.5


def test_a_slightly_slower_variant_is_measured():
    machine = Machine(noise=0.01)
    timing = clock_of(machine).measure([machine.kernel(1.5e-3)], budget_s=1.0, give_up_ms=1.0)
    assert not timing.gave_up
    assert timing.samples >= 10


def test_a_variant_known_to_be_slower_is_not_measured_further():
    machine = Machine(noise=0.1)
    timing = clock_of(machine).measure([machine.kernel(1.5e-3)], budget_s=5.0, give_up_ms=1.0)
    assert 10 <= timing.samples <= 20
    assert timing.low_ms > 1.0


def test_a_precise_median_ends_before_the_budget():
    machine = Machine(noise=0.001)
    clock = clock_of(machine)
    start_s = machine.time_s
    clock.measure([machine.kernel(1e-3)], budget_s=10.0, give_up_ms=None)
    assert machine.time_s - start_s < 2.0


@pytest.mark.parametrize(
    "drift",
    [
        lambda time_s: 1.0 if time_s < 1.0 else 1.15,
        lambda time_s: 1.0 + 0.1 * (time_s % 0.3 > 0.1),
        lambda time_s: 1.0 + 0.05 * time_s,
    ],
    ids=["throttled", "now and then", "warming up"],
)
def test_who_is_timed_beside_a_pacer_takes_what_it_would_at_its_usual_pace(drift):
    machine = Machine(noise=0.001, drift=drift, **GRAPHS)
    clock = clock_of(machine)
    machine.time_s = 2.0
    pacer = Pacer("best", clock.prepare([machine.kernel(1e-3)]), 1e-3, budget_s=0.2)
    alone, paced = (
        clock.measure([machine.kernel(1.03e-3)], budget_s=0.2, give_up_ms=1.0, pacer=each)
        for each in (None, pacer)
    )
    assert alone.median_ms > 1.05
    assert paced.median_ms == pytest.approx(1.03, rel=0.005)
    assert paced.low_ms <= paced.median_ms <= paced.high_ms


def test_buffer_sets_are_visited_in_turn_across_variants():
    machine, visited = Machine(), []
    kernel = machine.kernel(1e-3)

    def bind(index):
        def call():
            visited.append(index)
            kernel()

        return call

    clock = clock_of(machine)
    sets = [bind(index) for index in range(5)]
    first, second = clock.prepare(sets), clock.prepare(sets)
    for meter in (first, second, second, first):
        meter.sample()
    assert visited == [index % 5 for index in range(len(visited))]


@pytest.mark.parametrize(
    ("times_ms", "taken"),
    [
        ((1.0, 1.001), 2),
        ((1.3, 1.1, 1.0, 1.01), 4),  # until two agree
        ((5.0, 5.01, 1.0, 1.01), 4),  # and not on a wait
        ((5.0, 4.0, 3.0, 2.5, 2.2, 2.1), 6),
    ],
)
def test_a_visit_ends_when_two_readings_confirm_each_other(times_ms, taken):
    machine, left_ms = Machine(), []

    def call():
        machine.kernel(1e-3 * (left_ms.pop(0) if left_ms else 1.0))()

    meter = clock_of(machine).prepare([call])
    left_ms += [*times_ms, 9.0]
    assert meter.visit(2, 6) == pytest.approx(1e-3 * sorted(times_ms)[(taken - 1) // 4], rel=1e-3)
    assert left_ms == [9.0]


def test_a_failure_in_a_variant_passes_through():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clock_of(Machine()).measure([fail], budget_s=0.1, give_up_ms=None)
