"""Attention of a frozen package beside cuDNN, torch's flash kernels and FlashAttention-4.

Every contender of a workload is timed in one run, in turns. FlashAttention-4 takes part where its
wheels can be imported; installed with `pip install --target FOLDER`, both FOLDER and
FOLDER/nvidia_cutlass_dsl/dsl_packages belong on PYTHONPATH.

Example:
    python benchmarks/attention.py --device cuda --output benchmarks/results/attention_h200.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product

from kernels import Subject, measure, parser

from tuner.catalog import Catalog
from tuner.runtime.dispatch import MANIFEST, Manifest
from tuner.space.kernel import load_space

KERNELS = ("attention_forward", "attention_backward")


def subjects(options: argparse.Namespace, arch: str) -> Iterator[Subject]:
    """Yield the workloads: the same tokens in sequences of all lengths, in heads of all widths."""
    catalog = Catalog(options.kernels)
    for kernel in options.kernel or KERNELS:
        path = options.package / kernel / arch / MANIFEST
        if not path.exists():
            print(f"{path}: no such file; nothing of {kernel} is frozen for {arch}")
            continue
        spec, manifest = load_space(catalog.space_path(kernel)), Manifest(path.parent)
        sizes = product(options.head_dims, options.lengths, ("false", "true"))
        for head_dim, length, causal in sizes:
            batch, heads = options.tokens // length, options.hidden // head_dim
            shape = f"B={batch},H={heads},S={length},D={head_dim}"
            text = f"{shape},causal={causal},dtype={options.dtype}"
            yield Subject(path.parent.parent, spec.workload(text), manifest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return the exit status."""
    own = parser(__doc__)
    own.formatter_class = argparse.RawDescriptionHelpFormatter
    own.add_argument("--tokens", type=int, default=16384, help="batch times length")
    own.add_argument("--hidden", type=int, default=2048, help="heads times head_dim")
    own.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    lengths = [1024, 2048, 4096, 8192, 16384]
    own.add_argument("--lengths", type=int, nargs="+", default=lengths)
    own.add_argument("--dtype", default="bfloat16")
    own.set_defaults(device="cuda", skip=["torch efficient"])
    return measure(own.parse_args(arguments), subjects)


if __name__ == "__main__":
    sys.exit(main())
