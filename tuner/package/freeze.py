"""Winners to an importable package that needs no tuner; it is whole at every moment."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tuner.package import binaries, manifest
from tuner.package.files import PARTIAL, locked, replace
from tuner.package.functions import Autograd, check_name, functions_of
from tuner.records import Candidate, UsageError, Winner
from tuner.runtime.signature import Signature

__all__ = ["Autograd", "FrozenKernel", "freeze"]

RUNTIME = "_runtime"
MANIFEST = "manifest.json"
KERNEL = "kernel.json"
PROBLEM = "problem.py"

_RUNTIME_SOURCES = Path(__file__).parent.parent / "runtime"
_MARKER = "copied into every frozen package"  # in the docstring of the runtime's __init__.py
_VARIANT = re.compile(r".+_[0-9a-f]{8}\.(cpp|py)")


@dataclass(frozen=True, slots=True)
class FrozenKernel:
    """What a package says of a kernel, besides its winners.

    Attributes:
        signature: Its arguments.
        summary: One line of mathematics.
        problem: The problem's file: reference, tolerance, edge shapes.
        dtypes: The element types that each of its templates serves.
        autograd: The differentiable operation that it is the forward half of.
        lacks: Returns the guarantees of the signature that a candidate does not give.
    """

    signature: Signature
    summary: str
    problem: Path
    dtypes: Mapping[str, Sequence[str]]
    autograd: Autograd | None = None
    lacks: Callable[[Candidate], Sequence[str]] = lambda _: ()

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.signature.kernel

    def to_json(self) -> manifest.Json:
        """Return what its ``kernel.json`` holds."""
        autograd = self.autograd and {
            "operation": self.autograd.operation,
            "returns": list(self.autograd.returns),
            "backward": self.autograd.backward,
        }
        return {
            "schema_version": manifest.SCHEMA_VERSION,
            "summary": self.summary,
            "signature": self.signature.to_json(),
            "autograd": autograd,
        }


def freeze(
    winners: Sequence[Winner], kernels: Sequence[FrozenKernel], output: Path, *, templates: Path
) -> None:
    """Write winners into a package, or add them to it; the same winners give the same bytes.

    What the package has of other kernels, architectures and workloads stays. A process that is
    killed at any moment leaves the package as it was or with some of the winners in it.

    Args:
        winners: The variants to freeze.
        kernels: The kernels that they are of, and those whose files in the package are to be
            brought up to date; what has neither winners nor a folder there is ignored.
        output: Folder of the package; its name is the name to import.
        templates: Folder that holds ``package/``, the package's own templates.

    Raises:
        UsageError: The folder holds something else, its name cannot be imported, or a kernel
            does not fit what the package has of it.
    """
    check_output(output)
    known = {kernel.name: kernel for kernel in kernels}
    won = {winner.workload.kernel for winner in winners}
    if missing := won.difference(known):
        raise UsageError(f"winners of kernels that are not given: {', '.join(sorted(missing))}")
    chosen = [
        known[name] for name in sorted(known) if name in won or (output / name / KERNEL).is_file()
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.parent):
        if output.exists() and any(output.iterdir()):
            Freezer(output, templates).write(winners, chosen)
            return
        if not winners:
            raise UsageError(f"{output}: there are no winners to make a package of")
        staging = output.with_name(f".{output.name}{PARTIAL}")
        shutil.rmtree(staging, ignore_errors=True)  # left by one that was killed
        Freezer(staging, templates).write(winners, chosen)
        staging.replace(output)


def check_output(output: Path) -> None:
    """Raise UsageError unless a package may be written to a folder: a new, empty or frozen one."""
    check_name(output.name)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        require_package(output)


def require_package(folder: Path) -> None:
    """Raise UsageError unless a folder is a frozen package."""
    marker = folder / RUNTIME / "__init__.py"
    if not marker.is_file() or _MARKER not in marker.read_text(encoding="utf-8"):
        raise UsageError(
            f"{folder} is not a package of frozen kernels: choose another --output or remove it"
        )


class Freezer:
    """Writes into one package; readers may import it at the same time.

    Args:
        folder: The package.
        templates: Folder that holds ``package/``.
    """

    def __init__(self, folder: Path, templates: Path) -> None:
        self.folder = folder
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(templates / "package"),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,  # source code, not HTML
        )

    def write(self, winners: Sequence[Winner], kernels: Sequence[FrozenKernel]) -> None:
        """Write the winners: what a file refers to is there before the file is."""
        groups: dict[tuple[str, str], list[Winner]] = {}
        for item in winners:
            groups.setdefault((item.workload.kernel, item.device.arch), []).append(item)
        for (owner, arch), group in sorted(groups.items()):
            for name, source in manifest.sources_of(group).items():
                replace(self.folder / owner / arch / name, source.text)
        for name, text in runtime_files().items():
            replace(self.folder / RUNTIME / name, text)
        for kernel in kernels:
            self._write_kernel(kernel, {arch for owner, arch in groups if owner == kernel.name})
        dtypes = {kernel.name: kernel.dtypes for kernel in kernels}
        for (owner, arch), group in sorted(groups.items()):
            path = self.folder / owner / arch / MANIFEST
            previous = read_json(path) if path.exists() else None
            extended = manifest.manifest_of(group, dtypes[owner], previous)
            replace(path, manifest.dumps(extended))
        self._write_lacks(kernels)
        for name, text in self.own_files().items():
            replace(self.folder / name, text)
        for path in unreferenced(self.folder):
            path.unlink()
        for folder in self.folder.glob("*/*"):
            binaries.remove_empty_folders(folder)

    def _write_lacks(self, kernels: Sequence[FrozenKernel]) -> None:
        for kernel in kernels:
            for path in sorted((self.folder / kernel.name).glob(f"*/{MANIFEST}")):
                replace(path, manifest.dumps(manifest.with_lacks(read_json(path), kernel.lacks)))

    def own_files(self) -> dict[str, str]:
        """Return the files that follow from the kernels in the package, ``__init__.py`` last."""
        kernels = {}
        for path in sorted(self.folder.glob(f"*/{KERNEL}")):
            data = read_json(path)
            section = data["autograd"]
            autograd = section and Autograd(
                section["operation"], tuple(section["returns"]), section["backward"]
            )
            signature = Signature.from_json(data["signature"])
            kernels[path.parent.name] = (signature, data["summary"], autograd)
        files = {"py.typed": ""}
        files |= {name: self._render(f"{name}.j2") for name in ("__main__.py", "moe.py")}
        return files | {"__init__.py": self._render("__init__.py.j2", functions_of(kernels))}

    def _render(self, template: str, functions: Sequence[Any] = ()) -> str:
        return self._environment.get_template(template).render(functions=functions)

    def _write_kernel(self, kernel: FrozenKernel, archs: set[str]) -> None:
        """Write what a kernel's architectures share."""
        path = (folder := self.folder / kernel.name) / KERNEL
        known = Signature.from_json(read_json(path)["signature"]) if path.exists() else None
        if known and not kernel.signature.called_like(known):
            others = sorted({item.parent.name for item in folder.glob(f"*/{MANIFEST}")} - archs)
            if others:
                raise UsageError(
                    f"{folder}: the signature changed, and the variants of {', '.join(others)} "
                    "have the old one: remove that folder to freeze the new one"
                )
            for arch in archs:  # variants with other arguments must not be called
                (folder / arch / MANIFEST).unlink(missing_ok=True)
        replace(folder / PROBLEM, kernel.problem.read_bytes())
        replace(path, manifest.dumps(kernel.to_json()))


