"""The search and its Optuna sampler, on made-up spaces and on Optuna's conformance suite."""

from __future__ import annotations

import functools
import math
import time

import numpy as np
import optuna
import pytest
from optuna.testing.pytest_samplers import BasicSamplerTestCase
from optuna.trial import TrialState

from tuner.records import Candidate, Measurement, Rejection, Trial, Workload
from tuner.runtime.expression import Expression
from tuner.search.acquisition import Search
from tuner.search.covariance import Kernel
from tuner.search.sampler import (
    FeasibleSampler,
    as_params,
    ask,
    distributions,
    from_params,
    frozen_trial,
)
from tuner.search.surrogate import Posterior, fit
from tuner.space.combinations import TemplateSet
from tuner.space.feasible import FeasibleSet
from tuner.space.template import Constraint, TemplateSpec

TILES = (8, 16, 32, 48, 64, 96, 128, 256)


def template(name, parameters, require=""):
    names = [name for name, _ in parameters]
    constraints = [Constraint(Expression(require, name, names), "it is so")] if require else []
    default = Candidate.of(name, {name: values[0] for name, values in parameters})
    spec = TemplateSpec(
        name, "cpp", ("cpu",), ("float32",), parameters, tuple(constraints), default
    )
    return TemplateSet(spec, {})


@functools.cache
def tiled():
    """Two templates, one of them with constraints: 8 * 8 * 4 * 2 combinations and 3."""
    blocked = (("M", TILES), ("N", TILES), ("UNROLL", (1, 2, 4, 8)), ("LAYOUT", ("row", "column")))
    return FeasibleSet(
        [
            template("blocked", blocked, "M * N <= 8192"),
            template("plain", (("UNROLL", (1, 2, 4)),)),
        ]
    )


def cost(candidate):
    """Return a time with one optimum; None where the candidate fails."""
    values = dict(candidate.parameters)
    if candidate.template == "plain":
        return 8.0 / values["UNROLL"]
    if values["M"] * values["UNROLL"] > 512:
        return None
    time = 1 + abs(math.log2(values["M"] / 64)) + 0.7 * abs(math.log2(values["N"] / 32))
    time += 0.3 * abs(math.log2(values["UNROLL"] / 4)) + 0.4 * (values["LAYOUT"] == "row")
    return time


def searched(feasible, seed, evaluations, batch=1, answer=cost):
    """Return the outcomes of a search that keeps `batch` candidates running."""
    search, outcomes, running = Search(feasible, seed), {}, []
    while len(outcomes) < evaluations:
        while len(running) < batch:
            key = search.propose(outcomes, running)
            if key is None:
                break
            assert key not in outcomes
            assert key not in running
            assert feasible.feasible(np.array([key]))[0]
            running.append(key)
        if not running:
            break
        key = search.most_promising(outcomes, running)
        running.remove(key)
        outcomes[key] = answer(feasible.candidate(key))
    return outcomes


def best(outcomes):
    return min(time for time in outcomes.values() if time is not None)


@pytest.mark.parametrize("batch", [1, 8])
def test_the_optimum_is_found_in_a_fraction_of_the_space(batch):
    assert len(tiled()) > 400
    found = [best(searched(tiled(), seed, 48, batch)) for seed in range(4)]
    assert np.mean(found) < 1.1


def test_failures_are_avoided():
    def fails_half(candidate):
        return None if dict(candidate.parameters).get("M", 0) >= 64 else cost(candidate)

    failed = [
        [time is None for time in searched(tiled(), seed, 25, answer=fails_half).values()]
        for seed in range(4)
    ]
    everywhere = np.mean([fails_half(candidate) is None for candidate in tiled()])
    assert np.mean(failed) < 0.6 * everywhere


def test_later_results_make_earlier_proposals_stale():
    times = {key: cost(tiled().candidate(key)) for key in tiled().keys.tolist()}
    known = dict(list(times.items())[::3])
    new = sorted((key for key in times.keys() - known if times[key]), key=times.__getitem__)
    search = Search(tiled(), 0)
    assert search.most_promising({}, [new[-1], new[0]]) == new[-1]
    assert search.most_promising(known, [new[-1], new[0]]) == new[0]


def test_candidates_in_flight_do_not_change_which_is_tried_next():
    outcomes = searched(tiled(), 1, 10)
    alone, ahead, running = Search(tiled(), 0), Search(tiled(), 0), []
    for _ in range(20):
        expected = alone.propose(outcomes)
        while len(running) < 8:
            running.append(ahead.propose(outcomes, running))
        key = ahead.most_promising(outcomes, running)
        assert key == expected
        running.remove(key)
        outcomes[key] = cost(tiled().candidate(key))


