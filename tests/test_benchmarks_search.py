"""Searches on a device, single changes of a winner, and gradients: the scripts on the CPU."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import KERNELS, ROOT
from test_benchmarks import frozen

from tuner.catalog import Catalog
from tuner.devices.cpu import Cpu
from tuner.devices.cuda import Cuda
from tuner.records import Candidate
from tuner.runtime.expression import Expression
from tuner.space.combinations import TemplateSet
from tuner.space.kernel import load_space
from tuner.space.template import Constraint

sys.path.insert(0, str(ROOT / "benchmarks"))

import ablations
import clock_hardware
import findings
import gradient_cases
import gradients
import search_device
import searches
import seeds
import tuning_time
import winners

SMALL = "N=100000,dtype=float32"


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_samplers_search_side_by_side(tmp_path):
    output = tmp_path / "search.csv"
    arguments = ["--device", "cpu", "--output", str(output), "--jobs", "1", "--ahead", "2"]
    arguments += ["--kernels", str(KERNELS), "--kernel", "scale", "no_such_kernel"]
    arguments += ["--workload", SMALL, "--trials", "3", "--seeds", "1"]
    assert search_device.main(arguments) == 1  # one of the kernels is unknown
    rows = read(output)
    assert rows[0]["sampler"] == "default"
    samplers = ("tuner", "tpe", "random")
    for name in samplers:
        mine = [row for row in rows if row["sampler"] == name]
        assert [row["trial"] for row in mine] == ["1", "2", "3", ""]
        assert float(mine[-1]["share_of_best"]) <= 1.0
        assert float(mine[2]["seconds"]) >= float(mine[1]["seconds"]) > 0


def test_other_samplers_get_a_part_of_what_is_too_large_to_list():
    card, spec = Cuda.target("90"), load_space(Catalog().space_path("attention_backward"))
    feasible = spec.feasible(dict(card.limits), "cuda", "bfloat16")
    assert feasible.keys is None
    keys = np.array(list(searches.Keys(feasible)))
    assert len(keys) > 0.9 * searches.MOST_KEYS
    assert (np.diff(keys) > 0).all()
    assert feasible.feasible(keys).all()


def test_a_search_is_done_when_it_is_near_the_best():
    run = searches.Run("tuner", 0, strategy=None, times_ms=[5.0, None, 2.02, 1.0])
    assert run.best_ms == 1.0
    assert run.reached(2.0) == 4
    assert run.reached(2.1) == 3
    assert run.reached(0.5) is None


def test_seeds_of_another_card_save_evaluations(tmp_path):
    for card, best in (("one", 40), ("other", 41), ("alone", 0)):
        name = "lonely_alone" if card == "alone" else f"line_{card}"
        lines = [f"{x},{y},{1 + abs(10 * x + y - best)}" for x in range(6) for y in range(6)]
        lines[3] = "0,3,"  # failed
        (tmp_path / f"{name}.csv").write_text("\n".join(["X,Y,time_ms", *lines]))
    output = tmp_path / "seeds.csv"
    tables = map(str, sorted(tmp_path.glob("*.csv")))
    assert seeds.main([*tables, "--searches", "1", "--output", str(output)]) == 0
    found = {(row["card"], row["format"]): row for row in read(output)}
    assert {card for card, _ in found} == {"one", "other"}  # nobody else ran the third kernel
    ours = found["other", "tuner winners.json"]
    assert (ours["seeds_of"], ours["configurations"], ours["taken"]) == ("one", "1", "1")
    assert float(ours["first_share"]) == 0.5
    assert 0 < float(found["one", "Triton *.autotune.json"]["configurations"]) <= 32
    assert found["one", "tuner trials.csv"]["taken"] == "4"
    (table, about) = findings.seeds(read(output))
    assert "| none | " in table
    assert "Means of 1 searches" in about


def test_every_choice_of_a_winner_is_changed_and_raced(tmp_path, monkeypatch):
    package = frozen(tmp_path, monkeypatch, "scale", SMALL, WASTE=0, UNROLL=8, THREADS=True)
    output = tmp_path / "ablations.csv"
    arguments = ["--device", "cpu", "--output", str(output), "--package", str(package)]
    arguments += ["--kernels", str(KERNELS), "--kernel", "scale", "--jobs", "1", "--seconds", "1"]
    assert ablations.main(arguments) == 0
    found = {(row["parameter"], row["value"]): row for row in read(output)}
    assert found["THREADS", "false"]["also"] == "UNROLL=4"
    raced = found["WASTE", "8"]
    assert float(raced["ratio_low"]) <= float(raced["ratio"]) <= float(raced["ratio_high"])
    assert raced["winner_value"] == "0"
    assert len(found) == 1 + 1 + 4 + 3
    options = argparse.Namespace(
        kernel=["scale", "other"], workload=[], package=package, store=None
    )
    info = Cpu().info()
    found = winners.chosen(options, list(winners.winners_of(options, info)))
    assert {str(workload) for workload in found} == {SMALL}
    options.workload = ["N=3,dtype=float32"]
    assert winners.chosen(options, list(winners.winners_of(options, info))) == {}


def part_of(kernel: str):
    spec = load_space(Catalog([KERNELS]).space_path(kernel))
    return spec.feasible(dict(Cpu().info().limits), "cpu", "float32").templates[0]


def test_choices_of_structure_are_changed_before_sizes():
    part = part_of("scale")
    found = winners.changes(part, part.spec.default)
    assert list(dict.fromkeys(item.parameter for item in found)) == ["THREADS", "UNROLL", "WASTE"]
    assert part.spec.default not in [item.candidate for item in found]
    changed = Candidate.of("cpu", {"UNROLL": 2, "THREADS": False, "WASTE": 4})
    assert changed in [item.candidate for item in found]


def test_what_constraints_refuse_alone_is_changed_with_the_fewest_others():
    part = part_of("scale")
    found = {item.label: item for item in winners.changes(part, part.spec.default)}
    assert found["WASTE=8"].broken == found["WASTE=8"].also == ""
    eight = found["UNROLL=8"]
    assert eight.also == "THREADS=true"
    assert "an example of a rule between two parameters" in eight.broken
    assert eight.candidate == Candidate.of("cpu", {"UNROLL": 8, "THREADS": True, "WASTE": 4})
    few = Constraint(Expression("UNROLL < 8", "a test"), "whatever else changes")
    spec = dataclasses.replace(part.spec, constraints=(few,))
    found = winners.changes(TemplateSet(spec, part.limits, part.keys), part.spec.default)
    assert [item.label for item in found if item.candidate is None] == ["UNROLL=8"]


def test_gradients_are_compared_with_those_in_float64(tmp_path):
    output = tmp_path / "gradients.csv"
    arguments = ["--device", "cpu", "--output", str(output), "--cases", "4", "--longest", "64"]
    assert gradients.main([*arguments, "--package", str(ROOT / "kernels_generated")]) == 0
    *rows, last = read(output)
    assert [row["case"] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        assert 0 < float(row["tuner_dq"]) < 1e-5
        assert 0 < float(row["torch_dv"]) < 1e-5
        worst = max(
            float(row[f"tuner_{name}"]) / float(row[f"torch_{name}"])
            for name in gradients.GRADIENTS
        )
        assert float(row["torch_ratio"]) == pytest.approx(worst, rel=1e-4)
    assert "of 4 cases have gradients" in last["note"]
    assert "0 of 4 cases failed" in last["note"]


def test_cases_of_attention_cover_types_masks_and_odd_lengths():
    cases = gradient_cases.draw(160, ("bfloat16", "float16"), 1024, 0)
    assert len(set(cases)) == 160
    for dtype in ("bfloat16", "float16"):
        for width in (64, 128):
            for causal in (False, True):
                mine = [c for c in cases if (c.dtype, c.D, c.causal) == (dtype, width, causal)]
                assert len(mine) == 20
                assert {c.S % 2 for c in mine} == {0, 1}
    assert all(case.S == case.T for case in cases if case.causal)
    assert any(case.S != case.T for case in cases)
    assert any(case.KV < case.H for case in cases)
    assert all(1 < case.S <= 1025 and 1 < case.T <= 1025 for case in cases)


@pytest.mark.parametrize("causal", [False, True])
def test_the_float64_reference_is_attention(causal):
    case = gradient_cases.Case("float32", 2, 4, 2, 9, 9, 64, causal=causal, scale=0.5)
    tensors = [item.double() for item in case.tensors("cpu", 0)]
    backend = torch.nn.attention.SDPBackend.MATH
    expected = gradient_cases.gradients(gradient_cases.torchs(case, backend), tensors)
    found = gradient_cases.gradients(gradient_cases.reference(case), tensors)
    assert max(gradient_cases.errors(found, expected)) < 1e-14


def test_tuning_is_timed_even_where_nothing_else_can_tune(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in (("FINAL_S", 0.3), ("PICKED_S", 0.05), ("REPEATS", 1)):
        monkeypatch.setattr(tuning_time, name, value)
    output = tmp_path / "tuning.csv"
    arguments = ["--device", "cpu", "--output", str(output), "--jobs", "1"]
    arguments += ["--workload", "M=64,N=64,K=64,dtype=float32", "--configurations", "2"]
    assert tuning_time.main(arguments) == 0
    found = {(row["op"].partition(" from ")[0], row["contender"]): row for row in read(output)}
    ours, other, *picks = found.values()
    assert (ours["unit"], other["median_ms"]) == ("candidates/s", "")
    assert "GROUP_M" in other["note"]
    assert [row["contender"] for row in picks] == ["tuner", "torch.matmul"]
    assert all(float(row["median_ms"]) > 0 for row in picks)


HANGS = "import sys, time; print('up', flush=True); time.sleep(600)"


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(clock_hardware, "STALL_S", 0.5)
    sign = tmp_path / "sign"
    sign.write_text("")
    command = [sys.executable, "-c", HANGS]
    assert clock_hardware._watched(command, {}, [sign], 60.0) is None
    assert clock_hardware._watched([sys.executable, "-c", "exit(3)"], {}, [], 60.0) == 3
    assert clock_hardware._watched(command, {}, [], 0.3) is None
