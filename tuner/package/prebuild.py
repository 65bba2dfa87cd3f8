"""Builds what a frozen package is to load without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner import codec
from tuner.children.task import Task
from tuner.children.worker import Lethal, Workers
from tuner.package import binaries, manifest
from tuner.package.files import locked
from tuner.package.freeze import KERNEL, MANIFEST, PROBLEM, read_json
from tuner.records import DeviceInfo, Rejection, Workload


@dataclass(frozen=True, slots=True)
class FrozenVariant:
    """A file of a package with the workloads that it serves.

    Attributes:
        path: The file.
        sha256: Of its text, as the manifest says.
        language: Its language.
        tasks: The workloads that it won.
    """

    path: Path
    sha256: str
    language: str
    tasks: tuple[Task, ...]


def frozen_variants(package: Path) -> Iterator[FrozenVariant]:
    """Yield the files of a package that serve workloads, kernel by kernel."""
    for path in sorted(package.glob(f"*/*/{MANIFEST}")):
        kernel = path.parent.parent
        signature = read_json(kernel / KERNEL)["signature"]
        data = read_json(path)
        device = codec.from_json(DeviceInfo, {**data["device"], "versions": {}})
        entries: dict[str, list[manifest.Json]] = {}
        for entry in data["workloads"]:
            entries.setdefault(entry["file"], []).append(entry)
        for file, won in sorted(entries.items()):
            workloads = (codec.from_json(Workload, entry["workload"]) for entry in won)
            tasks = (Task(signature, kernel / PROBLEM, item, device) for item in workloads)
            yield FrozenVariant(
                path.parent / file, won[0]["sha256"], won[0]["language"], tuple(tasks)
            )


def prebuild(variant: FrozenVariant, workers: Workers, scratch: Path) -> Rejection | int:
    """Build a variant for its workloads, and put what was built beside its file.

    Args:
        variant: The variant.
        workers: Whose compile children build it.
        scratch: An empty folder.

    Returns:
        The bytes stored, or why nothing was: then what was stored before stays.
    """
    file = {"path": str(variant.path), "language": variant.language, "folder": str(scratch)}
    futures = [workers.submit(task, edges=None, **file) for task in variant.tasks]
    for future in futures:
        try:
            result = future.result()
        except Lethal as lethal:
            result = lethal.rejection
        if isinstance(result, Rejection):
            return result
    found = (path for path in sorted(scratch.rglob("*")) if path.is_file())
    files = {path.relative_to(scratch).as_posix(): path.read_bytes() for path in found}
    with locked(variant.path.parents[3]):
        binaries.store(variant.path, variant.sha256, files)
    return sum(map(len, files.values()))
