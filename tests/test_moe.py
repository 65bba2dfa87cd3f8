"""Tokens to experts on other ranks: simulated ranks, real processes, and the code for GPUs.

Children do the work, since triton reads its environment when it is imported.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from frozen import TEMPLATES, Project

from tuner.catalog import Catalog
from tuner.package.freeze import freeze
from tuner.plan import frozen_kernel
from tuner.records import Candidate, Winner
from tuner.render import Renderer
from tuner.space.kernel import load_space

TESTS = Path(__file__).parent

pytestmark = pytest.mark.timeout(600)


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    return subprocess.Popen(
        [sys.executable, str(TESTS / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def reports_of(children: list[subprocess.Popen[str]]) -> list[dict]:
    ended = [child.communicate() for child in children]
    failures = [
        errors[-3000:]
        for child, (_, errors) in zip(children, ended, strict=True)
        if child.returncode
    ]
    assert not failures, "\n".join(failures)
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def reports_of_processes(ranks: int, rounds: int, folder: Path) -> list[dict]:
    arguments = (ranks, rounds, folder / "store")
    return reports_of(
        [
            start("exchange_child.py", "rank", rank, *arguments, **INTERPRETED)
            for rank in range(ranks)
        ]
    )


INTERPRETED = {"TRITON_INTERPRET": "1"}


def faults(report: dict) -> dict:
    return {name: found for name, found in report.items() if found and "mutant" not in name}


def unnoticed(report: dict) -> list[str]:
    mutants = {name: found for name, found in report.items() if "mutant" in name}
    assert mutants
    return [name for name, found in mutants.items() if not found]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """Return what simulated ranks and the compiled code have wrong, found side by side."""
    folder = tmp_path_factory.mktemp("code")
    children = {
        "ranks": start("exchange_child.py", "local", **INTERPRETED),
        "code": start("exchange_code.py", folder, TRITON_CACHE_DIR=str(folder)),
    }
    return dict(zip(children, reports_of([*children.values()]), strict=True))


@pytest.mark.parametrize("subject", ["ranks", "code"])
def test_simulated_ranks_and_the_code_for_an_h200_are_right(reports, subject):
    assert not faults(reports[subject])


@pytest.mark.parametrize("subject", ["ranks", "code"])
def test_bugs_in_ranks_and_code_show(reports, subject):
    assert not unnoticed(reports[subject])


def check_processes(reports: list[dict]) -> None:
    assert not [faults(report) for report in reports if faults(report)]
    # a rank that got rows of another round has a fault; others may wait in vain for it
    assert any(report.get("mutant") for report in reports)


def test_processes_exchange_tokens_without_a_barrier(tmp_path):
    check_processes(reports_of_processes(2, 2, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_exchange_tokens_for_long(ranks, tmp_path):
    check_processes(reports_of_processes(ranks, 20, tmp_path))


@pytest.mark.slow
def test_the_whole_grid_of_simulated_ranks():
    (report,) = reports_of([start("exchange_child.py", "wide", **INTERPRETED)])
    assert not faults(report)


WORKLOADS = {
    "moe_dispatch": (
        "RANKS=2,TOKENS=8,GROUPS=2,TOPK=2,EXPERTS=4",
        "RANKS=2,TOKENS=8,GROUPS=2,TOPK=2,EXPERTS=4,fp8=true",
    ),
    "moe_combine": (
        "RANKS=2,TOKENS=8,HIDDEN=256,TOPK=2,EXPERTS=4",
        "RANKS=2,TOKENS=8,HIDDEN=256,TOPK=2,EXPERTS=4,zero_copy=true",
    ),
}


def winners_of(kernel: str, plain, **parameters: object) -> Iterator[Winner]:
    """Yield winners of a kernel, made from one of another kernel."""
    spec = load_space(Catalog().space_path(kernel))
    default = spec.templates[0].default
    candidate = Candidate.of("triton", {**dict(default.parameters), **parameters})
    renderer = Renderer(Catalog().template_folders)
    for workload in WORKLOADS[kernel]:
        yield dataclasses.replace(
            plain,
            workload=spec.workload(workload),
            candidate=candidate,
            default_candidate=default,
            source=renderer.render(kernel, "triton", candidate),
            default=renderer.render(kernel, "triton", default),
        )


CHOSEN = """\
import torch
from {package}._runtime.moe.kernels import Shape, kernels_for
shape = Shape(ranks=2, experts=4, max_tokens=8, hidden=256, topk=2)
kernels = kernels_for(shape, torch.device("cpu"))
print(kernels.dispatch[1].__file__, kernels.combine[0].COPY)
"""


@pytest.mark.parametrize(
    ("buffering", "file", "copy"),
    [("double", "moe_dispatch/", "pull"), ("acknowledged", "defaults/dispatch.py", "pull")],
)
def test_a_buffer_takes_those_frozen_kernels_that_fit_each_other(tmp_path, buffering, file, copy):
    plain, package = Project(tmp_path / "project").winner(), tmp_path / f"package_{buffering}"
    winners = [
        *winners_of("moe_dispatch", plain, BUFFERING=buffering, COPIES="rank"),
        *winners_of("moe_combine", plain, COPY="pull"),
    ]
    specs = [load_space(Catalog().space_path(kernel)) for kernel in WORKLOADS]
    frozen = [frozen_kernel(Catalog(), spec) for spec in specs]
    freeze(winners, frozen, package, templates=TEMPLATES)
    said = subprocess.run(
        [sys.executable, "-c", CHOSEN.format(package=package.name)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert file in said.stdout, said.stderr
    assert said.stdout.split()[-1] == copy


def soak(variant: str, rounds: int, store: Path, device: str, ranks: int = 2) -> None:
    on_gpu = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    arguments = (ranks, rounds, store, device, variant)
    environment = INTERPRETED if device == "cpu" else on_gpu
    children = [
        start("exchange_soak.py", rank, *arguments, **environment) for rank in range(ranks)
    ]
    for report in reports_of(children):
        assert report
        assert not faults(report)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["push", "sums"])
def test_whole_numbers_survive_many_rounds_on_the_cpu(tmp_path, variant):
    soak(variant, 4, tmp_path / "store", "cpu")


VARIANTS = (
    *("sums", "push", "acknowledged", "sums, rows once per expert"),
    *("rows once per rank, pulled", "acknowledged, pulled"),
)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_numbers_survive_many_rounds_on_gpus(tmp_path, variant):
    import torch

    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("exchanging needs two GPUs")
    soak(variant, 10_000, tmp_path / "store", "cuda", ranks)


SMALL = {
    "moe_dispatch": {
        "SEND_PROGRAMS": 8,
        "RECEIVE_SPLIT": 8,
        "SCAN_TOKENS": 32,
        "RECEIVE_TILE": 512,
    },
    "moe_combine": {"SEND_SPLIT": 1, "RECEIVE_PROGRAMS": 16},
}


@pytest.mark.slow
def test_the_benchmark_races_every_contender_there_and_back(tmp_path):
    arguments = f"--device cpu --output {tmp_path}/moe.csv --tokens 2 --hidden 256 --experts 4"
    arguments += " --topk 2 --routing balanced --blocks 1 --samples 2"
    script = TESTS.parent / "benchmarks" / "moe.py"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *(str(script), *arguments.split(), "--settings", json.dumps(SMALL)),
        ],
        env={**os.environ, **INTERPRETED, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    with (tmp_path / "moe.csv").open() as lines:
        rows = {(row["op"], row["contender"]) for row in csv.DictReader(lines)}
    ours = ("tuner", "tuner, rows copied", "tuner, one buffer")
    others = ("all_to_all_single", "all_gather + reduce_scatter")
    wanted = itertools.product(("moe_dispatch", "moe_combine"), ours + others)
    assert rows == set(wanted)
