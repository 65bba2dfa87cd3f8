"""The children of one card or of several, and the sessions that they work for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from tuner.budget import Budget
from tuner.catalog import device_class, split_device
from tuner.children.task import Limits
from tuner.children.worker import Workers
from tuner.cli.devices import jobs_or_cores, workers_for
from tuner.cli.display import Progress
from tuner.cli.job import RunOptions
from tuner.fleet import run_on
from tuner.records import DeviceInfo, Failure, UsageError, Winner
from tuner.render import Renderer
from tuner.run import run
from tuner.runtime.cpp import compiler_version, find_compiler
from tuner.session import Session, Subject
from tuner.store import Store


def crews_of(
    names: Sequence[str], options: RunOptions, environment: Mapping[str, str]
) -> Iterator[AbstractContextManager[Workers]]:
    """Yield the children of each card, which compile on its share of the cores."""
    limits = Limits(options.timeout, options.timeout)
    jobs = max(jobs_or_cores(options.jobs) // len(names), 1)
    for name in names:
        _require_timed(name)
        _require_compiler(name, environment)
        yield workers_for(
            name, options.store, environment, jobs=jobs, limits=limits, ranks=options.ranks
        )


def same_device(names: Sequence[str], crews: Sequence[Workers]) -> DeviceInfo:
    """Return what the cards are; they must be the same."""
    infos = [workers.info() for workers in crews]
    for name, info in zip(names, infos, strict=True):
        if info != infos[0]:
            raise UsageError(
                f"--device {','.join(names)}: {name} is {info.name} ({info.arch}), but {names[0]} "
                f"is {infos[0].name} ({infos[0].arch}): tune for one kind after the other"
            )
    return infos[0]


def store_name(device: DeviceInfo, ranks: int) -> str:
    """Return the name of the store for an architecture, or for several devices of it."""
    return device.arch if ranks == 1 else f"{device.arch}_x{ranks}"


def session_of(
    device: DeviceInfo,
    workers: Workers,
    place: tuple[str, str],
    *,
    options: RunOptions,
    renderer: Renderer,
) -> Session:
    """Return what the studies on one card share.

    Args:
        device: The card.
        workers: Its children.
        place: Name of its store, and its own.
        options: The command line.
        renderer: Renders the candidates.
    """
    return Session(
        device,
        device_class(device.kind).shares_host,
        store=Store(options.store, *place),
        workers=workers,
        renderer=renderer,
        jobs=workers.jobs,
        seed=options.seed,
    )


def run_sessions(
    sessions: Sequence[Session],
    subjects: Sequence[Subject],
    budget: Budget,
    progress: Sequence[Progress],
) -> list[tuple[Subject, Winner | Failure]]:
    """Return the subjects that were begun and how they ended."""
    for session in sessions:
        session.workers.warm_up()
    if len(sessions) > 1:
        return run_on(sessions, subjects, budget, progress)
    return list(zip(subjects, run(sessions[0], subjects, budget, progress[0]), strict=False))


def _require_timed(name: str) -> None:
    """Refuse a device whose times mean nothing."""
    if not device_class(split_device(name)[0]).timed:
        raise UsageError(
            f"--device {name}: it never times, so nothing can be tuned on it; "
            "`tune verify` runs there"
        )


def _require_compiler(name: str, environment: Mapping[str, str]) -> None:
    """Refuse a device whose variants nothing here compiles, before a child is started."""
    if "cpp" in device_class(split_device(name)[0]).languages:
        try:
            compiler_version(find_compiler(environment.get("CXX")))
        except FileNotFoundError as error:
            raise UsageError(str(error)) from error
