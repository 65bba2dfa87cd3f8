import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import codec
from tuner.records import (
    Candidate,
    Measurement,
    Rejection,
    Resources,
    Trial,
    TunerError,
    Workload,
    format_value,
    parse_value,
)

WORKLOAD = Workload("matmul", (("M", 3), ("N", 5)), "float32", (("causal", True),))

values = st.one_of(st.booleans(), st.integers(-99, 99), st.sampled_from(["none", "panel_padded"]))
parameters = st.dictionaries(st.sampled_from("ABCDEF"), values, max_size=6)
outcomes = st.one_of(
    st.builds(
        Measurement,
        median_ms=st.floats(0.001, 10),
        low_ms=st.floats(0.001, 10),
        high_ms=st.floats(0.001, 10),
        samples=st.integers(1, 99),
        regime=st.sampled_from(["warm", "cold"]),
        compile_s=st.floats(0, 9),
        resources=st.builds(Resources, shared_bytes=st.none() | st.integers(0, 99)),
    ),
    st.builds(Rejection, stage=st.sampled_from(["compile", "timeout"]), reason=st.text()),
)


@given(parameters, outcomes)
def test_a_trial_survives_json(chosen, outcome):
    trial = Trial(7, WORKLOAD, Candidate.of("cpu", chosen), "ab", outcome, 0.5)
    assert codec.from_json(Trial, json.loads(json.dumps(codec.to_json(trial)))) == trial


def test_an_unknown_key_is_an_error():
    with pytest.raises(TunerError, match="Rejection has no colour; known: stage, reason"):
        codec.from_json(Rejection, {"stage": "compile", "reason": "", "colour": "red"})


def test_a_missing_key_is_an_error():
    with pytest.raises(TunerError, match="Rejection: .*reason"):
        codec.from_json(Rejection, {"stage": "compile"})


@given(parameters)
def test_equal_choices_are_equal_candidates(chosen):
    backwards = dict(reversed(chosen.items()))
    assert Candidate.of("cpu", chosen) == Candidate.of("cpu", backwards)
    assert hash(Candidate.of("cpu", chosen)) == hash(Candidate.of("cpu", backwards))


@given(values)
def test_values_survive_their_spelling(value):
    assert parse_value(format_value(value)) == value


def test_a_workload_is_spelled_as_on_the_command_line():
    assert str(WORKLOAD) == "M=3,N=5,causal=true,dtype=float32"
