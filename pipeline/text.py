"""Text of strangers, made fit to print: names, keys and messages that come out of a dataset.

A terminal obeys escape sequences, and a reader believes a line that begins like one of ours. So
what a file may have put into a text is printed with control characters escaped, and never at full
length where that is without bound.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

MAX_VALUE: Final = 200
"""Characters of one value (a key, a name) that are printed."""
MAX_MESSAGE: Final = 2000
"""Characters of one message that are printed; its end, which says what to do, among them."""

_MESSAGE_END: Final = 400
_MAX_SIDE: Final = 80


def escaped(text: str) -> str:
    """Return the text with each character that does not print as itself in the form ``\\x1b`` or
    ``\\u202e``.

    That is control characters (line feeds, ESC, BEL, C1), direction marks and lone surrogates.
    """
    if text.isprintable():
        return text
    parts = []
    for char in text:
        if not char.isprintable():
            char = char.encode("unicode_escape", "surrogatepass").decode("ascii")
        parts.append(char)
    return "".join(parts)


def shortened(value: object, limit: int = MAX_VALUE) -> str:
    """Return one value as text to print: escaped, and cut beyond ``limit`` characters, with
    their number.
    """
    text = str(value)
    if len(text) <= limit:
        return escaped(text)
    return f"{escaped(text[:limit])}... ({len(text)} characters)"


def repeated_key(data: bytes, decoded: object) -> str | None:
    """Return a duplicate key of an object in a JSON document, None without one: parsers differ in
    the one taken.

    ``decoded`` is what msgspec made of the document: to look at one that msgspec wrote costs no
    more than to write it.
    """
    compact = msgspec.json.format(data, indent=-1)
    if compact == msgspec.json.encode(decoded):
        return None
    duplicates: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        counts = Counter(name for name, _ in pairs)
        duplicates.extend(name for name, count in counts.items() if count > 1)

    json.loads(data, object_pairs_hook=look, parse_int=str, parse_float=str)
    return duplicates[0] if duplicates else None


def differing(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
) -> Iterator[tuple[str, Any, Any]]:
    """Yield path and both sides of every entry that differs, None where one lacks it; objects
    are compared by entry.
    """
    for name in {**first, **second}:
        a = first.get(name)
        b = second.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            for inner_name, inner_a, inner_b in differing(a, b):
                yield f"{name}.{inner_name}", inner_a, inner_b
        elif a != b:
            yield name, a, b


def differences(
    first_object: Mapping[str, Any],
    second_object: Mapping[str, Any],
    first: str,
    second: str,
) -> str:
    """Return what differs between two JSON objects as text; ``first`` and ``second`` say whose a
    side is.
    """

    def side_text(side: object) -> str:
        if side is None:
            return "none"
        text = msgspec.json.encode(side).decode()
        return shortened(text, _MAX_SIDE)

    texts = []
    for name, a, b in differing(first_object, second_object):
        texts.append(f"{name}: {side_text(a)} {first}, {side_text(b)} {second}")
    return "; ".join(texts)


def message(text: str) -> str:
    """Return a whole message, escaped, without its middle where it is too long.

    A message so made stays as it is.
    """
    text = escaped(text)
    if len(text) <= MAX_MESSAGE:
        return text
    begin = text[: MAX_MESSAGE - 2 * _MESSAGE_END]
    end = text[-_MESSAGE_END:]
    return f"{begin}... ({len(text)} characters) ...{end}"


def json_text(value: object) -> str:
    """Return a value as indented JSON that prints as itself: JSON's escapes replace all else.

    A line feed ends it.
    """
    data = msgspec.json.encode(value)
    text = msgspec.json.format(data, indent=2).decode()
    parts = []
    for char in text:
        if char.isprintable() or char == "\n":
            parts.append(char)
            continue
        code = char.encode("utf-16-be", "surrogatepass").hex()
        parts += [f"\\u{code[start : start + 4]}" for start in range(0, len(code), 4)]
    return "".join(parts) + "\n"


class Printed:
    """A report that prints as JSON; its ``as_text`` is for people."""

    __slots__ = ()

    def as_json(self) -> str:
        """Return the report as one JSON document."""
        return json_text(self)


def text_of(lines: Iterable[str]) -> str:
    """Return lines that hold text of strangers as one text: each is escaped as a message is."""
    return "\n".join(map(message, lines))


_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
    "bytes": "bytes",
}
"""Words for the names that msgspec has for kinds of values."""
_EXPECTED: Final = re.compile(r"(Expected|, got) `([^`]+)`")
_PLACE: Final = re.compile(r" - at (?P<is_key>`key` in )?`\$(?P<path>[^`]*)`")
_STEP: Final = re.compile(r"\[(?P<index>\d+)\]|\[\.\.\.\]|(?P<name>[^.\[\]]+)")


def fault_in_words(error: msgspec.ValidationError) -> str:
    """Return what msgspec says is wrong with a value in words: what it must be, what it is, and
    where it is: `` - at `$.cameras[0]` `` is `` (at 'cameras', entry 0)``.
    """
    text = str(error)
    words = requirement_in_words(_PLACE.sub("", text))
    match = _PLACE.search(text)
    if words.startswith("must be "):
        words = f"it {words}"
    if match is None:
        return words
    steps = []
    for step in _STEP.finditer(match["path"]):
        if step["name"]:
            steps.append(f"'{step['name']}'")
        elif step["index"]:
            steps.append(f"entry {step['index']}")
        else:
            steps.append("an entry")
    place = ", ".join(steps) or "the value itself"
    if match["is_key"]:
        return f"{words} (a key of {place})"
    return f"{words} (at {place})"


def requirement_in_words(text: str) -> str:
    """Return in words what msgspec says a value must be: its message without the place."""

    def expected_in_words(match: re.Match[str]) -> str:
        names = match[2].split(" | ")
        words = " or ".join(_KINDS.get(name, name) for name in names)
        if match[1] == "Expected":
            return f"must be {words}"
        return f", not {words}"

    text = _EXPECTED.sub(expected_in_words, " ".join(text.split()))
    text = re.sub(
        r"Object missing required field `([^`]+)`",
        r"the field '\1' is missing",
        text,
    )
    text = re.sub(
        r"Object contains unknown field `([^`]+)`",
        r"the field '\1' is unknown",
        text,
    )
    return re.sub(r"Invalid (?:enum )?value (.+)", r"\1 is not allowed", text)
