"""Records to plain JSON values and back, driven by their type annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from tuner import records

Record = TypeVar("Record")

_HINTS: dict[Any, dict[str, Any]] = {}


def to_json(record: object) -> Any:
    """Return the dictionaries, lists and scalars that stand for a record.

    A pair list such as `Workload.dims` becomes an object; an `Outcome` is told apart by its keys.
    """
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {
            field.name: to_json(getattr(record, field.name))
            for field in dataclasses.fields(record)
        }
    if isinstance(record, tuple):
        if record and all(_is_pair(item) for item in record):
            return {name: to_json(value) for name, value in record}
        return [to_json(item) for item in record]
    return record


def from_json(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Return the record of a kind that `to_json` turned into these values.

    Raises:
        records.TunerError: A key is missing or unknown.
    """
    hints = _hints(kind)
    if unknown := set(data) - set(hints):
        raise records.TunerError(
            f"{kind.__name__} has no {', '.join(sorted(unknown))}; known: {', '.join(hints)}"
        )
    try:
        return kind(**{name: _decode(hints[name], value) for name, value in data.items()})
    except TypeError as error:
        raise records.TunerError(f"{kind.__name__}: {error}") from error


def _hints(kind: Any) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def _decode(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, value)
    if origin is tuple:
        item = arguments[0]
        if typing.get_origin(item) is tuple:  # a pair list
            value_hint = typing.get_args(item)[1]
            return tuple((name, _decode(value_hint, inner)) for name, inner in dict(value).items())
        return tuple(_decode(item, inner) for inner in value)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value)
    return value


def _decode_union(arguments: tuple[Any, ...], value: Any) -> Any:
    kinds = [kind for kind in arguments if dataclasses.is_dataclass(kind)]
    if value is None or not isinstance(value, Mapping):
        return value
    for kind in kinds:
        if set(value) <= set(_hints(kind)):
            return from_json(typing.cast("type[Any]", kind), value)
    names = ", ".join(str(kind) for kind in kinds)
    raise records.TunerError(f"{sorted(value)} are the keys of none of {names}")
