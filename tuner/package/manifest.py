"""The frozen package's data files: what serves which workload, and the evidence for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tuner import codec
from tuner.records import Candidate, Source, UsageError, Winner
from tuner.runtime.variant import SUFFIXES

SCHEMA_VERSION = 1

Json = dict[str, Any]


def manifest_of(
    winners: Sequence[Winner],
    dtypes: Mapping[str, Sequence[str]],
    previous: Json | None = None,
) -> Json:
    """Return the manifest of one kernel on one architecture.

    A workload that was not searched gives its default alone: as an entry of its own it would
    stand between calls and a nearer winner that was tuned.

    Args:
        winners: New winners of the kernel there, at least one.
        dtypes: The element types that each of the kernel's templates serves.
        previous: The manifest to extend; a workload of its own that won anew is replaced.
    """
    entries = {_key(entry): entry for entry in previous["workloads"]} if previous else {}
    defaults = dict(previous["defaults"]) if previous else {}
    for winner in winners:
        if winner.searched:
            entry = _entry(winner)
            entries[_key(entry)] = entry
        default = _variant(winner.default_candidate, winner.default)
        template = winner.default_candidate.template
        tuned = {key[0] for key in entries} - {winner.workload.dtype}
        defaults |= {dtype: default for dtype in dtypes[template] if dtype not in tuned}
    device = codec.to_json(winners[-1].device)
    del device["versions"]  # every workload has its own
    return {
        "schema_version": SCHEMA_VERSION,
        "kernel": winners[0].workload.kernel,
        "device": device,
        "defaults": dict(sorted(defaults.items())),
        "workloads": [entries[key] for key in sorted(entries)],
    }


def with_lacks(manifest: Json, lacks: Callable[[Candidate], Sequence[str]]) -> Json:
    """Return a manifest whose variants say which guarantees they do not give, if any."""
    manifest = copy.deepcopy(manifest)
    for variant in variants_of(manifest):
        variant.pop("lacks", None)
        if names := lacks(codec.from_json(Candidate, variant["candidate"])):
            variant["lacks"] = list(names)
    return manifest


def variants_of(manifest: Json) -> Iterator[Json]:
    """Yield every mention of a variant: its file, sha256, language and candidate."""
    yield from manifest["defaults"].values()
    for entry in manifest["workloads"]:
        yield entry
        yield entry["default"]


def sources_of(winners: Sequence[Winner]) -> dict[str, Source]:
    """Return the rendered files of winners and their defaults by file name."""
    return {
        file_name(candidate, source): source
        for winner in winners
        for candidate, source in (
            (winner.candidate, winner.source),
            (winner.default_candidate, winner.default),
        )
    }


def file_name(candidate: Candidate, source: Source) -> str:
    """Return the name of a variant's file: its template and the beginning of its sha256."""
    return f"{candidate.template}_{source.sha256[:8]}.{SUFFIXES[source.language]}"


def dumps(data: Json) -> str:
    """Return the text of a data file; equal data gives equal bytes."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def loads(text: str, name: str) -> Json:
    """Return the data of a file that `dumps` wrote.

    Raises:
        UsageError: It is not JSON, or of another version of the format.
    """
    try:
        data: Json = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}") from error
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{name} has the schema_version {data.get('schema_version')!r}, but this tuner writes "
            f"{SCHEMA_VERSION}: freeze into another folder"
        )
    return data


def _entry(winner: Winner) -> Json:
    """Return a winner as JSON, its sources replaced by the names of their files."""
    data = codec.to_json(winner)
    return {
        "workload": data["workload"],
        **_variant(winner.candidate, winner.source),
        "measurement": data["measurement"],
        "default": {
            **_variant(winner.default_candidate, winner.default),
            "measurement": data["default_measurement"],
        },
        "gain": data["gain"],
        "rival": {
            "name": data["rival"],
            "measurement": data["rival_measurement"],
            "ratio": data["rival_ratio"],
        }
        if winner.rival
        else None,
        "ties": data["ties"],
        "versions": data["device"]["versions"],
        **{name: data[name] for name in ("protocol", "seed", "date")},
    }


def _variant(candidate: Candidate, source: Source) -> Json:
    return {
        "file": file_name(candidate, source),
        "sha256": source.sha256,
        "language": source.language,
        "candidate": codec.to_json(candidate),
    }


def _key(entry: Json) -> tuple[str, str, tuple[int, ...]]:
    """Return what a workload is found by: they are sorted by dtype, flags and extents."""
    workload = entry["workload"]
    flags = json.dumps(dict(workload["flags"]), sort_keys=True)
    return workload["dtype"], flags, tuple(workload["dims"].values())
