"""Stores of several machines to one store: nothing twice, and nothing mixed that differs."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.records import UsageError
from tuner.store import decode, log_line, read_line

Json = dict[str, Any]
Maker = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a device and the versions on it: times of one maker can be compared."""

UNKNOWN: Maker = ("unknown", ())
_PARTIAL = ".part"


@dataclass(slots=True)
class MergedLog:
    """The log of one architecture and maker.

    Attributes:
        arch: The architecture.
        maker: What it was measured with.
        name: The folder that it goes to.
        trials: In the order in which they ended.
        winners: A later one replaces an earlier one of its workload.
        replaced: Keys of winners that a store replaced already.
        others: Devices, quarantines and refusals.
        doubled: Trials that several stores have.
        repeated: Trials whose candidate another trial had already, with another outcome.
        rivals: Winners that another winner of their workload replaces.
    """

    arch: str
    maker: Maker
    name: str = ""
    trials: dict[str, Json] = field(default_factory=dict)
    winners: dict[str, Json] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    others: dict[str, Json] = field(default_factory=dict)
    doubled: int = 0
    repeated: int = 0
    rivals: list[str] = field(default_factory=list)

    @property
    def latest_s(self) -> float:
        """When its last trial ended."""
        return max((_ended_s(trial) for trial in self.trials.values()), default=-math.inf)


def merge(roots: Sequence[Path], output: Path) -> list[MergedLog]:
    """Write the union of stores and return what went where.

    Logs of one architecture that were measured with another device or other versions lie in
    folders of their own: the latest keeps the architecture's name, so that a run continues it.

    Args:
        roots: Folders of stores.
        output: The new folder.

    Raises:
        UsageError: A folder holds no store, or the output exists.
    """
    if output.exists():
        raise UsageError(f"--output {output}: it exists; name a folder that does not")
    logs: dict[tuple[str, Maker], MergedLog] = {}
    for root in {path.resolve(): path for path in roots}.values():
        paths = sorted(root.glob("*/trials.jsonl"))
        if not paths:
            raise UsageError(f"{root}: there are no trials; name folders of stores")
        for path in paths:
            arch = path.parent.name.partition("@")[0]
            latest: dict[tuple[Maker, str], str] = {}
            for maker, entry in _entries(path):
                log = logs.setdefault((arch, maker), MergedLog(arch, maker))
                _add(log, entry)
                if "winner" in entry:
                    key, place = _key(entry["winner"]), (maker, _key(entry["winner"]["workload"]))
                    log.replaced.update({latest.get(place, key)} - {key})
                    latest[place] = key
    merged = list(logs.values())
    _name(merged)
    staging = output.with_name(f".{output.name}{_PARTIAL}")
    shutil.rmtree(staging, ignore_errors=True)  # left by one that was killed
    for log in merged:
        _write(log, staging / log.name)
    _copy_sources(roots, staging / "sources")
    staging.rename(output)
    return merged


def _entries(path: Path) -> Iterator[tuple[Maker, Json]]:
    """Yield the entries of a log, each with its maker.

    A log that does not begin with a device was written before logs said it: its first winner does.
    """
    lines = path.read_bytes().splitlines()
    entries = []
    for number, line in enumerate(lines, 1):
        if (entry := read_line(line, path)) is not None:
            decode(
                entry, f"{path}:{number}"
            )  # refuses what the merged store could not be read for
            entries.append(entry)
    devices = [entry["winner"]["device"] for entry in entries if "winner" in entry]
    maker = _maker(devices[0]) if devices else UNKNOWN
    for entry in entries:
        if "device" in entry:
            maker = _maker(entry["device"])
        elif "winner" in entry:
            yield _maker(entry["winner"]["device"]), entry
            continue
        yield maker, entry


def folder_name(arch: str, maker: Maker, others: Sequence[Maker]) -> str:
    """Return a store's folder that tells a maker from others on the same architecture."""
    return f"{arch}@{re.sub(r'[^A-Za-z0-9.+_-]+', '_', _spell(maker, others))}"


