"""Expressions of search spaces and signatures: Python's syntax, cut down to a short list."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import NoReturn

Scalar = bool | int | float | str
"""What a name in an expression may stand for, and what an expression may yield."""


class ExpressionError(ValueError):
    """An expression is malformed, names what it does not know, or could not be evaluated."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up: the number of blocks of ``divisor`` that cover it."""
    return -(-dividend // divisor)


FUNCTIONS: Mapping[str, Callable[..., Scalar]] = {
    "abs": abs,
    "ceil_div": ceil_div,
    "log2": math.log2,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
}
"""The functions that an expression may call."""

_ARITIES = {"abs": (1, 1), "ceil_div": (2, 2), "log2": (1, 1), "sqrt": (1, 1)}

_OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.USub, ast.Not, ast.And, ast.Or),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)
_NODES = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Load, *_OPERATORS)

ALLOWED = (
    "numbers, strings, True, False, names, + - * / // % **, comparisons, 'in' a tuple or list, "
    "and, or, not, 'a if c else b' and calls of " + ", ".join(FUNCTIONS)
)
"""What an expression may consist of, for messages and documents."""


class Expression:
    """An expression over named scalars, compiled once.

    Attributes:
        text: The expression as written.
        where: Where it was written, for messages: ``softmax.yaml: templates.triton.default``.
        tree: Its checked syntax tree, for evaluators of other kinds of values.
        names: The names that it reads.
    """

    __slots__ = ("_code", "names", "text", "tree", "where")

    def __init__(self, text: str, where: str, known: Collection[str] | None = None) -> None:
        """Parse and check an expression.

        Args:
            text: The expression, in Python's syntax.
            where: Where it was written.
            known: The names that it may read; any name when None.

        Raises:
            ExpressionError: If the syntax, a construct or a name is not allowed.
        """
        self.text = text
        self.where = where
        try:
            self.tree: ast.expr = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ExpressionError(f"{where}: {text!r} is not an expression: {reason}") from None
        names: set[str] = set()
        self._check(self.tree, names)
        self.names = frozenset(names)
        if known is not None:
            for name in sorted(self.names.difference(known)):
                raise ExpressionError(
                    f"{where}: unknown name {name!r} in {text!r}; known: {', '.join(known)}"
                )
        self._code: CodeType = compile(ast.Expression(self.tree), where, "eval")

    def evaluate(self, values: Mapping[str, Scalar]) -> Scalar:
        """Return the expression's value.

        Args:
            values: A value for each of :attr:`names`; more names do no harm.

        Raises:
            ExpressionError: If a name has no value or the evaluation fails: a failure never
                counts as an answer.
        """
        try:
            # Only checked syntax reaches eval, which has no builtins but FUNCTIONS.
            value: Scalar = eval(self._code, {"__builtins__": {}, **FUNCTIONS}, values)
        except Exception as error:
            raise self.failure(error, values) from error
        if isinstance(value, complex):
            raise self.failure(ValueError("the result is a complex number"), values)
        return value

    def failure(self, error: Exception, values: Mapping[str, object]) -> ExpressionError:
        """Return the error to raise when evaluating with some values raised ``error``."""
        known = sorted(self.names & values.keys())
        used = ", ".join(f"{name}={values[name]!r}" for name in known) or "no values"
        problem = f"{type(error).__name__}: {error}"
        return ExpressionError(f"{self.where}: {self.text!r} failed with {used}: {problem}")

    def _check(self, node: ast.AST, names: set[str]) -> None:
        """Refuse what is not allowed below ``node`` and collect the names that are read."""
        match node:
            case ast.Constant(value=bool() | int() | float() | str()):
                return
            case ast.Name(id=name):
                if name in FUNCTIONS:
                    self._refuse(f"the function {name!r} without a call")
                names.add(name)
                return
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                least, most = _ARITIES.get(name, (2, 255))
                if not least <= len(node.args) <= most:
                    self._refuse(f"{name!r} with {len(node.args)} argument(s)")
                children: list[ast.AST] = list(node.args)
            case ast.Compare():
                children = [node.left, *node.ops]
                for operator, right in zip(node.ops, node.comparators, strict=True):
                    children += self._operands(operator, right)
            case _ if isinstance(node, _NODES):
                children = list(ast.iter_child_nodes(node))
            case _:
                is_operator = not isinstance(node, ast.expr)
                self._refuse(type(node).__name__ if is_operator else repr(ast.unparse(node)))
        for child in children:
            self._check(child, names)

    def _operands(self, operator: ast.cmpop, right: ast.expr) -> list[ast.expr]:
        """Return what a comparison's right side consists of: only ``in`` takes a collection."""
        if not isinstance(operator, ast.In | ast.NotIn):
            return [right]
        if not isinstance(right, ast.Tuple | ast.List):
            self._refuse(f"'in' {ast.unparse(right)!r}, which is no tuple or list")
        return right.elts

    def _refuse(self, what: str) -> NoReturn:
        raise ExpressionError(
            f"{self.where}: {what} is not allowed in {self.text!r}; allowed: {ALLOWED}"
        )
