"""What a frozen package holds of a kernel, read without importing the package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.package.freeze import KERNEL, MANIFEST, PROBLEM, read_json, require_package
from tuner.package.manifest import variants_of
from tuner.records import Source, UsageError, Workload
from tuner.runtime.signature import Signature
from tuner.space.workload import parse_workload

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FrozenFiles:
    """A kernel's folder in a package.

    Attributes:
        folder: The kernel's folder.
        signature: The kernel's arguments.
        manifests: What was frozen, by architecture.
    """

    folder: Path
    signature: Signature
    manifests: Mapping[str, Json]

    @property
    def problem(self) -> Path:
        """The package's copy of the problem."""
        return self.folder / PROBLEM

    def entries(self, arch: str) -> list[Json]:
        """Return the manifest's entries of an architecture, none where nothing was frozen."""
        return list(self.manifests[arch]["workloads"]) if arch in self.manifests else []

    def parse(self, kind: str, text: str) -> Workload:
        """Return the workload that the command line's form describes.

        Args:
            kind: Kind of the device; its dtypes are the allowed ones.
            text: Such as ``"M=512,N=512,K=512"``.

        Raises:
            UsageError: It is no workload of this kernel, or nothing was frozen for the kind.
        """
        return parse_workload(self.signature, self.dtypes(kind), text)

    def dtypes(self, kind: str) -> list[str]:
        """Return the element types that something was frozen for on a kind of device.

        Raises:
            UsageError: Nothing was.
        """
        found = dict.fromkeys(dtype for data in self._of_kind(kind) for dtype in data["defaults"])
        if not found:
            kinds = sorted({data["device"]["kind"] for data in self.manifests.values()})
            raise UsageError(
                f"{self.folder}: nothing was frozen for {kind!r}, only for {', '.join(kinds)}"
            )
        return list(found)

    def workloads(self, arch: str, kind: str) -> list[Workload]:
        """Return what was tuned for an architecture, else for any other one of its kind."""
        found = self.entries(arch) or [
            entry for data in self._of_kind(kind) for entry in data["workloads"]
        ]
        workloads = (codec.from_json(Workload, entry["workload"]) for entry in found)
        return list(dict.fromkeys(workloads))

    def source(self, arch: str, file: str) -> Source:
        """Return a variant's file.

        Raises:
            UsageError: It is missing or not the one that was timed.
        """
        variant = next(item for item in variants_of(self.manifests[arch]) if item["file"] == file)
        path = self.folder / arch / file
        if not path.is_file():
            raise UsageError(f"{path}: is missing; freeze the package again")
        text = path.read_bytes()
        found = hashlib.sha256(text).hexdigest()
        if found != variant["sha256"]:
            raise UsageError(
                f"{path}: is not the file that was timed: its sha256 is {found}, the manifest's "
                f"{variant['sha256']}"
            )
        return Source(self.signature.kernel, variant["language"], text.decode())

    def _of_kind(self, kind: str) -> Iterator[Json]:
        for data in self.manifests.values():
            if data["device"]["kind"] == kind:
                yield data


def read_frozen(package: Path, kernels: Sequence[str] = ()) -> list[FrozenFiles]:
    """Return what a package holds of some kernels, or of all.

    Raises:
        UsageError: The folder is no package, or holds no such kernel.
    """
    if not package.is_dir():
        raise UsageError(f"--package {package}: no such folder")
    try:
        require_package(package)
    except UsageError as error:
        raise UsageError(f"--package {package}: is no package of frozen kernels") from error
    known = sorted(path.parent.name for path in package.glob(f"*/{KERNEL}"))
    for kernel in kernels:
        if kernel not in known:
            raise UsageError(
                f"--package {package}: holds no kernel {kernel!r}; it has: {', '.join(known)}"
            )
    return [_read(package / kernel) for kernel in kernels or known]


def _read(folder: Path) -> FrozenFiles:
    manifests = {
        path.parent.name: read_json(path) for path in sorted(folder.glob(f"*/{MANIFEST}"))
    }
    signature = Signature.from_json(read_json(folder / KERNEL)["signature"])
    return FrozenFiles(folder, signature, manifests)
