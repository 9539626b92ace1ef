"""Foreign text made fit to print."""

from __future__ import annotations

import json
import pickle
from typing import Literal

import msgspec
import pytest

from fuelrail.pipeline.errors import (
    ConfigError,
    MemberError,
    SchemaError,
    ShardError,
)
from fuelrail.pipeline.text import (
    MAX_MESSAGE,
    escaped,
    fault_in_words,
    json_text,
    message,
    shortened,
)

TITLE = "\x1b]0;HACKED\x07"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain äöü 漢字", "plain äöü 漢字"),
        (TITLE, "\\x1b]0;HACKED\\x07"),
        ("a\nfuelrail: all is well\r", "a\\nfuelrail: all is well\\r"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_characters_that_do_not_print_are_escaped(text, expected) -> None:
    assert escaped(text) == expected
    assert escaped(expected) == expected


def test_values_and_messages_have_a_limit() -> None:
    assert shortened("k" * 200) == "k" * 200
    assert shortened("k" * 2_000_000) == "k" * 200 + "... (2000000 characters)"
    long = message("begin " + "x" * 10_000_000 + " mend it so")
    assert len(long) <= MAX_MESSAGE
    assert long.startswith("begin x")
    assert long.endswith(" mend it so")
    assert message(long) == long


ERRORS = [
    ConfigError(TITLE),
    ShardError(TITLE, shard=TITLE, key=TITLE),
    MemberError(TITLE, key=TITLE, member=TITLE),
    SchemaError("x" * 10_000_000),
]


@pytest.mark.parametrize("error", ERRORS)
def test_no_error_brings_escapes_into_a_log(error) -> None:
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert str(copy).isprintable()
        assert len(str(copy)) <= MAX_MESSAGE
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_json_documents_print_as_themselves_and_say_the_same() -> None:
    value = {"key": "\x9b\u202e\U000e0041\x7f ä"}
    text = json_text(value)
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value


class Options(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    names: list[str] = []
    shares: dict[str, float] = {}
    kind: Literal["a", "b"] = "a"
    size: tuple[int, int] = (1, 2)
    text: str | None = None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "the field 'number' is missing"),
        ({"number": "a"}, "it must be a whole number, not text (at 'number')"),
        (
            {"number": 1, "names": ["a", 2]},
            "it must be text, not a whole number (at 'names', entry 1)",
        ),
        (
            {"number": 1, "shares": {"k": "v"}},
            "it must be a number, not text (at 'shares', an entry)",
        ),
        (
            {"number": 1, "shares": {1: 2}},
            "it must be text, not a whole number (a key of 'shares')",
        ),
        ({"number": 1, "kind": "c"}, "'c' is not allowed (at 'kind')"),
        (
            {"number": 1, "size": [1]},
            "it must be a list of length 2, got 1 (at 'size')",
        ),
        (
            {"number": 1, "text": [1]},
            "it must be text or nothing, not a list (at 'text')",
        ),
        ({"number": 1, "more": 1}, "the field 'more' is unknown"),
        ([], "it must be a mapping, not a list"),
    ],
)
def test_what_is_wrong_with_a_value_is_said_in_words(value, words):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Options)
    assert fault_in_words(caught.value) == words
