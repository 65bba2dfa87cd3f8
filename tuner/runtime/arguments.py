"""What callers pass, checked: an error names the value and says what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .architecture import architecture
from .flags import Scalar
from .signature import Signature
from .tensor_spec import TensorSpec


def padded(signature: Signature, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return an operation's inputs with None for the last ones, which torch drops as defaults."""
    return inputs + (None,) * (len(signature.inputs) - len(inputs))


def workload_tensor(signature: Signature, inputs: Sequence[Tensor | None]) -> Tensor:
    """Return the first input whose element type is the workload's."""
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        if spec.dtype is None and tensor is not None:
            return tensor
    return cast(Tensor, inputs[0])


def check_kinds(signature: Signature, inputs: Sequence[Tensor | None]) -> None:
    """Raise if the inputs' devices or element types are not what the signature says.

    Raises:
        ValueError: They are on several devices.
        TypeError: An element type differs from the workload's or from the signature's, or an
            input is not dense.
    """
    first = workload_tensor(signature, inputs)
    for spec, tensor in zip(signature.inputs, inputs, strict=True):
        if tensor is None:
            continue
        if tensor.device != first.device:
            raise ValueError(
                f"{signature.kernel}: all inputs must be on one device, but {spec.name} is on "
                f"{tensor.device} and others are on {first.device}"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{signature.kernel}: {spec.name} must be dense, but its layout is {tensor.layout}"
            )
        wanted = dtype_of(spec, first.dtype)
        if tensor.dtype != wanted:
            raise TypeError(
                f"{signature.kernel}: {spec.name} must be {dtype_name(wanted)} here, but got "
                f"{dtype_name(tensor.dtype)}{_autocast_hint(first.device)}"
            )


def dtype_of(spec: TensorSpec, workload: torch.dtype) -> torch.dtype:
    """Return the element type of a tensor in a workload of some dtype."""
    return workload if spec.dtype is None else cast(torch.dtype, getattr(torch, spec.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of an element type, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def _autocast_hint(device: torch.device) -> str:
    if not torch.is_autocast_enabled(device.type):
        return ""
    return "; autocast does not convert its inputs: convert them before the call"


def number_of(label: str, name: str, value: Scalar) -> float:
    """Return the number that a call gives for a scalar.

    Raises:
        TypeError: It is none.
    """
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{label}: {name} must be a number or None, but got {value!r}")


def dtype_of_name(label: str, name: str | torch.dtype) -> str:
    """Return torch's name of an element type that may be given as torch's own.

    Raises:
        ValueError: Torch has none of that name.
    """
    if isinstance(name, torch.dtype):
        return dtype_name(name)
    if isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype):
        return name
    raise ValueError(f"{label}: dtype must be one of torch's, such as 'float32', but got {name!r}")


def device_of_name(label: str, name: str | torch.device) -> torch.device:
    """Return a device that is here.

    Raises:
        ValueError: Torch knows none of that name, or it is not here.
    """
    try:
        device = torch.device(name)
        architecture(device)
    except (AssertionError, RuntimeError, TypeError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{label}: device must be one that is here, such as 'cpu', but got {name!r}: {first}"
        ) from error
    return device
