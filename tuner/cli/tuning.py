"""`tune run`: what it needs whatever it runs on, and the run on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from tuner.children.worker import Workers
from tuner.cli.crew import crews_of, run_sessions, same_device, session_of, store_name
from tuner.cli.devices import resolve_cards
from tuner.cli.display import Progress, outcomes_of
from tuner.cli.ending import Ended, freeze_ended, report_run
from tuner.cli.job import Job, RunOptions, job_of
from tuner.cli.seeding import seeded
from tuner.evidence.card import DeviceCard, card_of
from tuner.plan import plan
from tuner.records import DeviceInfo, TunerError
from tuner.session import Subject
from tuner.store import Store

_SHORT_S = 10.0
"""Seconds of a workload's budget of which the first compilations and the final leave little."""


def tune_kernels(options: RunOptions, environment: Mapping[str, str]) -> int:
    """Tune, freeze, verify what was frozen, and print; return the exit status."""
    job = job_of(options, environment)
    names = resolve_cards(options.device, environment)
    progress = [Progress(job.console, name if len(names) > 1 else "") for name in names]
    with ExitStack() as stack:
        crews = [stack.enter_context(crew) for crew in crews_of(names, options, environment)]
        device = same_device(names, crews)
        name = store_name(device, options.ranks)
        subjects = prepare(job, device, crews[0], name)
        sessions = [
            session_of(device, workers, (name, card), options=options, renderer=job.renderer)
            for card, workers in zip(names, crews, strict=True)
        ]
        try:
            ended = run_sessions(sessions, subjects, job.budget, progress)
        except TunerError:  # what won before it is not to be lost
            freeze_ended(job, name, (), ())
            raise
        faults = freeze_ended(job, name, crews[:1], ended)
    return report_run(job, [Ended(device, len(subjects), ended, faults, outcomes_of(progress))])


def prepare(job: Job, device: DeviceInfo, workers: Workers, name: str) -> list[Subject]:
    """Return what to tune for on a kind of card, its store begun.

    Args:
        job: What was asked for.
        device: The card.
        workers: Its children, which find out what it can do.
        name: Its store.
    """
    options = job.options
    planned = plan(job.catalog, device, job.request)
    card = card_of(workers, job.cards)
    subjects = list(seeded(job.console, [within(card, item) for item in planned], job.seeds))
    store = Store(options.store, name)
    if options.fresh:
        store.forget()
    store.begin(device)
    job.console.print(f"[bold]{device.name}[/bold] ({device.arch}), trials in {options.store}")
    each_s = (job.budget.seconds or math.inf) / len(subjects)
    if each_s < _SHORT_S:
        enough_s = math.ceil(_SHORT_S * len(subjects))
        job.console.print(
            f"{each_s:.0f} s for each of {len(subjects)} workloads is short for a search: "
            f"--budget {enough_s}s"
        )
    return subjects


def within(card: DeviceCard, subject: Subject) -> Subject:
    """Return a subject whose times must be possible by a device's card."""
    ceilings = card.ceilings(subject.task.workload.dtype)
    return replace(subject, task=replace(subject.task, ceilings=ceilings))
