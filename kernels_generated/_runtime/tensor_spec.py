"""What a signature says of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .flags import Scalar


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a signature.

    Attributes:
        name: Name of the argument.
        shape: Names of its dims, outermost first.
        dtype: Torch's name of the element type; None stands for the workload's.
        optional: Whether an input may be left out; where it is given, its name is a flag of the
            workload that is true.
        transposed: Name of the flag with which the last two dims lie the other way round.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str | None = None
    optional: bool = False
    transposed: str | None = None

    def dims(self, flags: Mapping[str, Scalar]) -> tuple[str, ...]:
        """Return the names of its dims, outermost first, in a workload with these flags."""
        if self.transposed is not None and flags.get(self.transposed):
            return (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self.shape

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        """Return the tensor that `to_json` wrote."""
        optional, transposed = data.get("optional", False), data.get("transposed")
        return cls(data["name"], tuple(data["shape"]), data["dtype"], optional, transposed)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and dictionaries that say the same."""
        data: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        data |= {"optional": True} if self.optional else {}
        return data | ({"transposed": self.transposed} if self.transposed else {})
