"""Several cards at a time: here two crews of children on one CPU, each with a store of its own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import KERNELS

from tuner.budget import Budget, Countdown
from tuner.catalog import Catalog
from tuner.children.child import ChildSpec, child_spec
from tuner.children.host import HostLost
from tuner.children.task import Compiled
from tuner.children.worker import Workers
from tuner.cli.devices import resolve_cards, workers_for
from tuner.cli.main import main
from tuner.fleet import Fleet, run_on
from tuner.plan import Request, plan
from tuner.records import (
    ChildError,
    Failure,
    Measurement,
    Resources,
    Source,
    Trial,
    UsageError,
    Winner,
)
from tuner.render import Renderer
from tuner.run import for_searches, look_again, tune
from tuner.search import sampler
from tuner.session import Session, Subject
from tuner.store import Store
from tuner.study import Study

SIZES = ("N=10000", "N=20000", "N=30000", "N=40000")  # long enough for the clock


class Log:
    """Notes what one card is told."""

    def __init__(self) -> None:
        self.ended: list[Winner | Failure] = []
        self.trials: list[Trial] = []
        self.stop: threading.Event | None = None

    def begin(self, study, workload, countdown: Countdown) -> None: ...

    def final(self, workload, contenders: int) -> None: ...

    def trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        if self.stop is not None:
            self.stop.set()

    def lost(self, workload, reason: str) -> None:
        self.gone = (workload, reason)

    def end(self, result: Winner | Failure) -> None:
        self.ended.append(result)


@pytest.fixture(scope="module")
def crews(tmp_path_factory) -> Iterator[tuple[list[Session], list[Subject]]]:
    root = tmp_path_factory.mktemp("fleet") / ".tuner"
    catalog = Catalog([KERNELS])
    with ExitStack() as stack:
        workers = [
            stack.enter_context(workers_for(f"cpu:{index}", root, dict(os.environ), jobs=1))
            for index in range(2)
        ]
        device = workers[0].info()
        subjects = plan(catalog, device, Request(("scale",), SIZES))
        renderer = Renderer(catalog.template_folders)
        sessions = [
            Session(
                device,
                shares_host=True,
                store=Store(root, device.arch, f"cpu:{index}"),
                workers=crew,
                renderer=renderer,
                jobs=1,
                seed=0,
            )
            for index, crew in enumerate(workers)
        ]
        yield sessions, subjects


def fresh(sessions: Sequence[Session], folder: Path) -> list[Session]:
    """Return the sessions with empty stores, ready to run."""
    return [
        dataclasses.replace(
            session,
            store=Store(folder, session.device.arch, f"cpu:{index}"),
            stop=threading.Event(),
        )
        for index, session in enumerate(sessions)
    ]


def test_each_workload_stays_on_one_card_and_both_cards_work(crews, tmp_path):
    sessions, subjects = fresh(crews[0], tmp_path), crews[1]
    logs = [Log(), Log()]
    ended = run_on(sessions, subjects, Budget(seconds=4), logs)
    assert [subject for subject, _ in ended] == list(subjects)
    assert [result for _, result in ended if not isinstance(result, Winner)] == []
    assert [result.workload for _, result in ended] == [item.task.workload for item in subjects]
    assert all(log.ended for log in logs)
    store = Store(tmp_path, sessions[0].device.arch)
    cards: dict[object, set[str | None]] = {}
    for trial in store.trials:
        cards.setdefault(trial.workload, set()).add(trial.card)
    assert len(cards) == len(SIZES)
    assert all(len(names) == 1 for names in cards.values())
    assert set.union(*cards.values()) == {"cpu:0", "cpu:1"}
    assert [trial.number for trial in store.trials] == list(range(len(store.trials)))
    assert len(store.winners) == len(SIZES)


def test_a_stop_ends_the_searches_and_still_races_what_is_at_hand(crews, tmp_path):
    sessions, subjects = fresh(crews[0], tmp_path), crews[1]
    logs = [Log(), Log()]
    for log, session in zip(logs, sessions, strict=True):
        log.stop = session.stop
    ended = run_on(sessions, subjects, Budget(seconds=600), logs)
    assert len(ended) == 2
    assert all(isinstance(result, Winner) for _, result in ended)


def test_a_failure_of_our_own_code_on_one_card_stops_all(crews, tmp_path):
    sessions, subjects = fresh(crews[0], tmp_path), crews[1]
    broken = dataclasses.replace(
        subjects[0], task=dataclasses.replace(subjects[0].task, problem=Path("absent.py"))
    )
    with pytest.raises(ChildError):
        run_on(sessions, [broken, *subjects[1:]], Budget(seconds=600), [Log(), Log()])
    assert all(session.stop.is_set() for session in sessions)


def test_what_wins_later_is_timed_for_neighbours_whose_search_is_over(crews, tmp_path):
    """The first has tried its default alone, which is slow on purpose."""
    (session, _), (first, second, *_) = fresh(crews[0], tmp_path), crews[1]
    log, subjects = Log(), (first, second)
    standing = [
        tune(session, subject, Budget(trials=trials), log)[0]
        for subject, trials in zip(subjects, (1, 8), strict=True)
    ]
    tried = len(session.store.trials)
    countdown = Countdown(Budget(seconds=60))
    results = list(look_again(session, subjects, standing, countdown, log))
    assert standing[0].candidate == first.feasible.default
    assert [winner.candidate for winner in results] == [standing[1].candidate] * 2
    assert results[0].gain.low > 1.1
    assert results[1] == standing[1]
    assert [trial.workload for trial in session.store.trials[tried:]] == [first.task.workload]
    assert {winner.workload: winner for winner in session.store.winners} == {
        winner.workload: winner for winner in results
    }
    again = list(look_again(session, subjects, results, countdown, log))
    assert again == results
    assert len(session.store.trials) == tried + 1


def test_no_second_look_takes_more_than_a_tenth_or_five_seconds_a_workload():
    assert for_searches(Budget(seconds=40), 4) == Budget(seconds=36)
    assert for_searches(Budget(seconds=3600), 4) == Budget(seconds=3580)
    assert for_searches(Budget(seconds=40), 1) == Budget(seconds=40)
    assert for_searches(Budget(trials=40), 4) == Budget(trials=40)


@pytest.mark.parametrize("shares_host", [False, True])
def test_what_comes_next_is_proposed_while_a_device_of_its_own_measures(
    crews, tmp_path, monkeypatch, shares_host
):
    (session, _), (*_, subject) = fresh(crews[0], tmp_path), crews[1]
    session = dataclasses.replace(session, shares_host=shares_host)
    ask, threads = sampler.ask, []

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        return ask(*arguments)

    monkeypatch.setattr(sampler, "ask", noted)
    winner, interrupted = tune(session, subject, Budget(trials=7), Log())
    assert isinstance(winner, Winner)
    assert not interrupted
    assert len({trial.source_sha256 for trial in session.store.trials}) == 7
    beside = [name for name in threads if name.startswith("propose")]
    assert bool(beside) is not shares_host
    assert len(beside) in (0, 6)  # all but the default, before which nothing is measured


def test_an_interrupt_while_candidates_are_proposed_still_freezes_the_best(
    crews, tmp_path, monkeypatch
):
    (session, _), (*_, subject) = fresh(crews[0], tmp_path), crews[1]
    session = dataclasses.replace(session, shares_host=False)
    evaluate, calls = session.workers.evaluate, iter(range(100))

    def interrupted_at_the_third(*arguments, **options):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    monkeypatch.setattr(session.workers, "evaluate", interrupted_at_the_third)
    winner, interrupted = tune(session, subject, Budget(trials=7), Log())
    assert isinstance(winner, Winner)
    assert interrupted
    assert len(session.store.trials) == 2
    assert not [item for item in threading.enumerate() if item.name.startswith("propose")]


@pytest.mark.parametrize("shares_host", [False, True])
def test_the_fastest_so_far_gives_the_pace_on_a_device_of_its_own(
    crews, tmp_path, monkeypatch, shares_host
):
    (session, _), (*_, subject) = fresh(crews[0], tmp_path), crews[1]
    session = dataclasses.replace(session, shares_host=shares_host)
    evaluate, pacers = session.workers.evaluate, []

    def noted(*arguments, pacer, **options):
        pacers.append(pacer)
        return evaluate(*arguments, pacer=pacer, **options)

    monkeypatch.setattr(session.workers, "evaluate", noted)
    tune(session, subject, Budget(trials=5), Log())
    best, fastest = None, []
    for trial in session.store.trials:
        fastest.append(None if shares_host or best is None else best.source_sha256)
        if isinstance(trial.outcome, Measurement):  # beside other work one may be too short
            best = min(filter(None, (best, trial)), key=lambda each: each.outcome.median_ms)
    assert [pacer and pacer.sha256 for pacer in pacers] == fastest


def test_what_does_the_same_as_a_timed_variant_is_not_timed_again(crews, tmp_path, monkeypatch):
    (session, _), (*_, subject) = fresh(crews[0], tmp_path), crews[1]
    compile_, codes = session.workers.compile, {}

    def with_code(task, source):
        code = codes.setdefault(source.sha256, "same" if "#pragma" in source.text else None)
        built = compile_(task, source).result()
        future: Future[Compiled] = Future()
        future.set_result(dataclasses.replace(built, resources=Resources(code=code)))
        return future

    monkeypatch.setattr(session.workers, "compile", with_code)
    for _ in range(2):  # the second goes on with what the store has
        study = Study(session, subject)
        study.run(Countdown(Budget(seconds=60)), lambda trial: None)
        assert study.exhausted
        assert len(codes) == len(subject.feasible)
        trials = session.store.trials
        timed = [item for item in trials if isinstance(item.outcome, Measurement)]
        assert [codes[item.source_sha256] for item in timed].count("same") == 1
        others = [item for item in trials if codes[item.source_sha256] is None]
        assert len(others) == list(codes.values()).count(None)


class Mortal:
    """A host that is gone once its children were asked for an operation so many times."""

    def __init__(self, spec: ChildSpec, operation: str, times: int) -> None:
        self.operation, self.left, self._spec = operation, times, spec
        self.asked: dict[str, list[str]] = {"compile": [], "evaluate": []}

    def start(self, role):
        return MortalChild(self, self._spec.start(role))


class MortalChild:
    def __init__(self, host: Mortal, child) -> None:
        self._host, self._child = host, child
        self.kill = child.kill

    def request(self, message, *, timeout_s: float):
        operation = message["operation"]
        self._host.left -= operation == self._host.operation
        if self._host.left < 0:
            self._child.kill()
            raise HostLost("pulled the plug")
        if operation in self._host.asked:
            self._host.asked[operation].append(Path(message["path"]).stem)
        return self._child.request(message, timeout_s=timeout_s)


@pytest.fixture
def mortal(crews, tmp_path, request) -> Iterator[tuple[Session, Mortal]]:
    """A card that is lost at its third evaluation, or as asked."""
    fate = getattr(request, "param", ("evaluate", 2))
    host = Mortal(child_spec("cpu", tmp_path, dict(os.environ)), *fate)
    with Workers(host, jobs=2, sources=tmp_path / "sources") as workers:
        device = crews[0][0].device
        store = Store(tmp_path, device.arch, "mortal")
        yield (
            dataclasses.replace(
                crews[0][0], store=store, workers=workers, jobs=2, stop=threading.Event()
            ),
            host,
        )


def test_what_a_lost_card_had_asked_for_is_tried_on_another(crews, mortal, tmp_path):
    (session, host), other = mortal, fresh(crews[0], tmp_path)[1]
    logs = [Log(), Log()]
    with Fleet(crews[1][:1], Budget(trials=8)) as fleet:
        fleet.join(session, logs[0])
        fleet.wait()
        assert fleet.idle
        assert not fleet.finished
        assert logs[0].gone == (crews[1][0].task.workload, "pulled the plug")
        fleet.join(other, logs[1])
        fleet.wait()
        assert fleet.finished
        ((_, winner),) = fleet.results()
    assert isinstance(winner, Winner)
    trials = Store(tmp_path, other.device.arch).trials
    assert [trial.card for trial in trials] == ["mortal"] * 2 + ["cpu:1"] * 6
    untold = set(host.asked["compile"]) - set(host.asked["evaluate"])
    assert len(untold) > 1
    assert {trial.source_sha256 for trial in trials[2:]} >= untold


@pytest.mark.slow
@pytest.mark.parametrize("mortal", [("race", 0), ("verify", 1)], indirect=True)
def test_a_card_that_is_lost_in_a_final_leaves_the_final_to_another(crews, mortal, tmp_path):
    (session, _), other = mortal, fresh(crews[0], tmp_path)[1]
    with Fleet(crews[1][:1], Budget(trials=6)) as fleet:
        fleet.join(session, Log())
        fleet.wait()
        assert not fleet.finished
        fleet.join(other, Log())
        fleet.wait()
        ((_, winner),) = fleet.results()
    assert isinstance(winner, Winner)
    trials = Store(tmp_path, other.device.arch).trials
    assert [trial.card for trial in trials] == ["mortal"] * 6


def test_a_countdown_that_is_stopped_is_spent():
    stop = threading.Event()
    countdowns = [Countdown(Budget(seconds=60), stop), Countdown(Budget(trials=9), stop)]
    assert not any(countdown.spent for countdown in countdowns)
    stop.set()
    assert all(countdown.spent for countdown in countdowns)
    assert [countdown.seconds_left for countdown in countdowns] == [0, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:0,hip:1", "must be of one kind"),
        ("cuda:1,cuda:1", "names a card twice"),
        ("cuda,cuda:0", "names a card twice"),
        ("cpu:0,cpu:1", "cpu is one device"),
        ("cpu:all", "cpu is one device, whatever its index"),
        ("cuda:0,cuda:x", "'x' is not an index; write cuda:0"),
        ("cuda:0,", "must be of one kind"),
    ],
)
def test_cards_that_cannot_work_together_are_refused(name, message):
    with pytest.raises(UsageError, match=message):
        resolve_cards(name, {})


@pytest.mark.parametrize("device", ["cuda", "cuda:0,cuda:1", "cuda:all"])
def test_a_card_that_is_not_here_is_said_in_a_line(tune, tmp_path, device):
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    done = tune("softmax", "--device", device)
    assert done.returncode == 2
    assert done.stderr.startswith("tune: --device cuda")
    assert len(done.stderr.splitlines()) == 1


def test_cards_are_named_one_by_one():
    assert resolve_cards("cuda:0,cuda:1", {}) == ["cuda:0", "cuda:1"]
    assert resolve_cards("cpu", {}) == ["cpu"]


def test_cards_may_render_the_same_source_at_the_same_time(tmp_path):
    workers = Workers(ChildSpec("cpu", tmp_path), jobs=1, sources=tmp_path)
    for number in range(20):
        source = Source("k", "cpp", f"// {number}\n" * 10_000)
        with ThreadPoolExecutor(8) as pool:
            paths = list(pool.map(lambda _, item=source: workers.path_of(item), range(8)))
        assert {path.read_text() for path in paths} == {source.text}
    assert len(list(tmp_path.iterdir())) == 20
    workers.close()


def test_ray_is_not_loaded_without_a_cluster():
    code = "import sys, tuner.cli.main, tuner.cli.cluster; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_cluster_without_ray_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("tuner.cli.cluster.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["--cluster", "auto"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "tune: --cluster auto: Ray is not installed: pip install 'tuner[cluster]'\n"
    )


def test_ranks_and_clusters_exclude_each_other(monkeypatch, capsys):
    monkeypatch.setattr("tuner.cli.cluster.find_spec", lambda name: name)
    with pytest.raises(SystemExit):
        main(["moe_dispatch", "--ranks", "2", "--cluster", "auto"])
    assert "--ranks 2: ranks share a host" in capsys.readouterr().err
