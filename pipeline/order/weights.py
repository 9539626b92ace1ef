"""Weights: how often each sample comes in an epoch, by systematic sampling.

An epoch of N positions over samples with weights w has N w_i / sum(w) copies of sample i expected.
They are drawn by systematic sampling (Madow, "On the Theory of Systematic Sampling, II", 1949): the
weights laid end to end, N points at equal distances, one random phase an epoch. So in each epoch a
sample comes floor or ceil of its expected number of times, over all phases exactly that many on
average, every stretch of the data has its share in every epoch, and where a position points to is
arithmetic on one array of cumulated weights (8 bytes a sample).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import DIGEST_CHARS, Occurrences
from fuelrail.pipeline.order.permutation import CHUNK, as_positions
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import F64, I64, Mask
    from fuelrail.pipeline.order.mix import Mix

MAX_POSITIONS: Final = 2**31
"""Longest weighted epoch: products of two such numbers stay under 2**62."""

_STEPS: Final = 2
_TICK_BITS: Final = 32
_SUM_BITS: Final = 62


class ClassBalance(Settings, frozen=True, tag="class_balance", tag_field="by"):
    """Class-balanced sampling as nuScenes trainers do it (CBGS: Zhu et al., arXiv 1908.09492,
    section 3.1).

    ``classes`` are attributes that count a class's boxes. A sample holds a class where its count is
    above 0, and gets weight (sum over its classes c of 1 / samples that hold c): each class is
    drawn from equally often. Samples without any box get 0. The epoch has as many positions as all
    classes have samples, cut to a multiple of the classes: 123,580 for the ten classes of nuScenes'
    training split.
    """

    classes: tuple[str, ...]


class AttributeWeights(Settings, frozen=True, tag="attribute", tag_field="by"):
    """A weight for each value of one attribute, or, without ``values``, the attribute itself as
    the weight.
    """

    attribute: str
    values: dict[str, float] | None = None
    """Weight by value, written as text: ``{"night": 3, "day": 1}``, ``{"true": 2.5}``, ``{"4":
    1}``.
    """
    default: float = 1.0
    """The weight of values that ``values`` does not name, and of unknown ones."""


class FileWeights(Settings, frozen=True, tag="file", tag_field="by"):
    """Hard examples: a weight for each key, from columns ``key`` and ``weight`` of a
    ``.parquet`` or ``.csv`` file.
    """

    file: str
    default: float = 1.0
    """The weight of keys that the file does not name."""


Weighting = ClassBalance | AttributeWeights | FileWeights


def columns_of(weightings: Sequence[Weighting]) -> tuple[str, ...]:
    """Return the attributes that some weightings need, each once."""
    names: dict[str, None] = {}
    for weighting in weightings:
        match weighting:
            case ClassBalance(classes=classes):
                names.update(dict.fromkeys(classes))
            case AttributeWeights(attribute=attribute):
                names[attribute] = None
            case FileWeights():
                names["key"] = None
    return tuple(names)


def compute_weights(
    weightings: Sequence[Weighting],
    table: pa.Table,
    files: Mapping[str, pa.Table] = MappingProxyType({}),
) -> F64:
    """Return the product of some weightings for each row of ``table`` (with :func:`columns_of`
    them): float64 (n,).

    ``files`` are the columns ``key`` and ``weight`` of each file of weights. Raises OrderError for
    attributes that are not numeric where they must be, classes that no sample holds, files that
    name no sample or one twice, and for weights that are negative, infinite or not a number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    product = np.ones(len(table))
    for weighting in weightings:
        match weighting:
            case ClassBalance(classes=classes):
                if not classes or len(set(classes)) != len(classes):
                    raise OrderError(f"class balance needs different classes, got {list(classes)}")
                weights = np.zeros(len(table))
                for name in classes:
                    held = _held(table, name)
                    num_samples = np.count_nonzero(held)
                    if not num_samples:
                        raise OrderError(
                            f"class balance: no selected sample has {name!r} above 0; leave that "
                            "class out"
                        )
                    weights[held] += 1 / num_samples
            case FileWeights(file=file, default=default):
                columns = files[file]
                keys = columns["key"]
                weight_of_key = _numbers(columns["weight"], "weight")
                named = checked(
                    np.append(weight_of_key, default),
                    f"weights file '{file}' and its default",
                )
                if len(keys.unique()) != len(keys):
                    raise OrderError(f"weights file '{file}' names a key twice")
                value_set = keys.cast(pa.string()).combine_chunks()
                places = pc.index_in(table["key"], value_set=value_set)
                if places.null_count == len(table):
                    raise OrderError(
                        f"weights file '{file}' names none of the {len(table)} selected samples"
                    )
                default_place = len(keys)
                weights = named[places.fill_null(default_place).to_numpy()]
            case AttributeWeights(attribute=name, values=None):
                column = table[name]
                if column.null_count:
                    raise OrderError(
                        f"attribute {name!r} is unknown (null) for {column.null_count} of "
                        f"{len(column)} samples, and a weight needs a number; leave them out by "
                        f"the filter '{name} is not None', or name weights in `values`"
                    )
                weights = checked(_numbers(column, name), f"attribute {name!r}")
            case AttributeWeights(
                attribute=name,
                values=dict() as weight_by_value,
                default=default,
            ):
                weight_of_value = np.array([*weight_by_value.values(), default])
                checked(weight_of_value, f"weights of {name!r}")
                numbers = value_numbers(table[name], tuple(weight_by_value))
                weights = weight_of_value[numbers]
        product *= weights
    return product


