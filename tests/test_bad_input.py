"""What users get wrong: a line that says so and exit status 2, never a traceback."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import triton
from conftest import KERNELS, ROOT

from tuner import codec
from tuner.catalog import Catalog
from tuner.children.child import ChildProcess
from tuner.children.host import ChildLost
from tuner.cli.devices import present_devices, resolve_device
from tuner.cli.main import main
from tuner.devices.cpu import Cpu
from tuner.plan import Request, plan
from tuner.records import Candidate, Measurement, Rejection, TunerError, Workload
from tuner.runtime.moe.buffer import LowLatencyBuffer
from tuner.runtime.moe.errors import MisuseError
from tuner.runtime.moe.heap import LocalGroup
from tuner.serve.__main__ import reply_to
from tuner.serve.server import Server
from tuner.store import Store, open_stores

PACKAGE = ROOT / "kernels_generated"
WORKLOAD = Workload("scale", (("N", 3),), "float32")
TIMED = Measurement(1.0, 0.9, 1.1, 10, "warm", 0.2)


def succeed(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def filled(root) -> Store:
    store = Store(root, "arch")
    store.add_trial(WORKLOAD, Candidate.of("cpu", {"UNROLL": 1}), "ab", TIMED, seconds=0.1)
    return store


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "matmul", "--timeout", "nan"),
        ("run", "matmul", "--timeout", "-1"),
        ("run", "matmul", "--seed", "-1"),
        ("run", "matmul", "--seed", "4294967296"),
        ("verify", "softmax", "--timeout", "inf"),
        ("bench", "matmul", "--output", "a.json", "--budget", "nan"),
        ("explain", "matmul", "--budget", "nan"),
        ("recheck", "--budget", "nan"),
        ("recheck", "--budget", "10trials"),
        ("bench", "matmul", "--output", "a.json", "--budget", "2h"),
        ("freeze", "--max-slowdown", "nan"),
        ("freeze", "--max-slowdown", "inf"),
    ],
)
def test_a_number_out_of_its_range_is_named(refused, arguments):
    assert f"Invalid value for '{arguments[-2]}'" in refused(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "softmax", "--device", "cpu", "--store", "file"),
        ("probe", "--device", "cpu", "--store", "file"),
        ("export", "--format", "t4", "--output", "file/b", "--store", "filled"),
        ("export", "--format", "json", "--output", "folder", "--store", "filled"),
        ("export", "--format", "optuna", "--output", "none/b", "--store", "filled"),
        ("merge", "filled", "--output", "file/b"),
    ],
)
def test_a_path_that_cannot_be_written_is_named(refused, tmp_path, arguments):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    filled(tmp_path / "filled")
    error = refused(*arguments)
    assert error.startswith("tune: ") and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("output", "reason"),
    [("bad-name", "cannot be imported"), ("file", "Not a directory"), ("folder", "not a package")],
)
def test_an_output_that_cannot_be_is_refused_before_anything_is_timed(
    refused, tmp_path, output, reason
):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text("")
    assert reason in refused("run", "softmax", "--device", "cpu", "--output", output)
    assert not (tmp_path / ".tuner").exists()


WRITE_FILES = (
    ("bench", "softmax", "--device", "cpu", "--package", str(PACKAGE)),
    ("report", "filled"),
    ("capture",),
    ("export", "--format", "json", "--store", "filled"),
    ("export", "--format", "csv", "--store", "filled"),
    ("export", "--format", "optuna", "--store", "filled"),
)
WRITE_FOLDERS = (
    ("run", "softmax", "--device", "cpu"),
    ("freeze", "--store", "filled"),
    ("merge", "filled"),
    ("export", "--format", "vllm", "--store", "filled"),
    ("export", "--format", "t4", "--store", "filled"),
)


@pytest.fixture
def places(tmp_path) -> list[Path]:
    """Return what lies in a folder with a file, a folder and a store."""
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder").mkdir()
    filled(tmp_path / "filled")
    return sorted(tmp_path.rglob("*"))


def program(command) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", "open('ran', 'w')") if command[0] == "capture" else ()


@pytest.mark.parametrize("output", ["/proc/none/made", "file/made", "file/deep/made", "m" * 300])
@pytest.mark.parametrize("command", [*WRITE_FILES, *WRITE_FOLDERS], ids=" ".join)
def test_where_nothing_can_be_written_is_said_at_the_start(
    refused, tmp_path, places, command, output
):
    error = refused(*command, "--output", output, *program(command))
    assert f"--output {output}: cannot be written: " in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == places


@pytest.mark.parametrize("output", ["folder", "new/"])
@pytest.mark.parametrize("command", WRITE_FILES, ids=" ".join)
def test_a_folder_where_a_file_is_meant(refused, tmp_path, places, command, output):
    assert "folder" in refused(*command, "--output", output, *program(command))
    assert sorted(tmp_path.rglob("*")) == places


@pytest.mark.parametrize("command", [*WRITE_FOLDERS[:-1], ("probe",)], ids=" ".join)
def test_a_file_where_a_folder_is_meant(refused, tmp_path, places, command):
    option = "--store" if command == ("probe",) else "--output"
    error = refused(*command, option, "results.json")
    assert "results.json" in error
    assert re.search("cannot be imported|looks like a file", error)
    assert sorted(tmp_path.rglob("*")) == places


@pytest.mark.parametrize("command", ["run softmax", "bench matmul --output a.json", "probe"])
def test_a_store_that_cannot_be_made_is_named(refused, tmp_path, command):
    error = refused(*command.split(), "--store", "/proc/none/made")
    assert "--store /proc/none/made: cannot be written: /proc: " in error
    assert list(tmp_path.iterdir()) == []


def test_t4_of_several_workloads_is_a_folder(refused, tmp_path):
    store = filled(tmp_path / "filled")
    export = ("export", "--format", "t4", "--store", "filled", "--output")
    succeed(*export, "one.json")
    other = Workload("scale", (("N", 4),), "float32")
    store.add_trial(other, Candidate.of("cpu", {"UNROLL": 1}), "ab", TIMED, seconds=0.1)
    said = refused(*export, "results.json")
    assert "of 2 workloads with a file each: name a folder, such as results" in said
    assert not (tmp_path / "results.json").exists()
    succeed(*export, "results")
    assert len(list((tmp_path / "results").iterdir())) == 2


@pytest.mark.parametrize("line", ["7", "[]", '"x"', "{}", '{"schema_version": "1"}'])
def test_a_line_that_is_none_of_a_store_is_damaged(tmp_path, line):
    with filled(tmp_path).path.open("a") as file:
        file.write(line + "\n")
    (store,) = open_stores(tmp_path)
    assert (len(store.trials), store.damaged_lines) == (1, 1)
    store.forget()
    assert store.damaged_lines == 0


@pytest.mark.parametrize(
    "entry",
    [
        {"trial": 5},
        {"trial": {}},
        {"trial": {"number": 1, "workload": 3}},
        {"winner": []},
        {"winner": {"workload": {"kernel": "a", "dims": [], "dtype": "x"}}},
        {"quarantine": {}},
        {"quarantine": 4},
        {"refusal": {"workload": 1, "source_sha256": "a", "rejection": {}}},
        {"device": 7},
    ],
)
def test_an_entry_of_another_form_is_refused_with_its_file(tmp_path, refused, entry):
    path = filled(tmp_path / "a").path
    with path.open("a") as file:
        file.write(json.dumps({"schema_version": 1, **entry}) + "\n")
    with pytest.raises(TunerError, match="not as this version writes it"):
        open_stores(tmp_path / "a")
    for command in (("explain", "--store", "a"), ("merge", "a", "--output", "b")):
        assert "a/arch/trials.jsonl" in refused(*command)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("number",), "1", "Trial.number: must be int, but got '1'"),
        (("number",), True, "Trial.number: must be int, but got True"),
        (("seconds",), None, "Trial.seconds: must be float, but got None"),
        (("source_sha256",), 3, "Trial.source_sha256: must be str, but got 3"),
        (("workload", "dims"), {"N": "3"}, "Workload.dims: must be int, but got '3'"),
        (("workload", "dims"), [3], "Workload.dims: must be an object, but got [3]"),
        (("outcome", "median_ms"), "fast", "Measurement.median_ms: must be float, but got 'fast'"),
        (("outcome", "resources", "spills"), 0.5, "Resources.spills: must be int or null, but"),
    ],
)
def test_a_scalar_of_another_type_is_refused_with_its_line(tmp_path, refused, keys, value, reason):
    path = filled(tmp_path / "a").path
    good = path.read_text()
    entry = json.loads(good)
    inner = entry["trial"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(f"{good}torn\n{json.dumps(entry)}\n")
    for command in (("explain", "--store", "a"), ("merge", "a", "--output", "b")):
        said = refused(*command)
        assert f"a/arch/trials.jsonl:3: is not as this version writes it: {reason}" in said


def test_a_stage_that_is_none_is_refused():
    with pytest.raises(TunerError, match="stage: must be one of constraints, .*, but got 'rain'"):
        codec.from_json(Rejection, {"stage": "rain", "reason": ""})


@pytest.mark.parametrize(
    "command",
    [
        ("recheck", "--device", "cpu", "--package", str(PACKAGE)),
        ("explain",),
        ("explain", "matmul", "--device", "cpu"),
        ("export", "--format", "json", "--output", "out.json"),
        ("freeze", "--output", "kernels"),
    ],
)
def test_a_store_that_is_not_there_is_not_made(refused, tmp_path, command):
    assert "--store typo: there is no such folder" in refused(*command, "--store", "typo")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "typo").mkdir()
    assert "--store typo: there are no trials in it" in refused(*command, "--store", "typo")
    assert list((tmp_path / "typo").iterdir()) == []


@pytest.mark.parametrize("name", ["shapes", "./none", "none.yaml"])
def test_what_is_or_looks_like_a_file_is_no_name_of_a_set(refused, tmp_path, name):
    (tmp_path / "shapes").write_text("a: [")
    said = refused("run", "softmax", "--device", "cpu", "--workloads", name)
    assert f"{Path(name)}: " in said
    assert "has no workloads" not in said


GOOD = (KERNELS / "problems" / "scale.py").read_text()


BAD_PROBLEMS = [
    (GOOD.replace("def reference", "def referenz"), "scale.py: must define the function"),
    (GOOD.replace("EDGE_SHAPES", "EDGES"), "scale.py: must define EDGE_SHAPES"),
    (GOOD + "\nEDGE_SHAPES = ({'M': 3},)\n", "EDGE_SHAPES: {'M': 3} must give the extent"),
    (GOOD + "\ndef reference(**_):\n    return {'z': 1}\n", "reference() must return"),
    (GOOD + "\ndef reference(**_):\n    return 1 / 0\n", "reference: ZeroDivisionError"),
    (GOOD + "\ndef tolerance(*_):\n    return {'rtoll': 1}\n", "tolerance() must return"),
    (GOOD + "\nimport nonesuch\n", "scale.py:"),
    (GOOD + "\nx = (\n", "SyntaxError"),
]


@pytest.mark.parametrize(("text", "reason"), BAD_PROBLEMS)
def test_what_is_wrong_with_a_problem_is_one_line(tmp_path, text, reason):
    """What a child says of it, here in this process; the command passes on what it is told."""
    own = Path(shutil.copytree(KERNELS, tmp_path / "own"))
    (own / "problems" / "scale.py").write_text(text)
    request = Request(("scale",), ("N=100,dtype=float32",))
    (subject,) = plan(Catalog([own]), Cpu().info(), request)
    server = Server(Cpu(), cache=tmp_path, compiler=None, announce=lambda _: None)
    failure = reply_to(server, subject.task.message("prepare"))["failure"]
    assert reason in failure and "\n" not in failure


@pytest.mark.parametrize(("text", "reason"), [BAD_PROBLEMS[0], BAD_PROBLEMS[4]])
def test_a_run_ends_with_what_is_wrong_with_a_problem(refused, tmp_path, text, reason):
    shutil.copytree(KERNELS, tmp_path / "own")
    (tmp_path / "own" / "problems" / "scale.py").write_text(text)
    workload = ("--workload", "N=100,dtype=float32", "--budget", "1trials")
    error = refused("run", "scale", "--kernels", "own", "--device", "cpu", *workload)
    assert reason in error and error.count("\n") == 1


def test_damaged_lines_are_told(tmp_path, monkeypatch, capsys):
    path = filled(tmp_path / "a").path
    path.write_bytes(path.read_bytes() + b'{"schema_ver\n')
    monkeypatch.chdir(tmp_path)
    succeed("explain", "--store", "a")
    assert "1 trials, 1 damaged lines skipped" in capsys.readouterr().out
    succeed("export", "--format", "csv", "--output", "b.csv", "--store", "a")
    assert "trials.jsonl: 1 damaged lines skipped" in capsys.readouterr().err


def test_a_kernel_without_trials_is_refused(refused, tmp_path):
    filled(tmp_path / "a")
    assert "these have: scale" in refused("explain", "--store", "a", "--kernel", "sacle")


def test_a_capture_that_cannot_be_written_runs_no_program(refused, tmp_path):
    (tmp_path / "file").write_text("")
    program = ("--", sys.executable, "-c", "open('ran', 'w')")
    assert "file" in refused("capture", "--output", "file/c.yaml", *program)
    assert "no program 'python9.9'" in refused("capture", "--", "python9.9", "x.py")
    assert not (tmp_path / "ran").exists()


def test_a_long_wrong_value_is_cut(refused, tmp_path):
    (tmp_path / "long.yaml").write_text("x" * 5000)
    assert len(refused("run", "--device", "cpu", "--workloads", "long.yaml")) < 400


@pytest.fixture
def asked(monkeypatch):
    """What this machine's children are asked, which are real but for what `lethal` names."""
    messages, request = [], ChildProcess.request
    lethal: set[str] = set()

    def note(child, message, *, timeout_s):
        messages.append(message)
        if lethal.intersection(message.get("kinds", ())):
            child.kill()
            raise ChildLost("killed by SIGSEGV", "start", timed_out=False)
        return request(child, message, timeout_s=timeout_s)

    monkeypatch.setattr(ChildProcess, "request", note)
    return messages, lethal


