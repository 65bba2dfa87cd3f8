"""What a run tunes for: the kernels and workloads that the user asked for, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.catalog import Catalog, device_class
from tuner.children.task import Task
from tuner.package.freeze import Autograd, FrozenKernel
from tuner.records import DeviceInfo, UsageError, Workload
from tuner.session import Subject
from tuner.space.kernel import KernelSpec, load_space
from tuner.space.schema import read_captured_file
from tuner.space.template import TemplateSpec

_LEAST_WEIGHT = 0.01
"""Part of the budget that even a cheap workload gets."""


RANKS = "RANKS"
"""The dim of kernels that exchange between ranks, of which each has a device."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for.

    Attributes:
        kernels: Names of kernels; none stands for all that the device can run.
        workloads: Workloads in the command line's form, for one kernel.
        sets: Names of workload sets.
        captured: Files of captured workloads.
        goal: How the budget is shared: ``"equal"``, or ``"weighted"`` by what a captured program
            spends on each workload.
        ranks: Number of devices that run a kernel together.
    """

    kernels: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    captured: tuple[Path, ...] = ()
    goal: str = "equal"
    ranks: int = 1


def kernels_for(catalog: Catalog, kind: str, names: Sequence[str]) -> list[KernelSpec]:
    """Return the kernels that a kind of device can run.

    Args:
        catalog: Where kernels are.
        kind: Name of the device plug-in.
        names: Kernels that the user named; each must run on the device.

    Raises:
        UsageError: A named kernel is unknown or has no template for the device.
    """
    found = []
    for name in names or catalog.kernels:
        spec = load_space(catalog.space_path(name))
        if any(_runs_on(kind, template) for template in spec.templates):
            found.append(spec)
        elif names:
            offers = "; ".join(
                f"{item.name} ({item.language}) for {', '.join(item.devices)}"
                for item in spec.templates
            )
            languages = ", ".join(device_class(kind).languages)
            raise UsageError(
                f"{name} has no template for {kind!r}, which runs {languages}; it has: {offers}"
            )
    return found


def check_request(catalog: Catalog, request: Request) -> None:
    """Raise what is wrong with a request whatever the device, before one is asked.

    Raises:
        UsageError: A kernel is unknown, or a workload, a set or a file of them is none.
    """
    specs = [load_space(catalog.space_path(name)) for name in request.kernels]
    for path in request.captured:
        read_captured_file(path)
    for spec in specs:
        for name in request.sets:
            _require_set(spec, name)
    if len(specs) == 1:
        for text in request.workloads:
            specs[0].workload(text)


def plan(catalog: Catalog, device: DeviceInfo, request: Request) -> list[Subject]:
    """Return every workload to tune for, in the kernels' order.

    Raises:
        UsageError: Something in the request is unknown or does not fit the device.
    """
    specs = kernels_for(catalog, device.kind, request.kernels)
    if request.captured:
        return _captured(catalog, device, request, specs)
    if request.goal != "equal":
        raise UsageError(f"--goal {request.goal}: needs --workloads FILE, as tune capture writes")
    if request.workloads and len(specs) != 1:
        raise UsageError(
            f"--workload {request.workloads[0]!r} needs one KERNEL, but got "
            f"{', '.join(request.kernels) or 'none'}"
        )
    subjects = []
    for spec in specs:
        for workload in dict.fromkeys(_workloads(spec, device.kind, request)):
            if _fits_ranks(workload, request):
                subjects.append(subject_of(catalog, device, spec, workload))
    if not subjects:
        sets = request.sets or (device_class(device.kind).starter,)
        raise UsageError(f"no workload of {', '.join(sets)} is for {device.kind!r}")
    return subjects


def _captured(
    catalog: Catalog, device: DeviceInfo, request: Request, specs: Sequence[KernelSpec]
) -> list[Subject]:
    """Return the captured workloads that the device can run, the most expensive first."""
    if request.workloads or request.sets:
        raise UsageError("--workloads FILE: stands alone, without --workload and names of sets")
    known = {spec.kernel: spec for spec in specs}
    spent: dict[Workload, float] = {}
    for path in request.captured:
        for entry in read_captured_file(path).workloads:
            spec = known.get(entry.kernel)
            pairs = dict(pair.partition("=")[::2] for pair in entry.workload.split(","))
            if spec is None or pairs.get("dtype") not in _dtypes(spec, device.kind):
                continue
            workload = spec.workload(entry.workload)
            spent[workload] = spent.get(workload, 0.0) + entry.seconds
    if not spent:
        names = ", ".join(map(str, request.captured))
        raise UsageError(f"--workloads {names}: nothing in it is for {device.kind!r}")
    total = sum(spent.values())
    subjects = []
    for workload, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        subject = subject_of(catalog, device, known[workload.kernel], workload)
        if request.goal == "weighted" and total > 0:
            subject = replace(subject, weight=max(seconds / total, _LEAST_WEIGHT))
        subjects.append(subject)
    return subjects


def subject_of(
    catalog: Catalog, device: DeviceInfo, spec: KernelSpec, workload: Workload
) -> Subject:
    """Return one workload with what is needed to tune for it."""
    feasible = spec.feasible(
        dict(device.limits),
        device.kind,
        workload.dtype,
        dims=dict(workload.dims),
        flags=dict(workload.flags),
    )
    for part in feasible.templates:
        catalog.template_path(spec.kernel, part.spec.name, part.spec.language)
    task = Task(spec.signature.to_json(), catalog.problem_path(spec.kernel), workload, device)
    return Subject(spec, task, feasible)


def frozen_kernel(catalog: Catalog, spec: KernelSpec) -> FrozenKernel:
    """Return what a package keeps of a kernel."""
    section = spec.autograd
    autograd = None
    if section is not None:
        autograd = Autograd(section.operation, tuple(section.returns), section.backward)
    return FrozenKernel(
        signature=spec.signature,
        summary=spec.summary,
        problem=catalog.problem_path(spec.kernel),
        dtypes={template.name: tuple(template.dtypes) for template in spec.templates},
        autograd=autograd,
        lacks=spec.lacks,
    )


def _workloads(spec: KernelSpec, kind: str, request: Request) -> Iterator[Workload]:
    if request.workloads:
        yield from (spec.workload(text) for text in request.workloads)
        return
    dtypes = _dtypes(spec, kind)
    starter = device_class(kind).starter
    for name in request.sets or (starter if starter in spec.workloads else "starter",):
        if name not in spec.workloads:
            if request.kernels:
                _require_set(spec, name)
            continue
        yield from (item for item in spec.workloads[name] if item.dtype in dtypes)


def _require_set(spec: KernelSpec, name: str) -> None:
    if name not in spec.workloads:
        known = ", ".join(spec.workloads)
        raise UsageError(f"{spec.kernel} has no workloads {name!r}; it has: {known}")


def _dtypes(spec: KernelSpec, kind: str) -> set[str]:
    """Return the element types that a kernel has a template for on a kind of device."""
    return {
        dtype
        for template in spec.templates
        if _runs_on(kind, template)
        for dtype in template.dtypes
    }


def _fits_ranks(workload: Workload, request: Request) -> bool:
    """Return whether a workload is for as many ranks as there are; raise if it was asked for."""
    ranks = dict(workload.dims).get(RANKS, 1)
    if ranks != request.ranks and request.kernels:
        raise UsageError(
            f"{workload.kernel}: workload {str(workload)!r} is for {ranks} "
            f"{'ranks' if ranks > 1 else 'rank'}: write --ranks {ranks} or another workload"
        )
    return bool(ranks == request.ranks)


def _runs_on(kind: str, template: TemplateSpec) -> bool:
    return kind in template.devices and template.language in device_class(kind).languages
