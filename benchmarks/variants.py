"""Candidates compiled ahead by the tuner's children on all cores, then run in this process."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tuner.catalog import Catalog, builder_for, device_class, split_device
from tuner.children.task import Compiled, Limits
from tuner.children.worker import Lethal, Workers
from tuner.cli.devices import workers_for
from tuner.plan import subject_of
from tuner.plugins import BuildTask
from tuner.records import Candidate, DeviceInfo, Rejection
from tuner.render import Renderer
from tuner.runtime.variant import Variant
from tuner.serve.bench import Bench, Call
from tuner.session import Subject
from tuner.space.kernel import load_space
from tuner.timing.clock import Clock

COMPILE_S = 30.0
"""Seconds after which a candidate's compilation is given up."""

_SPARE = 8
"""Candidates drawn for one that is wanted, since some are left out."""


@dataclass(frozen=True, slots=True)
class Request:
    """Which candidates of a kernel are wanted on a workload.

    Attributes:
        kernel: Name of the kernel.
        workload: The workload in the command line's form.
        count: How many: the default, then a random sample of the feasible set.
    """

    kernel: str
    workload: str
    count: int


@dataclass(frozen=True, slots=True)
class Built:
    """A variant that was compiled, as plain values that pass through a file.

    Attributes:
        kernel: Name of the kernel.
        workload: The workload in the command line's form.
        variant: The candidate in words.
        language: Of the source.
        path: The rendered file.
        place: Its place among the candidates of its workload; the default is 0.
    """

    kernel: str
    workload: str
    variant: str
    language: str
    path: str
    place: int


def compile_ahead(
    device: str,
    requests: Sequence[Request],
    folder: Path,
    *,
    jobs: int | None,
    seconds: float,
    seed: int = 0,
) -> tuple[DeviceInfo, list[Built]]:
    """Return the device and what was compiled in time; refused candidates are left out.

    Args:
        device: Name of the device.
        requests: What is wanted; the first candidates of all are compiled before the second ones.
        folder: Folder of the stores, where sources and binaries are kept.
        jobs: Number of children that compile; all cores if left out.
        seconds: When compiling ends.
        seed: Of the samples.
    """
    catalog, limits = Catalog(), Limits(compile_s=COMPILE_S)
    with workers_for(device, folder, dict(os.environ), jobs=jobs, limits=limits) as workers:
        info = workers.info()
        futures = _submitted(catalog, workers, list(_drawn(catalog, info, requests, seed)), info)
        done, _ = wait(futures, timeout=seconds)
        compiled = [
            built
            for future, (built, subject, candidate) in futures.items()  # in their order
            if future in done and _is_fit(subject, candidate, future)
        ]
    print(f"{len(compiled)} of {len(futures)} candidates compiled", flush=True)
    return info, compiled


_Submitted = dict[Future[Compiled | Rejection], tuple[Built, Subject, Candidate]]


def _submitted(
    catalog: Catalog,
    workers: Workers,
    drawn: Sequence[tuple[int, Request, Candidate]],
    info: DeviceInfo,
) -> _Submitted:
    renderer, futures = Renderer(catalog.template_folders), {}
    subjects: dict[Request, Subject] = {}
    for place, request, candidate in drawn:
        if request not in subjects:
            subjects[request] = _subject(catalog, info, request)
        subject = subjects[request]
        source = subject.render(renderer, candidate)
        workload, path = str(subject.task.workload), str(workers.path_of(source))
        built = Built(
            request.kernel, workload, str(candidate), source.language, path=path, place=place
        )
        futures[workers.compile(subject.task, source)] = built, subject, candidate
    return futures


def _is_fit(subject: Subject, candidate: Candidate, future: Future[Compiled | Rejection]) -> bool:
    try:
        return isinstance(subject.judge(candidate, future.result()), Compiled)
    except Lethal:
        return False


def _drawn(
    catalog: Catalog, info: DeviceInfo, requests: Sequence[Request], seed: int
) -> Iterator[tuple[int, Request, Candidate]]:
    """Yield the place, request and candidate of every candidate that is to be compiled."""
    samples = [
        _sample(catalog, info, request, seed + number) for number, request in enumerate(requests)
    ]
    for place, row in enumerate(itertools.zip_longest(*samples)):
        for request, candidate in zip(requests, row, strict=True):
            if candidate is not None:
                yield place, request, candidate


def _sample(catalog: Catalog, info: DeviceInfo, request: Request, seed: int) -> list[Candidate]:
    """Return the default and a random sample, without Gluon, whose schedules may hang."""
    subject = _subject(catalog, info, request)
    spec, feasible = subject.spec, subject.feasible
    keys = feasible.sample(_SPARE * request.count, np.random.default_rng(seed))
    sampled = (feasible.candidate(int(key)) for key in keys)
    plain = [item for item in sampled if spec.template(item.template).language != "gluon"]
    return list(dict.fromkeys([feasible.default, *plain]))[: request.count]


def _subject(catalog: Catalog, info: DeviceInfo, request: Request) -> Subject:
    spec = load_space(catalog.space_path(request.kernel))
    return subject_of(catalog, info, spec, spec.workload(request.workload))


class Place:
    """A device in this process, with the tuner's clock, which is yet to be calibrated.

    Args:
        name: Name of the device.
        folder: The folder that `compile_ahead` was given.
    """

    def __init__(self, name: str, folder: Path) -> None:
        kind, index = split_device(name)
        self.device = device_class(kind)(index)
        self.info = self.device.info()  # makes it the current device
        self.clock = Clock(self.device)
        self._cache, self._catalog = folder / "cache", Catalog()

    def calibrate(self) -> None:
        """Calibrate the clock as a measuring child does it."""
        self.clock.calibrate(self.device.empty_call())

    def bench(self, kernel: str, workload: str) -> Bench:
        """Return a workload's buffers, as the tuner makes them."""
        spec = load_space(self._catalog.space_path(kernel))
        return Bench(
            spec.signature,
            self._catalog.problem_path(kernel),
            workload=spec.workload(workload),
            device=self.device,
            clock=self.clock,
        )

    def variant(self, built: Built) -> Variant:
        """Return a variant from what was compiled ahead."""
        spec = load_space(self._catalog.space_path(built.kernel))
        workload = spec.workload(built.workload)
        task = BuildTask(Path(built.path), spec.signature, workload, self.info, self._cache)
        return builder_for(built.language).load(task)

    def calls(self, bench: Bench, built: Built) -> list[Call]:
        """Return a variant's calls, one for each set of buffers, each made once."""
        calls = bench.calls(self.variant(built))
        for call in calls:
            call()
        self.device.synchronize()
        return calls


def rotation(calls: Sequence[Call]) -> Call:
    """Return a call that goes on with the next set of buffers each time."""
    turns: Iterator[Callable[[], None]] = itertools.cycle(calls)
    return lambda: next(turns)()


def save(path: Path, items: Sequence[Built]) -> None:
    """Write a list for another process."""
    path.write_text(json.dumps([asdict(item) for item in items]), encoding="utf-8")


def load(path: Path) -> list[Built]:
    """Return a list that `save` wrote."""
    return [Built(**item) for item in json.loads(path.read_text(encoding="utf-8"))]
