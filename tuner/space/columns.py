"""Expressions evaluated on whole columns: element for element what Python does on scalars."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.runtime.expression import Expression, ceil_div

Column = NDArray[Any]
Operand = Any
"""A column or a scalar that stands for a column of itself."""


def evaluate_columns(expression: Expression, columns: Mapping[str, Operand], rows: int) -> Column:
    """Return an expression's value in every row.

    ``and``, ``or``, ``if`` and chained comparisons evaluate their later parts only in the rows
    that reach them, so that ``a == 0 or b % a == 0`` is safe where ``a`` is zero.

    Args:
        expression: The expression.
        columns: Columns of ``rows`` values, or scalars, by name.
        rows: Number of rows.

    Returns:
        A column of ``rows`` values.

    Raises:
        ExpressionError: If a name has no value or the evaluation fails in some row.
    """
    try:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            return _full(_Rows(columns, rows).value(expression.tree), rows)
    except Exception as error:
        scalars = {name: value for name, value in columns.items() if not np.ndim(value)}
        raise expression.failure(error, scalars) from error


class _Rows(ast.NodeVisitor):
    """Some rows of the columns, in which (sub)expressions are evaluated."""

    def __init__(self, columns: Mapping[str, Operand], rows: int) -> None:
        self.columns = columns
        self.rows = rows

    def value(self, node: ast.expr) -> Operand:
        return self.visit(node)

    def visit_Constant(self, node: ast.Constant) -> Operand:
        return node.value

    def visit_Name(self, node: ast.Name) -> Operand:
        return self.columns[node.id]

    def visit_BinOp(self, node: ast.BinOp) -> Operand:
        operation = _OPERATORS[type(node.op)]
        return operation(_number(self.value(node.left)), _number(self.value(node.right)))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Operand:
        if isinstance(node.op, ast.Not):
            return ~self.truth(node.operand)
        return -_number(self.value(node.operand))

    def visit_BoolOp(self, node: ast.BoolOp) -> Operand:
        result = _full(self.value(node.values[0]), self.rows)
        for operand in node.values[1:]:
            truth = result.astype(bool)
            undecided = truth if isinstance(node.op, ast.And) else ~truth
            result = _merge(undecided, self._where(undecided, operand), result[~undecided])
        return result

    def visit_IfExp(self, node: ast.IfExp) -> Operand:
        chosen = self.truth(node.test)
        return _merge(chosen, self._where(chosen, node.body), self._where(~chosen, node.orelse))

    def visit_Compare(self, node: ast.Compare) -> Operand:
        right, *later = node.comparators
        result = _full(self._compare(node.left, node.ops[0], right), self.rows).astype(bool)
        if later:
            rest = ast.Compare(right, node.ops[1:], later)
            result = _merge(result, self._where(result, rest), result[~result])
        return result

    def visit_Call(self, node: ast.Call) -> Operand:
        return _FUNCTIONS[ast.unparse(node.func)](*(_number(self.value(a)) for a in node.args))

    def generic_visit(self, node: ast.AST) -> Operand:
        raise TypeError(f"no rule for {ast.dump(node)}")

    def truth(self, node: ast.expr) -> NDArray[np.bool_]:
        return _full(self.value(node), self.rows).astype(bool)

    def _where(self, mask: NDArray[np.bool_], node: ast.expr) -> Column:
        """Evaluate a node in the rows of a mask alone."""
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        columns = {
            name: column[mask] if np.ndim(column) else column
            for name, column in self.columns.items()
            if name in names
        }
        rows = int(mask.sum())
        return _full(_Rows(columns, rows).value(node), rows) if rows else np.empty(0, bool)

    def _compare(self, left: ast.expr, operation: ast.cmpop, right: ast.expr) -> Operand:
        value = self.value(left)
        if isinstance(right, ast.Tuple | ast.List):
            found = np.zeros(self.rows, bool)
            for element in right.elts:
                found |= _full(value == self.value(element), self.rows).astype(bool)
            return ~found if isinstance(operation, ast.NotIn) else found
        return _OPERATORS[type(operation)](value, self.value(right))


def _full(value: Operand, rows: int) -> Column:
    return np.broadcast_to(np.asarray(value), (rows,))


def _merge(mask: NDArray[np.bool_], inside: Column, outside: Column) -> Column:
    """Return the column that is ``inside`` in the rows of a mask and ``outside`` in the others."""
    kind = inside.dtype if not outside.size else outside.dtype
    if inside.size and outside.size:
        kind = np.result_type(inside, outside)
    merged = np.empty(len(mask), kind)
    merged[mask], merged[~mask] = inside, outside
    return merged


def _number(value: Operand) -> Operand:
    """Return booleans as the integers that Python's arithmetic takes them for."""
    is_boolean = isinstance(value, np.ndarray | np.bool_) and value.dtype == bool
    return value.astype(np.int64) if is_boolean else value


def _product(left: Operand, right: Operand) -> Operand:
    result = left * right
    if np.asarray(result).dtype.kind == "i":
        _in_range(np.multiply(left, right, dtype=float))
    return result


def _power(base: Operand, exponent: Operand) -> Operand:
    if np.any(np.less(exponent, 0)):
        base = np.asarray(base, float)
    result = base**exponent
    if np.asarray(result).dtype.kind == "i":
        _in_range(np.power(base, exponent, dtype=float))
    return result


def _in_range(exact: Operand) -> None:
    """Refuse what wraps around in 64 bits: Python's integers would not."""
    if np.any(np.abs(exact) >= 2.0**63):
        raise OverflowError("an integer does not fit into 64 bits")


def _maximum(*operands: Operand) -> Operand:
    return reduce(np.maximum, operands)


def _minimum(*operands: Operand) -> Operand:
    return reduce(np.minimum, operands)


_OPERATORS: Mapping[type[ast.AST], Callable[..., Operand]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _product, ast.Pow: _power},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt},
    **{ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
}

_FUNCTIONS: Mapping[str, Callable[..., Operand]] = {
    **{"abs": np.abs, "log2": np.log2, "sqrt": np.sqrt},
    **{"ceil_div": ceil_div, "max": _maximum, "min": _minimum},
}
