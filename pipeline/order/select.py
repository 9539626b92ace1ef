"""Filter expressions: a small language over a dataset's attributes, parsed safely and run by Arrow.

::

    night and num_pedestrian >= 3
    location in ('singapore-onenorth', 'boston-seaport') and not rain
    contains(description, 'construction') or frame % 5 == 0

The text is parsed with Python's own grammar, never executed: the syntax tree is translated node by
node into an Arrow compute expression, and what is not in the tables below is refused. Names are
columns; those of a layer are written ``layer.name``, and others ``col('the name')``. An unknown
(null) value makes a comparison unknown, and a sample for which the whole expression is unknown is
not selected, as in SQL.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from functools import reduce
from operator import add, and_, eq, ge, gt, le, lt, mul, ne, or_, sub
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.format.attributes import no_attribute

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64


MAX_LENGTH: Final = 10_000
"""Longest expression [characters]."""
MAX_DEPTH: Final = 100
"""Deepest nesting of an expression: both Python's parser and Arrow recurse."""

_Operation: TypeAlias = Callable[[Any, Any], pc.Expression]


def _remainder(a: pc.Expression, b: pc.Expression) -> pc.Expression:
    """Return the remainder of integers, with the sign of ``a``; overflow is an error of Arrow."""
    dividend = a.cast(pa.int64())
    divisor = b.cast(pa.int64())
    return dividend - dividend / divisor * divisor


_BINARY: Final[dict[type[ast.operator], _Operation]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: lambda a, b: a.cast(pa.float64()) / b,  # Arrow's own cuts integers
    ast.Mod: _remainder,
}
_COMPARE: Final[dict[type[ast.cmpop], _Operation]] = {
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}
_TEXT_FUNCTIONS: Final[dict[str, Callable[[pc.Expression, str], pc.Expression]]] = {
    "contains": pc.match_substring,
    "startswith": pc.starts_with,
    "endswith": pc.ends_with,
    "matches": pc.match_substring_regex,  # RE2: linear time for any pattern
}


