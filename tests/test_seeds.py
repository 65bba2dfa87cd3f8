"""Others' results as first candidates.

The files in `tests/data/seeds` were written by Kernel Tuner 1.5.0 (of a C kernel, tuned on a CPU)
and by Helion 1.5.1 (`helion.Config.save`).
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT
from rich.console import Console
from triton import Config

from tuner import codec
from tuner.catalog import Catalog, device_class
from tuner.cli.seeding import seeded
from tuner.guesses import guesses
from tuner.landing import landing
from tuner.package.export import trials_csv, vllm_files, winners_json
from tuner.package.reading import package_winners
from tuner.plan import Request, plan
from tuner.records import Candidate, DeviceInfo, Measurement, Trial, UsageError
from tuner.seeds import MOST, Fit, Seed, fit, read_seeds
from tuner.session import Subject
from tuner.store import Store

DATA = Path(__file__).parent / "data" / "seeds"
FROZEN = ROOT / "kernels_generated"
FIELDS = ("workload", "candidate", "source_sha256", "outcome")


@pytest.fixture(scope="module")
def h200() -> DeviceInfo:
    """The card that the repository's own winners are of."""
    manifest = json.loads((FROZEN / "matmul" / "sm90" / "manifest.json").read_text())
    return codec.from_json(DeviceInfo, {**manifest["device"], "versions": {}})


@pytest.fixture
def matmul(h200) -> Callable[..., Subject]:
    def subject(workload: str = "M=16,N=4096,K=4096,dtype=bfloat16") -> Subject:
        (found,) = plan(Catalog(), h200, Request(("matmul",), (workload,)))
        return found

    return subject


@pytest.fixture
def scale() -> Subject:
    (found,) = plan(Catalog([KERNELS]), device_class("cpu")().info(), Request(("scale",)))
    return found


def taken(subject: Subject, seeds: list[Seed]) -> Fit:
    return fit(subject.task.workload, subject.feasible, seeds)


def values(candidate: Candidate) -> dict[str, object]:
    return dict(candidate.parameters)


@pytest.mark.parametrize("name", ["kernel_tuner_cache.json", "kernel_tuner_t4.json"])
def test_kernel_tuner_gives_its_fastest_first(scale, name):
    found = taken(scale, read_seeds(DATA / name))
    assert {candidate.template for candidate in found.candidates} == {"cpu"}
    pairs = [(values(item)["UNROLL"], values(item)["WASTE"]) for item in found.candidates]
    assert set(pairs) == {(unroll, waste) for unroll in (2, 4) for waste in (0, 4)}
    assert len(pairs) == MOST
    assert pairs[0][1] == 0
    assert all(values(item)["THREADS"] is False for item in found.candidates)
    assert found.left_out == {"cpu: UNROLL=16 is not one of 1, 2, 4, 8": 2}


