"""The feasible combinations of one template's parameters.

A combination is known by its *key*, its position in the product of the parameters' values. Keys
are listed when they are few; more are counted in chunks, drawn from at random and walked from
neighbour to neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.records import Candidate, UsageError, Value
from tuner.space.columns import evaluate_columns
from tuner.space.template import Constraint, TemplateSpec

Keys = NDArray[np.int64]
"""Identities of candidates: [count]."""

Codes = NDArray[np.int16]
"""Positions of values among their parameter's values: [count, parameters]."""

LISTED = 1 << 20
"""The most candidates of one template whose keys are held in memory."""

COUNTED = 1 << 25
"""The most rows that are looked at to count a set; a larger one is estimated from a sample."""

CHUNK = 1 << 16
"""Rows that are evaluated at a time."""


class TemplateSet:
    """The feasible candidates of one template on one device.

    Attributes:
        spec: The template.
        limits: Values of what constraints may name beside the parameters.
        names: Its parameters.
        product: Number of combinations, feasible or not.
        keys: The feasible keys in ascending order, or None when there are too many to list.
        size: Number of feasible candidates.
        exact: Whether the size was counted; otherwise it is an estimate.
    """

    def __init__(
        self, spec: TemplateSpec, limits: Mapping[str, Value], keys: Keys | None = None
    ) -> None:
        """Find out what is feasible.

        Args:
            spec: The template.
            limits: Values of what constraints may name beside the parameters.
            keys: The feasible keys where they are known, as from a recorded table.

        Raises:
            ExpressionError: If a constraint names an unknown limit or cannot be evaluated.
        """
        self.spec = spec
        self.names = tuple(name for name, _ in spec.parameters)
        self._choices = tuple(values for _, values in spec.parameters)
        self._columns = tuple(np.array(values) for values in self._choices)
        self.limits = limits
        cards = [len(values) for values in self._choices]
        self.product = math.prod(cards)
        if self.product >= 1 << 62:
            raise UsageError(f"template {spec.name!r} has {self.product:.2g} combinations")
        strides = [math.prod(cards[position + 1 :]) for position in range(len(cards))]
        self.cards, self._strides = np.array(cards, np.int64), np.array(strides, np.int64)
        self._due = _due(spec.constraints, self.names)
        self.keys, self.exact = keys, True
        self.size = len(keys) if keys is not None else self._count()

    def codes(self, keys: Keys) -> Codes:
        """Return the positions of the values that keys stand for."""
        return (keys[:, None] // self._strides % self.cards).astype(np.int16)

    def keys_of(self, codes: NDArray[np.integer]) -> Keys:
        """Return the keys that positions of values make."""
        return codes.astype(np.int64) @ self._strides

    def candidate(self, key: int) -> Candidate:
        """Return the candidate that a key stands for."""
        row = self.codes(np.array([key]))[0]
        values = (choices[code] for choices, code in zip(self._choices, row, strict=True))
        return Candidate.of(self.spec.name, dict(zip(self.names, values, strict=True)))

    def key(self, candidate: Candidate) -> int:
        """Return the key of a candidate of this template.

        Raises:
            KeyError: If it lacks a parameter or has a value that the template does not offer.
        """
        values = dict(candidate.parameters)
        if values.keys() != set(self.names):
            raise KeyError(str(candidate))
        code = [
            _position(choices, values[name], candidate)
            for name, choices in zip(self.names, self._choices, strict=True)
        ]
        return int(self.keys_of(np.array(code, np.int64)))

    def feasible(self, keys: Keys) -> NDArray[np.bool_]:
        """Return which of some keys are feasible."""
        if self.keys is not None:
            places = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
            return self.keys[places] == keys if len(self.keys) else np.zeros(len(keys), bool)
        codes, good = self.codes(keys), np.ones(len(keys), bool)
        for level in range(len(self.names) + 1):
            good[good] = self._satisfied(codes[good], level)
        return good

    def neighbours(self, key: int) -> Keys:
        """Return the feasible keys that differ from a key in one parameter."""
        code = self.codes(np.array([key]))[0].astype(np.int64)
        steps = [
            key + (np.delete(np.arange(card), code[position]) - code[position]) * stride
            for position, (card, stride) in enumerate(zip(self.cards, self._strides, strict=True))
        ]
        keys = np.concatenate(steps) if steps else np.empty(0, np.int64)
        return keys[self.feasible(keys)]

    def sample(self, count: int, random: np.random.Generator) -> Keys:
        """Return up to ``count`` different feasible keys, drawn at random.

        Draws are uniform when the keys are listed. Otherwise the combinations grow parameter by
        parameter and a random part of the feasible beginnings goes on, which is nearly uniform.
        """
        if self.keys is not None:
            return random.choice(self.keys, min(count, len(self.keys)), replace=False)
        codes, _, _ = self._grow(max(count, CHUNK), random)
        keys = self.keys_of(codes)
        return random.choice(keys, min(count, len(keys)), replace=False)

    def worst_constraint(self, random: np.random.Generator) -> tuple[float, Constraint]:
        """Return the constraint that rejects most random combinations, and their share."""
        codes = np.stack([random.integers(0, card, CHUNK) for card in self.cards], axis=1)
        due = [constraint for level in self._due for constraint in level]
        shares = [1.0 - float(self._holds(constraint, codes).mean()) for constraint in due]
        worst = int(np.argmax(shares))
        return shares[worst], due[worst]

    def _count(self) -> int:
        """List the keys, or only count them where they are many, or estimate their number."""
        codes, scale, work = self._grow(4 * CHUNK, np.random.default_rng(0))
        if scale == 1.0:
            self.keys = self.keys_of(codes)
            return len(codes)
        if work > COUNTED:
            self.exact = False
            # A sample can miss every feasible combination, but the default is known.
            default = np.array([self.key(self.spec.default)])
            return max(round(len(codes) * scale), int(self.feasible(default)[0]))
        size, listed = 0, [np.empty(0, np.int64)]
        for block in self._blocks(np.empty((1, 0), np.int16)):
            size += len(block)
            if size <= LISTED:
                listed.append(self.keys_of(block))
        if size <= LISTED:
            self.keys = np.concatenate(listed)
        return size

    def _blocks(self, codes: Codes) -> Iterator[Codes]:
        """Yield the feasible completions of some beginnings, in ascending order."""
        level = codes.shape[1]
        if level == 0:
            codes = codes[self._satisfied(codes, 0)]
        if level == len(self.names):
            yield codes
            return
        step = max(1, CHUNK // int(self.cards[level]))
        for start in range(0, len(codes), step):
            longer = self._extended(codes[start : start + step])
            if len(longer):
                yield from self._blocks(longer)

    def _grow(self, most: int, random: np.random.Generator) -> tuple[Codes, float, float]:
        """Return feasible combinations, of each beginning length a random part if too many.

        Returns:
            The combinations, how many each of them stands for (1.0 when none was left out), and
            how many rows a complete listing would look at (both after Knuth, 1975).
        """
        codes: Codes = np.empty((1, 0), np.int16)
        codes = codes[self._satisfied(codes, 0)]
        scale = work = 1.0
        for card in self.cards:
            work += scale * len(codes) * float(card)
            codes = self._extended(codes)
            if len(codes) > most:
                scale *= len(codes) / most
                codes = codes[np.sort(random.choice(len(codes), most, replace=False))]
        return codes, scale, work

    def _extended(self, codes: Codes) -> Codes:
        """Return the feasible ways to add a value of the next parameter."""
        level = codes.shape[1]
        card = int(self.cards[level])
        longer = np.empty((len(codes) * card, level + 1), np.int16)
        longer[:, :level] = np.repeat(codes, card, axis=0)
        longer[:, level] = np.tile(np.arange(card, dtype=np.int16), len(codes))
        return longer[self._satisfied(longer, level + 1)]

    def _satisfied(self, codes: Codes, level: int) -> NDArray[np.bool_]:
        """Return which rows satisfy the constraints whose last parameter has this level."""
        good = np.ones(len(codes), bool)
        for constraint in self._due[level]:
            good[good] = self._holds(constraint, codes[good])
        return good

    def _holds(self, constraint: Constraint, codes: NDArray[np.integer]) -> NDArray[np.bool_]:
        names = constraint.require.names
        columns: dict[str, object] = {n: self.limits[n] for n in names if n in self.limits}
        for position, name in enumerate(self.names[: codes.shape[1]]):
            if name in names:
                columns[name] = self._columns[position][codes[:, position]]
        return evaluate_columns(constraint.require, columns, len(codes)).astype(bool)


def _due(
    constraints: Sequence[Constraint], names: Sequence[str]
) -> tuple[tuple[Constraint, ...], ...]:
    """Return, per number of leading parameters, the constraints that they are enough for."""
    due: list[list[Constraint]] = [[] for _ in range(len(names) + 1)]
    for constraint in constraints:
        places = [names.index(name) + 1 for name in constraint.require.names if name in names]
        due[max(places, default=0)].append(constraint)
    return tuple(tuple(level) for level in due)


def _position(choices: Sequence[Value], value: Value, candidate: Candidate) -> int:
    for position, choice in enumerate(choices):
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return position
    raise KeyError(str(candidate))
