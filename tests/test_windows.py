"""Windows of keys and sequences of different lengths: workloads, costs, gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from frozen import DEVICE, TEMPLATES

from tuner.catalog import Catalog
from tuner.package.freeze import freeze
from tuner.package.functions import functions_of
from tuner.plan import frozen_kernel
from tuner.records import Interval, Measurement, UsageError, Winner
from tuner.render import Renderer
from tuner.runtime.cases import flag_choices
from tuner.runtime.check import load_problem
from tuner.space.kernel import KernelSpec, load_space

CATALOG = Catalog()
KERNELS = [
    f"attention_{kind}_{half}" for kind in ("window", "varlen") for half in ("forward", "backward")
]
WINDOWS = [(-1, -1), (0, 0), (5, 3), (-1, 2), (4, -1), (99, 99)]


def space(kernel: str = KERNELS[0]) -> KernelSpec:
    return load_space(CATALOG.space_path(kernel))


def test_a_flag_of_whole_numbers_may_be_any_from_the_least() -> None:
    spec = space()
    workload = spec.workload("B=1,H=1,S=9,D=8,window_left=1023")
    assert dict(workload.flags) == {"causal": False, "window_left": 1023, "window_right": -1}
    assert spec.workload(str(workload)) == workload
    for text in ("-2", "1.5", "true", "wide"):
        with pytest.raises(UsageError, match=f"window_left={text} is not a whole number from -1"):
            spec.workload(f"B=1,H=1,S=9,D=8,window_left={text}")
    signature = spec.signature
    assert signature.complete_flags({"window_right": 7})["window_right"] == 7
    for value in (-2, True, 1.0, "7"):
        with pytest.raises(ValueError, match="window_right must be a whole number from -1, but"):
            signature.complete_flags({"window_right": value})


def test_the_examples_of_whole_numbers_are_tried_together() -> None:
    tried = [tuple(flags.values()) for flags in flag_choices(space().signature)]
    assert tried == [(False, -1, -1), (True, -1, -1), (False, 5, 3), (True, 5, 3)]


def test_examples_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    text = CATALOG.space_path(KERNELS[0]).read_text()
    path = tmp_path / "attention_window_forward.yaml"
    path.write_text(text.replace("window_right: [-1, 3]", "window_right: [-1]"))
    with pytest.raises(UsageError, match="signature: window_left, window_right must have as many"):
        load_space(path)


def test_the_functions_take_whole_numbers() -> None:
    spec = space()
    (function,) = functions_of({spec.kernel: (spec.signature, spec.summary, None)})
    assert "    window_left: int = -1,\n" in function.heading
    assert "window_left: a whole number from -1." in function.argument_lines
    assert not function.has_literals


def seen(queries: int, keys: int, causal: bool, left: int, right: int) -> int:
    """Count the pairs of query and key one by one."""
    return sum(
        (left < 0 or j >= i + keys - queries - left)
        and (right < 0 or causal or j <= i + keys - queries + right)
        and (not causal or j <= i + keys - queries)
        for i in range(queries)
        for j in range(keys)
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(17, 17), (5, 23), (23, 5)])
def test_operations_are_those_of_the_pairs_that_are_seen(
    kernel: str, causal: bool, queries: int, keys: int
) -> None:
    problem = load_problem(CATALOG.problem_path(kernel))
    factor = 4 if kernel.endswith("forward") else 10
    for left, right in WINDOWS:
        flags = {"causal": causal, "window_left": left, "window_right": right}
        if "window" in kernel:
            dims = {"B": 2, "H": 6, "S": queries, "D": 8, "KV": 3, "T": keys}
            pairs = 2 * seen(queries, keys, causal, left, right)
        else:
            dims = {"N": queries, "H": 6, "D": 8, "M": keys, "KV": 3, "C": 5}
            parts = zip(*map(pairwise, problem.starts_of(dims)), strict=True)
            lengths = [(b - a, d - c) for (a, b), (c, d) in parts]
            assert [sum(part) for part in zip(*lengths, strict=True)] == [queries, keys]
            pairs = sum(seen(*part, causal, left, right) for part in lengths)
        assert problem.cost(dims, flags, 2)[0] == factor * 6 * 8 * pairs


def package(folder: Path) -> Path:
    """Freeze the defaults of the four kernels as if they had won on this CPU."""
    renderer, once = Renderer(CATALOG.template_folders), Measurement(1.0, 0.9, 1.1, 9, "warm", 0.0)
    specs = [space(kernel) for kernel in KERNELS]
    winners = []
    for spec in specs:
        candidate = spec.templates[0].default
        source = renderer.render(spec.kernel, "triton", candidate)
        ratio = Interval(1.0, 0.9, 1.1)
        winners.append(
            Winner(
                workload=spec.workloads["starter"][0],
                **dict.fromkeys(("candidate", "default_candidate"), candidate),
                **dict.fromkeys(("source", "default"), source),
                **dict.fromkeys(("measurement", "default_measurement", "rival_measurement"), once),
                **dict.fromkeys(("gain", "rival_ratio"), ratio),
                rival="another",
                ties=(),
                device=DEVICE,
                protocol="batches",
                seed=0,
                date="2026-01-02",
            )
        )
    output = folder / "windows"
    kernels = [frozen_kernel(CATALOG, spec) for spec in specs]
    freeze(winners, kernels, output, templates=TEMPLATES)
    return output


CHILD = """
import json, torch
from windows import attention_varlen, attention_window

