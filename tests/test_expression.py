"""Expressions: what is allowed, what they yield, and columns that agree with scalars."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.runtime.expression import Expression, ExpressionError
from tuner.space.columns import evaluate_columns


def evaluate(text, **values):
    return Expression(text, "here").evaluate(values)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("BLOCK % WARP == 0", {"BLOCK": 64, "WARP": 32}, True),
        ("1 <= A < B <= 8", {"A": 2, "B": 9}, False),
        ("LAYOUT in ('packed', 'none')", {"LAYOUT": "none"}, True),
        ("LAYOUT not in ['packed']", {"LAYOUT": "packed"}, False),
        ("A == 0 or B % A == 0", {"A": 0, "B": 3}, True),
        ("min(A, B, 3) + max(A, B) * abs(-2)", {"A": 4, "B": 9}, 21),
        ("ceil_div(A, 4)", {"A": 9}, 3),
        ("A if FUSED else -A", {"A": 5, "FUSED": False}, -5),
        ("D ** -0.5", {"D": 64}, 0.125),
        ("log2(A) + sqrt(A)", {"A": 16}, 8.0),
        ("7 // 2 / 2", {}, 1.5),
        ("not A", {"A": True}, False),
        ("-max(True, True)", {}, -1),
    ],
)
def test_value(text, values, expected):
    assert evaluate(text, **values) == expected


def test_names_are_what_is_read_and_no_function():
    assert Expression("min(A, B) <= limit", "here").names == {"A", "B", "limit"}


@pytest.mark.parametrize(
    "text",
    [
        *("a.b", "a[0]", "f(a)", "min", "lambda: 1", "f'{a}'", "[x for x in a]", "None", "a @ b"),
        *("a is b", "~a", "(1, 2)", "a in b", "min(a)", "log2(a, b)", "max(a, key=b)", "a << 2"),
        *("__import__('os')", "a := 1", "b'a'", "1j", "...", "min(*a)"),
    ],
)
def test_what_is_not_allowed_is_refused_with_its_place(text):
    with pytest.raises(ExpressionError, match="here: .*(not allowed|not an expression)"):
        Expression(text, "here")


def test_an_unknown_name_is_an_error_that_lists_the_known():
    with pytest.raises(ExpressionError, match="here: unknown name 'BLOCK_X' in .*; known: M, N"):
        Expression("BLOCK_X < 4", "here", ["M", "N"])


def test_malformed_text_is_an_error():
    with pytest.raises(ExpressionError, match="here: 'A %' is not an expression"):
        Expression("A %", "here")


def test_a_failure_is_an_error_that_quotes_expression_and_values():
    with pytest.raises(ExpressionError, match="'B % A == 0' failed with A=0, B=3: ZeroDivision"):
        evaluate("B % A == 0", A=0, B=3)
    with pytest.raises(ExpressionError, match="NameError"):
        evaluate("A")
    with pytest.raises(ExpressionError, match="complex"):
        evaluate("A ** 0.5", A=-1)


def columns(text, rows, **values):
    return evaluate_columns(Expression(text, "here"), values, rows).tolist()


def test_columns_skip_rows_that_are_decided():
    zeros = np.array([0, 2, 4])
    assert columns("A == 0 or 4 % A == 0", 3, A=zeros) == [True, True, True]
    assert columns("A != 0 and 6 % A == 0", 3, A=zeros) == [False, True, False]
    assert columns("8 // A if A else 0", 3, A=zeros) == [0, 4, 2]
    assert columns("0 < A < 8 // max(A, 1) < 9", 3, A=zeros) == [False, True, False]


def test_columns_that_fail_in_one_row_are_an_error():
    with pytest.raises(ExpressionError, match="'4 % A == 0' failed"):
        columns("4 % A == 0", 2, A=np.array([2, 0]))
    with pytest.raises(ExpressionError, match="64 bits"):
        columns("A * A * A > 0", 1, A=np.array([1 << 40]))
    with pytest.raises(ExpressionError, match="KeyError"):
        columns("missing", 1)


def test_columns_of_strings_and_scalars():
    layouts = np.array(["none", "packed"])
    assert columns("LAYOUT == 'packed' and limit > 2", 2, LAYOUT=layouts, limit=3) == [False, True]
    assert columns("LAYOUT in ('none', 4)", 2, LAYOUT=layouts) == [True, False]
    assert columns("limit", 2, limit=3) == [3, 3]


NAMES = ("A", "B", "F")
LEAVES = st.sampled_from([*NAMES, "0", "1", "3", "True", "2.5"])


def combined(part):
    binary = st.sampled_from(
        [*("+", "-", "*", "//", "%", "/"), *("<", "<=", "==", "!=", ">", "and", "or")]
    )
    return st.one_of(
        st.tuples(part, binary, part).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(part, part, part).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(part, part, part).map(lambda p: f"({p[0]} < {p[1]} <= {p[2]})"),
        st.tuples(part, part, part).map(lambda p: f"({p[0]} in ({p[1]}, {p[2]}))"),
        part.map(lambda p: f"(not {p})"),
        part.map(lambda p: f"(-{p})"),
        st.tuples(part, part).map(lambda p: f"max({p[0]}, {p[1]})"),
        st.tuples(part, part).map(lambda p: f"ceil_div({p[0]}, {p[1]})"),
    )


@settings(max_examples=400, deadline=None)
@given(st.recursive(LEAVES, combined, max_leaves=8))
def test_columns_agree_with_scalars(text):
    values = {"A": [0, 1, 4, 7], "B": [3, -2, 0, 7], "F": [False, True, True, False]}
    expression = Expression(text, "here")
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    try:
        expected = [expression.evaluate(row) for row in rows]
    except ExpressionError:
        with pytest.raises(ExpressionError):
            evaluate_columns(expression, {n: np.array(v) for n, v in values.items()}, 4)
        return
    found = evaluate_columns(expression, {n: np.array(v) for n, v in values.items()}, 4)
    numbers = [float(value) for value in expected]  # max(0, True) is True, and 1 in a column
    assert [float(value) for value in found] == pytest.approx(numbers)
