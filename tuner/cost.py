"""The least work of workloads, asked of their problems in a process that may import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.records import ChildError, Workload
from tuner.space.template import ITEMSIZES

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a workload needs at least: floating-point operations, and bytes moved."""

    flops: float
    bytes: float


def costs_of(
    requests: Sequence[tuple[Path, Workload]], environment: Mapping[str, str]
) -> list[Cost | None]:
    """Return the cost of each workload; None where its problem states none that counts.

    Args:
        requests: The file of a problem, and the workload.
        environment: The process's whole environment.

    Raises:
        ChildError: The process failed as a whole.
    """
    if not requests:
        return []
    message = [[str(path.absolute()), codec.to_json(workload)] for path, workload in requests]
    root = str(Path(__file__).parent.parent)
    path = ":".join(filter(None, (root, environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cost"],
        input=json.dumps(message),
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ChildError(f"asking for the cost of workloads failed: {last[0]}")
    replies = json.loads(done.stdout.splitlines()[-1])
    return [None if reply is None else Cost(*reply) for reply in replies]


def _cost(path: str, workload: Workload) -> tuple[float, float] | None:
    from tuner.runtime.check import load_problem  # torch

    try:
        problem: Any = load_problem(Path(path))
        flops, moved = problem.cost(
            dict(workload.dims), dict(workload.flags), ITEMSIZES[workload.dtype]
        )
        cost = float(flops), float(moved)
    except Exception:  # the problem is the user's: without its cost there is no roofline
        return None
    return cost if min(cost) > 0 else None


def main() -> None:
    """Answer the requests on the standard input."""
    requests = json.load(sys.stdin)
    costs = [_cost(path, codec.from_json(Workload, data)) for path, data in requests]
    sys.stdout.write("\n" + json.dumps(costs))


if __name__ == "__main__":
    main()
