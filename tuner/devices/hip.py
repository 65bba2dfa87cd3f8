"""AMD GPUs through torch's HIP build."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tuner.devices.accelerator import Accelerator
from tuner.records import DeviceInfo, UsageError

_TARGETS = {"gfx90a": (64 << 10, 104), "gfx942": (64 << 10, 304), "gfx950": (160 << 10, 256)}
"""Bytes of local data share and compute units by architecture, from AMD's CDNA white papers."""

_DRIVER = Path("/sys/module/amdgpu/version")


class Hip(Accelerator):
    """An AMD GPU; torch calls it ``cuda`` too."""

    kind: ClassVar[str] = "hip"

    @classmethod
    def target(cls, arch: str) -> DeviceInfo:
        """Return what AMD's papers say of an architecture such as ``"gfx942"``."""
        if arch not in _TARGETS:
            known = ", ".join(f"hip:{name}" for name in _TARGETS)
            raise UsageError(f"--target hip:{arch}: unknown architecture; known: {known}")
        shared_bytes, compute_units = _TARGETS[arch]
        limits = {
            "shared_bytes": shared_bytes,
            "warp_size": 64,
            "max_threads": 1024,
            "compute_units": compute_units,
            "capability": 0,
        }
        return DeviceInfo(cls.kind, arch, arch, tuple(limits.items()), (), cls.languages)

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
        """Return the HIP release that torch was built with, and the driver."""
        import torch

        driver = {"driver": _DRIVER.read_text().strip()} if _DRIVER.exists() else {}
        return {"hip": str(torch.version.hip), **driver}
