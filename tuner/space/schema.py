"""The shape of a kernel's YAML file, checked by pydantic; errors quote key, value and choices."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator, PlainValidator

from tuner.records import UsageError, Value

_MOST_CHARACTERS = 120
"""Of a wrong value that an error quotes."""


def _value(value: object) -> Value:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a boolean, a number or a string")
    return value


def _choices(values: list[Value]) -> list[Value]:
    if len({type(value) for value in values}) > 1 and not _are_numbers(values):
        raise ValueError("must hold values of one type: booleans, numbers or strings")
    duplicates = [value for position, value in enumerate(values) if value in values[:position]]
    if duplicates:
        raise ValueError(f"holds {duplicates[0]!r} twice")
    return values


def _are_numbers(values: list[Value]) -> bool:
    return all(isinstance(value, int | float) and value is not bool(value) for value in values)


def _name(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("must be a name made of letters, digits and underscores")
    return name


Scalar = Annotated[Value, PlainValidator(_value)]
Choices = Annotated[list[Scalar], Field(min_length=1), AfterValidator(_choices)]
Name = Annotated[str, AfterValidator(_name)]
Names = Annotated[list[Name], Field(min_length=1)]
Point = dict[Name, Scalar]


class Section(BaseModel):
    """A mapping of the file: no unknown keys, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: object) -> object:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    allowed = ", ".join(cls.model_fields)
                    raise ValueError(f"unknown key {key!r}; allowed: {allowed}")
        return data


_File = TypeVar("_File", bound=Section)


class TensorFile(Section):
    """A tensor: the names of its dims and, where it differs from the workload's, its dtype.

    Attributes:
        shape: Its dims, outermost first.
        dtype: Torch's name of its element type.
        optional: Whether an input may be left out; its name is then a flag of the workload.
        transposed: The flag with which its last two dims lie the other way round.
    """

    shape: list[Name]
    dtype: str | None = None
    optional: bool = False
    transposed: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _shape_alone(cls, data: object) -> object:
        return {"shape": data} if isinstance(data, list) else data


class SignatureFile(Section):
    """The ``signature`` section; ``options`` are flags that a workload leaves out by default."""

    inputs: Annotated[dict[Name, TensorFile], Field(min_length=1)]
    outputs: Annotated[dict[Name, TensorFile], Field(min_length=1)]
    flags: dict[Name, Choices] = {}
    options: dict[Name, Choices] = {}
    scalars: dict[Name, str] = {}
    defaults: dict[Name, str] = {}
    valid: list[str] = []
    guarantees: list[Literal["deterministic"]] = []


class ConstraintFile(Section):
    """One entry of a template's ``constraints``, or of what it requires ``compiled``."""

    require: str
    why: str


class TemplateFile(Section):
    """One entry of ``templates``."""

    language: Literal["cpp", "triton", "gluon"]
    devices: Names
    dtypes: Names
    parameters: dict[Name, Choices]
    constraints: list[ConstraintFile] = []
    compiled: list[ConstraintFile] = []
    suits: str | None = None
    default: Point
    seeds: list[Point] = []


class AutogradFile(Section):
    """The ``autograd`` section: the public differentiable operation of the frozen package.

    Attributes:
        operation: Its name.
        returns: The outputs that it returns.
        backward: Name of the kernel that computes the gradients.
    """

    operation: Name
    returns: Names
    backward: Name


class KernelFile(Section):
    """The whole file."""

    kernel: Name
    summary: str
    signature: SignatureFile
    templates: Annotated[dict[Name, TemplateFile], Field(min_length=1)]
    workloads: dict[Name, Annotated[list[str], Field(min_length=1)]]
    autograd: AutogradFile | None = None


class SpentFile(Section):
    """An entry of a captured file: a workload and what a program spent on it."""

    kernel: Name
    workload: str
    calls: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(ge=0, strict=False)]
    operations: list[str] = []


class CapturedFile(Section):
    """What `tune capture` writes."""

    program: str = ""
    device: str = ""
    workloads: Annotated[list[SpentFile], Field(min_length=1)]


def read_kernel_file(path: Path) -> KernelFile:
    """Return a kernel's YAML file as typed sections.

    Raises:
        UsageError: If the file cannot be read, is not YAML or does not have the right shape.
    """
    return _read(path, KernelFile)


def read_captured_file(path: Path) -> CapturedFile:
    """Return a file of captured workloads as typed sections.

    Raises:
        UsageError: As for `read_kernel_file`.
    """
    return _read(path, CapturedFile)


def _read(path: Path, kind: type[_File]) -> _File:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
        return kind.model_validate(data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name}: is not YAML: {error}") from error
    except ValidationError as error:
        raise UsageError(describe(error, path.name)) from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that comes twice is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key!r} twice", node.value[position][0].start_mark
                )
        return super().construct_mapping(node, deep)


def describe(error: ValidationError, name: str) -> str:
    """Return one line for each thing that is wrong with a file of this name."""
    return "\n".join(f"{name}: {_message(dict(problem))}" for problem in error.errors())


def _message(problem: dict[str, Any]) -> str:
    """Return where, what and which value for one of pydantic's errors."""
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"])
    where = where.lstrip(".").replace(".[key]", "") or "the file"
    kind, text, value = problem["type"], problem["msg"], problem["input"]
    got = repr(value)
    if len(got) > _MOST_CHARACTERS:
        got = f"{got[:_MOST_CHARACTERS]}..."
    if kind == "missing":
        return f"{where}: is missing"
    if kind == "value_error":
        text = text.removeprefix("Value error, ")
        return f"{where}: {text}" if isinstance(value, dict) else f"{where}: {text}, got {got}"
    return f"{where}: {text[:1].lower()}{text[1:]}, got {got}"
