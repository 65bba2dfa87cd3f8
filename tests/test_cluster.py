"""A real Ray cluster of several nodes on this machine, bound to 127.0.0.1."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import KERNELS, ROOT

from tuner.store import open_stores

# Before ray is imported: its nodes are to stay on the loopback interface and report to nobody.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
ray = pytest.importorskip("ray", reason="needs the extra: pip install 'tuner[cluster]'")

from ray.cluster_utils import Cluster as Nodes  # noqa: E402 - only where ray is

SIZES = ("N=1000", "N=2000", "N=3000")
STORE_BYTES = 80 * 2**20
WAIT_S = 120.0


def add_node(nodes: Nodes, **options: object) -> object:
    return nodes.add_node(
        num_cpus=1, object_store_memory=STORE_BYTES, node_ip_address="127.0.0.1", **options
    )


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """Folder in which all that runs on the nodes keeps what it writes; sockets need a short path."""
    with TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        yield Path(folder)


@pytest.fixture
def begin(temporary) -> Iterator[Callable[[int], Nodes]]:
    """Begin a cluster of so many nodes."""
    begun: list[Nodes] = []

    def start(count: int) -> Nodes:
        nodes = Nodes()
        begun.append(nodes)
        add_node(nodes, include_dashboard=False)
        for _ in range(count - 1):
            add_node(nodes, wait=False)
        nodes.wait_for_nodes()
        return nodes

    yield start
    for nodes in begun:
        nodes.shutdown()


class Tune:
    """The command at work on a cluster, in a process of its own, which is read line by line."""

    def __init__(self, folder: Path, address: str, *arguments: str) -> None:
        kernels = folder / "kernels"
        if not kernels.exists():  # a space that is not searched to its end meanwhile
            shutil.copytree(KERNELS, kernels)
            space = kernels / "search_spaces" / "scale.yaml"
            many = str(list(range(60)))
            space.write_text(space.read_text().replace("[0, 1, 2, 4, 8]", many))
        command = (sys.executable, "-m", "tuner", "scale", "--kernels", "kernels")
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [*command, "--cluster", address, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
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
    joined = {run.read_until(" joins: ").split()[0] for _ in range(3)}
    head = nodes.head_node.node_id[:6]  # without which there is no cluster
    doomed = run.read_until(rf"0\.0\.1\.(?!{head})\w+/cpu trial 2: ").split()[0]
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
    assert free_cpus(nodes.address) == 3
