"""Triton and Gluon: compiled ahead for any target, with or without the device at hand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

from tuner.builders import _triton_binaries as _binaries
from tuner.plugins import Builder, BuildTask, Check, RejectedBuild
from tuner.records import DeviceInfo, Resources
from tuner.runtime.flags import Scalar
from tuner.runtime.triton_module import TritonVariant

_REASON_CHARACTERS = 600
_BYTES_PER_SPILL = 4
_SERIALIZED = "wgmma.mma_async instructions are serialized"
"""What ptxas says in the messages C7510 to C7515, each with another cause."""


class TritonBuilder(Builder):
    """Compiles by running a source's host function with launches turned into compilations.

    The tensors that it runs on are without data, and the driver is replaced by one that only
    names its target, so the binary is the one that the launch on the device will look up in
    triton's cache.
    """

    languages: ClassVar[tuple[str, ...]] = ("triton", "gluon")
    specialises: ClassVar[bool] = True

    def warm_up(self) -> None:
        """Import torch and triton."""
        import torch  # noqa: F401
        import triton  # noqa: F401

    def compile(self, task: BuildTask) -> Resources:
        """Compile every kernel that the host function launches on the task's workload."""
        if task.device.kind == "interpreter":
            return Resources()
        from tuner.builders._triton_code import Witness, meta_tensors  # loads torch

        tensors = meta_tensors(task)
        witness = Witness(tensors)
        with _targeting(task.device), _compiling_only(witness.launch) as kernels, witness:
            _call_on_meta_tensors(TritonVariant(task.signature, task.path), task, tensors)
        resources = _resources(kernels, dict(task.device.limits)["shared_bytes"])
        _binaries.build_own_launchers(kernels, task.device)
        return replace(resources, code=witness.code)

    def compile_checks(self, task: BuildTask, checks: Iterable[Check]) -> None:
        """Compile every kernel that the checks would launch, on tensors in the host's memory."""
        with _targeting(task.device), _compiling_only() as kernels:
            for check in checks:
                check(self.load(task))
        _binaries.build_own_launchers(kernels, task.device)

    def prebuild(self, task: BuildTask, folder: Path) -> Resources:
        """Compile, and store what triton's cache would hold after the workload's first call."""
        if task.device.kind not in ("cuda", "hip"):
            return super().prebuild(task, folder)
        cache = folder.with_name(f"{folder.name}.cache")
        with _binaries.cache_at(cache), _targeting(task.device), _compiling_only() as kernels:
            _call_on_meta_tensors(TritonVariant(task.signature, task.path), task)
            if task.device.kind == "cuda":
                _binaries.build_launchers(kernels, task.cache)
        _binaries.keep(cache, folder)
        return _resources(kernels, dict(task.device.limits)["shared_bytes"])

    def load(self, task: BuildTask) -> CheckedVariant:
        """Return the variant; triton finds the binaries compiled ahead in its cache."""
        return CheckedVariant(TritonVariant(task.signature, task.path))


class CheckedVariant:
    """A Triton variant whose compile errors are rejected builds, whenever they come up.

    Args:
        variant: The variant, which compiles when it is called on a new specialisation.
    """

    def __init__(self, variant: TritonVariant) -> None:
        self._variant = variant
        self.strided = variant.strided

    def bind(
        self,
        tensors: Mapping[str, Any],
        dims: Mapping[str, int],
        options: Mapping[str, Scalar],
    ) -> Callable[[], None]:
        """Return the call on these tensors."""
        call = self._variant.bind(tensors, dims, options)
        errors = _compile_errors()

        def checked() -> None:
            try:
                call()
            except errors as error:
                raise RejectedBuild(_reason(error)) from error

        return checked


class _TargetDriver:
    """Stands in for triton's driver where no device is touched: it knows its target alone."""

    def __init__(self, device: DeviceInfo) -> None:
        from triton.backends.compiler import GPUTarget

        limits = dict(device.limits)
        backend = {"cuda": "cuda", "hip": "hip"}.get(device.kind, device.kind)
        arch = limits["capability"] if backend == "cuda" else device.arch
        self._target = GPUTarget(backend, arch, limits["warp_size"])
        self._properties = {
            "max_shared_mem": limits["shared_bytes"],
            "multiprocessor_count": limits["compute_units"],
        }
        self.utils = self

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_properties(self, index: int | None) -> dict[str, int]:
        del index
        return self._properties


@contextmanager
def _targeting(device: DeviceInfo) -> Iterator[None]:
    from triton.runtime import driver

    driver.set_active(_TargetDriver(device))
    yield


@contextmanager
def _compiling_only(note: Callable[..., None] | None = None) -> Iterator[list[Any]]:
    """Turn launches into compilations and give the kernels; note what would have been launched."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    kernels: list[Any] = []

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        with redirect_stdout(StringIO()) as printed:
            kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        _keep_log(kernel, printed.getvalue())
        kernels.append(kernel)
        if note is not None:
            note(kernel, *arguments, grid=grid, **options)
        return kernel

    JITFunction.run, knobs.nvidia.dump_ptxas_log = compile_only, True
    try:
        yield kernels
    finally:
        JITFunction.run, knobs.nvidia.dump_ptxas_log = launch, False


def _keep_log(kernel: Any, text: str) -> None:
    """Keep what the assembler said beside the binary; one from the cache is said nothing of."""
    path = _log_path(kernel)
    if path is not None and text:
        scratch = path.with_suffix(f".{os.getpid()}.part")
        scratch.write_text(text)
        scratch.replace(path)


def _log_path(kernel: Any) -> Path | None:
    binaries = (path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    binary = next(binaries, None)
    return Path(binary).with_suffix(".ptxas") if binary else None


def _serialized(kernel: Any) -> bool:
    path = _log_path(kernel)
    return path is not None and path.exists() and _SERIALIZED in path.read_text()


def _call_on_meta_tensors(
    variant: TritonVariant, task: BuildTask, tensors: Mapping[str, Any] | None = None
) -> None:
    from tuner.builders._triton_code import meta_tensors

    extents = dict(task.workload.dims)
    options = task.signature.arguments(dict(task.workload.flags), extents)
    try:
        variant.bind(tensors or meta_tensors(task), extents, options)()
    except _compile_errors() as error:
        raise RejectedBuild(_reason(error)) from error


def _compile_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return (CompilationError, OutOfResources, PTXASError)


def _reason(error: BaseException) -> str:
    """Return the end of what the compiler says; an error in a called function is the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-_REASON_CHARACTERS:].strip()


def _resources(kernels: list[Any], shared_limit: int) -> Resources:
    shared = max((kernel.metadata.shared for kernel in kernels), default=0)
    if shared > shared_limit:
        raise RejectedBuild(
            f"needs {shared} bytes of shared memory; the device has {shared_limit}"
        )
    usages = [_cubin_usage(kernel) for kernel in kernels if "cubin" in kernel.asm]
    if not usages:
        return Resources(shared_bytes=shared)
    return Resources(
        shared_bytes=shared,
        registers=max(usage.get("REG", 0) for usage in usages),
        spills=max(usage.get("STACK", 0) // _BYTES_PER_SPILL for usage in usages),
        serialized=any(_serialized(kernel) for kernel in kernels),
    )


def _cubin_usage(kernel: Any) -> dict[str, int]:
    """Return what cuobjdump reads from the binary: registers, stack and more, by its names."""
    from triton import knobs

    path = next(path for name, path in kernel.metadata_group.items() if name.endswith(".cubin"))
    printed = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    fields = (item.split(":") for item in printed.split() if item.count(":") == 1)
    return {name: int(value) for name, value in fields if value.isdecimal()}
