"""What other tools read: JSON, CSV, vLLM's configurations, Kernel Tuner's T4 results."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
from frozen import DEVICE, Project

from tuner import codec
from tuner.package import export
from tuner.records import (
    STAGES,
    Candidate,
    Measurement,
    Rejection,
    Resources,
    Source,
    Trial,
    UsageError,
    Winner,
    Workload,
)

# What Kernel Tuner's T4/1.0.0/results-schema.json demands, in our words.
T4_RESULT = {
    "type": "object",
    "required": ["configuration", "times", "invalidity", "correctness"],
    "properties": {
        "timestamp": {"type": "string"},
        "configuration": {"type": "object"},
        "objectives": {"type": "array"},
        "times": {
            "type": "object",
            "properties": {
                "compilation_time": {"type": "number"},
                "runtimes": {"type": "array"},
                "framework": {"type": "number"},
                "search_algorithm": {"type": "number"},
                "validation": {"type": "number"},
            },
        },
        "invalidity": {"enum": [*STAGES, "correct"]},
        "correctness": {"type": "number"},
        "measurements": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "value": {"type": ["number", "string", "array"]},
                    "unit": {"type": "string"},
                },
            },
        },
    },
}
T4 = {
    "type": "object",
    "properties": {
        "schema_version": {"type": "string", "pattern": "^[0-9]+.[0-9]+.[0-9]+$"},
        "results": {"type": "array", "items": T4_RESULT},
    },
}

H200 = dataclasses.replace(
    DEVICE, kind="cuda", name="NVIDIA H200", arch="sm90", versions=(("triton", "3.7.1"),)
)


def matmul(m: int, n: int = 64, dtype: str = "bfloat16") -> Workload:
    return Workload("matmul", (("M", m), ("N", n), ("K", 128)), dtype)


def trials(*workloads: Workload) -> list[Trial]:
    found = []
    for workload in workloads or (matmul(32),):
        for tile, outcome in (
            (16, Measurement(1.5, 1.4, 1.6, 10, "warm", 0.25, Resources(shared_bytes=1024))),
            *((32, Rejection(stage, f'says "{stage}",\nand more')) for stage in STAGES),
        ):
            candidate = Candidate.of("triton", {"BLOCK_M": tile, "PACK": True, "LAYOUT": "none"})
            found.append(Trial(len(found), workload, candidate, "ab" * 32, outcome, 0.5))
    return found


@pytest.fixture
def winners(tmp_path: Path) -> list[Winner]:
    base = Project(tmp_path).winner()
    found = []
    for m, n, dtype, group in (
        (64, 64, "bfloat16", 1),
        (1, 64, "bfloat16", 8),
        (1, 32, "float16", 4),
    ):
        candidate = Candidate.of("triton", {"BLOCK_M": 16, "GROUP_M": group, "NUM_WARPS": 4})
        found.append(
            dataclasses.replace(
                base,
                workload=matmul(m, n, dtype),
                candidate=candidate,
                source=Source("matmul", "triton", "text"),
                device=H200,
            )
        )
    return found


def test_json(tmp_path: Path, winners: list[Winner]) -> None:
    path = tmp_path / "folder" / "winners.json"
    assert export.write("json", path, winners=winners, trials=[]) == [path]
    data = json.loads(path.read_text())
    assert [codec.from_json(Winner, item) for item in data["winners"]] == winners
    assert path.read_text().endswith("}\n")


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "trials.csv"
    export.write("csv", path, winners=[], trials=trials())
    frame = pd.read_csv(io.StringIO(path.read_text()))
    assert list(frame["stage"]) == ["correct", *STAGES]
    assert list(frame["BLOCK_M"]) == [16, 32, 32, 32, 32, 32]
    assert set(frame["workload"]) == {"M=32,N=64,K=128,dtype=bfloat16"}
    assert frame["median_ms"][0] == 1.5
    assert frame["median_ms"].isna().sum() == len(STAGES)
    assert frame["reason"][1] == 'says "constraints",\nand more'
    assert ",10," in path.read_text()
    assert ",1024," in path.read_text()
    assert not list(tmp_path.glob("*.part"))


def test_vllm(tmp_path: Path, winners: list[Winner]) -> None:
    paths = export.write("vllm", tmp_path / "configs", winners=winners, trials=[])
    assert [path.name for path in paths] == [
        "N=32,K=128,device_name=NVIDIA_H200,dtype=float16.json",
        "N=64,K=128,device_name=NVIDIA_H200,dtype=bfloat16.json",
    ]
    assert json.loads(paths[1].read_text()) == {
        "triton_version": "3.7.1",
        "1": {"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 8, "num_warps": 4},
        "64": {"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 1, "num_warps": 4},
    }


def test_vllm_of_several_kernels(winners: list[Winner]) -> None:
    other = dataclasses.replace(winners[0].workload, kernel="linear", flags=(("bias", True),))
    winners.append(dataclasses.replace(winners[0], workload=other))
    names = list(export.vllm_files(winners))
    assert "linear/N=64,K=128,device_name=NVIDIA_H200,dtype=bfloat16,bias=true.json" in names
    assert len(names) == 3


def test_t4(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert export.write("t4", path, winners=[], trials=trials()) == [path]
    data = json.loads(path.read_text())
    jsonschema.validate(data, T4)
    assert [item["invalidity"] for item in data["results"]] == ["correct", *STAGES]
    first = data["results"][0]
    assert first["configuration"] == {
        "template": "triton",
        "BLOCK_M": 16,
        "LAYOUT": "none",
        "PACK": True,
    }
    assert first["times"] == {"compilation_time": 250.0, "runtimes": [1.5]}
    assert {"name": "shared", "value": 1024, "unit": "bytes"} in first["measurements"]


def test_t4_of_several_workloads(tmp_path: Path) -> None:
    several = trials(matmul(1), matmul(2))
    paths = export.write("t4", tmp_path / "results", winners=[], trials=several)
    assert [path.name for path in paths] == [
        f"matmul,M={m},N=64,K=128,dtype=bfloat16.json" for m in (1, 2)
    ]
    for path in paths:
        jsonschema.validate(json.loads(path.read_text()), T4)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--format xml: must be one of json, csv, vllm, t4"):
        export.write("xml", tmp_path, winners=[], trials=[])
    for form in export.FORMATS:
        with pytest.raises(UsageError, match=f"--format {form}: there is nothing to export"):
            export.write(form, tmp_path, winners=[], trials=[])
    winner = Project(tmp_path / "project").winner()
    with pytest.raises(UsageError, match="needs a kernel with the dims M, N and K, not mix"):
        export.write("vllm", tmp_path, winners=[winner], trials=[])
