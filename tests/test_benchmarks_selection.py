"""What the choices of runs with different seeds lose: the script on the CPU, and its figures."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT
from frozen import Project

sys.path.insert(0, str(ROOT / "benchmarks"))

import findings
import regret
import run_log
import selection
from seeded_runs import Choice

from tuner.records import Candidate, UsageError
from tuner.timing.race import RaceResult

SMALL = "N=100000,dtype=float32"


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def arguments(output: Path, *more: str) -> list[str]:
    device = ["--device", "cpu", "--jobs", "1", "--kernels", str(KERNELS), "--runs", "2"]
    return [*device, "--output", str(output), "--seconds", "1", *more]


def test_runs_choose_and_their_choices_are_timed_together(tmp_path):
    output = tmp_path / "selection.csv"
    more = ["--kernel", "scale", "--budget", "3trials", "--workload", SMALL]
    assert selection.main(arguments(output, *more)) == 0
    *runs, default, last = read(output)
    assert [row["op"] for row in (*runs, default, last)] == ["run", "run", "default", "summary"]
    assert [row["seed"] for row in runs] == ["0", "1"]
    for row in runs:
        assert (row["kernel"], row["workload"], row["trials"]) == ("scale", SMALL, "3")
        assert "UNROLL=" in row["parameters"]
        assert 0 < float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"])
        low, value, high = (float(row[f"regret_{x}"]) for x in ("low", "percent", "high"))
        assert low <= value <= high
        # Beside a busy neighbour so short a race may keep the default.
        assert 1 <= float(row["gain_low"]) <= float(row["gain"]) <= float(row["gain_high"])
        assert float(row["median_ms"]) <= float(default["median_ms"])
    assert min(float(row["regret_percent"]) for row in runs) <= 0
    assert max(float(row["regret_percent"]) for row in runs) == float(last["regret_percent"])
    assert last["runs"] == "2"
    (table, _) = findings.selection(read(output))
    seconds = sum(float(row["seconds"]) for row in runs) / 2
    each = f"3 trials, {seconds:.0f} s"
    assert f"| scale {SMALL} | 2 | {each} | {last['winners']} | {last['within']} |" in table


def test_runs_that_choose_nothing_leave_a_row_and_the_reason(tmp_path, monkeypatch):
    output = tmp_path / "selection.csv"
    monkeypatch.setenv("CXX", str(tmp_path / "no_compiler"))
    more = ["--kernel", "scale", "--budget", "2trials", "--workload", SMALL]
    assert selection.main(arguments(output, *more)) == 1
    rows = read(output)
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert all(row["note"] and not row["gain"] for row in rows)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--kernel", "no_such_kernel"], "no_such_kernel"),
        (["--kernel", "scale", "--workload", "M=1"], "'M=1'"),
        (["--kernel", "scale", "--budget", "4x"], "'4x'"),
    ],
)
def test_what_is_wrong_is_said_at_once(tmp_path, wrong, said):
    with pytest.raises(UsageError, match=said):
        selection.main(arguments(tmp_path / "selection.csv", *wrong))


def of(name: str) -> Candidate:
    return Candidate.of("cpu", {"NAME": name})


def choice(tmp_path: Path, seed: int, name: str, **timed_ms: float) -> Choice:
    winner = dataclasses.replace(Project(tmp_path / str(seed)).winner(), candidate=of(name))
    return Choice(seed, winner, {of(key): value for key, value in timed_ms.items()}, 5, 1.0)


def times(**true_ms: float) -> regret.TrueTimes:
    found = regret.TrueTimes(str(of("default")))
    for drift in (1.0, 1.5):  # one survey on a slower machine changes no ratio
        wobble = [drift * (1 + 0.001 * (block % 3)) for block in range(30)]
        all_ms = {str(of(name)): tuple(ms * x for x in wobble) for name, ms in true_ms.items()}
        copy = all_ms[str(of("default"))]
        found.add(
            RaceResult(
                *(str(of("default")), None, tuple(all_ms.items()), copy, ()),
                *(0, "budget", "warm", "calls x 2", 0),
            )
        )
    return found


def test_a_regret_is_that_of_the_search_or_of_the_choice(tmp_path):
    true = times(default=2.0, best=1.0, near=1.005, missed=1.02)
    choices = [
        choice(tmp_path, 0, "best", best=1.1, near=1.0),
        choice(tmp_path, 1, "near", near=1.0, default=2.0),  # never came to the best
        choice(tmp_path, 2, "missed", missed=1.0, best=1.1),  # had timed it, chose otherwise
    ]
    found = regret.regrets(choices, true)
    assert found[0]["note"] == "the best"
    names = ("regret_percent", "search_percent", "choice_percent")
    parts = {seed: [cells[name] for name in names] for seed, cells in found.items()}
    assert parts[0] == [0, 0, 0]
    assert parts[1] == pytest.approx([0.5, 0.5, 0])
    assert parts[2] == pytest.approx([2.0, 0, 2.0])
    assert found[1]["note"] == "surely within 1 %"
    reason = "the best that it timed was number 2 of its search and did not tie in its final"
    assert found[2]["note"] == f"surely beyond 1 %; {reason}"
    whole = regret.summary(choices, found)
    assert (whole["runs"], whole["winners"], whole["within"]) == (3, 3, 2)
    assert whole["regret_percent"] == pytest.approx(2.0)
    assert whole["mean_percent"] == pytest.approx(2.5 / 3)


def test_who_was_not_timed_is_left_out(tmp_path):
    choices = [choice(tmp_path, 0, "refused", refused=1.0), choice(tmp_path, 1, "best", best=1.0)]
    assert set(regret.regrets(choices, times(default=2.0, best=1.0))) == {1}
    assert regret.regrets(choices[:1], times(default=2.0, best=1.0)) == {}


def test_what_a_run_did_is_told_workload_by_workload(tune, tmp_path):
    sizes = ["--workload", "N=100000", "--workload", "N=200000"]
    budget = ["--budget", "10trials", "--device", "cpu"]
    done = tune("scale", "--kernels", str(KERNELS), *sizes, *budget)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "run.csv"
    assert run_log.main(["--store", str(tmp_path / ".tuner"), "--output", str(output)]) == 0
    found = read(output)
    assert [row["workload"] for row in found] == [f"{size},dtype=float32" for size in sizes[1::2]]
    for row in found:
        assert row["trials"] == row["timed"] == "5"
        assert row["rejected"] == ""
        assert float(row["trials_per_s"]) * float(row["search_s"]) == pytest.approx(5, rel=1e-3)
        assert float(row["gain"]) >= 1
    (table, _) = findings.runs(found)
    assert table.splitlines()[2].startswith("| scale | 2 | 10 | ")
