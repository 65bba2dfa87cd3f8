"""A real Ray cluster of several nodes on this machine, bound to 127.0.0.1."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT, WAIT_S

from tuner.ahead import choose
from tuner.catalog import Catalog
from tuner.children.task import Compiled
from tuner.children.worker import Workers
from tuner.devices.cpu import Cpu
from tuner.devices.cuda import Cuda
from tuner.plan import Request, plan
from tuner.records import Measurement, UsageError
from tuner.render import Renderer
from tuner.store import open_stores

# Before ray is imported: its nodes are to stay on the loopback interface and report to nobody.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
ray = pytest.importorskip("ray", reason="needs the extra: pip install 'tuner[cluster]'")

from ray.cluster_utils import Cluster as Nodes  # noqa: E402 - only where ray is

from tuner.cluster.cluster import slots_of  # noqa: E402
from tuner.cluster.connection import connect, kinds_of  # noqa: E402
from tuner.cluster.parcel import Depot, names_in, pack, unpack  # noqa: E402
from tuner.cluster.remote import RemoteHost  # noqa: E402
from tuner.cluster.station import Station  # noqa: E402

SIZES = ("N=10000", "N=20000")
STORE_BYTES = 80 * 2**20


def add_node(nodes: Nodes, *, cpus: int = 1, **options: object) -> object:
    return nodes.add_node(
        num_cpus=cpus, object_store_memory=STORE_BYTES, node_ip_address="127.0.0.1", **options
    )


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Iterator[Path]:
    """Folder for what the nodes write; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)  # of this process, which asked before
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        yield Path(folder)


@pytest.fixture
def begin(temporary) -> Iterator[Callable[[int], Nodes]]:
    """Begin a cluster of so many nodes; the CPU of each but the head is a card."""
    begun: list[Nodes] = []

    def start(count: int) -> Nodes:
        nodes = Nodes()
        begun.append(nodes)
        add_node(nodes, cpus=0, include_dashboard=False)
        for _ in range(count - 1):
            add_node(nodes, wait=False)
        nodes.wait_for_nodes()
        return nodes

    yield start
    for nodes in begun:
        nodes.shutdown()


