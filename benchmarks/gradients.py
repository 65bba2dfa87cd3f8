"""How exact attention's gradients are: ours and torch's flash backend against float64.

Random cases: both take the same inputs and the same gradient of the output. The error of a
gradient is the Frobenius norm of its difference from the float64 one, over that one's norm.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contest import reason
from entry import start
from gradient_cases import Attend, Case, draw, errors, flash_4, gradients, reference, torchs
from peers import FLASH_4
from rows import OwnRows
from torch.nn.attention import SDPBackend

from tuner.catalog import device_class, split_device
from tuner.children.task import Compiled, Task
from tuner.children.worker import Workers
from tuner.cli.devices import workers_for
from tuner.evidence.frozen import FrozenFiles, read_frozen
from tuner.records import DeviceInfo, Rejection, Workload
from tuner.runtime.dispatch import Manifest

GRADIENTS = ("dq", "dk", "dv")

COLUMNS = (
    *("case", "dtype", "B", "H", "KV", "S", "T", "D", "causal", "scale"),
    *(f"{who}_{name}" for who in ("tuner", "torch", "flash4") for name in GRADIENTS),
    *("torch_ratio", "flash4_ratio", "peer", "note"),
)

LIMIT = 1.2
"""Our error over the peer's up to which ours counts as no worse."""

COMPILE_S = 60.0

FORWARD, BACKWARD = "attention_forward", "attention_backward"


class Examination:
    """The cases of one run.

    Args:
        device: Torch's name of the device.
        attention: The frozen package's function.
        output: Where rows go.
    """

    def __init__(self, device: str, attention: Any, output: OwnRows) -> None:
        self._device, self._attention, self._output = device, attention, output
        on_cpu = device == "cpu"
        self._backend = SDPBackend.MATH if on_cpu else SDPBackend.FLASH_ATTENTION
        self._peer = "torch math" if on_cpu else "torch flash"
        self.ours: dict[int, list[float]] = {}

    def examine(self, number: int, case: Case) -> None:
        """Add the row of a case."""
        row: dict[str, object] = {"case": number, **asdict(case), "peer": self._peer}
        tensors = case.tensors(self._device, number)
        exact = [item.double() for item in tensors]
        try:
            true = gradients(reference(case), exact)
            mine = errors(gradients(self._ours(case), tensors), true)
            self.ours[number] = mine
            row |= _named("tuner", mine)
            theirs = errors(gradients(torchs(case, self._backend), tensors), true)
            row |= {**_named("torch", theirs), "torch_ratio": _worst(mine, theirs)}
        except Exception as error:  # a case that fails is a row that says why
            row["note"] = reason(error)
        self._output.add(row)

    def examine_flash_4(self, number: int, case: Case) -> None:
        """Fill in what FlashAttention-4 makes of a case."""
        tensors = case.tensors(self._device, number)
        row: dict[str, object]
        try:
            true = gradients(reference(case), [item.double() for item in tensors])
            theirs = errors(gradients(flash_4(case), tensors), true)
            row = {**_named("flash4", theirs), "flash4_ratio": _worst(self.ours[number], theirs)}
        except Exception as error:
            row = {"note": f"{FLASH_4}: {reason(error)}"}
        self._output.update({"case": str(number)}, row)

    def _ours(self, case: Case) -> Attend:
        return lambda q, k, v: self._attention(q, k, v, causal=case.causal, scale=case.factor)


def _named(who: str, values: Sequence[float]) -> dict[str, object]:
    return {f"{who}_{name}": value for name, value in zip(GRADIENTS, values, strict=True)}