def test_candidates_are_spread_while_the_leader_is_in_flight():
    def spread(keys):
        here = tiled().coordinates(np.array(keys))
        return np.abs(here[:, None] - here[None]).sum()

    outcomes = searched(tiled(), 0, 20)
    search, running = Search(tiled(), 0), []
    while len(running) < 8:
        running.append(search.propose(outcomes, running))
    left = [key for key in tiled().keys.tolist() if key not in outcomes]
    assert search.most_promising(outcomes, left) == running[0]
    promising = []
    while len(promising) < 8:
        promising.append(search.most_promising(outcomes, left))
        left.remove(promising[-1])
    assert spread(running) > 1.2 * spread(promising)


def test_every_candidate_is_proposed_once_and_then_none():
    feasible = FeasibleSet(
        [template("plain", (("UNROLL", (1, 2, 4)), ("LAYOUT", ("row", "col"))))]
    )
    outcomes = searched(feasible, 0, 100, answer=lambda candidate: 1.0)
    assert sorted(outcomes) == feasible.keys.tolist()
    assert Search(feasible, 0).propose(outcomes) is None


def test_a_search_goes_on_when_everything_fails():
    outcomes = searched(tiled(), 0, 30, answer=lambda candidate: None)
    assert len(outcomes) == 30


def test_equal_times_are_no_problem():
    assert len(searched(tiled(), 0, 30, answer=lambda candidate: 1.0)) == 30


def test_the_same_seed_proposes_the_same():
    assert searched(tiled(), 3, 30) == searched(tiled(), 3, 30)
    assert searched(tiled(), 3, 30) != searched(tiled(), 4, 30)


def test_noise_does_not_mislead():
    random = np.random.default_rng(0)

    def noisy(candidate):
        time = cost(candidate)
        return None if time is None else time * random.lognormal(0, 0.03)

    keys = searched(tiled(), 1, 60, answer=noisy)
    assert min(cost(tiled().candidate(key)) or 9.0 for key in keys) < 1.15


def test_ten_million_combinations_are_searched_better_than_by_four_times_as_many_draws():
    values = tuple(range(1, 11))
    part = template("wide", tuple((f"P{place}", values) for place in range(7)), "P0 >= P1")
    feasible = FeasibleSet([part])
    assert feasible.keys is None
    assert len(feasible) == 5_500_000

    def bowl(candidate):
        return 1.0 + sum((value - 6) ** 2 for _, value in candidate.parameters)

    found = [best(searched(feasible, seed, 60, answer=bowl)) for seed in range(3)]
    random = np.random.default_rng(0)
    drawn = [
        min(bowl(feasible.candidate(key)) for key in feasible.sample(240, random).tolist())
        for _ in range(3)
    ]
    assert np.mean(found) < np.mean(drawn)


@pytest.mark.alone
def test_a_proposal_takes_less_than_50_ms_on_one_core():
    random = np.random.default_rng(0)
    shape = (4, 4, 3, 3, 3, 3, 4, 4, 3)
    part = template("big", tuple((f"P{i}", (16, 32, 64, 128)[:n]) for i, n in enumerate(shape)))
    feasible = FeasibleSet([part])
    assert len(feasible) > 20_000
    keys = feasible.sample(210, random).tolist()
    outcomes = {key: random.uniform(1, 2) for key in keys[:200]}
    search, seconds = Search(feasible, 0), []
    for key in keys[200:]:
        started = time.thread_time()
        assert search.propose(outcomes) is not None
        seconds.append(time.thread_time() - started)
        outcomes[key] = random.uniform(1, 2)
    assert np.median(seconds) < 0.05


def test_the_posterior_that_grows_equals_the_one_that_is_built_at_once():
    feasible, random = tiled(), np.random.default_rng(0)
    kernel = Kernel(feasible.choices)
    pool = kernel.one_hot(feasible.codes(feasible.keys))
    codes = feasible.codes(feasible.sample(20, random))
    values = random.standard_normal(20)
    whole, grown = (Posterior(kernel, kernel.prior, pool) for _ in range(2))
    whole.add(codes)
    for start in range(0, 20, 5):
        grown.add(codes[start : start + 5])
    for one, other in zip(whole.predict(values), grown.predict(values), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_the_posterior_forgets_rows():
    feasible, random = tiled(), np.random.default_rng(0)
    kernel = Kernel(feasible.choices)
    pool = kernel.one_hot(feasible.codes(feasible.keys))
    codes = feasible.codes(feasible.sample(20, random))
    values = random.standard_normal(20)
    never, forgot = (Posterior(kernel, kernel.prior, pool) for _ in range(2))
    never.add(np.concatenate([codes[:10], codes[15:]]))
    forgot.add(codes[:15])
    forgot.keep(10)
    forgot.add(codes[15:])
    values = np.concatenate([values[:10], values[15:]])
    for one, other in zip(never.predict(values), forgot.predict(values), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_a_row_without_a_value_moves_no_mean_but_makes_certain():
    feasible, random = tiled(), np.random.default_rng(0)
    kernel = Kernel(feasible.choices)
    pool = kernel.one_hot(feasible.codes(feasible.keys))
    codes = feasible.codes(feasible.sample(20, random))
    values = random.standard_normal(20)
    known, believed = (Posterior(kernel, kernel.prior, pool) for _ in range(2))
    known.add(codes[:15])
    believed.add(codes)
    mean, spread = known.predict(values[:15])
    same, less = believed.predict(np.append(values[:15], np.full(5, np.nan)))
    np.testing.assert_allclose(mean, same, atol=1e-3)
    assert (less <= spread + 1e-3).all()
    assert less.sum() < 0.98 * spread.sum()


def test_fitting_finds_the_feature_that_matters():
    feasible, random = tiled(), np.random.default_rng(0)
    kernel = Kernel(feasible.choices)
    part = feasible.templates[0]
    codes = feasible.codes(part.sample(60, random))
    values = feasible.coordinates(part.keys_of(codes[:, 1:5]))[:, 1]
    values = (values - values.mean()) / values.std()
    gains = fit(kernel, codes, values, kernel.prior).weights - kernel.prior.weights
    sensitivity = dict(zip(kernel.features, gains, strict=True))
    assert sensitivity[1] > sensitivity[2]


@pytest.fixture
def study():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=FeasibleSampler(tiled(), seed=0))


def tell(study, trial, candidate):
    time = cost(candidate)
    if time is None:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, time)


