"""A frozen package back to the winners that it was made of."""

from __future__ import annotations

from pathlib import Path

from tuner import codec
from tuner.package import manifest
from tuner.package.freeze import KERNEL, MANIFEST, read_json, require_package
from tuner.records import Source, UsageError, Winner


def package_winners(folder: Path) -> list[Winner]:
    """Return the winners of every kernel and architecture in a package.

    Raises:
        UsageError: The folder is no frozen package, or a file of it is missing or damaged.
    """
    require_package(folder)
    winners = []
    for path in sorted(folder.glob(f"*/*/{MANIFEST}")):
        if (path.parent.parent / KERNEL).is_file():
            data = read_json(path)
            try:
                winners += [_winner(path.parent, data, entry) for entry in data["workloads"]]
            except KeyError as error:
                raise UsageError(f"{path}: lacks {error}") from error
    return winners


def _winner(folder: Path, data: manifest.Json, entry: manifest.Json) -> Winner:
    default, rival = entry["default"], entry["rival"] or {}
    fields = {
        **{name: entry[name] for name in ("workload", "candidate", "measurement", "gain", "ties")},
        **{name: entry[name] for name in ("protocol", "seed", "date")},
        "source": _source(folder, data["kernel"], entry),
        "default_candidate": default["candidate"],
        "default_measurement": default["measurement"],
        "default": _source(folder, data["kernel"], default),
        "rival": rival.get("name"),
        "rival_measurement": rival.get("measurement"),
        "rival_ratio": rival.get("ratio"),
        "device": {**data["device"], "versions": entry["versions"]},
    }
    return codec.from_json(Winner, fields)


def _source(folder: Path, kernel: str, variant: manifest.Json) -> manifest.Json:
    path = folder / variant["file"]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    return {**codec.to_json(Source(kernel, variant["language"], text))}
