"""A device's card: what it was found to do, kept under the device and its versions."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from tuner import __version__, codec
from tuner.children.worker import Lethal, Workers
from tuner.evidence.results import DeviceFacts, read_section, write_section
from tuner.records import DeviceInfo, UsageError
from tuner.space.schema import Section
from tuner.timing.sanity import Ceilings, as_wide

EXPERIMENT_S = 60.0
"""Seconds after which an experiment hangs."""

COMPILED_ONLY = ("warp_size", "num_warps", "shared_bytes")
"""What only a device has that runs compiled Triton."""

_KEY_CHARACTERS = 12


class Finding(Section):
    """What an experiment found.

    Attributes:
        value: A number, whether a feature works, or None where the experiment failed.
        unit: Of the number.
        note: How it was found, or why it failed.
    """

    value: float | bool | None
    unit: str
    note: str


class DeviceCard(Section):
    """The whole file.

    Attributes:
        schema_version: Version of this format.
        tuner: Version of the tuner.
        date: When it was made, in UTC.
        seconds: How long that took.
        device: The device, whose facts and versions are the card's key.
        findings: What was found, by name.
    """

    schema_version: Literal[1]
    tuner: str
    date: str
    seconds: float
    device: DeviceFacts
    findings: dict[str, Finding]

    def number(self, name: str) -> float | None:
        """Return a finding's number, or None where there is none."""
        found = self.findings.get(name)
        if found is None or found.value is None or isinstance(found.value, bool):
            return None
        return float(found.value)

    def ceilings(self, dtype: str) -> Ceilings:
        """Return the most that was seen of memory, and of products that serve a type."""
        moves = ("copy_bandwidth", "read_bandwidth", "write_bandwidth")
        rates = (f"rate_{name}" for name in as_wide(dtype))
        gbytes, gflops = (
            max(filter(None, map(self.number, names)), default=None) for names in (moves, rates)
        )
        return Ceilings(gbytes, gflops)


def card_path(folder: Path, info: DeviceInfo) -> Path:
    """Return where the card of a device lies: other versions have another card."""
    key = json.dumps(codec.to_json(info), sort_keys=True) + __version__
    digest = hashlib.sha256(key.encode()).hexdigest()[:_KEY_CHARACTERS]
    return folder / f"{info.kind}_{info.arch}_{digest}.json"


def cards_in(folder: Path) -> list[DeviceCard]:
    """Return the cards that a folder holds, the latest last; damaged ones are left out."""
    cards = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(UsageError):
            cards.append(read_section(DeviceCard, path, "`tune probe`"))
    return sorted(cards, key=lambda card: card.date)


def card_of(
    workers: Workers,
    folder: Path,
    *,
    fresh: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> DeviceCard:
    """Return the card of the workers' device, made now if there is none.

    Args:
        workers: The children; no variant of theirs should run.
        folder: Where cards are kept.
        fresh: Whether to make it anew.
        announce: Is told when it is made, for that takes seconds.

    Raises:
        UsageError: The card that is there is damaged.
    """
    info = workers.info()
    path = card_path(folder, info)
    if path.exists() and not fresh:
        try:
            return read_section(DeviceCard, path, "`tune probe`")
        except UsageError as error:
            raise UsageError(f"{error}\nmake it anew: tune probe --fresh") from error
    announce(f"finding out what {info.name} can do; `tune probe` shows it")
    card = make_card(workers, info)
    write_section(card, path)
    return card


def make_card(workers: Workers, info: DeviceInfo) -> DeviceCard:
    """Return a new card: every experiment that makes sense on the device, one after the other."""
    started = time.monotonic()
    names = workers.ask("experiments", timeout_s=EXPERIMENT_S)["names"]
    findings = {name: item for trial in names for name, item in _attempt(workers, trial)}
    if "shared_bytes" not in names:
        note = f"not applicable to {info.kind}"
        findings |= {name: Finding(value=None, unit="", note=note) for name in COMPILED_ONLY}
    return DeviceCard(
        schema_version=1,
        tuner=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started, 1),
        device=facts_of(info),
        findings=findings,
    )


def facts_of(info: DeviceInfo) -> DeviceFacts:
    """Return what a file says of a device."""
    return DeviceFacts(
        kind=info.kind,
        name=info.name,
        arch=info.arch,
        limits=dict(info.limits),
        versions=dict(info.versions),
    )


def _attempt(workers: Workers, name: str) -> Iterator[tuple[str, Finding]]:
    """Yield what an experiment found; one that kills or hangs its child has found that."""
    try:
        reply: dict[str, Any] = workers.ask("experiment", timeout_s=EXPERIMENT_S, name=name)
    except Lethal as lethal:
        reply = {"reason": lethal.rejection.reason}
    if "reason" in reply:
        yield name, Finding(value=None, unit="", note=f"fails: {reply['reason']}")
        return
    for key, item in reply["findings"].items():
        yield key, Finding.model_validate(item)
