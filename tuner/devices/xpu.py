"""Intel GPUs."""

from __future__ import annotations

from typing import ClassVar

from tuner.devices.accelerator import Accelerator
from tuner.records import UsageError


class Xpu(Accelerator):
    """An Intel GPU."""

    kind: ClassVar[str] = "xpu"

    def torch_kind(self) -> str:
        """Return ``"xpu"`` if torch sees such a GPU."""
        import torch

        if not torch.xpu.is_available():
            raise UsageError(f"--device {self.kind}: torch {torch.__version__} sees no Intel GPU")
        return "xpu"
