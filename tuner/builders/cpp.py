"""C++ through the system's compiler, the way a frozen package does it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tuner.plugins import Builder, BuildTask, RejectedBuild
from tuner.records import Resources, UsageError
from tuner.runtime.cpp import CompileError, CppVariant, compile_source

_REASON_LINES = 6


class CppBuilder(Builder):
    """Builds shared objects with a C ABI."""

    languages: ClassVar[tuple[str, ...]] = ("cpp",)

    def compile(self, task: BuildTask) -> Resources:
        """Compile the source into the cache, unless its object is there."""
        _library(task)
        return Resources()

    def load(self, task: BuildTask) -> CppVariant:
        """Return the variant, its object loaded into this process."""
        return CppVariant(task.signature, _library(task))


def _library(task: BuildTask) -> Path:
    try:
        return compile_source(task.path, cache=task.cache, compiler=task.compiler)
    except FileNotFoundError as error:  # no compiler: no candidate is to blame
        raise UsageError(str(error)) from error
    except CompileError as error:
        printed = str(error).replace(str(task.path), task.path.name)
        raise RejectedBuild("\n".join(printed.splitlines()[:_REASON_LINES])) from error
