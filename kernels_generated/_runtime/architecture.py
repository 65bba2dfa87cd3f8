"""Names of devices: the kind that a tuner plug-in drives and the architecture that it tunes."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


def device_kind(device: torch.device) -> str:
    """Return the name of the tuner's device plug-in: torch's own, but "hip" for AMD's GPUs."""
    if device.type != "cuda":
        return device.type
    import torch

    return "hip" if torch.version.hip else "cuda"


@cache
def architecture(device: torch.device) -> str:
    """Return the identifier of what a device's variants are tuned and frozen for.

    Returns:
        ``x86_64_amd_25_1`` (vendor, family, model) on a CPU, ``sm90`` on CUDA, ``gfx942`` on
        HIP, torch's device type and the part's name elsewhere.
    """
    kind = device_kind(device)
    if kind == "cpu":
        return cpu_architecture()
    import torch

    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    if kind == "hip":
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{kind}_{slug(name(device))}" if name else kind


@cache
def cpu_architecture(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the identifier of this CPU, or of the machine where the kernel tells no more.

    Args:
        cpuinfo: The kernel's description of the CPUs.
    """
    machine = slug(platform.machine()) or "cpu"
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return machine
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "vendor_id" in facts:
        vendor = _VENDORS.get(facts["vendor_id"], facts["vendor_id"])
        parts = (vendor, facts.get("cpu family", ""), facts.get("model", ""))
    else:
        parts = (facts.get("CPU implementer", ""), facts.get("CPU part", ""), "")
    return "_".join([machine, *(slug(part) for part in parts if part)])


def slug(text: str) -> str:
    """Return the text in lower case, with one underscore for whatever no file name should hold."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
