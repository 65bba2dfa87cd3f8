"""Any accelerator that torch and triton drive: the path of a card that nobody has seen before.

It needs a host clock and a way to wait for the device, and asks no vendor's interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tuner.plugins import Device
from tuner.records import DeviceInfo, UsageError
from tuner.runtime.architecture import architecture

_WARP_SIZE = 32
_MAX_THREADS = 1024


class Accelerator(Device):
    """The accelerator that `torch.accelerator` finds."""

    kind: ClassVar[str] = "accelerator"
    languages: ClassVar[tuple[str, ...]] = ("triton",)
    starter: ClassVar[str] = "starter_gpu"
    matrix_dtypes: ClassVar[tuple[str, ...]] = (
        *("float32", "tf32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "int8"),
    )
    matrix_extents: ClassVar[tuple[int, ...]] = (4096, 8192)
    limit_names: ClassVar[tuple[str, ...]] = (
        "shared_bytes",
        "warp_size",
        "max_threads",
        "compute_units",
        "capability",
    )

    @property
    def torch_device(self) -> str:
        """Torch's name of the device."""
        return f"{self.torch_kind()}:{self.index}"

    def torch_kind(self) -> str:
        """Return torch's name of this kind of device.

        Raises:
            UsageError: Torch sees no device of this kind.
        """
        import torch

        if not torch.accelerator.is_available():
            raise UsageError(
                f"--device {self.kind}: torch {torch.__version__} sees no accelerator here"
            )
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return found.type

    def info(self) -> DeviceInfo:
        """Return what torch and triton say of the device."""
        import torch
        import triton

        kind = self.torch_kind()
        count = torch.accelerator.device_count()
        if self.index >= count:
            raise UsageError(f"--device {self.kind}:{self.index}: there are {count}, from 0")
        torch.accelerator.set_device_index(self.index)
        target = triton.runtime.driver.active.get_current_target()
        properties = triton.runtime.driver.active.utils.get_device_properties(self.index)
        limits = {
            "shared_bytes": int(properties["max_shared_mem"]),
            "warp_size": int(target.warp_size or _WARP_SIZE),
            "max_threads": _MAX_THREADS,
            "compute_units": int(properties["multiprocessor_count"]),
            "capability": target.arch if isinstance(target.arch, int) else 0,
        }
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        return DeviceInfo(
            kind=self.kind,
            name=self.name(),
            arch=architecture(torch.device(kind, self.index)),
            limits=tuple(limits.items()),
            versions=tuple((versions | self.driver_versions()).items()),
            languages=self.languages,
        )

    def name(self) -> str:
        """Return the part's name, as far as torch knows it."""
        import torch

        module: Any = getattr(torch, self.torch_kind())
        get_name = getattr(module, "get_device_name", None)
        return str(get_name(self.index)) if get_name else self.torch_device

    def driver_versions(self) -> dict[str, str]:
        """Return versions beyond torch's and triton's that its times depend on."""
        return {}

    def empty_call(self) -> Callable[[], None]:
        """Return the launch of an empty Triton kernel."""
        from tuner.devices._empty_kernel import launch

        return launch

    def synchronize(self) -> None:
        """Wait until everything that was launched has finished."""
        import torch

        torch.accelerator.synchronize(self.index)
