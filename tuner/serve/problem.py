"""A user's problem file: what it must hold, and what its functions must return."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.records import UsageError
from tuner.runtime.check import load_problem
from tuner.runtime.signature import Signature


class CheckedProblem:
    """A problem's module, whose functions are refused where they return something else.

    Args:
        path: The module's file.
        signature: Signature of the kernel.

    Raises:
        UsageError: The file lacks something that checking a kernel needs.
    """

    def __init__(self, path: Path, signature: Signature) -> None:
        self._path, self._outputs = path, [spec.name for spec in signature.outputs]
        self._module: Any = load_problem(path)
        for name in ("reference", "tolerance"):
            if not callable(getattr(self._module, name, None)):
                raise UsageError(f"{path}: must define the function {name}()")
        for name in ("RIVAL", "EDGE_SHAPES"):
            if not hasattr(self._module, name):
                raise UsageError(f"{path}: must define {name}")
        for shape in self._module.EDGE_SHAPES:
            if not isinstance(shape, Mapping) or set(signature.dims) - set(shape):
                raise UsageError(
                    f"{path}: EDGE_SHAPES: {shape!r} must give the extent of each of "
                    f"{', '.join(signature.dims)}"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def reference(self, **arguments: Any) -> Any:
        """Return the outputs by name."""
        outputs = self._module.reference(**arguments)
        self._require("reference", outputs, self._outputs)
        return outputs

    def tolerance(self, *arguments: Any, **options: Any) -> Any:
        """Return rtol and atol."""
        allowed = self._module.tolerance(*arguments, **options)
        self._require("tolerance", allowed, ["rtol", "atol"])
        return allowed

    def _require(self, function: str, returned: object, names: list[str]) -> None:
        if isinstance(returned, Mapping) and set(returned) >= set(names):
            return
        got = ", ".join(map(repr, returned)) if isinstance(returned, Mapping) else type(returned)
        raise UsageError(
            f"{self._path}: {function}() must return a dictionary of {', '.join(names)}, "
            f"but returned {got}"
        )