def test_triton_gives_its_fastest_first(matmul, tmp_path):
    blocks = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    timings = {
        Config(blocks, num_warps=4, num_stages=4): [0.5, 0.4, 0.6],
        Config({**blocks, "BLOCK_SIZE_N": 256}, num_warps=8, num_stages=3): [0.2, 0.1, 0.3],
        Config({**blocks, "BLOCK_SIZE_N": 96}, num_warps=8, num_stages=3): [0.1, 0.1, 0.1],
        Config(blocks, num_warps=8, num_stages=5): [float("inf")] * 3,  # as of what failed
    }
    path = tmp_path / "matmul_kernel.autotune.json"
    # As triton.runtime.autotuner.Autotuner.check_disk_cache writes it.
    rows = [(config.__dict__, times) for config, times in timings.items()]
    path.write_text(json.dumps({"key": ["16"], "configs_timings": rows}))
    assert len(read_seeds(path)) == 3
    found = taken(matmul(), read_seeds(path))
    first = next(item for item in found.candidates if item.template == "triton")
    assert values(first) == {
        **{"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8},
        **{"NUM_WARPS": 8, "NUM_STAGES": 3},
    }
    assert "triton: BLOCK_N=96 is not one of 16, 32, 64, 128, 256" in found.left_out
    assert "triton: unknown parameter num_ctas" in found.left_out
    assert not [reason for reason in found.left_out if "maxnreg" in reason]  # it is None


def test_helion_gives_its_blocks_in_the_order_of_its_loops(matmul, tmp_path):
    found = taken(matmul(), read_seeds(DATA / "helion.json"))
    first = next(item for item in found.candidates if item.template == "triton")
    assert [values(first)[f"BLOCK_{dim}"] for dim in "MNK"] == [128, 128, 32]
    assert (values(first)["GROUP_M"], values(first)["NUM_WARPS"]) == (8, 8)
    assert found.left_out["triton: unknown parameter pid_type"] == 1
    entry = {"config": (DATA / "helion.json").read_text(), "key": {"type": "", "fields": {}}}
    (tmp_path / "ab.best_config").write_text(json.dumps(entry))
    assert read_seeds(tmp_path / "ab.best_config") == read_seeds(DATA / "helion.json")


def test_vllm_gives_the_nearest_m_first(matmul, tmp_path):
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    entries = {
        "triton_version": "3.6.0",
        "1024": {**config, "BLOCK_SIZE_M": 128, "num_warps": 8, "num_stages": 3},
        "24": {**config, "GROUP_SIZE_M": 4, "num_warps": 4, "num_stages": 3},
    }
    path = tmp_path / "N=4096,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"
    path.write_text(json.dumps(entries))
    small = taken(matmul(), read_seeds(path)).candidates[0]
    large = taken(matmul("M=2048,N=4096,K=4096,dtype=bfloat16"), read_seeds(path)).candidates[0]
    assert (values(small)["GROUP_M"], values(large)["BLOCK_M"]) == (4, 128)


def test_our_packages_and_exports_give_their_winners(matmul, tmp_path):
    subject = matmul()
    of_package = taken(subject, read_seeds(FROZEN))
    assert 1 < len(of_package.candidates) <= MOST
    own = [item for item in package_winners(FROZEN) if item.workload == subject.task.workload]
    assert of_package.candidates[0] == own[0].candidate
    winners = [item for item in package_winners(FROZEN) if item.device.arch == "sm90"]
    (tmp_path / "winners.json").write_text(winners_json(winners))
    assert (
        taken(subject, read_seeds(tmp_path / "winners.json")).candidates == of_package.candidates
    )
    for name, text in vllm_files(winners).items():
        (tmp_path / name).write_text(text)
        assert read_seeds(tmp_path / name)


def measured(scale: Subject, tries: list[tuple[str, dict[str, object], float]]) -> list[Trial]:
    """Return trials of workloads, with parameters and time in ms."""
    trials = []
    for workload, parameters, time_ms in tries:
        chosen = Candidate.of("cpu", {**dict(scale.feasible.default.parameters), **parameters})
        outcome = Measurement(time_ms, time_ms, time_ms, 5, "warm", 0.1)
        about = (scale.spec.workload(workload), chosen, "0" * 64, outcome)
        trials.append(Trial(len(trials), *about, 0.1))
    return trials


@pytest.fixture
def trials(scale) -> list[Trial]:
    return measured(
        scale,
        [
            ("N=100", {"UNROLL": 4, "THREADS": True}, 0.001),
            ("N=90000", {"UNROLL": 2, "WASTE": 0}, 0.2),
            ("N=90000", {"UNROLL": 1, "WASTE": 0}, 0.1),
            ("N=90000", {"UNROLL": 4, "WASTE": 0}, 0.3),
        ],
    )


def test_our_csv_export_and_our_store_give_the_nearest_workload_first(scale, trials, tmp_path):
    (tmp_path / "trials.csv").write_text(trials_csv(trials))
    store = Store(tmp_path / "store", "x86")
    for item in trials:
        store.add_trial(*(getattr(item, name) for name in FIELDS), seconds=0.1)
    of_csv = taken(scale, read_seeds(tmp_path / "trials.csv"))
    assert [values(item)["UNROLL"] for item in of_csv.candidates] == [1, 2, 4, 4]
    assert [values(item)["THREADS"] for item in of_csv.candidates] == [False, False, False, True]
    assert not of_csv.left_out
    for source in (tmp_path / "store", store.path):
        assert taken(scale, read_seeds(source)).candidates == of_csv.candidates


def test_a_folder_gives_what_its_files_hold(scale, tmp_path):
    (tmp_path / "README.md").write_text("no configuration")
    with pytest.raises(UsageError, match=r"--seed-from .*: no file in it holds a configuration"):
        read_seeds(tmp_path)
    for name in ("kernel_tuner_cache.json", "helion.json"):
        (tmp_path / name).write_text((DATA / name).read_text())
    alone = taken(scale, read_seeds(DATA / "kernel_tuner_cache.json"))
    assert taken(scale, read_seeds(tmp_path)).candidates == alone.candidates


def test_each_file_gives_some_of_its_own(scale, trials, tmp_path):
    (tmp_path / "trials.csv").write_text(trials_csv(trials[:1]))
    paths = (DATA / "kernel_tuner_cache.json", tmp_path / "trials.csv")
    files = {path: read_seeds(path) for path in paths}
    console = Console(file=io.StringIO())
    (subject,) = seeded(console, [scale], files)
    assert subject.seeds[:MOST] == tuple(taken(scale, files[paths[0]]).candidates)
    assert subject.seeds[MOST:] == (trials[0].candidate,)
    assert f"{MOST + 1} first candidates of 9 configurations" in console.file.getvalue()


def test_a_store_from_before_a_parameter_gives_what_came_after(scale, trials, tmp_path):
    old = dataclasses.replace(trials[0], candidate=Candidate.of("cpu", {"UNROLL": 1}))
    store = Store(tmp_path, "x86")
    for item in (old, dataclasses.replace(trials[1], workload=old.workload)):
        store.add_trial(*(getattr(item, name) for name in FIELDS), seconds=0.1)
    (seed,) = read_seeds(store.path)
    assert dict(seed.parameters)["UNROLL"] == 2


def test_where_seeds_landed_is_said(scale, trials):
    subject = dataclasses.replace(
        scale, task=dataclasses.replace(scale.task, workload=trials[1].workload)
    )
    seeds = read_seeds(DATA / "kernel_tuner_cache.json")
    found = landing(subject, seeds, trials)
    assert (found.known, found.total, found.timed) == (6, 8, 3)
    assert (found.rank, found.ratio) == (1, 1.0)
    without = landing(subject, seeds[:1], trials[1:2])
    assert without.timed == 1
    none = landing(subject, seeds, ())
    assert str(none) == "6 of 8 configurations are in the space, none of them was timed"
    late = landing(
        subject, [seed for seed in seeds if dict(seed.parameters)["UNROLL"] == 4], trials
    )
    assert (late.rank, round(late.ratio, 3)) == (3, 3.0)
    assert str(late).endswith("is number 3 of 3 timed, 3.00 x the fastest")


def test_seeds_are_tried_right_after_the_default(scale):
    found = taken(scale, read_seeds(DATA / "kernel_tuner_cache.json"))
    seeded = dataclasses.replace(scale, seeds=tuple(found.candidates))
    order = guesses(seeded, ())
    assert order[0] == scale.feasible.default
    assert order[1] == found.candidates[0] != scale.feasible.default


def test_what_a_constraint_forbids_is_left_out_with_its_reason(matmul, tmp_path):
    path = tmp_path / "a.json"
    config = {"block_sizes": [256, 256, 256], "num_warps": 4, "num_stages": 6}
    path.write_text(json.dumps(config))
    found = taken(matmul(), read_seeds(path))
    assert not [item for item in found.candidates if item.template == "triton"]
    assert any("fits shared memory" in reason or "fit shared memory" in reason
               for reason in found.left_out)  # fmt: skip


def test_what_nobody_here_knows_is_left_out_with_its_names(scale, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"configs_timings": [[{"kwargs": {"FOO": 1, "BAR": 2}}, 1.0]]}))
    found = taken(scale, read_seeds(path))
    assert found.candidates == []
    assert found.left_out == {"FOO, BAR: unknown to scale on this device": 1}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"configs_timings": 3}', '{"cache": {}}', "\xff", '{"a": 1}']
)
def test_a_file_of_no_known_format_is_refused_by_its_name(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=r"bad\.json"):
        read_seeds(path)
    with pytest.raises(UsageError, match="nowhere"):
        read_seeds(tmp_path / "nowhere")


@pytest.mark.slow
def test_the_command_tries_seeds_first_and_says_what_it_left_out(tune, tmp_path):
    done = tune(
        *("scale", "--kernels", str(KERNELS), "--device", "cpu", "--budget", "5s"),
        *("--seed-from", str(DATA / "kernel_tuner_t4.json"), "--jobs", "1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 first candidates of 8 configurations" in done.stdout
    landed = (
        r"6 of 8 configurations are in the space; the best, cpu\(.*WASTE=0\), is number \d+ of"
    )
    assert re.search(landed, done.stdout)
    assert "left out 2 x cpu: UNROLL=16 is not one of 1, 2, 4, 8" in done.stdout
    assert re.search(r"winner: cpu\(.*WASTE=0\)", done.stdout)


def test_a_seed_that_is_not_there_ends_the_command_at_once(tune, tmp_path):
    bad = tune("scale", "--seed-from", "nowhere.json")
    assert bad.returncode == 2
    assert "--seed-from nowhere.json: cannot be read" in bad.stderr
