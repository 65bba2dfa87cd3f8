"""A child of `test_moe.py`: what is wrong with the code that an H200 would run, as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import triton

from tuner.builders.triton import TritonBuilder, _compiling_only, _targeting
from tuner.catalog import Catalog
from tuner.devices.cuda import Cuda
from tuner.plugins import BuildTask
from tuner.records import Candidate
from tuner.render import Renderer
from tuner.runtime.moe import Kernels, LocalGroup, LowLatencyBuffer
from tuner.space.kernel import load_space

WORKLOADS = {
    "moe_dispatch": "RANKS=2,TOKENS=128,GROUPS=56,TOPK=8,EXPERTS=256",
    "moe_combine": "RANKS=2,TOKENS=128,HIDDEN=7168,TOPK=8,EXPERTS=256",
}
FORBIDDEN = {
    "multimem": "multicast",
    "cp.async.bulk": "a bulk copy, which needs a proxy fence behind a flag",
    "ld.global.nc": "a load that need not see what a peer wrote",
}
WRITES = re.compile(r"\bst\.global|\batom\.|\bred\.global")
RELEASES = re.compile(r"\b(?:atom|red)\.\S*(?:release|acq_rel)\S*\.(?:add|exch)\b|\bst\.release")
ACQUIRING = re.compile(r"\batom\.\S*acquire")
NARROW_ROWS = re.compile(r"\bst\.global(?:\.\w+)*\.(?:v2\.b(?:8|16)|b8|b16|v2\.b32)\b")
WIDE_ROWS = re.compile(r"\bst\.global(?:\.\w+)*\.v4\.b32\b")


def faults(name: str, text: str) -> Iterator[str]:
    """Yield what is wrong with a kernel's PTX."""
    for word, what in FORBIDDEN.items():
        if word in text:
            yield f"{word}: {what}"
    if ACQUIRING.search(text):
        yield "a poll of more than one word, which adds to each of them"
    if NARROW_ROWS.search(text):
        yield f"rows in pieces of less than 128 bits: {NARROW_ROWS.search(text).group()}"
    moves_rows = name in ("stage_kernel", "receive_kernel") or "x_ptr" in text
    if moves_rows and not WIDE_ROWS.search(text):
        yield "no store of 128 bits"
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if RELEASES.search(line) and not follows_barrier(lines[:number]):
            yield f"no barrier between the stores and {line.strip()}"


def follows_barrier(lines: list[str]) -> bool:
    """Return whether a barrier comes after the last write to memory."""
    for line in reversed(lines):
        if "bar.sync" in line:
            return True
        if WRITES.search(line):
            return False
    return False


def ptx_of(
    kernel: str, candidate, flag: str, *, folder: Path, change: tuple[str, str] = ("", "")
) -> Iterator[tuple[str, str]]:
    """Yield the name and the PTX of each kernel that a candidate launches."""
    before = set(folder.rglob("*.ptx"))
    path = write(kernel, candidate, folder, change)
    compile_ahead(kernel, path, WORKLOADS[kernel] + flag, folder)
    for file in sorted(set(folder.rglob("*.ptx")) - before):
        yield file.stem, file.read_text()


def write(kernel: str, candidate, folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    source = Renderer(Catalog().template_folders).render(kernel, "triton", candidate)
    text = source.text.replace(*change)
    path = folder / f"{kernel}_{abs(hash(text))}.py"
    path.write_text(text)
    return path


def compile_ahead(kernel: str, path: Path, workload: str, folder: Path) -> None:
    spec, device = load_space(Catalog().space_path(kernel)), Cuda.target("90")
    task = BuildTask(path, spec.signature, spec.workload(workload), device, folder)
    TritonBuilder().compile(task)


SMALL = {
    "moe_dispatch": "RANKS=2,TOKENS=16,GROUPS=2,TOPK=2,EXPERTS=32",
    "moe_combine": "RANKS=2,TOKENS=16,HIDDEN=256,TOPK=2,EXPERTS=32",
}


def compiled_late(folder: Path, changes: tuple[tuple[str, str], ...] = ()) -> list[str]:
    """Return the kernels that a buffer's first rounds compile, though they were compiled ahead.

    A rank that compiles while its peers wait for it may be taken for dead.
    """
    paths = {}
    for kernel, workload in SMALL.items():
        template = load_space(Catalog().space_path(kernel)).templates[0]
        paths[kernel] = write(kernel, template.default, folder)
        for old, new in changes:
            paths[kernel].write_text(paths[kernel].read_text().replace(old, new))
        for flag in ("", ",fp8=true") if kernel == "moe_dispatch" else ("", ",zero_copy=true"):
            compile_ahead(kernel, paths[kernel], workload + flag, folder)
    before = set(folder.rglob("*.ptx"))
    dispatch, combine = paths.values()
    kernels = Kernels.load((dispatch, dispatch), (combine, combine))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True  # else a buffer on a CPU is refused
        buffer = LowLatencyBuffer(LocalGroup(2)[0], 16, 256, 32, topk=2, kernels=kernels)
    x, weights = torch.zeros(3, 256, dtype=torch.bfloat16), torch.ones(3, 2)
    choices = torch.zeros(3, 2, dtype=torch.int64)
    with _targeting(Cuda.target("90")), _compiling_only():
        for flag in (False, True):
            got = buffer.dispatch(x, choices, weights, fp8=flag)
            rows = buffer.get_next_combine_buffer(got.handle) if flag else got.recv_x
            buffer.combine(rows, choices, weights, got.handle, zero_copy=flag)
    return sorted(file.stem for file in set(folder.rglob("*.ptx")) - before)


MUTANTS = {
    "no barrier": ("tl.debug_barrier()", "pass"),
    "no hint of alignment": ("tl.multiple_of(payload_ptr, 16)", "payload_ptr"),
    "a poll of a vector": (
        'tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")',
        'tl.sum(tl.atomic_add(signal_ptr + tl.arange(0, 2), 0, sem="acquire", scope="sys"))',
    ),
}


def different(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first of those candidates that differ in sizes alone."""
    kinds: dict[tuple, Candidate] = {}
    for candidate in candidates:
        kind = tuple(item for item in candidate.parameters if isinstance(item[1], str | bool))
        kinds.setdefault(kind, candidate)
    return [*kinds.values()]


def main(folder: Path) -> dict[str, list[str]]:
    """Return the faults of the default and the seeds of both templates, and of mutants."""
    report: dict[str, list[str]] = {}
    for kernel in WORKLOADS:
        template = load_space(Catalog().space_path(kernel)).templates[0]
        for number, candidate in enumerate(different((template.default, *template.seeds))):
            flags = {0: ("", ",fp8=true"), 1: (",fp8=true",)} if "dispatch" in kernel else {}
            for flag in flags.get(min(number, 1), ("",)):
                for name, text in ptx_of(kernel, candidate, flag, folder=folder):
                    report[f"{kernel} {number}{flag} {name}"] = [*faults(name, text)]
    report["compiled late"] = compiled_late(folder)
    changed = (('"expert_stride", "row_stride", "group_stride"', '"expert_stride"'),)
    report["mutant: strides are specialised"] = compiled_late(folder, changed)
    default = load_space(Catalog().space_path("moe_dispatch")).templates[0].default
    for mutant, change in MUTANTS.items():
        texts = ptx_of("moe_dispatch", default, "", folder=folder, change=change)
        report[f"mutant: {mutant}"] = [fault for item in texts for fault in faults(*item)]
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