def natural_length(weightings: Sequence[Weighting], table: pa.Table) -> int:
    """Return the epoch length that some weightings suggest: CBGS's own with one ClassBalance,
    else one of each row.
    """
    balances = [weighting for weighting in weightings if isinstance(weighting, ClassBalance)]
    if len(balances) != 1:
        return len(table)
    classes = balances[0].classes
    total = sum(int(np.count_nonzero(_held(table, name))) for name in classes)
    return total - total % len(classes)


def value_numbers(column: pa.ChunkedArray, values: Sequence[str]) -> I64:
    """Return which of ``values``, as text, each row has: int64 (n,), -1 for any other and for
    null.
    """
    import pyarrow as pa

    number_of_text = {text: number for number, text in enumerate(values)}
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    codes = column.combine_chunks()
    number_of_code = []
    for value in codes.dictionary.to_pylist():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        number_of_code.append(number_of_text.get(text, -1))
    null_code = len(number_of_code)
    number_of_code.append(-1)
    indices = codes.indices.fill_null(null_code).to_numpy(zero_copy_only=False)
    numbers: I64 = np.array(number_of_code)[indices]
    return numbers


def _held(table: pa.Table, name: str) -> Mask:
    return _numbers(table[name], name, unknown=0.0) > 0


def _numbers(column: pa.ChunkedArray, name: str, unknown: float = np.nan) -> F64:
    """Return a numeric or boolean column as float64, ``unknown`` for null."""
    try:
        floats = column.cast("double", safe=False)
        values = floats.fill_null(unknown).to_numpy()
    except (ValueError, NotImplementedError) as error:  # Arrow's own errors derive from these
        raise OrderError(
            f"attribute {name!r} is {column.type}, and a weight needs a number"
        ) from error
    numbers: F64 = np.asarray(values, dtype=np.float64)
    return numbers


def checked(weights: F64, subject: str) -> F64:
    """Return ``weights`` if each is a finite number of 0 or more; raise OrderError naming the
    first that is not.
    """
    is_weight = np.isfinite(weights) & (weights >= 0)
    bad = np.flatnonzero(~is_weight)
    if bad.size:
        first = bad[0]
        raise OrderError(
            f"{subject}: weights must be finite numbers >= 0, got {weights[first]} (number "
            f"{first}; {bad.size} of {len(weights)} are like that)"
        )
    return weights


