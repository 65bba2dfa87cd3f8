"""What the studies of one run share, and what one study is about."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tuner.children.task import Compiled, Task
from tuner.children.worker import Workers
from tuner.records import Candidate, DeviceInfo, Rejection, Source
from tuner.render import Renderer
from tuner.space.feasible import FeasibleSet
from tuner.space.kernel import KernelSpec
from tuner.store import Store


@dataclass(frozen=True, slots=True)
class Session:
    """What the studies of one run share.

    Attributes:
        device: The device that is tuned for.
        shares_host: Whether compiling beside a measurement disturbs it.
        store: Where trials are kept.
        workers: The child processes.
        renderer: Renders the candidates.
        jobs: Number of candidates that compile at the same time.
        seed: Seed of everything random.
        stop: Set when the run is to end: searches end, finals still run.
        right: What finals found right on odd shapes: the same for every workload.
    """

    device: DeviceInfo
    shares_host: bool
    store: Store
    workers: Workers
    renderer: Renderer
    jobs: int
    seed: int
    stop: threading.Event = field(default_factory=threading.Event)
    right: set[Question] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Question:
    """Whether a source is right on odd shapes, in a dtype and with the guarantees asked for."""

    kernel: str
    source_sha256: str
    dtype: str
    asked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """A workload with what is needed to tune for it.

    Attributes:
        spec: Its kernel.
        task: The workload as children know it.
        feasible: What may be tried.
        seeds: What others found good: tried right after the default.
        weight: Its part of the budget, in proportion to the others'.
    """

    spec: KernelSpec
    task: Task
    feasible: FeasibleSet
    seeds: tuple[Candidate, ...] = ()
    weight: float = 1.0

    def render(self, renderer: Renderer, candidate: Candidate) -> Source:
        """Return a candidate's source."""
        language = self.spec.template(candidate.template).language
        return renderer.render(self.spec.kernel, language, candidate)

    def question(self, source: Source) -> Question:
        """Return what a check of a source on odd shapes answers."""
        workload = self.task.workload
        asked = self.spec.signature.asked(dict(workload.flags))
        return Question(workload.kernel, source.sha256, workload.dtype, asked)

    def judge(self, candidate: Candidate, built: Compiled | Rejection) -> Compiled | Rejection:
        """Return what compiling gave, or a rejection if its template requires something else."""
        if isinstance(built, Rejection):
            return built
        condition = self.spec.template(candidate.template).unfit(built.resources)
        if condition is None:
            return built
        return Rejection("compile", f"breaks {condition}: {built.resources}")
