"""AMD GPUs through torch's HIP build."""

from __future__ import annotations

from typing import ClassVar

from tuner.devices.accelerator import Accelerator
from tuner.records import UsageError


class Hip(Accelerator):
    """An AMD GPU; torch calls it ``cuda`` too."""

    kind: ClassVar[str] = "hip"

    def torch_kind(self) -> str:
        """Return ``"cuda"`` if torch was built for HIP and sees a GPU."""
        import torch

        if torch.version.hip is None or not torch.cuda.is_available():
            raise UsageError(
                f"--device {self.kind}: torch {torch.__version__} (built for HIP "
                f"{torch.version.hip}) sees no AMD GPU here"
            )
        return "cuda"

    def driver_versions(self) -> dict[str, str]:
        """Return the HIP release that torch was built with."""
        import torch

        return {"hip": str(torch.version.hip)}
