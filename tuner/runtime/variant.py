"""A loaded kernel file, whatever its language."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .cpp import CppVariant, compile_source, user_cache
from .prebuilt import library_of, offer_to_triton
from .triton_module import TritonVariant

if TYPE_CHECKING:
    import torch

    from .flags import Scalar
    from .signature import Signature

SUFFIXES: Mapping[str, str] = {"cpp": "cpp", "triton": "py", "gluon": "py"}
"""The languages of kernels, each with its files' suffix."""


class Variant(Protocol):
    """A kernel that can be called.

    Attributes:
        strided: Names of the inputs that it reads through their strides; it wants the other
            tensors contiguous.
    """

    strided: frozenset[str]

    def bind(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        dims: Mapping[str, int],
        options: Mapping[str, Scalar],
    ) -> Callable[[], None]:
        """Return the call on these tensors, which the caller keeps alive as long as the call.

        Args:
            tensors: Inputs and outputs by name; an optional one may be None or missing.
            dims: Extent of every dim.
            options: Value of every flag and scalar; options of the signature may be missing.
        """
        ...


def load_variant(
    signature: Signature,
    language: str,
    *,
    path: Path,
    cache: Path | None = None,
    compiler: str | None = None,
) -> Variant:
    """Compile or import a rendered file; what was built for it before is not built again.

    Args:
        signature: Signature of the kernel.
        language: One of `SUFFIXES`.
        path: The rendered file.
        cache: Folder of compiled C++ objects; None stands for the user's own.
        compiler: C++ compiler's command; None looks for g++ and clang++.

    Raises:
        cpp.CompileError: The C++ compiler refused the file.
        FileNotFoundError: There is no C++ compiler.
    """
    if language == "cpp":
        with contextlib.suppress(OSError):  # there is none, or the system's libraries are older
            return CppVariant(signature, library_of(path))
        library = compile_source(path, cache=cache or user_cache(), compiler=compiler)
        return CppVariant(signature, library)
    if language in SUFFIXES:
        offer_to_triton(path)
        return TritonVariant(signature, path)
    raise ValueError(f"{path}: unknown language {language!r}; known: {', '.join(SUFFIXES)}")
