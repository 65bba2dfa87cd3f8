"""A child that is asked about variants case by case, and replaced when one kills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tuner import codec
from tuner.children.host import Child, ChildLost, Host
from tuner.children.task import Task
from tuner.children.worker import OWN_PHASES
from tuner.records import ChildError, DeviceInfo, Workload

_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case.

    Attributes:
        fault: What is wrong, or None.
        error: The largest error of an element over its tolerance, where there is a result.
    """

    fault: str | None
    error: float | None = None


class Examiner:
    """Asks a child for a kernel's cases and for a variant's answers.

    Args:
        host: Where the child is started.
        timeout_s: Seconds that a variant may take for a case.
    """

    def __init__(self, host: Host, timeout_s: float) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._child: Child | None = None

    def info(self) -> DeviceInfo:
        """Return what is known of the device.

        Raises:
            ChildError: The child cannot use the device.
        """
        return codec.from_json(DeviceInfo, self._ask({"operation": "info"})["info"])

    def suite(
        self, task: Task, workloads: Sequence[Workload], *, most_operations: float | None
    ) -> tuple[list[Any], int]:
        """Return the cases of a kernel with the task's dtype, and how many are left out.

        Args:
            task: The kernel and the dtype.
            workloads: Those that are cases, too.
            most_operations: Leave out what costs more.
        """
        extra = {"workloads": codec.to_json(tuple(workloads)), "most_operations": most_operations}
        reply = self._ask(task.message("suite", **extra))
        return reply["entries"], reply["left_out"]

    def examine(self, task: Task, entry: dict[str, Any], **source: str) -> Verdict:
        """Return what a variant makes of a case.

        Args:
            task: The case as a workload.
            entry: The case.
            **source: The variant's `path` and `language`.
        """
        try:
            self._ask(task.message("pose", entry=entry))
            reply = self._ask(task.message("answer", **source), timeout_s=self._timeout_s)
        except ChildLost as loss:
            self._child = None
            if loss.phase in OWN_PHASES:
                raise ChildError(f"a child was lost in the tuner's own code: {loss}") from loss
            return Verdict(f"{loss.phase}: {loss}")
        if reply.get("poisoned"):
            self.close()
        if "rejection" in reply:
            return Verdict(reply["rejection"]["reason"])
        return Verdict(reply["fault"], reply["error"])

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> Examiner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(
        self, message: dict[str, Any], *, timeout_s: float = _START_TIMEOUT_S
    ) -> dict[str, Any]:
        if self._child is None:
            self._child = self._host.start("measure")
            ready = {"operation": "ready", "measures": False}
            self._child.request(ready, timeout_s=_START_TIMEOUT_S)
        return self._child.request(message, timeout_s=timeout_s)
