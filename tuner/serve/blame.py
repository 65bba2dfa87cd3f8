"""Whose fault an exception is: decided by where it was raised, never by its text."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tuner.plugins import Device, RejectedBuild
from tuner.records import Rejection, Stage
from tuner.runtime.cpp import CompileError
from tuner.runtime.variant import Variant
from tuner.timing.calibration import BelowFloor

Result = TypeVar("Result")


class VariantError(Exception):
    """Raised inside a variant: the candidate is to blame, not the tuner."""


class Rejected(Exception):
    """Carries a rejection to the reply."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.rejection = Rejection(stage, reason)


def blamed(call: Callable[[], Result]) -> Callable[[], Result]:
    """Return the call with its exceptions turned into those that blame the variant."""

    def guarded() -> Result:
        try:
            return call()
        except (RejectedBuild, VariantError):
            raise
        except Exception as error:
            raise VariantError(f"{type(error).__name__}: {error}") from error

    return guarded


def rejection_of(error: Exception, message: Mapping[str, Any]) -> Rejection | None:
    """Return what an exception says against the sources of a request, None if it is not theirs.

    What a source raises while it is loaded, or its host function while it is compiled ahead, is
    its own fault, as what the compiler refuses is.

    Args:
        error: What the request ended with.
        message: The request, which names its sources' files.
    """
    match error:
        case Rejected():
            return error.rejection
        case RejectedBuild() | CompileError():
            return Rejection("compile", str(error))
        case BelowFloor() | VariantError():
            return Rejection("runtime", str(error))
    sources = (item.get("path") for item in (message, *message.get("contenders", ())))
    places = (raised_in(error, str(path)) for path in sources if path)
    reason = next((place for place in places if place), None)
    return Rejection("compile", reason) if reason else None


def raised_in(error: Exception, file: str) -> str | None:
    """Return a line that says where in a file an exception was raised, None if it was not."""
    path = str(Path(file).absolute())  # as importing it spells it
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{file}:{error.lineno}: {type(error).__name__}: {error.msg}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == path:
            first = (str(error).splitlines() or [""])[0]  # torch appends its own stack
            return f"{file}:{frame.lineno}: {frame.name}: {type(error).__name__}: {first}"
    return None


def fault_of(error: Exception, problem: str | None) -> str:
    """Return a line where a problem's file raised an exception, else the whole traceback.

    Args:
        error: What a request ended with.
        problem: The file that the request named, if it named one.
    """
    place = raised_in(error, problem) if problem else None
    return place or "".join(traceback.format_exception(error))


class BlamedVariant:
    """A variant whose exceptions say that they came from it.

    Args:
        variant: The variant.
        device: Where it runs.
        waits: Whether a call waits for the device, so that its faults come up inside the call.
    """

    def __init__(self, variant: Variant, device: Device, *, waits: bool) -> None:
        self._variant = variant
        self._device = device
        self._waits = waits
        self.strided = variant.strided

    def bind(self, *arguments: Any) -> Callable[[], None]:
        """Return the call on these tensors."""
        call = self._variant.bind(*arguments)
        if not self._waits:
            return blamed(call)

        def call_and_wait() -> None:
            call()
            self._device.synchronize()

        return blamed(call_and_wait)


class BlamingTimer:
    """What the clock needs of a device; a fault that comes up while it waits is the variant's.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self.synchronize = blamed(device.synchronize)
        self.capture = device.capture
