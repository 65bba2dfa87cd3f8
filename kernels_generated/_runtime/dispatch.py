"""Which frozen variant serves a call: exactly tuned, nearest, or default, in that order."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from .architecture import architecture, device_kind
from .flags import GUARANTEES, Scalar
from .signature import Signature

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """The variant that serves a shape, and why.

    Attributes:
        kernel: Name of the kernel.
        arch: Architecture that the variant was frozen for: the name of its folder.
        file: Name of the variant's file in that folder.
        language: Language of the file.
        reason: ``"exact"``: tuned for this very workload; ``"nearest"``: tuned for another one;
            ``"default"``: the default candidate, for nothing near was tuned.
        workload: The workload that it was tuned for, as the command line spells it.
        median_ms: Its median time there, in milliseconds.
        low_ms: Lower end of the 95 % interval of the median.
        high_ms: Upper end of that interval.
    """

    kernel: str
    arch: str
    file: str
    language: str
    reason: Literal["exact", "nearest", "default"]
    workload: str | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None

    def __str__(self) -> str:
        """Return one line: the file, the reason, and what it was tuned for."""
        said = f"{self.kernel}/{self.arch}/{self.file} ({self.reason}"
        if self.workload is None:
            return f"{said})"
        said += "" if self.reason == "exact" else ": tuned for"
        return (
            f"{said} {self.workload}, "
            f"{self.median_ms:.4g} ms [{self.low_ms:.4g}, {self.high_ms:.4g}])"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A workload of a manifest with the variant that won it; `data` is its JSON."""

    dims: Mapping[str, int]
    dtype: str
    flags: Mapping[str, Scalar]
    data: Mapping[str, Any]

    def distance(self, extents: Mapping[str, int]) -> float:
        """Return the sum over the dims of abs(log(ratio of the extents))."""
        return sum(
            abs(math.log(max(extent, 1) / max(extents[dim], 1)))
            for dim, extent in self.dims.items()
        )

    def unlike(self, flags: Mapping[str, Scalar]) -> int:
        """Return 0 for equal flags, 1 if they differ in guarantees only, else 2."""
        differ = {name for name, _ in self.flags.items() ^ flags.items()}
        return 0 if not differ else 1 if differ.issubset(GUARANTEES) else 2

    def __str__(self) -> str:
        """Return the command line's form of the workload."""
        values = {**self.dims, **self.flags, "dtype": self.dtype}
        return ",".join(
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in values.items()
        )


class Manifest:
    """What was frozen for one kernel on one architecture.

    Args:
        folder: The architecture's folder, which holds the manifest and the variants' files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        self.kind = str(self.data["device"]["kind"])
        self.entries = tuple(_entry(item) for item in self.data["workloads"])

    def choose(
        self, extents: Mapping[str, int], dtype: str, flags: Mapping[str, Scalar]
    ) -> Choice | None:
        """Return the choice for a workload on the manifest's architecture.

        The exact workload; else, among those of the same dtype whose variants give the
        guarantees that are asked for, the nearest (`Entry.distance`) with the same flags; else
        the nearest; else the default of that dtype; else None.
        """
        candidates = [
            entry for entry in self.entries if entry.dtype == dtype and gives(entry.data, flags)
        ]
        if not candidates:
            return self.default(dtype, flags)
        entry = min(candidates, key=lambda entry: (entry.unlike(flags), entry.distance(extents)))
        exact = entry.flags == flags and entry.dims == extents
        measurement = entry.data["measurement"]
        return Choice(
            *self._names(entry.data),
            "exact" if exact else "nearest",
            str(entry),
            *(measurement[key] for key in ("median_ms", "low_ms", "high_ms")),
        )

    def default(self, dtype: str, flags: Mapping[str, Scalar]) -> Choice | None:
        """Return the default candidate's variant for a dtype, or None where nothing serves it."""
        data = self.data["defaults"].get(dtype)
        return Choice(*self._names(data), "default") if data and gives(data, flags) else None

    def _names(self, data: Mapping[str, Any]) -> tuple[str, str, str, str]:
        return self.data["kernel"], self.folder.name, data["file"], data["language"]


