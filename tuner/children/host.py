"""What the study needs of a child, wherever it runs: on this machine or on another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from tuner.records import Candidate, Stage

Role = Literal["compile", "measure"]


class ChildLost(Exception):
    """The child was killed, died or was timed out while it worked on a request.

    Attributes:
        phase: What it had announced last, such as ``"compile"`` or ``"measure"``.
        timed_out: Whether its time was up.
    """

    def __init__(self, message: str, phase: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.phase = phase
        self.timed_out = timed_out

    @property
    def stage(self) -> Stage:
        """The stage at which this rejects a candidate."""
        if self.timed_out:
            return "timeout"
        return "compile" if self.phase == "compile" else "runtime"


class HostLost(Exception):
    """The machine that a child runs on is gone, which says nothing of the candidate.

    Attributes:
        unfinished: Candidates that were asked for and never told, to be asked for elsewhere.
    """

    unfinished: tuple[Candidate, ...] = ()


class Child(Protocol):
    """A process that answers requests about a device and may die of them."""

    def request(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Return the child's reply.

        Raises:
            ChildLost: The child died or did not reply in time; it is gone.
            ChildError: The tuner's own code failed in the child.
            HostLost: The child's machine is gone.
        """

    def kill(self) -> None:
        """End the child and everything that it started; return when it is gone."""


class Host(Protocol):
    """Where children are started."""

    def start(self, role: Role) -> Child:
        """Return a new child."""
