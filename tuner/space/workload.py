"""Workloads as the command line spells them: ``M=512,N=512,K=512,dtype=float32``."""

from __future__ import annotations

from collections.abc import Collection

from tuner.records import UsageError, Value, Workload, format_value, parse_value
from tuner.runtime.expression import Expression, ExpressionError
from tuner.runtime.flags import allowed, open_ended, spell_choices
from tuner.runtime.signature import Signature

_MOST = 2**63 - 1
"""The largest extent: variants take them as 64-bit integers."""


def parse_workload(signature: Signature, dtypes: Collection[str], text: str) -> Workload:
    """Return the workload that a text describes.

    Args:
        signature: The kernel's arguments.
        dtypes: The dtypes that the kernel has templates for; the first is the default.
        text: ``NAME=VALUE`` pairs with commas between them; dims with a default, flags and the
            dtype may be left out.

    Raises:
        UsageError: If a pair is malformed, unknown, given twice, missing or not allowed, or if
            the dims break a condition of the signature.
    """
    where = f"{signature.kernel}: workload {text!r}"
    given = _pairs(signature, text, where)
    dtype = given.pop("dtype", next(iter(dtypes)))
    if dtype not in dtypes:
        raise UsageError(f"{where}: dtype={dtype} is not one of {', '.join(dtypes)}")
    flags = {
        name: _flag(name, choices, given.pop(name, None), where)
        for name, choices in signature.choices
    }
    try:
        dims = _dims(signature, given, where)
        signature.check(dims)
    except ValueError as error:
        raise UsageError(str(error)) from error
    said = signature.complete_flags(flags)
    return Workload(signature.kernel, tuple(dims.items()), dtype, tuple(said.items()))


def _pairs(signature: Signature, text: str, where: str) -> dict[str, str]:
    """Return the given names and values."""
    known = (*signature.dims, *(name for name, _ in signature.choices), "dtype")
    pairs: dict[str, str] = {}
    for pair in text.split(","):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not (name and separator and value):
            raise UsageError(f"{where}: {pair!r} is not of the form NAME=VALUE")
        if name not in known:
            raise UsageError(f"{where}: unknown name {name!r}; known: {', '.join(known)}")
        if name in pairs:
            raise UsageError(f"{where}: {name} is given twice")
        pairs[name] = value
    return pairs


def _flag(name: str, choices: tuple[Value, ...], text: str | None, where: str) -> Value:
    if text is None:
        return choices[0]
    if open_ended(choices):
        value = parse_value(text)
        if not allowed(value, choices):
            raise UsageError(f"{where}: {name}={text} is not {spell_choices(choices)}")
        return value
    spelled = {format_value(choice): choice for choice in choices}
    if text not in spelled:
        raise UsageError(f"{where}: {name}={text} is not one of {', '.join(spelled)}")
    return spelled[text]


def _dims(signature: Signature, given: dict[str, str], where: str) -> dict[str, int]:
    """Return every dim's extent, in the signature's order."""
    dims: dict[str, Value] = {name: parse_value(value) for name, value in given.items()}
    defaults = dict(signature.defaults)
    missing = [name for name in signature.dims if name not in dims and name not in defaults]
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} must be given")
    pending = [name for name in signature.dims if name not in dims]
    while pending:
        # A default may name a dim whose own default comes later: take those that are ready.
        ready = [n for n in pending if Expression(defaults[n], where).names <= dims.keys()]
        if not ready:
            raise ExpressionError(f"{where}: the defaults of {', '.join(pending)} are circular")
        for name in ready:
            dims[name] = Expression(defaults[name], where).evaluate(dims)
        pending = [name for name in pending if name not in ready]
    extents: dict[str, int] = {}
    for name in signature.dims:
        extent = dims[name]
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 1:
            raise UsageError(f"{where}: {name}={extent} is not a whole number above 0")
        if extent > _MOST:
            raise UsageError(f"{where}: {name}={extent} is more than a variant can be told")
        extents[name] = extent
    return extents
