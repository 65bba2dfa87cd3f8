"""`tune watch`, and optuna-dashboard on what `tune export` writes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from browser import open_browser
from conftest import ROOT, WAIT_S
from rich.console import Console

from tuner.cli.display import Progress
from tuner.cli.watch import Watch
from tuner.records import Candidate, Failure, Measurement, Rejection, UsageError, Workload
from tuner.store import Store

WORKLOAD = Workload("scale", (("N", 3),), "float32")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}


def add(store: Store, tile: int, outcome: float | Rejection) -> None:
    if isinstance(outcome, float):
        outcome = Measurement(outcome, outcome, outcome, 5, "warm", 0.1)
    candidate = Candidate.of("cpu", {"TILE": tile})
    store.add_trial(WORKLOAD, candidate, f"{tile}", outcome, seconds=0.5)


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / ".tuner", "arch")
    add(store, 1, 2.0)
    add(store, 2, Rejection("compile", "expected [/usr] before [bold]"))
    add(store, 4, 1.0)
    return store


def watch(folder: Path, *arguments: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tuner", "watch", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        text=True,
        # a test run in the background ignores interrupts, and its children would, too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def test_once_prints_a_table_and_ends(store, tmp_path):
    process = watch(tmp_path, "--once", stdout=subprocess.PIPE)
    printed, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    (row,) = [line for line in printed.splitlines() if "N=3" in line]
    for words in ("1 compile", "2 ms", "1 ms", "2.00x", "trial 2", "not yet"):
        assert words in row
    assert "running: 3 trials in the last minute" in printed


def test_a_pipe_gets_a_line_for_every_new_trial(store, tmp_path):
    process = watch(tmp_path, stdout=subprocess.PIPE)
    lines = [process.stdout.readline() for _ in range(3)]
    assert "trial 1: rejected at compile: expected [/usr] before [bold] | best 2 ms" in lines[1]
    add(store, 8, 0.5)
    assert "trial 3: 0.5 ms | best 0.5 ms" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "stopped watching .tuner" in printed


def test_a_terminal_shows_a_table_that_moves(store, tmp_path):
    ours, theirs = pty.openpty()
    process = watch(tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + WAIT_S
    while b"trial 3" not in seen and time.monotonic() < deadline:
        if b"trial 2" in seen and b"0.5 ms" not in seen:
            add(store, 8, 0.5)
        seen += os.read(ours, 65536)
    assert b"4.00x" in seen
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    os.close(ours)


def test_a_store_that_is_begun_anew_is_read_anew(store, tmp_path):
    state = Watch(tmp_path / ".tuner")
    assert len(list(state.news())) == 3
    assert list(state.news()) == []
    store.forget()
    add(store, 16, 3.0)
    assert len(list(state.news())) == 1
    assert state.workloads["arch", WORKLOAD].best_ms == 3.0


def test_a_folder_without_a_store_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="there are no trials; run `tune` first"):
        list(Watch(tmp_path).news())


def test_a_reason_that_looks_like_markup_does_not_end_the_run():
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        Progress(console).end(Failure(WORKLOAD, "no [/usr/include] here"))
    assert "no [/usr/include] here" in capture.get()


def test_the_dashboard_shows_an_exported_study(store, tmp_path):
    command = shutil.which("optuna-dashboard") or Path(sys.executable).with_name(
        "optuna-dashboard"
    )
    if not Path(command).exists():
        pytest.skip("needs optuna-dashboard (pip install optuna-dashboard)")
    exported = subprocess.run(
        [
            *(sys.executable, "-m", "tuner", "export", "--format", "optuna"),
            "--output",
            "a.journal",
        ],
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    assert b"a.journal" in exported.stdout
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [command, "a.journal", "--host", "127.0.0.1", "--port", str(port)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        (summary,) = fetch(f"{address}/api/studies")["study_summaries"]
        assert summary["study_name"] == f"scale {WORKLOAD}"
        study = fetch(f"{address}/api/studies/{summary['study_id']}?after=0")
        assert [trial["state"] for trial in study["trials"]] == ["Complete", "Pruned", "Complete"]
        with open_browser(tmp_path / "profile") as browser:
            browser.get(f"{address}/dashboard/studies/{summary['study_id']}")
            deadline = time.monotonic() + WAIT_S
            while summary["study_name"] not in browser.find_element("tag name", "body").text:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(WAIT_S)


def fetch(address: str) -> dict:
    """Return a server's answer, once it answers."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as reply:
                return json.load(reply)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
