"""What a contributor implements: a problem, a device, a builder. One file each.

A kernel is a folder in `templates/`, a YAML file in `search_spaces/` and a module in
`tuner/problems/`; a device is a module in `tuner/devices/` with one `Device`; a language is a
module in `tuner/builders/` with one `Builder`. Nothing is registered: the file's name is enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tuner.records import DeviceInfo, Resources, UsageError, Workload
from tuner.runtime.signature import Signature
from tuner.runtime.variant import Variant

if TYPE_CHECKING:
    import torch


DEFAULT_CACHE_BYTES = 64 * 1024**2
"""Assumed of a device that does not tell: larger than the caches of most cards."""


class Problem(Protocol):
    """A module in `tuner/problems/`: what is computed, apart from how.

    The module imports torch and the standard library alone, since every frozen package carries a
    copy of it. `inputs(dims, flags, dtype, generator)` is optional: without it every input is
    drawn from the standard normal distribution. So is `share(open_buffer, rank, inputs, options)`,
    which returns the call that plays one rank's part of a kernel that exchanges between ranks.
    """

    RIVAL: str
    """Name of the library operation that the kernel competes with."""

    EDGE_SHAPES: tuple[dict[str, int], ...]
    """At least three small shapes with extents such as 1, primes and tails."""

    @staticmethod
    def reference(**arguments: Any) -> dict[str, torch.Tensor]:
        """Return the float64 outputs for float64 inputs, flags and scalars."""

    @staticmethod
    def rival(**arguments: Any) -> Callable[[], object] | None:
        """Return the library operation on these inputs, or None where it has none."""

    @staticmethod
    def tolerance(
        dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
    ) -> dict[str, float]:
        """Return `rtol` and `atol` of |output - reference| <= atol + rtol * |reference|."""

    @staticmethod
    def cost(
        dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
    ) -> tuple[float, float]:
        """Return the least floating-point operations and bytes that the workload needs."""


@dataclass(frozen=True, slots=True)
class BuildTask:
    """All that a builder is told.

    Attributes:
        path: The rendered file.
        signature: Signature of its kernel.
        workload: What it will be run on; languages that specialise on shapes need it.
        device: The device to compile for, which need not be present.
        cache: Folder for what the compiler writes.
        compiler: The user's choice of compiler, if any.
    """

    path: Path
    signature: Signature
    workload: Workload
    device: DeviceInfo
    cache: Path
    compiler: str | None = None


class RejectedBuild(Exception):
    """The compiler, or a limit that it reports, refuses the source; the message is the reason."""


Check = Callable[[Variant], object]
"""Calls a variant, and returns what is wrong with it."""


class Builder(ABC):
    """Turns sources of some languages into variants.

    Attributes:
        languages: Those of `Source` that it builds.
        specialises: Whether a variant is compiled anew for other shapes, so that checking odd
            shapes is left to the finalists.
    """

    languages: ClassVar[tuple[str, ...]]
    specialises: ClassVar[bool] = False

    def warm_up(self) -> None:  # noqa: B027 - few builders have anything to import
        """Import what compiling needs."""

    @abstractmethod
    def compile(self, task: BuildTask) -> Resources:
        """Compile into the task's cache; needs no device and may run beside a measurement.

        Raises:
            RejectedBuild: The compiler refuses.
        """

    def compile_checks(self, task: BuildTask, checks: Iterable[Check]) -> None:  # noqa: B027
        """Compile what checks of the task's source will call, where that depends on shapes.

        Args:
            task: The source.
            checks: Each calls the variant that it is given; what it returns is ignored.

        Raises:
            RejectedBuild: The compiler refuses.
        """
        # Most languages compile a source once, whatever the shapes.

    def prebuild(self, task: BuildTask, folder: Path) -> Resources:
        """Compile, and write into a folder what `tuner.runtime.prebuilt` will find.

        Args:
            task: The source, and the workload whose first call is to need no compiler.
            folder: Where the binaries of the source's file go, for all of its workloads.

        Raises:
            RejectedBuild: The compiler refuses, or nothing can be built for the device from here.
        """
        del folder
        raise RejectedBuild(f"there is no way to store what {task.device.kind} compiles")

    @abstractmethod
    def load(self, task: BuildTask) -> Variant:
        """Return the variant, compiled before or now.

        Raises:
            RejectedBuild: The compiler refuses.
        """


class Device(ABC):
    """Where variants run. An instance lives in a child process.

    Attributes:
        kind: The name on the command line.
        languages: Languages that it runs.
        limit_names: Names that constraints may use; `info` gives their values.
        shares_host: Whether compiling beside a measurement disturbs it.
        timed: Whether its times mean anything; an interpreter verifies only.
        measure_s: Seconds that timing one candidate may take during the search.
        starter: Name of the workload set that a plain run tunes for.
        wrong_dtypes: Element types that it computes wrongly, so that nothing is verified in them.
        environment: Variables that its children must have from the start.
        matrix_dtypes: Element types whose matrix products a probe times; ``"tf32"`` is float32
            with rounded factors.
        matrix_extents: Extents of the square matrices that it multiplies.
    """

    kind: ClassVar[str]
    languages: ClassVar[tuple[str, ...]]
    limit_names: ClassVar[tuple[str, ...]]
    shares_host: ClassVar[bool] = False
    timed: ClassVar[bool] = True
    measure_s: ClassVar[float] = 0.2
    starter: ClassVar[str] = "starter"
    wrong_dtypes: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[tuple[tuple[str, str], ...]] = ()
    matrix_dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    matrix_extents: ClassVar[tuple[int, ...]] = (256, 512, 1024)

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @property
    def torch_device(self) -> str:
        """Torch's name of the device."""
        return f"{self.kind}:{self.index}"

    @abstractmethod
    def info(self) -> DeviceInfo:
        """Return what is known of this device.

        Raises:
            UsageError: There is no such device; the message says what was looked for and found.
        """

    @classmethod
    def target(cls, arch: str) -> DeviceInfo:
        """Return what is known of an architecture that need not be present, to compile for it.

        Args:
            arch: The architecture as the kind names it, such as ``"90"`` or ``"gfx942"``.

        Raises:
            UsageError: Nothing is known of it.
        """
        raise UsageError(
            f"--target {cls.kind}:{arch}: {cls.kind} cannot be compiled for from here"
        )

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched has finished."""

    def cache_bytes(self) -> int:
        """Return the size of the last-level cache, which a cold measurement must overflow."""
        return DEFAULT_CACHE_BYTES

    def probe(self) -> None:
        """Use the device for something small; raises whatever torch raises if it is broken."""
        import torch

        torch.zeros(1, device=self.torch_device).add_(1)
        self.synchronize()

    def answers(self) -> bool:
        """Return whether the device still works; if not, this process must be replaced."""
        try:
            self.probe()
        except Exception:
            return False
        return True

    def empty_call(self) -> Callable[[], None] | None:
        """Return the launch of a kernel that does nothing; None where a call is a plain call."""
        return None

    def capture(self, call: Callable[[], None], count: int) -> Callable[[], None] | None:
        """Return a recorded graph of `count` calls; None where the device has no graphs."""
        del call, count
        return None

    def confine(self) -> None:  # noqa: B027 - most devices allow no limit
        """Limit what a variant can do to the machine, where the device allows a limit."""
