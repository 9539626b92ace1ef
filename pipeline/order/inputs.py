"""What an order is computed from, read once: attributes, files of keys and of weights, clips.

All that follows in `fuelrail.pipeline.order.compile` is arithmetic on these, without files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fuelrail.pipeline.order.keys import (
    listed_names,
    named_rows,
    read_columns,
    read_keys,
    unknown_names,
)
from fuelrail.pipeline.order.weights import FileWeights

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from fuelrail.pipeline.format.attributes import ClipTable
    from fuelrail.pipeline.order.cost import AttributeTable
    from fuelrail.pipeline.order.spec import OrderSpec

    Rows = NDArray[np.int64]

_NAMES: Final = ("key", "clip_id")
"""Attributes whose values ``without`` may name."""


class LayerSamples(NamedTuple):
    """The samples of a split that a layer has values for."""

    name: str
    location: str
    samples: Rows
    is_required: bool
    """True: others must not be selected, which is an error. False: they are not selected."""


class OrderInputs(NamedTuple):
    """What an order is computed from; samples are numbers within the split, ascending."""

    shard_lengths: Sequence[int]
    columns: pa.Table | None
    """The attributes that weights, costs and a mix depend on, a row a sample; None: there are none.
    """
    filters: Mapping[str, Rows]
    """The samples for which each filter holds, by its text."""
    subset: Rows | None
    """The samples that ``subset`` lists; None: it is not given."""
    without: Sequence[Rows]
    """The samples that each entry of ``without`` names."""
    weight_files: Mapping[str, pa.Table]
    """Columns ``key`` and ``weight`` of each file of weights, by its path."""
    layers: Sequence[LayerSamples]
    """The layers that lack samples which the order must not show."""
    clips: ClipTable | None
    """The clips of the samples, for lanes and windows."""
    name_sample: Callable[[int], str]
    """Returns the name of a sample for a message; reads the key of that one."""

    @property
    def num_samples(self) -> int:
        """The number of samples of the split."""
        return sum(self.shard_lengths)


def read_inputs(
    spec: OrderSpec,
    attributes: AttributeTable,
    shard_lengths: Sequence[int],
    *,
    clips: ClipTable | None = None,
    layers: Sequence[LayerSamples] = (),
    unknown: set[str] | None = None,
) -> OrderInputs:
    """Read what an order depends on; ``unknown`` is as in `compile_order`.

    Raises OrderError for attributes that do not exist, for filters that are no expression over
    them, and for files that cannot be read or name keys that do not exist.
    """

    def name_sample(number: int) -> str:
        if "key" not in attributes.names:
            return f"sample {number}"
        keys = attributes.read(("key",))["key"]
        key = keys[number].as_py()
        return f"sample {key!r} (number {number} of the split)"

    weightings = [*spec.weights]
    texts = [("", spec.filter)]
    for number, stage in enumerate(spec.stages):
        weightings += stage.weights
        texts.append((f"stage {number}: ", stage.filter))
    columns = dict.fromkeys(spec.columns)
    if spec.subset is not None:
        columns["key"] = None
    if spec.without:
        columns |= dict.fromkeys(name for name in _NAMES if name in attributes.names)
    filters = []
    for owner, text in texts:
        if text is not None:
            # Here, with Arrow, which plain orders do without.
            from fuelrail.pipeline.order.select import Filter

            filters.append((text, Filter(text, attributes.names, owner)))
    for _, expression in filters:
        columns |= dict.fromkeys(expression.columns)
    table = None
    if columns or weightings or spec.without:
        table = attributes.read(list(columns))
    num_samples = sum(shard_lengths)
    filtered = {text: expression.select(table, num_samples) for text, expression in filters}
    subset = None
    if spec.subset is not None:
        assert table is not None
        subset = read_keys(spec.subset, table["key"])
    without = []
    for entry in spec.without:
        assert table is not None
        names = list(entry) if isinstance(entry, tuple) else listed_names(entry).to_pylist()
        name_columns = table.select([name for name in _NAMES if name in columns])
        rows, missing = named_rows(names, name_columns)
        if missing and unknown is None:
            raise unknown_names(missing)
        if unknown is not None:
            unknown |= missing
        without.append(rows)
    weight_files = {}
    for weighting in weightings:
        if isinstance(weighting, FileWeights):
            file = weighting.file
            weight_files[file] = read_columns(file, ("key", "weight"))
    return OrderInputs(
        shard_lengths=shard_lengths,
        columns=None if table is None else table.select(spec.columns),
        filters=filtered,
        subset=subset,
        without=without,
        weight_files=weight_files,
        layers=layers,
        clips=clips,
        name_sample=name_sample,
    )
