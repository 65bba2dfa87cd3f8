"""Which devices are here, and the children that work on one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tuner import codec
from tuner.catalog import device_class, device_kinds, split_device
from tuner.children.child import child_spec
from tuner.children.host import ChildLost
from tuner.children.task import DEFAULT_LIMITS, Limits
from tuner.children.worker import Workers
from tuner.records import DeviceInfo, TunerError, UsageError

_ACCELERATORS = ("cuda", "hip", "xpu", "accelerator")
"""What ``auto`` stands for: the first that is here."""

_TIMEOUT_S = 300.0


def device_info(name: str, environment: Mapping[str, str]) -> DeviceInfo:
    """Return what is known of a device, asked in a child where that needs torch."""
    if split_device(name)[0] == "cpu":
        return device_class("cpu")().info()
    with (
        TemporaryDirectory(prefix="tuner-") as folder,
        workers_for(name, Path(folder), environment) as workers,
    ):
        return workers.info()


def present_devices(
    environment: Mapping[str, str], kinds: Sequence[str] | None = None
) -> dict[str, DeviceInfo | str]:
    """Return for every kind, or those given, the device that is here or why there is none."""
    asked = device_kinds() if kinds is None else kinds
    groups: dict[object, list[str]] = {}  # of those that one child can look for
    for kind in asked:
        own = "cpu" if kind == "cpu" else device_class(kind).environment
        groups.setdefault(own, []).append(kind)
    with ThreadPoolExecutor(len(groups)) as pool:
        parts = pool.map(lambda group: _look_for(group, environment), groups.values())
        found = {kind: item for part in parts for kind, item in part.items()}
    return {kind: found[kind] for kind in asked}


def _look_for(kinds: Sequence[str], environment: Mapping[str, str]) -> dict[str, DeviceInfo | str]:
    if len(kinds) == 1:
        try:
            return {kinds[0]: device_info(kinds[0], environment)}
        except TunerError as error:
            return {kinds[0]: f"not here: {error}"}
    message = {"operation": "present", "kinds": kinds}
    with TemporaryDirectory(prefix="tuner-") as folder:
        spec = child_spec(kinds[0], Path(folder), environment)
        with spec.start("measure") as child:
            try:
                reply = child.request(message, timeout_s=_TIMEOUT_S)
            except ChildLost:  # by the driver of one kind: each alone says by which
                parts = [_look_for([kind], environment) for kind in kinds]
                return {kind: item for part in parts for kind, item in part.items()}
    return {
        kind: codec.from_json(DeviceInfo, item["info"])
        if "info" in item
        else f"not here: {item['absent']}"
        for kind, item in reply["found"].items()
    }


def resolve_device(name: str, environment: Mapping[str, str]) -> str:
    """Return the device that ``auto`` stands for: the first accelerator, else the CPU.

    Raises:
        UsageError: It has an index, and there is only one.
    """
    if name != "auto":
        kind, index = split_device(name)
        if index and device_class(kind).shares_host:
            raise UsageError(f"--device {name}: {kind} is one device; write {kind}")
        return name
    found = present_devices(environment, _ACCELERATORS)
    return next((kind for kind in _ACCELERATORS if isinstance(found[kind], DeviceInfo)), "cpu")


def resolve_cards(name: str, environment: Mapping[str, str]) -> list[str]:
    """Return the cards of ``auto``, ``cuda:0,cuda:1`` or ``cuda:all``, each by its name.

    Raises:
        UsageError: They are of several kinds, one is named twice, or the kind has no cards.
    """
    kind, _, index = name.partition(":")
    if index == "all":
        cards = list(_all_cards(kind, environment))
        if not cards:
            raise UsageError(f"--device {name}: there is none; `tune devices` lists what is here")
        return cards
    names = [resolve_device(part.strip(), environment) for part in name.split(",")]
    kinds = {split_device(part)[0] for part in names}
    if len(names) == 1:
        return names
    if len(kinds) > 1:
        raise UsageError(f"--device {name}: must be of one kind: tune for one after the other")
    if device_class(kind := kinds.pop()).shares_host:
        raise UsageError(f"--device {name}: {kind} is one device, whatever its index")
    if len({split_device(part) for part in names}) < len(names):
        raise UsageError(f"--device {name}: names a card twice")
    return names


def _all_cards(kind: str, environment: Mapping[str, str]) -> Iterator[str]:
    if device_class(kind).shares_host:
        raise UsageError(f"--device {kind}:all: {kind} is one device, whatever its index")
    for index in itertools.count():
        try:
            device_info(f"{kind}:{index}", environment)
        except TunerError:
            return
        yield f"{kind}:{index}"


@contextmanager
def workers_for(
    device: str,
    store: Path,
    environment: Mapping[str, str],
    *,
    jobs: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
    ranks: int = 1,
) -> Iterator[Workers]:
    """Yield children for a device that `resolve_device` named; they end with the context.

    Args:
        device: Name of the device.
        store: Folder of the stores, which holds sources and compiled objects.
        environment: The children's environment.
        jobs: Number of children that compile; all cores if left out.
        limits: How long one candidate may take.
        ranks: Number of devices that measure together.
    """
    spec = child_spec(device, store, environment, ranks=ranks)
    sources = store.absolute() / "sources"
    with Workers(spec, jobs=jobs_or_cores(jobs), sources=sources, limits=limits) as workers:
        yield workers


def jobs_or_cores(jobs: int | None) -> int:
    """Return the number of children that compile: as asked for, or one for each core."""
    return jobs or len(os.sched_getaffinity(0))
