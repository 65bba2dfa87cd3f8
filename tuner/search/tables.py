"""Recorded search spaces: what every candidate took, read from files of several tools."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tuner.records import Candidate, Measurement, Resources, UsageError, Value, parse_value
from tuner.space.combinations import TemplateSet
from tuner.space.feasible import FeasibleSet
from tuner.space.template import TemplateSpec

Row = tuple[Candidate, float | None]
"""A candidate and its time in ms, None for one that failed."""

_EXPORTED = frozenset(
    ("number", "kernel", "workload", "stage", "reason", "resources", "seconds", "source_sha256")
).union(item.name for kind in (Measurement, Resources) for item in fields(kind))
"""Columns of a store's CSV export that are no parameters, beside the template."""

_FORMATS = (
    "a CSV table, a Kernel Tuner cache file, a T4 results file, or a trials.jsonl or CSV export "
    "of ours"
)
_OUTCOMES = ("time_ms", "status")
_INFEASIBLE = "constraints"
"""The stage of what a constraint rejects: no part of the feasible set."""


@dataclass(frozen=True, slots=True)
class Table:
    """A recorded search space.

    Attributes:
        space: Its name.
        feasible: Its candidates.
        times: The time of each in ms by its key, None for one that failed.
    """

    space: str
    feasible: FeasibleSet
    times: Mapping[int, float | None]

    @property
    def best_ms(self) -> float:
        """The least time."""
        return min(time for time in self.times.values() if time is not None)


def read_tables(path: Path) -> list[Table]:
    """Return the search spaces of a file: one, or one per workload for a store's trials.

    Args:
        path: A CSV table (a column per parameter, ``time_ms``, ``status``), a cache file or a T4
            results file of Kernel Tuner, or a store's ``trials.jsonl`` or CSV export; ``.gz``
            files too.

    Raises:
        UsageError: If the file cannot be read or holds no time.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    name = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
    try:
        if kind == "csv":
            spaces = _export_rows(text) or {name: list(_csv_rows(text))}
        elif kind == "jsonl":
            spaces = _store_rows(text)
        else:
            spaces = {name: list(_json_rows(text))}
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}: is not {_FORMATS}: {problem}") from error
    if not any(time is not None for rows in spaces.values() for _, time in rows):
        raise UsageError(f"{path}: holds no time")
    return [
        _table(space, rows)
        for space, rows in spaces.items()
        if any(time is not None for _, time in rows)
    ]


def _csv_rows(text: str) -> Iterator[Row]:
    """Yield the rows of a table with a column per parameter."""
    reader = csv.DictReader(text.splitlines())
    if "time_ms" not in (reader.fieldnames or ()):
        raise KeyError("time_ms")
    for line in reader:
        values = {name: parse_value(value) for name, value in line.items()}
        time = float(line["time_ms"] or "nan")
        if line.get("status") != _INFEASIBLE:
            yield _row({n: v for n, v in values.items() if n not in _OUTCOMES}, time)


def _export_rows(text: str) -> dict[str, list[Row]]:
    """Return the rows of `tune export --format csv` by workload; none if it is another table."""
    reader = csv.DictReader(text.splitlines())
    spaces: dict[str, list[Row]] = {}
    if not {"kernel", "workload", "template", "median_ms"} <= set(reader.fieldnames or ()):
        return spaces
    for line in reader:
        if line["stage"] == _INFEASIBLE:
            continue
        # A cell is empty where another template has the parameter; pandas spells True so.
        values = {
            name: parse_value(text.lower() if text in ("True", "False") else text)
            for name, text in line.items()
            if text and name not in _EXPORTED
        }
        row = _row(values, float(line["median_ms"] or "nan"))
        spaces.setdefault(f"{line['kernel']}:{line['workload']}", []).append(row)
    return spaces


def _json_rows(text: str) -> Iterator[Row]:
    """Yield the rows of a cache file or of a T4 results file."""
    try:
        data = json.loads(text)
    except ValueError:
        # Kernel Tuner leaves the braces of a cache open while it appends to it.
        data = json.loads(text.rstrip().rstrip(",") + "}}")
    if "results" in data:
        for result in data["results"]:
            if result["invalidity"] != _INFEASIBLE:
                yield _row(result["configuration"], _t4_time(result))
        return
    for entry in data["cache"].values():
        yield _row({n: entry[n] for n in data["tune_params_keys"]}, entry.get("time"))


def _t4_time(result: Mapping[str, Any]) -> float | None:
    """Return a T4 result's time, None for a failure."""
    if result["invalidity"] != "correct":
        return None
    values = {entry["name"]: entry["value"] for entry in result["measurements"]}
    return float(values[result["objectives"][0]])


def _store_rows(text: str) -> dict[str, list[Row]]:
    """Return the rows of a store's trials by workload."""
    spaces: dict[str, list[Row]] = {}
    for line in text.splitlines():
        trial = json.loads(line).get("trial")
        if trial is None or trial["outcome"].get("stage") == _INFEASIBLE:
            continue
        workload = trial["workload"]
        shape = {**workload["dims"], **workload["flags"], "dtype": workload["dtype"]}
        pairs = ",".join(f"{name}={value}" for name, value in shape.items())
        candidate = Candidate.of(trial["candidate"]["template"], trial["candidate"]["parameters"])
        row = candidate, trial["outcome"].get("median_ms")
        spaces.setdefault(f"{workload['kernel']}:{pairs}", []).append(row)
    return spaces


def _row(parameters: Mapping[str, Value], time: object) -> Row:
    """Return a row; what is no positive number is a failure."""
    values = dict(parameters)
    template = str(values.pop("template", "table"))
    good = isinstance(time, int | float) and math.isfinite(time) and 0 < time < 1e20
    return Candidate.of(template, values), float(time) if good else None  # type: ignore[arg-type]


def _table(space: str, rows: Sequence[Row]) -> Table:
    """Return the table of some rows; of rows of one candidate, the last counts.

    Rows from before a template got other parameters are left out.
    """
    latest = {candidate.template: _names(candidate) for candidate, _ in rows}
    rows = [row for row in rows if _names(row[0]) == latest[row[0].template]]
    groups: dict[str, list[Candidate]] = {}
    for candidate in dict(rows):
        groups.setdefault(candidate.template, []).append(candidate)
    feasible = FeasibleSet([_listed(name, group) for name, group in groups.items()])
    return Table(space, feasible, {feasible.key(row): time for row, time in rows})


def _names(candidate: Candidate) -> list[str]:
    return [name for name, _ in candidate.parameters]


def _listed(name: str, candidates: Sequence[Candidate]) -> TemplateSet:
    """Return the set of exactly some candidates."""
    names = [parameter for parameter, _ in candidates[0].parameters]
    columns = zip(*(candidate.parameters for candidate in candidates), strict=True)
    parameters = tuple(
        (parameter, _ordered(value for _, value in column))
        for parameter, column in zip(names, columns, strict=True)
    )
    spec = TemplateSpec(name, "", (), (), parameters, (), candidates[0])
    whole = TemplateSet(spec, {}, np.empty(0, np.int64))
    keys = np.array([whole.key(candidate) for candidate in candidates])
    return TemplateSet(spec, {}, np.sort(keys))


def _ordered(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return the distinct values, numbers in ascending order and before strings."""
    return tuple(sorted(set(values), key=lambda value: (isinstance(value, str), value)))
