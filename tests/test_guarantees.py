"""A workload that asks for equal bits: what may serve it, and whether it keeps its word."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from frozen import DEVICE, MIX, MIX_BACKWARD, TEMPLATES, Project

from tuner.catalog import Catalog
from tuner.package import drift
from tuner.package.freeze import freeze
from tuner.records import Candidate, UsageError
from tuner.runtime.check import Case, check
from tuner.runtime.signature import Signature
from tuner.runtime.tensor_spec import TensorSpec
from tuner.space.kernel import KernelSpec, load_space

H200 = {
    **{"shared_bytes": 232448, "warp_size": 32, "max_threads": 1024, "compute_units": 132},
    "capability": 90,
}
ASKED = {"causal": True, "deterministic": True}
TEXT = "B=1,H=2,S=64,D=64,causal=true"


@pytest.fixture(scope="module")
def space() -> KernelSpec:
    return load_space(Catalog().space_path("attention_backward"))


def test_a_workload_names_a_guarantee_only_where_it_asks_for_it(space: KernelSpec) -> None:
    plain, asking = (space.workload(TEXT + end) for end in ("", ",deterministic=true"))
    assert space.workload(TEXT + ",deterministic=false") == plain
    assert dict(plain.flags) == {"causal": True}
    assert dict(asking.flags) == ASKED
    assert space.workload(str(asking)) == asking
    with pytest.raises(UsageError, match="deterministic=1 is not one of false, true"):
        space.workload(TEXT + ",deterministic=1")


def test_only_templates_that_give_it_are_searched(space: KernelSpec) -> None:
    names = [
        [
            part.spec.name
            for part in space.feasible(H200, "cuda", "bfloat16", flags=flags).templates
        ]
        for flags in ({"causal": True}, ASKED)
    ]
    assert names == [["triton", "triton_add", "gluon_sm90"], ["triton"]]
    lacks = {item.name: space.lacks(item.default) for item in space.templates}
    asks = ("deterministic",)
    assert lacks == {"cpu": (), "triton": (), "triton_add": asks, "gluon_sm90": asks}
    assert space.lacks(Candidate.of("gone", {})) == asks
    with pytest.raises(UsageError, match="in an order that differs from run to run"):
        space.feasible(H200, "cuda", "bfloat16", only=["triton_add"], flags=ASKED)


SUM = Signature(
    "sum",
    (TensorSpec("x", ("N",)),),
    (TensorSpec("y", ("N",)),),
    guarantees=("deterministic",),
)


class Wavering:
    """y = x, whose last bit differs from run to run."""

    strided: frozenset[str] = frozenset()
    runs = 0

    def bind(self, tensors, _dims, options) -> Callable[[], None]:
        assert options == {}  # a variant is not told

        def call() -> None:
            tensors["y"].copy_(tensors["x"])
            self.runs += 1
            if self.runs % 2:
                tensors["y"].view(torch.int32)[2] ^= 1

        return call


def test_two_runs_must_be_equal_in_every_bit() -> None:
    problem = SimpleNamespace(
        reference=lambda x: {"y": x}, tolerance=lambda *_: {"rtol": 1e-6, "atol": 0.0}
    )
    assert check(Wavering(), SUM, problem, Case({"N": 5}, {}, "float32")) is None
    found = check(Wavering(), SUM, problem, Case({"N": 5}, {"deterministic": True}, "float32"))
    assert (
        found
        == "y differs in 1 bytes from run to run (N=5,deterministic=true,dtype=float32,seed=0)"
    )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return kernels of which only the candidates with WASTE=20 or 2 are deterministic."""
    found = Project(tmp_path / "project")
    found.kernels = [
        dataclasses.replace(
            kernel,
            signature=dataclasses.replace(kernel.signature, guarantees=("deterministic",)),
            lacks=lambda item: (
                () if dict(item.parameters)["WASTE"] in (2, 20) else ["deterministic"]
            ),
        )
        for kernel in found.kernels
    ]
    return found


