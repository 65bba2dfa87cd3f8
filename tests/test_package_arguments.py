"""What callers of a frozen package get wrong, and what torch's own operations would do there."""

from __future__ import annotations

import importlib
import itertools
import os
from types import ModuleType

import numpy as np
import pytest
import torch
from frozen import TEMPLATES, Project
from torch.autograd import forward_ad

from tuner.package.freeze import freeze


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("called")
    project = Project(folder / "project")
    output = folder / f"called_{os.getpid()}"
    won = [project.winner(), project.winner("mix_backward")]
    freeze(won, project.kernels, output, templates=TEMPLATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.syspath_prepend(str(folder))
        yield importlib.import_module(output.name)


NONE_OF_IT = ("1", "x", 1.0, 2.5, -1, True, None, [2], float("nan"), torch.ones(2))


@pytest.mark.parametrize("value", NONE_OF_IT, ids=repr)
@pytest.mark.parametrize("function", ["blend", "mix", "mix_backward"])
def test_an_extent_is_a_whole_number(package: ModuleType, function: str, value: object) -> None:
    with pytest.raises(ValueError, match="M must be a whole number from 0, but got ") as error:
        getattr(package, function).chosen(M=value, N=2)
    assert str(error.value).endswith(repr(value))


@pytest.mark.parametrize("value", [8, np.int64(8), torch.tensor(8)], ids=repr)
def test_whole_numbers_of_numpy_and_torch_are_extents(package: ModuleType, value: object) -> None:
    assert package.mix.chosen(M=value, N=8).reason == "exact"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"M": 8, "K": 1}, "unknown dim K; known: M, N; flags: negate, power"),
        ({}, "no extent for M"),
        ({"M": 8, "negate": "true"}, "negate must be one of False, True, but got 'true'"),
        ({"M": 8, "negate": []}, r"negate must be one of False, True, but got \[\]"),
        ({"M": 8, "dtype": "f32"}, "dtype must be one of torch's, such as 'float32', but got "),
        ({"M": 8, "dtype": 3}, "dtype must be one of torch's, such as 'float32', but got 3"),
        ({"M": 8, "device": "gpu"}, "device must be one that is here, such as 'cpu', but got "),
        ({"M": 8, "device": "cuda:99"}, "device must be one that is here, .* got 'cuda:99'"),
        ({"M": 8, "device": 2.5}, "device must be one that is here, such as 'cpu', but got 2.5"),
    ],
)
def test_what_chosen_is_given(package: ModuleType, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        package.mix.chosen(**values)


def test_chosen_takes_torchs_dtypes_and_devices(package: ModuleType) -> None:
    asked = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert package.mix.chosen(M=8, N=8, **asked) == package.mix.chosen(M=8, N=8)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"power": []}, ValueError, r"power must be one of 'linear', 'square', but got \[\]"),
        ({"power": None}, ValueError, "power must be one of 'linear', 'square', but got None"),
        ({"negate": torch.tensor(True)}, ValueError, "negate must be one of False, True"),
        ({"negate": 2}, ValueError, "negate must be one of False, True, but got 2"),
        ({"factor": "1"}, TypeError, "factor must be a number or None, but got '1'"),
        ({"factor": [1]}, TypeError, r"factor must be a number or None, but got \[1\]"),
    ],
)
@pytest.mark.parametrize("function", ["blend", "mix"])
def test_options_of_a_call(
    package: ModuleType, function: str, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(package, function)(torch.ones(2, 4), torch.ones(4), **options)


def test_a_scalar_may_be_any_number(package: ModuleType) -> None:
    a, b = torch.ones(2, 4), torch.ones(4)
    for factor in (2, 2.0, np.float32(2), torch.tensor(2.0)):
        assert torch.equal(package.blend(a, b, factor=factor), 2 * a)


def test_inputs_are_dense_tensors(package: ModuleType) -> None:
    a, b = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(TypeError, match="a must be dense, but its layout is torch.sparse_coo"):
        package.mix(a.to_sparse(), b)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'b'"):
        package.mix(a, [1.0, 2.0, 3.0, 4.0])


MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)
WANTED = tuple(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first, second", WANTED)
@pytest.mark.parametrize("past_shortcut", [False, True])
def test_outputs_are_what_torchs_would_be(
    package: ModuleType, mode: type, first: bool, second: bool, past_shortcut: bool
) -> None:
    a, b = torch.randn(3, 4, requires_grad=first), torch.randn(4, requires_grad=second)
    with mode():
        y, total = (package.mix.op if past_shortcut else package.mix)(a, b)
        theirs = a * b
    for name in ("requires_grad", "is_leaf", "dtype", "device", "layout", "shape"):
        assert getattr(y, name) == getattr(theirs, name), name
    assert y.is_inference() == theirs.is_inference()
    assert y.is_contiguous()
    assert not total.requires_grad  # it has no derivative


def test_who_needs_no_gradient_gets_none(package: ModuleType) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    assert not package.blend(a.detach(), b).requires_grad
    y = package.blend(a, b)
    y.sum().backward()
    assert a.grad is not None and b.grad is None


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0, 0)])
def test_gradients_of_nothing(package: ModuleType, shape: tuple[int, int]) -> None:
    a = torch.randn(shape, requires_grad=True)
    b = torch.randn(shape[1], requires_grad=True)
    package.blend(a, b).sum().backward()
    assert torch.equal(a.grad, torch.zeros(shape))
    assert torch.equal(b.grad, torch.zeros(shape[1]))


def test_a_derivative_that_torch_would_take_for_zero_is_refused(package: ModuleType) -> None:
    a, b = torch.randn(3, 4), torch.randn(4)
    refused = pytest.raises(NotImplementedError, match=r"no derivative in forward mode \(jvp\)")
    with refused:
        torch.func.jvp(lambda x: package.blend(x, b), (a,), (a,))
    with refused:
        torch.func.grad(lambda x: package.blend(x, b).sum())(a)
    with forward_ad.dual_level():
        assert package.blend(a, b).shape == (3, 4)
        with refused:
            package.blend(forward_ad.make_dual(a, a), b)
    torch.func.grad(lambda x: (package.blend(a, b) * x).sum())(a)
