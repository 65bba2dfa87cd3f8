"""What parent and children say to each other about one workload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.records import DeviceInfo, Resources, Workload
from tuner.timing.sanity import Ceilings


@dataclass(frozen=True, slots=True)
class Task:
    """A workload of one kernel, as children need to know it.

    Attributes:
        signature: The kernel's signature as JSON.
        problem: The kernel's problem module.
        workload: The workload.
        device: The device that sources are compiled for.
        ceilings: What the device was measured to do at most; a time beyond them is rejected.
    """

    signature: dict[str, Any]
    problem: Path
    workload: Workload
    device: DeviceInfo
    ceilings: Ceilings | None = None

    def message(self, operation: str, **values: object) -> dict[str, Any]:
        """Return the request that asks a child for an operation on this workload."""
        return {
            "operation": operation,
            "signature": self.signature,
            "problem": str(self.problem),
            "workload": codec.to_json(self.workload),
            "device": codec.to_json(self.device),
            "ceilings": codec.to_json(self.ceilings),
            **values,
        }


@dataclass(frozen=True, slots=True)
class Compiled:
    """A source that the compiler accepted."""

    compile_s: float
    resources: Resources


@dataclass(frozen=True, slots=True)
class Limits:
    """How long one candidate may take, in seconds."""

    compile_s: float = 60.0
    run_s: float = 60.0


DEFAULT_LIMITS = Limits()
