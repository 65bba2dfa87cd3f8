"""The process of a rank other than 0: it does what the measuring child tells it."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tuner.catalog import device_class
from tuner.plugins import Device
from tuner.serve.ranks.rank import Rank
from tuner.serve.tether import die_with_parent

Message = dict[str, Any]
Call = Callable[[], None]


class Follower:
    """Follows rank 0.

    A failure is kept until rank 0 asks something: it may be about to launch its own part, and
    learns of the failure before it believes any time.

    Args:
        rank: This rank.
        device: Where it runs.
        messages: What rank 0 tells.
        reply: Answers it.
    """

    def __init__(
        self,
        rank: Rank,
        device: Device,
        *,
        messages: Iterator[Message],
        reply: Callable[[Message], object],
    ) -> None:
        self._rank, self._device = rank, device
        self._messages, self._reply = messages, reply
        self._graphs: dict[int, Call] = {}
        self._error: str | None = None

    def follow(self) -> None:
        """Do what is told until rank 0 is gone."""
        for message in self._messages:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        operations: dict[str, Callable[[Message], object]] = {
            "prepare": lambda _: self._rank.prepare(message),
            "read": lambda _: self._rank.read(message["file"]),
            "open": lambda _: self._rank.open(message["file"]),
            "check": lambda _: self._rank.check(message["file"]),
            "play": lambda _: self._rank.play(message["file"]),
            "replay": lambda _: self._graphs[message["graph"]](),
            "capture": lambda _: self._capture(message["graph"], message["dropped"]),
            "synchronize": lambda _: self._device.synchronize(),
        }
        result = None
        try:
            result = operations[message["operation"]](message)
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"
        if message["answers"]:
            self._reply({"result": result, "error": self._error})
            self._error = None

    def _capture(self, number: int, dropped: list[int]) -> bool:
        """Capture what is told next, up to ``captured``; return whether it could be."""
        for gone in dropped:
            self._graphs.pop(gone, None)
        told = iter(self._messages.__next__, None)
        waiting = itertools.takewhile(lambda item: item["operation"] != "captured", told)

        def play() -> None:
            for message in waiting:
                self._rank.play(message["file"])

        try:
            graph = self._device.capture(play, 1)
        finally:
            for _ in waiting:  # what was told, but not played: the capture failed
                pass
        if graph is not None:
            self._graphs[number] = graph
        return graph is not None


def main(arguments: list[str]) -> None:
    """Follow rank 0.

    Args:
        arguments: Device kind and index, this rank, the number of ranks, the file through which
            they meet, file descriptors of messages and replies, and the leader's process id.
    """
    kind, index, number, ranks, store, messages, replies, parent = arguments
    die_with_parent("measure", int(parent))
    device = device_class(kind)(int(index))
    out = os.fdopen(int(replies), "w", buffering=1)
    rank = Rank(device, int(number), ranks=int(ranks), store=Path(store))
    with os.fdopen(int(messages)) as lines:
        Follower(
            rank,
            device,
            messages=map(json.loads, lines),
            reply=lambda message: out.write(json.dumps(message) + "\n"),
        ).follow()


if __name__ == "__main__":
    main(sys.argv[1:])
