"""What ptxas made of a kernel: is what a warpgroup's product reads set on every way there?

The assembler of CUDA 12.8 may compute a descriptor for two loops before the first one, where it
is left out if that one is skipped. `python tests/machine_code.py KERNEL FILE WORKLOAD`
prints, as JSON, where such products are in each kernel that a Gluon file compiles to for sm_90.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuner.builders import triton as builder
from tuner.catalog import Catalog
from tuner.devices.cuda import Cuda
from tuner.plugins import BuildTask
from tuner.runtime.triton_module import TritonVariant
from tuner.space.kernel import load_space

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.MULTILINE)
_SKIP = re.compile(r"@!?P\d BRA 0x([0-9a-f]+)")
_PRODUCT = re.compile(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]")
_SET = re.compile(r"(R2UR|U[A-Z0-9.]+) (?:U?P\w+, )?UR(\d+),")


def doubtful_products(kernel: Any) -> Iterator[str]:
    """Yield the addresses of products that read a register which only skipped code sets.

    Args:
        kernel: A compiled kernel for sm_90.
    """
    code = [(int(place, 16), text) for place, text in _INSTRUCTION.findall(_machine_code(kernel))]
    skips = [(here, int(m[1], 16)) for here, text in code if (m := _SKIP.match(text))]
    set_at: dict[int, int] = {}
    for here, text in code:
        if product := _PRODUCT.match(text):
            second = int(product[2]) + 2  # the first holds nothing if a factor is in registers
            read = [second] if product[1] else [second - 2, second]
            places = [set_at[register] for register in read if register in set_at]
            if any(a < place < b <= here for place in places for a, b in skips):
                yield hex(here)
        elif change := _SET.match(text):
            if change[1] == "R2UR":  # it may bring back what was put aside
                set_at.pop(int(change[2]), None)
            else:
                set_at[int(change[2])] = here


def _machine_code(kernel: Any) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(kernel: str, file: str, workload: str) -> None:
    spec, path, device = load_space(Catalog().space_path(kernel)), Path(file), Cuda.target("90")
    task = BuildTask(path, spec.signature, spec.workload(workload), device, path.parent)
    with builder._targeting(device), builder._compiling_only() as kernels:
        builder._call_on_meta_tensors(TritonVariant(task.signature, path), task)
    print(json.dumps({item.metadata.name: list(doubtful_products(item)) for item in kernels}))


if __name__ == "__main__":
    main(*sys.argv[1:])
