"""The clock beside the hardware's: the script on the CPU, and what it reads and concludes."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import ablations
import agreement
import clock_hardware
import gradients
import hardware
import search_device
import tables
from rows import OwnRows

DETAILS = """\
==PROF== Connected to process 77 (/usr/bin/python3.11)
==PROF== Profiling "empty_kernel": 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Block Size","Metric Name","Metric Unit","Metric Value"
"0","77","softmax_kernel","(256, 1, 1)","gpu__time_duration.sum","ns","9"
"1","77","empty_kernel","(32, 1, 1)","gpu__time_duration.sum","ns","1,024"
"2","77","split_kernel","(256, 1, 1)","gpu__time_duration.sum","us","1,002.5"
"3","77","void add<float, 4>(T1, ""x"")","(256, 1, 1)","gpu__time_duration.sum","ns","500"
"4","77","empty_kernel","(32, 1, 1)","gpu__time_duration.sum","ns","1024"
"""

RAW = """\
"ID","Process ID","Kernel Name","gpu__time_duration.sum"
"","","","nsecond"
"0","77","empty_kernel","1,024"
"1","77","matmul_kernel","12,288"
"""


def test_what_nsight_compute_lists_is_summed_between_markers():
    assert hardware.calls_us(DETAILS) == pytest.approx([1003.0, 0.0])
    assert hardware.calls_us(RAW) == pytest.approx([12.288])
    assert hardware.calls_us("==ERROR== ERR_NVGPUCTRPERM\n") == []


def test_the_time_of_a_call_is_that_of_its_kernels_once_the_clocks_have_settled():
    times_us = [5.0, 6.0] * 2 + [1.0, 2.0] * 2
    assert hardware._stamps(times_us, 4) == hardware.Stamps(3.0, 2)


def row(workload, variant, ours, true, **others):
    about = {"op": "softmax", "workload": workload, "variant": variant, "regime": "cold"}
    figures = {"tuner_us": str(ours), "cupti_us": str(true), "host_us": "", "do_bench_us": ""}
    return {"ncu_us": "", **about, **figures, **others}


def test_agreement_is_judged_by_bands_ratios_and_order():
    rows = [
        row("N=1", "a", 4.4, 4.0),
        row("N=1", "b", 4.0, 4.2),  # the wrong order
        row("N=2", "a", 10.1, 10.0, do_bench_us="20"),
        row("N=2", "b", 20.2, 20.0),
    ]
    found = dict(agreement.summary(rows))
    assert found["variants"] == "4 variants of 1 kernels in 4 rows"
    band = found["median absolute error against CUPTI, 5-20 us"]
    assert band.startswith("tuner 1.00 % of 1")
    assert band.endswith("do_bench 100.00 % of 1")
    pairs = found["200 pairs of variants of a kernel against CUPTI, tuner"]
    assert "of 6, 2 on one workload" in pairs
    assert "order right in 5 of 6" in pairs
    races = [
        {"op": "race of equals", "outcome": name} for name in ("kept", "kept", "false winner")
    ]
    assert list(agreement.races(races)) == [("race of equals", "2 kept, 1 false winner")]


def test_rows_of_their_own_survive_what_cuts_a_run_short(tmp_path):
    path = tmp_path / "own.csv"
    OwnRows(path, "A", ("x", "y")).add({"x": 1.0})
    OwnRows(path, "B", ("x", "y")).add({"x": 1 / 3, "y": "two\nlines"})
    again = OwnRows(path, "A", ("x", "y"))
    again.add({"x": 2.0})
    again.add({"x": 3.0})
    again.update({"x": "3"}, {"y": 4.0})
    other = OwnRows(path, "A", ("x", "y"), run=again.about["run"])  # as a child writes
    assert [(item["x"], item["y"]) for item in other.rows] == [("2", ""), ("3", "4")]
    with path.open() as lines:
        assert [item["x"] for item in csv.DictReader(lines)] == ["0.333333", "2", "3"]
    with pytest.raises(ValueError, match="write to another file"):
        OwnRows(path, "A", ("z",)).add({"z": 1})
    assert tables.section(tmp_path) == tables.section(tmp_path / "nothing")  # no table of times


def test_the_readme_tells_what_files_of_their_own_columns_come_to(tmp_path):
    clock = OwnRows(tmp_path / "clock.csv", "A", clock_hardware.COLUMNS)
    clock.add({"op": "matmul", "tuner_us": 1.0, "cupti_us": 1.0})
    clock.add({"op": "summary", "workload": "variants", "note": "1 variant"})
    search = OwnRows(tmp_path / "search.csv", "A", search_device.COLUMNS)
    for seed, trials in enumerate((10, 20, None)):
        about = {"kernel": "matmul", "workload": "M=1", "sampler": "tuner", "seed": seed}
        search.add({**about, "trial": 1, "median_ms": 1.0})
        search.add(
            {**about, "share_of_best": 0.99, "trials_to_98": trials, "seconds_to_98": trials}
        )
    search.add({**about, "sampler": "random", "share_of_best": 0.5})
    changed = OwnRows(tmp_path / "ablations.csv", "A", ablations.COLUMNS)
    for value, row in (
        ("2", {"ratio": 1.25, "also": "A=1"}),
        ("4", {"stage": "compile"}),
        ("8", {}),
    ):
        about = {"kernel": "matmul", "workload": "M=1", "parameter": "TILE", "winner_value": "1"}
        changed.add({**about, "value": value, **row})
    exact = OwnRows(tmp_path / "gradients.csv", "A", gradients.COLUMNS)
    exact.add({"case": 0, "note": "no such line"})
    exact.add({"note": "200 of 200"})
    text = tables.section(tmp_path)
    for line in (
        "| variants | 1 variant |",
        "| tuner | 3 | 0.990 | 20 | 20.0 |",
        "| random | 1 | 0.500 | not reached | not reached |",
        "| TILE | 1 | 2 (with A=1): 1.250, 4: compile, 8: same code |",
        "200 of 200",
    ):
        assert line in text.splitlines(), line
    assert "no such line" not in text


def test_what_killed_a_child_is_not_begun_again(tmp_path):
    begun = clock_hardware.Begun(tmp_path / "begun")
    assert begun.first_time("a", 1)
    assert not begun.first_time("a", 1)
    assert not clock_hardware.Begun(tmp_path / "begun").first_time("a", 1)
    assert begun.first_time("a", 2)


@pytest.mark.alone
def test_variants_are_timed_beside_each_other_and_raced(tmp_path):
    output = tmp_path / "clock.csv"
    command = [sys.executable, str(ROOT / "benchmarks" / "clock_hardware.py"), "--device", "cpu"]
    command += ["--output", str(output), "--jobs", "1", "--variants", "2", "--races", "1"]
    command += ["--planted", "2", "--workloads", "softmax M=64,N=256", "--ncu-seconds", "0"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    with output.open() as lines:
        rows = list(csv.DictReader(lines))
    timed = [item for item in rows if item["tuner_us"]]
    assert {item["op"] for item in timed} == {"softmax"}
    assert len({item["variant"] for item in timed}) == 2
    assert all(float(item["cupti_us"]) > 0 and float(item["host_us"]) > 0 for item in timed)
    races = [item["op"] for item in rows if item["outcome"] not in ("", "failed")]
    assert races.count("race of equals") == 1
    assert races.count("race of two 2 % apart") == 2
    assert "variants: 2 variants of 1 kernels" in printed.stdout
