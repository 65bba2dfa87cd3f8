"""`tune verify`: a kernel's correctness suite, a line for each case."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from tuner.catalog import Catalog, device_class, split_device
from tuner.children.child import child_spec
from tuner.children.examiner import Examiner, Verdict
from tuner.children.task import Task
from tuner.cli.devices import jobs_or_cores, resolve_device
from tuner.records import (
    Candidate,
    DeviceInfo,
    Source,
    UsageError,
    Workload,
    format_value,
    parse_value,
)
from tuner.render import Renderer
from tuner.space.kernel import KernelSpec, load_space
from tuner.space.template import ITEMSIZES, TemplateSpec

_MOST_INTERPRETED = 5e7
"""Operations of a case up to which an interpreter takes seconds."""

_MOST_JOBS = 8
"""Children that answer at a time, each with a device context of its own, unless asked for."""

_SEED = 0


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `tune verify`, as the command line gives them."""

    kernel: str
    device: str
    template: str | None
    settings: tuple[str, ...]
    sample: int | None
    timeout: float
    jobs: int | None
    store: Path
    folders: tuple[Path, ...]


def verify_kernel(options: VerifyOptions, environment: Mapping[str, str]) -> int:
    """Run the suite on every template that the device has, and return the exit status."""
    catalog = Catalog(options.folders)
    spec = load_space(catalog.space_path(options.kernel))
    name = resolve_device(options.device, environment)
    candidates = [
        choose_candidate(spec, template, options.settings)
        for template in _templates(spec, split_device(name)[0], options.template)
    ]
    host = child_spec(name, options.store, environment)
    with ExitStack() as stack:
        examiners = [
            stack.enter_context(Examiner(host, options.timeout))
            for _ in range(_jobs(options.jobs, name))
        ]
        device = examiners[0].info()
        run = _Run(catalog, spec, device, options.store.absolute() / "sources", examiners)
        exams = list(run.exams(candidates, options.sample))
        failed = 0
        for number, (exam, verdict) in enumerate(run.verdicts(exams), 1):
            failed += verdict.fault is not None
            click.echo(f"{number}/{len(exams)} {exam} {_spell(verdict)}")
    passed = len(exams) - failed
    click.echo(
        f"{failed} of {len(exams)} failed" if failed else f"All tests passed {passed}/{passed}"
    )
    return 1 if failed else 0


def choose_candidate(
    spec: KernelSpec, template: TemplateSpec, settings: Sequence[str]
) -> Candidate:
    """Return a template's default with what ``NAME=VALUE`` settings change.

    Raises:
        UsageError: A setting is malformed or unknown, or the candidate breaks a constraint.
    """
    values, choices = dict(template.default.parameters), dict(template.parameters)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in choices:
            raise UsageError(f"--set {setting}: write NAME=VALUE; names: {', '.join(choices)}")
        if parse_value(text) not in choices[name]:
            allowed = ", ".join(map(format_value, choices[name]))
            raise UsageError(f"--set {setting}: {name} may be {allowed}")
        values[name] = parse_value(text)
    candidate = Candidate.of(template.name, values)
    for constraint in template.broken(candidate, {}):
        raise UsageError(f"{spec.kernel}: {candidate} breaks {constraint}")
    return candidate


@dataclass(frozen=True, slots=True)
class _Exam:
    """A case and the source that it is for."""

    template: str
    source: Source
    entry: dict[str, Any]

    def __str__(self) -> str:
        entry = self.entry
        values = {**entry["extents"], **entry["flags"], **entry["scalars"], **entry["options"]}
        parts = [f"{name}={_number(value)}" for name, value in values.items()]
        parts += ["misaligned"] if entry["misaligned"] else []
        return f"{self.template} {','.join([*parts, 'dtype=' + entry['dtype']])}"


