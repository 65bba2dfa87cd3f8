"""Calls a frozen Triton variant for an sm_90 card up to its driver; to ask a compiler is an error.

`python tests/prebuilt_child.py PACKAGE KERNEL FILE WORKLOAD [VERSION]`, where WORKLOAD is JSON and
VERSION stands for that of another Triton. Prints the kernels that were loaded, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import cache, driver


def refuse(*_: object, **__: object) -> None:
    raise SystemExit("a compiler was asked")


class Card:
    """Stands for the driver where a card would be needed; the rest of it is Triton's own."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    @cached_property
    def utils(self) -> Any:
        utils = nvidia.CudaUtils()
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 132}
        utils.get_device_properties = lambda _: properties
        utils.load_binary = self.load
        return utils

    def load(self, name: str, binary: bytes, *_: int) -> tuple[int, ...]:
        assert binary.startswith(b"\x7fELF")
        self.loaded.append(name)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        assert nvidia.CudaLauncher(source, metadata).launch is not None
        return lambda *_: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def main(arguments: list[str]) -> None:
    folder, kernel, file, text, *version = arguments
    package, workload = importlib.import_module(Path(folder).name), json.loads(text)
    CUDABackend.add_stages = knobs.build.impl = refuse
    if version:
        cache.triton_key = lambda: version[0]
    card = Card()
    driver.set_active(card)
    own = package._package.kernels[kernel]
    signature, dims = own.signature, workload["dims"]
    specs = (*signature.inputs, *signature.outputs)
    tensors = {
        spec.name: torch.empty(shape, dtype=getattr(torch, spec.dtype or workload["dtype"]))
        for spec, shape in signature.shapes(specs, dims)
    }
    options = signature.arguments(workload["flags"], dims)
    own.variant(Path(file), "triton").bind(tensors, dims, options)()
    print(json.dumps(card.loaded))


if __name__ == "__main__":
    main(sys.argv[1:])
