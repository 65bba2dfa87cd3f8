"""What a frozen package has that its sources would no longer give."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tuner import codec
from tuner.package import binaries, manifest
from tuner.package.freeze import (
    KERNEL,
    MANIFEST,
    PROBLEM,
    RUNTIME,
    Freezer,
    FrozenKernel,
    read_json,
    require_package,
    runtime_files,
    unreferenced,
)
from tuner.records import Candidate, UsageError
from tuner.render import Renderer


def check(
    output: Path, kernels: Sequence[FrozenKernel], renderer: Renderer, *, templates: Path
) -> list[str]:
    """Return the drifts of a frozen package, none when it is what its sources give.

    Args:
        output: Folder of the package.
        kernels: The kernels as they are now.
        renderer: Renders the candidates of the manifests anew.
        templates: Folder that holds ``package/``, the package's own templates.

    Raises:
        UsageError: The folder is no frozen package.
    """
    require_package(output)
    known = {kernel.name: kernel for kernel in kernels}
    drifts = list(_texts(output / RUNTIME, runtime_files()))
    for path in sorted(output.glob(f"*/{KERNEL}")):
        name = path.parent.name
        if name in known:
            drifts += _kernel(path.parent, known[name], renderer)
        else:
            drifts.append(f"{path.parent}: there is no kernel {name!r}; is its --kernels missing?")
    drifts += _texts(output, Freezer(output, templates).own_files())
    drifts += [f"{path}: nothing refers to it" for path in unreferenced(output)]
    return drifts


def _kernel(folder: Path, kernel: FrozenKernel, renderer: Renderer) -> Iterator[str]:
    texts = {
        KERNEL: manifest.dumps(kernel.to_json()),
        PROBLEM: kernel.problem.read_text(encoding="utf-8"),
    }
    yield from _texts(folder, texts)
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        seen: dict[str, manifest.Json] = {}
        data = read_json(path)
        if manifest.with_lacks(data, kernel.lacks) != data:
            yield f"{path}: out of date about the guarantees that variants do not give"
        for variant in manifest.variants_of(data):
            seen.setdefault(variant["file"], variant)
        for file, variant in sorted(seen.items()):
            if drift := _variant(path.parent / file, variant, renderer, kernel.name):
                yield drift
            yield from binaries.drifts(path.parent / file, variant["sha256"])


def _variant(path: Path, variant: manifest.Json, renderer: Renderer, kernel: str) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    if hashlib.sha256(path.read_bytes()).hexdigest() != variant["sha256"]:
        return f"{path}: changed since it was timed (its sha256 is not the manifest's)"
    candidate = codec.from_json(Candidate, variant["candidate"])
    try:
        source = renderer.render(kernel, variant["language"], candidate)
    except UsageError as error:
        return f"{path}: {candidate} does not render any more: {error}"
    if source.sha256 != variant["sha256"]:
        return f"{path}: {candidate} renders to another text since it was timed"
    return None


def _texts(folder: Path, texts: dict[str, str]) -> Iterator[str]:
    for name, text in texts.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing"
        elif path.read_text(encoding="utf-8") != text:
            yield f"{path}: out of date"
