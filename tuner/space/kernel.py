"""What a kernel's YAML file says: its signature, its templates and its workloads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.records import Candidate, UsageError, Value, Workload
from tuner.runtime.expression import ExpressionError
from tuner.runtime.signature import Signature
from tuner.space.schema import AutogradFile, read_kernel_file
from tuner.space.signature import read_signature
from tuner.space.template import ITEMSIZES, TemplateSpec, template_spec
from tuner.space.workload import parse_workload

if TYPE_CHECKING:
    from tuner.space.feasible import FeasibleSet

LIMITS = (
    *("threads", "l1_bytes", "l2_bytes", "l3_bytes", "vector_bytes", "vector_registers"),
    *("shared_bytes", "warp_size", "max_threads", "compute_units", "capability"),
)
"""Names of the device limits that constraints may use; a device need not have them all."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel as its YAML file describes it.

    Attributes:
        kernel: Name of the kernel.
        summary: One line of mathematics.
        signature: Its arguments.
        templates: Its implementations, in the file's order.
        workloads: Named sets of workloads; ``"starter"`` is what a plain run tunes.
        autograd: The differentiable operation that the kernel is the forward half of.
        path: The file.
    """

    kernel: str
    summary: str
    signature: Signature
    templates: tuple[TemplateSpec, ...]
    workloads: Mapping[str, tuple[Workload, ...]]
    autograd: AutogradFile | None
    path: Path

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that some template is for, in order of first appearance."""
        return tuple(dict.fromkeys(dtype for spec in self.templates for dtype in spec.dtypes))

    def template(self, name: str) -> TemplateSpec:
        """Return a template by its name."""
        for spec in self.templates:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in self.templates)
        raise UsageError(f"{self.kernel} has no template {name!r}; it has: {known}")

    def workload(self, text: str) -> Workload:
        """Return the workload that the command line's form describes.

        Args:
            text: Such as ``"M=512,N=512,K=512,dtype=float32"``; dims with a default, flags and
                the dtype may be left out.
        """
        return parse_workload(self.signature, self.dtypes, text)

    def lacks(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the guarantees that a candidate does not give; all, if its template is gone."""
        guarantees = self.signature.guarantees
        if candidate.template not in (spec.name for spec in self.templates):
            return guarantees
        template = self.template(candidate.template)
        return tuple(
            name
            for name in guarantees
            if any(template.broken(candidate, {item: item == name for item in guarantees}))
        )

    def feasible(
        self,
        limits: Mapping[str, int],
        device: str,
        dtype: str,
        *,
        only: Collection[str] = (),
        dims: Mapping[str, Value] | None = None,
        flags: Mapping[str, Value] | None = None,
    ) -> FeasibleSet:
        """Return what may be tried on a device: the union of the templates that are for it.

        Args:
            limits: The device's limits by name.
            device: Kind of the device, such as ``"cpu"``.
            dtype: Torch's name of the workload's element type.
            only: Names of the templates to keep; all when empty.
            dims: The workload's; templates that do not suit them are left out, but the first.
            flags: The workload's, which may ask for guarantees.

        Raises:
            UsageError: If no template or no candidate is left; it names the constraint that
                rejects most.
        """
        from tuner.space.combinations import TemplateSet  # numpy, which listing kernels needs not
        from tuner.space.feasible import FeasibleSet

        specs = [self.template(name) for name in only] if only else self.templates
        asked = {name: bool((flags or {}).get(name)) for name in self.signature.guarantees}
        values = {**limits, "itemsize": ITEMSIZES.get(dtype, 0), **asked}
        possible = [spec for spec in specs if device in spec.devices and dtype in spec.dtypes]
        chosen = [
            spec for spec in possible if spec is possible[0] or not dims or spec.is_for(dims)
        ]
        if not chosen:
            offers = "; ".join(
                f"{spec.name}: {', '.join(spec.devices)} with {', '.join(spec.dtypes)}"
                for spec in specs
            )
            raise UsageError(
                f"{self.path.name}: no template is for {device} with {dtype}; there is {offers}"
            )
        for spec in chosen:
            _check_limits(spec, values)
        try:
            parts = [TemplateSet(spec, values) for spec in chosen]
            return FeasibleSet([part for part in parts if part.size] or parts)
        except ExpressionError as error:
            raise UsageError(str(error)) from error


def load_space(path: Path, limits: Collection[str] = LIMITS) -> KernelSpec:
    """Return a kernel's search space, checked as far as that needs no device.

    Args:
        path: The YAML file.
        limits: Names of device limits that constraints may use.

    Raises:
        UsageError: If something in the file is wrong; the message quotes the file, the key, the
            value and what is allowed.
    """
    file = read_kernel_file(path)
    if file.kernel != path.stem:
        raise UsageError(
            f"{path.name}: kernel: must be {path.stem!r}, like the file, but got {file.kernel!r}"
        )
    try:
        signature = read_signature(file.kernel, file.signature, f"{path.name}: signature")
        known = [*limits, *signature.guarantees]
        templates = tuple(
            template_spec(
                name,
                section,
                where=f"{path.name}: templates.{name}",
                limits=known,
                dims=signature.dims,
            )
            for name, section in file.templates.items()
        )
        spec = KernelSpec(file.kernel, file.summary, signature, templates, {}, file.autograd, path)
        return _with_workloads(spec, file.workloads)
    except ExpressionError as error:
        raise UsageError(str(error)) from error


def _check_limits(spec: TemplateSpec, values: Mapping[str, Value]) -> None:
    """Refuse a device that does not state a limit which a constraint names."""
    for constraint in spec.constraints:
        names = constraint.require.names.difference(values, dict(spec.parameters))
        for name in sorted(names):
            raise UsageError(
                f"{constraint.require.where}: the device states no {name!r}; "
                f"it states: {', '.join(values)}"
            )


def _with_workloads(spec: KernelSpec, sets: Mapping[str, list[str]]) -> KernelSpec:
    """Return the spec with its named workloads parsed."""
    parsed = {}
    for name, texts in sets.items():
        workloads: list[Workload] = []
        for position, text in enumerate(texts):
            where = f"{spec.path.name}: workloads.{name}[{position}]"
            try:
                workload = spec.workload(text)
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from error
            if workload in workloads:
                raise UsageError(f"{where}: {workload} is there twice")
            workloads.append(workload)
        parsed[name] = tuple(workloads)
    if "starter" not in parsed:
        raise UsageError(f"{spec.path.name}: workloads: needs a set named 'starter'")
    return replace(spec, workloads=parsed)
