"""What a kernel's YAML file says: its signature, its templates and its workloads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.records import Candidate, UsageError, Value, Workload
from tuner.runtime.expression import Expression, ExpressionError
from tuner.runtime.signature import Signature, TensorSpec, open_ended
from tuner.space.schema import AutogradFile, SignatureFile, TensorFile, read_kernel_file
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
        flags: Mapping[str, Value] | None = None,
    ) -> FeasibleSet:
        """Return what may be tried on a device: the union of the templates that are for it.

        Args:
            limits: The device's limits by name.
            device: Kind of the device, such as ``"cpu"``.
            dtype: Torch's name of the workload's element type.
            only: Names of the templates to keep; all when empty.
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
        chosen = [spec for spec in specs if device in spec.devices and dtype in spec.dtypes]
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
    try:
        signature = _signature(file.kernel, file.signature, f"{path.name}: signature")
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


def _signature(kernel: str, section: SignatureFile, where: str) -> Signature:
    """Return the signature, its names and expressions checked."""
    inputs, outputs = (
        tuple(_tensor(name, tensor) for name, tensor in part.items())
        for part in (section.inputs, section.outputs)
    )
    signature = Signature(
        kernel=kernel,
        inputs=inputs,
        outputs=outputs,
        flags=tuple((name, tuple(choices)) for name, choices in section.flags.items()),
        options=tuple((name, tuple(choices)) for name, choices in section.options.items()),
        scalars=tuple(section.scalars.items()),
        defaults=tuple(section.defaults.items()),
        valid=tuple(section.valid),
        guarantees=tuple(section.guarantees),
    )
    _check_names(signature, where)
    numbers = {name: choices for name, choices in signature.keywords if open_ended(choices)}
    if len({len(choices) for choices in numbers.values()}) > 1:
        raise UsageError(
            f"{where}: {', '.join(numbers)} must have as many examples each: they are tried "
            "together"
        )
    for name, text in signature.scalars:
        Expression(text, f"{where}.scalars.{name}", signature.dims)
    for name, text in signature.defaults:
        Expression(text, f"{where}.defaults.{name}", signature.dims)
    for position, text in enumerate(signature.valid):
        Expression(text, f"{where}.valid[{position}]", signature.dims)
    return signature


def _check_names(signature: Signature, where: str) -> None:
    """Refuse names that stand for two things and dims that no input has."""
    names = ["dtype", *(spec.name for spec in (*signature.inputs, *signature.outputs))]
    names += [*signature.dims, *dict(signature.keywords), *dict(signature.scalars)]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise UsageError(f"{where}: the name {name!r} stands for two things")
    _check_tensors(signature, where)
    required = [spec for spec in signature.inputs if not spec.optional]
    bound = list(dict.fromkeys(dim for spec in required for dim in spec.shape))
    uses = [(f"outputs.{spec.name}", dim) for spec in signature.outputs for dim in spec.shape]
    uses += [
        (f"inputs.{spec.name}", dim)
        for spec in signature.inputs
        if spec.optional
        for dim in spec.shape
    ]
    uses += [("defaults", dim) for dim, _ in signature.defaults]
    for key, dim in uses:
        if dim not in bound:
            raise UsageError(
                f"{where}.{key}: no input has the dim {dim!r}; known: {', '.join(bound)}"
            )


def _tensor(name: str, tensor: TensorFile) -> TensorSpec:
    shape = tuple(tensor.shape)
    return TensorSpec(name, shape, tensor.dtype, tensor.optional, tensor.transposed)


def _check_tensors(signature: Signature, where: str) -> None:
    """Refuse optional outputs, required inputs behind optional ones, and unknown transposes."""
    for spec in signature.outputs:
        if spec.optional or spec.transposed:
            raise UsageError(
                f"{where}.outputs.{spec.name}: only an input may be optional or transposed"
            )
    optional = [spec.optional for spec in signature.inputs]
    if optional != sorted(optional):
        raise UsageError(f"{where}.inputs: optional inputs must come last")
    choices = dict((*signature.flags, *signature.options))
    for spec in signature.inputs:
        flag = spec.transposed
        if flag is not None and (choices.get(flag) != (False, True) or len(spec.shape) < 2):
            raise UsageError(
                f"{where}.inputs.{spec.name}.transposed: {flag!r} must be a flag or option with "
                "the choices [false, true], and the tensor must have two dims or more"
            )


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
