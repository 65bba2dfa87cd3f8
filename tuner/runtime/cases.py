"""Which cases of a problem a variant is checked on, besides its workload."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .signature import Scalar, Signature

if TYPE_CHECKING:
    from .check import Problem


def flag_choices(signature: Signature) -> Iterator[dict[str, Scalar]]:
    """Yield every combination of the choices of a signature's flags."""
    names = [name for name, _ in signature.choices]
    for values in itertools.product(*(choices for _, choices in signature.choices)):
        yield signature.complete_flags(dict(zip(names, values, strict=True)))


def edge_cases(
    signature: Signature, problem: Problem
) -> Iterator[tuple[int, dict[str, int], list[dict[str, Scalar]]]]:
    """Yield the number and extents of every edge shape of a problem, and the flags for it."""
    known = dict(signature.choices)
    for number, shape in enumerate(problem.EDGE_SHAPES):
        extents = {name: value for name, value in shape.items() if name not in known}
        flags = {name: value for name, value in shape.items() if name in known}
        chosen = [signature.complete_flags(flags)] if flags else [*flag_choices(signature)]
        yield number, extents, chosen