def test_auto_asks_one_child_for_each_kind_once(asked):
    if torch.accelerator.is_available():
        pytest.skip("a card is here")
    assert resolve_device("auto", dict(os.environ)) == "cpu"
    (message,) = asked[0]
    assert sorted(message["kinds"]) == ["accelerator", "cuda", "hip", "xpu"]


def test_a_driver_that_kills_its_child_hides_no_other_device(asked):
    messages, lethal = asked
    lethal.add("xpu")
    found = present_devices(dict(os.environ), ("hip", "xpu"))
    assert [message["operation"] for message in messages] == ["present", "ready", "ready"]
    assert "sees no AMD GPU here" in found["hip"]
    assert "sees no Intel GPU" in found["xpu"]


def test_asking_for_a_device_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    succeed("devices")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compiler", ["nonesuch", "false"])
def test_a_missing_compiler_is_one_line(refused, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    workload = ("--workload", "M=4,N=8,dtype=float32", "--budget", "1trials")
    error = refused("run", "softmax", "--device", "cpu", *workload)
    assert "no C++ compiler" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [["run", "softmax"], ["show", "softmax"]])
def test_a_cpu_has_no_index(refused, command):
    assert "cpu is one device" in refused(*command, "--device", "cpu:7")


def test_tokens_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(MisuseError, match="TRITON_INTERPRET=1"):
        LowLatencyBuffer(LocalGroup(1)[0], 4, 128, 2, topk=2)
