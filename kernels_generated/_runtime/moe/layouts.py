"""How a buffer is divided."""

from __future__ import annotations

from .kernels import Kernels, Shape


class Layouts:
    """The constants of a buffer's kernels.

    Args:
        shape: What the ranks agree about.
        kernels: The kernels.

    Attributes:
        dispatch: Constants without and with fp8.
        combine: Constants without and with zero copy, and where a dispatch had no weights.
        view: Where the view begins in a buffer, behind all that peers write in a combine.
        view_size: Bytes of the view.
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
        self.view: int = max(view for _, view, _ in combine)
        self.view_size: int = 2 * shape.local * shape.rows * shape.hidden
        sizes = [*(size for _, size in dispatch), self.view + self.view_size]
        self.size: int = -(-max(sizes) // 128) * 128
