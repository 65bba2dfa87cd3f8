import json
import multiprocessing
from pathlib import Path

import pytest

from tuner.records import Candidate, Measurement, Rejection, TunerError, UsageError, Workload
from tuner.store import Store, open_stores

WORKLOAD = Workload("scale", (("N", 3),), "float32")
CANDIDATE = Candidate.of("cpu", {"UNROLL": 1})
TIMED = Measurement(1.0, 0.9, 1.1, 10, "warm", 0.2)


def add(store: Store, count: int = 1) -> None:
    for _ in range(count):
        store.add_trial(WORKLOAD, CANDIDATE, "ab", TIMED, seconds=0.1)


def add_in_a_process(root: Path) -> None:
    add(Store(root, "arch"), 40)


def test_what_is_added_is_there_for_the_next(tmp_path):
    add(Store(tmp_path, "arch"), 3)
    trials = Store(tmp_path, "arch").trials
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert trials[0].outcome == TIMED


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_line_costs_that_line_only(tmp_path, cut):
    store = Store(tmp_path, "arch")
    add(store, 3)
    store.path.write_bytes(store.path.read_bytes()[:-cut])
    again = Store(tmp_path, "arch")
    assert len(again.trials) == 2
    add(again)
    numbers = [trial.number for trial in Store(tmp_path, "arch").trials]
    assert numbers == list(range(4 if cut == 1 else 3))  # without its newline a line is whole


def test_processes_share_a_store_without_losing_or_doubling(tmp_path):
    Store(tmp_path, "arch")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_in_a_process, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [trial.number for trial in Store(tmp_path, "arch").trials] == list(range(120))


def test_a_newer_schema_is_refused(tmp_path):
    store = Store(tmp_path, "arch")
    store.path.write_text(json.dumps({"schema_version": 99, "trial": {}}) + "\n")
    with pytest.raises(TunerError, match="schema_version 99 is newer than 1"):
        Store(tmp_path, "arch")


def test_a_quarantined_source_stays_so(tmp_path):
    rejection = Rejection("runtime", "killed by SIGSEGV")
    Store(tmp_path, "arch").add_quarantine("ab", rejection)
    again = Store(tmp_path, "arch")
    assert again.quarantined("ab") == rejection
    assert again.quarantined("cd") is None


def test_forgetting_sets_the_log_aside(tmp_path):
    store = Store(tmp_path, "arch")
    add(store, 2)
    store.forget()
    assert store.trials == () == Store(tmp_path, "arch").trials
    assert len((store.folder / "trials.1.jsonl").read_text().splitlines()) == 2
    add(store)
    assert len(Store(tmp_path, "arch").trials) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_who_works_on_a_log_that_another_sets_aside_goes_on_in_the_new_one(tmp_path, begun):
    store, other = Store(tmp_path, "arch"), Store(tmp_path, "arch")
    add(store, 5)
    other.forget()
    if begun:
        add(other, 7)
    before = len(other.trials)
    add(store)
    assert [trial.number for trial in store.trials] == list(range(before + 1))
    assert store.trials == Store(tmp_path, "arch").trials
    assert len((store.folder / "trials.1.jsonl").read_text().splitlines()) == 5


def test_a_folder_without_a_store_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="there are no trials; run `tune` first"):
        open_stores(tmp_path)