class SystematicSampling:
    """Epochs of ``length`` positions over n samples; sample i is expected ``expected_counts()[i]``
    times in each.

    Weights are held in whole ticks, the largest having 2**32 (fewer beyond 2**30 samples): within
    an epoch's arithmetic nothing is rounded any more, so machines agree. Weights below 2**-33 of
    the largest count as 0. Raises OrderError for weights that are negative or not finite, that are
    all 0, and for a length out of range.
    """

    def __init__(self, weights: ArrayLike, length: int) -> None:
        values = np.asarray(weights, dtype=np.float64)
        checked(values, "weighted epoch")
        if not len(values) or not values.max() > 0:
            raise OrderError(
                f"all {len(values)} weights are 0: there is nothing to draw an epoch from"
            )
        if not 1 <= length < MAX_POSITIONS:
            raise OrderError(f"a weighted epoch has 1 .. 2**31 - 1 positions, got {length}")
        self.length = length
        bits = min(_TICK_BITS, _SUM_BITS - len(values).bit_length())
        max_ticks = 2.0**bits
        ticks = np.rint(values / values.max() * max_ticks)
        self._ends: I64 = np.cumsum(ticks.astype(np.int64))
        self._total = int(self._ends[-1])
        self._search = TickSearch(self._ends)

    def expected_counts(self) -> F64:
        """Return the copies of each sample in an epoch, averaged over all phases: float64 (n,)."""
        ticks = np.diff(self._ends, prepend=0)
        return ticks * (self.length / self._total)

    def digest(self) -> str:
        """Return SHA-256 (hex) of the weights in ticks: equal where all epochs of equal length
        are.
        """
        ends = self._ends.astype("<i8")
        return hashlib.sha256(ends.tobytes()).hexdigest()

    @property
    def description(self) -> str:
        """What an identity has of it: the length, and a digest of the weights."""
        return f"{self.length} positions, weights {self.digest()[:DIGEST_CHARS]}"

    def epoch(self, phase_key: int) -> SystematicEpoch:
        """Return one epoch's copies; ``phase_key`` is a uniform 128-bit number, as
        `permutation.derive_key` makes.
        """
        phase = phase_key % self._total
        return SystematicEpoch(self._search, self.length, phase)


class Part(NamedTuple):
    """Selected samples with an order of their own: all of them, or those of a value of a mix."""

    rows: I64 | None
    """Their numbers within the split, ascending; None: all of it."""
    sampling: SystematicSampling | None
    """None: each comes once."""


def weigh_parts(
    weightings: Sequence[Weighting],
    mix: Mix | None,
    *,
    table: pa.Table,
    rows: I64 | None,
    files: Mapping[str, pa.Table],
    epoch_length: int | None,
) -> list[Part]:
    """Return the parts of the selected ``rows`` (None: all), one for each value of the mix, or one
    of them all.

    ``table`` has the attributes of the rows, ``files`` the columns of each file of weights. Weights
    are those of the whole selection. Raises OrderError as `compute_weights`, and for a value that
    no selected sample has.
    """
    weights = compute_weights(weightings, table, files) if weightings else None
    if mix is None:
        if weights is None:
            return [Part(rows, None)]
        length = epoch_length or natural_length(weightings, table)
        return [Part(rows, SystematicSampling(weights, length))]
    column = table[mix.attribute]
    part_of_row = value_numbers(column, tuple(mix.ratios))
    parts = []
    for number, value in enumerate(mix.ratios):
        inside = np.flatnonzero(part_of_row == number)
        if not inside.size:
            values = sorted(map(str, column.unique().to_pylist()))
            raise OrderError(
                f"mix: no selected sample has {mix.attribute!r} {value!r}; "
                f"there are: {', '.join(values[:20])}"
            )
        sampling = None
        if weights is not None:
            sampling = SystematicSampling(weights[inside], len(inside))
        part_rows = inside if rows is None else rows[inside]
        parts.append(Part(part_rows, sampling))
    return parts


