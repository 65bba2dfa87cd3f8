"""`tune probe`: what a device is found to do, and what happens where an experiment fails."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tuner.children.child import ChildSpec
from tuner.children.worker import Workers
from tuner.evidence.card import DeviceCard, Finding, card_of, card_path, make_card
from tuner.records import UsageError
from tuner.serve.features import most


@pytest.fixture
def cards(tmp_path, monkeypatch) -> Path:
    """Keep the cards of this test apart from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuner" / "cards"


def workers_on(folder: Path, device: str = "cpu", **variables: str) -> Workers:
    for name in ("sources", "cache"):
        (folder / name).mkdir(exist_ok=True)
    environment = {**os.environ, **variables}
    spec = ChildSpec(device, folder / "cache", environment=tuple(environment.items()))
    return Workers(spec, jobs=1, sources=folder / "sources")


QUICK = "import tuner.serve.experiments\ntuner.serve.experiments.BUDGET_S = 0.05\n"


def customized(folder: Path, text: str) -> Workers:
    """Return workers whose children run something before all else."""
    (folder / "sitecustomize.py").write_text(text + QUICK)
    return workers_on(folder, PYTHONPATH=os.pathsep.join((str(folder), str(ROOT))))


def test_the_card_of_a_cpu_is_measured_once_and_kept(tmp_path):
    with customized(tmp_path, "") as workers:
        card, info = card_of(workers, tmp_path), workers.info()
        for name in ("copy_bandwidth", "read_bandwidth", "write_bandwidth", "rate_float32"):
            assert card.number(name) > 0.1
        assert 0 < card.number("clock_resolution") < 1000
        assert card.number("noise_floor") >= 0
        assert card.findings["warp_size"] == Finding(
            value=None, unit="", note="not applicable to cpu"
        )
        assert card_of(workers, tmp_path) == card
        newer = dataclasses.replace(info, versions=(*info.versions, ("driver", "2")))
        assert card_path(tmp_path, newer) != card_path(tmp_path, info)
        card_path(tmp_path, info).write_text('{"schema_version": 2}')
        with pytest.raises(UsageError, match="tune probe --fresh"):
            card_of(workers, tmp_path)


def test_features_are_found_by_trying_them(tune, cards):
    card = json.loads(tune("probe", "--device", "interpreter", "--json").stdout)
    findings = card["findings"]
    assert findings["dot_float16"]["value"] is True
    assert findings["tensor_descriptors"]["value"] is True
    assert findings["atomic_add_float32"]["value"] is True
    assert findings["dot_bfloat16"]["value"] in (True, False)
    assert "copy_bandwidth" not in findings
    (path,) = cards.glob("interpreter_*.json")
    path.write_text("{")
    fresh = tune("probe", "--device", "interpreter", "--fresh")
    assert fresh.returncode == 0
    assert "tensor_descriptors" in fresh.stdout
    assert str(path) in fresh.stdout.replace("\n", "")


def test_an_experiment_that_kills_its_child_is_a_finding(tmp_path):
    text = (
        "import os, torch\ntorch.sum = lambda *_, **__: os.abort()\n"
        "def fail(*_, **__):\n    raise ValueError('no such product')\ntorch.matmul = fail\n"
    )
    with customized(tmp_path, text) as workers:
        card = make_card(workers, workers.info())
    assert "SIGABRT" in card.findings["read_bandwidth"].note
    assert "ValueError: no such product" in card.findings["rate_float32"].note
    assert card.number("read_bandwidth") is None
    assert card.number("copy_bandwidth") > 0
    assert card.ceilings("float32").gflops is None


def card_with(**numbers: float) -> DeviceCard:
    facts = {"kind": "cuda", "name": "", "arch": "", "limits": {}, "versions": {}}
    findings = {name: {"value": value, "unit": "", "note": ""} for name, value in numbers.items()}
    return DeviceCard.model_validate(
        {
            **{"schema_version": 1, "tuner": "", "date": "", "seconds": 0.0},
            **{"device": facts, "findings": findings},
        }
    )


def test_the_ceiling_of_a_type_is_that_of_all_types_as_wide():
    card = card_with(rate_float32=50.0, rate_tf32=400.0, rate_bfloat16=300.0, rate_int8=900.0)
    assert card.ceilings("float32").gflops == 400.0
    assert card.ceilings("bfloat16").gflops == 400.0
    assert card.ceilings("int8").gflops == 900.0
    assert card.ceilings("float64").gflops is None
    assert card_with(copy_bandwidth=2.0, read_bandwidth=3.0).ceilings("int8").gbytes == 3.0
    assert card_with().ceilings("int8").gbytes is None


@pytest.mark.parametrize("limit", [0, 1, 5, 63, 64])
def test_bisection_finds_the_largest_that_works(limit):
    assert most(lambda number: number <= limit, 64) == limit


COMPILE = """
from tuner.builders.triton import _compiling_only, _targeting
from tuner.catalog import device_class
from tuner.devices import _gluon_features, _triton_features
device = device_class({kind!r}).target({arch!r})
lanes = dict(device.limits)["warp_size"]
with _targeting(device), _compiling_only() as kernels:
    for name in ("dot_float16", "dot_int8", "atomic_add_float16", "tensor_descriptors"):
        _triton_features.try_feature(name, "cpu")
    for name in _gluon_features.FEATURES:
        _gluon_features.try_feature(name, "cpu", lanes)
    for chunks in (1, 63):
        try:
            _gluon_features.try_shared_bytes(chunks, "cpu", lanes)
        except RuntimeError as error:
            assert "wrong results" in str(error)  # nothing was launched
        assert kernels[-1].metadata.shared == 1024 * chunks
"""


@pytest.mark.parametrize(
    ("kind", "arch"), [("cuda", "90"), pytest.param("hip", "gfx942", marks=pytest.mark.slow)]
)
def test_the_kernels_that_try_features_compile_for_cards_that_have_them(kind, arch, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(kind=kind, arch=arch)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_findings_are_strict():
    with pytest.raises(ValueError, match="unit"):
        Finding.model_validate({"value": 1.0, "note": ""})
