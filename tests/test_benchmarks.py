"""The benchmark scripts on small inputs, and the README's tables."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import KERNELS, ROOT
from frozen import TEMPLATES, Project
from simulated import Machine

from tuner.catalog import Catalog
from tuner.cli.devices import workers_for
from tuner.devices.cpu import Cpu
from tuner.package.freeze import freeze
from tuner.plan import frozen_kernel, subject_of
from tuner.records import Candidate
from tuner.render import Renderer
from tuner.serve.bench import Bench
from tuner.space.kernel import load_space
from tuner.timing.clock import Clock

sys.path.insert(0, str(ROOT / "benchmarks"))

import attention
import autotuned
import contest
import first_call
import host_overhead
import kernels
import peers
import rows
import tables
import tuning_time
from rows import Result, ResultsFile, Spread

SMALL = "N=100000,dtype=float32"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """Freeze the kernel of tests/kernels, its default and another variant of it."""
    return frozen(tmp_path, monkeypatch, "scale", SMALL, WASTE=0)


def frozen(tmp_path, monkeypatch, kernel: str, workload: str, **changes) -> Path:
    """Return a package of one kernel for the CPU, whose winner differs from its default so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the script sets it: this restores it
    catalog = Catalog([KERNELS])
    spec = load_space(catalog.space_path(kernel))
    renderer = Renderer(catalog.template_folders)
    default = spec.templates[0].default
    best = Candidate.of("cpu", {**dict(default.parameters), **changes})
    winner = dataclasses.replace(
        Project(tmp_path / "project").winner(),
        workload=spec.workload(workload),
        candidate=best,
        default_candidate=default,
        source=renderer.render(kernel, "cpp", best),
        default=renderer.render(kernel, "cpp", default),
    )
    output = tmp_path / "frozen_for_benchmarks"
    freeze([winner], [frozen_kernel(catalog, spec)], output, templates=TEMPLATES)
    return output


def test_the_readme_has_the_tables_of_the_results():
    assert tables.main(["--check"]) == 0


