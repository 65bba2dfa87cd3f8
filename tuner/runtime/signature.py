"""What a kernel takes and gives: named tensors whose shapes are lists of named dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from .expression import Expression
from .flags import Flags, Scalar, allowed, spell_choices, switches
from .tensor_spec import TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a kernel and what they must satisfy.

    Attributes:
        kernel: Name of the kernel.
        inputs: Tensors that a variant reads, in call order.
        outputs: Tensors that a variant writes, in call order.
        flags: Names and choices of what belongs to the workload; default first. One with whole
            numbers may be any from the least of them, and the choices are examples.
        options: More flags, which a workload and a call of a variant leave out where they have
            their default.
        scalars: Names of run-time numbers with their default as an expression over dims.
        defaults: Dims that a workload may leave out, with the expression that stands in.
        valid: Conditions over dims that every workload satisfies.
        guarantees: Names of what a workload may ask of its variant beyond right outputs, of
            `GUARANTEES`: like options that are False by default, but a variant is not told.
    """

    kernel: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    flags: Flags = ()
    options: Flags = ()
    scalars: tuple[tuple[str, str], ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    valid: tuple[str, ...] = ()
    guarantees: tuple[str, ...] = ()

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of all dims, in order of first appearance."""
        shapes = (spec.shape for spec in (*self.inputs, *self.outputs))
        return tuple(dict.fromkeys(dim for shape in shapes for dim in shape))

    @property
    def keywords(self) -> Flags:
        """The flags, options and guarantees: what a call gives by name, with its choices."""
        return (*self.flags, *self.options, *switches(self.guarantees))

    @property
    def choices(self) -> Flags:
        """All that a workload's flags may say: the keywords, and which optional inputs it has."""
        given = switches(spec.name for spec in self.inputs if spec.optional)
        return (*self.flags, *given, *self.options, *switches(self.guarantees))

    def asked(self, flags: Mapping[str, object]) -> tuple[str, ...]:
        """Return the names of the guarantees that the flags of a workload ask for."""
        return tuple(name for name in self.guarantees if flags.get(name))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        """Return the signature that `to_json` wrote."""
        return cls(
            data["kernel"],
            tuple(TensorSpec.from_json(item) for item in data["inputs"]),
            tuple(TensorSpec.from_json(item) for item in data["outputs"]),
            tuple((name, tuple(choices)) for name, choices in data["flags"].items()),
            tuple((name, tuple(choices)) for name, choices in data.get("options", {}).items()),
            tuple(data["scalars"].items()),
            tuple(data["defaults"].items()),
            tuple(data["valid"]),
            tuple(data.get("guarantees", ())),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and dictionaries that say the same; their order has a meaning."""
        options = {name: list(choices) for name, choices in self.options}
        return {
            "kernel": self.kernel,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "flags": {name: list(choices) for name, choices in self.flags},
            **({"options": options} if options else {}),
            "scalars": dict(self.scalars),
            "defaults": dict(self.defaults),
            "valid": list(self.valid),
            **({"guarantees": list(self.guarantees)} if self.guarantees else {}),
        }

    def bind(
        self, tensors: Mapping[str, torch.Tensor | None], flags: Mapping[str, Scalar] | None = None
    ) -> dict[str, int]:
        """Return the extent of every dim, read off the inputs' shapes.

        Args:
            tensors: The inputs by name; an optional one may be None or missing.
            flags: The workload's flags; None stands for their defaults.

        Raises:
            ValueError: A tensor has another rank, two tensors disagree about a dim, or the
                extents break a condition of the signature.
        """
        extents: dict[str, int] = {}
        for spec in self.inputs:
            tensor = tensors.get(spec.name)
            if tensor is None:
                if spec.optional:
                    continue
                raise ValueError(f"{self.kernel}: {spec.name} must be given")
            shape, dims = tuple(tensor.shape), spec.dims(flags or {})
            if len(shape) != len(dims):
                raise ValueError(self.rank_message(spec, shape, flags or {}))
            for dim, extent in zip(dims, shape, strict=True):
                if extents.setdefault(dim, extent) != extent:
                    raise ValueError(
                        f"{self.kernel}: {dim} of {spec.name} is {extent}, but the inputs before "
                        f"it say {dim}={extents[dim]}"
                    )
        self.check(extents)
        return {dim: extents[dim] for dim in self.dims}

    def rank_message(
        self, spec: TensorSpec, shape: tuple[int, ...], flags: Mapping[str, Scalar]
    ) -> str:
        """Return what to say of a tensor whose rank is not its spec's."""
        wanted = ", ".join(spec.dims(flags))
        return f"{self.kernel}: {spec.name} must have the shape [{wanted}], but got {list(shape)}"

    def check(self, extents: Mapping[str, int]) -> None:
        """Raise ValueError if the extents break a condition of the signature."""
        for condition in self.valid:
            if not expression(condition, self.kernel).evaluate(extents):
                raise ValueError(
                    f"{self.kernel}: `{condition}` must hold, but got "
                    + ", ".join(f"{dim}={extent}" for dim, extent in extents.items())
                )

    def shapes(
        self,
        specs: tuple[TensorSpec, ...],
        extents: Mapping[str, int],
        flags: Mapping[str, Scalar] | None = None,
    ) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
        """Yield each tensor that a workload with these flags has, with its shape in numbers."""
        flags = flags or {}
        for spec in specs:
            if not spec.optional or flags.get(spec.name):
                yield spec, tuple(extents[dim] for dim in spec.dims(flags))

    def complete(self, extents: Mapping[str, int]) -> dict[str, int]:
        """Return the extent of every dim, those left out filled in by their defaults.

        Raises:
            ValueError: A dim is unknown, missing without a default or no whole number, or the
                extents break a condition of the signature.
        """
        if unknown := set(extents).difference(self.dims):
            flags = f"; flags: {', '.join(dict(self.choices))}" if self.choices else ""
            raise ValueError(
                f"{self.kernel}: unknown dim {', '.join(sorted(unknown))}; "
                f"known: {', '.join(self.dims)}{flags}"
            )
        there = {*extents, *dict(self.defaults)}
        if missing := [dim for dim in self.dims if dim not in there]:
            raise ValueError(f"{self.kernel}: no extent for {', '.join(missing)}")
        known = {dim: self._extent(dim, extent) for dim, extent in extents.items()}
        for dim, text in self.defaults:
            if dim not in known:
                known[dim] = int(expression(text, self.kernel).evaluate(known))
        self.check(known)
        return {dim: known[dim] for dim in self.dims}

    def _extent(self, dim: str, value: object) -> int:
        """Return an extent, given as a whole number of Python, numpy or torch."""
        try:
            extent = -1 if isinstance(value, bool) else index(cast(SupportsIndex, value))
        except TypeError:
            extent = -1
        if extent < 0:
            raise ValueError(
                f"{self.kernel}: {dim} must be a whole number from 0, but got {value!r}"
            )
        return extent

    def complete_flags(self, flags: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return what a workload says of its flags.

        Those left out are set to their first choice; options, guarantees and optional inputs are
        left out where they have it.

        Raises:
            ValueError: A flag is unknown or its value is not one of its choices.
        """
        known_choices = dict(self.choices)
        if unknown := set(flags).difference(known_choices):
            known = ", ".join(known_choices) or "none"
            raise ValueError(
                f"{self.kernel}: unknown flag {', '.join(sorted(unknown))}; known: {known}"
            )
        always = dict(self.flags)
        complete = {}
        for name, choices in known_choices.items():
            value = flags.get(name, choices[0])
            if not allowed(value, choices):
                raise ValueError(
                    f"{self.kernel}: {name} must be {spell_choices(choices)}, but got {value!r}"
                )
            if name in always or value != choices[0]:
                complete[name] = value
        return complete

    def arguments(
        self, flags: Mapping[str, Scalar], extents: Mapping[str, int]
    ) -> dict[str, Scalar]:
        """Return what a variant is called with by name: its flags, options and scalars.

        It is not told the rest of a workload's flags: the guarantees, and which inputs there are.
        """
        told = {name: flags[name] for name, _ in (*self.flags, *self.options) if name in flags}
        return {**told, **self.default_scalars(extents)}

    def called_like(self, other: Signature) -> bool:
        """Return whether variants of both take the same arguments."""
        return replace(other, guarantees=self.guarantees) == self

    def default_scalars(self, extents: Mapping[str, int]) -> dict[str, float]:
        """Return the default of every scalar for these extents."""
        return {
            name: float(expression(text, self.kernel).evaluate(extents))
            for name, text in self.scalars
        }


@cache
def expression(text: str, where: str) -> Expression:
    """Return the compiled expression: operations evaluate the same few again and again."""
    return Expression(text, where)