class Tune:
    """The command at work on a cluster, in a process of its own, which is read line by line."""

    def __init__(self, folder: Path, address: str, *arguments: str, kernel: str = "scale") -> None:
        kernels = folder / "kernels"
        if not kernels.exists():  # a space that is not searched to its end meanwhile
            shutil.copytree(KERNELS, kernels)
            space = kernels / "search_spaces" / "scale.yaml"
            many = str(list(range(60)))
            space.write_text(space.read_text().replace("[0, 1, 2, 4, 8]", many))
        command = (sys.executable, "-m", "tuner", kernel, "--kernels", "kernels")
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [*command, "--cluster", address, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # a shell's background job and its children start deaf to it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def read_until(self, pattern: str) -> str:
        """Return the next line that a pattern is found in."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in:\n{''.join(self.lines)}")

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Return what it printed, once it has ended with status 0."""
        rest = self._process.communicate(timeout=WAIT_S)[0]
        self.lines.append(rest)
        printed = "".join(self.lines)
        assert self._process.returncode == 0, printed
        return printed

    def end_anyhow(self) -> str:
        self.lines.append(self._process.communicate(timeout=WAIT_S)[0])
        return "".join(self.lines)


def workloads(*sizes: str) -> list[str]:
    return [word for size in sizes for word in ("--workload", size)]


def node_of(nodes: Nodes, card: str) -> object:
    """Return the node that a card is on."""
    (found,) = (node for node in nodes.list_all_nodes() if f".{node.node_id[:6]}/" in card)
    return found


def children_under(folder: Path) -> list[str]:
    """Return the command lines of the children that keep their files in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended
            continue
        if "tuner.serve" in command and str(folder) in command:
            found.append(command)
    return found


def free_cpus(address: str) -> float:
    """Return how many CPUs of a cluster nobody holds."""
    connect(address)
    try:
        return ray.available_resources().get("CPU", 0.0)
    finally:
        ray.shutdown()


def test_a_killed_node_loses_nothing_and_an_added_one_is_used(begin, tmp_path, temporary):
    nodes = begin(3)
    run = Tune(tmp_path, nodes.address, *workloads(*SIZES), "--budget", "600s")
    joined = {run.read_until(" joins: ").split()[0] for _ in SIZES}
    doomed = run.read_until("/cpu trial ").split()[0]
    nodes.remove_node(node_of(nodes, doomed), allow_graceful=False)
    run.read_until(f"{re.escape(doomed)} is gone .* waits for another card")
    add_node(nodes, wait=False)
    added = run.read_until(" joins: ").split()[0]
    run.read_until(f"{re.escape(added)} trial ")
    run.interrupt()
    printed = run.end()

    assert doomed in joined
    assert added not in joined
    (store,) = open_stores(tmp_path / ".tuner")
    won = {str(winner.workload) for winner in store.winners}
    assert won == {f"{size},dtype=float32" for size in SIZES}
    cards: dict[object, set[str | None]] = {}
    for trial in store.trials:
        cards.setdefault(trial.workload, set()).add(trial.card)
    assert {doomed, added} in cards.values()
    assert all({card} in cards.values() for card in joined - {doomed})
    asked = [(trial.workload, trial.candidate) for trial in store.trials]
    assert len(set(asked)) == len(asked), "what was told is asked for again"
    assert "raylet" not in printed
    assert children_under(temporary) == []
    assert free_cpus(nodes.address) == 2


@pytest.mark.slow
def test_kinds_of_card_have_stores_and_winners_of_their_own(begin, tmp_path, monkeypatch):
    """A node with another compiler is another kind; a second cluster's store is merged."""
    compiler = tmp_path / "other-g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo other 1.0 && exit\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    nodes = begin(2)
    monkeypatch.setenv("CXX", str(compiler))
    add_node(nodes)
    monkeypatch.delenv("CXX")
    budget = ("--budget", "4trials")
    printed = Tune(tmp_path, nodes.address, *workloads("N=10000"), *budget).end()
    assert printed.count("Winners on ") == 2
    stores = open_stores(tmp_path / ".tuner")
    assert len(stores) == 2
    assert len({dict(store.device.versions)["compiler"] for store in stores if store.device}) == 2
    assert [len(store.winners) for store in stores] == [1, 1]
    assert [len(store.trials) for store in stores] == [4, 4]

    again = Tune(tmp_path, nodes.address, *workloads("N=10000"), *budget).end()
    assert again.count("4 trials are known") == 2
    nodes.shutdown()
    other = tmp_path / "elsewhere"
    other.mkdir()
    Tune(other, begin(2).address, *workloads("N=20000"), *budget).end()
    command = (sys.executable, "-m", "tuner")
    merged = ("merge", ".tuner", "elsewhere/.tuner", "--output", "merged")
    subprocess.run([*command, *merged], cwd=tmp_path, check=True)
    freeze = ("freeze", "--store", "merged", "--output", "both", "--kernels", "kernels")
    subprocess.run([*command, *freeze], cwd=tmp_path, check=True)
    (manifest,) = (tmp_path / "both" / "scale").glob("*/manifest.json")
    text = manifest.read_text()
    assert "10000" in text
    assert "20000" in text


@pytest.mark.slow
def test_nodes_of_other_versions_and_without_what_they_promise_are_said(
    begin, tmp_path, monkeypatch
):
    old, broken = tmp_path / "old", tmp_path / "broken"
    shutil.copytree(ROOT / "tuner", old / "tuner")
    (old / "tuner" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (broken / "tuner").mkdir(parents=True)
    (broken / "tuner" / "__init__.py").write_text("raise ImportError(\"No module named 'tuner'\")")
    nodes = begin(2)
    for folder in (old, broken):
        monkeypatch.setenv("PYTHONPATH", str(folder))
        add_node(nodes)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    add_node(nodes, num_gpus=1)
    run = Tune(tmp_path, nodes.address, "--device", "cpu,cuda", "--budget", "40s")
    expected = {
        "has tuner 0.0.1: install ",
        "the tuner is not installed there: `pip install 'tuner==",
        "sees no NVIDIA GPU here",
        " trial 1: ",
    }
    while expected:
        line = run.read_until("|".join(expected))
        expected = {words for words in expected if not re.search(words, line)}
    run.interrupt()
    run.end()


@pytest.mark.slow
def test_compilations_run_on_any_node_and_again_elsewhere_if_it_dies(begin, tmp_path):
    catalog, device = Catalog(), Cuda.target("90")
    (subject, *_) = plan(catalog, device, Request(("softmax",), ("M=64,N=256,dtype=float16",)))
    renderer = Renderer(catalog.template_folders)
    candidates = choose(subject.feasible, 12, 0)
    nodes = begin(3)
    connect(nodes.address)
    depot = Depot(tmp_path / "cache")
    host = RemoteHost(None, "cuda", depot, alone=False)
    (tmp_path / "sources").mkdir()
    try:
        with Workers(host, jobs=4, sources=tmp_path / "sources") as workers:
            workers.warm_up()
            sources = [subject.render(renderer, candidate) for candidate in candidates]
            futures = [workers.compile(subject.task, source) for source in sources]
            futures[0].result(WAIT_S)
            (doomed, _) = (node for node in nodes.list_all_nodes() if node != nodes.head_node)
            nodes.remove_node(doomed, allow_graceful=False)
            compiled = [future.result(WAIT_S) for future in futures]
    finally:
        ray.shutdown()
    assert all(isinstance(item, Compiled) and item.resources.registers for item in compiled)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) >= len(set(sources))


@pytest.mark.gpu
def test_a_gpu_measures_what_any_node_compiled(begin, tmp_path):
    nodes = begin(2)
    add_node(nodes, cpus=0, num_gpus=1)
    workload = ("--workload", "M=1024,N=4096,dtype=bfloat16")
    run = Tune(tmp_path, nodes.address, *workload, "--budget", "30s", kernel="softmax")
    assert "/cuda:" in run.read_until(" joins: ")
    run.end()
    (store,) = open_stores(tmp_path / ".tuner")
    timed = [trial for trial in store.trials if isinstance(trial.outcome, Measurement)]
    assert len(timed) > 1
    assert all("/cuda:" in (trial.card or "") for trial in timed)
    passed_through = (tmp_path / ".tuner" / "cache" / "triton").rglob("*.cubin")
    assert len(list(passed_through)) >= len(timed)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.0.0.1", "write auto or HOST:PORT"),
        ("host:port", "write auto or HOST:PORT"),
        ("ray://host:10001", "run tune on a node of the cluster"),
        ("127.1.2.3:1", "no Ray cluster answers: .*Connection refused; begin one"),
    ],
)
def test_an_address_where_no_cluster_is_is_said_at_once(address, words):
    started = time.monotonic()
    with pytest.raises(UsageError, match=words):
        connect(address)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:0", "Ray hands out the cards of a cluster; write cuda$"),
        ("interpreter", "it never times"),
        ("gpu", "unknown device 'gpu'"),
    ],
)
def test_a_device_that_no_cluster_gives_is_refused(device, words):
    with pytest.raises(UsageError, match=words):
        kinds_of(device)


