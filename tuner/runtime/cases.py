"""Which cases of a problem a variant is checked on, besides its workload."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from .flags import Scalar, open_ended
from .signature import Signature

if TYPE_CHECKING:
    from .check import Problem


class InputError(Exception):
    """An input cannot be made: it is too large for the device, or its dtype has no randn."""


def flag_choices(signature: Signature) -> Iterator[dict[str, Scalar]]:
    """Yield every combination of the choices of a workload's flags, with no guarantee asked for.

    Of flags that may be any number, the first examples go together, and the second ones, ...
    """
    offered = [item for item in signature.choices if item[0] not in signature.guarantees]
    numbers = {name: choices for name, choices in offered if open_ended(choices)}
    others = {name: choices for name, choices in offered if name not in numbers}
    examples = list(zip(*numbers.values(), strict=True)) or [()]
    for example, *values in itertools.product(examples, *others.values()):
        flags = zip((*numbers, *others), (*example, *values), strict=True)
        yield signature.complete_flags(dict(flags))


def edge_cases(
    signature: Signature, problem: Problem, asked: Collection[str] = ()
) -> Iterator[tuple[int, dict[str, int], list[dict[str, Scalar]]]]:
    """Yield the number and extents of every edge shape of a problem, and the flags for it.

    Args:
        signature: Signature of the kernel.
        problem: What it computes.
        asked: Names of the guarantees to ask for.
    """
    known = dict(signature.choices)
    for number, shape in enumerate(problem.EDGE_SHAPES):
        extents = {name: value for name, value in shape.items() if name not in known}
        flags = {name: value for name, value in shape.items() if name in known}
        chosen = [signature.complete_flags(flags)] if flags else [*flag_choices(signature)]
        yield number, extents, [item | dict.fromkeys(asked, True) for item in chosen]
