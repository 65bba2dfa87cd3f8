"""What a child answers: it compiles, verifies and measures on its device."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tuner import codec
from tuner.catalog import builder_for
from tuner.plugins import BuildTask, Device
from tuner.records import DeviceInfo, Workload
from tuner.runtime.cpp import compiler_version, find_compiler
from tuner.runtime.signature import Signature
from tuner.serve.blame import BlamedVariant, BlamingTimer, Rejected, VariantError, rejection_of
from tuner.serve.presence import presence
from tuner.timing.clock import Clock

Message = dict[str, Any]


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
        self._question: Any = None
        self._bench_key = ""

    def answer(self, message: Message) -> Message:
        """Return the reply to a request."""
        operations: Mapping[str, Callable[[Message], Message]] = {
            "ready": self._ready,
            "prepare": self._prepare,
            "info": self._info,
            "present": lambda message: {"found": presence(message["kinds"])},
            "compile": self._compile,
            "evaluate": self._evaluate,
            "verify": self._verify,
            "race": self._race,
            "survey": self._survey,
            "choose": self._choose,
            "experiments": self._experiments,
            "experiment": self._experiment,
            "suite": self._suite,
            "pose": self._pose,
            "answer": self._answer,
        }
        try:
            return operations[message["operation"]](message)
        except Exception as error:
            rejection = rejection_of(error, message)
            if rejection is None:
                raise
            poisoned = isinstance(error, VariantError) and not self._device.answers()
            return {"rejection": codec.to_json(rejection), "poisoned": poisoned}

    def _ready(self, message: Message) -> Message:
        """Import what will be needed, and calibrate the clock for measurements."""
        if not message["measures"]:
            for language in self._device.languages:
                builder_for(language).warm_up()
        else:
            self._announce("prepare")
            import tuner.serve.bench  # noqa: F401 - loads torch

            self._device.info()  # says in a line if it is not here
            _ = self._clock
        return {}

    def _info(self, _: Message) -> Message:
        info = self._device.info()
        if "cpp" in info.languages:
            with contextlib.suppress(FileNotFoundError):  # who compiles will hear of it
                compiler = compiler_version(find_compiler(self._compiler))
                info = replace(info, versions=(*info.versions, ("compiler", compiler)))
        return {"info": codec.to_json(info)}

    def _prepare(self, message: Message) -> Message:
        """Make the buffers and references of a workload, before any variant's time runs."""
        self._bench_for(message)
        return {}

    def _compile(self, message: Message) -> Message:
        self._announce("compile")
        task, folder = self._task(message, message), message.get("folder")
        started = time.perf_counter()
        builder = builder_for(message["language"])
        build = partial(builder.prebuild, folder=Path(folder)) if folder else builder.compile
        resources = build(task)
        seconds = time.perf_counter() - started
        if message["edges"] and builder.specialises:
            from tuner.serve.verify import edge_checks  # loads torch

            number, parts = message["edges"]
            key = (json.dumps(message["signature"]), Path(message["problem"]), task.workload.dtype)
            checks = edge_checks(*key, task.signature.asked(dict(task.workload.flags)))
            builder.compile_checks(task, checks[number::parts])
        return {"compile_s": seconds, "resources": codec.to_json(resources)}

    def _evaluate(self, message: Message) -> Message:
        bench = self._bench_for(message)
        variant = self._checked_variant(bench, message, message)
        pace: Any = message.get("pace")
        bench.follow(pace, lambda: self._loaded(bench, message, pace))
        self._announce("measure")
        options = {name: message[name] for name in ("give_up_ms", "ceilings")}
        timing, fault = bench.measure(variant, **options)
        if fault is not None:
            raise Rejected("correctness", fault)
        return {"timing": timing}

    def _verify(self, message: Message) -> Message:
        self._checked_variant(self._bench_for(message), message, message, edges=True)
        return {}

    def _race(self, message: Message) -> Message:
        bench = self._bench_for(message)
        variants = self._variants(bench, message)
        self._announce("measure")
        return dict(bench.race(variants, budget_s=message["budget_s"], seed=message["seed"]))

    def _survey(self, message: Message) -> Message:
        """Time variants that compete for nothing, whose contenders need not be right."""
        bench = self._bench_for(message)
        variants = self._variants(bench, message)
        self._announce("measure")
        options = {name: message[name] for name in ("budget_s", "seed", "rival")}
        result: Message = bench.survey(variants, **options)
        return result

    def _choose(self, message: Message) -> Message:
        """Return which file of a frozen package serves a workload on this device."""
        from tuner.serve.choice import choose

        signature = Signature.from_json(message["signature"])
        workload = codec.from_json(Workload, message["workload"])
        return {"choice": choose(Path(message["folder"]), signature, workload, self._device)}

    def _experiments(self, _: Message) -> Message:
        from tuner.serve.experiments import experiments

        return {"names": list(experiments(self._device))}

    def _experiment(self, message: Message) -> Message:
        """Try what the device can do: that it raises something is what was found."""
        from tuner.serve.experiments import attempt

        self._announce("measure")
        reply = attempt(message["name"], self._device, self._clock)
        return {**reply, "poisoned": "reason" in reply and not self._device.answers()}

    def _suite(self, message: Message) -> Message:
        from tuner.serve.suite import suite

        self._announce("prepare")
        return suite(message)

    def _pose(self, message: Message) -> Message:
        from tuner.serve.suite import Question

        self._announce("prepare")
        self._question = Question(message, self._device.torch_device)
        return {}

    def _answer(self, message: Message) -> Message:
        self._announce("compile")
        variant = builder_for(message["language"]).load(self._task(message, message))
        self._announce("verify")
        return dict(self._question.answer(BlamedVariant(variant, self._device, waits=True)))

    def _variants(self, bench: Any, message: Message) -> dict[str, BlamedVariant]:
        contenders = message["contenders"]
        return {item["label"]: self._checked_variant(bench, message, item) for item in contenders}

    def _checked_variant(
        self, bench: Any, message: Message, item: Message, *, edges: bool = False
    ) -> BlamedVariant:
        self._announce("compile")
        builder = builder_for(item["language"])
        variant = self._loaded(bench, message, item)
        if message.get("verify", True):
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
        from tuner.serve.ranks.bench import bench_kind

        key = json.dumps([message["problem"], message["workload"]], sort_keys=True)
        if self._bench_key != key:
            self._announce("prepare")
            self._bench = None  # frees the buffers of the workload before
            self._bench = bench_kind(self._device)(
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

    def _loaded(self, bench: Any, message: Message, item: Message) -> Any:
        return bench.load(builder_for(item["language"]), self._task(message, item))

    def _task(self, message: Message, item: Message) -> BuildTask:
        return BuildTask(
            path=Path(item["path"]),
            signature=Signature.from_json(message["signature"]),
            workload=codec.from_json(Workload, message["workload"]),
            device=codec.from_json(DeviceInfo, message["device"]),
            cache=self._cache,
            compiler=self._compiler,
        )
