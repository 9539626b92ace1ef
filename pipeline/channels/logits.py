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
            ``mask`` is False.
        tail: float32 [T]: of top-k, the probability of all other tokens together; of draws, None.
        mask: bool [T]: whether the position is stored.
        offsets: in a batch of samples that differ in T: int64 [B + 1]; the positions of all samples
            then follow each other along one axis, and sample b has ``offsets[b]`` to ``offsets[b +
            1]``. Else None.

    To write one, ``indices`` is enough for draws, and ``indices`` with ``weights`` for top-k: by
    default the tail is what these lack of 1, and all positions are stored.
    """

    indices: Any
    weights: Any = None
    tail: Any = None
    mask: Any = None
    offsets: Any = None

    def map(self, change: Callable[[Any], Any]) -> Logits:
        """Return the parts that there are, changed each; ``offsets`` are left out."""
        parts = [None if part is None else change(part) for part in self[:-1]]
        return Logits(*parts)

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
    entry = {
        "name": name,
        "kind": kind,
        "field": f"{name}.lgt",
        "law": {"name": "fixed"},
        "axes": ["position", "token"],
        "shape": [length, k],
        "vocabulary": {"name": name, "size": size},
    }
    if kind == TOPK:
        entry["dtype"] = "uint8"
    return entry


def broken(channel: Channel) -> Iterator[str]:
    """Yield what is wrong with an entry of the table that has one of the two kinds."""
    shape = list(channel.shape)
    vocabulary = channel.vocabulary
    if len(shape) != 2 or shape[1] is None:
        yield (
            f"shape {shape} must be [T, k]: positions (null where they vary), and tokens of each"
        )
    elif vocabulary is None or not 1 <= vocabulary.size <= MAX_VOCABULARY:
        yield f"vocabulary must name the vocabulary and its size, from 1 to {MAX_VOCABULARY}"
    elif channel.kind == TOPK and shape[1] > vocabulary.size:
        yield (f"shape {shape} has more tokens a position than the vocabulary, {vocabulary.size}")
    else:
        reason = LOGITS.broken(decoded_bytes(shape[0] or 0, shape[1]))
        if reason is not None:
            yield f"shape {shape} {reason}"
    if channel.kind == TOPK and channel.dtype not in ("uint8", "float16"):
        yield f"dtype '{channel.dtype}' must be uint8 or float16"
    elif channel.kind != TOPK and channel.dtype:
        yield f"dtype '{channel.dtype}' must be left out: draws have no values"
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
    spacing = size // k
    low = max(spacing.bit_length() - 1, 0)
    num_unary = k + ((size - 1) >> low)
    low_bytes = -(-k * low // 8)
    unary_bytes = -(-num_unary // 8)
    value_bytes = 0
    rest_bytes = 0
    if channel.dtype == "uint8":
        value_bytes = k
        rest_bytes = 4
    elif channel.dtype == "float16":
        value_bytes = 2 * k
        rest_bytes = 2
    high_end = low_bytes + unary_bytes
    value_end = high_end + value_bytes
    return _Code(
        name=channel.name,
        is_topk=channel.kind == TOPK,
        length=length,
        k=k,
        size=size,
        dtype=channel.dtype,
        low=low,
        num_unary=num_unary,
        ends=(low_bytes, high_end, value_end),
        row_bytes=value_end + rest_bytes,
    )


def encode(value: Any, channel: Channel) -> bytes:
    """Return the member of a `Logits`; raises SchemaError for one that is not as the table says."""
    if not isinstance(value, Logits):
        raise SchemaError(
            f"channel '{channel.name}' is {type(value).__name__}; kind '{channel.kind}' "
            "takes fr.Logits"
        )
    code = code_of(channel)
    length = len(value.indices)
    indices = _part(
        value.indices,
        code=code,
        name="indices",
        kinds="iu",
        shape=(length, code.k),
    )
    _check_size(length, code)
    if code.length not in (None, length):
        raise SchemaError(
            f"channel '{code.name}' has {length} positions; the table has {code.length}"
        )
    mask = np.ones(length, bool)
    if value.mask is not None:
        mask = _part(
            value.mask,
            code=code,
            name="mask",
            kinds="b",
            shape=(length,),
        )
    indices = indices[mask].astype(np.int64)
    order = np.argsort(indices, axis=1, kind="stable")
    indices = np.take_along_axis(indices, order, axis=1)
    _check_indices(indices, code)
    columns = [_encode_elias_fano(indices, code)]
    if code.is_topk:
        weights = _part(
            value.weights,
            code=code,
            name="weights",
            kinds="f",
            shape=(length, code.k),
        )
        weights = weights[mask].astype(np.float64)
        weights = np.take_along_axis(weights, order, axis=1)
        tail = None
        if value.tail is not None:
            tail = _part(
                value.tail,
                code=code,
                name="tail",
                kinds="f",
                shape=(length,),
            )
            tail = tail[mask]
        columns += _encode_weights(weights, tail, code)
    num_stored = len(indices)
    head = np.array([length, num_stored], "<u4").tobytes()
    bitmap = b""
    if num_stored < length:
        bitmap = np.packbits(mask, bitorder="little").tobytes()
    rows = np.concatenate(columns, axis=1).tobytes()
    return b"".join((head, bitmap, rows))


def decode(data: Buffer, channel: Channel) -> Logits:
    """Return the `Logits` of a member; raises SchemaError for bytes that are not as the table
    says.
    """
    code = code_of(channel)
    view = np.frombuffer(data, np.uint8)
    if len(view) < _HEAD_BYTES:
        raise SchemaError(f"channel '{code.name}' has {len(view)} bytes, too few for its head")
    length, num_stored = view[:_HEAD_BYTES].view("<u4").tolist()
    start = _HEAD_BYTES
    if num_stored != length:
        start += -(-length // 8)
    if (
        num_stored > length
        or len(view) != start + num_stored * code.row_bytes
        or code.length not in (None, length)
    ):
        raise SchemaError(
            f"channel '{code.name}' has {len(view)} bytes, {num_stored} of {length} positions; "
            f"the table has {'any number of' if code.length is None else code.length} "
            f"positions of {code.row_bytes} bytes"
        )
    _check_size(length, code)
    mask = np.ones(length, bool)
    if num_stored < length:
        last_bits = length % 8
        if last_bits and view[start - 1] >> last_bits:
            raise SchemaError(
                f"channel '{code.name}' marks positions behind the last one, number {length - 1}"
            )
        bitmap = view[_HEAD_BYTES:start]
        bits = np.unpackbits(bitmap, count=length, bitorder="little")
        mask = bits.view(bool)
        num_marked = mask.sum()
        if num_marked != num_stored:
            raise SchemaError(
                f"channel '{code.name}' marks {num_marked} positions, and has {num_stored}"
            )
    rows = view[start:].reshape(num_stored, code.row_bytes)
    indices = _decode_elias_fano(rows, code)
    _check_indices(indices, code)
    tail = None
    if code.is_topk:
        weights, tail = _decode_weights(rows, code)
    else:
        weights = np.full((num_stored, code.k), 1 / code.k, np.float32)
    logits = Logits(indices, weights, tail)
    if num_stored < length:

        def spread(part: NDArray[Any]) -> NDArray[Any]:
            spread_part = np.zeros((length, *part.shape[1:]), part.dtype)
            spread_part[mask] = part
            return spread_part

        logits = logits.map(spread)
    return logits._replace(mask=mask)


def collate(
    values: Sequence[Logits | None],
    channel: Channel,
    _: tuple[int, ...],
) -> Logits:
    """Return the `Logits` of a batch: stacked, or one after the other where the table leaves the
    positions open.
    """
    code = code_of(channel)
    length = code.length or 0
    placeholder = Logits(
        indices=np.zeros((length, code.k), np.int32),
        weights=np.zeros((length, code.k), np.float32),
        tail=np.zeros(length, np.float32) if code.is_topk else None,
        mask=np.zeros(length, bool),
    )
    rows = [placeholder if value is None else value for value in values]
    join: Callable[..., NDArray[Any]] = np.stack
    offsets = None
    if code.length is None:
        join = np.concatenate
        lengths = [len(row.mask) for row in rows]
        offsets = np.cumsum([0, *lengths])
    columns = zip(*rows, strict=True)
    parts = [None if column[0] is None else join(column) for column in columns]
    return Logits(*parts)._replace(offsets=offsets)


def _check_size(positions: int, code: _Code) -> None:
    """Raise SchemaError for positions, stored or not, whose arrays are too large."""
    num_bytes = decoded_bytes(positions, code.k)
    reason = LOGITS.broken(num_bytes)
    if reason is not None:
        raise SchemaError(f"channel '{code.name}' has {positions} positions and {reason}")


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
    if indices.size:
        smallest = indices[:, 0].min()
        largest = indices[:, -1].max()
        if smallest < 0 or largest >= code.size:
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
    num_rows = len(indices)
    bits = (indices[..., None] >> np.arange(code.low)) & 1
    low_bits = bits.reshape(num_rows, code.k * code.low).astype(np.uint8)
    high = indices >> code.low
    unary_bits = np.zeros((num_rows, code.num_unary), np.uint8)
    np.put_along_axis(unary_bits, high + np.arange(code.k), 1, axis=1)
    low_bytes = np.packbits(low_bits, axis=1, bitorder="little")
    unary_bytes = np.packbits(unary_bits, axis=1, bitorder="little")
    return np.concatenate([low_bytes, unary_bytes], axis=1)


def _decode_elias_fano(rows: U8, code: _Code) -> I32:
    """Return ascending tokens (rows, k): the low ``code.low`` bits of each are packed first, the
    high bits are a unary bitmap behind them.

    Raises SchemaError for a bitmap without k ones, and for stray bits.
    """
    low_end, high_end, _ = code.ends
    unary = np.unpackbits(rows[:, low_end:high_end], axis=1, bitorder="little")
    num_bits = unary.shape[1]
    ones = np.flatnonzero(unary.view(bool))
    is_sound = len(ones) == len(rows) * code.k
    if is_sound and ones.size:
        row_starts = np.arange(0, unary.size, num_bits)
        ones = ones.reshape(-1, code.k) - row_starts[:, None]
        is_sound = ones.min() >= 0 and ones.max() < num_bits
    if not is_sound:
        raise SchemaError(
            f"channel '{code.name}' has another number of tokens than {code.k} at a position"
        )
    high = (ones.reshape(-1, code.k) - np.arange(code.k)).astype(np.int32)
    if not code.low:
        return high
    spare = low_end * 8 - code.k * code.low
    if spare and len(rows) and rows[:, low_end - 1].max() >> (8 - spare):
        raise SchemaError(f"channel '{code.name}' has bits behind the last token of a position")
    # Each token's bits lie in the four bytes from the one in which they begin; rows end with bytes
    # of the high part.
    first_bit = np.arange(code.k) * code.low
    first_byte = first_bit >> 3
    places = first_byte[:, None] + np.arange(4)
    last_place = rows.shape[1] - 1
    word_bytes = np.take(rows, np.minimum(places, last_place), axis=1)
    words: NDArray[np.uint32] = word_bytes.view("<u4")[..., 0]
    shift = (first_bit & 7).astype(np.uint32)
    low_mask = np.uint32((1 << code.low) - 1)
    low: NDArray[np.uint32] = (words >> shift) & low_mask
    tokens: I32 = (high << code.low) | low.view(np.int32)
    return tokens


def _encode_weights(weights: F64, tail: NDArray[Any] | None, code: _Code) -> list[U8]:
    """Return the columns of bytes of probabilities and tail: logarithms as float16, or as steps
    below the largest.
    """
    mass = weights.sum(axis=1)
    tail = np.maximum(1 - mass, 0) if tail is None else tail.astype(np.float64)
    is_sound = weights.min(axis=1) >= 0
    is_sound &= tail >= 0
    is_sound &= mass > 0
    is_sound &= np.abs(mass + tail - 1) < _SUM_ERROR
    if not is_sound.all():
        row = int(np.argmin(is_sound))
        raise SchemaError(
            f"channel '{code.name}' has weights of {weights[row].min():g} to "
            f"{weights[row].max():g}, {mass[row]:g} in all, and a tail of {tail[row]:g} at "
            f"stored position {row}: they must be probabilities, without NaN, that add up to 1"
        )
    largest = weights.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        logs = np.maximum(np.log(weights / largest), _LEAST_LOG)
        odds = np.minimum(np.log(tail / mass), _LARGEST_ODDS)
    odds_bytes = odds.astype("<f2")[:, None].view(np.uint8)
    if code.dtype == "float16":
        return [logs.astype("<f2").view(np.uint8), odds_bytes]
    farthest = np.abs(logs).max(axis=1, keepdims=True)
    step = (farthest / 255).astype("<f2")
    divisor = np.where(step > 0, step, 1)
    codes = np.rint(-logs / divisor).clip(0, 255)
    return [codes.astype(np.uint8), step.view(np.uint8), odds_bytes]


def _decode_weights(rows: U8, code: _Code) -> tuple[F32, F32]:
    _, value_start, value_end = code.ends
    values = rows[:, value_start:value_end]
    rest = np.ascontiguousarray(rows[:, value_end:])
    halves = rest.view("<f2").astype(np.float32)
    odds = halves[:, -1]
    if code.dtype == "uint8":
        steps = halves[:, :1]
        allowed = f"steps from 0 to {_LARGEST_STEP:g}, and 0 for the likeliest token"
        is_sound = not rows.size or bool(
            (values.min(axis=1) == 0).all() and 0 <= steps.min() <= steps.max() <= _LARGEST_STEP
        )
    else:
        logs = np.ascontiguousarray(values).view("<f2").astype(np.float32)
        allowed = f"logarithms from {_LEAST_LOG:g} to 0, and 0 for the likeliest token"
        is_sound = not rows.size or bool((logs.max(axis=1) == 0).all() and logs.min() >= _LEAST_LOG)
    if rows.size:
        is_sound = is_sound and odds.max() < np.inf
    if not is_sound:
        raise SchemaError(
            f"channel '{code.name}' has values that are no probabilities at a position: "
            f"allowed are {allowed}, and a tail below 1, all without NaN"
        )
    if code.dtype == "uint8":
        logs = values * -steps
    weights: F32 = np.exp(logs)
    mass = np.exp(-np.logaddexp(0, odds))
    factor = mass / weights.sum(axis=1)
    weights *= factor[:, None]
    tail = np.exp(-np.logaddexp(0, -odds))
    return weights, tail
