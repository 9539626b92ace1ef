"""Foreign text made fit to print."""

from __future__ import annotations

import json
import pickle

import pytest

from fuelrail.pipeline.errors import ConfigError, MemberError, SchemaError, ShardError
from fuelrail.pipeline.text import MAX_MESSAGE, escaped, json_text, message, shown

TITLE = "\x1b]0;HACKED\x07"


@pytest.mark.parametrize(
    ("text", "wanted"),
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
def test_characters_that_do_not_print_are_escaped(text, wanted) -> None:
    assert escaped(text) == wanted
    assert escaped(wanted) == wanted


def test_values_and_messages_have_a_limit() -> None:
    assert shown("k" * 200) == "k" * 200
    assert shown("k" * 2_000_000) == "k" * 200 + "... (2000000 characters)"
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
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert str(one).isprintable()
        assert len(str(one)) <= MAX_MESSAGE
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_json_documents_print_as_themselves_and_say_the_same() -> None:
    value = {"key": "\x9b\u202e\U000e0041\x7f ä"}
    text = json_text(value)
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == value