def test_a_stale_readme_is_found_and_rewritten(tmp_path):
    readme, results = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    file = ResultsFile(results / "cpu.csv", "Some CPU")
    for workload, ours, theirs in (("N=1", 2.0, 1.0), ("N=2", 1.0, 8.0)):
        measured = [Result("tuner", Spread(ours, ours, ours), 1500.0, "GFLOP/s")]
        measured += [Result("torch.mul", Spread(theirs, theirs, theirs)), Result("copy", None)]
        file.replace("scale", workload, measured)
    options = ["--readme", str(readme), "--results", str(results)]
    assert tables.main([*options, "--check"]) == 1
    assert tables.main(options) == 0
    assert tables.main([*options, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| N=1 | 2.00 ms | 1.50 TFLOP/s | 0.50 | – |" in text
    assert "| geometric mean |  |  | 2.00 | – |" in text


def test_searches_are_ranked_by_what_they_reach(tmp_path):
    def row(space, sampler, share, reached):
        shares = {f"share_{budget}": share for budget in rows.BUDGETS}
        blank = dict.fromkeys(rows.SEARCH_COLUMNS, "20")
        return {
            **blank,
            **{"space": space, "sampler": sampler, "evaluations_to_95": reached},
            **shares,
        }

    found = [
        row("one", "random", "0.9", ""),
        row("one", "tuner", "0.99", "20"),
        row("one", "tuner, 8 in flight", "0.995", "21"),
        row("two", "random", "0.9", ""),
        row("two", "tuner", "0.8", "40"),
    ]
    lines = tables.search_table(found, "search.csv").splitlines()
    assert lines[4:] == [
        "| tuner, 8 in flight | 0.995 | 0.995 | 0.995 | 21 | 1 of 1 |",
        "| random | 0.900 | 0.900 | 0.900 | over 100 | 1 of 2 |",
        "| tuner | 0.895 | 0.895 | 0.895 | 30 | 1 of 2 |",
    ]


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="must have <!-- results -->"):
        tables.with_section("no markers", "text")


def test_a_workloads_rows_replace_those_of_an_earlier_run(tmp_path):
    path = tmp_path / "rows.csv"
    ResultsFile(path, "A").replace("scale", "N=1", [Result("tuner", Spread(1.0, 0.9, 1.1))])
    ResultsFile(path, "A").replace("scale", "N=2", [Result("tuner", Spread(2.0, 1.9, 2.1))])
    ResultsFile(path, "A").replace("scale", "N=1", [Result("tuner", None, note="broke\ndown")])
    found = [(row["workload"], row["median_ms"], row["note"]) for row in rows.read(path)]
    assert found == [("N=2", "2", ""), ("N=1", "", "broke down")]
    assert path.read_text().splitlines()[0] == ",".join(rows.COLUMNS)
    path.write_text("run,time\n")
    with pytest.raises(ValueError, match="the columns are"):
        rows.read(path)


def refuse():
    raise RuntimeError("no available kernel\nand so on")


def test_a_contest_keeps_the_ratio_of_times_that_drift():
    machine = Machine(noise=0.01, drift=lambda time_s: 1 + 0.2 * time_s)
    clock = Clock(machine, now=machine.now)
    calls = {label: [machine.kernel(true_s)] for label, true_s in (("a", 2e-3), ("b", 3e-3))}
    calls["broken"] = [lambda: 1 // 0]
    calls["refused"] = [refuse]
    found = contest.Contest(clock, 0.5, 3, 0.01).hold(calls)
    assert found["broken"] == "ZeroDivisionError: integer division or modulo by zero"
    assert found["refused"] == "RuntimeError: no available kernel"
    ratio = contest.summary(found["b"]).median_ms / contest.summary(found["a"]).median_ms
    assert ratio == pytest.approx(1.5, rel=0.02)
    assert len(found["a"]) == 3


def test_a_package_is_measured_beside_its_peers(package, tmp_path):
    output = tmp_path / "cpu.csv"
    arguments = ["--package", str(package), "--kernels", str(KERNELS), "--set", "small"]
    arguments += ["--output", str(output), "--seconds", "0.02", "--repeats", "1"]
    assert kernels.main(arguments) == 0
    found = {row["contender"]: row for row in rows.read(output)}
    assert list(found) == ["tuner", "default", "torch.mul", "copy"]
    assert {row["workload"] for row in found.values()} == {SMALL}
    assert all(float(row["median_ms"]) > 0 and row["unit"] == "GB/s" for row in found.values())
    assert "exact cpu_" in found["tuner"]["note"]


def test_attention_is_measured_over_head_dims_and_lengths(tmp_path, monkeypatch):
    shape = "B=1,H=2,S=32,D=16,dtype=float32"
    package = frozen(tmp_path, monkeypatch, "attention_forward", shape, SCORES="rows")
    output = tmp_path / "attention.csv"
    arguments = ["--package", str(package), "--device", "cpu", "--output", str(output)]
    arguments += ["--tokens", "64", "--hidden", "32", "--head-dims", "16", "--lengths", "32", "64"]
    arguments += ["--dtype", "float32", "--seconds", "0.01", "--repeats", "1"]
    assert attention.main([*arguments, "--kernel", "attention_forward"]) == 0
    found = rows.read(output)
    rival = "torch scaled_dot_product_attention"
    assert [row["contender"] for row in found] == ["tuner", "default", rival, "copy"] * 4
    assert {row["workload"] for row in found} == {
        f"B={batch},H=2,S={length},D=16,KV=2,T={length},causal={causal},dtype=float32"
        for batch, length in ((2, 32), (1, 64))
        for causal in ("false", "true")
    }
    assert attention.main([*arguments, "--kernel", "attention_backward"]) == 1  # none is frozen


FLASH_4 = """
import torch

def flash_attn_func(q, k, v, softmax_scale, causal):
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=softmax_scale
    )
    return o.transpose(1, 2), None
"""


@pytest.mark.parametrize("kernel", ["attention_forward", "attention_backward"])
def test_the_wheels_of_flash_attention_take_part_in_their_layout(tmp_path, monkeypatch, kernel):
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").write_text(FLASH_4)
    monkeypatch.syspath_prepend(tmp_path)
    catalog, cpu = Catalog(), Cpu()
    spec = load_space(catalog.space_path(kernel))
    workload = spec.workload("B=2,H=3,S=24,D=8,causal=true,dtype=float32")
    bench = Bench(
        spec.signature, catalog.problem_path(kernel), workload=workload, device=cpu, clock=None
    )
    backward = kernel.endswith("backward")
    (arguments, *_), (call, *_) = bench.arguments(), peers._flash_4(bench, backward=backward)
    expected = bench.problem.reference(**arguments)
    found = call() if backward else call()[:1]
    for got, name in zip(found, ("dq", "dk", "dv") if backward else ("o",), strict=True):
        torch.testing.assert_close(got.transpose(1, 2), expected[name], rtol=1e-4, atol=1e-4)
    assert peers._importable("flash_attn.cute")
    assert not peers._importable("flash_attn.nothing")
    assert not peers._importable("no_such_package.cute")


def test_a_variant_that_is_wrong_is_a_row_with_the_reason(package, tmp_path):
    output = tmp_path / "cpu.csv"
    for path in package.glob("scale/*/cpu_*.cpp"):
        path.write_text(path.read_text().replace("int64_t i = 0", "int64_t i = 1"))
    arguments = ["--package", str(package), "--kernels", str(KERNELS), "--set", "small"]
    arguments += ["--output", str(output), "--seconds", "0.02", "--repeats", "1"]
    assert kernels.main(arguments) == 1
    found = {row["contender"]: row for row in rows.read(output)}
    assert found["tuner"]["median_ms"] == ""
    assert "y[0] is nan but must be" in found["tuner"]["note"]
    assert found["torch.mul"]["median_ms"] != ""


def test_the_host_time_of_a_call_is_measured_beside_a_call_by_hand(package, tmp_path):
    output = tmp_path / "host.csv"
    arguments = ["--package", str(package), "--device", "cpu", "--output", str(output)]
    assert host_overhead.main([*arguments, "--rounds", "6", "--first-call"]) == 0
    assert [row["contender"] for row in rows.read(output)] == [
        *("tuner", "by hand", "torch.ops", "torch")
    ]


def test_a_contender_that_fails_costs_nobody_else_a_row(package, tmp_path):
    output = tmp_path / "host.csv"
    problem = package / "scale" / "problem.py"
    problem.write_text(
        problem.read_text().replace("lambda: torch.mul(x, factor)", "lambda: 1 / 0")
    )
    arguments = ["--package", str(package), "--device", "cpu", "--output", str(output)]
    arguments += ["--rounds", "2", "--first-call", "--kernel", "no_such_kernel", "scale"]
    assert host_overhead.main(arguments) == 1
    found = {row["contender"]: row for row in rows.read(output)}
    assert found["torch"]["note"] == "ZeroDivisionError: division by zero"
    assert float(found["tuner"]["median_ms"]) > 0


@pytest.mark.alone
def test_first_calls_with_stored_binaries_are_measured_beside_those_without(package, tmp_path):
    output = tmp_path / "first.csv"
    arguments = ["--package", str(package), "--device", "cpu", "--output", str(output)]
    assert first_call.main([*arguments, "--kernel", "scale", "--starts", "1"]) == 0
    found = {row["contender"]: float(row["median_ms"]) for row in rows.read(output)}
    assert len(found) == 3
    assert found["tuner"] < found["without stored binaries"]


def test_the_autotuned_matmul_is_the_template(tmp_path):
    catalog = Catalog()
    default = load_space(catalog.space_path("matmul")).template("triton").default
    source = Renderer(catalog.template_folders).render("matmul", "triton", default)
    path = tmp_path / "autotuned_matmul.py"
    path.write_text(autotuned.autotuned_source(source, [default]))
    check = (
        "import torch; from autotuned_matmul import matmul;"
        "a, b, c = torch.randn(70, 33), torch.randn(33, 40), torch.empty(70, 40);"
        "matmul(a, b, c); torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=environment, check=True)


@pytest.mark.slow
def test_the_engine_tunes_over_given_candidates(tmp_path):
    catalog = Catalog([KERNELS])
    renderer = Renderer(catalog.template_folders)
    spec = load_space(catalog.space_path("scale"))
    with workers_for("cpu", tmp_path, dict(os.environ), jobs=1) as workers:
        subject = subject_of(catalog, workers.info(), spec, spec.workload(SMALL))
        candidates = [subject.feasible.default, *subject.feasible.seeds]
        tuned = tuning_time.Engine(subject, renderer, workers).tune(candidates)
    assert tuned.picked == candidates[1]
    assert tuned.note.startswith("2 of 2 verified and timed")