class TickSearch:
    """``np.searchsorted(ends, ticks, side="right")``, for many ticks in no order.

    A table of about one entry a sample gives for each run of ticks the place of its first one; most
    others belong there or shortly behind. Bisection would miss the caches at each of its steps.
    """

    __slots__ = ("_guide", "_shift", "ends")

    def __init__(self, ends: I64) -> None:
        """Take ``ends``, which ascend and end above 0; ticks are below the last one."""
        self.ends = ends
        last = int(ends[-1])
        self._shift = max(0, last.bit_length() - len(ends).bit_length())
        num_runs = (last >> self._shift) + 1
        runs = np.arange(num_runs) << self._shift
        first_ends = np.searchsorted(ends, runs, side="right")
        dtype = np.int32 if len(ends) <= np.iinfo(np.int32).max else np.int64
        self._guide: NDArray[np.integer] = first_ends.astype(dtype)

    def __call__(self, ticks: I64) -> I64:
        """Return indices (int64, (n,)) of the first end above each of ``ticks`` (n,)."""
        indices = self._guide.take(ticks >> self._shift).astype(np.int64)
        for _ in range(_STEPS):
            indices += self.ends.take(indices) <= ticks
        # Behind many samples of little weight.
        is_behind = self.ends.take(indices) <= ticks
        rest = np.flatnonzero(is_behind)
        if rest.size:
            indices[rest] = np.searchsorted(self.ends, ticks[rest], side="right")
        return indices


class SystematicEpoch:
    """The copies of one epoch in stored order: maps copies in [0, length) to samples, ascending,
    copies side by side.
    """

    __slots__ = (
        "_ends",
        "_length",
        "_phase",
        "_remainder",
        "_search",
        "_spacing",
    )

    def __init__(self, search: TickSearch, length: int, phase: int) -> None:
        self._search = search
        self._ends = search.ends
        self._length = length
        self._phase = phase
        self._spacing, self._remainder = divmod(int(self._ends[-1]), length)

    def __len__(self) -> int:
        return self._length

    def __call__(self, copies: ArrayLike, /) -> I64:
        """Return samples (int64, same shape) of ``copies`` (integers in [0, length)); raises
        OrderError for others.
        """
        numbers = as_positions(copies, self._length, "copy")
        # floor((number * total + phase) / length), in parts that stay under 2**63.
        flat = numbers.reshape(-1)
        samples = np.empty_like(flat)
        for first in range(0, flat.size, CHUNK):
            chunk = slice(first, first + CHUNK)
            part = flat[chunk]
            ticks = part * self._spacing + (part * self._remainder + self._phase) // self._length
            samples[chunk] = self._search(ticks)
        return samples.reshape(numbers.shape)

    def first_copies(self, samples: Sequence[int]) -> list[int]:
        """Return where the copies of each of ``samples`` in [0, n] begin: the number of copies
        before it.
        """
        total = int(self._ends[-1])
        copies = []
        for sample in samples:
            start = int(self._ends[sample - 1]) if sample else 0
            copy = -(-(start * self._length - self._phase) // total)
            copies.append(min(max(copy, 0), self._length))
        return copies

    def find(self, samples: ArrayLike, /) -> Occurrences:
        """Return the copies of ``samples`` (integers (n,) in [0, number of samples)); raises
        OrderError for others.
        """
        numbers = as_positions(samples, len(self._ends), "sample")
        starts = np.array(self.first_copies(numbers.tolist()), np.int64)
        ends = np.array(self.first_copies((numbers + 1).tolist()), np.int64)
        counts = ends - starts
        indices = np.repeat(np.arange(len(numbers)), counts)
        shifts = starts - np.cumsum(counts) + counts
        copies = np.arange(len(indices)) + shifts[indices]
        return Occurrences(indices, copies)
