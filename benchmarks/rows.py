"""Rows of results: one per contender and workload, all of a workload measured in the same run."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import io
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.package.files import replace

ABOUT = ("run", "date", "device", "torch", "triton")
"""The columns that every file begins with."""

COLUMNS = (
    *(*ABOUT, "op", "workload", "contender"),
    *("median_ms", "low_ms", "high_ms", "rate", "unit", "note"),
)

BUDGETS = ("25", "50", "100")
"""Evaluations after which a search is judged."""

SEARCH_COLUMNS = (
    *("date", "space", "sampler", "seeds", *(f"share_{budget}" for budget in BUDGETS)),
    *("evaluations_to_95", "proposal_ms", "version"),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A time in milliseconds with the interval that it lies in."""

    median_ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one contender did on one workload.

    Attributes:
        contender: Its name; ours is ``"tuner"``.
        spread: Its time; None if it failed.
        rate: Work per time, in `unit`.
        unit: ``"GFLOP/s"``, ``"GB/s"``, ...; empty without a rate.
        note: How it was measured, or why it failed.
    """

    contender: str
    spread: Spread | None
    rate: float | None = None
    unit: str = ""
    note: str = ""


class ResultsFile:
    """A file of rows that invocations of one script add to.

    Args:
        path: The CSV file; it need not exist.
        device: Name of the device.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._run = _about(device)

    def replace(self, op: str, workload: str, results: Sequence[Result]) -> None:
        """Write a workload's results in the place of those that the file has on this device."""
        about = {**self._run, "op": op, "workload": workload}
        rows = [
            row
            for row in (read(self._path) if self._path.exists() else [])
            if any(row[name] != about[name] for name in ("device", "op", "workload"))
        ]
        rows += [about | _cells(result) for result in results]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace(self._path, text.getvalue())


class OwnRows:
    """A file with columns of its own, written anew with every row: what is cut short is kept.

    The first row of a run takes the place of all that the file has of this device.

    Args:
        path: The CSV file; it need not exist.
        device: Name of the device.
        columns: Names of the columns after `ABOUT`.
        run: The run's id, where several processes write its rows.
    """

    def __init__(
        self, path: Path, device: str, columns: Sequence[str], run: str | None = None
    ) -> None:
        self._path, self._columns = path, (*ABOUT, *columns)
        self.about = _about(device) | ({"run": run} if run else {})

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of this run."""
        return [row for row in self._all() if row["run"] == self.about["run"]]

    def add(self, values: Mapping[str, object]) -> None:
        """Write one more row; columns without a value stay empty.

        Args:
            values: The row by column; numbers are written with six digits.
        """
        texts = {name: _text(values.get(name)) for name in self._columns}
        self._save([*self._kept(), texts | self.about])

    def update(self, key: Mapping[str, str], values: Mapping[str, object]) -> None:
        """Give columns of this run's rows that have the key's values other values."""
        kept, texts = self._kept(), {name: _text(value) for name, value in values.items()}
        for row in kept:
            if all(row[name] == value for name, value in (self.about | dict(key)).items()):
                row.update(texts)
        self._save(kept)

    def _kept(self) -> list[dict[str, str]]:
        mine = self.about
        return [
            row
            for row in self._all()
            if row["run"] == mine["run"] or row["device"] != mine["device"]
        ]

    def _all(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            if tuple(reader.fieldnames or ()) != self._columns:
                raise ValueError(
                    f"{self._path}: the columns are {reader.fieldnames}, not {self._columns}: "
                    "write to another file"
                )
            return list(reader)

    def _save(self, rows: Sequence[Mapping[str, str]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace(self._path, text.getvalue())


def has_own_columns(path: Path) -> bool:
    """Return whether a file is one of `OwnRows`."""
    with path.open(newline="", encoding="utf-8") as lines:
        found = tuple(next(csv.reader(lines), ()))
    return found[: len(ABOUT)] == ABOUT and found != COLUMNS


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of times, of searches or of columns of its own.

    Raises:
        ValueError: Its columns are none of these.
    """
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        known = tuple(reader.fieldnames or ()) in (COLUMNS, SEARCH_COLUMNS)
        if not known and not has_own_columns(path):
            raise ValueError(f"{path}: the columns are {reader.fieldnames}, not {COLUMNS}")
        return list(reader)


def _cells(result: Result) -> dict[str, str]:
    spread = result.spread
    numbers = {"rate": result.rate}
    for name in ("median_ms", "low_ms", "high_ms"):
        numbers[name] = getattr(spread, name) if spread else None
    return {
        "contender": result.contender,
        **{name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()},
        "unit": result.unit,
        "note": " ".join(result.note.split()),
    }


def _text(value: object) -> str:
    """Return a value as a cell's text."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())


def _about(device: str) -> dict[str, str]:
    """Return what all rows of a run begin with."""
    return {
        "run": secrets.token_hex(4),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        **{name: _version(name) for name in ("torch", "triton")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
