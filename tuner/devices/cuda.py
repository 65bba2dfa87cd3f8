"""NVIDIA GPUs: Triton and Gluon, with launches captured in graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from tuner.devices.accelerator import Accelerator
from tuner.records import DeviceInfo, UsageError

_SHARED_BYTES = {
    **{"75": 64 << 10, "80": 163 << 10, "86": 99 << 10, "87": 163 << 10, "89": 99 << 10},
    **{"90": 227 << 10, "100": 227 << 10, "103": 227 << 10, "120": 99 << 10},
}
"""Shared memory of a thread block by compute capability, from the CUDA C++ Programming Guide."""

_DRIVER = Path("/proc/driver/nvidia/version")

_COMPUTE_UNITS = 132
"""Assumed where the card is not at hand; only the grids of persistent kernels depend on it."""


class Cuda(Accelerator):
    """An NVIDIA GPU."""

    kind: ClassVar[str] = "cuda"
    languages: ClassVar[tuple[str, ...]] = ("triton", "gluon")

    @classmethod
    def target(cls, arch: str) -> DeviceInfo:
        """Return what the programming guide says of a compute capability such as ``"90"``."""
        if arch not in _SHARED_BYTES:
            known = ", ".join(f"cuda:{name}" for name in _SHARED_BYTES)
            raise UsageError(f"--target cuda:{arch}: unknown compute capability; known: {known}")
        limits = {
            "shared_bytes": _SHARED_BYTES[arch],
            "warp_size": 32,
            "max_threads": 1024,
            "compute_units": _COMPUTE_UNITS,
            "capability": int(arch),
        }
        return DeviceInfo(
            cls.kind, f"sm_{arch}", f"sm{arch}", tuple(limits.items()), (), cls.languages
        )

    def torch_kind(self) -> str:
        """Return ``"cuda"`` if torch was built for CUDA and sees a GPU."""
        import torch

        if torch.version.cuda is None or not torch.cuda.is_available():
            raise UsageError(
                f"--device {self.kind}: torch {torch.__version__} (built for CUDA "
                f"{torch.version.cuda}) sees no NVIDIA GPU here"
            )
        return "cuda"

    def driver_versions(self) -> dict[str, str]:
        """Return the CUDA release that torch was built with, and the driver."""
        import torch

        found = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
        return {"cuda": str(torch.version.cuda), **({"driver": found[0]} if found else {})}

    def cache_bytes(self) -> int:
        """Return the size of the second-level cache."""
        import torch

        return int(torch.cuda.get_device_properties(self.index).L2_cache_size)

    def capture(self, call: Callable[[], None], count: int) -> Callable[[], None] | None:
        """Return the replay of a CUDA graph of `count` calls; None if they cannot be captured."""
        import torch

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for _ in range(count):
                    call()
        except RuntimeError:  # such as a rival that waits for the device
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream behind
            torch.cuda.synchronize(self.index)
            return None
        return graph.replay
