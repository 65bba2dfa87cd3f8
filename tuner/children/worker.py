"""The compile children that run ahead and the one child that measures, as the study sees them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.children.host import Child, ChildLost, Host, HostLost, Role
from tuner.children.task import DEFAULT_LIMITS, Compiled, Limits, Task
from tuner.records import (
    ChildError,
    DeviceInfo,
    Measurement,
    Outcome,
    Rejection,
    Resources,
    Source,
)

OWN_PHASES = ("start", "prepare")
"""Phases in which a child runs the tuner's own code: losing it there blames no candidate."""

_START_TIMEOUT_S = 300.0


class Lethal(Exception):
    """A source killed its child or made it hang; the rejection says at what stage."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason)
        self.rejection = rejection


class Workers:
    """Starts, times out, kills and replaces children.

    Args:
        host: Where children are started.
        jobs: Number of children that compile.
        sources: Folder where sources lie as files named by their hash.
        limits: How long one candidate may take.
    """

    def __init__(
        self, host: Host, *, jobs: int, sources: Path, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._host = host
        self._sources = sources
        self._limits = limits
        self._local = threading.local()
        self._children: set[Child] = set()
        self._jobs = jobs
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="compile")
        self._measuring: Child | None = None
        self._prepared: Task | None = None

    @property
    def jobs(self) -> int:
        """Number of children that compile."""
        return self._jobs

    def info(self) -> DeviceInfo:
        """Return what the measuring child knows of the device.

        Raises:
            ChildError: The child cannot use the device.
        """
        reply = self._ask({"operation": "info"}, timeout_s=_START_TIMEOUT_S)
        return codec.from_json(DeviceInfo, reply["info"])

    def warm_up(self) -> None:
        """Start every compile child, so that no candidate's time goes into their imports."""
        wait([self._pool.submit(self._compile_child) for _ in range(self._jobs)])

    def path_of(self, source: Source) -> Path:
        """Return the file of a source, written if it is not there."""
        path = self._sources / f"{source.sha256}.{'cpp' if source.language == 'cpp' else 'py'}"
        if not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
            scratch.write_text(source.text)
            scratch.replace(path)
        return path

    def compile(
        self, task: Task, source: Source, *, edges: tuple[int, int] | None = None
    ) -> Future[Compiled | Rejection]:
        """Compile a source in the background.

        Args:
            task: The workload to specialise for.
            source: What to compile.
            edges: Which part of what the checks on odd shapes call to compile, too: its number,
                from 0, and the number of parts.

        The future raises `Lethal` when the compiler hung or its child died.
        """
        return self.submit(task, edges=edges, **self.describe(source))

    def compile_edges(self, task: Task, source: Source) -> list[Future[Compiled | Rejection]]:
        """Compile what the checks of a source on odd shapes call, spread over all children."""
        parts = [(number, self._jobs) for number in range(self._jobs)]
        return [self.compile(task, source, edges=part) for part in parts]

    def submit(self, task: Task, **values: object) -> Future[Compiled | Rejection]:
        """Have a compile child answer "compile" in the background, as `compile` does."""
        return self._pool.submit(self._compile, task.message("compile", **values))

    def evaluate(
        self,
        task: Task,
        source: Source,
        compiled: Compiled,
        *,
        give_up_ms: float | None,
        pacer: Source | None = None,
    ) -> Outcome:
        """Verify a compiled source and, if it is right, time it.

        Args:
            task: The workload.
            source: What to evaluate.
            compiled: What its compilation gave.
            give_up_ms: Stop timing a variant that is far slower than this.
            pacer: What takes `give_up_ms`, to be timed beside it.

        Raises:
            Lethal: The variant killed or hung its child.
        """
        pace = pacer and {**self.describe(pacer), "median_ms": give_up_ms}
        options = {"give_up_ms": give_up_ms, "pace": pace, **self.describe(source)}
        message = task.message("evaluate", **options)
        reply = self._measure(task, message, timeout_s=self._limits.run_s)
        if "rejection" in reply:
            return codec.from_json(Rejection, reply["rejection"])
        timing = reply["timing"]
        return Measurement(**timing, compile_s=compiled.compile_s, resources=compiled.resources)

    def verify(self, task: Task, path: Path, language: str) -> Rejection | None:
        """Check a file on its workload and on every odd shape; None if it is right.

        Raises:
            Lethal: The variant killed or hung its child.
        """
        message = task.message("verify", path=str(path), language=language)
        reply = self._measure(task, message, timeout_s=self._limits.run_s)
        return codec.from_json(Rejection, reply["rejection"]) if "rejection" in reply else None

    def race(
        self, task: Task, sources: Sequence[tuple[str, Source]], *, budget_s: float, seed: int
    ) -> dict[str, Any]:
        """Time labelled sources and the rival in turns; the reply holds the race's result.

        Raises:
            Lethal: A variant killed or hung its child.
        """
        contenders = [{"label": label, **self.describe(source)} for label, source in sources]
        message = task.message("race", contenders=contenders, budget_s=budget_s, seed=seed)
        return self._measure(task, message, timeout_s=self._limits.run_s + 4 * budget_s)

    def ask(
        self, operation: str, *, timeout_s: float, task: Task | None = None, **values: object
    ) -> dict[str, Any]:
        """Return the measuring child's reply to any other operation of `tuner.serve.server`.

        Raises:
            Lethal: A variant killed or hung its child.
        """
        if task is None:
            return self._ask({"operation": operation, **values}, timeout_s=timeout_s)
        return self._measure(task, task.message(operation, **values), timeout_s=timeout_s)

    def restart(self) -> None:
        """End the measuring child; the next request starts a fresh one."""
        if self._measuring is not None and self._measuring in self._children:
            self._measuring.kill()
            self._children.discard(self._measuring)

    def close(self) -> None:
        """End every child, whatever it is doing."""
        for child in tuple(self._children):
            child.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for child in tuple(self._children):
            child.kill()
        self._children.clear()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, source: Source) -> dict[str, str]:
        """Return what a request says of a source."""
        return {"path": str(self.path_of(source)), "language": source.language}

    def _compile(self, message: dict[str, Any]) -> Compiled | Rejection:
        reply = self._request(self._compile_child(), message, self._limits.compile_s)
        if "rejection" in reply:
            return codec.from_json(Rejection, reply["rejection"])
        return Compiled(reply["compile_s"], codec.from_json(Resources, reply["resources"]))

    def _compile_child(self) -> Child:
        """Return the compile child of this thread, started if there is none."""
        child: Child | None = getattr(self._local, "child", None)
        if child is None or child not in self._children:
            child = self._local.child = self._start("compile")
        return child

    def _measure(self, task: Task, message: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Ask the measuring child about a variant of a task that it was prepared for."""
        if self._measuring not in self._children or self._prepared != task:
            self._ask(task.message("prepare"), timeout_s=_START_TIMEOUT_S)
            self._prepared = task
        return self._ask(message, timeout_s=timeout_s)

    def _ask(self, message: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        if self._measuring is None or self._measuring not in self._children:
            self._measuring = self._start("measure")
        reply = self._request(self._measuring, message, timeout_s)
        if reply.get("poisoned"):
            self.restart()
        return reply

    def _start(self, role: Role) -> Child:
        child = self._host.start(role)
        self._children.add(child)
        ready = {"operation": "ready", "measures": role == "measure"}
        self._request(child, ready, _START_TIMEOUT_S)
        return child

    def _request(self, child: Child, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return a child's reply; one that is lost is none of the children any more."""
        try:
            return child.request(message, timeout_s=timeout_s)
        except HostLost:
            self._children.discard(child)
            raise
        except ChildLost as loss:
            self._children.discard(child)
            if loss.phase in OWN_PHASES:
                raise ChildError(f"a child was lost in the tuner's own code: {loss}") from loss
            raise Lethal(Rejection(loss.stage, f"{loss.phase}: {loss}")) from loss
