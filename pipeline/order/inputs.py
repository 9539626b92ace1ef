"""What an order is computed from, read once: attributes, files of keys and of weights, clips.

All that follows in `fuelrail.pipeline.order.compile` is arithmetic on these, without files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.cost import cost_columns
from fuelrail.pipeline.order.keys import (
    listed_names,
    named_rows,
    read_columns,
    read_keys,
    unknown_names,
)
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.weights import FileWeights, columns_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from fuelrail.pipeline.format.attributes import ClipTable
    from fuelrail.pipeline.order.cost import AttributeTable

    Rows = NDArray[np.int64]

_NAMES: Final = ("key", "clip_id")
"""Attributes whose values ``without`` may name."""


class OrderInputs(NamedTuple):
    """What an order is computed from; samples are numbers within the split, ascending."""

    shard_lengths: Sequence[int]
    columns: pa.Table | None
    """The attributes that the order depends on, a row a sample; None: it depends on none."""
    subset: Rows | None
    """The samples that ``subset`` lists; None: it is not given."""
    without: Sequence[Rows]
    """The samples that each entry of ``without`` names."""
    weight_files: Mapping[str, pa.Table]
    """Columns ``key`` and ``weight`` of each file of weights, by its path."""
    in_layers: Sequence[tuple[str, Rows]]
    """The samples of each layer that drops all others, with the layer in words."""
    clips: ClipTable | None
    """The clips of the samples, for lanes and windows."""
    name_sample: Callable[[int], str]
    """Returns the name of a sample for a message; reads the key of that one."""

    @property
    def num_samples(self) -> int:
        """The number of samples of the split."""
        return sum(self.shard_lengths)

    def attributes(self, names: Sequence[str], rows: Rows | None) -> pa.Table:
        """Return some of the columns, a row for each of ``rows`` (None: all samples)."""
        assert self.columns is not None
        table = self.columns.select(names)
        return table if rows is None else table.take(rows)


def read_inputs(
    spec: OrderSpec,
    attributes: AttributeTable,
    shard_lengths: Sequence[int],
    *,
    clips: ClipTable | None = None,
    in_layers: Sequence[tuple[str, Rows]] = (),
    unknown: set[str] | None = None,
) -> OrderInputs:
    """Read what an order depends on; ``unknown`` is as in `compile_order`.

    Raises OrderError for attributes that do not exist, and for files that cannot be read or name
    keys that do not exist.
    """

    def name_sample(number: int) -> str:
        if "key" not in attributes.names:
            return f"sample {number}"
        key = attributes.read(("key",))["key"][number].as_py()
        return f"sample {key!r} (number {number} of the split)"

    columns = needed_columns(spec, attributes)
    table = attributes.read(columns) if columns or spec.weights or spec.without else None
    subset = None
    if spec.subset is not None:
        assert table is not None
        subset = read_keys(spec.subset, table["key"])
    without = []
    for entry in spec.without:
        assert table is not None
        names = list(entry) if isinstance(entry, tuple) else listed_names(entry).to_pylist()
        texts = table.select([name for name in _NAMES if name in columns])
        rows, missing = named_rows(names, texts)
        if missing and unknown is None:
            raise unknown_names(missing)
        if unknown is not None:
            unknown |= missing
        without.append(rows)
    weightings = [*spec.weights]
    for stage in spec.stages:
        weightings += stage.weights
    return OrderInputs(
        shard_lengths=shard_lengths,
        columns=table,
        subset=subset,
        without=without,
        weight_files={
            weighting.file: read_columns(weighting.file, ("key", "weight"))
            for weighting in weightings
            if isinstance(weighting, FileWeights)
        },
        in_layers=in_layers,
        clips=clips,
        name_sample=name_sample,
    )


def needed_columns(spec: OrderSpec, attributes: AttributeTable) -> list[str]:
    """Return the names of the attributes that an order depends on, each once.

    Raises OrderError for a filter that is no expression over them.
    """
    columns: list[str] = []
    if spec.filter is not None:
        # Here, with Arrow, which plain orders do without.
        from fuelrail.pipeline.order.select import Filter

        columns += Filter(spec.filter, attributes.names).columns
    if spec.subset is not None:
        columns.append("key")
    if spec.without:
        columns += [name for name in _NAMES if name in attributes.names]
    costs = []
    if spec.pack is not None:
        costs.append(spec.pack.cost)
    if spec.bucket is not None:
        costs.append(spec.bucket.by)
    if spec.balance is not None:
        costs.append(spec.balance.cost)
    for cost in costs:
        columns += cost_columns(cost)
    if spec.mix is not None:
        columns.append(spec.mix.attribute)
    columns += columns_of(spec.weights)
    for number, stage in enumerate(spec.stages):
        try:
            columns += needed_columns(
                OrderSpec(filter=stage.filter, weights=stage.weights),
                attributes,
            )
        except OrderError as error:
            raise OrderError(f"stage {number}: {error}") from error
    return list(dict.fromkeys(columns))
