"""What the checks on odd shapes call is compiled ahead, its parts in any child."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tuner.catalog import Catalog
from tuner.children.task import Compiled
from tuner.cli.devices import workers_for
from tuner.devices.cuda import Cuda
from tuner.plan import Request, plan
from tuner.render import Renderer
from tuner.serve.verify import edge_checks


def binaries(folder: Path) -> dict[Path, int]:
    """Return when each binary in a cache was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.cubin")}


def test_parts_compile_all_that_the_checks_call(tmp_path):
    """Triton compiles for a GPU that is not here; what one part leaves out another has."""
    catalog, device = Catalog(), Cuda.target("90")
    (subject, *_) = plan(catalog, device, Request(("softmax",), ("M=64,N=256,dtype=float16",)))
    source = subject.render(Renderer(catalog.template_folders), subject.feasible.default)
    found = []
    for jobs in (1, 2):
        store = tmp_path / str(jobs)
        environment = {**os.environ, "TRITON_CACHE_DIR": str(store / "binaries")}
        with workers_for("cuda", store, environment, jobs=jobs) as workers:
            task = subject.task
            assert isinstance(workers.compile(task, source).result(), Compiled)
            alone = binaries(store)
            parts = workers.compile_edges(task, source)
            assert len(parts) == jobs
            assert all(isinstance(part.result(), Compiled) for part in parts)
            found.append(binaries(store))
            assert len(found[-1]) > len(alone)
            for edges in ((0, 2), (1, 2), (0, 1)):
                workers.compile(task, source, edges=edges).result()
            assert binaries(store) == found[-1], "something was compiled again or anew"
    names = [sorted(path.parent.name for path in each) for each in found]
    assert names[0] == names[1]


def test_odd_shapes_are_one_question_for_all_extents_of_a_dtype_and_its_guarantees():
    catalog, device = Catalog(), Cuda.target("90")
    workload = "B=1,H=2,S={},D=64,causal=true,deterministic={},dtype={}"
    asked = [(64, "false", "float16"), (128, "false", "float16")]
    others = [(64, "true", "float16"), (64, "false", "bfloat16")]
    lines = tuple(workload.format(*item) for item in (*asked, *others))
    subjects = plan(catalog, device, Request(("attention_backward",), lines))
    candidate = subjects[0].feasible.default
    renderer = Renderer(catalog.template_folders)
    questions = [item.question(item.render(renderer, candidate)) for item in subjects]
    assert questions[0] == questions[1]
    assert len(set(questions)) == 3


def test_what_is_compiled_ahead_asks_for_the_guarantees_of_the_workload():
    catalog, device = Catalog(), Cuda.target("90")
    for deterministic in ("false", "true"):
        line = f"B=1,H=2,S=64,D=64,deterministic={deterministic},dtype=float16"
        (subject,) = plan(catalog, device, Request(("attention_backward",), (line,)))
        signature, problem = subject.spec.signature, Path(subject.task.problem)
        asked = signature.asked(dict(subject.task.workload.flags))
        checks = edge_checks(json.dumps(signature.to_json()), problem, "float16", asked)
        flags = [check.__self__.case.flags for check in checks]
        assert {each.get("deterministic", False) for each in flags} == {deterministic == "true"}
