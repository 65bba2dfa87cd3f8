import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tuner.package.journal import write_journal
from tuner.records import Candidate, Measurement, Rejection, Trial, UsageError, Workload

WORKLOAD = Workload("scale", (("N", 3),), "float32")


def trial(number, parameters, outcome):
    return Trial(number, WORKLOAD, Candidate.of("cpu", parameters), f"{number}", outcome, 0.1)


TRIALS = [
    trial(0, {"TILE": 16, "LAYOUT": "none"}, Measurement(2.0, 1.9, 2.1, 10, "warm", 0.1)),
    trial(1, {"TILE": 32, "LAYOUT": "panel"}, Rejection("correctness", "y[0] is wrong")),
    trial(2, {"TILE": 32, "LAYOUT": "none"}, Measurement(1.0, 0.9, 1.1, 10, "warm", 0.1)),
]


def test_optuna_opens_the_journal(tmp_path):
    path = tmp_path / "study.journal"
    write_journal(path, TRIALS)
    storage = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.load_study(study_name=f"scale {WORKLOAD}", storage=storage)
    assert study.best_params == {"template": "cpu", "cpu.TILE": 32, "cpu.LAYOUT": "none"}
    assert [item.state.name for item in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert study.trials[1].user_attrs["reason"] == "y[0] is wrong"
    assert len(study.trials_dataframe()) == 3


def test_a_journal_is_not_appended_to(tmp_path):
    path = tmp_path / "study.journal"
    write_journal(path, TRIALS)
    with pytest.raises(UsageError, match="it exists"):
        write_journal(path, TRIALS)
