"""The ``signature`` section of a kernel's file."""

from __future__ import annotations

from tuner.records import UsageError
from tuner.runtime.expression import Expression
from tuner.runtime.flags import open_ended
from tuner.runtime.signature import Signature
from tuner.runtime.tensor_spec import TensorSpec
from tuner.space.schema import SignatureFile, TensorFile


def read_signature(kernel: str, section: SignatureFile, where: str) -> Signature:
    """Return the signature, its names and expressions checked.

    Args:
        kernel: Name of the kernel.
        section: The ``signature`` section of its file.
        where: What errors begin with: the file and the section.

    Raises:
        UsageError: A name stands for two things or is unknown, or a choice is not possible.
        ExpressionError: An expression is wrong.
    """
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
    names += [*signature.dims, *(name for name, _ in (*signature.keywords, *signature.scalars))]
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
