"""Foreign text that is hostile ends in a sentence that names its file."""

from __future__ import annotations

import gc
from collections import Counter
from xml.etree.ElementTree import TreeBuilder

import pytest

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.sources.adapter.classes import loaded
from fuelrail.sharding.sources.shared.foreign import (
    parsing,
    read_json,
    read_text,
    read_xml,
    read_yaml,
)

LAUGHS = "a: &a {x: 1}\n" + "\n".join(
    f"{b}: &{b} {{<<: [*{a}, *{a}]}}" for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
ALIASES = "a0: &a0 [x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)
)
POINTER = b"version https://git-lfs.github.com/spec/v1\n"


def as_xml(data, where):
    read_xml(data, where, TreeBuilder())


def as_json(data, where):
    return read_json(data, where)


def as_json_with_nan(data, where):
    return read_json(data, where, noted=Counter())


def as_yaml(data, where):
    return read_yaml(data, where, dict[str, str | None])


@pytest.mark.parametrize(
    ("read", "data", "says"),
    [
        (read_text, b"a\xff", "is not text in UTF-8: .*position 1"),
        (as_json, b"[" * 1_000_000, "nested too deeply"),
        (as_json, b'{"a": "\xff"}', "is not JSON"),
        (as_json, b"[1, 2", "is not JSON"),
        (as_json_with_nan, b'{"a": NaN, "' + b'\\"' * 1_000_000, "is not JSON"),
        (
            as_json,
            (16 << 20) + 1,
            "16777217 bytes, of which at most 16777216 are read",
        ),
        (as_yaml, b"{a: " * 100_000, "takes 65 levels when it is decoded"),
        (as_yaml, b"[\n" * 100_000, "takes 65 levels when it is decoded"),
        (as_yaml, b"- " * 100_000, "takes 65 levels when it is decoded"),
        (as_yaml, LAUGHS.encode(), "merge key"),
        (
            as_yaml,
            ALIASES.encode(),
            "values when it is decoded, at most 1048576 are read",
        ),
        (as_yaml, b"a: 2001-99-99", "month must be"),
        (as_yaml, b"a: !!int x", "is not YAML"),
        (
            as_yaml,
            b"a: !!python/object/apply:os.getcwd []",
            "could not determine a constructor",
        ),
        (as_yaml, b"a: \xff", "is not YAML"),
        (as_yaml, b"a: [1]", "it must be text or nothing, not a list"),
        (
            as_xml,
            b"<?xml version='1.0' encoding='no-such'?><a/>",
            "line 1: .*no-such",
        ),
        (
            as_xml,
            b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>",
            "declares entities",
        ),
        (
            as_xml,
            b"<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><a>&b;</a>",
            "declares entities",
        ),
        (as_xml, b"<a>\n" * 300_000, "line 300001: no element found"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(read, data, says):
    """A number stands for as many digits."""
    if isinstance(data, int):
        data = b"1" * data
    gc.collect()  # finalisers of other tests' garbage would fail where the stack is full
    with pytest.raises(SourceError, match=f"(?s)^file 'x' .*{says}"):
        read(data, "file 'x'")


@pytest.mark.parametrize("read", [read_text, as_json, as_yaml, as_xml])
def test_a_pointer_of_git_lfs_is_named(read):
    with pytest.raises(SourceError, match="file 'x' is a git-LFS pointer"):
        read(POINTER, "file 'x'")


NOT_NUMBERS = b'\xef\xbb\xbf{"a": NaN, "b": "NaN", "c": [1, -Infinity], "d": {"e": Infinity}}'


def test_nan_and_infinities_are_null_and_counted_or_named():
    noted: Counter[str] = Counter()
    value = read_json(NOT_NUMBERS, "file 'x'", noted=noted)
    assert value == {
        "a": None,
        "b": "NaN",
        "c": [1, float("-inf")],
        "d": {"e": None},
    }
    assert list(noted.values()) == [3]
    kind = dict[str, float | None]
    assert read_json(b'{"a": NaN}', "file 'x'", kind, noted=noted) == {"a": None}
    with pytest.raises(
        SourceError,
        match=r"file 'x' .*3 values are NaN or infinite: write null",
    ):
        read_json(NOT_NUMBERS, "file 'x'")
    for data in (b'{"a": NaNa}', b'{"a": NaN', b'{"a": "NaN" NaN}'):
        with pytest.raises(SourceError, match="file 'x'"):
            read_json(data, "file 'x'", noted=noted)


def test_sound_text_is_read():
    assert read_text(b"\xef\xbb\xbfna\xc3\xafve", "x") == "na\u00efve"
    assert read_json(b'{"a": [1]}', "x", dict[str, list[int]]) == {"a": [1]}
    assert read_yaml(b"a: b\nc:\n", "x", dict[str, str | None]) == {
        "a": "b",
        "c": None,
    }
    builder = TreeBuilder()
    read_xml(
        b"<?xml version='1.0'?><!DOCTYPE boost_serialization><a b='c'>d&amp;e</a>",
        "x",
        builder,
    )
    root = builder.close()
    assert (root.tag, root.attrib, root.text) == ("a", {"b": "c"}, "d&e")


@pytest.mark.parametrize(
    "error",
    [
        RecursionError,
        MemoryError,
        OverflowError("big"),
        KeyError("k"),
        AssertionError,
    ],
)
def test_whatever_a_parser_raises_is_a_source_error(error):
    with (
        pytest.raises(SourceError, match=r"file 'x' cannot be read: .+") as raised,
        parsing("file 'x'"),
    ):
        raise error
    assert raised.value.__cause__ is not None


def test_a_nested_file_of_classes_is_a_mistake_of_the_option(tmp_path):
    (tmp_path / "classes.yaml").write_text("[\n" * 100_000)
    with pytest.raises(ConfigError, match=r"must map each category to a class.*takes 65 levels"):
        loaded(str(tmp_path / "classes.yaml"))
