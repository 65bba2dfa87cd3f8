"""What a program spends: recorded, written, tuned for."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
import yaml
from conftest import KERNELS, ROOT
from torch import nn
from torch.nn import functional

import tuner
from tuner.budget import Budget
from tuner.catalog import Catalog, device_class
from tuner.plan import Request, plan
from tuner.records import UsageError

MODEL = """
import sys, torch
from torch import nn
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
for _ in range(int(sys.argv[1])):
    torch.softmax(layer(torch.randn(2, 16, 32)), -1).log().mean().backward()
print("trained", sys.argv[1:])
"""


def recorded(call) -> dict[str, int]:
    """Return the workloads and counts of what a call does."""
    with tuner.capture() as recorder:
        call()
    return {f"{item.kernel} {item}": calls.count for item, calls in recorder.workloads.items()}


def test_products_of_matrices_are_recorded_forward_and_backward():
    linear, x = nn.Linear(8, 5), torch.randn(2, 3, 8, requires_grad=True)
    assert recorded(lambda: linear(x).sum().backward()) == {
        "matmul M=6,K=8,N=5,dtype=float32": 1,
        "matmul M=6,K=5,N=8,dtype=float32": 1,
        "matmul M=5,K=6,N=8,dtype=float32": 1,
    }
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    assert recorded(lambda: [half @ half for _ in range(3)]) == {
        "matmul M=4,K=4,N=4,dtype=bfloat16": 3
    }


def test_softmax_counts_where_it_is_over_the_last_dim():
    x = torch.randn(2, 3, 5, requires_grad=True)
    assert recorded(lambda: functional.softmax(x, -1).sum().backward()) == {
        "softmax M=6,N=5,dtype=float32": 1,
        "softmax_backward M=6,N=5,dtype=float32": 1,
    }
    assert recorded(lambda: functional.softmax(x, 1)) == {}


def test_attention_counts_where_ours_gives_the_same_result():
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    k = torch.randn(2, 2, 6, 8, requires_grad=True)
    attend = functional.scaled_dot_product_attention
    causal = "B=2,H=4,S=6,D=8,KV=2,T=6,causal=true,dtype=float32"
    call = lambda: attend(q, k, k, is_causal=True, enable_gqa=True).sum().backward()  # noqa: E731
    assert recorded(call) == {f"attention_forward {causal}": 1, f"attention_backward {causal}": 1}
    with torch.no_grad():
        assert recorded(lambda: attend(q, q, q, attn_mask=torch.zeros(6, 6))) == {}
        assert recorded(lambda: attend(q[:, :, :3], q, q, is_causal=True)) == {}


@pytest.mark.filterwarnings("ignore:.*was not tuned for")
def test_frozen_kernels_are_recorded_under_their_own_names():
    from kernels_generated import matmul

    assert recorded(lambda: matmul(torch.ones(3, 4), torch.ones(4, 5))) == {
        "matmul M=3,K=4,N=5,dtype=float32": 1
    }


def test_results_are_what_they_were_and_times_are_counted():
    a, b = torch.randn(40, 50), torch.randn(50, 60)
    with tuner.capture() as recorder:
        products = [a @ b for _ in range(5)]
    assert all(torch.equal(product, a @ b) for product in products)
    (calls,) = recorder.workloads.values()
    assert calls.count == len(calls.times_s) == 5
    assert 0 < calls.seconds < 1
    assert calls.operations == {"aten::mm"}


def test_an_error_of_the_program_keeps_the_record(tmp_path):
    path = tmp_path / "captured.yaml"
    with pytest.raises(RuntimeError, match="mine"), tuner.capture(path):
        torch.ones(2, 2) @ torch.ones(2, 2)
        raise RuntimeError("mine")
    assert len(yaml.safe_load(path.read_text())["workloads"]) == 1


def test_the_command_runs_a_program_and_writes_what_it_spent(tune, tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    done = tune("capture", "--output", "seen.yaml", "--", "python", "-m", "train", "3", "--fast")
    assert done.returncode == 0, done.stderr
    assert "trained ['3', '--fast']" in done.stdout
    assert "tune for it: tune --workloads seen.yaml --goal weighted" in done.stdout
    data = yaml.safe_load((tmp_path / "seen.yaml").read_text())
    assert data["program"] == "python -m train 3 --fast"
    seen = {f"{item['kernel']} {item['workload']}": item["calls"] for item in data["workloads"]}
    attention = "B=2,H=4,S=16,D=8,KV=4,T=16,causal=false,dtype=float32"
    assert seen[f"attention_forward {attention}"] == 3
    assert seen[f"attention_backward {attention}"] == 3
    assert seen["softmax M=32,N=32,dtype=float32"] == 3
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.slow
def test_a_captured_program_is_tuned_for(tune, tmp_path):
    captured(tmp_path, ("softmax", "M=32,N=32,dtype=float32", 1.0))
    done = tune(
        *("--workloads", "captured.yaml", "--goal", "weighted", "--device", "cpu"),
        *("--budget", "3s", "--jobs", "1", "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (winner,) = json.loads(done.stdout)
    assert winner["workload"]["dims"] == {"M": 32, "N": 32}


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        (("ls",), 2, "tune capture: runs `python FILE`"),
        (("python",), 2, "tune capture: runs `python FILE`"),
        (("python", "-c", "raise SystemExit(7)"), 7, "nothing was captured"),
        (("python", "absent.py"), 2, "there is no file 'absent.py'"),
        (("python", "-m", "absent.module"), 2, "python has no module absent"),
    ],
)
def test_what_captures_nothing_says_so(tune, tmp_path, program, status, message):
    done = tune("capture", "--", *program)
    assert done.returncode == status
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_torch_is_named(tune, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    (tmp_path / "program.py").write_text("")
    bare = tmp_path / "bare" / "bin" / "python"
    done = tune("capture", "--", str(bare), "program.py")
    assert done.returncode == 2
    assert f"{bare} has no module torch, yaml, pydantic, numpy" in done.stderr


def captured(folder: Path, *entries: tuple[str, str, float]) -> Path:
    path = folder / "captured.yaml"
    keys = ("kernel", "workload", "seconds")
    items = [{**dict(zip(keys, entry, strict=True)), "calls": 1} for entry in entries]
    path.write_text(yaml.safe_dump({"workloads": items}))
    return path


def test_the_goal_decides_how_the_budget_is_shared(tmp_path):
    path = captured(
        tmp_path,
        ("softmax", "M=4,N=8,dtype=float32", 1.0),
        ("matmul", "M=4,K=8,N=8,dtype=float32", 3.0),
        ("matmul", "M=4,K=8,N=8,dtype=bfloat16", 30.0),  # no template for it on a CPU
        ("rms_norm", "M=4,N=8,dtype=float32", 30.0),  # nor for this
        ("softmax", "M=5,N=8,dtype=float32", 0.0),
    )
    info = device_class("cpu")().info()
    weighted = plan(Catalog(), info, Request(captured=(path,), goal="weighted"))
    found = [(item.task.workload.kernel, item.weight) for item in weighted]
    assert found == [("matmul", 0.75), ("softmax", 0.25), ("softmax", 0.01)]
    equal = plan(Catalog(), info, Request(captured=(path,)))
    assert {item.weight for item in equal} == {1.0}
    assert Budget(trials=100).share(0.75 / 1.01) == Budget(trials=74)


def test_captured_workloads_of_ones_own_kernels(tmp_path):
    path = captured(tmp_path, ("scale", "N=8,dtype=float32", 1.0))
    info = device_class("cpu")().info()
    (subject,) = plan(Catalog([KERNELS]), info, Request(captured=(path,)))
    assert subject.task.workload.kernel == "scale"
    with pytest.raises(UsageError, match="nothing in it is for 'cpu'"):
        plan(Catalog(), info, Request(captured=(path,)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("workloads: []", "workloads"),
        ("workloads: [{kernel: matmul}]", r"workloads\[0\].workload: is missing"),
        ("- 1", "captured.yaml"),
        ("a: [", "captured.yaml: is not YAML"),
        (
            "workloads: [{kernel: matmul, workload: 'M=x,dtype=float32', calls: 1, seconds: 1}]",
            "M=x",
        ),  # fmt: skip
    ],
)
def test_a_damaged_file_says_where(tune, tmp_path, content, message):
    path = tmp_path / "captured.yaml"
    path.write_text(content)
    info = device_class("cpu")().info()
    with pytest.raises(UsageError, match=message):
        plan(Catalog(), info, Request(captured=(path,)))


def test_a_goal_needs_a_captured_file():
    info = device_class("cpu")().info()
    with pytest.raises(UsageError, match="--goal weighted: needs --workloads FILE"):
        plan(Catalog(), info, Request(("softmax",), goal="weighted"))


def test_importing_the_tuner_loads_no_torch():
    code = "import tuner, sys; assert 'torch' not in sys.modules; print(tuner.capture.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == b"capture\n"


def test_what_would_be_compiled_runs_and_is_recorded_operation_by_operation():
    compiled = torch.compile(lambda a, b: torch.softmax(a @ b, -1))
    x = torch.randn(16, 16)
    assert recorded(lambda: compiled(x, x)) == {
        "matmul M=16,K=16,N=16,dtype=float32": 1,
        "softmax M=16,N=16,dtype=float32": 1,
    }


def test_where_it_writes_is_asked_and_kept_from_the_start(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="output /proc/none: cannot be written"):  # noqa: SIM117
        with tuner.capture("/proc/none"):
            pytest.fail("the program ran")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with tuner.capture("captured.yaml"):
        torch.ones(3, 4).softmax(-1)
        monkeypatch.chdir("elsewhere")
    assert (tmp_path / "captured.yaml").exists()
