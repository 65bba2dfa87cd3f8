"""The functions of a frozen package, as its `__init__.py` spells them."""

from __future__ import annotations

import json
import keyword
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.records import UsageError
from tuner.runtime.flags import Scalar, open_ended, spell_choices
from tuner.runtime.signature import Signature
from tuner.runtime.tensor_spec import TensorSpec

_LINE_LENGTH = 99

_NEEDED = frozenset(("numpy", "torch", "triton", "tuner"))
"""Modules that packages and the tuner import: a package of that name would stand before them."""

_GUARANTEES = {
    "deterministic": "True asks for equal bits in every run, as torch's own setting does."
}


@dataclass(frozen=True, slots=True)
class Autograd:
    """The public differentiable operation of a kernel.

    Attributes:
        operation: Its name.
        returns: The kernel's outputs that it returns, those with a gradient.
        backward: Name of the kernel that computes the gradients. Its inputs are named like the
            forward kernel's inputs or outputs, or ``d`` and one of `returns`; its outputs ``d``
            and an input of the forward kernel.
    """

    operation: str
    returns: tuple[str, ...]
    backward: str


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the package.

    Attributes:
        name: Its name.
        kernel: The kernel that it calls.
        signature: The kernel's signature.
        summary: One line that says what it computes.
        returns: Names of the outputs that it returns.
        note: A further paragraph of its docstring, if any.
    """

    name: str
    kernel: str
    signature: Signature
    summary: str
    returns: tuple[str, ...]
    note: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the kernel's outputs; one that is not returned is left out as ``_name``."""
        return tuple(
            spec.name if spec.name in self.returns else f"_{spec.name}"
            for spec in self.signature.outputs
        )

    @property
    def heading(self) -> str:
        """Its first lines, broken where they are too long."""
        begin, end = f"def {self.name}(", f") -> {self._annotation}:"
        parameters = ", ".join(self._parameters)
        if len(begin + parameters + end) <= _LINE_LENGTH:
            return begin + parameters + end
        if len(parameters) + 4 <= _LINE_LENGTH:
            return f"{begin}\n    {parameters}\n{end}"
        return "\n".join([begin, *(f"    {item}," for item in self._parameters), end])

    @property
    def arguments(self) -> tuple[str, ...]:
        """What it passes on to the operation."""
        options = _options(self.signature)
        return (*_names(self.signature.inputs), *(f"{name}={name}" for name in options))

    @property
    def argument_lines(self) -> tuple[str, ...]:
        """Its docstring's lines on the arguments."""
        signature = self.signature
        spelled = {name: f"{_choices(choices)}." for name, choices in signature.keywords}
        spelled |= {name: _GUARANTEES[name] for name in signature.guarantees}
        options = [f"{name}: {text}" for name, text in spelled.items()]
        scalars = [f"{name}: None stands for {text}." for name, text in signature.scalars]
        return (*map(_line, signature.inputs), *options, *scalars)

    @property
    def return_lines(self) -> tuple[str, ...]:
        """Its docstring's lines on what it returns."""
        return tuple(_line(spec) for spec in self.signature.outputs if spec.name in self.returns)

    @property
    def has_literals(self) -> bool:
        """Whether a type of its parameters is a Literal."""
        kinds = (_annotation(choices) for _, choices in self.signature.keywords)
        return any(kind.startswith("Literal") for kind in kinds)

    @property
    def _parameters(self) -> list[str]:
        signature = self.signature
        parameters = [
            f"{spec.name}: Tensor | None = None" if spec.optional else f"{spec.name}: Tensor"
            for spec in signature.inputs
        ]
        parameters += ["*"] if _options(signature) else []
        parameters += [
            f"{name}: {_annotation(choices)} = {_literal(choices[0])}"
            for name, choices in signature.keywords
        ]
        return parameters + [f"{name}: float | None = None" for name, _ in signature.scalars]

    @property
    def _annotation(self) -> str:
        if len(self.returns) == 1:
            return "Tensor"
        return f"tuple[{', '.join('Tensor' for _ in self.returns)}]"


