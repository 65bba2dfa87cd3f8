"""Programs that wait for each other's parts of a row, played by as many processes.

Triton's interpreter runs the programs of a launch one after the other; several processes on one
memory, each with its own launch, are programs that run at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.catalog import Catalog
from tuner.records import Candidate
from tuner.render import Renderer

ROOT = Path(__file__).parent.parent
M, N, PART, PARTS = 3, 120, 64, 2
KERNELS = ("rms_norm", "softmax")
MISTAKE = ("sums_ptr + row * splits + part, total", "sums_ptr + row * splits, total")


def play(kernel: str, folder: Path, *mistake: str) -> subprocess.CompletedProcess[str]:
    """Run a rendered file, in which a text may be replaced, and compare it with torch."""
    candidate = Candidate.of("triton_parts", {"PART": PART, "NUM_WARPS": 2, "STREAMING": True})
    text = Renderer(Catalog().template_folders).render(kernel, "triton", candidate).text
    if mistake:
        assert mistake[0] in text
        text = text.replace(*mistake)
    path = folder / f"{kernel}.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, __file__, kernel, str(path)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_that_wait_make_whole_rows(kernel, tmp_path):
    played = play(kernel, tmp_path)
    assert played.returncode == 0, played.stderr


def test_a_part_that_is_stored_elsewhere_shows(tmp_path):
    played = play("rms_norm", tmp_path, *MISTAKE)
    assert "Tensor-likes are not close" in played.stderr


def launch(kernel: str, module, tensors: dict, programs: int) -> None:
    """Run some of the programs of a launch."""
    names = {
        "softmax": ("x", "y", "largest", "sums", "counts"),
        "rms_norm": ("x", "weight", "y", "rstd", "sums", "counts"),
    }[kernel]
    more = (1e-6,) if kernel == "rms_norm" else ()
    getattr(module, f"{kernel}_kernel")[(programs,)](
        *(tensors[name] for name in names),
        *(M, N, PARTS, *more),
        SPLITS=PARTS,
        PHASE="together",
    )


def main(kernel: str, path: str) -> None:
    import multiprocessing

    import torch

    from tuner.runtime.triton_module import import_file

    module = import_file(Path(path), "parts")
    shapes = {"x": (M, N), "weight": (N,), "y": (M, N), "rstd": (M,), "largest": (M, PARTS)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["sums"] = torch.full((M, PARTS), torch.nan)
    tensors["counts"] = torch.zeros(M + 1, dtype=torch.int32)
    for tensor in tensors.values():
        tensor.share_memory_()
    players = [
        multiprocessing.get_context("fork").Process(
            target=launch, args=(kernel, module, tensors, M)
        )
        for _ in range(PARTS)
    ]
    for player in players:
        player.start()
    for player in players:
        player.join()
    x = tensors["x"]
    expected = torch.softmax(x, 1)
    if kernel == "rms_norm":
        expected = torch.nn.functional.rms_norm(x, (N,), tensors["weight"], 1e-6)
    torch.testing.assert_close(tensors["y"], expected)
    assert tensors["counts"].tolist() == [PARTS] * M + [M * PARTS]


if __name__ == "__main__":
    main(*sys.argv[1:])
