"""NVIDIA GPUs: Triton and Gluon, with launches captured in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tuner.devices.accelerator import Accelerator
from tuner.records import UsageError


class Cuda(Accelerator):
    """An NVIDIA GPU."""

    kind: ClassVar[str] = "cuda"
    languages: ClassVar[tuple[str, ...]] = ("triton", "gluon")

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
        """Return the CUDA release that torch was built with."""
        import torch

        return {"cuda": str(torch.version.cuda)}

    def cache_bytes(self) -> int:
        """Return the size of the second-level cache."""
        import torch

        return int(torch.cuda.get_device_properties(self.index).L2_cache_size)

    def capture(self, call: Callable[[], None], count: int) -> Callable[[], None]:
        """Return the replay of a CUDA graph of `count` calls."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        return graph.replay
