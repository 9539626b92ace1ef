"""Filter expressions: what they select, what unknown values do, and that nothing else than expressions gets in."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.select import MAX_DEPTH, MAX_LENGTH, Filter

TABLE = pa.table(
    {
        "night": [True, False, None, True],
        "n": [1, 2, 3, None],
        "city": ["a", "b", None, "ab"],
        "speed": [0.5, -1.0, 2.0, 7.0],
        "frame": [0, 5, 7, 10],
        "weather code": pa.array(["x", "y", "x", None]).dictionary_encode(),
    }
)


def select(text, table=TABLE):
    return Filter(text, table.column_names).select(table, len(table)).tolist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("night", [0, 3]),
        ("n >= 2", [1, 2]),
        ("n is None", [3]),
        ("n in (1, 3)", [0, 2]),
        ("city in ['a', 'ab']", [0, 3]),
        ("contains(city, 'b')", [1, 3]),
        ("matches(city, '^a?b$')", [1, 3]),
        ("frame % 5 == 0", [0, 1, 3]),
        ("frame / 2 == 2.5", [1]),
        ("frame > +6", [2, 3]),
        ("(n > 1) == (speed > 0)", [2]),
        ("col('weather code') == 'x'", [0, 2]),
        ("contains(col('weather code'), 'y')", [1]),
        ("True", [0, 1, 2, 3]),
        ("False", []),
        (" night ", [0, 3]),
    ],
)
def test_selects(text, rows):
    """Of each form one; `test_order_document.py` compares all forms and their compositions with ORDER.md."""
    assert select(text) == rows


def test_names_its_columns_in_order():
    assert Filter("frame > 1 and (n == 1 or frame < 9)", TABLE.column_names).columns == (
        "frame",
        "n",
    )
    assert Filter("True", ()).columns == ()


def test_rows_come_in_order_from_large_tables():
    table = pa.table({"n": list(range(300_000))})
    assert select("n % 7 == 3", table) == list(range(3, 300_000, 7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nigth", "at character 1: no attribute 'nigth'; did you mean night?"),
        (
            "n > 1 and zzz",
            "at character 11: no attribute 'zzz'; there are: city, frame, n,",
        ),
        ("n >", "not an expression such as .*: invalid syntax"),
        ("", "not an expression"),
        ("n = 1", "not an expression"),
        ("n > 1; n < 2", "not an expression"),
        ("import os", "not an expression"),
        ("n + 1", "a condition is needed here, not `n \\+ 1`"),
        ("1", "a condition is needed here, not `1`"),
        ("n.real", "not `n.real`"),
        ("teacher.loss > 1", "attach the layer: layers={'teacher': PATH}"),
        ("n[0] == 1", "`n\\[0\\]` is not in the language"),
        ("n ** 9 > 1", "is not in the language"),
        ("(lambda: n)() == 1", "the functions there are: col"),
        ("[x for x in n]", "a condition is needed"),
        ("(n := 3) == 3", "is not in the language"),
        ("f'{n}' == '1'", "is not in the language"),
        ("n if night else night", "a condition is needed"),
        (
            "__import__('os').system('true') == 0",
            "the functions there are: col",
        ),
        ("eval('1') == 1", "the functions there are: col"),
        ("contains(city, n)", "the functions there are: col.*contains"),
        ("contains(city)", "the functions there are"),
        ("col(n) == 1", "the functions there are"),
        ("contains(col('nope'), 'a')", "no attribute 'nope'"),
        ("n in night", "`in` needs a list such as"),
        (
            "n in (1, night)",
            "a text, a number, True or False is needed here, not `night`",
        ),
        ("n in (1, 'a')", "values of a list must be of one type"),
        ("n == None", "is needed here, not `None`"),
        ("n is 1", "`is` goes with None only"),
        ("n == b'1'", "is needed here"),
        ("n == 1j", "is needed here"),
        ("n == -True", "is not in the language|is needed here"),
        (
            f"n == {2**63}",
            "the number `9223372036854775808` does not fit 64 bits",
        ),
        (f"n > -{2**63 + 1}", "does not fit 64 bits"),
        (f"n in (1, -{2**63 + 1})", "does not fit 64 bits"),
        (
            f"n == 0x{'f' * 5000}",
            "a number of thousands of digits does not fit 64 bits",
        ),
        (
            f"0x{'f' * 5000}",
            "a condition is needed here, not a number of thousands of digits",
        ),
        (
            "city == '\\ud800'",
            "character 9: the text '.ud800' has half of a character",
        ),
        ("city in ['\\udfff']", "half of a character"),
        ("contains(city, '\\ud800')", "half of a character"),
        (
            "not " * (MAX_DEPTH + 1) + "night",
            f"nested more than {MAX_DEPTH} deep",
        ),
        ("+".join(["n"] * 4000) + " > 1", "nested"),
        ("n > 1" + " " * MAX_LENGTH, f"may have {MAX_LENGTH} characters"),
        ("n > 1\0", "not an expression"),
    ],
)
def test_anything_else_is_refused_with_its_place(text, message):
    with pytest.raises(OrderError, match=message):
        Filter(text, TABLE.column_names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n > 'a'", r"does not fit the attributes \(n: int64\)"),
        ("contains(n, 'a')", r"\(n: int64\)"),
        ("city", r"\(city: string\)"),
        ("city + 1 == 2", r"\(city: string\)"),
        ("n / 0 > 1", "divide by zero"),
        ("speed % 2 == 1", "truncated"),
        ("matches(city, '(')", "Invalid regular expression"),
    ],
)
def test_types_that_do_not_fit_are_named(text, message):
    with pytest.raises(OrderError, match=message):
        select(text)


def test_long_expressions_are_cut_in_messages():
    with pytest.raises(OrderError) as caught:
        Filter("n == 1 and " * 500 + "oops", TABLE.column_names)
    assert len(str(caught.value)) < 500


@given(st.text(max_size=30))
def test_any_text_is_a_filter_or_an_order_error(text):
    try:
        rows = select(text)
    except OrderError:
        return
    assert set(rows) <= {0, 1, 2, 3}
