"""The matmul template `triton` with its parameters left to `triton.autotune`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.records import Candidate, Source

_NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")
_GRID = 'triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"])'
_DECORATORS = """\
@triton.autotune(configs=CONFIGS, key=["M", "N", "K"])
@triton.heuristics({"EVEN_K": lambda given: given["K"] % given["BLOCK_K"] == 0})
"""


def autotuned_source(source: Source, candidates: Sequence[Candidate]) -> str:
    """Return a rendered file with its constants turned into parameters of the kernel.

    Args:
        source: The source of a candidate whose GROUP_M is above 1, which is the general case.
        candidates: The configurations.

    Raises:
        ValueError: The template no longer has a line that is replaced here.
    """
    parameters = "".join(f"    {name}: tl.constexpr,\n" for name in _NAMES)
    text = source.text
    for pattern, replacement in (
        *((rf" +{name}: tl\.constexpr = \d+\n", "") for name in _NAMES),
        (r"BLOCK_N: tl\.constexpr\):\n", "BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):\n"),
        (r"M, N, BLOCK_M, BLOCK_N\)\n", "M, N, BLOCK_M, BLOCK_N, GROUP_M)\n"),
        (r"    EVEN_K: tl\.constexpr,\n", f"    EVEN_K: tl.constexpr,\n{parameters}"),
        (
            r"(?<=\n)@triton\.jit\ndef matmul_kernel",
            f"{_DECORATORS}@triton.jit\ndef matmul_kernel",
        ),
        (r"    tiles = .*\n", f"\n    def grid(meta):\n        return ({_GRID},)\n\n"),
        (r"matmul_kernel\[\(tiles,\)\]", "matmul_kernel[grid]"),
        (r" +EVEN_K=.*\n", ""),
        (r" +num_warps=\d+,\n +num_stages=\d+,\n", ""),
        (
            r"import triton\.language as tl\n",
            f"import triton.language as tl\n{_configs(candidates)}",
        ),
    ):
        text = _swap(text, pattern, replacement)
    return text


def autotune(
    text: str, candidates: Sequence[Candidate], tensors: Sequence[Any], folder: Path
) -> tuple[Candidate, float]:
    """Return what `triton.autotune` picks and the seconds of the call in which it does.

    Args:
        text: What `autotuned_source` returned for the candidates.
        candidates: The configurations.
        tensors: a [M, K], b [K, N] and c [M, N].
        folder: Where the file is written.
    """
    import torch

    from tuner.runtime.triton_module import import_file

    path = folder / "autotuned_matmul.py"
    path.write_text(text, encoding="utf-8")
    module = import_file(path, "autotuned_matmul")
    torch.accelerator.synchronize()
    start_s = time.perf_counter()
    module.matmul(*tensors)
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - start_s
    best = module.matmul_kernel.best_config
    values = {**best.kwargs, "NUM_WARPS": best.num_warps, "NUM_STAGES": best.num_stages}
    return next(item for item in candidates if dict(item.parameters) == values), seconds


def _swap(text: str, pattern: str, replacement: str) -> str:
    text, count = re.subn(pattern, lambda _: replacement, text)
    if count != 1:
        raise ValueError(f"the template has {count} lines like {pattern!r}, not one")
    return text


def _configs(candidates: Sequence[Candidate]) -> str:
    lines = []
    for candidate in candidates:
        values = dict(candidate.parameters)
        warps, stages = values.pop("NUM_WARPS"), values.pop("NUM_STAGES")
        lines.append(f"    triton.Config({values}, num_warps={warps}, num_stages={stages}),\n")
    return f"\nCONFIGS = [\n{''.join(lines)}]\n"
