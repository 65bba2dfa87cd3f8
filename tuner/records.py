"""The nouns of the tuner: frozen records that travel between its processes, and its errors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, get_args

Value = bool | int | float | str
"""What a parameter, a flag or a device limit may be."""
Stage = Literal["constraints", "compile", "runtime", "correctness", "timeout"]
"""Where a candidate was rejected: the status words of Kernel Tuner's T4 results format."""
STAGES: tuple[Stage, ...] = get_args(Stage)


class TunerError(Exception):
    """The base of every error that the tuner raises on purpose."""


class UsageError(TunerError):
    """What the user gave is wrong: a name, a value or a file; the message says what is allowed."""


class ChildError(TunerError):
    """The tuner's own code failed in a child process: the run stops, no candidate is blamed."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a kernel is tuned for: the extents of its dims, a dtype and flags.

    Attributes:
        kernel: Name of the kernel.
        dims: Every dim of the kernel's signature with its extent, in the signature's order.
        dtype: Torch's name of the element type, such as ``"float32"``.
        flags: Every flag of the signature with its value, in the signature's order.
    """

    kernel: str
    dims: tuple[tuple[str, int], ...]
    dtype: str
    flags: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        """Return the command line's form, ``M=512,N=512,K=512,dtype=float32``."""
        parts = [f"{name}={extent}" for name, extent in self.dims]
        parts += [f"{name}={format_value(value)}" for name, value in self.flags]
        return ",".join([*parts, f"dtype={self.dtype}"])


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of a search space: a template and a value for each of its parameters."""

    template: str
    parameters: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, template: str, parameters: Mapping[str, Value]) -> Candidate:
        """Return the candidate with its parameters sorted, so that equal choices are equal."""
        return cls(template, tuple(sorted(parameters.items())))

    def __str__(self) -> str:
        """Return ``template(NAME=value, ...)``."""
        values = ", ".join(f"{name}={format_value(value)}" for name, value in self.parameters)
        return f"{self.template}({values})"


@dataclass(frozen=True, slots=True)
class Source:
    """A rendered variant: the bytes that are verified, timed and shipped.

    Attributes:
        kernel: Name of the kernel, also the name of the entry point in the text.
        language: ``"cpp"``, ``"triton"`` or ``"gluon"``; it picks the builder.
        text: The rendered file.
    """

    kernel: str
    language: str
    text: str

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the text: the identity of the variant."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler reports of a variant: of a thread, its registers and those that spill.

    `serialized` tells whether each product of a warpgroup waits for the one before. Variants with
    the same `code` do the same on the workload, launch for launch.
    """

    shared_bytes: int | None = None
    registers: int | None = None
    spills: int | None = None
    serialized: bool | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A verified variant's time on the device, in milliseconds.

    Attributes:
        median_ms: Median time of one call.
        low_ms: Lower end of the 95 % interval of the median.
        high_ms: Upper end of that interval.
        samples: Number of timed batches behind it.
        regime: Cache regime: ``"warm"`` (same buffers) or ``"cold"`` (rotating buffers).
        compile_s: Seconds that the build took.
        resources: What the compiler reported.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    regime: str
    compile_s: float
    resources: Resources = Resources()


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a candidate is not eligible: data, not an error."""

    stage: Stage
    reason: str


Outcome = Measurement | Rejection


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluated candidate of a workload: on what card, ended how many seconds after 1970."""

    number: int
    workload: Workload
    candidate: Candidate
    source_sha256: str
    outcome: Outcome
    seconds: float
    ended_s: float | None = None
    card: str | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that a child runs on.

    Attributes:
        kind: Name of the device plug-in, such as ``"cpu"``.
        name: Human-readable name of the part.
        arch: Identifier of the architecture that variants are frozen for, such as ``"sm90"``.
        limits: Names and values that constraints may use, such as ``shared_bytes``.
        versions: Versions of what compiles and runs the variants.
        languages: Languages that the device can run, those of :class:`Source`.
    """

    kind: str
    name: str
    arch: str
    limits: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, str], ...]
    languages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Winner:
    """The variant that is frozen for a workload, and the evidence for it.

    Attributes:
        workload: What it was tuned for.
        candidate: The choice.
        default_candidate: What it was measured against.
        source: The choice's rendered file.
        default: The default candidate's rendered file.
        measurement: The winner's time in the final race.
        default_measurement: The default candidate's time in the same race.
        gain: Default's time over the winner's, with its interval; 1.0 when the default won.
        rival: Name of the library operation that raced along, if there is one.
        rival_measurement: Its time in the same race.
        rival_ratio: Rival's time over the winner's (above 1 the winner is faster).
        ties: Candidates of the final that the clock could not tell from the winner.
        device: Where the race was run.
        protocol: Description of the clock protocol.
        seed: Seed of the run.
        date: Day of the race, as ``YYYY-MM-DD``.
        searched: Whether more than the default was timed, or there was nothing more to try.
        disturbed: What makes the race's times doubtful, though not its ratios, if anything does.
    """

    workload: Workload
    candidate: Candidate
    default_candidate: Candidate
    source: Source
    default: Source
    measurement: Measurement
    default_measurement: Measurement
    gain: Interval
    rival: str | None
    rival_measurement: Measurement | None
    rival_ratio: Interval | None
    ties: tuple[Candidate, ...]
    device: DeviceInfo
    protocol: str
    seed: int
    date: str
    searched: bool = True
    disturbed: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A workload that ended without a winner, and why."""

    workload: Workload
    reason: str


def format_value(value: Value) -> str:
    """Return a value as the command line and the headers of rendered files spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_value(text: str) -> Value:
    """Return the bool, int, float or string that a spelled value stands for."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text == "true" if text in ("true", "false") else text