def _worst(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return max(one / max(other, 1e-300) for one, other in zip(mine, theirs, strict=True))


def compile_ahead(
    options: argparse.Namespace, info: DeviceInfo, folder: Path, cases: Sequence[Case]
) -> None:
    """Have children compile what the cases will call, on all cores, into this process's cache."""
    with workers_for(options.device, folder, dict(os.environ), jobs=options.jobs) as workers:
        futures = [
            _compile(workers, info, files, case)
            for files in read_frozen(options.package, (FORWARD, BACKWARD))
            for case in cases
        ]
        done, _ = wait(futures, timeout=COMPILE_S)
        refused = [future for future in done if future.exception() or not _compiled(future)]
    print(f"{len(done)} of {len(futures)} compiled ahead, {len(refused)} refused", flush=True)


def _compile(
    workers: Workers, info: DeviceInfo, files: FrozenFiles, case: Case
) -> Future[Compiled | Rejection]:
    dims = {name: getattr(case, name) for name in files.signature.dims}
    flags = files.signature.complete_flags({"causal": case.causal})
    choice = Manifest(files.folder / info.arch).choose(dims, case.dtype, flags)
    assert choice is not None
    kernel = files.signature.kernel
    workload = Workload(kernel, tuple(dims.items()), case.dtype, tuple(flags.items()))
    task = Task(files.signature.to_json(), files.problem, workload, info)
    return workers.compile(task, files.source(choice.arch, choice.file))


def _compiled(future: Future[Compiled | Rejection]) -> bool:
    return isinstance(future.result(), Compiled)


def conclude(output: OwnRows) -> int:
    """Write and print how many cases are within the limit; return the exit status."""
    rows = [row for row in output.rows if row["case"]]
    texts = []
    for peer in ("torch", "flash4"):
        ratios = [float(row[f"{peer}_ratio"]) for row in rows if row[f"{peer}_ratio"]]
        if ratios:
            name = rows[0]["peer"] if peer == "torch" else FLASH_4
            good = sum(ratio <= LIMIT for ratio in ratios)
            texts.append(
                f"{good} of {len(ratios)} cases have gradients whose errors are at most {LIMIT:g} "
                f"times those of {name} (largest ratio {max(ratios):.3f})"
            )
    failed = sum(not row["tuner_dq"] for row in rows)
    output.add({"note": "; ".join([*texts, f"{failed} of {len(rows)} cases failed"])})
    print("\n".join(texts or ["no case was compared"]), flush=True)
    return 0 if texts and not failed else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=Path("kernels_generated"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--longest", type=int, default=1536, help="the most queries or keys")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the cases")
    parser.add_argument(
        "--flash-4-seconds", type=float, default=40.0, help="for FlashAttention-4, if it is here"
    )
    parser.add_argument("--jobs", type=int, help="compile children; all cores if left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine and write; return the exit status."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="gradients-") as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache" / "triton")
        return _examine(options, Path(folder))


def _examine(options: argparse.Namespace, folder: Path) -> int:
    kind, index = split_device(options.device)
    device = device_class(kind)(index)
    info = device.info()  # makes it the current device
    on_cpu = kind == "cpu"
    dtypes = ("float32",) if on_cpu else ("bfloat16", "float16")
    cases = draw(options.cases, dtypes, options.longest, options.seed)
    sys.path.insert(0, str(options.package.absolute().parent))
    if not on_cpu:
        try:
            compile_ahead(options, info, folder, cases)
        except Exception as error:  # then they are compiled when they are called
            print(f"nothing is compiled ahead: {reason(error)}", flush=True)
    output = OwnRows(options.output, info.name, COLUMNS)
    attention = importlib.import_module(options.package.name).attention
    examination = Examination(device.torch_device, attention, output)
    end_s = time.monotonic() + options.seconds
    for number, case in enumerate(cases):
        if time.monotonic() > end_s:
            break
        examination.examine(number, case)
        if number % 20 == 19:
            print(f"{number + 1} of {len(cases)} cases", flush=True)
    end_s = time.monotonic() + options.flash_4_seconds
    # What is compiled for one case serves those like it: they come together.
    like = sorted(examination.ours, key=lambda number: (number % 16, number))
    for number in like if _has_flash_4() else ():
        if time.monotonic() < end_s:
            examination.examine_flash_4(number, cases[number])
    return conclude(output)


def _has_flash_4() -> bool:
    try:
        importlib.import_module("flash_attn.cute.interface")
    except Exception:
        return False
    return True


if __name__ == "__main__":
    start(main)
