"""Import a rendered Triton or Gluon file and call its host function on torch tensors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .cpp import CompileError

if TYPE_CHECKING:
    import torch

    from .flags import Scalar
    from .signature import Signature


class TritonVariant:
    """A rendered Triton file, called through the host function that bears the kernel's name.

    The file may say ``STRIDED = ("b",)``: the inputs whose strides its host function passes on.

    Args:
        signature: Signature of the kernel.
        path: The rendered file; triton reads the kernels' text from it.

    Raises:
        CompileError: It has no host function.
    """

    def __init__(self, signature: Signature, path: Path) -> None:
        self.module = import_file(path, f"{__name__}.{signature.kernel}_{path.stem}")
        if not hasattr(self.module, signature.kernel):
            raise CompileError(f"it has no host function {signature.kernel}")
        self.entry: Callable[..., None] = getattr(self.module, signature.kernel)
        self.strided = frozenset[str](getattr(self.module, "STRIDED", ()))
        specs = (*signature.inputs, *signature.outputs)
        self._names = tuple(item.name for item in specs if not item.optional)
        self._optional = tuple(item.name for item in specs if item.optional)

    def bind(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        dims: Mapping[str, int],
        options: Mapping[str, Scalar],
    ) -> Callable[[], None]:
        """Return the call on these tensors.

        Args:
            tensors: Inputs and outputs by name; optional ones go to the host function by keyword.
            dims: Extent of every dim; the host function reads them off the tensors.
            options: Value of every flag and scalar.
        """
        del dims
        entry, arguments = self.entry, [tensors[name] for name in self._names]
        given = {name: tensors[name] for name in self._optional if tensors.get(name) is not None}
        keywords = {**options, **given} if given else options
        return lambda: entry(*arguments, **keywords)


def import_file(path: Path, name: str) -> ModuleType:
    """Import a Python file that lies outside of any package under a name of its own.

    Args:
        path: The file.
        name: Name of the module; what bore it before is replaced.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and triton look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
