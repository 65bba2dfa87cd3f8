"""The CPU: real machine code, written in C++ and built by the system's compiler."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from tuner.plugins import Device
from tuner.records import DeviceInfo
from tuner.runtime.architecture import cpu_architecture

_MEMORY_SHARE = 0.8
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_VECTOR_BYTES = (("avx512f", 64), ("avx", 32))


class Cpu(Device):
    """All cores of the host, as torch uses them."""

    kind: ClassVar[str] = "cpu"
    languages: ClassVar[tuple[str, ...]] = ("cpp",)
    limit_names: ClassVar[tuple[str, ...]] = (
        "threads",
        "l1_bytes",
        "l2_bytes",
        "l3_bytes",
        "vector_bytes",
        "vector_registers",
    )
    shares_host: ClassVar[bool] = True
    measure_s: ClassVar[float] = 0.5

    @property
    def torch_device(self) -> str:
        """Torch's name of the device."""
        return "cpu"

    def info(self) -> DeviceInfo:
        """Return the CPU's name, caches and vector width."""
        import torch

        facts = _cpuinfo()
        flags = facts.get("flags", facts.get("Features", "")).split()
        vector_bytes = next((size for flag, size in _VECTOR_BYTES if flag in flags), 16)
        wide = vector_bytes == 64 or platform.machine() in ("aarch64", "arm64")
        limits = {
            "threads": torch.get_num_threads(),
            "l1_bytes": _cache_bytes(1, 32 * 1024),
            "l2_bytes": _cache_bytes(2, 512 * 1024),
            "l3_bytes": _cache_bytes(3, 4 * 1024 * 1024),
            "vector_bytes": vector_bytes,
            "vector_registers": 32 if wide else 16,
        }
        return DeviceInfo(
            kind=self.kind,
            name=facts.get("model name", platform.machine()),
            arch=cpu_architecture(),
            limits=tuple(limits.items()),
            versions=(
                ("python", platform.python_version()),
                ("torch", torch.__version__),
                ("kernel", platform.release()),
            ),
            languages=self.languages,
        )

    def empty_call(self) -> Callable[[], None]:
        """Return the call of a C function that does nothing, with as many arguments as kernels."""
        entry = ctypes.CDLL(None).labs
        entry.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
        entry.restype = None
        arguments = (0, 0, 0, 1, 1, 1)  # what a function does not take is left in its registers
        return lambda: entry(*arguments)

    def synchronize(self) -> None:
        """Return at once: a call on the CPU has finished when it returns."""

    def cache_bytes(self) -> int:
        """Return the size of the third-level cache."""
        return _cache_bytes(3, 4 * 1024 * 1024)

    def confine(self) -> None:
        """Cap the child's memory, so that a greedy variant cannot exhaust the host."""
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cap = int(_MEMORY_SHARE * physical)
        resource.setrlimit(resource.RLIMIT_AS, (cap, cap))


def _cpuinfo() -> dict[str, str]:
    """Return what the kernel says of the first core."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cache_bytes(level: int, fallback: int) -> int:
    """Return the size of a data cache of the first core, as the kernel lists it."""
    for index in sorted(_CACHES.glob("index*")):
        if (index / "level").read_text().strip() != str(level):
            continue
        if (index / "type").read_text().strip() == "Instruction":
            continue
        text = (index / "size").read_text().strip()
        return int(text[:-1]) * {"K": 1024, "M": 1024**2}[text[-1]]
    return fallback
