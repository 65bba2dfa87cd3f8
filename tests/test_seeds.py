"""Others' results as first candidates.

The files in `tests/data/seeds` were written by Kernel Tuner 1.5.0 (of a C kernel, tuned on a CPU)
and by Helion 1.5.1 (`helion.Config.save`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT
from triton import Config

from tuner import codec
from tuner.catalog import Catalog, device_class
from tuner.guesses import guesses
from tuner.package.export import vllm_files, winners_json
from tuner.package.reading import package_winners
from tuner.plan import Request, plan
from tuner.records import Candidate, DeviceInfo, UsageError
from tuner.seeds import MOST, fit, read_seeds
from tuner.session import Subject

DATA = Path(__file__).parent / "data" / "seeds"
FROZEN = ROOT / "kernels_generated"


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


def values(candidate: Candidate) -> dict[str, object]:
    return dict(candidate.parameters)


@pytest.mark.parametrize("name", ["kernel_tuner_cache.json", "kernel_tuner_t4.json"])
def test_kernel_tuner_gives_its_fastest_first(scale, name):
    found = fit(scale, read_seeds(DATA / name))
    assert {candidate.template for candidate in found.candidates} == {"cpu"}
    pairs = [(values(item)["UNROLL"], values(item)["WASTE"]) for item in found.candidates]
    assert set(pairs) == {(unroll, waste) for unroll in (1, 2, 4) for waste in (0, 4)}
    assert pairs[0][1] == 0
    assert all(values(item)["THREADS"] is False for item in found.candidates)
    assert found.left_out == {"cpu: UNROLL=16 is not one of 1, 2, 4, 8": 2}


def test_triton_gives_its_fastest_first(matmul, tmp_path):
    blocks = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    timings = {
        Config(blocks, num_warps=4, num_stages=4): [0.5, 0.4, 0.6],
        Config({**blocks, "BLOCK_SIZE_N": 256}, num_warps=8, num_stages=3): [0.2, 0.1, 0.3],
        Config({**blocks, "BLOCK_SIZE_N": 96}, num_warps=8, num_stages=3): [0.1, 0.1, 0.1],
    }
    path = tmp_path / "matmul_kernel.autotune.json"
    # As triton.runtime.autotuner.Autotuner.check_disk_cache writes it.
    rows = [(config.__dict__, times) for config, times in timings.items()]
    path.write_text(json.dumps({"key": ["16"], "configs_timings": rows}))
    found = fit(matmul(), read_seeds(path))
    first = next(item for item in found.candidates if item.template == "triton")
    assert values(first) == {
        **{"BLOCK_M": 64, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8},
        **{"NUM_WARPS": 8, "NUM_STAGES": 3},
    }
    assert "triton: BLOCK_N=96 is not one of 16, 32, 64, 128, 256" in found.left_out
    assert "triton: unknown parameter num_ctas" in found.left_out
    assert not [reason for reason in found.left_out if "maxnreg" in reason]  # it is None


def test_helion_gives_its_blocks_in_the_order_of_its_loops(matmul, tmp_path):
    found = fit(matmul(), read_seeds(DATA / "helion.json"))
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
    small = fit(matmul(), read_seeds(path)).candidates[0]
    large = fit(matmul("M=2048,N=4096,K=4096,dtype=bfloat16"), read_seeds(path)).candidates[0]
    assert (values(small)["GROUP_M"], values(large)["BLOCK_M"]) == (4, 128)


def test_our_packages_and_exports_give_their_winners(matmul, tmp_path):
    subject = matmul()
    of_package = fit(subject, read_seeds(FROZEN))
    assert 1 < len(of_package.candidates) <= MOST
    own = [item for item in package_winners(FROZEN) if item.workload == subject.task.workload]
    assert of_package.candidates[0] == own[0].candidate
    winners = [item for item in package_winners(FROZEN) if item.device.arch == "sm90"]
    (tmp_path / "winners.json").write_text(winners_json(winners))
    assert fit(subject, read_seeds(tmp_path / "winners.json")).candidates == of_package.candidates
    for name, text in vllm_files(winners).items():
        (tmp_path / name).write_text(text)
        assert read_seeds(tmp_path / name)


def test_seeds_are_tried_right_after_the_default(scale):
    found = fit(scale, read_seeds(DATA / "kernel_tuner_cache.json"))
    seeded = dataclasses.replace(scale, seeds=tuple(found.candidates))
    order = guesses(seeded, ())
    assert order[0] == scale.feasible.default
    assert order[1] == found.candidates[0] != scale.feasible.default


def test_what_a_constraint_forbids_is_left_out_with_its_reason(matmul, tmp_path):
    path = tmp_path / "a.json"
    config = {"block_sizes": [256, 256, 256], "num_warps": 4, "num_stages": 6}
    path.write_text(json.dumps(config))
    found = fit(matmul(), read_seeds(path))
    assert not [item for item in found.candidates if item.template == "triton"]
    assert any("fits shared memory" in reason or "fit shared memory" in reason
               for reason in found.left_out)  # fmt: skip


def test_what_nobody_here_knows_is_left_out_with_its_names(scale, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"configs_timings": [[{"kwargs": {"FOO": 1, "BAR": 2}}, 1.0]]}))
    found = fit(scale, read_seeds(path))
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
    assert "6 first candidates of 8 configurations" in done.stdout
    assert "left out 2 x cpu: UNROLL=16 is not one of 1, 2, 4, 8" in done.stdout
    assert "winner: cpu(THREADS=false, UNROLL=" in done.stdout
    assert "WASTE=0)" in done.stdout


def test_a_seed_that_is_not_there_ends_the_command_at_once(tune, tmp_path):
    bad = tune("scale", "--seed-from", "nowhere.json")
    assert bad.returncode == 2
    assert "--seed-from nowhere.json: cannot be read" in bad.stderr
