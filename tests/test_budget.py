import pytest

from tuner.budget import Budget, Countdown
from tuner.records import UsageError
from tuner.run import final_seconds


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("90s", Budget(seconds=90)),
        ("90", Budget(seconds=90)),
        ("5m", Budget(seconds=300)),
        ("1.5h", Budget(seconds=5400)),
        ("200trials", Budget(trials=200)),
    ],
)
def test_budgets_are_spelled_with_their_unit_or_in_seconds(text, budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["", "0", "s", "-5s", "0s", "ten minutes", "5 days"])
def test_other_spellings_are_errors_that_quote_them(text):
    with pytest.raises(UsageError, match=f"--budget '{text}'.*200trials"):
        Budget.parse(text)


def test_a_share_is_never_less_than_one_trial():
    assert Budget(trials=3).share(1 / 5) == Budget(trials=1)
    assert Budget(trials=30).share(1 / 3) == Budget(trials=10)
    assert Budget(seconds=10).share(1 / 4) == Budget(seconds=2.5)


def test_a_countdown_of_trials_ends():
    countdown = Countdown(Budget(trials=2))
    assert not countdown.spent
    countdown.count_trial()
    assert countdown.left == "1 trials"
    countdown.count_trial()
    assert countdown.spent


def test_what_others_took_is_set_aside_down_to_a_half():
    assert Budget(seconds=10.0).less(2.0) == Budget(seconds=8.0)
    assert Budget(seconds=10.0).less(9.0) == Budget(seconds=5.0)
    assert Budget(trials=10).less(9.0) == Budget(trials=10)


def test_a_final_takes_a_tenth_of_the_whole_within_limits():
    assert [final_seconds(total_s) for total_s in (0.0, 20.0, 3600.0)] == [1.0, 2.0, 5.0]
