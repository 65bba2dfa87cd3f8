"""Tensors under test: full of NaN, between regions that nobody may write to."""

from __future__ import annotations

import torch

GUARD_BYTES = 4096
"""What lies on each side of a tensor under test: a write past its ends lands there."""

_FILL = 0xFF  # as bytes of any float: NaN, so what is read out of bounds or left out shows


class GuardedTensor:
    """A tensor of NaN between two regions that nobody may write to.

    Args:
        shape: Shape of the tensor.
        dtype: Its element type.
        device: Torch's name of the device.
        misaligned: Whether it begins one element off any vector's alignment.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, device: str, misaligned: bool
    ) -> None:
        self._begin = GUARD_BYTES + (dtype.itemsize if misaligned else 0)
        self._end = self._begin + dtype.itemsize * torch.Size(shape).numel()
        self.buffer = torch.full(
            (self._end + GUARD_BYTES,), _FILL, dtype=torch.uint8, device=device
        )
        self.tensor = self.buffer[self._begin : self._end].view(dtype).view(shape)

    def stray_write(self) -> str | None:
        """Return where the guards were written to, if they were."""
        for side, guard in (
            ("before its start", self.buffer[: self._begin].flip(0)),
            ("after its end", self.buffer[self._end :]),
        ):
            touched = (guard != _FILL).nonzero()
            if len(touched):
                return f"{len(touched)} bytes {side}, the nearest {int(touched[0]) + 1} away"
        return None
