"""Apply an order specification to a split of a dataset: compiled once, arithmetic afterwards.

::

    order = compile_order(OrderSpec(filter="night", weights=(ClassBalance(classes=("num_car",
    "num_bus")),)), dataset)
    samples = order.epoch(3)(positions)          # positions 0 .. order.epoch_length - 1

`read_inputs` reads all that the order depends on, once. The rest computes without files:
`select_samples` says which samples, `arrange` weighs them and puts them in order, and `OrderCosts`
groups them in packs or buckets, leaves samples out, and deals them to ranks. A stage of a run is
arranged as an order of its own.

Each piece maps numbers to numbers, so they compose: the kind permutes positions, weights turn them
into selected samples (:class:`~fuelrail.pipeline.order.weights.SystematicSampling`), the selection
turns these into samples of the split.
Memory: nothing for a whole split, 4 bytes for each selected sample, 16 more with weights, 16 a
sample with lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.epoch import (
    DIGEST_CHARS,
    CopyMap,
    EndlessOrder,
    MappedEpoch,
    SelectedSamples,
    digest,
)
from fuelrail.pipeline.order.inputs import OrderInputs, read_inputs
from fuelrail.pipeline.order.keys import unknown_names
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import (
    MAX_BLOCK,
    Mix,
    MixedOrder,
    MixSchedule,
    MixStage,
)
from fuelrail.pipeline.order.permutation import derive_key
from fuelrail.pipeline.order.spec import ORDER_VERSION, OrderSpec, position_map
from fuelrail.pipeline.order.uses import OrderCosts
from fuelrail.pipeline.order.weights import (
    SystematicSampling,
    columns_of,
    compute_weights,
    natural_length,
    value_numbers,
)
from fuelrail.pipeline.order.windows import TimeWindow, Window, window_lookup

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from fuelrail.pipeline.format.attributes import ClipTable
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.order.cost import AttributeTable

    Rows = NDArray[np.int64]


def compile_order(
    spec: OrderSpec,
    dataset: Dataset,
    split: str = "train",
    *,
    global_batch: int | None = None,
    window: Window | None = None,
    clips: ClipTable | None = None,
    layers: Sequence[Layer] = (),
    unknown: set[str] | None = None,
) -> EndlessOrder:
    """Apply ``spec`` to a split; reads the attributes that it names, and the index's clips for
    lanes and windows.

    ``global_batch`` is needed for lanes, whose number it is, and for buckets. ``window`` with
    ``pad="drop"`` leaves out samples whose window is not complete. ``clips`` is the split's table,
    where the caller has it already. ``unknown`` gets the names in ``spec.without`` that the split
    does not have; None: they are an OrderError. Filters and weights may name attributes of
    ``layers``; where one with ``missing="drop"`` has no row, the sample is left out.

    Raises OrderError for an expression, file or weights that make no order, and where nothing is
    selected; ConfigError for an unknown split; IndexFileError for attributes that don't fit.
    """
    from fuelrail.pipeline.format.attributes import Attributes, ClipTable
    from fuelrail.pipeline.format.layers import (
        JoinedAttributes,
        check_present,
        present_samples,
    )

    spec = spec.resolved()
    num_samples = dataset.split(split).num_samples
    if not num_samples:
        raise OrderError(f"split {split!r} of dataset '{dataset.root}' has no samples")
    if clips is None and needs_clips(spec, window):
        clips = ClipTable.of_split(dataset, split, times=isinstance(window, TimeWindow))
    in_layers = [
        (
            f"layer '{layer.name}' with missing='drop'",
            present_samples(layer, dataset, split),
        )
        for layer in layers
        if layer.missing == "drop" and not layer.is_complete
    ]
    inputs = read_inputs(
        spec,
        JoinedAttributes(dataset, split, layers) if layers else Attributes(dataset, split),
        split_lengths(dataset, split) if spec.kind == "windowed" else [num_samples],
        clips=clips,
        in_layers=in_layers,
        unknown=unknown,
    )
    rows = select_samples(spec, inputs, window)
    for layer in layers:
        if layer.missing == "error":
            check_present(layer, dataset, split, rows)
    return arrange(spec, inputs, rows, global_batch=global_batch, window=window)


def split_lengths(dataset: Dataset, split: str) -> list[int]:
    """Return the number of samples in each shard of a split; raise ManifestError for a shard
    without samples.
    """
    entry = dataset.split(split)
    lengths: list[int] = dataset.shards.split_lengths(
        entry.first_shard, entry.first_shard + entry.num_shards
    ).tolist()
    return lengths


def compile_table(
    spec: OrderSpec,
    attributes: AttributeTable,
    shard_lengths: Sequence[int],
    *,
    global_batch: int | None = None,
    window: Window | None = None,
    clips: ClipTable | None = None,
    unknown: set[str] | None = None,
) -> EndlessOrder:
    """Apply ``spec`` to the rows of any table, stored in "shards" of ``shard_lengths`` rows; see
    `compile_order`.

    ``clips`` is needed with lanes and with ``window`` (`needs_clips`).
    """
    inputs = read_inputs(spec, attributes, shard_lengths, clips=clips, unknown=unknown)
    rows = select_samples(spec, inputs, window)
    return arrange(spec, inputs, rows, global_batch=global_batch, window=window)


def needs_clips(spec: OrderSpec, window: Window | None) -> bool:
    """Return whether an order depends on the clips of its samples."""
    return spec.kind == "lanes" or (window is not None and window.pad == "drop")


def select_samples(
    spec: OrderSpec, inputs: OrderInputs, window: Window | None = None
) -> Rows | None:
    """Return the samples that filter, subset, layers and window leave, ascending; None: all."""
    rows = None
    if spec.filter is not None:
        rows = _filtered(spec.filter, inputs)
    if inputs.subset is not None:
        rows = _narrow(rows, inputs.subset, f"subset '{spec.subset}'")
    for selector, present in inputs.in_layers:
        rows = _narrow(rows, present, selector)
    if window is not None and window.pad == "drop":
        assert inputs.clips is not None
        complete = np.flatnonzero(window_lookup(inputs.clips, window).complete())
        rows = _narrow(rows, complete, f"{window}")
    return rows


def _filtered(text: str, inputs: OrderInputs) -> Rows:
    """Return the samples for which a filter holds, at least one, ascending."""
    # Here, with Arrow, which plain orders do without.
    from fuelrail.pipeline.order.select import Filter

    names = () if inputs.columns is None else inputs.columns.column_names
    rows = Filter(text, names).select(inputs.columns, inputs.num_samples)
    return _narrow(None, rows, f"filter {text!r}")


def _narrow(rows: Rows | None, among: Rows, selector: str) -> Rows:
    """Return those of ``rows`` (None: all) that are ``among`` others, ascending; raise OrderError,
    naming the ``selector``, where none is left.
    """
    narrowed = among if rows is None else np.intersect1d(rows, among, assume_unique=True)
    if narrowed.size:
        return narrowed
    text = f"{selector} selects no sample"
    if rows is not None and among.size:
        text += f" out of the {len(rows)} selected before"
    if selector.startswith("filter"):
        text += "; `fuelrail inspect DATASET` shows the values of its attributes"
    raise OrderError(text)


def arrange(
    spec: OrderSpec,
    inputs: OrderInputs,
    rows: Rows | None,
    *,
    global_batch: int | None = None,
    window: Window | None = None,
) -> EndlessOrder:
    """Return the order of the selected ``rows``: in lanes, in stages, mixed or weighted; then in
    packs or buckets, without what is left out, and dealt.
    """
    if spec.epoch_length is not None and not spec.weights and spec.mix is None and not spec.stages:
        raise OrderError(f"epoch_length={spec.epoch_length} requires weights, a mix or stages")
    costs = OrderCosts.compute(spec, inputs, rows)
    identity = _describe_spec(spec, inputs) | costs.identity()
    if rows is not None:
        identity["selected"] = _describe_rows(rows)
    order: EndlessOrder
    if spec.kind == "lanes":
        if global_batch is None:
            raise OrderError("order kind 'lanes' needs the global batch: it is the number of lanes")
        assert inputs.clips is not None
        identity["lanes"] = global_batch
        order = LaneOrder(
            inputs.clips,
            global_batch,
            seed=spec.seed,
            pieces_per_clip=spec.pieces_per_clip or 1,
            selected=rows,
            identity=identity,
        )
    elif spec.stages:
        order = _arrange_stages(spec, inputs, rows, identity)
    elif spec.mix is not None:
        order = _arrange_mix(spec, spec.mix, inputs, rows=rows, identity=identity)
    else:
        sampling = None
        if spec.weights:
            table, weights = _weigh(spec, inputs, rows)
            length = spec.epoch_length or natural_length(spec.weights, table)
            sampling = SystematicSampling(weights, length)
            identity["weighted"] = _describe_sampling(sampling)
        order = CompiledOrder(
            spec,
            identity,
            inputs.shard_lengths,
            selected=rows,
            sampling=sampling,
        )
    hidden = inputs.without if spec.without else ()
    if window is not None and window.pad == "drop" and inputs.clips is not None:
        hidden = _hide_windows(hidden, rows, window, inputs.clips)
    return costs.apply(order, spec, global_batch, [(hidden_rows,) for hidden_rows in hidden])


def _describe_spec(spec: OrderSpec, inputs: OrderInputs) -> dict[str, Any]:
    """Return what an identity has of a spec: no other field that has its default, so that new
    fields keep a state valid, and digests in the place of files.
    """
    defaults = plain(OrderSpec())
    identity: dict[str, Any] = {"version": ORDER_VERSION}
    identity |= {
        name: value
        for name, value in plain(spec).items()
        if name in ("kind", "seed") or value != defaults[name]
    }
    identity.pop("without", None)  # the order without them says it
    if inputs.subset is not None and spec.subset is not None:
        identity["subset"] = _describe_rows(inputs.subset)
    for weighting in identity.get("weights", ()):
        weighting.pop("file", None)  # what the file says is in a digest
    return identity


def _weigh(
    spec: OrderSpec, inputs: OrderInputs, rows: Rows | None
) -> tuple[pa.Table, NDArray[np.float64]]:
    """Return the columns that the weights of the selected samples depend on, and the weights."""
    table = inputs.attributes(columns_of(spec.weights), rows)
    return table, compute_weights(spec.weights, table, inputs.weight_files)


def _arrange_stages(
    spec: OrderSpec,
    inputs: OrderInputs,
    rows: Rows | None,
    identity: dict[str, Any],
) -> MixedOrder:
    """Return the orders of the stages as a mix in blocks of one position, each with its stage's
    order.
    """
    orders = []
    stages = []
    for number, stage in enumerate(spec.stages):
        weights = (*spec.weights, *stage.weights)
        stage_spec = msgspec.structs.replace(
            spec,
            filter=stage.filter,
            subset=None,
            weights=weights,
            stages=(),
            balance=None,
            without=(),
            seed=_part_seed("order stage", spec.seed, number) if number else spec.seed,
            epoch_length=spec.epoch_length if weights else None,
        )
        try:
            stage_rows = rows
            if stage.filter is not None:
                stage_rows = _filtered(stage.filter, inputs)
                if rows is not None:
                    stage_rows = _narrow(stage_rows, rows, "the selection of all stages")
            orders.append(arrange(stage_spec, inputs, stage_rows))
        except OrderError as error:
            raise OrderError(f"stage {number}: {error}") from error
        ratios = {f"{name}": int(name == number) for name in range(len(spec.stages))}
        stages.append(MixStage(ratios=ratios, until=stage.until, ramp=stage.ramp))
    schedule = MixSchedule(stages, list(stages[0].ratios))
    length = spec.epoch_length or orders[0].epoch_length
    staged = MixedOrder(
        orders,
        schedule.final,
        seed=spec.seed,
        epoch_length=length,
        is_one_split=True,
        schedule=schedule,
    )
    described = [
        {"until": stage.until, "ramp": stage.ramp, "order": order.identity}
        for stage, order in zip(spec.stages, orders, strict=True)
    ]
    identity.pop("weights", None)  # those of each stage have them
    staged.identity = {**identity, "stages": described, "epoch_length": length}
    return staged


def _arrange_mix(
    spec: OrderSpec,
    mix: Mix,
    inputs: OrderInputs,
    *,
    rows: Rows | None,
    identity: dict[str, Any],
) -> MixedOrder:
    """Return the mix of the parts of the selected samples, each with its own order; weights are
    those of the whole selection.
    """
    weights = _weigh(spec, inputs, rows)[1] if spec.weights else None
    column = inputs.attributes((mix.attribute,), rows)[mix.attribute]
    part_of_row = value_numbers(column, tuple(mix.ratios))
    parts = []
    for part_number, value in enumerate(mix.ratios):
        inside = np.flatnonzero(part_of_row == part_number)
        if not inside.size:
            values = ", ".join(sorted(map(str, column.unique().to_pylist()))[:20])
            raise OrderError(
                f"mix: no selected sample has {mix.attribute!r} {value!r}; there are: {values}"
            )
        part_rows = inside if rows is None else rows[inside]
        part_spec = msgspec.structs.replace(
            spec,
            seed=_part_seed("order mix part", spec.seed, part_number),
            filter=None,
            subset=None,
            mix=None,
            epoch_length=None,
        )
        text = _describe_rows(part_rows)
        sampling = None
        if weights is not None:
            sampling = SystematicSampling(weights[inside], len(part_rows))
            text += f", {_describe_sampling(sampling)}"
        part = CompiledOrder(
            part_spec,
            {value: text},
            inputs.shard_lengths,
            selected=part_rows,
            sampling=sampling,
        )
        parts.append(part)
    mixed = MixedOrder(
        parts,
        tuple(mix.ratios.values()),
        seed=spec.seed,
        epoch_length=spec.epoch_length,
        is_one_split=True,
    )
    mixed.identity = {**identity, "mixed": mixed.identity["parts"]}
    return mixed


def _hide_windows(
    hidden: Sequence[Rows], rows: Rows | None, window: Window, clips: ClipTable
) -> list[Rows]:
    """Return hidden samples of each entry of ``without``, and those of ``rows`` whose windows
    are dropped with them.
    """
    hidden_with_windows = []
    named: Rows = np.zeros(0, np.int64)
    for hidden_rows in hidden:
        named = np.union1d(named, hidden_rows)
        clips_left = clips.without(named)
        is_present = window_lookup(clips_left, window)(clips_left.samples).present
        lacking = clips_left.samples[~is_present.all(axis=1)]
        if rows is not None:
            lacking = np.intersect1d(lacking, rows)
        hidden_with_windows.append(np.union1d(hidden_rows, lacking))
    return hidden_with_windows


class CompiledOrder:
    """The epochs of an order over one split. Immutable; safe to call from any number of threads.

    ``identity`` is what a saved position depends on, in plain JSON types: the specification, and
    digests of what its filter, keys and weights came to.
    """

    def __init__(
        self,
        spec: OrderSpec,
        identity: dict[str, Any],
        shard_lengths: Sequence[int],
        selected: NDArray[np.int64] | None = None,
        sampling: SystematicSampling | None = None,
    ) -> None:
        """Take ``selected`` samples of the split, ascending, each once (None: all), and their
        ``sampling``.
        """
        self.spec = spec
        self.identity = identity
        self._sampling = sampling
        self._bounds = np.cumsum([0, *shard_lengths])
        self.num_selected = int(self._bounds[-1]) if selected is None else len(selected)
        self._selected: NDArray[np.integer] | None = None
        if selected is not None:
            self._bounds = np.searchsorted(selected, self._bounds)
            small = np.int32 if int(selected[-1]) <= np.iinfo(np.int32).max else np.int64
            self._selected = selected.astype(small)
        self.epoch_length = self.num_selected if sampling is None else sampling.length

    def selected(self) -> NDArray[np.int64]:
        """Return the selected samples, ascending: int64 (num_selected,)."""
        return (
            np.arange(self.num_selected)
            if self._selected is None
            else self._selected.astype(np.int64)
        )

    def epoch(self, epoch: int, /) -> MappedEpoch:
        """Return the order of one epoch: positions 0 ..

        epoch_length - 1 to samples of the split.
        """
        bounds = self._bounds
        copy_maps: list[CopyMap] = []
        if self._sampling is not None:
            copies = self._sampling.epoch(derive_key("order weights", self.spec.seed, epoch))
            bounds = np.array(copies.first_copies(bounds.tolist()))
            copy_maps.append(copies)
        if self._selected is not None:
            copy_maps.append(SelectedSamples(self._selected))
        lengths = np.diff(bounds)
        return MappedEpoch(
            position_map(self.spec, lengths[lengths > 0].tolist(), epoch),
            *copy_maps,
        )


def plain(settings: object) -> Any:
    """Return settings in plain JSON types: a state that was saved as JSON has lists where these
    have tuples.
    """
    return msgspec.json.decode(msgspec.json.encode(settings))


def _describe_rows(rows: Rows) -> str:
    return f"{len(rows)} samples {digest(rows)}"


def _describe_sampling(sampling: SystematicSampling) -> str:
    return f"{sampling.length} positions, weights {sampling.digest()[:DIGEST_CHARS]}"


def _part_seed(purpose: str, seed: int, number: int) -> int:
    """Return the seed of a part of an order, in the range of `OrderSpec.seed`."""
    return derive_key(purpose, seed, number) % 2**63


def compile_mix(
    ratios: Mapping[str, int] | Sequence[MixStage],
    spec: OrderSpec,
    datasets: Mapping[str, Dataset],
    split: str = "train",
    *,
    global_batch: int | None = None,
    window: Window | None = None,
    clips: Sequence[ClipTable | None] | None = None,
    layers: Mapping[str, Sequence[Layer]] = MappingProxyType({}),
) -> EndlessOrder:
    """Apply ``spec`` to a split of each dataset and mix them: ``ratios`` samples of each in every
    block, or in stages.

    The keywords are as in `compile_order`, clips and layers those of each dataset. Raises
    OrderError for ratios that do not name the datasets or are not integers >= 1, for an order that
    is not to be mixed (``lanes``, ``subset`` and a mix of its own), and what `compile_order`
    raises.
    """

    def compile_one(
        number: int, name: str, part_spec: OrderSpec, unknown: set[str]
    ) -> EndlessOrder:
        return compile_order(
            part_spec,
            datasets[name],
            split,
            global_batch=global_batch,
            window=window,
            clips=None if clips is None else clips[number],
            layers=layers.get(name, ()),
            unknown=unknown,
        )

    return mix_orders(
        ratios,
        spec=spec,
        datasets=datasets,
        compile_one=compile_one,
        global_batch=global_batch,
    )


def mix_orders(
    ratios: Mapping[str, int] | Sequence[MixStage],
    spec: OrderSpec,
    datasets: Mapping[str, object],
    compile_one: Callable[[int, str, OrderSpec, set[str]], EndlessOrder],
    global_batch: int | None = None,
) -> EndlessOrder:
    """Mix orders of named datasets, see `compile_mix`.

    Each is compiled from its number, its name, its own spec and a set for names in ``without`` that
    it does not have.
    """
    spec = spec.resolved()
    schedule = MixSchedule(ratios, list(datasets)) if isinstance(ratios, list | tuple) else None
    final = check_ratios(ratios, datasets) if schedule is None else schedule.final
    if spec.kind == "lanes" or spec.mix is not None or spec.subset is not None or spec.stages:
        if spec.mix is not None:
            feature = "a mix of its own"
        elif spec.kind == "lanes":
            feature = "kind 'lanes'"
        else:
            feature = "stages" if spec.stages else "a subset"
        raise OrderError(
            f"an order with {feature} is of one dataset; mix datasets by kind, filter, "
            "weights, epoch_length"
        )
    compiled: list[EndlessOrder] = []
    lacking: list[set[str]] = []
    for number, name in enumerate(datasets):
        part_spec = msgspec.structs.replace(
            spec,
            seed=_part_seed("order mix part", spec.seed, number),
            epoch_length=None,
        )
        try:
            lacking.append(set())
            compiled.append(compile_one(number, name, part_spec, lacking[-1]))
        except OrderError as error:
            raise OrderError(f"dataset {name!r}: {error}") from error
    if missing := set.intersection(*lacking):
        raise unknown_names(missing)
    orders, costs, hidden = OrderCosts.split(compiled)
    mixed = MixedOrder(
        orders,
        final,
        seed=spec.seed,
        epoch_length=spec.epoch_length,
        schedule=schedule,
    )
    parts = {name: order.identity for name, order in zip(datasets, orders, strict=True)}
    mixed.identity = {
        "version": ORDER_VERSION,
        "kind": spec.kind,
        "seed": spec.seed,
        "mix": plain(ratios) if schedule else dict(zip(datasets, final, strict=True)),
        "epoch_length": mixed.epoch_length,
        "parts": parts,
    }
    return costs.apply(mixed, spec, global_batch, hidden)


def check_ratios(ratios: object, datasets: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ratios of ``datasets``; raise OrderError unless each is an integer >= 1,
    MAX_BLOCK in sum.
    """
    example = f"{{{', '.join(f'{name!r}: 1' for name in datasets)}}}"
    rule = f"it gives each dataset an integer >= 1, {MAX_BLOCK} in sum, such as {example}"
    if not hasattr(ratios, "items"):
        raise OrderError(f"mix={ratios!r} is not allowed: {rule}")
    ratio_of = dict(ratios.items())
    if ratio_of.keys() != datasets.keys():
        raise OrderError(
            f"mix={ratio_of!r} names {_names(ratio_of)}, the datasets are "
            f"{_names(datasets)}: {rule}"
        )
    if (
        not all(type(ratio) is int and ratio >= 1 for ratio in ratio_of.values())
        or sum(ratio_of.values()) > MAX_BLOCK
    ):
        raise OrderError(f"mix={ratio_of!r} is not allowed: {rule}")
    return tuple(ratio_of[name] for name in datasets)


def _names(named: Mapping[str, object]) -> str:
    return ", ".join(map(repr, named)) or "none"