def test_parameters_and_candidates_stand_for_each_other():
    for candidate in tiled():
        params = as_params(candidate)
        assert from_params(params) == candidate
        assert params.keys() <= distributions(tiled()).keys()


def test_what_is_enqueued_comes_first(study):
    chosen = tiled().candidate(int(tiled().keys[7]))
    study.enqueue_trial(as_params(tiled().default))
    study.enqueue_trial(as_params(chosen))
    asked = [ask(study, tiled())[1] for _ in range(3)]
    assert asked[:2] == [tiled().default, chosen]
    assert asked[2] not in asked[:2]


def test_a_study_never_asks_twice_and_ends(study):
    seen = set()
    for _ in range(40):
        trial, candidate = ask(study, tiled())
        assert candidate in tiled()
        assert candidate not in seen
        seen.add(candidate)
        tell(study, trial, candidate)
    for candidate in tiled():
        if candidate not in seen:
            outcome = Rejection("compile", "it is so")
            stored = Trial(0, Workload("k", (), "float32"), candidate, "", outcome, 0.0)
            study.add_trial(frozen_trial(tiled(), stored))
    assert ask(study, tiled()) is None


def test_stored_trials_become_optunas():
    workload = Workload("k", (("M", 1),), "float32")
    measured = Measurement(2.5, 2.0, 3.0, 9, "warm", 0.1)
    trial = frozen_trial(tiled(), Trial(0, workload, tiled().default, "", measured, 1.0))
    assert (trial.state, trial.value) == (TrialState.COMPLETE, 2.5)
    rejected = Rejection("runtime", "it crashed")
    trial = frozen_trial(tiled(), Trial(0, workload, tiled().default, "", rejected, 1.0))
    assert trial.state == TrialState.PRUNED
    assert from_params(trial.params) == tiled().default


@pytest.mark.filterwarnings("ignore:Some regimes")
def test_optunas_tools_work_on_a_study(study):
    for _ in range(20):
        trial, candidate = ask(study, tiled())
        tell(study, trial, candidate)
    frame = study.trials_dataframe()
    assert {"params_template", "params_blocked.M", "value", "state"} <= set(frame.columns)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
    assert "blocked.M" in importances


def test_a_plain_objective_gets_feasible_candidates(study):
    def objective(trial):
        space = distributions(tiled())
        name = trial.suggest_categorical("template", space["template"].choices)
        for parameter, distribution in space.items():
            if parameter.startswith(f"{name}."):
                trial.suggest_categorical(parameter, distribution.choices)
        candidate = from_params(trial.params)
        assert candidate in tiled()
        time = cost(candidate)
        if time is None:
            raise optuna.TrialPruned
        return time

    study.optimize(objective, n_trials=30)
    assert study.best_value < 2.0


def test_what_is_enqueued_is_evaluated_first(study):
    for _ in range(10):
        tell(study, *ask(study, tiled()))
    proposed = [ask(study, tiled())[0] for _ in range(3)]
    study.enqueue_trial(as_params(tiled().default))
    guess = ask(study, tiled())[0]
    assert study.sampler.most_promising(study, [*proposed, guess]) is guess


def test_another_objective_than_one_minimum_is_refused():
    study = optuna.create_study(direction="maximize", sampler=FeasibleSampler(tiled(), seed=0))
    with pytest.raises(ValueError, match="the study must minimise one value"):
        ask(study, tiled())


class TestConformance(BasicSamplerTestCase):
    """Optuna's suite for parameters that are not the feasible set's.

    Its suite for relative sampling is left out, because it expects a relative sample of any
    search space, and the one for several objectives, because a time is one.
    """

    @pytest.fixture
    def sampler(self):
        return lambda: FeasibleSampler(tiled(), seed=0)
