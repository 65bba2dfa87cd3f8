"""What a program spends on operations that a kernel of ours does: shapes, calls and time."""

from __future__ import annotations

import runpy
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.catalog import Catalog
from tuner.package.files import replace, require_file
from tuner.recording.replaced import Replaced, Shaped, replaced
from tuner.records import Workload
from tuner.space.kernel import KernelSpec, load_space

_KEPT = 1000
"""Times that are kept of a workload: the latest."""

_HEADING = """\
# What a program spends on operations that kernels of ours do. Tune for it:
#   tune --workloads THIS_FILE --goal weighted
"""


@dataclass(slots=True)
class Calls:
    """The calls of one workload.

    Attributes:
        count: How many.
        times_s: Times of the latest, in seconds.
        operations: Names of the operations that were called.
    """

    count: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    operations: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        """Time of all calls: the median's, since the first call of a shape warms up."""
        return self.count * statistics.median(self.times_s) if self.times_s else 0.0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no annotation
    """Records while it is entered, in this thread and in those of its backward passes.

    What `torch.compile` would fuse runs uncompiled meanwhile. On an accelerator the times are the
    device's, between events.

    Args:
        folders: The user's own folders of kernels.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor here
        self._catalog = Catalog(folders)
        self._specs: dict[str, KernelSpec] = {}
        self._events: list[tuple[Calls, Any, Any]] = []
        self._workloads: dict[Workload, Calls] = {}
        self.device = "cpu"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and record it if a kernel of ours does the same."""
        del types
        kwargs = kwargs or {}
        workload, device = self._workload(func, args, kwargs)
        if workload is None:
            return func(*args, **kwargs)
        calls = self._workloads.setdefault(workload, Calls())
        calls.count += 1
        calls.operations.add(func._schema.name)
        return self._timed(calls, device, lambda: func(*args, **kwargs))

    @property
    def workloads(self) -> dict[Workload, Calls]:
        """What was recorded, the most expensive first."""
        self._settle()
        items = sorted(self._workloads.items(), key=lambda item: -item[1].seconds)
        return dict(items)

    def write(self, path: Path, program: str = "") -> None:
        """Write the workloads as a file for ``tune --workloads``.

        Args:
            path: The YAML file.
            program: What ran, for the reader.
        """
        entries = [
            {
                "kernel": workload.kernel,
                "workload": str(workload),
                "calls": calls.count,
                "seconds": float(f"{calls.seconds:.6g}"),
                "operations": sorted(calls.operations),
            }
            for workload, calls in self.workloads.items()
        ]
        data = {"program": program, "device": self.device, "workloads": entries}
        text = yaml.safe_dump(data, sort_keys=False, width=1000, allow_unicode=True)
        replace(path, _HEADING + text)

    def _workload(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Workload | None, torch.device]:
        """Return what is called, as one of our kernels' workloads, and where."""
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        own = namespace != "aten" and name in self._catalog.kernels
        names = [argument.name for argument in schema.arguments]
        given = {argument.name: argument.default_value for argument in schema.arguments}
        given |= {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {n: item for n, item in given.items() if isinstance(item, torch.Tensor)}
        first = next(iter(tensors.values()), None)
        if first is None:
            return None, torch.device("cpu")
        try:
            call = self._own(name, given) if own else replaced(schema.name, given)
        except (AttributeError, KeyError, ValueError):  # an operation of that name that differs
            call = None
        return self._spelled(call, first.dtype), first.device

    def _own(self, kernel: str, given: Mapping[str, Any]) -> Replaced:
        signature = self._spec(kernel).signature
        tensors = {spec.name: given[spec.name] for spec in signature.inputs}
        inputs = {n: Shaped(tuple(item.shape)) for n, item in tensors.items() if item is not None}
        return Replaced(kernel, inputs, {name: given[name] for name, _ in signature.keywords})

    def _spelled(self, call: Replaced | None, dtype: torch.dtype) -> Workload | None:
        if call is None or call.kernel not in self._catalog.kernels:
            return None
        signature = self._spec(call.kernel).signature
        shapes: dict[str, Any] = {
            name: SimpleNamespace(shape=item.shape) for name, item in call.inputs.items()
        }
        try:
            optional = {
                spec.name: spec.name in shapes for spec in signature.inputs if spec.optional
            }
            flags = signature.complete_flags({**call.flags, **optional})
            extents = signature.bind(shapes, flags)
        except ValueError:
            return None
        if min(extents.values(), default=0) < 1:
            return None
        spelled = str(dtype).removeprefix("torch.")
        return Workload(call.kernel, tuple(extents.items()), spelled, tuple(flags.items()))

    def _spec(self, kernel: str) -> KernelSpec:
        if kernel not in self._specs:
            self._specs[kernel] = load_space(self._catalog.space_path(kernel))
        return self._specs[kernel]

    def _timed(self, calls: Calls, device: torch.device, call: Callable[[], Any]) -> Any:
        if device.type in ("cpu", "meta"):
            started = time.perf_counter()
            result = call()
            calls.times_s.append(time.perf_counter() - started)
            return result
        self.device = device.type
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        self._events.append((calls, begin, end))
        if len(self._events) >= _KEPT:
            self._settle()
        return result

    def _settle(self) -> None:
        """Read the times of what the device has finished."""
        for calls, begin, end in self._events:
            end.synchronize()
            calls.times_s.append(begin.elapsed_time(end) * 1e-3)
        self._events.clear()


@contextmanager
def recording(output: Path | None, folders: Sequence[Path], program: str) -> Iterator[Recorder]:
    """Record what happens inside; write it at the end, however that comes.

    Raises:
        UsageError: The output cannot be written; nothing was run then.
    """
    if output is not None:
        require_file("output", output)
        output = output.absolute()  # what is inside may change to another folder
    recorder = Recorder(folders)
    try:
        with recorder:
            yield recorder
    finally:
        if output is not None and recorder.workloads:
            recorder.write(output, program)


def main(arguments: Sequence[str]) -> None:
    """Run a Python program and record it.

    Args:
        arguments: The output, folders of kernels, ``--``, then what Python's own command line
            would have: a file, ``-m MODULE`` or ``-c CODE``, and the program's arguments.
    """
    split = arguments.index("--")
    output, folders = Path(arguments[0]).absolute(), [Path(item) for item in arguments[1:split]]
    program = list(arguments[split + 1 :])
    with recording(output, folders, " ".join(["python", *program])):
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path.insert(0, "")
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        elif program[0] == "-c":
            sys.argv = ["-c", *program[2:]]
            sys.path.insert(0, "")
            exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = program
            sys.path.insert(0, str(Path(program[0]).absolute().parent))
            runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
