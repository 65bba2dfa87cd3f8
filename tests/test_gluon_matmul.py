"""The Gluon template of matmul in an emulator: its schedules, and what follows the product."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cover import LIMITS, cover
from test_triton_templates import CATALOG, FLAGS, write

from tuner.records import Candidate
from tuner.space.kernel import load_space

ROOT = Path(__file__).parent.parent
SHAPES = [{"M": 150, "K": 200, "N": 136}, {"M": 8, "K": 24, "N": 264}, {"M": 9, "K": 5, "N": 7}]
MISTAKES = (
    ("gl.expand_dims(bias, 0)", "0.0"),
    ("columns = off_n + gl", "columns = gl"),
    ("    fence_async_shared()\n    tma_store", "    tma_store"),
    ("accumulator = warpgroup_mma_wait(0, deps=(accumulator,))", "accumulator = accumulator"),
    ("ahead_k = off_k + AHEAD", "ahead_k = off_k + 2 * AHEAD"),
)

# The first test waits for the child.
pytestmark = pytest.mark.timeout(900)


def sample() -> list[Candidate]:
    template = load_space(CATALOG.space_path("matmul")).template("gluon_sm90")
    return cover(template, {**LIMITS, "itemsize": 2})


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("gluon")
    paths = (ROOT, ROOT / "tests", ROOT / "tests" / "conformance")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env={**environment, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_candidates_with_every_value_are_right(report):
    faults = report["candidates"]
    assert len(faults) == len(sample())
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_the_emulator_sees_every_mistake(report):
    assert [change for change, fault in report["mistakes"] if not fault] == []
    assert len(report["mistakes"]) == len(MISTAKES)


def fault(path: Path) -> str | None:
    """Return the first thing that is wrong with a file, or None."""
    from gluon_emulator import emulated

    from tuner.runtime.check import Case, load_problem
    from tuner.runtime.check import check as check_case
    from tuner.runtime.variant import load_variant

    signature = load_space(CATALOG.space_path("matmul")).signature
    problem = load_problem(CATALOG.problem_path("matmul"))
    with emulated():
        variant = load_variant(signature, "triton", path=path)
    for number, shape in enumerate(SHAPES):
        for flags in FLAGS["matmul"]:
            case = Case(shape, flags, "float16", misaligned=number == 2)
            try:
                found = check_case(variant, signature, problem, case)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found:
                return found
    return None


def main(folder: Path) -> dict:
    candidates = sample()
    paths = [write("matmul", "gluon_sm90", dict(item.parameters), folder) for item in candidates]
    mistakes = []
    for number, (old, new) in enumerate(MISTAKES):
        text = paths[0].read_text()
        assert old in text, old
        path = folder / f"mistake{number}.py"
        path.write_text(text.replace(old, new))
        mistakes.append((old, fault(path)))
    faults = [fault(path) for path in paths]
    return {
        "candidates": dict(zip(map(str, candidates), faults, strict=True)),
        "mistakes": mistakes,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