def test_cards_are_asked_for_by_kind():
    assert kinds_of("cuda, cpu,cuda") == ("cuda", "cpu")
    assert kinds_of("auto") == ("auto",)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", {"gpus": [("cuda",), ("cuda",)]}),
        ("cuda,hip", {"gpus": [("cuda", "hip")] * 2}),
        ("cpu", {"gpus": [("cpu",)], "cpus": [("cpu",)]}),
        ("cpu,cuda", {"gpus": [("cuda",)] * 2, "cpus": [("cpu",)]}),
        ("accelerator", {"other": [("accelerator",)]}),
    ],
)
def test_a_cpu_is_a_card_where_no_gpu_of_its_node_is_asked_for(device, expected):
    resources = {
        "head": {"node:10.0.0.1": 1.0},
        "gpus": {"CPU": 16.0, "GPU": 2.0},
        "cpus": {"CPU": 8.0},
        "other": {"accelerator": 1.0},
    }
    nodes = [{"NodeID": name, "Resources": has} for name, has in resources.items()]
    found: dict[str, list[tuple[str, ...]]] = {}
    for slot in slots_of(kinds_of(device), nodes):
        found.setdefault(slot.node, []).append(slot.kinds)
    assert found == expected


def test_requests_travel_with_the_files_that_they_name(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    for name in ("problem.py", "one.cpp", "two.cpp"):
        (here / name).write_text(f"// {name}")
    contenders = [{"label": name, "path": str(here / f"{name}.cpp")} for name in ("one", "two")]
    message = {"operation": "race", "problem": str(here / "problem.py"), "contenders": contenders}
    packed, files = pack(message)
    assert len(files) == 3
    assert str(here) not in json.dumps(packed)
    assert [Path(name).name for name in names_in(packed)] == ["one.cpp", "two.cpp"]
    unpacked = unpack(packed, files, there)
    assert Path(unpacked["problem"]).read_text() == "// problem.py"
    assert [Path(item["path"]).read_text() for item in unpacked["contenders"]] == [
        "// one.cpp",
        "// two.cpp",
    ]
    assert unpack(packed, files, there) == unpacked
    assert message["contenders"] is contenders


@pytest.mark.parametrize("paced", [False, True])
def test_what_gives_the_pace_travels_with_what_is_timed(tmp_path, paced):
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    for name in ("one.py", "two.py"):
        (here / name).write_text(f"# {name}")
    pace = (
        {"path": str(here / "two.py"), "language": "triton", "median_ms": 1.0} if paced else None
    )
    packed, files = pack({"operation": "evaluate", "path": str(here / "one.py"), "pace": pace})
    assert str(here) not in json.dumps(packed)
    assert [Path(name).name for name in names_in(packed)] == ["one.py", "two.py"][: 1 + paced]
    unpacked = unpack(packed, files, there)
    assert Path(unpacked["path"]).read_text() == "# one.py"
    if pace:
        assert Path(unpacked["pace"]["path"]).read_text() == "# two.py"
        assert unpacked["pace"] == pace | {"path": unpacked["pace"]["path"]}
    else:
        assert unpacked["pace"] is None


def written_under(folder: Path) -> dict[Path, int]:
    """Return when each file in the nodes' caches was written."""
    found = (path for path in folder.glob("tuner-node-*/cache/**/*") if path.is_file())
    return {path: path.stat().st_mtime_ns for path in found}


def test_what_one_node_compiles_another_finds_in_its_cache(tmp_path, temporary):
    """Triton compiles for a GPU that is not here; what it made goes through the depot."""
    catalog, device = Catalog(), Cuda.target("90")
    (subject, *_) = plan(catalog, device, Request(("softmax",), ("M=64,N=256,dtype=float16",)))
    source = subject.render(Renderer(catalog.template_folders), subject.feasible.default)
    path = tmp_path / f"{source.sha256}.py"
    path.write_text(source.text)
    message = subject.task.message("compile", edges=None, path=str(path), language="triton")
    packed, files = pack(message)
    first, second = Station("cuda", dict(os.environ)), Station("cuda", dict(os.environ))
    depot = Depot(tmp_path / "cache")
    try:
        reply, made = first.compile(packed, files, 120)
        assert any(name.endswith(".cubin") for name in made)
        depot.add(packed["path"], made)
        known: set[str] = set()
        sent = depot.fetch(names_in(packed), known)
        assert sent == made
        assert depot.fetch(names_in(packed), known) == {}
        second.plant(sent)
        written = written_under(temporary)
        assert len(written) == 2 * len(made)
        again, _ = second.compile(packed, files, 120)
        assert again["resources"] == reply["resources"]
        assert again["resources"]["registers"] > 0
        assert written_under(temporary) == written, "it was compiled again"
    finally:
        first.close()
        second.close()
    assert list(temporary.glob("tuner-node-*")) == []


def test_a_station_tells_what_became_of_a_request(tmp_path, temporary):
    catalog = Catalog([KERNELS])
    (subject, *_) = plan(catalog, Cpu().info(), Request(("scale",), ("N=1000",)))
    problem = tmp_path / "scale.py"
    problem.write_text("raise ImportError('no such luck')")
    task = dataclasses.replace(subject.task, problem=problem)
    packed, files = pack(task.message("suite", workloads=[], most_operations=None))
    station = Station("cpu", dict(os.environ))
    try:
        key = station.start("measure")
        failed = station.request(key, packed, files, compiled={}, timeout_s=WAIT_S)
        assert "no such luck" in failed["failure"]
        assert str(temporary) not in failed["failure"]
        late = station.request(key, packed, files, compiled={}, timeout_s=0)
        assert late["lost"] == ["no reply in 0 s", "start", True]
    finally:
        station.close()
    assert children_under(temporary) == []


def test_folders_of_processes_that_were_killed_are_removed(temporary):
    code = (
        "from tuner.cluster.scratch import Scratch\n"
        "held = Scratch()\n"
        "print(held.path, flush=True)\n"
        "input()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    folders = [Path(process.stdout.readline().strip()) for process in processes]
    processes[0].kill()
    processes[0].wait()
    assert all(folder.exists() for folder in folders)
    third = subprocess.run(
        [sys.executable, "-c", code], input="\n", capture_output=True, text=True
    )
    assert third.returncode == 0
    assert [folder.exists() for folder in folders] == [False, True]
    assert not Path(third.stdout.strip()).exists()
    processes[1].communicate("\n")
    assert not folders[1].exists()
