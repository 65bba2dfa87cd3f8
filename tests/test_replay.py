"""Recorded tables of several tools, replayed."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest

from tuner import codec
from tuner.records import Candidate, Measurement, Rejection, Trial, UsageError, Workload
from tuner.search.replay import SAMPLERS, replay
from tuner.search.tables import read_tables

TILES, STAGES = (16, 32, 48, 64, 96, 128), (1, 2, 3, 4)


def time_of(tile, stages):
    """Return a made-up time in ms; None where the candidate fails."""
    if tile * stages > 256:
        return None
    return 1.0 + abs(tile - 64) / 32 + 0.5 * abs(stages - 3)


def grid():
    return itertools.product(TILES, STAGES)


def csv_table(folder):
    lines = ["TILE,STAGES,time_ms,status"]
    for tile, stages in grid():
        time = time_of(tile, stages)
        lines.append(f"{tile},{stages},{time or ''},{'ok' if time else 'failed'}")
    lines.append("256,1,,constraints")
    path = folder / "tiles.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def cache_file(folder, closed=True):
    cache = {
        f"{tile},{stages}": {
            "TILE": tile,
            "STAGES": stages,
            "time": time_of(tile, stages) or "RuntimeFailedConfig",
        }
        for tile, stages in grid()
    }
    text = json.dumps({"tune_params_keys": ["TILE", "STAGES"], "cache": cache})
    path = folder / "cache.json"
    path.write_text(text if closed else text[:-2] + ",")
    return path


def t4_file(folder):
    results = []
    for tile, stages in grid():
        time = time_of(tile, stages)
        results.append(
            {
                "configuration": {"TILE": tile, "STAGES": stages},
                "objectives": ["time"],
                "invalidity": "correct" if time else "runtime",
                "measurements": [{"name": "time", "value": time, "unit": "ms"}] if time else [],
            }
        )
    refused = {"configuration": {"TILE": 256, "STAGES": 1}, "invalidity": "constraints"}
    path = folder / "results.json"
    path.write_text(json.dumps({"schema_version": "1.0.0", "results": [*results, refused]}))
    return path


def store_file(folder):
    lines = []
    for size in (64, 128):
        workload = Workload("matmul", (("M", size),), "float32")
        for tile, stages in grid():
            time = time_of(tile, stages)
            candidate = Candidate.of("cpu", {"TILE": tile, "STAGES": stages})
            outcome = Rejection("runtime", "it crashed")
            if time is not None:
                outcome = Measurement(time, time, time, 9, "warm", 0.1)
            trial = Trial(len(lines), workload, candidate, "", outcome, 1.0)
            lines.append({"schema_version": 1, "trial": codec.to_json(trial)})
    lines.append({"schema_version": 1, "quarantine": {}})
    path = folder / "trials.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.parametrize(
    "write", [csv_table, cache_file, lambda f: cache_file(f, closed=False), t4_file]
)
def test_every_format_gives_the_same_table(tmp_path, write):
    [table] = read_tables(write(tmp_path))
    assert len(table.feasible) == len(TILES) * len(STAGES)
    assert dict(table.feasible.templates[0].spec.parameters) == {"STAGES": STAGES, "TILE": TILES}
    for tile, stages in grid():
        key = table.feasible.key(Candidate.of("table", {"TILE": tile, "STAGES": stages}))
        assert table.times[key] == time_of(tile, stages)
    assert table.best_ms == 1.0


def test_a_store_gives_a_table_per_workload(tmp_path):
    tables = read_tables(store_file(tmp_path))
    assert [table.space for table in tables] == [
        "matmul:M=64,dtype=float32",
        "matmul:M=128,dtype=float32",
    ]
    assert all(len(table.feasible) == 24 for table in tables)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, "cannot be read"),
        ("bad.csv", "A,B\n1,2\n", "is not a CSV table, a Kernel Tuner cache .*time_ms"),
        ("bad.csv", "A,time_ms\n1,fast\n", "is not a CSV table.*fast"),
        ("bad.json", "{}", "is not a CSV table.*cache"),
        ("bad.json", "[", "is not a CSV table"),
        ("bad.csv.gz", "A", "cannot be read"),
        ("bad.jsonl", '{"trial": {}}\n', "is not a CSV table.*outcome"),
        ("empty.csv", "A,time_ms,status\n1,,failed\n", "holds no time"),
    ],
)
def test_a_file_of_another_kind_is_an_error(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_tables(path)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_replay_sums_up_its_runs(tmp_path, sampler, batch):
    [table] = read_tables(csv_table(tmp_path))
    summary = replay(table, sampler, seeds=3, evaluations=100, batch=batch)
    assert summary.to_json() == {
        "space": "tiles",
        "sampler": sampler,
        "seeds": 3,
        "share": {},
        "evaluations_to_95": summary.evaluations_to_95,
        "proposal_ms": summary.proposal_ms,
    }
    assert 1 <= summary.evaluations_to_95 <= 24
    assert summary.proposal_ms >= 0


def test_shares_are_of_the_budgets_that_were_spent(tmp_path):
    lines = ["A,B,time_ms"] + [
        f"{a},{b},{1 + (a - 5) ** 2 + b}" for a in range(9) for b in range(9)
    ]
    path = tmp_path / "bowl.csv"
    path.write_text("\n".join(lines))
    [table] = read_tables(path)
    tuner, random = (replay(table, s, seeds=3, evaluations=60) for s in ("tuner", "random"))
    assert tuner.share.keys() == {"25", "50"}
    assert tuner.share["25"] == 1.0
    assert tuner.evaluations_to_95 < random.evaluations_to_95


def test_a_sampler_that_is_unknown_is_an_error(tmp_path):
    [table] = read_tables(csv_table(tmp_path))
    with pytest.raises(UsageError, match="sampler 'cma' is unknown; known: tuner, tpe, random"):
        replay(table, "cma", seeds=1, evaluations=1)
