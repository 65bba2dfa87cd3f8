"""A few candidates that together take every value, or every pair of values, of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np

from tuner.catalog import Catalog
from tuner.records import Candidate
from tuner.runtime.flags import GUARANTEES
from tuner.space.combinations import TemplateSet
from tuner.space.kernel import KernelSpec, load_space
from tuner.space.template import TemplateSpec

LIMITS = {
    **{"threads": 2, "l1_bytes": 32 << 10, "l2_bytes": 512 << 10, "l3_bytes": 32 << 20},
    **{"vector_bytes": 32, "vector_registers": 16},
    **{"shared_bytes": 227 << 10, "warp_size": 32, "max_threads": 1024, "compute_units": 132},
    **{"capability": 90},
}


def templates(language: str) -> Iterator[tuple[KernelSpec, TemplateSpec]]:
    """Yield every shipped template of a language."""
    catalog = Catalog()
    for kernel in catalog.kernels:
        spec = load_space(catalog.space_path(kernel))
        for template in spec.templates:
            if template.language == language:
                yield spec, template


def cover(template: TemplateSet, limits: Mapping[str, int], *, size: int = 1) -> list[Candidate]:
    """Return feasible candidates in which every value of every parameter occurs.

    Values that no feasible candidate has are left out.

    Args:
        template: The template.
        limits: The device's.
        size: Of how many parameters every combination of values is to occur.
    """
    feasible = TemplateSet(template, {**limits, "itemsize": 4, **dict.fromkeys(GUARANTEES, False)})
    generator = np.random.default_rng(0)
    keys = generator.permutation(feasible.sample(4096, generator))
    sample = {candidate: choices(candidate, size) for candidate in map(feasible.candidate, keys)}
    chosen = [template.default, *template.seeds]
    wanted = set().union(*sample.values()).difference(*(choices(item, size) for item in chosen))
    while wanted:  # each time the one with the most that the chosen lack: so few do
        best = max(sample, key=lambda candidate: len(wanted & sample[candidate]))
        wanted -= sample[best]
        chosen.append(best)
    return list(dict.fromkeys(chosen))


def choices(candidate: Candidate, size: int) -> set[tuple[tuple[str, object], ...]]:
    """Return every combination of so many of a candidate's values."""
    return set(combinations(candidate.parameters, size))