@pytest.fixture
def package(
    tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch, request
) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = tmp_path / f"asked_{os.getpid()}_{request.node.name}"
    won = [project.winner(), project.winner("mix_backward")]
    won += [project.winner(M=64, N=64, waste=2), project.winner(M=99, N=98, negate=True, waste=2)]
    freeze(won, project.kernels, output, templates=TEMPLATES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(output.name)


def test_dispatch_takes_what_gives_it(package: ModuleType) -> None:
    def workload(**asked: object) -> str | None:
        return package.mix.chosen(M=8, N=8, **asked).workload

    assert workload().startswith("M=8,")
    assert workload(deterministic=False) == workload()
    assert workload(deterministic=True).startswith("M=64,")
    assert workload(deterministic=True, negate=True).startswith("M=99,")
    backward = package.mix_backward.chosen(M=8, N=8, deterministic=True)
    assert backward.reason == "default"
    assert package.mix_backward.chosen(M=8, N=8).reason == "exact"


def test_a_workload_tuned_for_it_comes_first(package: ModuleType, project: Project) -> None:
    folder = Path(package.__file__).parent
    asked = project.winner(M=512, N=64, waste=2)
    flags = (*asked.workload.flags, ("deterministic", True))
    asked = dataclasses.replace(asked, workload=dataclasses.replace(asked.workload, flags=flags))
    freeze([asked], project.kernels, folder, templates=TEMPLATES)
    fresh = importlib.reload(package)
    found = fresh.mix.chosen(M=8, N=8, deterministic=True)
    assert (
        found.workload == "M=512,N=64,negate=false,power=linear,deterministic=true,dtype=float32"
    )
    assert fresh.mix.chosen(M=512, N=64).workload.startswith("M=64,")


@contextmanager
def torch_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_calls_gradients_and_torchs_setting(package: ModuleType) -> None:
    a, b = torch.randn(5, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad((0.5 * a * b).square().sum(), (a, b))
    kernel = package._package.kernels["mix_backward"]

    def backward_flags(**asked: bool) -> dict:
        kernel._plans.clear()
        y = package.blend(a, b, **asked)
        grads = torch.autograd.grad(y.square().sum(), (a, b))
        torch.testing.assert_close(grads, expected)
        ((flags, *_),) = kernel._plans
        return dict(zip(kernel._flags, flags, strict=True))

    assert not backward_flags()["deterministic"]
    assert backward_flags(deterministic=True)["deterministic"]
    with torch_deterministic():
        assert backward_flags()["deterministic"]
    torch.library.opcheck(package.mix.op, (a, b), {"deterministic": True})


def test_nothing_that_gives_it_is_said_in_a_line(package: ModuleType) -> None:
    path = Path(package.__file__).parent / "mix" / DEVICE.arch / "manifest.json"
    data = json.loads(path.read_text())
    for item in (*data["defaults"].values(), *data["workloads"]):
        item["lacks"] = ["deterministic"]
    path.write_text(json.dumps(data))
    with pytest.raises(NotImplementedError, match="has no variant for deterministic float32 on"):
        package.mix(torch.ones(2, 4), torch.ones(4), deterministic=True)
    assert package.mix(torch.ones(2, 4), torch.ones(4))[0].shape == (2, 4)


def test_packages_from_before_are_brought_up_to_date(tmp_path: Path, project: Project) -> None:
    output, before = tmp_path / "kernels", Project(tmp_path / "before")
    freeze(
        [before.winner(), before.winner(M=9, waste=2)], before.kernels, output, templates=TEMPLATES
    )
    path = output / "mix" / DEVICE.arch / "manifest.json"
    assert "lacks" not in path.read_text()

    def drifts() -> str:
        found = drift.check(output, project.kernels, project.renderer, templates=TEMPLATES)
        return "\n".join(found)

    assert f"{path}: out of date about the guarantees" in drifts()
    freeze([], project.kernels, output, templates=TEMPLATES)
    lacking = [item.get("lacks") for item in json.loads(path.read_text())["workloads"]]
    assert lacking == [["deterministic"], None]
    assert "guarantees" not in drifts()


def test_guarantees_do_not_change_how_variants_are_called() -> None:
    asked = dataclasses.replace(MIX, guarantees=("deterministic",))
    assert asked.called_like(MIX)
    assert MIX.called_like(asked)
    assert not asked.called_like(MIX_BACKWARD)
    assert Signature.from_json(asked.to_json()) == asked
    with pytest.raises(ValueError, match="unknown flag deterministic; known: negate, power"):
        MIX.complete_flags({"deterministic": True})