def _maker(device: Json) -> Maker:
    return device["name"], tuple(sorted(device["versions"].items()))


def _add(log: MergedLog, entry: Json) -> None:
    if "trial" in entry:
        trial = {name: value for name, value in entry["trial"].items() if name != "number"}
        key = _key(trial)
        log.doubled += key in log.trials
        log.trials.setdefault(key, trial)
    elif "winner" in entry:
        log.winners.setdefault(_key(entry["winner"]), entry["winner"])
    else:
        entry.pop("schema_version")
        log.others.setdefault(_key(entry), entry)


def _key(data: Json) -> str:
    return json.dumps(data, sort_keys=True)


def _name(logs: Sequence[MergedLog]) -> None:
    """Give every log a folder: the latest of an architecture has its name, others say more."""
    for log in logs:
        same = [other for other in logs if other.arch == log.arch]
        if log is max(same, key=lambda other: other.latest_s):
            log.name = log.arch
            continue
        others = [other.maker for other in same if other is not log]
        log.name = folder_name(log.arch, log.maker, others)
        while log.name in {other.name for other in same if other is not log}:
            log.name += "_"


def _spell(maker: Maker, others: Sequence[Maker]) -> str:
    """Return what tells a maker from others."""
    name, versions = maker
    parts = [name] if any(name != other for other, _ in others) else []
    parts += [
        f"{tool}-{version}"
        for tool, version in versions
        if any(dict(other).get(tool) != version for _, other in others)
    ]
    return "_".join(parts) or name


def _write(log: MergedLog, folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    trials = sorted(log.trials.values(), key=_ended_s)  # stable where nothing says when
    seen: dict[str, Json] = {}
    for trial in trials:
        tried = _key({name: trial[name] for name in ("workload", "candidate", "source_sha256")})
        log.repeated += tried in seen and seen[tried] != trial["outcome"]
        seen[tried] = trial["outcome"]
    # Of several winners of a workload the last counts: what was searched, what no store has
    # replaced, the later day, the faster.
    winners = sorted(log.winners.values(), key=lambda item: _rank(log, item))
    last = {_key(winner["workload"]): winner for winner in winners}
    for winner in winners:
        final = last[_key(winner["workload"])]
        if winner["candidate"] != final["candidate"] and _key(winner) not in log.replaced:
            log.rivals.append(f"{winner['workload']['kernel']} {_spell_workload(winner)}")
    with (folder / "trials.jsonl").open("xb") as file:
        for entry in sorted(log.others.values(), key=lambda entry: "device" not in entry):
            file.write(log_line(entry))  # devices first: they tell whose the rest is
        for number, trial in enumerate(trials):
            file.write(log_line({"trial": {"number": number, **trial}}))
        for winner in winners:
            file.write(log_line({"winner": winner}))


def _rank(log: MergedLog, winner: Json) -> tuple[bool, bool, str, float]:
    return (
        winner.get("searched", True),
        _key(winner) not in log.replaced,
        winner["date"],
        -winner["measurement"]["median_ms"],
    )


def _spell_workload(winner: Json) -> str:
    workload: Mapping[str, Any] = winner["workload"]
    pairs = {**workload["dims"], **workload["flags"], "dtype": workload["dtype"]}
    return ",".join(f"{name}={value}" for name, value in pairs.items())


def _ended_s(trial: Json) -> float:
    ended_s = trial.get("ended_s")
    return -math.inf if ended_s is None else float(ended_s)


def _copy_sources(roots: Sequence[Path], target: Path) -> None:
    """Copy the rendered files: their names are their hashes, so that equal names are equal."""
    target.mkdir(mode=0o700)
    for root in roots:
        for path in sorted((root / "sources").glob("*")):
            if path.suffix != _PARTIAL and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)
