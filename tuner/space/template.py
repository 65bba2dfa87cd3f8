"""One implementation of a kernel: its parameters, what they must satisfy, what is tried first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.catalog import device_kinds
from tuner.records import Candidate, Resources, UsageError, Value
from tuner.runtime.expression import FUNCTIONS, Expression, ExpressionError
from tuner.space.schema import ConstraintFile, TemplateFile

ITEMSIZES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4},
    **{"int16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1},
}
"""Bytes per element of the dtypes that templates may name; constraints see it as ``itemsize``."""

REPORTED = ("registers", "spills", "serialized")
"""Names of what a compiler reports that conditions on compiled candidates may use."""

RESERVED = ("kernel", "template", "parameters", "twin")
"""Names that templates see beside the parameters."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition over a template's parameters and the device's limits.

    Attributes:
        require: What must hold; it is evaluated for every combination of the parameters it names.
        why: The reason, for people.
    """

    require: Expression
    why: str

    def __str__(self) -> str:
        """Return the condition and its reason."""
        return f"`{self.require.text}` ({self.why})"


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    """A template's part of a kernel's YAML file.

    Attributes:
        name: Name of the template, unique in its kernel.
        language: ``"cpp"``, ``"triton"`` or ``"gluon"``.
        devices: Kinds of devices that it is for.
        dtypes: Torch's names of the element types that it is for.
        parameters: Each parameter's name and values, in the file's order.
        constraints: What the values must satisfy together.
        default: The plain first choice.
        seeds: Expert guesses, tried right after the default.
        compiled: What the compiler must report of a candidate, that it be timed.
        suits: For which workloads it is tried, by their dims; None stands for all.
    """

    name: str
    language: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[Value, ...]], ...]
    constraints: tuple[Constraint, ...]
    default: Candidate
    seeds: tuple[Candidate, ...] = ()
    compiled: tuple[Constraint, ...] = ()
    suits: Expression | None = None

    def is_for(self, dims: Mapping[str, Value]) -> bool:
        """Return whether it is worth a try on a workload."""
        return self.suits is None or bool(self.suits.evaluate(dims))

    def broken(self, candidate: Candidate, limits: Mapping[str, Value]) -> Iterator[Constraint]:
        """Yield the constraints that a candidate breaks.

        Args:
            candidate: A candidate of this template.
            limits: Values of what constraints may name beside the parameters; a constraint that
                names more than these is passed over.

        Raises:
            ExpressionError: If a constraint cannot be evaluated.
        """
        values = {**limits, **dict(candidate.parameters)}
        for constraint in self.constraints:
            if not constraint.require.names <= values.keys():
                continue
            holds = constraint.require.evaluate(values)
            if not isinstance(holds, bool):  # such as `N % 8`, which is true where it fails
                raise ExpressionError(
                    f"{constraint.require.where}: `{constraint.require.text}` must be true or "
                    f"false, but is {holds!r}: write a comparison"
                )
            if not holds:
                yield constraint

    def unfit(self, resources: Resources) -> Constraint | None:
        """Return a condition that a compiled candidate breaks; what is not reported breaks none.

        Raises:
            ExpressionError: If a condition cannot be evaluated.
        """
        values = {name: getattr(resources, name) for name in REPORTED}
        for condition in self.compiled:
            reported = all(values[name] is not None for name in condition.require.names)
            if reported and not condition.require.evaluate(values):
                return condition
        return None


def template_spec(
    name: str,
    section: TemplateFile,
    *,
    where: str,
    limits: Collection[str],
    dims: Collection[str],
) -> TemplateSpec:
    """Return a template's part, its names, expressions and first choices checked."""
    for dtype in section.dtypes:
        if dtype not in ITEMSIZES:
            known = ", ".join(ITEMSIZES)
            raise UsageError(f"{where}.dtypes: unknown dtype {dtype!r}; known: {known}")
    for kind in section.devices:
        if kind not in device_kinds():
            known = ", ".join(device_kinds())
            raise UsageError(f"{where}.devices: unknown device {kind!r}; known: {known}")
    known_names = [*section.parameters, "itemsize", *limits]
    for parameter in section.parameters:
        if known_names.count(parameter) > 1 or parameter in (*RESERVED, *FUNCTIONS):
            raise UsageError(f"{where}.parameters: the name {parameter!r} is taken")
    constraints = _conditions(section.constraints, f"{where}.constraints", known_names)
    parameters = tuple((key, tuple(values)) for key, values in section.parameters.items())
    spec = TemplateSpec(
        name=name,
        language=section.language,
        devices=tuple(section.devices),
        dtypes=tuple(section.dtypes),
        parameters=parameters,
        constraints=constraints,
        default=Candidate.of(name, section.default),
        seeds=tuple(Candidate.of(name, seed) for seed in section.seeds),
        compiled=_conditions(section.compiled, f"{where}.compiled", REPORTED),
        suits=Expression(section.suits, f"{where}.suits", dims) if section.suits else None,
    )
    _check_point(spec, spec.default, f"{where}.default")
    for position, seed in enumerate(spec.seeds):
        _check_point(spec, seed, f"{where}.seeds[{position}]")
    return spec


def _conditions(
    entries: Sequence[ConstraintFile], where: str, known: Collection[str]
) -> tuple[Constraint, ...]:
    return tuple(
        Constraint(Expression(entry.require, f"{where}[{position}]", known), entry.why)
        for position, entry in enumerate(entries)
    )


def _check_point(spec: TemplateSpec, point: Candidate, where: str) -> None:
    """Refuse a default or seed that is no candidate of its template on any device."""
    values, choices = dict(point.parameters), dict(spec.parameters)
    for problem, names in (
        ("lacks", choices.keys() - values.keys()),
        ("has the unknown", values.keys() - choices.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names))
            raise UsageError(f"{where}: {problem} {listed}; the parameters: {', '.join(choices)}")
    for name, value in values.items():
        if (type(value), value) not in [(type(choice), choice) for choice in choices[name]]:
            raise UsageError(f"{where}: {name}={value!r} is not one of {list(choices[name])}")
    for dtype in spec.dtypes:
        for constraint in spec.broken(point, {"itemsize": ITEMSIZES[dtype]}):
            raise UsageError(f"{where}: breaks {constraint} with dtype={dtype}")