class Filter:
    """A parsed expression: ``columns`` are those that it needs.

    ``names`` are the columns that exist, ``owner`` begins each message, such as "stage 1: ". Raises
    OrderError, with the place in the text, for unknown columns and for anything that is not part of
    the language.
    """

    def __init__(self, text: str, names: Collection[str], owner: str = "") -> None:
        excerpt = text
        if len(text) > 200:
            excerpt = text[:200] + "..."
        self._subject = f"{owner}filter {excerpt!r}"
        self._names = names
        self._column_names: dict[str, None] = {}
        if len(text) > MAX_LENGTH:
            raise OrderError(f"{owner}a filter may have {MAX_LENGTH} characters, got {len(text)}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            place = ""
            reason = "nested too deep or not text"
            if isinstance(error, SyntaxError):
                reason = error.msg
                if error.offset:
                    place = f" at character {error.offset}"
            raise OrderError(
                f"{self._subject} is not an expression such as 'night and num_car >= "
                f"3': {reason}{place}"
            ) from error
        self._expression = self._condition(tree, 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the expression names, in the order of their appearance."""
        return tuple(self._column_names)

    def select(self, table: pa.Table, num_rows: int) -> I64:
        """Return rows of ``table`` (which has all of ``columns``) for which the expression holds:
        ascending int64.

        ``num_rows`` is the number of its rows, which a table without columns does not know: an
        expression such as ``True`` has none. Raises OrderError where types don't fit, such as a
        text compared with a number.
        """
        row = "\0row"  # no column of a file has this name
        columns = {}
        for name in self.columns:
            column = table[name]
            if pa.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            columns[name] = column
        numbered = pa.table({**columns, row: np.arange(num_rows)})
        try:
            matches = pads.dataset(numbered).to_table(
                columns=[row],
                filter=self._expression,
            )
        except (pa.ArrowException, TypeError) as error:
            fields = [table.schema.field(name) for name in self.columns]
            types = ", ".join(f"{field.name}: {field.type}" for field in fields)
            raise OrderError(
                f"{self._subject} does not fit the attributes ({types}): {error}"
            ) from error
        rows: I64 = np.sort(matches[row].to_numpy())
        return rows

    def _refuse(self, node: ast.AST, reason: str) -> OrderError:
        place = ""
        if hasattr(node, "col_offset"):
            place = f" at character {node.col_offset + 1}"
        return OrderError(f"{self._subject}{place}: {reason}")

    def _condition(self, node: ast.expr, depth: int) -> pc.Expression:
        """Return a node that is true or false."""
        depth = self._deeper(node, depth)
        match node:
            case ast.BoolOp(op=operator, values=values):
                combine = and_ if isinstance(operator, ast.And) else or_
                conditions = [self._condition(value, depth) for value in values]
                return reduce(combine, conditions)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._condition(operand, depth)
            case ast.Compare(left=left, ops=operators, comparators=rights):
                result = None
                for comparison, right in zip(operators, rights, strict=True):
                    condition = self._comparison(left, comparison, right, depth)
                    result = condition if result is None else result & condition
                    left = right
                return result
            case ast.Constant(value=bool() as value):
                return pc.scalar(value)
            case ast.Name() | ast.Call():
                return self._value(node, depth)
            case ast.Attribute(value=ast.Name(id=layer)) if self._is_layer(layer):
                return self._value(node, depth)
            case _:
                raise self._refuse(node, f"a condition is needed here, not {_describe(node)}")

    def _comparison(
        self,
        left: ast.expr,
        operator: ast.cmpop,
        right: ast.expr,
        depth: int,
    ) -> pc.Expression:
        value = self._value(left, depth)
        match operator, right:
            case ((ast.Is() | ast.IsNot()), ast.Constant(value=None)):
                if isinstance(operator, ast.Is):
                    return value.is_null()
                return value.is_valid()
            case ((ast.Is() | ast.IsNot()), _):
                raise self._refuse(right, "`is` goes with None only; compare with ==")
            case (
                (ast.In() | ast.NotIn()),
                (ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items)),
            ):
                literals = [self._literal(item) for item in items]
                try:
                    result = value.isin(literals)
                except (pa.ArrowException, TypeError) as error:
                    raise self._refuse(
                        right,
                        f"the values of a list must be of one type: {error}",
                    ) from error
                if isinstance(operator, ast.NotIn):
                    result = ~result
                # Arrow takes null for a value like others here; an unknown value is neither in nor
                # not in a list.
                return result & value.is_valid()
            case ((ast.In() | ast.NotIn()), _):
                raise self._refuse(right, "`in` needs a list such as ('a', 'b')")
            case _:
                compare = _COMPARE[type(operator)]
                return compare(value, self._value(right, depth))

    def _value(self, node: ast.expr, depth: int) -> pc.Expression:
        """Return a node that is a value of any type."""
        depth = self._deeper(node, depth)
        match node:
            case ast.Name(id=name):
                return self._column(node, name)
            case ast.Attribute(value=ast.Name(id=layer), attr=name) if self._is_layer(layer):
                return self._column(node, f"{layer}.{name}")
            case ast.Constant() | ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant()):
                return pc.scalar(self._literal(node))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return pc.negate(self._value(operand, depth))
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
                operation = _BINARY[type(operator)]
                return operation(
                    self._value(left, depth),
                    self._value(right, depth),
                )
            case ast.Call(
                func=ast.Name(id="col"),
                args=[ast.Constant(value=str() as name)],
                keywords=[],
            ):
                return self._column(node, name)
            case ast.Call(
                func=ast.Name(id=name),
                args=[subject, ast.Constant(value=str() as text)],
                keywords=[],
            ) if name in _TEXT_FUNCTIONS:
                function = _TEXT_FUNCTIONS[name]
                return function(
                    self._value(subject, depth),
                    self._text(node, text),
                )
            case ast.Call():
                forms = [f"{name}(column, 'text')" for name in _TEXT_FUNCTIONS]
                functions = ", ".join(["col('column')", *forms])
                raise self._refuse(node, f"the functions there are: {functions}")
            case ast.BoolOp() | ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return self._condition(node, depth)
            case ast.Attribute(value=ast.Name(id=layer)):
                raise self._refuse(
                    node,
                    f"{_describe(node)} is not in the language of filters; for an attribute of "
                    f"a layer attach the layer: layers={{'{layer}': PATH}}",
                )
            case _:
                raise self._refuse(node, f"{_describe(node)} is not in the language of filters")

    def _is_layer(self, name: str) -> bool:
        prefix = f"{name}."
        return any(column.startswith(prefix) for column in self._names)

    def _column(self, node: ast.expr, name: str) -> pc.Expression:
        if name not in self._names:
            raise self._refuse(node, no_attribute(name, self._names))
        self._column_names[name] = None
        return pc.field(name)

    def _literal(self, node: ast.expr) -> bool | int | float | str:
        match node:
            case ast.Constant(value=(bool() | float()) as number):
                return number
            case ast.Constant(value=str() as text):
                return self._text(node, text)
            case ast.Constant(value=int() as integer):
                return self._integer(node, integer)
            case ast.UnaryOp(
                op=ast.USub() | ast.UAdd() as sign,
                operand=ast.Constant(value=(int() | float()) as value),
            ) if not isinstance(value, bool):
                if isinstance(sign, ast.USub):
                    value = -value
                if isinstance(value, float):
                    return value
                return self._integer(node, value)
            case _:
                raise self._refuse(
                    node,
                    f"a text, a number, True or False is needed here, not {_describe(node)}",
                )

    def _integer(self, node: ast.expr, value: int) -> int:
        if not -(2**63) <= value < 2**63:
            raise self._refuse(node, f"the number {_describe(node)} does not fit 64 bits")
        return value

    def _text(self, node: ast.AST, text: str) -> str:
        """Return a text that columns can have; half of a character cannot be written in UTF-8."""
        if text.isascii():
            return text
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise self._refuse(node, f"the text {text!a} has half of a character, a surrogate")
        return text

    def _deeper(self, node: ast.expr, depth: int) -> int:
        if depth == MAX_DEPTH:
            raise self._refuse(node, f"nested more than {MAX_DEPTH} deep")
        return depth + 1


def _describe(node: ast.AST) -> str:
    try:
        return f"`{ast.unparse(node)}`"[:80]
    except ValueError:  # a hexadecimal number may have more digits than Python writes as decimal
        return "a number of thousands of digits"
