"""A Ray cluster: the cards on its nodes, as they come and go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tuner
from tuner import codec
from tuner.cluster.connection import GPUS, connect, kinds_of
from tuner.cluster.parcel import Depot
from tuner.cluster.remote import RemoteHost
from tuner.cluster.station import CardStation, Introduction
from tuner.records import DeviceInfo

_NODE_CHARACTERS = 6


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one card on a node.

    Attributes:
        node: Ray's id of the node.
        kinds: Kinds of device that it may be.
        index: Which of the node's places.
    """

    node: str
    kinds: tuple[str, ...]
    index: int


@dataclass(frozen=True, slots=True)
class Card:
    """A card that was reserved.

    Attributes:
        name: Its node and its name there.
        info: What it is.
        host: Where its children run.
        jobs: Number of candidates that compile for it at a time.
    """

    name: str
    info: DeviceInfo
    host: RemoteHost
    jobs: int


@dataclass(frozen=True, slots=True)
class _Claim:
    """A place that was asked for: what answers on it, once Ray has reserved it."""

    host: RemoteHost
    introduction: Any
    node_name: str
    jobs: int


class Cluster:
    """A connection to a Ray cluster; what it reserved ends with the context.

    Args:
        address: ``"auto"`` or ``HOST:PORT``.
        device: Kinds of device to use, with commas between, or ``"auto"``: the GPUs, or where no
            node has any, the CPUs.
        cache: Folder for compiled files that pass through.

    Raises:
        UsageError: Nothing answers there, or the device is none that can be asked for.
    """

    def __init__(self, address: str, device: str, cache: Path) -> None:
        self._kinds = kinds_of(device)
        self._depot = Depot(cache)
        self._claims: dict[Slot, _Claim] = {}
        self._refused: set[Slot] = set()
        self.cards: dict[Slot, Card] = {}
        self.complaints: list[str] = []
        self._said: set[str] = set()
        connect(address)

    def joined(self, timeout_s: float) -> list[Card]:
        """Return the cards that were reserved since the last call, waiting for the first a while.

        Cards whose node is gone are dropped; what is refused is added to `complaints`.
        """
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        self._drop_lost()
        if self._kinds == ("auto",):  # once: a run does not change its mind
            self._kinds = GPUS if _count(nodes.values(), "GPU") else ("cpu",)
        slots = list(slots_of(self._kinds, nodes.values()))
        cpus = _count(nodes.values(), "CPU")
        for slot in slots:
            if slot not in self.cards and slot not in self._claims and slot not in self._refused:
                self._claims[slot] = self._claim(slot, nodes[slot.node], cpus // len(slots))
        waiting = {claim.introduction: slot for slot, claim in self._claims.items()}
        if not waiting:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(waiting), timeout=timeout_s)
        cards = [self._admit(waiting[item], nodes) for item in ready]
        return [card for card in cards if card is not None]

    @property
    def waiting(self) -> int:
        """Number of places that Ray has not reserved yet."""
        return len(self._claims)

    def describe(self) -> str:
        """Return the cluster's nodes and what they have."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        have = ray.cluster_resources()
        shown = [f"{have[name]:g} {name}" for name in ("CPU", "GPU") if have.get(name)]
        count = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"
        return f"{count} with {' and '.join(shown) or 'neither CPU nor GPU'}"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for claim in self._claims.values():
            ray.kill(claim.host.station)
        for card in self.cards.values():
            card.host.close()
        ray.shutdown()

    def _claim(self, slot: Slot, node: Any, jobs: int) -> _Claim:
        """Ask Ray for a place: a CPU as a card is the whole node, so that nothing disturbs it."""
        alone = slot.kinds == ("cpu",)
        reserved: dict[str, Any] = {"num_cpus": 0, "resources": {slot.kinds[0]: 1}}
        if alone:
            jobs = int(node["Resources"]["CPU"])
            reserved = {"num_cpus": jobs}
        elif slot.kinds[0] in GPUS:
            reserved = {"num_cpus": 0, "num_gpus": 1}
        jobs = max(jobs, 1)
        station = ray.remote(CardStation).options(
            **reserved,
            scheduling_strategy=NodeAffinitySchedulingStrategy(slot.node, soft=False),
            max_restarts=0,
            max_concurrency=jobs + 2,  # what measures, and what ends it
        )
        actor = station.remote(slot.kinds)
        host = RemoteHost(actor, slot.kinds[0], self._depot, alone)
        name = f"{node['NodeName']}.{slot.node[:_NODE_CHARACTERS]}"
        return _Claim(host, actor.introduce.remote(), name, jobs)

    def _admit(self, slot: Slot, nodes: dict[str, Any]) -> Card | None:
        claim = self._claims.pop(slot)
        try:
            found: Introduction = ray.get(claim.introduction)
        except RayError as error:
            if slot.node in nodes and _is_alive(slot.node):
                self._refuse(slot, claim, _why(error))
            return None
        if found.version != tuner.__version__:
            reason = f"has tuner {found.version}: install {tuner.__version__} there"
            self._refuse(slot, claim, reason)
            return None
        info = codec.from_json(DeviceInfo, found.info)
        claim.host.kind = info.kind
        card = Card(f"{claim.node_name}/{found.card}", info, claim.host, claim.jobs)
        self.cards[slot] = card
        return card

    def _refuse(self, slot: Slot, claim: _Claim, reason: str) -> None:
        self._refused.add(slot)
        complaint = f"{claim.node_name}: {reason}"
        if complaint not in self._said:  # once for all cards of a node
            self.complaints.append(complaint)
        self._said.add(complaint)
        ray.kill(claim.host.station)

    def _drop_lost(self) -> None:
        """Give up lost cards; a place whose node is still there is asked for anew."""
        for slot in [slot for slot, card in self.cards.items() if card.host.lost]:
            with suppress(RayError):
                ray.kill(self.cards.pop(slot).host.station)


def slots_of(kinds: Sequence[str], nodes: Iterable[Mapping[str, Any]]) -> Iterator[Slot]:
    """Yield the places for cards of some kinds, as Ray describes the nodes.

    A CPU is a place where no GPU of its node is asked for; of any other kind there are as many as
    the node has of a resource of its name.
    """
    gpus = tuple(kind for kind in kinds if kind in GPUS)
    for node in nodes:
        resources = node["Resources"]
        counts = {gpus: int(resources.get("GPU", 0)) if gpus else 0}
        for kind in kinds:
            if kind == "cpu":
                counts["cpu",] = int(resources.get("CPU", 0) >= 1 and not counts[gpus])
            elif kind not in GPUS:
                counts[kind,] = int(resources.get(kind, 0))
        for group, count in counts.items():
            yield from (Slot(node["NodeID"], group, index) for index in range(count))


def _count(nodes: Iterable[Mapping[str, Any]], resource: str) -> int:
    return sum(int(node["Resources"].get(resource, 0)) for node in nodes)


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _why(error: RayError) -> str:
    """Return the line of an error of Ray's that says what a node cannot do."""
    cause = error.as_instanceof_cause() if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if any("No module named 'tuner" in line for line in lines):
        return f"the tuner is not installed there: `pip install 'tuner=={tuner.__version__}'`"
    return lines[-1]
