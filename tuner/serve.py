"""The child's loop: compile, verify, measure; started by `tuner.child` as a process of its own."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.blame import BlamedVariant, BlamingTimer, VariantError
from tuner.catalog import builder_for, device_class, split_device
from tuner.plugins import BuildTask, Device, RejectedBuild
from tuner.records import DeviceInfo, Rejection, Stage, TunerError, Workload
from tuner.runtime.signature import Signature
from tuner.runtime.variant import Variant
from tuner.tether import die_with_parent
from tuner.timing.calibration import BelowFloor
from tuner.timing.clock import Clock

_COMPILE_NICENESS = 10

Message = dict[str, Any]


class Rejected(Exception):
    """Carries a rejection to the reply."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.rejection = Rejection(stage, reason)


class Server:
    """Answers one request after the other.

    Args:
        device: The device, which a compile child never touches.
        cache: Folder for what compilers write.
        compiler: The user's C++ compiler, if any.
        announce: Tells the parent what phase begins.
    """

    def __init__(
        self,
        device: Device,
        *,
        cache: Path,
        compiler: str | None,
        announce: Callable[[str], None],
    ) -> None:
        self._device = device
        self._cache = cache
        self._compiler = compiler
        self._announce = announce
        self._bench: Any = None
        self._bench_key = ""
        self._edges: dict[str, list[Any]] = {}

    def answer(self, message: Message) -> Message:
        """Return the reply to a request."""
        operations: Mapping[str, Callable[[Message], Message]] = {
            "ready": self._ready,
            "prepare": self._prepare,
            "info": lambda _: {"info": codec.to_json(self._device.info())},
            "compile": self._compile,
            "evaluate": self._evaluate,
            "verify": self._verify,
            "race": self._race,
        }
        try:
            return operations[message["operation"]](message)
        except Rejected as rejected:
            return {"rejection": codec.to_json(rejected.rejection)}
        except RejectedBuild as error:
            return {"rejection": codec.to_json(Rejection("compile", str(error)))}
        except BelowFloor as error:
            return {"rejection": codec.to_json(Rejection("runtime", str(error)))}
        except VariantError as error:
            rejection = Rejection("runtime", str(error))
            return {"rejection": codec.to_json(rejection), "poisoned": self._poisoned()}

    def _ready(self, message: Message) -> Message:
        """Import what will be needed, and calibrate the clock for measurements."""
        if not message["measures"]:
            for language in self._device.languages:
                builder_for(language).warm_up()
        else:
            self._announce("prepare")
            import tuner.bench  # noqa: F401 - loads torch

            self._device.info()  # says in a line if it is not here
            _ = self._clock
        return {}

    def _prepare(self, message: Message) -> Message:
        """Make the buffers and references of a workload, before any variant's time runs."""
        self._bench_for(message)
        return {}

    def _compile(self, message: Message) -> Message:
        self._announce("compile")
        task = self._task(message, message)
        started = time.perf_counter()
        builder = builder_for(message["language"])
        resources = builder.compile(task)
        seconds = time.perf_counter() - started
        if message["edges"] and builder.specialises:
            builder.compile_checks(task, self._edge_checks(message))
        return {"compile_s": seconds, "resources": codec.to_json(resources)}

    def _edge_checks(self, message: Message) -> list[Callable[[Variant], object]]:
        from tuner.runtime.check import load_problem
        from tuner.verify import edge_examples

        key = json.dumps([message["problem"], message["workload"]["dtype"]])
        if key not in self._edges:
            signature = Signature.from_json(message["signature"])
            problem = load_problem(Path(message["problem"]))
            dtype = message["workload"]["dtype"]
            self._edges[key] = edge_examples(signature, problem, dtype, "cpu")
        return [example.check for example in self._edges[key]]

    def _evaluate(self, message: Message) -> Message:
        bench = self._bench_for(message)
        variant = self._checked_variant(bench, message, message)
        self._announce("measure")
        return {"timing": bench.measure(variant, give_up_ms=message["give_up_ms"])}

    def _verify(self, message: Message) -> Message:
        bench = self._bench_for(message)
        self._checked_variant(bench, message, message, edges=True)
        return {}

    def _race(self, message: Message) -> Message:
        bench = self._bench_for(message)
        variants = {
            item["label"]: self._checked_variant(bench, message, item)
            for item in message["contenders"]
        }
        self._announce("measure")
        result: Message = bench.race(variants, budget_s=message["budget_s"], seed=message["seed"])
        return result

    def _checked_variant(
        self, bench: Any, message: Message, item: Message, *, edges: bool = False
    ) -> BlamedVariant:
        self._announce("compile")
        builder = builder_for(item["language"])
        variant = builder.load(self._task(message, item))
        checked = BlamedVariant(variant, self._device, waits=True)
        self._announce("verify")
        fault = bench.verifier.check(checked)
        if fault is None and (edges or not builder.specialises):
            fault = bench.verifier.check_edges(checked)
        if fault is not None:
            raise Rejected("correctness", fault)
        return BlamedVariant(variant, self._device, waits=False)

    def _bench_for(self, message: Message) -> Any:
        # Imported here because a compile child needs no torch.
        from tuner.bench import Bench

        key = json.dumps([message["problem"], message["workload"]], sort_keys=True)
        if self._bench_key != key:
            self._announce("prepare")
            self._bench = None  # frees the buffers of the workload before
            self._bench = Bench(
                Signature.from_json(message["signature"]),
                Path(message["problem"]),
                workload=codec.from_json(Workload, message["workload"]),
                device=self._device,
                clock=self._clock,
            )
            self._bench_key = key
        return self._bench

    @cached_property
    def _clock(self) -> Clock:
        clock = Clock(BlamingTimer(self._device))
        clock.calibrate(self._device.empty_call())
        return clock

    def _task(self, message: Message, item: Message) -> BuildTask:
        return BuildTask(
            path=Path(item["path"]),
            signature=Signature.from_json(message["signature"]),
            workload=codec.from_json(Workload, message["workload"]),
            device=codec.from_json(DeviceInfo, message["device"]),
            cache=self._cache,
            compiler=self._compiler,
        )

    def _poisoned(self) -> bool:
        """Return whether the device no longer answers, so that this process must be replaced."""
        try:
            self._device.probe()
        except Exception:
            return True
        return False


def main(arguments: list[str]) -> None:
    """Serve until the parent closes its pipe.

    Args:
        arguments: Role, device, file descriptors of requests and replies, the parent's process
            id, the cache folder and the compiler.
    """
    role, name, requests, replies, parent, cache, compiler = arguments
    die_with_parent(role, int(parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, index = split_device(name)
    device = device_class(kind)(index)
    if role == "measure":
        device.confine()
    else:
        os.nice(_COMPILE_NICENESS)  # a measurement must never wait for a compiler
    out = os.fdopen(int(replies), "w", buffering=1)

    def send(reply: Message) -> None:
        out.write(json.dumps(reply) + "\n")

    server = Server(
        device,
        cache=Path(cache),
        compiler=compiler or None,
        announce=lambda phase: send({"phase": phase}),
    )
    with os.fdopen(int(requests)) as lines:
        for line in lines:
            try:
                send(server.answer(json.loads(line)))
            except TunerError as error:
                send({"failure": str(error)})
            except Exception:
                send({"failure": traceback.format_exc()})


if __name__ == "__main__":
    main(sys.argv[1:])
