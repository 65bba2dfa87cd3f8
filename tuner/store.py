"""The append-only log of trials and winners: a line each, on disk before the next is asked."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.records import (
    Candidate,
    DeviceInfo,
    Outcome,
    Rejection,
    Trial,
    TunerError,
    UsageError,
    Winner,
    Workload,
)

SCHEMA_VERSION = 1


class Store:
    """Everything that runs on one architecture have found.

    Several processes may write to one store: a line is appended under a lock, and each process
    reads what the others wrote with `refresh`. A line torn by a kill is skipped.

    Args:
        root: Folder of all stores.
        arch: Architecture that the trials belong to.
        card: Name of what measures the trials that are added, such as ``"cuda:1"``.
    """

    def __init__(self, root: Path, arch: str, card: str | None = None) -> None:
        self._card = card
        self.folder = root / arch
        self.sources = root / "sources"
        self.cache = root / "cache"
        for folder in (self.folder, self.sources, self.cache):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = self.folder / "trials.jsonl"
        self._reset()
        self.refresh()

    def _reset(self, inode: int | None = None) -> None:
        """Know nothing yet, of a log with this number."""
        self._inode = inode
        self._offset = self._lines = 0
        self._trials: list[Trial] = []
        self._winners: dict[Workload, Winner] = {}
        self._quarantine: dict[str, Rejection] = {}
        self._refused: dict[tuple[Workload, str], Rejection] = {}
        self.device: DeviceInfo | None = None
        self.damaged_lines = 0

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials in the order in which they finished."""
        return tuple(self._trials)

    @property
    def winners(self) -> tuple[Winner, ...]:
        """The latest winner of each workload."""
        return tuple(self._winners.values())

    def quarantined(self, source_sha256: str) -> Rejection | None:
        """Return how a source killed its child, if it ever did."""
        return self._quarantine.get(source_sha256)

    def refused(self, workload: Workload, source_sha256: str) -> Rejection | None:
        """Return why the compiler refused a source for a workload, if it was compiled ahead."""
        return self._refused.get((workload, source_sha256))

    def refresh(self) -> None:
        """Read the lines that were appended since the last call, by whatever process.

        Raises:
            TunerError: A line was written by a newer version, or by something else.
        """
        if not self.path.exists():
            self._reset()
            return
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # the first look, or another process began anew
                self._reset(inode)
            file.seek(self._offset)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        for line in data[:complete].splitlines():
            self._read(line)

    def begin(self, device: DeviceInfo) -> None:
        """Append what the trials from here on are measured with, unless it is as before."""
        self.refresh()
        if device != self.device:
            self._append(lambda: {"device": codec.to_json(device)})

    def add_trial(
        self,
        workload: Workload,
        candidate: Candidate,
        source_sha256: str,
        outcome: Outcome,
        *,
        seconds: float,
    ) -> Trial:
        """Append a trial; its number is the next one of the store."""

        def entry() -> dict[str, Any]:
            number, ended_s = len(self._trials), round(time.time(), 6)
            what = (number, workload, candidate, source_sha256, outcome)
            trial = Trial(*what, seconds, ended_s, self._card)
            return {"trial": codec.to_json(trial)}

        self._append(entry)
        return self._trials[-1]

    def add_quarantine(self, source_sha256: str, rejection: Rejection) -> None:
        """Append that a source killed its child; it is not tried again on this architecture."""
        entry = {"source_sha256": source_sha256, "rejection": codec.to_json(rejection)}
        self._append(lambda: {"quarantine": entry})

    def add_refusal(self, workload: Workload, source_sha256: str, rejection: Rejection) -> None:
        """Append that the compiler refuses a source; a run on the device believes it."""
        entry = {
            "workload": codec.to_json(workload),
            "source_sha256": source_sha256,
            "rejection": codec.to_json(rejection),
        }
        self._append(lambda: {"refusal": entry})

    def add_winner(self, winner: Winner) -> None:
        """Append the winner of a workload; it replaces the one before."""
        self._append(lambda: {"winner": codec.to_json(winner)})

    def forget(self) -> None:
        """Set the log aside, so that a run starts anew; nothing is deleted."""
        with self._locked():
            if self.path.exists():
                count = len(list(self.folder.glob("trials.*.jsonl")))
                self.path.rename(self.folder / f"trials.{count + 1}.jsonl")
        self._reset()

    def _append(self, entry: Callable[[], dict[str, Any]]) -> None:
        with self._locked():
            self.refresh()
            with self.path.open("ab", buffering=0) as file:
                if file.tell() > self._offset:  # a kill left a torn line: end it
                    file.write(b"\n")
                    self.refresh()
                file.write(log_line(entry()))
                os.fsync(file.fileno())
            self.refresh()

    def _read(self, line: bytes) -> None:
        self._lines += 1
        entry = read_line(line, self.path)
        if entry is None:
            self.damaged_lines += bool(line)
            return
        match decode(entry, f"{self.path}:{self._lines}"):
            case Trial() as trial:
                self._trials.append(trial)
            case Winner() as winner:
                self._winners[winner.workload] = winner
            case DeviceInfo() as device:
                self.device = device
            case (Workload() as workload, str(sha256), Rejection() as rejection):
                self._refused[workload, sha256] = rejection
            case (str(sha256), Rejection() as rejection):
                self._quarantine[sha256] = rejection

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def log_line(entry: dict[str, Any]) -> bytes:
    """Return a line of the log."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **entry}).encode() + b"\n"


def read_line(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return what a line of a log says, None if it is damaged.

    Raises:
        TunerError: It was written by a newer version.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    version = entry.get("schema_version") if isinstance(entry, dict) else None
    if not isinstance(version, int):
        return None
    if version > SCHEMA_VERSION:
        raise TunerError(
            f"{path}: schema_version {version} is newer than {SCHEMA_VERSION}: update tuner or "
            "use another --store"
        )
    return dict(entry)


def decode(entry: dict[str, Any], place: str) -> object:
    """Return the record or records that the entry at a place stands for, None for another kind.

    Raises:
        TunerError: It has another form than this version writes.
    """
    try:
        for name, kind in (("trial", Trial), ("winner", Winner), ("device", DeviceInfo)):
            if name in entry:
                return codec.from_json(kind, entry[name])
        if "quarantine" in entry:
            item = entry["quarantine"]
            return item["source_sha256"], codec.from_json(Rejection, item["rejection"])
        if "refusal" in entry:
            item = entry["refusal"]
            workload = codec.from_json(Workload, item["workload"])
            return workload, item["source_sha256"], codec.from_json(Rejection, item["rejection"])
    except (TunerError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, TunerError) else f"{type(error).__name__} {error}"
        raise TunerError(
            f"{place}: is not as this version writes it: {reason}; use another --store"
        ) from error
    return None


def open_stores(root: Path) -> list[Store]:
    """Return the stores of every architecture under a folder.

    Raises:
        UsageError: The folder holds no store.
    """
    archs = sorted(path.parent.name for path in root.glob("*/trials.jsonl"))
    if not archs:
        raise UsageError(f"--store {root}: there are no trials; run `tune` first")
    return [Store(root, arch) for arch in archs]
