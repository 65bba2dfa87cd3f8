"""Times that cannot be: which bounds hold, and what happens to a variant that is below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tuner.records import Rejection
from tuner.store import open_stores
from tuner.timing.sanity import MARGIN, Ceilings, Work, impossible

MEGA = 10**6
CEILINGS = Ceilings(gbytes=10.0, gflops=100.0)


def work(flops=0.0, size=0.0, held=1000 * MEGA, cache=0) -> Work:
    return Work(flops, size, held, cache)


def test_bytes_from_memory_bound_a_time():
    # 100 MB at 10 GB/s take 10 ms; a margin faster is still believed
    assert impossible(10.0 / MARGIN * 1.01, work(size=100 * MEGA), CEILINGS) is None
    reason = impossible(10.0 / MARGIN * 0.99, work(size=100 * MEGA), CEILINGS)
    assert "15.15 GB/s from memory" in reason
    assert "the 10 that the device was measured to reach" in reason


def test_what_caches_can_hold_is_not_taken_to_come_from_memory():
    half = work(size=100 * MEGA, held=200 * MEGA, cache=100 * MEGA)
    assert half.memory_bytes == 50 * MEGA
    assert impossible(4.0, half, CEILINGS) is None
    assert impossible(3.0, half, CEILINGS) is not None
    fits = work(size=100 * MEGA, held=100 * MEGA, cache=100 * MEGA)
    assert fits.caches == "warm"
    assert impossible(1e-6, fits, CEILINGS) is None


def test_operations_bound_a_time_whatever_the_caches():
    products = work(flops=1e9, size=MEGA, held=MEGA, cache=100 * MEGA)
    assert impossible(10.0, products, CEILINGS) is None
    assert "GFLOP/s" in impossible(1.0, products, CEILINGS)
    assert impossible(1.0, products, Ceilings(10.0, None)) is None
    assert impossible(0.0, products, CEILINGS) is not None


def test_the_higher_of_two_measured_ceilings_counts():
    low, high = Ceilings(1.0, None), Ceilings(2.0, 3.0)
    assert low.raised(high) == high.raised(low) == high
    assert low.raised(Ceilings(None, None)) == low


SPACE = """\
kernel: product
summary: C = A B, always or once
signature:
  inputs: {a: [N, N], b: [N, N]}
  outputs: {c: [N, N]}
templates:
  cpu:
    language: cpp
    devices: [cpu]
    dtypes: [float32]
    parameters:
      ONCE: [false, true]
    default: {ONCE: false}
workloads:
  starter: ["N=512,dtype=float32"]
"""

TEMPLATE = """\
#include <cstdint>

extern "C" void product(const float* a, const float* b, float* c, int64_t N) {
{% if ONCE %}
  static int calls = 0;  // right when it is looked at first, and idle from then on
  const int64_t rows = N > 100 && calls++ > 0 ? 1 : N;
{% else %}
  const int64_t rows = N;
{% endif %}
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < N; ++j) c[i * N + j] = 0;
    for (int64_t p = 0; p < N; ++p) {
      for (int64_t j = 0; j < N; ++j) c[i * N + j] += a[i * N + p] * b[p * N + j];
    }
  }
}
"""

PROBLEM = """\
RIVAL = "torch.matmul"
EDGE_SHAPES = ({"N": 1}, {"N": 3}, {"N": 7})

def reference(a, b):
    return {"c": a @ b}

def rival(a, b):
    return None

def tolerance(dims, flags, dtype):
    return {"rtol": 1e-5, "atol": 1e-3}

def cost(dims, flags, itemsize):
    return 2 * dims["N"] ** 3, 3 * dims["N"] ** 2 * itemsize
"""


def test_a_variant_that_works_once_only_is_verified_again_and_rejected(tune, tmp_path: Path):
    for name, text in (
        ("search_spaces/product.yaml", SPACE),
        ("templates/product/cpu.cpp.j2", TEMPLATE),
        ("problems/product.py", PROBLEM),
    ):
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = tune("product", "--kernels", "own", "--device", "cpu", "--budget", "2trials")
    assert done.returncode == 0, done.stdout + done.stderr
    (store,) = open_stores(tmp_path / ".tuner")
    outcomes = {dict(item.candidate.parameters)["ONCE"]: item.outcome for item in store.trials}
    rejection = outcomes[True]
    assert isinstance(rejection, Rejection)
    assert rejection.stage == "correctness"
    assert ", more than 1.5 times the" in rejection.reason
    assert re.search(r"; checked again, .*c\[1, 0\] is nan but must be", rejection.reason)
    assert not isinstance(outcomes[False], Rejection)


@pytest.mark.parametrize("held", [0, 1])
def test_a_workload_without_buffers_has_no_bound(held):
    assert impossible(1e-9, work(size=1.0, held=held, cache=10), CEILINGS) is None
