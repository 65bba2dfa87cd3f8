"""What may be said of a workload beside its extents: flags by name, with their choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

Scalar = bool | int | float | str
Flags = tuple[tuple[str, tuple[Scalar, ...]], ...]

GUARANTEES = ("deterministic",)
"""What kernels may offer to guarantee. ``deterministic``: equal bits in every run."""


def open_ended(choices: tuple[Scalar, ...]) -> TypeGuard[tuple[int, ...]]:
    """Return whether a flag's choices are whole numbers: examples of what it may be."""
    return all(map(_whole, choices))


def allowed(value: Scalar, choices: tuple[Scalar, ...]) -> bool:
    """Return whether a flag with these choices may have a value."""
    if open_ended(choices):
        return _whole(value) and value >= min(choices)
    return isinstance(value, Scalar) and value in choices


def spell_choices(choices: tuple[Scalar, ...]) -> str:
    """Return what a flag may be, in words."""
    if open_ended(choices):
        return f"a whole number from {min(choices)}"
    return f"one of {', '.join(map(repr, choices))}"


def switches(names: Iterable[str]) -> Flags:
    """Return flags that are off by default."""
    return tuple((name, (False, True)) for name in names)


def _whole(value: Scalar) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
