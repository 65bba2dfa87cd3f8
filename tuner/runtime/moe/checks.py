"""What may be asked of a buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Shape


class Checks:
    """Checks the arguments of a buffer's calls; what is wrong raises ValueError.

    Args:
        shape: What the ranks agree about.
        device: Where all tensors must be.
        debug: Whether to look at the ids of experts, which waits for the device.
    """

    def __init__(self, shape: Shape, device: torch.device, *, debug: bool) -> None:
        self._shape, self._device, self._debug = shape, device, debug

    def tensor(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype
    ) -> None:
        """Check a tensor's shape, element type, device and strides."""
        check_tensor(name, tensor, shape, dtypes=dtypes, device=self._device)

    def tokens(self, x: Tensor) -> None:
        """Check the rows of a dispatch."""
        tokens, most = x.shape[0], self._shape.max_tokens
        if tokens > most:
            raise ValueError(f"x: must have at most {most} tokens, but got {tokens}")
        self.tensor("x", x, (tokens, self._shape.hidden), torch.bfloat16)

    def choices(self, topk_idx: Tensor, weights: Tensor | None, tokens: int) -> None:
        """Check the experts that tokens name, and their weights if there are any."""
        wanted = (tokens, self._shape.topk)
        self.tensor("topk_idx", topk_idx, wanted, torch.int64, torch.int32)
        if weights is not None:
            self.tensor("topk_weights", weights, wanted, torch.float32)
        if self._debug:
            check_ids(topk_idx, self._shape.experts)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    *,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise ValueError unless a tensor is what the kernels take.

    Args:
        name: Its name.
        tensor: The tensor, which must be contiguous.
        shape: The shape that it must have.
        dtypes: The element types that it may have.
        device: The device that it must be on.
    """
    said = [f"{name}: must"]
    if tuple(tensor.shape) != shape:
        said.append(f"have the shape {list(shape)}, but got {list(tensor.shape)}")
    elif tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        said.append(f"be {allowed}, but got {str(tensor.dtype).removeprefix('torch.')}")
    elif tensor.device != device:
        said.append(f"be on {device}, but is on {tensor.device}")
    elif not tensor.is_contiguous():
        said.append(f"be contiguous, but has the strides {tensor.stride()}")
    else:
        return
    raise ValueError(" ".join(said))


def check_ids(topk_idx: Tensor, experts: int) -> None:
    """Raise ValueError if a choice is neither an expert nor -1; waits for the device."""
    wrong = topk_idx[(topk_idx < -1) | (topk_idx >= experts)]
    if len(wrong):
        raise ValueError(
            f"topk_idx: must name experts from 0 to {experts - 1}, or -1 for none, but got "
            f"{int(wrong[0])}; {len(wrong)} of {topk_idx.numel()} are wrong"
        )