def functions_of(
    kernels: Mapping[str, tuple[Signature, str, Autograd | None]],
) -> list[Function]:
    """Return the functions of a package, sorted by name.

    Each kernel has one; a kernel whose backward kernel is in the package has another that is
    differentiable and hides what only the backward kernel needs. Where both would have one name,
    there is the second alone, whether or not its backward kernel is in the package.

    Args:
        kernels: Signature, summary and autograd section of each kernel by name.

    Raises:
        UsageError: Two functions have one name, a name is no identifier, or a backward kernel
            does not fit its forward kernel.
    """
    functions = []
    for kernel, (signature, summary, autograd) in kernels.items():
        text = summary.strip().rstrip(".") + "."
        plain = Function(kernel, kernel, signature, text, _names(signature.outputs))
        if autograd is None:
            functions.append(plain)
            continue
        note = ""
        if autograd.backward in kernels:
            check_backward(signature, kernels[autograd.backward][0], autograd)
            note = "Differentiable once; the derivative of its derivative is refused."
        named = Function(autograd.operation, kernel, signature, text, autograd.returns, note)
        if autograd.operation == kernel:
            functions.append(named)
        else:
            functions += [plain, named] if note else [plain]
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the package would have two functions named {name!r}")
        check_name(name)
    return sorted(functions, key=lambda function: function.name)


def check_name(name: str) -> None:
    """Raise UsageError unless a name can be imported, and nothing else is imported by it."""
    if not name.isidentifier():
        raise UsageError(f"{name!r} cannot be imported: write letters, digits and underscores")
    if keyword.iskeyword(name):
        raise UsageError(f"{name!r} cannot be imported: it is a word of the language")
    if name in sys.stdlib_module_names or name in _NEEDED:
        raise UsageError(f"{name!r} is the name of another module: it could not be imported then")


def check_backward(forward: Signature, backward: Signature, autograd: Autograd) -> None:
    """Raise UsageError unless a backward kernel's names fit its forward kernel's."""
    where = f"{forward.kernel}: autograd"
    outputs = _names(forward.outputs)
    gradients = tuple(f"d{name}" for name in autograd.returns)
    options, backward_options = _options(forward), _options(backward)
    for what, names, allowed in (
        ("returns", autograd.returns, outputs),
        ("input", _names(backward.inputs), (*_names(forward.inputs), *outputs, *gradients)),
        ("output", _names(backward.outputs), [f"d{name}" for name in _names(forward.inputs)]),
        ("flag or scalar", backward_options, options),
    ):
        for name in names:
            if name not in allowed:
                owner = "" if what == "returns" else f"{autograd.backward}'s "
                raise UsageError(
                    f"{where}: {owner}{what} {name!r} must be one of {', '.join(allowed)}"
                )


def _options(signature: Signature) -> tuple[str, ...]:
    return tuple(name for name, _ in (*signature.keywords, *signature.scalars))


def _names(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs)


def _annotation(choices: tuple[Scalar, ...]) -> str:
    if isinstance(choices[0], bool):
        return "bool"
    if open_ended(choices):
        return "int"
    return f"Literal[{', '.join(map(_literal, choices))}]"


def _choices(choices: tuple[Scalar, ...]) -> str:
    return spell_choices(choices) if open_ended(choices) else " or ".join(map(_literal, choices))


def _literal(value: Scalar) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _line(spec: TensorSpec) -> str:
    shape = f"[{', '.join(spec.shape)}]"
    if spec.transposed:
        swapped = ", ".join(spec.dims({spec.transposed: True}))
        shape += f", or [{swapped}] if {spec.transposed}"
    shape += f", {spec.dtype}" if spec.dtype else ""
    return f"{spec.name}: {shape}{'; None leaves it out' if spec.optional else ''}."
