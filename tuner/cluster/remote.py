"""The parent's side: children on other machines, asked through Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from tuner.children.host import ChildLost, HostLost, Role
from tuner.cluster.parcel import Depot, Message, names_in, pack
from tuner.cluster.station import compile_here
from tuner.records import ChildError, TunerError

_GRACE_S = 15.0
"""Seconds beyond a child's own time after which its machine is taken to be gone."""

_QUEUE_S = 120.0
"""Seconds that a compilation may wait for a free CPU of the cluster."""

_KILL_S = 10.0


@dataclass(eq=False)
class RemoteHost:
    """One card of the cluster; what compiles for it runs on any node, or where it must, there.

    Attributes:
        station: Ray's handle of the card's `CardStation`.
        kind: Kind of device.
        depot: Where compiled files pass through.
        alone: Whether compiling elsewhere is of no use, because the card is a CPU.
        lost: Whether its node is gone.
    """

    station: Any
    kind: str
    depot: Depot
    alone: bool
    lost: bool = False
    planted: set[str] = field(default_factory=set)

    def start(self, role: Role) -> StationChild | TaskChild:
        """Return a new child."""
        if role == "compile" and not self.alone:
            return TaskChild(self.kind, self.depot)
        key = self.ask(lambda: self.station.start.remote(role), _GRACE_S)
        return StationChild(self, key)

    def ask(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """Return what a call of the station gives.

        Raises:
            HostLost: Its node is gone, or does not answer.
            ChildError: The tuner's own code failed there.
        """
        if self.lost:
            raise HostLost("its node is gone")
        try:
            return ray.get(call(), timeout=timeout_s)
        except RayTaskError as error:
            raise ChildError(_last_line(error)) from error
        except GetTimeoutError as error:
            self.lost = True
            raise HostLost(f"no answer in {timeout_s:g} s") from error
        except RayError as error:
            self.lost = True
            raise HostLost("its node does not answer any more") from error

    def close(self) -> None:
        """End what runs on the card and give it back to Ray."""
        with suppress(HostLost, TunerError):
            self.ask(lambda: self.station.close.remote(), _KILL_S)
        ray.kill(self.station)


@dataclass(eq=False)
class StationChild:
    """A child beside a card."""

    host: RemoteHost
    key: int

    def request(self, message: Mapping[str, Any], *, timeout_s: float) -> Message:
        """Return the child's reply.

        Raises:
            ChildLost: The child died or did not reply in time; it is gone.
            ChildError: The tuner's own code failed in the child.
            HostLost: The child's machine is gone.
        """
        packed, files = pack(message)
        compiled = self.host.depot.fetch(names_in(packed), self.host.planted)
        method = self.host.station.request
        reply = self.host.ask(
            lambda: method.remote(self.key, packed, files, compiled=compiled, timeout_s=timeout_s),
            timeout_s + _GRACE_S,
        )
        return _opened(reply, packed, message)

    def kill(self) -> None:
        """End the child."""
        with suppress(HostLost):
            self.host.ask(lambda: self.host.station.kill.remote(self.key), _KILL_S)


class TaskChild:
    """Compiles in a task, wherever Ray has a CPU for it: again elsewhere if that node dies.

    Args:
        kind: Kind of device to compile for.
        depot: Where the compiled files go.
    """

    def __init__(self, kind: str, depot: Depot) -> None:
        self._kind, self._depot = kind, depot
        self._running: Any = None

    def request(self, message: Mapping[str, Any], *, timeout_s: float) -> Message:
        """Return the reply of the child that got the task.

        Raises:
            ChildLost: The child died or did not reply in time.
            ChildError: The tuner's own code failed, or no node had a CPU.
        """
        if message["operation"] == "ready":  # a task's child makes itself ready
            return {}
        packed, files = pack(message)
        self._running = _compile_task().remote(self._kind, packed, files, timeout_s)
        wait_s = _QUEUE_S + timeout_s
        try:
            reply, compiled = ray.get(self._running, timeout=wait_s)
        except GetTimeoutError as error:
            self.kill()
            raise ChildError(
                f"nothing was compiled in {wait_s:g} s: `ray status` says what holds the CPUs"
            ) from error
        except RayError as error:
            raise ChildError(_last_line(error)) from error
        finally:
            self._running = None
        for name in names_in(packed):
            self._depot.add(name, compiled)
        return _opened(reply, packed, message)

    def kill(self) -> None:
        """Give up what is compiling; the process is Ray's."""
        if (running := self._running) is not None:
            ray.cancel(running, force=True)


@cache
def _compile_task() -> Any:
    return ray.remote(num_cpus=1, max_retries=-1)(compile_here)


def _opened(reply: Message, packed: Message, message: Mapping[str, Any]) -> Message:
    """Return a reply, or raise what it stands for, with the user's file by its own path."""
    if "lost" in reply:
        text, phase, timed_out = reply["lost"]
        raise ChildLost(text, phase, timed_out=timed_out)
    if "failure" in reply:
        paths = (item.get("problem", "") for item in (packed, message))
        raise ChildError(reply["failure"].replace(*paths))
    return reply


def _last_line(error: Exception) -> str:
    """Return the line of an error of Ray's that says what it was."""
    return str(error).strip().splitlines()[-1]
