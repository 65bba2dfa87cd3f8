"""The binaries in a frozen package: a list beside each variant's says which are its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tuner.package import manifest
from tuner.package.files import PARTIAL, replace
from tuner.runtime.prebuilt import FOLDER, folder_of


def store(variant: Path, sha256: str, files: Mapping[str, bytes]) -> None:
    """Give a variant its binaries instead of those that it had.

    Args:
        variant: The variant's file.
        sha256: Of its text.
        files: The binaries by their paths in its folder.
    """
    folder = folder_of(variant)
    for name, content in files.items():
        replace(folder / name, content)
    digests = {name: _sha256(content) for name, content in files.items()}
    listed = {"schema_version": manifest.SCHEMA_VERSION, "sha256": sha256, "files": digests}
    replace(_list_of(variant), manifest.dumps(listed))
    for path in _files(folder):
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
    remove_empty_folders(variant.parent)


def unreferenced(arch: Path, variants: Iterable[str]) -> Iterator[Path]:
    """Yield the files among an architecture's binaries that belong to none of its variants.

    Args:
        arch: The architecture's folder.
        variants: Names of the variants' files.
    """
    listed = set()
    for variant in (arch / name for name in variants):
        listed |= {_list_of(variant), *(folder_of(variant) / name for name in _listed(variant))}
    yield from (path for path in _files(arch / FOLDER) if path not in listed)


def drifts(variant: Path, sha256: str) -> Iterator[str]:
    """Yield what is wrong with a variant's binaries, if it has any.

    Args:
        variant: The variant's file.
        sha256: Of its text, as the manifest says.
    """
    path = _list_of(variant)
    if path.is_file() and _read(path)["sha256"] != sha256:
        yield f"{path}: of another source than {variant.name}"
    for name, digest in _listed(variant).items():
        binary = folder_of(variant) / name
        if not binary.is_file():
            yield f"{binary}: missing"
        elif _sha256(binary.read_bytes()) != digest:
            yield f"{binary}: changed since it was built"


def remove_empty_folders(arch: Path) -> None:
    """Remove what the binaries of variants that are no more leave behind."""
    folders = [path for path in (arch / FOLDER).rglob("*") if path.is_dir()]
    for folder in (*sorted(folders, reverse=True), arch / FOLDER):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _list_of(variant: Path) -> Path:
    return folder_of(variant).with_suffix(".json")


def _listed(variant: Path) -> dict[str, str]:
    """Return the digests of a variant's binaries by their paths in its folder."""
    path = _list_of(variant)
    return dict(_read(path)["files"]) if path.is_file() else {}


def _read(path: Path) -> manifest.Json:
    return manifest.loads(path.read_text(encoding="utf-8"), str(path))


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, but for those that are being written."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if path.suffix != PARTIAL]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
