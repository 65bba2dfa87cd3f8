"""How a buffer is divided, and what may be asked of one."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Kernels, Shape


class Layouts:
    """The constants of a buffer's kernels.

    Args:
        shape: What the ranks agree about.
        kernels: The kernels.

    Attributes:
        dispatch: Constants without and with fp8.
        combine: Constants without and with zero copy.
        views: Where the view begins in a buffer, without and with zero copy.
        size: Bytes of a buffer that serves all of them.
    """

    def __init__(self, shape: Shape, kernels: Kernels) -> None:
        extents = (shape.ranks, shape.experts, shape.max_tokens)
        options = {"hidden": shape.hidden, "topk": shape.topk}
        dispatch = [
            module.layout(*extents, **options, fp8=bool(fp8))
            for fp8, module in enumerate(kernels.dispatch)
        ]
        combine = [module.layout(*extents, **options) for module in kernels.combine]
        self.dispatch: list[dict[str, int]] = [constants for constants, _ in dispatch]
        self.combine: list[dict[str, int]] = [constants for constants, _, _ in combine]
        self.views: list[int] = [view for _, view, _ in combine]
        sizes = [*(size for _, size in dispatch), *(size for _, _, size in combine)]
        self.size: int = -(-max(sizes) // 128) * 128


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
