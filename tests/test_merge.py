"""`tune merge`: stores of several machines to one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from frozen import DEVICE, Project

from tuner.merge import merge
from tuner.records import Candidate, Measurement, Rejection, Trial, UsageError, Winner, Workload
from tuner.store import Store, open_stores

WORKLOAD = Workload("scale", (("N", 3),), "float32")
NEWER = dataclasses.replace(DEVICE, versions=(("gcc", "99"),))


def add(store: Store, tile: int, time_ms: float) -> Trial:
    measured = Measurement(time_ms, time_ms, time_ms, 5, "warm", 0.1)
    candidate = Candidate.of("cpu", {"TILE": tile})
    return store.add_trial(WORKLOAD, candidate, f"{tile}", measured, seconds=0.5)


def store_of(root: Path, *times: tuple[int, float], device=DEVICE) -> Store:
    store = Store(root, device.arch)
    store.begin(device)
    for tile, time_ms in times:
        add(store, tile, time_ms)
    return store


def outcomes(root: Path, name: str = DEVICE.arch) -> list[tuple[int, float]]:
    return [
        (dict(trial.candidate.parameters)["TILE"], trial.outcome.median_ms)
        for trial in Store(root, name).trials
    ]


def test_trials_of_all_stores_are_kept_in_the_order_of_their_ends(tmp_path):
    one, two = store_of(tmp_path / "one"), store_of(tmp_path / "two")
    add(one, 1, 1.0)
    add(two, 2, 2.0)
    add(one, 4, 4.0)
    (log,) = merge([tmp_path / "two", tmp_path / "one"], tmp_path / "all")
    assert outcomes(tmp_path / "all") == [(1, 1.0), (2, 2.0), (4, 4.0)]
    assert [trial.number for trial in Store(tmp_path / "all", DEVICE.arch).trials] == [0, 1, 2]
    assert (log.doubled, log.repeated) == (0, 0)
    assert Store(tmp_path / "all", DEVICE.arch).device == DEVICE


def test_a_trial_that_two_stores_have_is_kept_once(tmp_path):
    store_of(tmp_path / "one", (1, 1.0), (2, 2.0))
    merge([tmp_path / "one"], tmp_path / "copy")
    add(Store(tmp_path / "copy", DEVICE.arch), 4, 4.0)
    (log,) = merge([tmp_path / "one", tmp_path / "copy", tmp_path / "one"], tmp_path / "all")
    assert outcomes(tmp_path / "all") == [(1, 1.0), (2, 2.0), (4, 4.0)]
    assert log.doubled == 2


def test_what_was_measured_again_is_counted_and_both_are_kept(tmp_path):
    store_of(tmp_path / "one", (1, 1.0))
    store_of(tmp_path / "two", (1, 3.0))
    (log,) = merge([tmp_path / "two", tmp_path / "one"], tmp_path / "all")
    assert outcomes(tmp_path / "all") == [(1, 1.0), (1, 3.0)]
    assert log.repeated == 1


def test_other_versions_lie_apart_and_the_latest_has_the_plain_name(tmp_path):
    store_of(tmp_path / "old", (1, 1.0))
    store_of(tmp_path / "new", (1, 0.5), device=NEWER)
    renamed = dataclasses.replace(NEWER, name="Another/part")
    store_of(tmp_path / "another", (1, 0.7), device=renamed)
    merge([tmp_path / "old", tmp_path / "another", tmp_path / "new"], tmp_path / "all")
    names = {store.folder.name for store in open_stores(tmp_path / "all")}
    assert DEVICE.arch in names
    assert len(names) == 3
    assert {name.partition("@")[0] for name in names} == {DEVICE.arch}
    assert any("gcc-99" in name for name in names)
    assert outcomes(tmp_path / "all") == [(1, 0.7)]
    # merging what was merged changes nothing
    merge([tmp_path / "all"], tmp_path / "again")
    for name in names:
        lines = [
            (tmp_path / root / name / "trials.jsonl").read_bytes() for root in ("all", "again")
        ]
        assert lines[0] == lines[1]


def test_one_log_with_two_versions_is_divided(tmp_path):
    store = store_of(tmp_path / "one", (1, 1.0))
    store.begin(DEVICE)  # the same again: nothing to say
    store.begin(NEWER)
    add(store, 1, 0.5)
    assert sum("device" in json.loads(line) for line in store.path.open()) == 2
    first, second = merge([tmp_path / "one"], tmp_path / "all")
    assert (first.name, second.name) != (first.arch, first.arch)
    assert outcomes(tmp_path / "all") == [(1, 0.5)]


def test_quarantines_and_refusals_travel(tmp_path):
    store = store_of(tmp_path / "one", (1, 1.0))
    store.add_quarantine("dead", Rejection("runtime", "killed by SIGSEGV"))
    store.add_refusal(WORKLOAD, "bad", Rejection("compile", "no"))
    (store.sources / "ab.cpp").write_text("int x;")
    (store.sources / "cd.part").write_text("int")
    merge([tmp_path / "one"], tmp_path / "all")
    merged = Store(tmp_path / "all", DEVICE.arch)
    assert merged.quarantined("dead") == Rejection("runtime", "killed by SIGSEGV")
    assert merged.refused(WORKLOAD, "bad") == Rejection("compile", "no")
    assert [path.name for path in merged.sources.iterdir()] == ["ab.cpp"]


def winner_in(root: Path, winner: Winner) -> None:
    store = Store(root, winner.device.arch)
    store.begin(winner.device)
    store.add_winner(winner)


def test_of_two_winners_the_later_then_the_faster_counts(tmp_path):
    project = Project(tmp_path / "project")
    slow = dataclasses.replace(project.winner(), date="2026-11-30")
    time = dataclasses.replace(slow.measurement, median_ms=slow.measurement.median_ms / 2)
    other = Candidate.of(slow.candidate.template, {"X": 1})
    fast = dataclasses.replace(slow, measurement=time, candidate=other)
    old = dataclasses.replace(fast, date="2025-01-01")
    for name, winner in (("fast", fast), ("slow", slow), ("old", old)):
        winner_in(tmp_path / name, winner)
    (log,) = merge([tmp_path / name for name in ("fast", "slow", "old")], tmp_path / "all")
    assert Store(tmp_path / "all", slow.device.arch).winners == (fast,)
    assert len(log.rivals) == 1


def test_what_a_store_replaced_stays_replaced(tmp_path):
    winner = Project(tmp_path / "project").winner()
    time = dataclasses.replace(winner.measurement, median_ms=winner.measurement.median_ms / 2)
    faster = dataclasses.replace(
        winner, measurement=time, candidate=Candidate.of(winner.candidate.template, {"X": 1})
    )
    winner_in(tmp_path / "one", faster)
    merge([tmp_path / "one"], tmp_path / "copy")
    winner_in(tmp_path / "one", winner)
    (log,) = merge([tmp_path / "copy", tmp_path / "one"], tmp_path / "all")
    assert Store(tmp_path / "all", winner.device.arch).winners == (winner,)
    assert log.rivals == []


def test_a_log_without_devices_is_known_by_its_winners(tmp_path):
    winner = Project(tmp_path / "project").winner()
    store = Store(tmp_path / "one", winner.device.arch)
    add(store, 1, 1.0)
    store.add_winner(winner)
    add(Store(tmp_path / "two", winner.device.arch), 2, 2.0)
    logs = merge([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert {log.maker[0] for log in logs} == {winner.device.name, "unknown"}


def test_a_damaged_log_loses_its_torn_line_only(tmp_path):
    store = store_of(tmp_path / "one", (1, 1.0), (2, 2.0))
    store.path.write_bytes(store.path.read_bytes()[:-20])
    merge([tmp_path / "one"], tmp_path / "all")
    assert outcomes(tmp_path / "all") == [(1, 1.0)]


def test_what_cannot_be_merged_leaves_nothing(tmp_path):
    store_of(tmp_path / "one", (1, 1.0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: there are no trials; name folders of stores"):
        merge([tmp_path / "one", tmp_path / "empty"], tmp_path / "all")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "empty"}
    with pytest.raises(UsageError, match="one: it exists; name a folder that does not"):
        merge([tmp_path / "one"], tmp_path / "one")


def test_the_command_says_what_went_where_and_the_rest_works_on_it(tune, tmp_path):
    store_of(tmp_path / "one", (1, 1.0))
    store_of(tmp_path / "two", (1, 3.0), device=NEWER)
    done = tune("merge", "one", "two", "--output", "all")
    assert done.returncode == 0, done.stderr
    assert f"all/{DEVICE.arch}: 1 trials, 0 winners of {DEVICE.name} (gcc 99)" in done.stdout
    assert f"all/{DEVICE.arch}@" in done.stdout
    assert tune("export", "--format", "csv", "--store", "all", "--output", "t.csv").returncode == 0
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 3
    assert tune("merge", "one", "--output", "all").returncode == 2
