"""The node's side: children of one device for a parent on another machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tuner
from tuner import codec
from tuner.children.child import ChildProcess, child_spec
from tuner.children.examiner import Examiner
from tuner.children.host import ChildLost, Role
from tuner.cluster.parcel import Files, Harvest, Message, plant, unpack
from tuner.cluster.scratch import Scratch
from tuner.records import ChildError, DeviceInfo, TunerError, UsageError

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")
_THREADS = "OMP_NUM_THREADS"
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a node says of a card.

    Attributes:
        version: The tuner's version there.
        card: The card's name on its node, such as ``"cuda:3"``.
        info: The device as JSON.
    """

    version: str
    card: str
    info: dict[str, Any]


class Station:
    """Starts children on the machine where it lives, and passes requests on to them.

    Args:
        kind: Kind of device.
        environment: The children's environment.
    """

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        self._scratch = Scratch()
        self._files = self._scratch.path / "files"
        self._spec = child_spec(kind, self._scratch.path, environment)
        self._children: dict[int, ChildProcess] = {}
        self._keys = itertools.count()
        self._harvest = Harvest(self._spec.cache)
        self._compiler: int | None = None

    def start(self, role: Role) -> int:
        """Return the key of a new child."""
        key = next(self._keys)
        self._children[key] = self._spec.start(role)
        return key

    def request(
        self, key: int, message: Message, files: Files, *, compiled: Files, timeout_s: float
    ) -> Message:
        """Return a child's reply, or as ``lost`` or ``failure`` why there is none.

        Args:
            key: The child.
            message: The packed request.
            files: What it names.
            compiled: What was compiled elsewhere for it.
            timeout_s: Seconds that the child may take.
        """
        self.plant(compiled)
        unpacked = unpack(message, files, self._files)
        try:
            return self._children[key].request(unpacked, timeout_s=timeout_s)
        except ChildLost as loss:
            self._children.pop(key, None)
            return {"lost": [str(loss), loss.phase, loss.timed_out]}
        except ChildError as error:
            return {"failure": str(error).replace(f"{self._files}/", "")}

    def plant(self, compiled: Files) -> None:
        """Keep what was compiled elsewhere where its children look for it."""
        plant(compiled, self._spec.cache)

    def compile(self, message: Message, files: Files, timeout_s: float) -> tuple[Message, Files]:
        """Return the reply of a child that compiles, and what it has compiled."""
        if self._compiler not in self._children:
            self._compiler = self.start("compile")
            ready = {"operation": "ready", "measures": False}
            self._children[self._compiler].request(ready, timeout_s=_START_TIMEOUT_S)
        assert self._compiler is not None
        reply = self.request(self._compiler, message, files, compiled={}, timeout_s=timeout_s)
        return reply, self._harvest.gather()

    def kill(self, key: int) -> None:
        """End a child."""
        if (child := self._children.pop(key, None)) is not None:
            child.kill()

    def close(self) -> None:
        """End every child and remove what they wrote."""
        for key in list(self._children):
            self.kill(key)
        self._scratch.close()


class CardStation(Station):
    """The station of one card, which Ray has reserved for the process that it lives in.

    Args:
        kinds: What the card may be; the first that is here is taken.

    Raises:
        UsageError: None of them is here.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._environment = dict(os.environ)  # of a node, where no command line begins
        if kinds[0] != "cpu":  # what Ray sets for a process that holds no CPUs is nobody's wish
            self._environment.pop(_THREADS, None)
        self._kind, self._info = find_device(kinds, self._environment)
        super().__init__(self._kind, self._environment)

    def introduce(self) -> Introduction:
        """Return what the card is."""
        visible = next(filter(None, map(self._environment.get, _VISIBLE)), None)
        card = f"{self._kind}:{visible}" if visible and self._kind != "cpu" else self._kind
        return Introduction(tuner.__version__, card, codec.to_json(self._info))


def find_device(kinds: Sequence[str], environment: Mapping[str, str]) -> tuple[str, DeviceInfo]:
    """Return the first kind of device that is here, and what it is.

    Raises:
        UsageError: None is; the message says why, kind by kind.
    """
    reasons = []
    with TemporaryDirectory(prefix="tuner-") as folder:
        for kind in kinds:
            spec = child_spec(kind, Path(folder), environment)
            try:
                with Examiner(spec, _START_TIMEOUT_S) as examiner:
                    return kind, examiner.info()
            except TunerError as error:
                reasons.append(str(error))
    raise UsageError("; ".join(reasons))


@cache
def _compile_station(kind: str) -> Station:
    """Return the station of this process, which Ray uses for one task after the other."""
    return Station(kind, dict(os.environ))


def compile_here(
    kind: str, message: Message, files: Files, timeout_s: float
) -> tuple[Message, Files]:
    """Compile on whatever node Ray runs this; return the reply and the compiled files."""
    return _compile_station(kind).compile(message, files, timeout_s)
