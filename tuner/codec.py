"""Records to plain JSON values and back, driven by their type annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tuner import records

Record = TypeVar("Record")

_PLAIN = frozenset((bool, int, float, str, types.NoneType))
_NAMES = {types.NoneType: "null", dict: "an object", list: "a list"}
_HINTS: dict[Any, dict[str, Any]] = {}


def to_json(record: object) -> Any:
    """Return the dictionaries, lists and scalars that stand for a record.

    A field of name-value pairs such as `Workload.dims` becomes an object.
    """
    if dataclasses.is_dataclass(record):
        hints = _hints(type(record))
        return {name: _encode(hints[name], getattr(record, name)) for name in hints}
    if isinstance(record, tuple):
        return [to_json(item) for item in record]
    return record


def from_json(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Return the record of a kind that `to_json` turned into these values.

    Raises:
        records.TunerError: A key is missing or unknown, or a value has another form.
    """
    if not isinstance(data, Mapping):
        raise records.TunerError(f"{kind.__name__}: must be an object, but got {data!r}")
    hints = _hints(kind)
    if unknown := set(data) - set(hints):
        raise records.TunerError(
            f"{kind.__name__} has no {', '.join(sorted(unknown))}; known: {', '.join(hints)}"
        )
    fields = {}
    for name, value in data.items():
        try:
            fields[name] = _decode(hints[name], value)
        except (AttributeError, TypeError) as error:
            raise records.TunerError(f"{kind.__name__}.{name}: {error}") from error
    try:
        return kind(**fields)
    except TypeError as error:
        raise records.TunerError(f"{kind.__name__}: {error}") from error


def _hints(kind: Any) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _pair_value(hint: Any) -> Any:
    """Return the hint of the values if a field holds name-value pairs, else None."""
    arguments = typing.get_args(hint)
    if arguments and typing.get_origin(arguments[0]) is tuple:
        return typing.get_args(arguments[0])[1]
    return None


def _encode(hint: Any, value: Any) -> Any:
    if _pair_value(hint) is None:
        return to_json(value)
    return {name: to_json(item) for name, item in value}


def _decode(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, value)
    if (value_hint := _pair_value(hint)) is not None:
        pairs = _typed((dict,), value).items()
        return tuple((name, _decode(value_hint, inner)) for name, inner in pairs)
    if origin is tuple:
        return tuple(_decode(arguments[0], inner) for inner in _typed((list,), value))
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value)
    if origin is typing.Literal and value not in arguments:
        raise TypeError(f"must be one of {', '.join(arguments)}, but got {_cut(value)}")
    return _typed((hint,), value) if hint in _PLAIN else value


def _decode_union(arguments: tuple[Any, ...], value: Any) -> Any:
    kinds = [kind for kind in arguments if dataclasses.is_dataclass(kind)]
    if not kinds:
        return _typed(arguments, value) if _PLAIN.issuperset(arguments) else value
    if value is None or not isinstance(value, Mapping):
        return value
    for kind in kinds:
        if set(value) <= set(_hints(kind)):
            return from_json(typing.cast("type[Any]", kind), value)
    names = ", ".join(str(kind) for kind in kinds)
    raise records.TunerError(f"{sorted(value)} are the keys of none of {names}")


def _typed(kinds: Sequence[type], value: Any) -> Any:
    """Return a value whose type is among some; whole numbers stand for others, too."""
    if type(value) in kinds or (float in kinds and type(value) is int):
        return value
    names = " or ".join(_NAMES.get(kind, kind.__name__) for kind in kinds)
    raise TypeError(f"must be {names}, but got {_cut(value)}")


def _cut(value: Any) -> str:
    return f"{value!r:.80}"
