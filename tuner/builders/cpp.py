"""C++ through the system's compiler, the way a frozen package does it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from tuner.plugins import Builder, BuildTask, RejectedBuild
from tuner.records import Resources, UsageError
from tuner.runtime.architecture import cpu_architecture
from tuner.runtime.cpp import CompileError, CppVariant, compile_source
from tuner.runtime.prebuilt import library_of

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
        try:
            return CppVariant(task.signature, _library(task))
        except (CompileError, OSError) as error:  # or it calls what is defined nowhere
            raise RejectedBuild(str(error)) from error

    def prebuild(self, task: BuildTask, folder: Path) -> Resources:
        """Store the shared object, which is for CPUs like the one at hand."""
        here = cpu_architecture()
        if task.device.arch != here:
            raise RejectedBuild(f"a compiler builds for the CPU that it runs on, which is {here}")
        target = library_of(task.path, folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_library(task), target)
        return Resources()


def _library(task: BuildTask) -> Path:
    try:
        return compile_source(task.path, cache=task.cache, compiler=task.compiler)
    except FileNotFoundError as error:  # no compiler: no candidate is to blame
        raise UsageError(str(error)) from error
    except CompileError as error:
        printed = str(error).replace(str(task.path), task.path.name)
        raise RejectedBuild("\n".join(printed.splitlines()[:_REASON_LINES])) from error
