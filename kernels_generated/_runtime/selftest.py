"""``python -m PACKAGE verify``: is every frozen variant right here, and worth its place?"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .architecture import architecture, device_kind
from .cases import edge_cases
from .check import Case, Example, Problem, load_problem
from .dispatch import Entry, Manifest, gives
from .kernel import Kernel
from .operations import Package
from .timing import compare
from .variant import Variant

SLOWER = 0.98
"""A variant fails that surely reaches less than this share of the default's speed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report."""

    kernel: str
    subject: str
    file: str
    passed: bool
    note: str

    def __str__(self) -> str:
        """Return ``kernel subject file PASS|FAIL note``."""
        verdict = "PASS" if self.passed else "FAIL"
        return f"{self.kernel} {self.subject} {self.file} {verdict} {self.note}".rstrip()


class KernelTest:
    """Verifies what a package has of one kernel for one device.

    Args:
        kernel: The frozen kernel.
        device: Where to verify.
    """

    def __init__(self, kernel: Kernel, device: torch.device) -> None:
        self.kernel, self.device = kernel, device

    @cached_property
    def problem(self) -> Problem:
        """What the kernel computes."""
        return load_problem(self.kernel.folder / "problem.py")

    def lines(self) -> Iterator[Line]:
        """Yield a line per workload and one per file and dtype on the edge shapes."""
        for manifest in self.manifests():
            for entry in manifest.entries:
                yield self._workload(manifest, entry)
            for item in _variants(manifest):
                yield self._edges(manifest, item)

    def manifests(self) -> list[Manifest]:
        """Return the manifests whose variants can run here: C++ runs on every CPU."""
        kind, arch = device_kind(self.device), architecture(self.device)
        return [
            manifest
            for manifest in self.kernel.dispatch.manifests
            if manifest.folder.name == arch or manifest.kind == kind == "cpu"
        ]

    def _workload(self, manifest: Manifest, entry: Entry) -> Line:
        """Return the verdict on a winner: right, and not slower than the default."""
        case = Case(entry.dims, entry.flags, entry.dtype, device=str(self.device))
        example = Example(self.kernel.signature, self.problem, case)
        reason = self._verdict(manifest, entry.data, [example])
        passed, note = reason is None, reason or ""
        if passed and entry.data["file"] == entry.data["default"]["file"]:
            note = "is the default"
        elif passed and manifest.folder.name == architecture(self.device):
            passed, note = self._race(manifest, entry, example)
        return self._line(manifest, entry.data, str(entry), passed, note)

    def _edges(self, manifest: Manifest, item: Mapping[str, Any]) -> Line:
        """Return the verdict on a file over the problem's edge shapes and all flags."""
        signature = self.kernel.signature
        cases = []
        given = [name for name in signature.guarantees if gives(item, {name: True})]
        for _, extents, choices in edge_cases(signature, self.problem, given):
            # another scale than the default shows a variant that ignores its argument
            scalars = {
                name: 0.75 * value for name, value in signature.default_scalars(extents).items()
            }
            cases += [
                Case(extents, flags, item["dtype"], 1, str(self.device), scalars, True)
                for flags in choices
            ]
        examples = (Example(signature, self.problem, case) for case in cases)
        reason = self._verdict(manifest, item, examples)
        subject = f"edge-shapes,dtype={item['dtype']}"
        return self._line(manifest, item, subject, reason is None, reason or f"{len(cases)} cases")

    def _line(
        self, manifest: Manifest, item: Mapping[str, Any], subject: str, passed: bool, note: str
    ) -> Line:
        file = f"{manifest.folder.name}/{item['file']}"
        return Line(self.kernel.signature.kernel, subject, file, passed, note)

    def _verdict(
        self, manifest: Manifest, item: Mapping[str, Any], examples: Iterable[Example]
    ) -> str | None:
        """Return what is wrong with a file, or None."""
        text = (manifest.folder / item["file"]).read_bytes()
        if hashlib.sha256(text).hexdigest() != item["sha256"]:
            return "the file is not the one that was timed: its sha256 differs"
        try:
            variant = self._variant(manifest, item)
            reasons = (example.check(variant) for example in examples)
            return next((reason for reason in reasons if reason), None)
        except (FileNotFoundError, PermissionError):
            raise  # no compiler or no cache: no fault of the variant's
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _race(self, manifest: Manifest, entry: Entry, example: Example) -> tuple[bool, str]:
        """Return whether a winner keeps up with the default, and the ratio in words."""
        ours, _ours = example.bind(self._variant(manifest, entry.data))
        theirs, _theirs = example.bind(self._variant(manifest, entry.data["default"]))
        ratio = compare(ours, theirs, device=self.device)
        slower = ratio.high < SLOWER
        return not slower, f"{ratio} the default's speed" + (", slower" if slower else "")

    def _variant(self, manifest: Manifest, item: Mapping[str, Any]) -> Variant:
        return self.kernel.variant(manifest.folder / item["file"], item["language"])


def _variants(manifest: Manifest) -> list[dict[str, Any]]:
    """Return every file of a manifest once with each dtype that it serves."""
    found = {}
    for dtype, data in manifest.data["defaults"].items():
        found[data["file"], dtype] = {**data, "dtype": dtype}
    for entry in manifest.entries:
        for data in (entry.data, entry.data["default"]):
            found[data["file"], entry.dtype] = {**data, "dtype": entry.dtype}
    return [item for _, item in sorted(found.items())]


def devices() -> list[torch.device]:
    """Return the CPU and the current accelerator, if there is one."""
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        found.append(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    return found


def main(package: Package, arguments: Sequence[str] | None = None) -> int:
    """Run the package's command and return its exit status: 0 when every variant passed.

    Args:
        package: The package.
        arguments: Words of the command line; None stands for those of the process.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {package.name}", description=f"Checks the kernels of {package.name}."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser(
        "verify", help="check every frozen variant here: right, and not slower than the default"
    )
    verify.add_argument("--kernel", choices=sorted(package.kernels), help="only this kernel")
    options = parser.parse_args(arguments)
    names = [options.kernel] if options.kernel else sorted(package.kernels)
    return _verify([package.kernels[name] for name in names])


def _verify(kernels: Sequence[Kernel]) -> int:
    """Print a line per verdict and a summary."""
    counts = {True: 0, False: 0}
    archs = {
        manifest.folder.name: False for item in kernels for manifest in item.dispatch.manifests
    }
    try:
        for test in [KernelTest(kernel, device) for kernel in kernels for device in devices()]:
            archs |= {manifest.folder.name: True for manifest in test.manifests()}
            for line in test.lines():
                print(line, flush=True)
                counts[line.passed] += 1
    except (FileNotFoundError, PermissionError) as error:
        print(error, file=sys.stderr)
        return 2
    here = ", ".join(architecture(device) for device in devices())
    elsewhere = ", ".join(sorted(arch for arch, verified in archs.items() if not verified))
    note = f"; not here: {elsewhere}" if elsewhere else ""
    print(f"{counts[True]} passed, {counts[False]} failed on {here}{note}")
    return 1 if counts[False] else 0
