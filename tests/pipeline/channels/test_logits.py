"""A teacher's logits as members: what comes back, how many bytes they take, and what is refused by name."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.channels import selection
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.channels.selection import broken_table
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.limits import LOGITS, LOGITS_OF_SAMPLE


def channel(
    kind: str,
    k: int,
    size: int,
    length: int | None = None,
    dtype: str | None = None,
    **more: Any,
) -> Channel:
    facts: dict[str, Any] = {
        "name": "it",
        "kind": kind,
        "field": "it.lgt",
        "law": Law("fixed"),
        "axes": ("position", "token"),
        "shape": (length, k),
        "vocabulary": Vocabulary("words", size),
        "dtype": ("uint8" if kind == "logits_topk" else "") if dtype is None else dtype,
    }
    return Channel(**{**facts, **more})


def there_and_back(value: Logits, entry: Channel) -> tuple[Logits, bytes]:
    kind = KINDS[entry.kind]
    data = kind.encode(value, entry)
    kind.check(data, entry)
    return kind.decode(data, entry), data


def entropy_bits(k: int, size: int) -> float:
    """Information in a set of k of `size` tokens."""
    return (math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)) / math.log(2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tokens_come_back_in_order_with_their_probabilities(data) -> None:
    size = data.draw(st.integers(1, 5000) | st.sampled_from([128_256, 1 << 24]), "vocabulary")
    k = data.draw(st.integers(1, min(size, 80)), "k")
    length = data.draw(st.integers(0, 6), "positions")
    dtype = data.draw(st.sampled_from(["uint8", "float16"]), "dtype")
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    indices = np.stack(
        [rng.choice(size, k, replace=False) for _ in range(length)] or [np.zeros(k, int)]
    )[:length]
    logs = rng.normal(size=(length, k)) * data.draw(st.sampled_from([0, 1e-4, 1, 9]), "spread")
    weights = np.exp(logs)
    weights *= rng.choice([1e-6, 0.3, 1 - 1e-6, 1], (length, 1)) / weights.sum(
        axis=1, keepdims=True
    )
    mask = rng.random(length) < data.draw(st.sampled_from([0, 0.5, 1]), "mask")
    entry = channel("logits_topk", k, size, dtype=dtype)
    assert not list(broken_table([entry]))
    back, written = there_and_back(Logits(indices, weights, mask=mask), entry)
    order = np.argsort(indices, axis=1)
    expected = np.take_along_axis(weights, order, axis=1)[mask]
    np.testing.assert_array_equal(back.mask, mask)
    np.testing.assert_array_equal(
        back.indices[mask],
        np.take_along_axis(indices, order, axis=1)[mask],
    )
    assert back.indices.dtype == np.int32 and back.weights.dtype == back.tail.dtype == np.float32
    assert (
        not back.weights[~mask].any()
        and not back.indices[~mask].any()
        and not back.tail[~mask].any()
    )
    np.testing.assert_allclose(back.tail[mask], 1 - expected.sum(axis=1), rtol=0.02, atol=1e-6)
    np.testing.assert_allclose(back.weights[mask].sum(axis=1) + back.tail[mask], 1, atol=1e-5)
    largest = expected.max(axis=1, keepdims=True)
    expected = np.maximum(expected, largest * math.exp(-24))
    steps = (
        np.ptp(np.log(expected / largest), axis=1, keepdims=True) / 255 if dtype == "uint8" else 0
    )
    assert (np.abs(np.log(back.weights[mask] / expected)) <= 0.03 + steps).all()
    if mask.all() and length:
        per_position = (len(written) - 8) / length
        codes = k + 4 if dtype == "uint8" else 2 * k + 2
        assert per_position - codes <= math.ceil(k * (2 + math.log2(size / k)) / 8) + 2
        assert (per_position - codes) * 8 >= entropy_bits(k, size) - 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 90),
    st.integers(0, 5),
    st.integers(0, 99),
)
def test_draws_come_back_with_repetition_and_equal_weights(size, k, length, seed) -> None:
    drawn = np.random.default_rng(seed).integers(0, size, (length, k), dtype=np.uint16)
    back, _ = there_and_back(Logits(drawn), channel("logits_sampled", k, size))
    np.testing.assert_array_equal(back.indices, np.sort(drawn, axis=1))
    assert back.tail is None
    np.testing.assert_array_equal(back.weights, np.full((length, k), np.float32(1 / k)))
    assert back.mask.all()


def test_the_bytes_are_those_of_the_document() -> None:
    data = KINDS["logits_sampled"].encode(Logits([[7, 3]]), channel("logits_sampled", 2, 10))
    assert data == bytes.fromhex("01000000 01000000 0f 05")
    value = Logits(
        [[7, 3], [0, 0], [1, 9]],
        [[0.25, 0.5], [0, 0], [0.5, 0.5]],
        mask=[True, False, True],
    )
    half = struct.pack("<e", math.log(2) / 255)
    third = struct.pack("<e", math.log(1 / 3))
    expected = bytes.fromhex("03000000 02000000 05")
    expected += bytes.fromhex("0f 05 00 ff") + half + third
    expected += bytes.fromhex("05 09 00 00") + struct.pack("<ee", 0, -math.inf)
    assert KINDS["logits_topk"].encode(value, channel("logits_topk", 2, 10)) == expected


@pytest.mark.parametrize(
    ("size", "k", "kind", "token_bytes"),
    [
        (128_256, 64, "logits_topk", 172),
        (128_256, 128, "logits_topk", 324),
        (128_256, 50, "logits_sampled", 83),
    ],
)
def test_bytes_a_token(size, k, kind, token_bytes) -> None:
    rng = np.random.default_rng(k)
    indices = np.stack([rng.choice(size, k, replace=False) for _ in range(100)])
    weights = np.full((100, k), 1 / k) if kind == "logits_topk" else None
    _, data = there_and_back(Logits(indices, weights), channel(kind, k, size, 100))
    assert len(data) == 8 + 100 * token_bytes


TOPK = channel("logits_topk", 2, 10, 2)
DRAWS = channel("logits_sampled", 2, 10)
HALVES = [[0.5, 0.5], [0.5, 0.25]]
GOOD = Logits([[1, 2], [3, 4]], HALVES)


@pytest.mark.parametrize(
    ("value", "entry", "says"),
    [
        (
            [[1, 2]],
            DRAWS,
            "channel 'it' is list; kind 'logits_sampled' takes fr.Logits",
        ),
        (
            Logits([[1, 10]]),
            DRAWS,
            "tokens of channel 'it' are 1 to 10; the vocabulary has 0 to 9",
        ),
        (
            Logits([[-1, 3]]),
            DRAWS,
            "tokens of channel 'it' are -1 to 3; the vocabulary has 0 to 9",
        ),
        (
            Logits([[1, 2, 3]]),
            DRAWS,
            r"indices of channel 'it' are int64\[1, 3\]; they must be integers\[1, 2\]",
        ),
        (
            Logits([[1.0, 2.0]]),
            DRAWS,
            r"indices of channel 'it' are float64\[1, 2\]; they must be integers",
        ),
        (
            Logits([[1, 2]], HALVES),
            TOPK,
            "channel 'it' has 1 positions; the table has 2",
        ),
        (
            Logits([[1, 2], [3, 3]], HALVES),
            TOPK,
            "channel 'it' has a token twice",
        ),
        (
            Logits([[1, 2], [3, 4]]),
            TOPK,
            r"weights of channel 'it' are object\[\]; they must be floats\[2, 2\]",
        ),
        (
            GOOD._replace(weights=[[0.5, math.nan], [0.5, 0.5]]),
            TOPK,
            "at stored position 0: .* without NaN",
        ),
        (
            GOOD._replace(weights=[[0.5, 0.5], [0.5, 0.7]]),
            TOPK,
            "1.2 in all, and a tail of 0 at stored position 1",
        ),
        (
            GOOD._replace(weights=[[0.5, 0.5], [-0.5, 0.7]]),
            TOPK,
            "weights of -0.5 to 0.7",
        ),
        (
            GOOD._replace(weights=[[0.5, 0.5], [0.0, 0.0]]),
            TOPK,
            "0 in all, and a tail of 1",
        ),
        (
            GOOD._replace(tail=[0.0, math.nan]),
            TOPK,
            "a tail of nan at stored position 1",
        ),
        (
            GOOD._replace(tail=[0.0]),
            TOPK,
            r"tail of channel 'it' are float64\[1\]; they must be floats\[2\]",
        ),
        (
            GOOD._replace(mask=[1, 0]),
            TOPK,
            r"mask of channel 'it' are int64\[2\]; they must be bool\[2\]",
        ),
    ],
)
def test_values_that_are_none_are_refused_by_name(value, entry, says) -> None:
    with pytest.raises(SchemaError, match=says):
        KINDS[entry.kind].encode(value, entry)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda data: data[:7], "7 bytes, too few for its head"),
        (
            lambda data: data[:-1],
            "2 of 2 positions; the table has 2 positions of 8 bytes",
        ),
        (lambda data: b"\3" + data[1:], "2 of 3 positions"),
        (lambda data: data[:4] + b"\3" + data[5:], "3 of 2 positions"),
        (
            lambda data: data[:9] + b"\0" + data[10:],
            "another number of tokens than 2 at a position",
        ),
        (
            lambda data: data[:9] + b"\x81" + data[10:],
            "tokens of channel 'it' are",
        ),
        (
            lambda data: data[:8] + b"\x0f\3" + data[10:17] + b"\x07" + data[18:],
            "another number of tokens than 2",
        ),
        (
            lambda data: data[:8] + b"\0\3" + data[10:],
            "a token twice, or out of order",
        ),
        (
            lambda data: data[:12] + b"\x91\x99" + data[14:],
            "steps from 0 to 0.0941",
        ),
        (
            lambda data: data[:12] + b"\0\x60" + data[14:],
            "steps from 0 to 0.0941",
        ),
        (
            lambda data: data[:12] + b"\0\x7e" + data[14:],
            "steps from 0 to 0.0941",
        ),
        (
            lambda data: data[:10] + b"\x01" + data[11:],
            "0 for the likeliest token",
        ),
        (
            lambda data: data[:14] + b"\0\x7e" + data[16:],
            "a tail below 1, all without NaN",
        ),
        (
            lambda data: data[:14] + b"\0\x7c" + data[16:],
            "a tail below 1, all without NaN",
        ),
    ],
)
def test_bytes_that_are_none_are_refused(edit, says) -> None:
    kind = KINDS["logits_topk"]
    data = kind.encode(GOOD._replace(weights=[[0.5, 0.25], [0.5, 0.25]]), TOPK)
    kind.check(data, TOPK)
    with pytest.raises(SchemaError, match=says):
        kind.check(edit(data), TOPK)


@pytest.mark.parametrize(
    ("logs", "is_sound"),
    [
        ((0, -24), True),
        ((-1, 0), True),
        ((0, -24.02), False),
        ((-0.01, -1), False),
        ((-110, -120), False),
        ((0, -math.inf), False),
        ((0, math.nan), False),
        ((0, 0.5), False),
    ],
)
def test_each_position_has_a_likeliest_token_and_none_is_less_likely_than_e_to_minus_24(
    logs, is_sound
) -> None:
    """Values that all lie below -103 would be a division of 0 by 0."""
    kind = KINDS["logits_topk"]
    entry = channel("logits_topk", 2, 10, 2, dtype="float16")
    data = kind.encode(GOOD, entry)
    assert data[10:14] == struct.pack("<ee", 0, 0)
    edited = data[:10] + struct.pack("<ee", *logs) + data[14:]
    if is_sound:
        kind.check(edited, entry)
        value = kind.decode(edited, entry)
        assert np.isfinite(value.weights).all() and np.isfinite(value.tail).all()
    else:
        with pytest.raises(SchemaError, match="logarithms from -24 to 0"):
            kind.check(edited, entry)
        with pytest.raises(SchemaError, match="logarithms from -24 to 0"):
            kind.decode(edited, entry)


def test_a_tail_beyond_what_a_ratio_can_say_comes_back() -> None:
    value = Logits([[1, 2]], [[5e-324, 5e-324]], tail=[1.0])
    back, _ = there_and_back(value, channel("logits_topk", 2, 10))
    assert not back.weights.any() and back.tail == [1]


def test_bits_behind_the_last_position_and_the_last_token_are_refused() -> None:
    kind = KINDS["logits_sampled"]
    lacking = Logits([[1, 2], [3, 4], [5, 6]], mask=[True, False, True])
    data = kind.encode(lacking, DRAWS)
    assert data[8] == 0b101
    for bit in range(3, 8):
        with pytest.raises(SchemaError, match="positions behind the last one, number 2"):
            kind.check(data[:8] + bytes([data[8] | 1 << bit]) + data[9:], DRAWS)
    # Two tokens of two low bits each: four bits are left of their byte.
    for bit in range(4, 8):
        with pytest.raises(SchemaError, match="bits behind the last token"):
            kind.check(data[:9] + bytes([data[9] | 1 << bit]) + data[10:], DRAWS)


def test_the_limit_is_of_the_arrays_and_not_of_what_is_stored() -> None:
    """Positions that are not stored take a bit, and 37 bytes of arrays."""
    entry = channel("logits_topk", 4, 10)
    kind = KINDS["logits_topk"]
    max_positions = LOGITS.maximum // 37

    def member(positions: int) -> bytes:
        return np.array([positions, 0], "<u4").tobytes() + bytes(-(-positions // 8))

    value = kind.decode(member(max_positions), entry)
    assert sum(part.nbytes for part in value.parts.values()) == max_positions * 37 <= LOGITS.maximum
    with pytest.raises(SchemaError, match=f"at most {LOGITS.maximum} are read"):
        kind.decode(member(max_positions + 1), entry)
    with pytest.raises(SchemaError, match=f"at most {LOGITS.maximum} are read"):
        kind.encode(
            Logits(np.broadcast_to(np.zeros(1, int), (max_positions + 1, 4))),
            entry,
        )
    # A sample without a value gets as many zeros, where the table says the length.
    (text,) = broken_table([channel("logits_topk", 4, 10, max_positions + 1)])
    assert text and f"at most {LOGITS.maximum} are read" in text


def test_all_logits_of_a_sample_are_limited_together(monkeypatch) -> None:
    limit = 3 * (2 * 37)
    monkeypatch.setattr(selection, "LOGITS_OF_SAMPLE", LOGITS_OF_SAMPLE._replace(maximum=limit))
    table = [channel("logits_topk", 4, 10, name=f"c{n}", field=f"c{n}.lgt") for n in range(4)]
    member = np.array([2, 0], "<u4").tobytes() + bytes(1)
    members = {entry.field: member for entry in table}
    assert len(selection.decode_values(members, table[:3], "k")) == 3
    assert not list(selection.check_members(members, table[:3], {}))
    with pytest.raises(
        SchemaError,
        match=f"'c3' what the sample has of logits .* {limit} are read",
    ):
        selection.decode_values(members, table, "k")
    ((field, text),) = selection.check_members(members, table, {})
    assert field == "c3.lgt" and f"at most {limit} are read" in text


def test_a_head_that_promises_more_than_memory_is_refused() -> None:
    with pytest.raises(SchemaError, match="1073741823 positions and takes"):
        KINDS["logits_sampled"].check(
            np.array([(1 << 30) - 1, 0], "<u4").tobytes() + bytes(1 << 27),
            DRAWS,
        )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40), st.booleans())
def test_no_bytes_do_more_than_be_refused(data, is_topk) -> None:
    entry = channel("logits_topk" if is_topk else "logits_sampled", 2, 10)
    head = np.array([2, 1], "<u4").tobytes() if data[:1] < b"\x80" else b""
    try:
        logits = KINDS[entry.kind].decode(head + data, entry)
    except SchemaError:
        return
    assert logits.indices.shape == (len(logits.mask), 2)
    assert 0 <= logits.indices.min(initial=0) <= logits.indices.max(initial=0) < 10


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            channel("logits_topk", 11, 10),
            r"shape \[None, 11\] has more tokens a position than the vocabulary, 10",
        ),
        (
            channel("logits_topk", 2, 10, dtype="float32"),
            "dtype 'float32' must be uint8 or float16",
        ),
        (
            channel("logits_sampled", 2, 10, dtype="uint8"),
            "dtype 'uint8' must be left out: draws have no values",
        ),
        (channel("logits_sampled", 2, 1 << 25), "size, from 1 to 16777216"),
        (
            channel("logits_sampled", 2, 10, vocabulary=None),
            "vocabulary must name the vocabulary",
        ),
        (
            channel("logits_sampled", 2, 10, shape=(2,), axes=("token",)),
            r"shape \[2\] must be \[T, k\]",
        ),
        (
            channel("logits_sampled", 2, 10, law=Law("classes")),
            "law 'classes' must be fixed",
        ),
    ],
)
def test_tables_that_make_no_sense_are_refused(entry, says) -> None:
    (text,) = broken_table([entry])
    assert text and re.search(says, text)
