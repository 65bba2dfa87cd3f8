"""Products of Gluon kernels read only what was set, as the assembler at hand compiles them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tuner.catalog import Catalog
from tuner.render import Renderer
from tuner.space.kernel import load_space

KERNELS = ("attention_backward", "attention_forward")
WORKLOADS = [
    f"B=1,H=4,S=1024,D={width},causal={causal},dtype=bfloat16"
    for width in (64, 128)
    for causal in ("true", "false")
]


def seeds_of(kernel: str) -> list:
    template = load_space(Catalog().space_path(kernel)).template("gluon_sm90")
    return [template.default, *template.seeds]


def doubtful(kernel: str, text: str, workload: str, folder: Path) -> dict[str, list[str]]:
    path = folder / "kernel.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "machine_code.py", kernel, path, workload],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def overlapped() -> str:
    candidate = next(item for item in seeds_of("attention_forward") if "overlapped" in str(item))
    return (
        Renderer(Catalog().template_folders).render("attention_forward", "gluon", candidate).text
    )


@pytest.mark.parametrize("workload", [item for item in WORKLOADS if "true" in item])
def test_products_of_overlapped_tiles_read_only_what_was_set(workload, tmp_path):
    found = doubtful("attention_forward", overlapped(), workload, tmp_path)
    assert found == {"attention_kernel": []}


def test_a_product_that_reads_what_a_skipped_loop_sets_is_found(tmp_path):
    from triton import knobs

    if not knobs.nvidia.ptxas.version.startswith("12.8"):
        pytest.skip(f"ptxas {knobs.nvidia.ptxas.version} is not known to make this mistake")
    lines = [line for line in overlapped().splitlines() if "* side" not in line]
    found = doubtful("attention_forward", "\n".join(lines), WORKLOADS[0], tmp_path)
    assert found["attention_kernel"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_products_of_first_guesses_read_only_what_was_set(kernel, workload, tmp_path):
    renderer = Renderer(Catalog().template_folders)
    for candidate in seeds_of(kernel):
        text = renderer.render(kernel, "gluon", candidate).text
        found = doubtful(kernel, text, workload, tmp_path)
        assert not any(found.values()), (candidate, found)