torch.manual_seed(0)

def masked(q, k, v, causal, left, right):
    "Attention of [heads, S, D] in torch's own operations."
    S, T = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    distance = torch.arange(T) - torch.arange(T - S, T)[:, None]
    right = 0 if causal else right
    hidden = (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
    p = (q @ k.mT * q.shape[2] ** -0.5).masked_fill(hidden, -1e30).softmax(-1)
    return p.masked_fill(hidden, 0.0) @ v

def worst(ours, theirs, inputs):
    "The largest error of outputs and gradients, over the size of what they should be."
    halves = [x.half().requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in halves]
    got, wanted = ours(*halves), theirs(*doubles)
    do, grad = torch.randn_like(wanted).half(), torch.autograd.grad
    pairs = [(got, wanted)]
    pairs += zip(grad(got, halves, do), grad(wanted, doubles, do.double()))
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)

def dense(causal, left, right):
    return worst(
        lambda *x: attention_window(*x, causal=causal, window_left=left, window_right=right),
        lambda q, k, v: torch.stack([masked(*one, causal, left, right) for one in zip(q, k, v)]),
        (torch.randn(1, 2, 70, 20), torch.randn(1, 1, 90, 20), torch.randn(1, 1, 90, 20)),
    )

def ragged(causal, left, right):
    q_starts, k_starts = [0, 1, 1, 40, 75], [0, 5, 9, 60, 75]
    starts = [torch.tensor(x, dtype=torch.int32) for x in (q_starts, k_starts)]
    def theirs(q, k, v):
        parts = []
        for a, b, c, d in zip(q_starts, q_starts[1:], k_starts, k_starts[1:]):
            one = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
            parts.append(masked(*one, causal, left, right).transpose(0, 1))
        return torch.cat(parts)
    options = {"causal": causal, "window_left": left, "window_right": right}
    return worst(
        lambda *x: attention_varlen(*x, *starts, **options),
        theirs,
        (torch.randn(75, 2, 20), torch.randn(75, 1, 20), torch.randn(75, 1, 20)),
    )

cases = [(False, -1, -1), (True, -1, -1), (True, 8, -1), (False, 8, 17)]
errors = [dense(*case) for case in cases[2:]] + [ragged(*case) for case in cases]
q = torch.randn(1, 1, 5, 8).half()
refused = {}
for name, options in {"window": {"window_left": -2}, "kind": {"window_right": 1.5}}.items():
    try:
        attention_window(q, q, q, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        refused[name] = str(error)
try:
    attention_varlen(q[0], q[0], q[0], torch.zeros(2), torch.zeros(2))
except TypeError as error:
    refused["dtype"] = str(error)
print(json.dumps([errors, refused]))
"""


def test_gradients_of_the_package_are_torchs(tmp_path: Path) -> None:
    package(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors, refused = json.loads(done.stdout)
    assert len(errors) == 6
    assert max(errors) < 4e-3, errors
    assert "window_left must be a whole number from -1, but got -2" in refused["window"]
    assert refused["kind"]
    assert "cu_seqlens_q must be int32" in refused["dtype"]
