"""The frozen matmul, called: what follows the product, how b lies, and what is refused."""

from __future__ import annotations

import inspect
import itertools
import warnings

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional

from tuner.problems import matmul as problem

A, B, BIAS = torch.randn(37, 70), torch.randn(70, 53), torch.randn(53)
ACTIVATIONS = ("none", "relu", "gelu", "silu")


@pytest.fixture(scope="module")
def matmul(tmp_path_factory):
    warnings.filterwarnings("ignore", message=".*was not tuned for")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        from kernels_generated import matmul

        yield matmul


def test_every_combination_is_what_torch_computes(matmul):
    for activation, transposed, bias in itertools.product(
        ACTIVATIONS, (False, True), (None, BIAS)
    ):
        b = B.T.contiguous() if transposed else B
        got = matmul(A, b, bias, activation=activation, transposed_b=transposed)
        doubles = [item if item is None else item.double() for item in (A, b, bias)]
        expected = problem.reference(*doubles, activation, transposed)["c"]
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-5)


def test_it_is_a_linear_layer_in_a_compiled_program(matmul):
    layer = torch.nn.Linear(70, 53).requires_grad_(False)

    def step(a, bias):
        return matmul(a, layer.weight, bias, activation="gelu", transposed_b=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    expected = functional.gelu(layer(A))
    torch.testing.assert_close(compiled(A, layer.bias), expected, rtol=1e-5, atol=1e-5)
    without = functional.gelu(functional.linear(A, layer.weight))
    torch.testing.assert_close(compiled(A, None), without, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arguments", [(A, B), (A, B, BIAS)])
def test_torch_checks_the_operation(matmul, arguments):
    opcheck(matmul.op, arguments, {"activation": "silu"})


def test_its_signature_and_what_serves_its_options(matmul):
    names = list(inspect.signature(matmul).parameters)
    assert names == ["a", "b", "bias", "activation", "transposed_b", "allow_tf32"]
    shape = {"M": 512, "K": 512, "N": 512, "dtype": "float32", "device": "cpu"}
    assert matmul.chosen(**shape) == matmul.chosen(**shape, activation="none", bias=False)
    assert matmul.chosen(**shape, activation="gelu", bias=True).reason != "exact"


def test_an_empty_sum_is_the_bias(matmul):
    c = matmul(A[:2, :0], B[:0], BIAS, activation="relu")
    assert torch.equal(c, BIAS.relu().expand(2, 53))
    assert matmul(A[:0], B, BIAS).shape == (0, 53)
    odd = torch.tensor([[torch.nan, -torch.inf, torch.inf]])
    assert matmul(torch.ones(1, 1), odd, activation="relu").tolist()[0][1:] == [0.0, torch.inf]
    assert matmul(torch.ones(1, 1), odd, activation="relu").isnan().tolist()[0][0]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((A, B.T.contiguous()), {}, "K of b is 53, but the inputs before it say K=70"),
        ((A, B, BIAS[:3]), {}, "N of bias is 3, but the inputs before it say N=53"),
        ((A, B, BIAS[None]), {}, r"bias must have the shape \[N\], but got \[1, 53\]"),
        ((A, B, BIAS.double()), {}, "bias must be float32 here, but got float64"),
        ((A, B), {"activation": "tanh"}, "must be one of 'none', 'relu', 'gelu', 'silu', but"),
        ((None, B), {}, "a must be given"),
    ],
)
def test_what_does_not_fit_is_refused(matmul, arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        matmul(*arguments, **options)


def test_the_rival_computes_the_same():
    for bias, tf32 in itertools.product((None, BIAS), (False, True)):
        options = {"activation": "silu", "allow_tf32": tf32}
        expected = problem.reference(A, B, bias, **options)["c"]
        torch.testing.assert_close(problem.rival(A, B, bias, **options)(), expected)
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.testing.assert_close(problem.rival(A, B.T.contiguous(), transposed_b=True)(), A @ B)
