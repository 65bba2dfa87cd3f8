"""Which file of a frozen package serves a workload."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tuner.plugins import Device
from tuner.records import UsageError, Workload
from tuner.runtime.dispatch import Dispatch
from tuner.runtime.signature import Signature


def choose(
    folder: Path, signature: Signature, workload: Workload, device: Device
) -> dict[str, Any]:
    """Return which file of a frozen kernel's folder serves a workload, as `Choice` names it.

    Raises:
        UsageError: None does.
    """
    try:
        choice = Dispatch(folder.parent.name, folder, signature).choose(
            dict(workload.dims),
            dtype=workload.dtype,
            flags=dict(workload.flags),
            device=torch.device(device.torch_device),
        )
    except NotImplementedError as error:
        raise UsageError(str(error)) from error
    return dataclasses.asdict(choice)
