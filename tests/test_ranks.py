"""Tuning over several ranks: which workloads, and a child whose ranks do the same or nothing."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from exchange_ranks import DISPATCH

from tuner.catalog import Catalog
from tuner.children.child import ChildSpec
from tuner.children.task import Task
from tuner.devices.cuda import Cuda
from tuner.devices.interpreter import Interpreter
from tuner.plan import Request, plan
from tuner.records import Candidate, UsageError
from tuner.render import Renderer
from tuner.serve.ranks.follower import Follower
from tuner.serve.ranks.team import TeamDevice
from tuner.space.kernel import load_space

H200 = Cuda.target("90")
CATALOG = Catalog()
SPEC = load_space(CATALOG.space_path("moe_dispatch"))


def planned(**options) -> set[str]:
    return {subject.task.workload.kernel for subject in plan(CATALOG, H200, Request(**options))}


def test_several_ranks_tune_the_kernels_that_exchange():
    assert planned(ranks=2) == {"moe_dispatch", "moe_combine"}
    assert not planned() & {"moe_dispatch", "moe_combine"}


@pytest.mark.parametrize(
    ("kernel", "ranks", "words"),
    [("moe_dispatch", 1, "write --ranks 2"), ("matmul", 2, "is for 1 rank: write --ranks 1")],
)
def test_a_kernel_that_was_asked_for_must_fit_the_ranks(kernel, ranks, words):
    with pytest.raises(UsageError, match=words):
        planned(kernels=(kernel,), ranks=ranks)


class Team:
    """A measuring child of two ranks whose kernels Triton interprets."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        spec = ChildSpec("interpreter", folder, environment=tuple(environment.items()), ranks=2)
        self.child, self._folder = spec.start("measure"), folder
        workload = SPEC.workload("RANKS=2,TOKENS=2,GROUPS=1,TOPK=2,EXPERTS=4")
        problem, info = CATALOG.problem_path("moe_dispatch"), Interpreter().info()
        self.task = Task(SPEC.signature.to_json(), problem, workload, info)
        self.child.request({"operation": "ready", "measures": True}, timeout_s=200)

    def describe(self, change: tuple[str, str] = ("", ""), **choices: object) -> dict[str, str]:
        """Return a rendered file with one text in the place of another."""
        candidate = Candidate.of("triton", {**DISPATCH, **choices})
        source = Renderer(CATALOG.template_folders).render("moe_dispatch", "triton", candidate)
        text = source.text.replace(*change)
        path = self._folder / f"{abs(hash(text))}.py"
        path.write_text(text)
        return {"path": str(path), "language": "triton"}

    def ask(self, operation: str, **values: object) -> dict:
        message = self.task.message(operation, **values)
        return self.child.request(message, timeout_s=200)


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    team = Team(tmp_path_factory.mktemp("team"))
    yield team
    team.child.kill()


ON_RANK_1 = ("import torch\n", "import torch\n\nassert torch.distributed.get_rank() != 1\n")
WRONG = ("place = tl.sum(tl.where(choice == k, slot, 0), axis=0)", "place = 0")
SILENT = ("    if is_last(done_ptr):\n", "    if is_last(done_ptr) and rank == 0:\n")


def test_what_fails_on_one_rank_is_rejected_on_all_and_the_next_is_not(team):
    assert team.ask("verify", **team.describe()) == {}
    failed = team.ask("verify", **team.describe(ON_RANK_1))
    assert failed["rejection"]["stage"] == "runtime"
    assert "rank 1: AssertionError" in failed["rejection"]["reason"]
    wrong = team.ask("verify", **team.describe(WRONG))
    assert wrong["rejection"]["stage"] == "correctness"
    assert team.ask("verify", **team.describe(BUFFERING="acknowledged")) == {}


@pytest.mark.slow
def test_all_ranks_are_timed_and_a_silent_one_is_no_hang(team):
    timing = team.ask("evaluate", give_up_ms=None, **team.describe())["timing"]
    assert timing["median_ms"] > 0
    silent = team.ask("verify", **team.describe(SILENT))
    assert "no signal from rank 1" in silent["rejection"]["reason"]
    files = {"a": team.describe(), "b": team.describe(BUFFERING="acknowledged")}
    contenders = [{"label": label, **file} for label, file in files.items()]
    result = team.ask("race", contenders=contenders, budget_s=3.0, seed=0)["race"]
    assert set(result["times_ms"]) == {"a", "b"}


def test_a_kernel_that_exchanges_nothing_is_refused(team):
    spec = load_space(CATALOG.space_path("softmax"))
    task = dataclasses.replace(
        team.task,
        signature=spec.signature.to_json(),
        problem=CATALOG.problem_path("softmax"),
        workload=spec.workload("M=4,N=4,dtype=float32"),
    )
    with pytest.raises(Exception, match="does not exchange anything"):
        team.child.request(task.message("prepare"), timeout_s=200)


class Recorded:
    """Stands for a rank and its device: it writes down what it is told to play."""

    def __init__(self, fails: bool) -> None:
        self.played, self._fails = [], fails

    def play(self, file: str) -> None:
        self.played.append(file)
        if self._fails:
            raise ValueError("cannot be captured")

    def capture(self, call, count: int):
        for _ in range(count):
            call()
        return lambda: self.played.append("replay")

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("fails", "played"), [(False, ["a", "a", "replay"]), (True, ["a"])])
def test_a_follower_captures_what_it_is_told_and_keeps_in_step_after_a_failure(fails, played):
    told = [
        {"operation": "capture", "graph": 7, "dropped": [], "answers": True},
        *2 * [{"operation": "play", "file": "a", "answers": False}],
        {"operation": "captured", "answers": False},
        *([] if fails else [{"operation": "replay", "graph": 7, "answers": False}]),
        {"operation": "synchronize", "answers": True},
    ]
    rank, replies = Recorded(fails), []
    Follower(rank, rank, messages=iter(told), reply=replies.append).follow()
    assert rank.played == played
    captured = {"result": None, "error": "ValueError: cannot be captured"}
    done = {"result": None, "error": None}
    assert replies == [captured if fails else {**done, "result": True}, done]


class Capturing(Interpreter):
    """Has graphs."""

    def capture(self, call, count: int):
        for _ in range(count):
            call()
        return lambda: None


def test_followers_drop_the_graphs_that_rank_0_has_dropped():
    device, told = TeamDevice(Capturing(), 2), []

    class Told:
        def ask(self, _operation, mine, **values):
            told.append(values["dropped"])
            return [mine(), True]

        def tell(self, _operation):
            pass

    device._team = Told()
    kept = [device.capture(lambda: None, 1)]
    device.capture(lambda: None, 1)  # dropped at once
    kept.append(device.capture(lambda: None, 1))
    assert told == [[], [], [1]]
    messages = [
        {"operation": "capture", "graph": number, "dropped": dropped, "answers": True}
        for number, dropped in enumerate(told)
    ]
    ends = {"operation": "captured", "answers": False}
    replays = [{"operation": "replay", "graph": 1, "answers": True}]
    rank, replies = Recorded(False), []
    told_follower = [item for message in messages for item in (message, ends)] + replays
    Follower(rank, rank, messages=iter(told_follower), reply=replies.append).follow()
    assert [reply["error"] for reply in replies] == [None, None, None, "KeyError: 1"]
