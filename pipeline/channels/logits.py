"""Kinds of a teacher's distributions over a vocabulary, of which k tokens a position are stored.

``logits_topk`` has the k likeliest tokens with their probabilities, and the mass of all others, the
tail. ``logits_sampled`` has k draws from the distribution, each of weight 1 / k: the mean of any
function of a token has the expectation that it has under the whole distribution (arXiv 2503.16870);
a mean over top-k has not.

The k tokens are stored in ascending order, so that only the set (of draws, multiset) takes room: by
the code of Elias and Fano, 2 + log2(V / k) bits a token at most. FORMAT.md has the layout, section
2.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.limits import LOGITS

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import F32, F64, I32, I64, U8
    from fuelrail.pipeline.sample.arrays import Buffer

TOPK: Final = "logits_topk"
SAMPLED: Final = "logits_sampled"
MAX_VOCABULARY: Final = 1 << 24

_STORE: Final = re.compile(r"(topk|sampled):([1-9][0-9]{0,5})")
_LEAST_LOG: Final = -24.0
"""Relative to the likeliest token's: what is less likely counts as this likely, 4e-11 of it."""
_LARGEST_STEP: Final = float(np.float16(-_LEAST_LOG / 255))
_LARGEST_ODDS: Final = 800.0
"""Logarithm: that of any two numbers of float64 whose ratio is finite is smaller."""
_SUM_ERROR: Final = 1e-2
_HEAD_BYTES: Final = 8


class Logits(NamedTuple):
    """A teacher's distributions at T positions, by k tokens each: arrays; in a batch tensors with B
    in front.

    Attributes:
        indices: int32 [T, k]: the tokens, in ascending order. Drawn ones may occur several times.
        weights: float32 [T, k]: of top-k, the probability of each; of draws, 1 / k. 0 where
            ``known`` is False.
        tail: float32 [T]: of top-k, the probability of all other tokens together; of draws, None.
        known: bool [T]: whether the position is stored.
        offsets: in a batch of samples that differ in T: int64 [B + 1]; the positions of all samples
            then follow each other along one axis, and sample b has ``offsets[b]`` to ``offsets[b +
            1]``. Else None.

    To write one, ``indices`` is enough for draws, and ``indices`` with ``weights`` for top-k: by
    default the tail is what these lack of 1, and all positions are known.
    """

    indices: Any
    weights: Any = None
    tail: Any = None
    known: Any = None
    offsets: Any = None

    def map(self, change: Callable[[Any], Any]) -> Logits:
        """Return the parts that there are, changed each; ``offsets`` are left out."""
        return Logits(*(None if part is None else change(part) for part in self[:-1]))

    @property
    def parts(self) -> dict[str, Any]:
        """The parts that there are, by name."""
        return {name: part for name, part in self._asdict().items() if part is not None}


def logits_store(text: str) -> tuple[str, int] | None:
    """Return kind and number of tokens of ``topk:64`` or ``sampled:50``; None for another text."""
    match = _STORE.fullmatch(text)
    if match is None:
        return None
    return f"logits_{match[1]}", int(match[2])


def logits_entry(
    name: str,
    store: tuple[str, int],
    length: int | None,
    size: int,
) -> dict[str, Any]:
    """Return the entry of the table for logits [length, size], stored as `logits_store` says;
    None: lengths differ.
    """
    kind, k = store
    entry: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "field": f"{name}.lgt",
        "law": {"name": "fixed"},
    }
    entry |= {
        "axes": ["position", "token"],
        "shape": [length, k],
        "vocabulary": {"name": name, "size": size},
    }
    return entry | ({"dtype": "uint8"} if kind == TOPK else {})


def broken(channel: Channel) -> Iterator[str]:
    """Yield what is wrong with an entry of the table that has one of the two kinds."""
    words = channel.vocabulary
    if len(channel.shape) != 2 or channel.shape[1] is None:
        yield (
            f"shape {list(channel.shape)} must be [T, k]: positions (null where they vary), and "
            "tokens of each"
        )
    elif words is None or not 1 <= words.size <= MAX_VOCABULARY:
        yield f"vocabulary must name the vocabulary and its size, from 1 to {MAX_VOCABULARY}"
    elif channel.kind == TOPK and channel.shape[1] > words.size:
        yield (
            f"shape {list(channel.shape)} has more tokens a position than the vocabulary, "
            f"{words.size}"
        )
    else:
        num_bytes = decoded_bytes(channel.shape[0] or 0, channel.shape[1])
        text = LOGITS.broken(num_bytes)
        if text is not None:
            yield f"shape {list(channel.shape)} {text}"
    allowed = ("uint8", "float16") if channel.kind == TOPK else ("",)
    if channel.dtype not in allowed:
        yield (
            f"dtype '{channel.dtype}' must be "
            f"{' or '.join(allowed) or 'left out: draws have no values'}"
        )
    if channel.law.name != "fixed":
        yield f"law '{channel.law.name}' must be fixed: nothing moves a distribution"


