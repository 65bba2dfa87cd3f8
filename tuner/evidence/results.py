"""A file of measured times with all that is needed to compare them with another file's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from tuner.package.files import replace
from tuner.records import Interval, UsageError
from tuner.space.schema import Section, describe
from tuner.timing.statistics import median_interval

CLOCK = "host clock, interleaved blocks, lower quartile of a visit, version 1"
"""Name of the protocol of `tuner.timing`: times of another one are not compared with it."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DeviceFacts(Section):
    """Where a file was measured.

    Attributes:
        kind: Name of the device plug-in.
        name: Name of the part.
        arch: Identifier of the architecture.
        limits: Threads, caches, shared memory and the like, by name.
        versions: Versions of what compiled and ran the kernels.
    """

    kind: str
    name: str
    arch: str
    limits: dict[str, int]
    versions: dict[str, str]


class Protocol(Section):
    """How times were taken: equal for two results that are compared.

    Attributes:
        clock: Name of the clock's protocol.
        caches: Whether a call finds its data in the last-level cache.
        calls: Whether batches are calls from the host or captured in a graph.
    """

    clock: str
    caches: Literal["cold", "warm"]
    calls: str

    def __str__(self) -> str:
        """Return all of it in one line."""
        return f"{self.clock}, {self.caches} caches, {self.calls}"


class FrozenSource(Section):
    """The file of a package that was timed.

    Attributes:
        file: Its path in the package.
        sha256: Hash of its text.
        reason: Why the package serves the workload with it.
        tuned_for: The workload that it was tuned for.
    """

    file: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    reason: Literal["exact", "nearest", "default"]
    tuned_for: str | None


class ContenderTimes(Section):
    """One side's times of a workload.

    Attributes:
        label: ``"tuner"``, or the name of the library operation.
        source: The file; None for the library.
        median_ms: Median over the blocks.
        low_ms: Lower end of its 95 % interval.
        high_ms: Upper end of it.
        times_ms: Its time in each block; the blocks of one workload are the same for all.
        gflops: Least operations over the median, in 10^9 a second.
        gbytes: Least bytes over the median, in 10^9 a second.
    """

    label: str
    source: FrozenSource | None
    median_ms: Positive
    low_ms: Positive
    high_ms: Positive
    times_ms: Annotated[list[Positive], Field(min_length=1)]
    gflops: Annotated[float, Field(ge=0)]
    gbytes: Annotated[float, Field(ge=0)]

    def median(self, confidence: float) -> Interval:
        """Return the median with its interval of this confidence."""
        return median_interval(self.times_ms, confidence)


class WorkloadTimes(Section):
    """A workload's times.

    Attributes:
        kernel: Name of the kernel.
        workload: The workload as the command line spells it.
        protocol: How it was timed.
        method: How a sample was taken, such as ``"calls x 6 less 1"``.
        flops: Least operations of a call.
        bytes: Least bytes that a call moves.
        noise: Time of ours over that of its own copy, with the ends of the 95 % interval.
        discarded: Number of blocks left out because the machine did not stand still.
        end: ``"precise"``, or ``"budget"`` where time ran out before.
        refused: Why the clock cannot see the library's operation; empty if it can.
        contenders: Ours, then the library's operation if it was asked for.
    """

    kernel: str
    workload: str
    protocol: Protocol
    method: str
    flops: Annotated[float, Field(ge=0)]
    bytes: Annotated[float, Field(ge=0)]
    noise: Annotated[list[Positive], Field(min_length=3, max_length=3)]
    discarded: int
    end: Literal["precise", "budget"]
    refused: str
    contenders: Annotated[list[ContenderTimes], Field(min_length=1)]

    @property
    def name(self) -> str:
        """Kernel and workload."""
        return f"{self.kernel} {self.workload}"


class ResultsFile(Section):
    """The whole file.

    Attributes:
        schema_version: Version of this format.
        tuner: Version of the tuner.
        date: When it was measured, in UTC.
        device: Where.
        seed: Of the order in the blocks.
        budget_s: Seconds that each workload was given.
        workloads: What was measured.
    """

    schema_version: Literal[1]
    tuner: str
    date: str
    device: DeviceFacts
    seed: int
    budget_s: Positive
    workloads: Annotated[list[WorkloadTimes], Field(min_length=1)]


File = TypeVar("File", bound=Section)


def read_results(path: Path) -> ResultsFile:
    """Return a file that `tune bench` wrote.

    Raises:
        UsageError: It cannot be read, is not JSON, or is not such a file.
    """
    return read_section(ResultsFile, path, "`tune bench`")


def read_section(kind: type[File], path: Path, writer: str) -> File:
    """Return the JSON file of a kind, checked.

    Args:
        kind: Its shape.
        path: The file.
        writer: What writes such files, for the message.

    Raises:
        UsageError: It cannot be read, is not JSON or has not this shape.
    """
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text: {error.reason}") from error
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise UsageError(f"{path}: {first['msg']}; {writer} writes such files") from error
        raise UsageError(describe(error, str(path))) from error


def write_section(section: Section, path: Path) -> None:
    """Write a file in one step.

    Raises:
        UsageError: It cannot be written.
    """
    try:
        replace(path, section.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
