"""Child processes on this machine: started, timed out and killed from here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from tuner.catalog import device_class, split_device
from tuner.children.host import ChildLost, Role
from tuner.records import ChildError

_TAIL_CHUNKS = 8
_CHUNK_BYTES = 4096
_EXIT_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How children are started on this machine.

    Attributes:
        device: Name of the device, with its index, such as ``"cuda:0"``.
        cache: Folder for what compilers write.
        compiler: The user's C++ compiler, if any.
        environment: The child's whole environment.
        ranks: Number of devices, from `device` on, that measure together.
    """

    device: str
    cache: Path
    compiler: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    ranks: int = 1

    def start(self, role: Role) -> ChildProcess:
        """Return a new child."""
        return ChildProcess(role, self)


def child_spec(
    device: str, store: Path, environment: Mapping[str, str], *, ranks: int = 1
) -> ChildSpec:
    """Return how children for a device are started, the store's folders made.

    Args:
        device: Name of the device.
        store: Folder of the stores, which holds sources and compiled objects.
        environment: The children's environment.
        ranks: Number of devices that measure together.
    """
    kind = device_class(split_device(device)[0])
    root = store.absolute()
    for folder in (root / "sources", root / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    variables = {
        **environment,
        **dict(kind.environment),
        "TRITON_CACHE_DIR": str(root / "cache" / "triton"),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    return ChildSpec(
        device,
        root / "cache",
        environment.get("CXX"),
        environment=tuple(variables.items()),
        ranks=ranks,
    )


class ChildProcess:
    """A child on this machine and the two pipes to it.

    Args:
        role: Whether it compiles or measures.
        spec: How it is started.
    """

    def __init__(self, role: Role, spec: ChildSpec) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        self._requests = os.fdopen(request_write, "wb", buffering=0)
        self._reply_fd = reply_read
        self._pending = b""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_CHUNKS)
        environment = dict(spec.environment)
        if role == "compile":  # as many of them as cores: threads of theirs would only spin
            environment["OMP_NUM_THREADS"] = "1"
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tuner.serve", role, spec.device),
                *(str(request_read), str(reply_write), str(os.getpid())),
                *(str(spec.cache), spec.compiler or "", str(spec.ranks)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(request_read, reply_write),
            start_new_session=True,
            env={**environment, "PYTHONPATH": path},
        )
        os.close(request_read)
        os.close(reply_write)
        # A child that floods its output must neither block nor fill the parent's memory.
        self._drain = threading.Thread(target=self._read_output, daemon=True)
        self._drain.start()

    def request(self, message: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Return the child's reply.

        Raises:
            ChildLost: The child died or did not reply in time; it is gone.
            ChildError: The tuner's own code failed in the child.
        """
        phase = "start"
        deadline = time.monotonic() + timeout_s
        try:
            self._requests.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self._lose(phase)
        while True:
            reply = self._read_line(deadline)
            if reply is None:
                late = time.monotonic() >= deadline
                self._lose(phase, timeout_s=timeout_s if late else None)
            elif "phase" in reply:
                phase = reply["phase"]
            elif "failure" in reply:
                raise ChildError(reply["failure"])
            else:
                return reply

    def kill(self) -> None:
        """End the child and everything that it started; return when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        if self._reply_fd >= 0:
            os.close(self._reply_fd)
            self._reply_fd = -1

    @property
    def output(self) -> str:
        """The last lines that the child printed."""
        return b"".join(self._tail).decode(errors="replace")[-_CHUNK_BYTES:].strip()

    def _read_output(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
            self._tail.append(chunk)
        stream.close()

    def _read_line(self, deadline: float) -> dict[str, Any] | None:
        while b"\n" not in self._pending:
            wait_s = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._reply_fd], [], [], wait_s)[0]:
                return None
            chunk = os.read(self._reply_fd, 1 << 16)
            if not chunk:
                return None
            self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _lose(self, phase: str, *, timeout_s: float | None = None) -> NoReturn:
        timed_out = timeout_s is not None
        if not timed_out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_GRACE_S)
            self._drain.join(_EXIT_GRACE_S)
        code = self._process.poll()
        self.kill()
        cause = f"no reply in {timeout_s:g} s" if timed_out else _describe_exit(code)
        last = self.output.splitlines()[-1:] or [""]
        message = f"{cause}; it printed: {last[0][:200]}" if last[0] else cause
        raise ChildLost(message, phase, timed_out=timed_out)

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