def decoded_bytes(positions: int, k: int) -> int:
    """Return the bytes of the arrays of a `Logits`.

    A position has k tokens and weights, a tail and a mark.
    """
    return positions * (k * 8 + 5)


class _Code(NamedTuple):
    """How the tokens and values of a position are stored, in a row of bytes."""

    name: str
    is_topk: bool
    length: int | None
    k: int
    size: int
    dtype: str
    low: int
    """Bits of a token that are stored as they are; the others are counted in unary."""
    num_unary: int
    ends: tuple[int, int, int]
    """Where in a row the low bits end, the unary ones, and the values; behind are the step and
    the tail.
    """
    row_bytes: int


def code_of(channel: Channel) -> _Code:
    """Return how a channel of these kinds is stored."""
    length, k = channel.shape
    assert k is not None
    assert channel.vocabulary is not None
    size = channel.vocabulary.size
    low = max((size // k).bit_length() - 1, 0)
    num_unary = k + ((size - 1) >> low)
    lows = -(-k * low // 8)
    highs = lows + -(-num_unary // 8)
    value_bytes, more = {"uint8": (k, 4), "float16": (2 * k, 2), "": (0, 0)}[channel.dtype]
    ends = (lows, highs, highs + value_bytes)
    return _Code(
        name=channel.name,
        is_topk=channel.kind == TOPK,
        length=length,
        k=k,
        size=size,
        dtype=channel.dtype,
        low=low,
        num_unary=num_unary,
        ends=ends,
        row_bytes=ends[-1] + more,
    )


def encode(value: Any, channel: Channel) -> bytes:
    """Return the member of a `Logits`; raises SchemaError for one that is not as the table says."""
    if not isinstance(value, Logits):
        raise SchemaError(
            f"channel '{channel.name}' is {type(value).__name__}; kind '{channel.kind}' "
            "takes fr.Logits"
        )
    code = code_of(channel)
    number = len(value.indices)
    indices = _part(
        value.indices,
        code=code,
        name="indices",
        kinds="iu",
        shape=(number, code.k),
    )
    _check_size(number, code)
    if code.length not in (None, number):
        raise SchemaError(
            f"channel '{code.name}' has {number} positions; the table has {code.length}"
        )
    if value.known is None:
        mask = np.ones(number, bool)
    else:
        mask = _part(value.known, code=code, name="known", kinds="b", shape=(number,))
    indices = indices[mask].astype(np.int64)
    order = np.argsort(indices, axis=1, kind="stable")
    indices = np.take_along_axis(indices, order, axis=1)
    _check_indices(indices, code)
    parts = [_encode_elias_fano(indices, code)]
    if code.is_topk:
        weights = _part(
            value.weights,
            code=code,
            name="weights",
            kinds="f",
            shape=(number, code.k),
        )[mask].astype(np.float64)
        tail = None
        if value.tail is not None:
            tail = _part(value.tail, code=code, name="tail", kinds="f", shape=(number,))[mask]
        parts += _encode_weights(np.take_along_axis(weights, order, axis=1), tail, code)
    head = np.array([number, len(indices)], "<u4").tobytes()
    bitmap = b"" if len(indices) == number else np.packbits(mask, bitorder="little").tobytes()
    return b"".join((head, bitmap, np.concatenate(parts, axis=1).tobytes()))


def decode(data: Buffer, channel: Channel) -> Logits:
    """Return the `Logits` of a member; raises SchemaError for bytes that are not as the table
    says.
    """
    code = code_of(channel)
    view = np.frombuffer(data, np.uint8)
    if len(view) < _HEAD_BYTES:
        raise SchemaError(f"channel '{code.name}' has {len(view)} bytes, too few for its head")
    number, stored = map(int, view[:_HEAD_BYTES].view("<u4"))
    start = _HEAD_BYTES + (0 if stored == number else -(-number // 8))
    if (
        stored > number
        or len(view) != start + stored * code.row_bytes
        or code.length not in (None, number)
    ):
        raise SchemaError(
            f"channel '{code.name}' has {len(view)} bytes, {stored} of {number} positions; "
            f"the table has {'any number of' if code.length is None else code.length} "
            f"positions of {code.row_bytes} bytes"
        )
    _check_size(number, code)
    mask = np.ones(number, bool)
    if stored < number:
        if number % 8 and view[start - 1] >> number % 8:
            raise SchemaError(
                f"channel '{code.name}' marks positions behind the last one, number {number - 1}"
            )
        mask = np.unpackbits(view[_HEAD_BYTES:start], count=number, bitorder="little").view(bool)
        if mask.sum() != stored:
            raise SchemaError(
                f"channel '{code.name}' marks {mask.sum()} positions, and has {stored}"
            )
    rows = view[start:].reshape(stored, code.row_bytes)
    indices = _decode_elias_fano(rows, code)
    _check_indices(indices, code)
    weights, tail = (
        _decode_weights(rows, code)
        if code.is_topk
        else (np.full((stored, code.k), 1 / code.k, np.float32), None)
    )
    logits = Logits(indices, weights, tail)
    if stored < number:

        def spread(part: NDArray[Any]) -> NDArray[Any]:
            spread_part = np.zeros((number, *part.shape[1:]), part.dtype)
            spread_part[mask] = part
            return spread_part

        logits = logits.map(spread)
    return logits._replace(known=mask)


def collate(values: Sequence[Logits | None], channel: Channel, _: tuple[int, ...]) -> Logits:
    """Return the `Logits` of a batch: stacked, or one after the other where the table leaves the
    positions open.
    """
    code = code_of(channel)
    number = code.length or 0
    none = np.zeros((number, code.k), np.int32)
    unknown = np.zeros(number, bool)
    nothing = Logits(
        none,
        none.astype(np.float32),
        unknown.astype(np.float32) if code.is_topk else None,
        unknown,
    )
    rows = [nothing if value is None else value for value in values]
    join = np.concatenate if code.length is None else np.stack
    offsets = np.cumsum([0, *(len(row.known) for row in rows)]) if code.length is None else None
    columns = zip(*rows, strict=True)
    return Logits(*(None if column[0] is None else join(column) for column in columns))._replace(
        offsets=offsets
    )


def _check_size(positions: int, code: _Code) -> None:
    """Raise SchemaError for positions, stored or not, whose arrays are too large."""
    text = LOGITS.broken(decoded_bytes(positions, code.k))
    if text is not None:
        raise SchemaError(f"channel '{code.name}' has {positions} positions and {text}")


def _part(
    part: Any,
    code: _Code,
    name: str,
    kinds: str,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    array = np.asarray(part)
    if array.dtype.kind not in kinds or array.shape != shape:
        type_words = {"iu": "integers", "f": "floats", "b": "bool"}[kinds]
        raise SchemaError(
            f"{name} of channel '{code.name}' are {array.dtype}{list(array.shape)}; they "
            f"must be {type_words}{list(shape)}"
        )
    return array


def _check_indices(indices: NDArray[Any], code: _Code) -> None:
    """Raise SchemaError for tokens, in ascending order, that the vocabulary does not have or
    that occur twice.
    """
    if indices.size and not (indices[:, 0].min() >= 0 and indices[:, -1].max() < code.size):
        raise SchemaError(
            f"tokens of channel '{code.name}' are {indices.min()} to {indices.max()}; the "
            f"vocabulary has 0 to {code.size - 1}"
        )
    steps = np.diff(indices, axis=1)
    if steps.size and steps.min() < code.is_topk:
        raise SchemaError(
            f"channel '{code.name}' has a token twice, or out of order, at a position"
        )


def _encode_elias_fano(indices: I64, code: _Code) -> U8:
    """Return the bytes (rows, n) of ascending tokens (rows, k), the low bits before the high."""
    bits = (indices[..., None] >> np.arange(code.low)) & 1
    unary = np.zeros((len(indices), code.num_unary), np.uint8)
    np.put_along_axis(unary, (indices >> code.low) + np.arange(code.k), 1, axis=1)
    lows = bits.reshape(len(indices), code.k * code.low).astype(np.uint8)
    return np.concatenate(
        [np.packbits(columns, axis=1, bitorder="little") for columns in (lows, unary)],
        axis=1,
    )


def _decode_elias_fano(rows: U8, code: _Code) -> I32:
    """Return ascending tokens (rows, k): the low ``code.low`` bits of each are packed first, the
    high bits are a unary bitmap behind them.

    Raises SchemaError for a bitmap without k ones, and for stray bits.
    """
    low_end, high_end, _ = code.ends
    unary = np.unpackbits(rows[:, low_end:high_end], axis=1, bitorder="little")
    ones = np.flatnonzero(unary.view(bool))
    if len(ones) == len(rows) * code.k:
        ones = ones.reshape(-1, code.k) - np.arange(0, unary.size, unary.shape[1])[:, None]
    if ones.ndim == 1 or (ones.size and not (ones.min() >= 0 and ones.max() < unary.shape[1])):
        raise SchemaError(
            f"channel '{code.name}' has another number of tokens than {code.k} at a position"
        )
    high = (ones - np.arange(code.k)).astype(np.int32)
    if not code.low:
        return high
    spare = low_end * 8 - code.k * code.low
    if spare and len(rows) and rows[:, low_end - 1].max() >> (8 - spare):
        raise SchemaError(f"channel '{code.name}' has bits behind the last token of a position")
    # Each token's bits lie in the four bytes from the one in which they begin; rows end with bytes
    # of the high part.
    first = np.arange(code.k) * code.low
    places = np.minimum((first >> 3)[:, None] + np.arange(4), rows.shape[1] - 1)
    words: NDArray[np.uint32] = np.take(rows, places, axis=1).view("<u4")[..., 0]
    low: NDArray[np.uint32] = (words >> (first & 7).astype(np.uint32)) & np.uint32(
        (1 << code.low) - 1
    )
    tokens: I32 = (high << code.low) | low.view(np.int32)
    return tokens


def _encode_weights(weights: F64, tail: NDArray[Any] | None, code: _Code) -> list[U8]:
    """Return the columns of bytes of probabilities and tail: logarithms as float16, or as steps
    below the largest.
    """
    mass = weights.sum(axis=1)
    tail = np.maximum(1 - mass, 0) if tail is None else tail.astype(np.float64)
    right = (
        (weights.min(axis=1) >= 0)
        & (tail >= 0)
        & (mass > 0)
        & (np.abs(mass + tail - 1) < _SUM_ERROR)
    )
    if not right.all():
        row = int(np.argmin(right))
        raise SchemaError(
            f"channel '{code.name}' has weights of {weights[row].min():g} to "
            f"{weights[row].max():g}, {mass[row]:g} in all, and a tail of {tail[row]:g} at "
            f"stored position {row}: they must be probabilities, without NaN, that add up to 1"
        )
    with np.errstate(divide="ignore", over="ignore"):
        logs = np.maximum(np.log(weights / weights.max(axis=1, keepdims=True)), _LEAST_LOG)
        odds = np.minimum(np.log(tail / mass), _LARGEST_ODDS)
    odds = odds.astype("<f2")[:, None].view(np.uint8)
    if code.dtype == "float16":
        return [logs.astype("<f2").view(np.uint8), odds]
    step = (np.abs(logs).max(axis=1, keepdims=True) / 255).astype("<f2")
    codes = np.rint(-logs / np.where(step > 0, step, 1)).clip(0, 255).astype(np.uint8)
    return [codes, step.view(np.uint8), odds]


def _decode_weights(rows: U8, code: _Code) -> tuple[F32, F32]:
    _, begin, end = code.ends
    values = rows[:, begin:end]
    after = np.ascontiguousarray(rows[:, end:]).view("<f2").astype(np.float32)
    odds = after[:, -1]
    if code.dtype == "uint8":
        steps = after[:, :1]
        words = f"steps from 0 to {_LARGEST_STEP:g}, and 0 for the likeliest token"
        is_sound = not rows.size or bool(
            (values.min(axis=1) == 0).all() and 0 <= steps.min() <= steps.max() <= _LARGEST_STEP
        )
    else:
        logs = np.ascontiguousarray(values).view("<f2").astype(np.float32)
        words = f"logarithms from {_LEAST_LOG:g} to 0, and 0 for the likeliest token"
        is_sound = not rows.size or bool((logs.max(axis=1) == 0).all() and logs.min() >= _LEAST_LOG)
    if not (is_sound and (not rows.size or odds.max() < np.inf)):
        raise SchemaError(
            f"channel '{code.name}' has values that are no probabilities at a position: "
            f"allowed are {words}, and a tail below 1, all without NaN"
        )
    if code.dtype == "uint8":
        logs = values * -steps
    weights: F32 = np.exp(logs)
    weights *= (np.exp(-np.logaddexp(0, odds)) / weights.sum(axis=1))[:, None]
    return weights, np.exp(-np.logaddexp(0, -odds))
