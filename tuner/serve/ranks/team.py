"""Rank 0 and the processes that follow it, as one device whose time is the slowest rank's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuner.plugins import Device
from tuner.records import DeviceInfo, UsageError
from tuner.serve.blame import VariantError
from tuner.serve.ranks.rank import Rank

Call = Callable[[], None]


class FollowerError(VariantError):
    """A rank other than 0 failed in what a variant does; the message says which and how."""


class Team:
    """The ranks of a measuring child; they start when they are first needed.

    Args:
        device: Rank 0's device; the others have the indices after it.
        ranks: Number of ranks.
    """

    def __init__(self, device: Device, ranks: int) -> None:
        _require_devices(device, ranks)
        self._followers: list[_Follower] = []
        self._folder = tempfile.TemporaryDirectory(prefix="tuner-ranks-")
        store = Path(self._folder.name) / "store"
        for number in range(1, ranks):
            self._followers.append(
                _Follower(device.kind, device.index + number, number, ranks=ranks, store=store)
            )
        self.rank = Rank(device, 0, ranks=ranks, store=store)

    def tell(self, operation: str, **values: object) -> None:
        """Let all other ranks do something, beside what this one does next."""
        self._send(operation, values, answers=False)

    def ask(self, operation: str, mine: Callable[[], Any], **values: object) -> list[Any]:
        """Let all ranks do something and return what they say, by rank.

        Args:
            operation: What the others do.
            mine: What this rank does meanwhile.
            values: What the others must know.

        Raises:
            FollowerError: Another rank failed in this, or in what it was told before.
        """
        self._send(operation, values, answers=True)
        try:
            first = mine()
        finally:
            replies = [follower.receive() for follower in self._followers]
        for number, reply in enumerate(replies, start=1):
            if reply["error"]:
                raise FollowerError(f"rank {number}: {reply['error']}")
        return [first, *(reply["result"] for reply in replies)]

    def play(self, file: str) -> None:
        """Launch the rounds of a call on all ranks."""
        self.tell("play", file=file)
        self.rank.play(file)

    def _send(self, operation: str, values: dict[str, object], *, answers: bool) -> None:
        line = json.dumps({"operation": operation, "answers": answers, **values})
        for follower in self._followers:
            follower.send(line)


class TeamDevice(Device):
    """The devices of all ranks: what the clock sees is rank 0's, and it waits for all.

    Args:
        device: Rank 0's device.
        ranks: Number of ranks.
    """

    def __init__(self, device: Device, ranks: int) -> None:
        super().__init__(device.index)
        self._device, self._ranks = device, ranks
        self._team: Team | None = None
        self._graphs = itertools.count()
        self._dropped: list[int] = []
        for name in ("kind", "languages", "limit_names", "measure_s"):
            setattr(self, name, getattr(device, name))

    @property
    def team(self) -> Team:
        """The ranks, started now if they are not running."""
        if self._team is None:
            self._team = Team(self._device, self._ranks)
        return self._team

    @property
    def torch_device(self) -> str:
        """Torch's name of rank 0's device."""
        return self._device.torch_device

    def info(self) -> DeviceInfo:
        """Return what is known of rank 0's device; the others are taken to be alike."""
        info = self._device.info()
        return dataclasses.replace(info, name=f"{self._ranks} x {info.name}")

    def synchronize(self) -> None:
        """Wait until all ranks have finished."""
        self.team.ask("synchronize", self._device.synchronize)

    def probe(self) -> None:
        """Use the devices of all ranks."""
        self._device.probe()
        self.synchronize()

    def empty_call(self) -> Call | None:
        """Return the launch of an empty kernel on rank 0."""
        return self._device.empty_call()

    def capture(self, call: Call, count: int) -> Call | None:
        """Return the replay of a graph on every rank; None if one cannot capture its part.

        Args:
            call: Tells the others to play as often as `Team.play` does, or is rank 0's alone.
            count: How often to call it.
        """
        team, number = self.team, next(self._graphs)
        dropped, self._dropped = self._dropped, []

        def mine() -> Call | None:
            try:
                return self._device.capture(call, count)
            finally:
                team.tell("captured")

        graph, *others = team.ask("capture", mine, graph=number, dropped=dropped)
        if graph is None or not all(others):
            return None

        def replay() -> None:
            team.tell("replay", graph=number)
            graph()

        # the others' graphs hold gigabytes: they go when this one is gone
        weakref.finalize(replay, lambda: self._dropped.append(number))
        return replay


class _Follower:
    """A follower's process and the two pipes to it."""

    def __init__(self, kind: str, index: int, number: int, *, ranks: int, store: Path) -> None:
        message_read, message_write = os.pipe()
        reply_read, reply_write = os.pipe()
        self.number = number
        self._messages = os.fdopen(message_write, "wb", buffering=0)
        self._replies = os.fdopen(reply_read)
        arguments = (kind, index, number, ranks, store, message_read, reply_write, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tuner.serve.ranks.follower", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=(message_read, reply_write),
        )
        os.close(message_read)
        os.close(reply_write)

    def send(self, line: str) -> None:
        try:
            self._messages.write(line.encode() + b"\n")
        except BrokenPipeError:
            raise FollowerError(f"rank {self.number}: its process is gone") from None

    def receive(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise FollowerError(f"rank {self.number}: its process is gone")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _require_devices(device: Device, ranks: int) -> None:
    """Raise UsageError unless every rank can have an accelerator of its own."""
    if device.torch_device == "cpu":
        return
    import torch

    count = torch.accelerator.device_count()
    if device.index + ranks > count:
        raise UsageError(
            f"--ranks {ranks}: from {device.torch_device} on there are {count - device.index} "
            f"devices of {count}; every rank needs one"
        )
