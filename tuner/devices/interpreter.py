"""Triton's interpreter on the CPU: it verifies variants without a GPU and never times them."""

from __future__ import annotations

from typing import ClassVar

from tuner.plugins import Device
from tuner.records import DeviceInfo


class Interpreter(Device):
    """Runs Triton kernels in numpy, with the limits of no card in particular."""

    kind: ClassVar[str] = "interpreter"
    languages: ClassVar[tuple[str, ...]] = ("triton",)
    limit_names: ClassVar[tuple[str, ...]] = (
        "shared_bytes",
        "warp_size",
        "max_threads",
        "compute_units",
        "capability",
    )
    timed: ClassVar[bool] = False
    wrong_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)  # products take their bits for numbers
    environment: ClassVar[tuple[tuple[str, str], ...]] = (("TRITON_INTERPRET", "1"),)

    @property
    def torch_device(self) -> str:
        """Torch's name of the device."""
        return "cpu"

    def info(self) -> DeviceInfo:
        """Return limits as wide as a large card's, so that every variant can be verified."""
        import torch
        import triton

        limits = {
            "shared_bytes": 228 * 1024,
            "warp_size": 32,
            "max_threads": 1024,
            "compute_units": 2,
            "capability": 0,
        }
        return DeviceInfo(
            kind=self.kind,
            name="Triton interpreter",
            arch="interpreter",
            limits=tuple(limits.items()),
            versions=(("torch", torch.__version__), ("triton", triton.__version__)),
            languages=self.languages,
        )

    def synchronize(self) -> None:
        """Return at once: a call has finished when it returns."""
