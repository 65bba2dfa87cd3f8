"""A tiny kernel with a derivative, and winners of it as a run would hand them to freeze."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tuner.package.freeze import Autograd, FrozenKernel
from tuner.records import (
    Candidate,
    DeviceInfo,
    Interval,
    Measurement,
    Winner,
    Workload,
)
from tuner.render import Renderer
from tuner.runtime.architecture import cpu_architecture
from tuner.runtime.signature import Signature
from tuner.runtime.tensor_spec import TensorSpec

TEMPLATES = Path(__file__).parent.parent / "templates"

MIX = Signature(
    "mix",
    inputs=(TensorSpec("a", ("M", "N")), TensorSpec("b", ("N",))),
    outputs=(TensorSpec("y", ("M", "N")), TensorSpec("total", ("M",), "float32")),
    flags=(("negate", (False, True)), ("power", ("linear", "square"))),
    scalars=(("factor", "N ** -0.5 if N > 0 else 1.0"),),
    defaults=(("N", "2 * M"),),
    valid=("N % 2 == 0 or N < 100",),
)
MIX_BACKWARD = dataclasses.replace(
    MIX,
    kernel="mix_backward",
    inputs=(*MIX.inputs, TensorSpec("dy", ("M", "N"))),
    outputs=(TensorSpec("da", ("M", "N")), TensorSpec("db", ("N",))),
)

MIX_TEMPLATE = """\
// mix, {{ WASTE }} rounds for nothing
#include <cstdint>

extern "C" void mix(const float* a, const float* b, float* y, float* total, int64_t M, int64_t N,
                    int32_t negate, int32_t power, double factor) {
  const float by = static_cast<float>(negate ? -factor : factor);
  for (int64_t i = 0; i < M; ++i) {
    float sum = 0.0f;
    for (int64_t j = 0; j < N; ++j) {
{% if WASTE %}
      for (int round = 0; round < {{ WASTE }}; ++round) asm volatile("" : : : "memory");
{% endif %}
      const float value = power == 1 ? a[i * N + j] * a[i * N + j] : a[i * N + j];
      y[i * N + j] = by * value * b[j];
      sum += y[i * N + j];
    }
    total[i] = sum;
  }
}
"""

MIX_BACKWARD_TEMPLATE = """\
// mix_backward, {{ WASTE }} rounds for nothing
#include <cstdint>

extern "C" void mix_backward(const float* a, const float* b, const float* dy, float* da, float* db,
                             int64_t M, int64_t N, int32_t negate, int32_t power, double factor) {
  const float by = static_cast<float>(negate ? -factor : factor);
  for (int64_t j = 0; j < N; ++j) {
    float sum = 0.0f;
    for (int64_t i = 0; i < M; ++i) {
      const float x = a[i * N + j], slope = power == 1 ? 2.0f * x : 1.0f;
      da[i * N + j] = by * slope * b[j] * dy[i * N + j];
      sum += by * (power == 1 ? x * x : x) * dy[i * N + j];
    }
    db[j] = sum;
  }
}
"""

_PROBLEM = '''\
"""What {kernel} computes."""

import torch

RIVAL = "torch.mul"
EDGE_SHAPES = ({{"M": 1, "N": 1}}, {{"M": 3, "N": 7}}, {{"M": 0, "N": 4}}, {{"M": 5, "N": 0}})


def _mix(a, b, negate, power, factor):
    return (-factor if negate else factor) * (a * a if power == "square" else a) * b


{reference}


def tolerance(dims, flags, dtype):
    return {{"rtol": 1e-5, "atol": 1e-5}}
'''
_FORWARD_REFERENCE = """\
def reference(a, b, negate, power, factor):
    y = _mix(a, b, negate, power, factor)
    return {"y": y, "total": y.sum(1)}"""
_BACKWARD_REFERENCE = """\
def reference(a, b, dy, negate, power, factor):
    a, b = a.requires_grad_(), b.requires_grad_()
    da, db = torch.autograd.grad(_mix(a, b, negate, power, factor), (a, b), dy)
    return {"da": da, "db": db}"""

DEVICE = DeviceInfo(
    kind="cpu",
    name="Some CPU",
    arch=cpu_architecture(),
    limits=(("threads", 2), ("l1_bytes", 32768)),
    versions=(("torch", "2.13.0"), ("g++", "12.2.0")),
    languages=("cpp",),
)


class Project:
    """A folder of the kernels' sources, and what freeze takes.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.templates = folder / "templates"
        self.renderer = Renderer([self.templates])
        self.kernels = []
        autograd = Autograd("blend", ("y",), "mix_backward")
        for signature, text, reference, section in (
            (MIX, MIX_TEMPLATE, _FORWARD_REFERENCE, autograd),
            (MIX_BACKWARD, MIX_BACKWARD_TEMPLATE, _BACKWARD_REFERENCE, None),
        ):
            name = signature.kernel
            (self.templates / name).mkdir(parents=True)
            (self.templates / name / "cpu.cpp.j2").write_text(text)
            problem = folder / f"{name}.py"
            problem.write_text(_PROBLEM.format(kernel=name, reference=reference))
            self.kernels.append(
                FrozenKernel(
                    signature, f"{name} of a and b", problem, {"cpu": ("float32",)}, section
                )
            )

    def winner(self, kernel: str = "mix", **changes: object) -> Winner:
        """Return a winner; `changes` are dims, flags, `waste` and fields of the record."""
        dims = tuple((dim, int(changes.pop(dim, 8))) for dim in ("M", "N"))
        flags = tuple(
            (name, changes.pop(name, default))
            for name, default in (("negate", False), ("power", "linear"))
        )
        candidate = Candidate.of("cpu", {"WASTE": changes.pop("waste", 0)})
        default = Candidate.of("cpu", {"WASTE": 20})
        winner = Winner(
            workload=Workload(kernel, dims, "float32", flags),
            candidate=candidate,
            default_candidate=default,
            source=self.renderer.render(kernel, "cpp", candidate),
            default=self.renderer.render(kernel, "cpp", default),
            measurement=Measurement(1.0, 0.9, 1.1, 12, "warm", 0.4),
            default_measurement=Measurement(2.0, 1.9, 2.1, 12, "warm", 0.5),
            gain=Interval(2.0, 1.8, 2.2),
            rival="torch.mul",
            rival_measurement=Measurement(1.5, 1.4, 1.6, 12, "warm", 0.0),
            rival_ratio=Interval(1.5, 1.4, 1.6),
            ties=(default,),
            device=DEVICE,
            protocol="batches, warm caches",
            seed=0,
            date="2026-01-02",
        )
        return dataclasses.replace(winner, **changes)
