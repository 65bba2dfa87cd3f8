"""y = x."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

RIVAL = "torch.clone"
EDGE_SHAPES = ({"N": 1}, {"N": 7}, {"N": 97}, {"N": 0})


def reference(x: Tensor) -> dict[str, Tensor]:
    """Return the float64 outputs."""
    return {"y": x.clone()}


def rival(x: Tensor) -> Callable[[], object]:
    """Return torch's operation."""
    return lambda: torch.clone(x)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Allow rounding."""
    return {"rtol": 1e-6, "atol": 1e-7}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return operations and bytes."""
    return dims["N"], 2 * dims["N"] * itemsize