@dataclass(frozen=True, slots=True)
class _Run:
    """The suite of a kernel on a device."""

    catalog: Catalog
    spec: KernelSpec
    device: DeviceInfo
    sources: Path
    examiners: Sequence[Examiner]

    def exams(self, candidates: Sequence[Candidate], sample: int | None) -> Iterator[_Exam]:
        """Yield every case of every candidate, or a sample of them."""
        found = [exam for candidate in candidates for exam in self._all(candidate)]
        wanted = sample or len(found)
        kept = random.Random(_SEED).sample(range(len(found)), min(wanted, len(found)))
        yield from (found[place] for place in sorted(kept))

    def verdicts(self, exams: Sequence[_Exam]) -> Iterator[tuple[_Exam, Verdict]]:
        """Yield what came of each case, in their order; every examiner has one at a time."""
        idle: SimpleQueue[Examiner] = SimpleQueue()
        for examiner in self.examiners:
            idle.put(examiner)

        def verdict(exam: _Exam) -> Verdict:
            examiner = idle.get()
            try:
                return self._verdict(exam, examiner)
            finally:
                idle.put(examiner)

        pool = ThreadPoolExecutor(len(self.examiners))
        try:
            yield from zip(exams, pool.map(verdict, exams), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _verdict(self, exam: _Exam, examiner: Examiner) -> Verdict:
        entry, kernel = exam.entry, self.spec.kernel
        extents, flags = tuple(entry["extents"].items()), tuple(entry["flags"].items())
        task = self._task(Workload(kernel, extents, entry["dtype"], flags))
        path = self.sources / f"{exam.source.sha256}.{_suffix(exam.source)}"
        return examiner.examine(task, entry, path=str(path), language=exam.source.language)

    def _all(self, candidate: Candidate) -> Iterator[_Exam]:
        kind, template = device_class(self.device.kind), self.spec.template(candidate.template)
        most = None if kind.timed else _MOST_INTERPRETED
        starters = self.spec.workloads.get(kind.starter, ())
        source = self._source(template, candidate)
        for dtype in template.dtypes:
            if dtype in kind.wrong_dtypes:
                click.echo(f"{template.name} {dtype}: {kind.kind} computes it wrongly")
                continue
            task = self._task(Workload(self.spec.kernel, (), dtype))
            workloads = [item for item in starters if item.dtype == dtype]
            entries, left_out = self.examiners[0].suite(task, workloads, most_operations=most)
            if left_out:
                click.echo(f"{template.name} {dtype}: {left_out} cases are too large here")
            lacks = self.spec.lacks(candidate)
            fair = [entry for entry in entries if not entry["flags"].keys() & set(lacks)]
            if unfair := len(entries) - len(fair):
                click.echo(
                    f"{template.name} {dtype}: {unfair} cases ask for what it does not give: "
                    f"{', '.join(lacks)}"
                )
            for entry in fair:
                yield _Exam(template.name, source, entry)

    def _source(self, template: TemplateSpec, candidate: Candidate) -> Source:
        for dtype in template.dtypes:
            limits = {**dict(self.device.limits), "itemsize": ITEMSIZES[dtype]}
            for constraint in template.broken(candidate, limits):
                raise UsageError(f"{candidate} breaks {constraint} on {self.device.name}")
        renderer = Renderer(self.catalog.template_folders)
        source = renderer.render(self.spec.kernel, template.language, candidate)
        path = self.sources / f"{source.sha256}.{_suffix(source)}"
        scratch = path.with_suffix(f".{os.getpid()}.part")
        scratch.write_text(source.text, encoding="utf-8")
        scratch.replace(path)
        return source

    def _task(self, workload: Workload) -> Task:
        problem = self.catalog.problem_path(self.spec.kernel)
        return Task(self.spec.signature.to_json(), problem, workload, self.device)


def _templates(spec: KernelSpec, kind: str, name: str | None) -> list[TemplateSpec]:
    """Return the named template, or all that a kind of device runs."""
    chosen = [spec.template(name)] if name else list(spec.templates)
    languages = device_class(kind).languages
    found = [item for item in chosen if kind in item.devices and item.language in languages]
    if not found:
        devices = sorted({device for item in chosen for device in item.devices})
        what = f"template {name!r} of {spec.kernel}" if name else spec.kernel
        raise UsageError(f"{what} does not run on {kind!r}; devices: {', '.join(devices)}")
    return found


def _jobs(asked: int | None, device: str) -> int:
    """Return how many cases run at a time: one where the device is the host's own processor."""
    if asked is None and device_class(split_device(device)[0]).shares_host:
        return 1
    return asked or min(jobs_or_cores(None), _MOST_JOBS)


def _suffix(source: Source) -> str:
    return "cpp" if source.language == "cpp" else "py"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


def _spell(verdict: Verdict) -> str:
    error = "" if verdict.error is None else f"error {verdict.error:.3g} of the tolerance "
    if verdict.fault is None:
        return f"{error}PASS"
    return f"{error}{' '.join(verdict.fault.split())} FAIL"
