"""Variants that do the same on a workload are known as such before they are timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.builders.triton import TritonBuilder
from tuner.catalog import Catalog
from tuner.devices.cuda import Cuda
from tuner.plan import subject_of
from tuner.plugins import BuildTask
from tuner.records import Candidate
from tuner.render import Renderer
from tuner.space.kernel import load_space

CATALOG = Catalog()
SHORT, LONG = "M=4096,N=1024,dtype=bfloat16", "M=4096,N=131072,dtype=bfloat16"
FEW = "M=16,N=512,K=512,dtype=bfloat16"


def code(
    folder: Path,
    kernel: str,
    workload: str,
    template: str = "triton",
    *,
    instead: tuple[str, str] = ("", ""),
    **values: object,
) -> str | None:
    """Return the code of a template's default with other values, its text changed."""
    device, spec = Cuda.target("90"), load_space(CATALOG.space_path(kernel))
    default = dict(spec.template(template).default.parameters)
    subject = subject_of(CATALOG, device, spec, spec.workload(workload))
    candidate = Candidate.of(template, {**default, **values})
    source = subject.render(Renderer(CATALOG.template_folders), candidate)
    assert instead[0] in source.text
    path = folder / f"{len(list(folder.iterdir()))}.py"
    path.write_text(source.text.replace(*instead) if instead[0] else source.text)
    task = BuildTask(
        path=path,
        signature=spec.signature,
        workload=spec.workload(workload),
        device=device,
        cache=folder,
        compiler=None,
    )
    return TritonBuilder().compile(task).code


@pytest.mark.parametrize(
    "values", [{"RESIDENT": 4096}, {"BLOCK_N": 1024}, {"BACKWARD": True}, {"ONLINE": "lane"}]
)
def test_what_no_row_of_the_workload_reaches_makes_no_difference(tmp_path, values):
    fits = {"BLOCK_N": 1024} | values
    assert code(tmp_path, "softmax", SHORT) == code(tmp_path, "softmax", SHORT, **fits)


@pytest.mark.parametrize(
    "values",
    [
        {"NUM_WARPS": 16},
        {"PROGRAMS_PER_UNIT": 1},  # the same kernel but for a loop around it
        {"ROWS": 2, "RESIDENT": 1024, "BLOCK_N": 1024},
        {"RESIDENT": 1024, "BLOCK_N": 1024, "NUM_WARPS": 4},
    ],
)
def test_another_kernel_makes_a_difference(tmp_path, values):
    assert code(tmp_path, "softmax", SHORT) != code(tmp_path, "softmax", SHORT, **values)


def test_another_grid_makes_a_difference(tmp_path):
    one = code(tmp_path, "rms_norm_backward", LONG)
    assert one == code(tmp_path, "rms_norm_backward", LONG, RESIDENT=4096)
    assert one != code(tmp_path, "rms_norm_backward", LONG, PROGRAMS_PER_UNIT=8)


@pytest.mark.parametrize(
    "instead",
    [
        ("torch.empty(", "torch.zeros("),
        ("*(a, b, c, partial,", "*(b, a, c, partial,"),
        ("add_parts_kernel[grid](partial,", "add_parts_kernel[grid](partial.clone(),"),
    ],
)
def test_what_happens_between_launches_makes_a_difference(tmp_path, instead):
    one, same = (code(tmp_path, "matmul", FEW, "triton_split_k") for _ in range(2))
    assert one == same is not None
    assert one != code(tmp_path, "matmul", FEW, "triton_split_k", instead=instead)
