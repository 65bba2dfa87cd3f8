"""Time to tune matmul, beside `triton.autotune` over the same configurations of the same kernel.

Both start with an empty cache of binaries, torch imported and the device in use. The two picks are
then timed beside torch.matmul in one process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotuned import autotune, autotuned_source
from contest import Contest, reason, summary
from evaluated import Evaluator
from rows import Result, ResultsFile, Spread

from tuner import codec
from tuner.ahead import choose
from tuner.catalog import Catalog, device_class, split_device
from tuner.children.worker import Workers
from tuner.cli.devices import jobs_or_cores, workers_for
from tuner.plan import subject_of
from tuner.records import Candidate, TunerError
from tuner.render import Renderer
from tuner.session import Subject
from tuner.space.kernel import load_space
from tuner.space.template import ITEMSIZES
from tuner.timing import finals
from tuner.timing.race import RaceResult

KERNEL, AUTOTUNE = "matmul", "triton.autotune"

TEMPLATES = {"cpu": "cpu"}
"""The template that is tuned by kind of device: of accelerators, the one named ``"triton"``."""

FINALISTS, FINAL_S = 5, 2.0

PICKED_S, REPEATS = 0.5, 3
"""Seconds in each of the repeats in which the picks are timed."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a tuner picked, and what that took.

    Attributes:
        picked: The candidate; None if the tuner failed.
        seconds: From the first source to the pick.
        search_s: The part of it until the last candidate was timed.
        note: What the time went into, or why it failed.
    """

    picked: Candidate | None
    seconds: float
    search_s: float
    note: str

    def result(self, label: str, count: int) -> Result:
        """Return its row, given the number of candidates."""
        if self.picked is None:
            return Result(label, None, note=self.note)
        spread = Spread(*[self.seconds * 1e3] * 3)
        return Result(label, spread, count / self.search_s, "candidates/s", self.note)


class Engine:
    """The tuner's own parts over given candidates: compile ahead, verify, time, race the best.

    Args:
        subject: The workload.
        renderer: Renders the candidates.
        workers: The children.
    """

    def __init__(self, subject: Subject, renderer: Renderer, workers: Workers) -> None:
        self._subject, self._renderer, self._workers = subject, renderer, workers

    def tune(self, candidates: Sequence[Candidate]) -> Tuned:
        """Return the best of the candidates, of which the first is the default."""
        start_s = time.perf_counter()
        evaluator = Evaluator(self._subject, self._renderer, self._workers)
        for candidate in candidates:
            evaluator.submit(candidate)
        found = {item: evaluator.evaluate(item, give_up=True).median_ms for item in candidates}
        timed = {item: time_ms for item, time_ms in found.items() if time_ms is not None}
        search_s = time.perf_counter() - start_s
        best = sorted(timed, key=lambda candidate: timed[candidate])[:FINALISTS]
        picked = self._final(list(dict.fromkeys([candidates[0], *best])))
        return Tuned(
            picked,
            time.perf_counter() - start_s,
            search_s,
            f"{len(timed)} of {len(candidates)} verified and timed in {search_s:.1f} s, then a "
            f"final of {FINAL_S:g} s between the best {FINALISTS}",
        )

    def _final(self, finalists: Sequence[Candidate]) -> Candidate:
        labels = {str(candidate): candidate for candidate in finalists}
        sources = [
            (label, self._subject.render(self._renderer, candidate))
            for label, candidate in labels.items()
        ]
        reply = self._workers.race(self._subject.task, sources, budget_s=FINAL_S, seed=0)
        if "race" not in reply:
            raise TunerError(f"the final was rejected: {reply}")
        result = codec.from_json(RaceResult, reply["race"])
        return labels[finals.pick(result, lambda _: (0.0,)).winner]


class Peer:
    """What is measured in this process: `triton.autotune`, and the picks beside the rival.

    Args:
        subject: The workload.
        renderer: Renders the candidates.
        device: Name of the device.
        folder: For files.
    """

    def __init__(self, subject: Subject, renderer: Renderer, *, device: str, folder: Path) -> None:
        from tuner.serve.bench import Bench  # loads torch, which the engine's parent does without
        from tuner.timing.clock import Clock

        kind, index = split_device(device)
        place = device_class(kind)(index)
        place.info()  # makes it the current device
        self._clock = Clock(place)
        self._clock.calibrate(place.empty_call())
        self._subject, self._renderer, self._folder = subject, renderer, folder
        self._bench = Bench(
            subject.spec.signature,
            subject.task.problem,
            workload=subject.task.workload,
            device=place,
            clock=self._clock,
        )

    def tune(self, candidates: Sequence[Candidate]) -> Tuned:
        """Return what `triton.autotune` picks from the candidates."""
        try:
            general = next(item for item in candidates if dict(item.parameters)["GROUP_M"] != 1)
            text = autotuned_source(self._subject.render(self._renderer, general), candidates)
            tensors = list(self._bench.sets[0].values())
            picked, seconds = autotune(text, candidates, tensors, self._folder)
        except Exception as error:  # such as a device without triton
            return Tuned(None, 0.0, 0.0, reason(error))
        return Tuned(
            picked, seconds, seconds, f"one call over {len(candidates)}; nothing is verified"
        )

    def picked(self, picks: Mapping[str, Candidate]) -> Iterator[Result]:
        """Yield the time of each pick and of the rival, measured in turn."""
        rival = self._bench.problem.RIVAL
        contenders = {label: self._calls(candidate) for label, candidate in picks.items()}
        contenders[rival] = self._bench.rival_calls()
        for call in contenders[rival]:
            call()  # a library that starts up cannot be captured
        outcomes = Contest(self._clock, PICKED_S, REPEATS, 0.0).hold(contenders)
        workload = self._subject.task.workload
        itemsize = ITEMSIZES[workload.dtype]
        flops, _ = self._bench.problem.cost(dict(workload.dims), {}, itemsize)
        for label, outcome in outcomes.items():
            note = str(picks.get(label, ""))
            if isinstance(outcome, str):
                yield Result(label, None, note=f"{outcome}; {note}")
                continue
            spread = summary(outcome)
            yield Result(label, spread, flops / spread.median_ms * 1e-6, "GFLOP/s", note)

    def _calls(self, candidate: Candidate) -> Any:
        from tuner.runtime.variant import SUFFIXES, load_variant

        source = self._subject.render(self._renderer, candidate)
        path = self._folder / f"{source.sha256}.{SUFFIXES[source.language]}"
        path.write_text(source.text, encoding="utf-8")
        variant = load_variant(self._subject.spec.signature, source.language, path=path)
        if fault := self._bench.verifier.check(variant):
            raise TunerError(f"{candidate}: {fault}")
        return self._bench.calls(variant)


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure both tuners and write the results."""
    catalog = Catalog()
    renderer = Renderer(catalog.template_folders)
    spec = load_space(catalog.space_path(KERNEL))
    workload = spec.workload(options.workload)
    jobs = jobs_or_cores(options.jobs)
    with workers_for(options.device, folder / "store", dict(os.environ), jobs=jobs) as workers:
        info = workers.info()
        task = subject_of(catalog, info, spec, workload).task
        names = [TEMPLATES.get(info.kind, "triton")]
        feasible = spec.feasible(dict(info.limits), info.kind, workload.dtype, only=names)
        subject = Subject(spec, task, feasible)
        candidates = choose(feasible, options.configurations, options.seed)
        workers.warm_up()  # as torch is imported here before the other tuner starts
        ours = Engine(subject, renderer, workers).tune(candidates)
    count, output = len(candidates), ResultsFile(options.output, info.name)
    tuned = {"tuner": ours}

    def write(op: str, results: Sequence[Result]) -> None:
        output.replace(op, str(workload), results)
        print(op, workload, *results, sep="\n  ", flush=True)

    def write_times() -> None:  # at once: the next tuner may be cut short
        op = f"matmul: tuning over {count} configurations, {jobs} jobs"
        write(op, [item.result(label, count) for label, item in tuned.items()])

    write_times()
    os.environ["TRITON_CACHE_DIR"] = str(folder / "autotune")  # empty, as ours was
    peer = Peer(subject, renderer, device=options.device, folder=folder)
    tuned[AUTOTUNE] = peer.tune(candidates)
    write_times()
    picks = {label: item.picked for label, item in tuned.items() if item.picked is not None}
    write(f"matmul: the pick from {count} configurations", list(peer.picked(picks)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workload", default="M=4096,N=4096,K=4096,dtype=bfloat16")
    parser.add_argument("--configurations", type=int, default=64)
    parser.add_argument("--jobs", type=int, help="all cores if left out")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--output", type=Path, required=True, help="CSV file to write or extend")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