def runtime_files() -> dict[str, str]:
    """Return the texts of the runtime, which every package has a copy of, by path in it."""
    return {
        path.relative_to(_RUNTIME_SOURCES).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(_RUNTIME_SOURCES.rglob("*.py"))
    }


def unreferenced(folder: Path) -> Iterator[Path]:
    """Yield the files of a package that nothing in it refers to."""
    runtime = {folder / RUNTIME / name for name in runtime_files()}
    yield from (path for path in sorted((folder / RUNTIME).rglob("*.py")) if path not in runtime)
    for path in sorted(folder.glob(f"*/{KERNEL}")):
        for arch in sorted(item for item in path.parent.iterdir() if item.is_dir()):
            used: set[str] = set()
            if (arch / MANIFEST).exists():
                data = read_json(arch / MANIFEST)
                used = {item["file"] for item in manifest.variants_of(data)}
            files = (item for item in sorted(arch.iterdir()) if _VARIANT.fullmatch(item.name))
            yield from (item for item in files if item.name not in used)
            yield from binaries.unreferenced(arch, used)
    yield from sorted(folder.rglob(f"*{PARTIAL}"))


def read_json(path: Path) -> manifest.Json:
    """Return the data of one of the package's files."""
    return manifest.loads(path.read_text(encoding="utf-8"), str(path))