class Dispatch:
    """Finds the variant of a kernel for a call.

    Args:
        package: Name of the package, for messages.
        folder: The kernel's folder, with one folder per architecture.
        signature: Signature of the kernel.
    """

    _warned: ClassVar[set[tuple[str, str, str]]] = set()

    def __init__(self, package: str, folder: Path, signature: Signature) -> None:
        self.package, self.folder, self.signature = package, folder, signature

    @cached_property
    def manifests(self) -> Sequence[Manifest]:
        """The manifests of all architectures, by name."""
        return [Manifest(path.parent) for path in sorted(self.folder.glob(f"*/{MANIFEST}"))]

    def choose(
        self,
        extents: Mapping[str, int],
        *,
        dtype: str,
        flags: Mapping[str, Scalar],
        device: torch.device,
    ) -> Choice:
        """Return the choice for a call; a device that was not tuned for gets a default.

        Raises:
            NotImplementedError: No variant serves the device, the dtype and the guarantees.
        """
        arch, kind = architecture(device), device_kind(device)
        found: Choice | None = None
        for manifest in self.manifests:
            if manifest.folder.name == arch:
                found = manifest.choose(extents, dtype, flags)
        if found is None:
            found = next(self._foreign_defaults(dtype, kind, flags), None)
            if found is not None:
                self._warn(dtype, arch, kind)
        if found is None:
            asked = self.signature.asked(flags)
            raise NotImplementedError(self._no_variant(" ".join([*asked, dtype]), arch, kind))
        return found

    def only_dtype(self, device: torch.device) -> str:
        """Return the only element type that was tuned for a kind of device, or is served there.

        Raises:
            ValueError: There are several.
            NotImplementedError: There is none.
        """
        mine = [item for item in self.manifests if item.kind == device_kind(device)]
        tuned = {entry.dtype for item in mine for entry in item.entries}
        served = {name for item in mine for name in item.data["defaults"]}
        for names in (tuned, served):
            if len(names) == 1:
                return names.pop()
        if not served:
            raise NotImplementedError(
                self._no_variant("any dtype", architecture(device), device_kind(device))
            )
        raise ValueError(
            f"{self.package}.{self.signature.kernel}: dtype must be given: one of "
            f"{', '.join(sorted(served))}"
        )

    def _foreign_defaults(
        self, dtype: str, kind: str, flags: Mapping[str, Scalar]
    ) -> Iterator[Choice]:
        """Yield the defaults of the kind's other architectures, the latest frozen first."""
        manifests = [manifest for manifest in self.manifests if manifest.kind == kind]
        for manifest in sorted(manifests, key=_date, reverse=True):
            if default := manifest.default(dtype, flags):
                yield default

    def _warn(self, dtype: str, arch: str, kind: str) -> None:
        """Say once per architecture and dtype that nothing was tuned for it."""
        if (self.package, arch, dtype) not in self._warned:
            self._warned.add((self.package, arch, dtype))
            warnings.warn(
                f"{self.package}.{self.signature.kernel} was not tuned for {dtype} on {arch}: a "
                "default serves it, and any other kernel that was not; "
                f"`tune --device {kind}` tunes them for this machine",
                stacklevel=2,
            )

    def _no_variant(self, dtype: str, arch: str, kind: str) -> str:
        served = [
            f"{name} on {manifest.folder.name}"
            for manifest in self.manifests
            for name in manifest.data["defaults"]
        ]
        return (
            f"{self.package}.{self.signature.kernel} has no variant for {dtype} on {arch}; it has "
            f"{', '.join(served) or 'none'}; `tune {self.signature.kernel} --device {kind}` "
            "makes one where a template serves that dtype"
        )


def gives(variant: Mapping[str, Any], flags: Mapping[str, Scalar]) -> bool:
    """Return whether a manifest's variant gives the guarantees that flags ask for."""
    return not any(flags.get(name) for name in variant.get("lacks", ()))


def _entry(data: Mapping[str, Any]) -> Entry:
    workload = data["workload"]
    return Entry(dict(workload["dims"]), workload["dtype"], dict(workload["flags"]), data)


def _date(manifest: Manifest) -> str:
    return max((str(entry.data["date"]) for entry in manifest.entries), default="")
