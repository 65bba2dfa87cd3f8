"""The feasible set: what the templates of a kernel allow on one device, as one numbered whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, UsageError, Value
from tuner.space.combinations import Keys, TemplateSet

Coordinates = NDArray[np.float64]
"""Values between 0 and 1: [count, features]."""

ABSENT = 0.5
"""The coordinate of a parameter that a candidate's template does not have."""


class FeasibleSet:
    """The union of templates' feasible candidates.

    Each candidate has a *key*, an integer that stands for it: its key within its template after
    the products of the templates before. Keys are not contiguous.

    Attributes:
        templates: The templates, each with its feasible combinations; the default's comes first.
        keys: Every key in ascending order, or None when they are too many to list.
        exact: Whether the length was counted; otherwise it is an estimate.
        features: Names of the model's features: ``template``, then ``TEMPLATE.PARAMETER``.
        choices: The values of each feature.
    """

    def __init__(self, templates: Sequence[TemplateSet]) -> None:
        """Join templates.

        Args:
            templates: At least one.

        Raises:
            UsageError: If no candidate is feasible; it names the constraint that rejects most.
        """
        self.templates = tuple(templates)
        self._offsets = np.cumsum([0, *(part.product for part in templates)])
        self._size = sum(part.size for part in templates)
        self.exact = all(part.exact for part in templates)
        if not self._size:
            raise UsageError(_why_empty(self.templates[0]))
        self.keys: Keys | None = None
        if all(part.keys is not None for part in templates):
            parts = zip(templates, self._offsets, strict=False)
            self.keys = np.concatenate([part.keys + start for part, start in parts])
        names = ["template"]
        choices: list[tuple[Value, ...]] = [tuple(part.spec.name for part in templates)]
        for part in templates:
            names += [f"{part.spec.name}.{name}" for name, _ in part.spec.parameters]
            choices += [values for _, values in part.spec.parameters]
        self.features: tuple[str, ...] = tuple(names)
        self.choices: tuple[tuple[Value, ...], ...] = tuple(choices)

    def __len__(self) -> int:
        """Return the number of feasible candidates, an estimate unless `exact`."""
        return self._size

    def __iter__(self) -> Iterator[Candidate]:
        """Yield every candidate of a listed set, in ascending order of keys."""
        for key in self.keys if self.keys is not None else ():
            yield self.candidate(int(key))

    def __contains__(self, candidate: Candidate) -> bool:
        """Return whether a candidate is feasible."""
        try:
            key = self.key(candidate)
        except KeyError:
            return False
        return bool(self.feasible(np.array([key]))[0])

    @property
    def defaults(self) -> tuple[Candidate, ...]:
        """The default of each template, where the device allows it."""
        return tuple(part.spec.default for part in self.templates if part.spec.default in self)

    @property
    def default(self) -> Candidate:
        """The first template's default: the candidate that is evaluated first.

        Raises:
            UsageError: If it breaks a constraint on this device.
        """
        part = self.templates[0]
        for constraint in part.spec.broken(part.spec.default, part.limits):
            raise UsageError(
                f"{constraint.require.where}: {constraint} rejects the default "
                f"{part.spec.default} on this device"
            )
        return part.spec.default

    @property
    def seeds(self) -> tuple[Candidate, ...]:
        """The templates' expert guesses that the device allows."""
        seeds = (seed for part in self.templates for seed in part.spec.seeds)
        return tuple(seed for seed in seeds if seed in self)

    def candidate(self, key: int) -> Candidate:
        """Return the candidate that a key stands for."""
        place = int(np.searchsorted(self._offsets, key, side="right")) - 1
        return self.templates[place].candidate(key - int(self._offsets[place]))

    def key(self, candidate: Candidate) -> int:
        """Return a candidate's key.

        Raises:
            KeyError: If its template or one of its values is unknown.
        """
        for part, start in zip(self.templates, self._offsets, strict=False):
            if part.spec.name == candidate.template:
                return part.key(candidate) + int(start)
        raise KeyError(str(candidate))

    def feasible(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which of some keys are feasible."""
        good = np.zeros(len(keys), bool)
        for part, start, mine in self._split(keys):
            good[mine] = part.feasible(keys[mine] - start)
        return good

    def neighbours(self, key: int) -> Keys:
        """Return the feasible keys of the same template that differ in one parameter."""
        place = int(np.searchsorted(self._offsets, key, side="right")) - 1
        start = int(self._offsets[place])
        return self.templates[place].neighbours(key - start) + start

    def sample(self, count: int, random: np.random.Generator) -> Keys:
        """Return up to ``count`` different feasible keys; each template gets its share."""
        if self.keys is not None:
            return random.choice(self.keys, min(count, len(self.keys)), replace=False)
        parts = []
        for part, start in zip(self.templates, self._offsets, strict=False):
            share = -(-count * part.size // self._size)
            parts.append(part.sample(share, random) + start)
        keys = np.concatenate(parts)
        return random.choice(keys, min(count, len(keys)), replace=False)

    def codes(self, keys: Keys) -> NDArray[np.int16]:
        """Return the categories of each feature: [count, features].

        The first is the template's position, the others are positions of values among their
        parameter's values, -1 where the candidate's template lacks the parameter.
        """
        codes = np.full((len(keys), len(self.features)), -1, np.int16)
        column = 1
        for place, (part, start, mine) in enumerate(self._split(keys)):
            codes[mine, 0] = place
            codes[mine, column : column + len(part.names)] = part.codes(keys[mine] - start)
            column += len(part.names)
        return codes

    def coordinates(self, keys: Keys) -> Coordinates:
        """Return the coordinate of each feature, `ABSENT` if there is none: [count, features]."""
        # The code -1 of what is absent picks the last entry.
        columns = [
            np.append(scaled(values), ABSENT)[column]
            for values, column in zip(self.choices, self.codes(keys).T, strict=True)
        ]
        return np.stack(columns, axis=1)

    def _split(self, keys: Keys) -> Iterator[tuple[TemplateSet, int, NDArray[np.bool_]]]:
        for place, part in enumerate(self.templates):
            start, end = int(self._offsets[place]), int(self._offsets[place + 1])
            yield part, start, (keys >= start) & (keys < end)


def scaled(values: Sequence[Value]) -> NDArray[np.float64]:
    """Return a coordinate between 0 and 1 for each of a feature's values.

    Positive numbers that span more than a factor of 4 are on a logarithmic scale; strings and
    booleans are at their positions.
    """
    if any(isinstance(value, str | bool) for value in values):
        numbers = np.arange(len(values), dtype=float)
    else:
        numbers = np.array(values, float)
        if len(values) > 2 and numbers.min() > 0 and numbers.max() > 4 * numbers.min():
            numbers = np.log2(numbers)
    low, span = numbers.min(), np.ptp(numbers)
    return (numbers - low) / span if span else np.zeros(len(values))


def _why_empty(part: TemplateSet) -> str:
    share, worst = part.worst_constraint(np.random.default_rng(0))
    return (
        f"{worst.require.where}: no combination of {part.spec.name}'s parameters is feasible on "
        f"this device; {worst} alone rejects {share:.1%}"
    )
