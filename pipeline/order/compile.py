"""Apply an order specification to a split of a dataset: compiled once, arithmetic afterwards.

::

    order = compile_order(OrderSpec(filter="night", weights=(ClassBalance(classes=("num_car",
    "num_bus")),)), dataset)
    samples = order.epoch(3)(positions)          # positions 0 .. order.epoch_length - 1

`read_inputs` reads all that the order depends on, once. The rest computes without files:
`select_samples` says which samples, `arrange` weighs them and puts them in order, and `regroup`
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
from fuelrail.pipeline.order.balance import BalancedOrder
from fuelrail.pipeline.order.bucket import BucketedOrder
from fuelrail.pipeline.order.cost import MAX_COST, NO_COSTS, OrderCosts, compute_costs
from fuelrail.pipeline.order.epoch import EndlessOrder, digest
from fuelrail.pipeline.order.inputs import LayerSamples, OrderInputs, read_inputs
from fuelrail.pipeline.order.keys import unknown_names
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import (
    MAX_BLOCK,
    MixedOrder,
    MixSchedule,
    MixStage,
)
from fuelrail.pipeline.order.pack import PackedOrder
from fuelrail.pipeline.order.permutation import derive_seed
from fuelrail.pipeline.order.regroup import RegroupedOrder
from fuelrail.pipeline.order.spec import ORDER_VERSION, CompiledOrder, OrderSpec
from fuelrail.pipeline.order.weights import weigh_parts
from fuelrail.pipeline.order.windows import TimeWindow, Window, window_lookup
from fuelrail.pipeline.order.without import ThinnedOrder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.dtypes import I64, Mask
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
    from fuelrail.pipeline.format.layers import JoinedAttributes, present_samples

    num_samples = dataset.split(split).num_samples
    if not num_samples:
        raise OrderError(f"split {split!r} of dataset '{dataset.root}' has no samples")
    if clips is None and needs_clips(spec, window):
        has_times = isinstance(window, TimeWindow)
        clips = ClipTable.of_split(dataset, split, times=has_times)
    shard_lengths = [num_samples]
    if spec.kind == "windowed":
        shard_lengths = split_lengths(dataset, split)
    layer_samples = []
    for layer in layers:
        if layer.missing == "mask" or layer.is_complete:
            continue
        samples = LayerSamples(
            name=layer.name,
            location=layer.data.location,
            samples=present_samples(layer, dataset, split),
            is_required=layer.missing == "error",
        )
        layer_samples.append(samples)
    inputs = read_inputs(
        spec,
        JoinedAttributes(dataset, split, layers) if layers else Attributes(dataset, split),
        shard_lengths,
        clips=clips,
        layers=layer_samples,
        unknown=unknown,
    )
    return compile_inputs(
        spec,
        inputs,
        global_batch=global_batch,
        window=window,
    )


def split_lengths(dataset: Dataset, split: str) -> list[int]:
    """Return the number of samples in each shard of a split; raise ManifestError for a shard
    without samples.
    """
    entry = dataset.split(split)
    end_shard = entry.first_shard + entry.num_shards
    shard_lengths = dataset.shards.split_lengths(entry.first_shard, end_shard)
    lengths: list[int] = shard_lengths.tolist()
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
    inputs = read_inputs(
        spec,
        attributes,
        shard_lengths,
        clips=clips,
        unknown=unknown,
    )
    return compile_inputs(
        spec,
        inputs,
        global_batch=global_batch,
        window=window,
    )


def needs_clips(spec: OrderSpec, window: Window | None) -> bool:
    """Return whether an order depends on the clips of its samples."""
    return spec.kind == "lanes" or (window is not None and window.pad == "drop")


def compile_inputs(
    spec: OrderSpec,
    inputs: OrderInputs,
    *,
    global_batch: int | None = None,
    window: Window | None = None,
) -> EndlessOrder:
    """Return the order that ``spec`` makes of what was read: pure, without files."""
    rows = select_samples(spec, inputs, window)
    order = arrange(spec, inputs, rows, global_batch)
    costs = NO_COSTS
    if spec.costs:
        assert inputs.columns is not None
        table = inputs.columns if rows is None else inputs.columns.take(rows)
        is_by_value = spec.bucket is not None and not spec.bucket.bounds
        selected_costs = {}
        for use, cost in spec.costs.items():
            takes_texts = is_by_value and use == "bucket"
            selected_costs[use] = compute_costs(cost, table, texts=takes_texts)
        costs = spread_costs(spec, inputs, rows, selected_costs)
    _identify(
        order,
        spec,
        inputs,
        rows=rows,
        costs=costs,
    )
    hidden = []
    named: Rows = np.zeros(0, np.int64)
    for hidden_rows in inputs.without:
        if window is not None and window.pad == "drop" and inputs.clips is not None:
            # With them go the selected samples whose windows show one.
            named = np.union1d(named, hidden_rows)
            clips = inputs.clips.without(named)
            lookup = window_lookup(clips, window)
            is_present = lookup(clips.samples).present
            lacking = clips.samples[~is_present.all(axis=1)]
            if rows is not None:
                lacking = np.intersect1d(lacking, rows)
            hidden_rows = np.union1d(hidden_rows, lacking)
        hidden.append((hidden_rows,))
    return regroup(
        order,
        spec,
        costs=costs,
        global_batch=global_batch,
        hidden=hidden,
    )


def spread_costs(
    spec: OrderSpec,
    inputs: OrderInputs,
    rows: Rows | None,
    selected_costs: dict[str, I64],
) -> OrderCosts:
    """Return the costs of all samples of a split, given those of the selected ``rows`` (None: all)
    by what they are for. A sample that is not selected costs -1.

    Raises OrderError for a sample that fits no pack and no bucket.
    """

    def refuse(costs: I64, is_refused: Mask, reason: str, fix: str) -> None:
        if not is_refused.any():
            return
        first = int(is_refused.argmax())
        sample = first if rows is None else int(rows[first])
        num_others = np.count_nonzero(is_refused) - 1
        raise OrderError(
            f"{inputs.name_sample(sample)} costs {costs[first]}, {reason}; so do {num_others} "
            f"others of {len(costs)}: take {fix}, or leave them out by a filter"
        )

    if spec.pack is not None:
        costs = selected_costs["pack"]
        budget = spec.pack.budget
        limit = MAX_COST if spec.pack.truncate else budget
        refuse(
            costs,
            costs > limit,
            reason=f"above the budget of {budget}",
            fix="truncate=True, a larger budget",
        )
        refuse(
            costs,
            costs < 1,
            reason="and a pack could hold any number of those",
            fix="a Cost with a constant of 1 or more",
        )
        selected_costs["pack"] = np.minimum(costs, budget)
    if spec.bucket is not None and spec.bucket.bounds:
        costs = selected_costs["bucket"]
        last_bound = spec.bucket.bounds[-1]
        refuse(
            costs,
            costs > last_bound,
            reason=f"above the last bound of {last_bound}",
            fix="another bound",
        )
    arrays: dict[str, tuple[NDArray[np.integer], ...]] = {}
    for use, costs in selected_costs.items():
        largest = costs.max(initial=0)
        dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
        array: NDArray[np.integer] = costs.astype(dtype)
        if rows is not None:
            array = np.full(inputs.num_samples, -1, dtype)
            array[rows] = costs
        arrays[use] = (array,)
    return OrderCosts(**arrays)


def select_samples(
    spec: OrderSpec,
    inputs: OrderInputs,
    window: Window | None = None,
) -> Rows | None:
    """Return the samples that filter, subset, layers and window leave, ascending; None: all.

    Raises OrderError where none is left, and where one lacks a value of a layer that needs all.
    """
    selectors = []
    if spec.filter is not None:
        selectors.append((f"filter {spec.filter!r}", inputs.filters[spec.filter]))
    if inputs.subset is not None:
        selectors.append((f"subset '{spec.subset}'", inputs.subset))
    for layer in inputs.layers:
        if not layer.is_required:
            text = f"layer '{layer.name}' with missing='drop'"
            selectors.append((text, layer.samples))
    if window is not None and window.pad == "drop":
        assert inputs.clips is not None
        is_complete = window_lookup(inputs.clips, window).complete()
        selectors.append((f"{window}", np.flatnonzero(is_complete)))
    rows = _intersect(selectors)
    for layer in inputs.layers:
        selected = np.arange(inputs.num_samples) if rows is None else rows
        lacking = np.setdiff1d(selected, layer.samples, assume_unique=True)
        if lacking.size:
            raise OrderError(
                f"layer '{layer.name}' ('{layer.location}') has no value for {lacking.size} of "
                f"{len(selected)} selected samples, the first is "
                f"{inputs.name_sample(int(lacking[0]))}; "
                "LayerOptions(missing='mask') marks them in the batch, missing='drop' leaves "
                "them out"
            )
    return rows


def _intersect(selectors: Sequence[tuple[str, Rows]]) -> Rows | None:
    """Return the samples that all selectors name, ascending; None: there are no selectors.

    Raises OrderError, naming the selector that leaves none.
    """
    rows = None
    for selector, samples in selectors:
        common = samples
        if rows is not None:
            common = np.intersect1d(rows, samples, assume_unique=True)
        if not common.size:
            text = f"{selector} selects no sample"
            if rows is not None and samples.size:
                text += f" out of the {len(rows)} selected before"
            if selector.startswith("filter"):
                text += "; `fuelrail inspect DATASET` shows the values of its attributes"
            raise OrderError(text)
        rows = common
    return rows


def arrange(
    spec: OrderSpec,
    inputs: OrderInputs,
    rows: Rows | None,
    global_batch: int | None = None,
) -> EndlessOrder:
    """Return the order of the selected ``rows`` (None: all): in lanes, in stages, mixed, weighted
    or plain. Its identity has what the arrangement adds to that of the specification.
    """
    has_free_length = spec.weights or spec.mix is not None or spec.stages
    if spec.epoch_length is not None and not has_free_length:
        raise OrderError(f"epoch_length={spec.epoch_length} requires weights, a mix or stages")
    if spec.stages:
        return _arrange_stages(spec, inputs, rows)
    if spec.kind == "lanes":
        if global_batch is None:
            raise OrderError("order kind 'lanes' needs the global batch: it is the number of lanes")
        assert inputs.clips is not None
        return LaneOrder(
            inputs.clips,
            global_batch,
            seed=spec.seed,
            pieces_per_clip=spec.pieces_per_clip or 1,
            selected=rows,
            identity={"lanes": global_batch},
        )
    table = inputs.columns
    if table is not None and rows is not None:
        table = table.take(rows)
    parts = weigh_parts(
        spec.weights,
        spec.mix,
        table=table,
        rows=rows,
        files=inputs.weight_files,
        epoch_length=spec.epoch_length,
    )
    if spec.mix is None:
        sampling = parts[0].sampling
        identity = {}
        if sampling is not None:
            identity["weighted"] = sampling.description
        return CompiledOrder(
            spec,
            identity,
            inputs.shard_lengths,
            selected=rows,
            sampling=sampling,
        )
    orders = []
    for number, (value, part) in enumerate(zip(spec.mix.ratios, parts, strict=True)):
        assert part.rows is not None
        text = _describe_rows(part.rows)
        if part.sampling is not None:
            text += f", {part.sampling.description}"
        seed = derive_seed("order mix part", spec.seed, number)
        order = CompiledOrder(
            msgspec.structs.replace(spec, seed=seed),
            {value: text},
            inputs.shard_lengths,
            selected=part.rows,
            sampling=part.sampling,
        )
        orders.append(order)
    mixed = MixedOrder(
        orders,
        tuple(spec.mix.ratios.values()),
        seed=spec.seed,
        epoch_length=spec.epoch_length,
        is_one_split=True,
    )
    mixed.identity = {"mixed": mixed.identity["parts"]}
    return mixed


def _identify(
    order: EndlessOrder,
    spec: OrderSpec,
    inputs: OrderInputs,
    rows: Rows | None,
    costs: OrderCosts = NO_COSTS,
) -> None:
    """Put what a saved position depends on in front of what the identity of an order has: the
    specification, digests of the costs and of the selected ``rows``.
    """
    identity: dict[str, Any] = {
        "version": ORDER_VERSION,
        "kind": spec.kind or "shuffled",
    }
    # A field that has its default is not named, so that new fields keep a state valid.
    defaults = plain(OrderSpec())
    identity |= {
        name: value
        for name, value in plain(spec).items()
        if name == "seed" or value != defaults[name]
    }
    identity.pop("without", None)  # the order without them says it
    if spec.stages:
        identity.pop("weights", None)  # those of each stage have them
    if inputs.subset is not None and spec.subset is not None:
        identity["subset"] = _describe_rows(inputs.subset)
    for weighting in identity.get("weights", ()):
        weighting.pop("file", None)  # what the file says is in a digest
    identity |= costs.digests
    if rows is not None:
        identity["selected"] = _describe_rows(rows)
    order.identity = identity | order.identity


def _arrange_stages(
    spec: OrderSpec,
    inputs: OrderInputs,
    rows: Rows | None,
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
            seed=derive_seed("order stage", spec.seed, number) if number else spec.seed,
            epoch_length=spec.epoch_length if weights else None,
        )
        selectors = []
        if stage.filter is not None:
            selectors.append((f"filter {stage.filter!r}", inputs.filters[stage.filter]))
        if rows is not None:
            selectors.append(("the selection of all stages", rows))
        try:
            stage_rows = _intersect(selectors)
            order = arrange(stage_spec, inputs, stage_rows)
        except OrderError as error:
            raise OrderError(f"stage {number}: {error}") from error
        _identify(order, stage_spec, inputs, stage_rows)
        orders.append(order)
        ratios = {f"{other_number}": 0 for other_number in range(len(spec.stages))}
        ratios[f"{number}"] = 1
        mix_stage = MixStage(
            ratios=ratios,
            until=stage.until,
            ramp=stage.ramp,
        )
        stages.append(mix_stage)
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
    identities = []
    for stage, order in zip(spec.stages, orders, strict=True):
        identity = {
            "until": stage.until,
            "ramp": stage.ramp,
            "order": order.identity,
        }
        identities.append(identity)
    staged.identity = {"stages": identities, "epoch_length": length}
    return staged


def regroup(
    order: EndlessOrder,
    spec: OrderSpec,
    costs: OrderCosts,
    global_batch: int | None,
    hidden: Sequence[Sequence[Rows]],
) -> EndlessOrder:
    """Return an order of samples in packs or buckets, and dealt, where ``spec`` asks for these.

    ``hidden`` are the samples of each part that are left out in their place, in any number of
    rounds. Raises OrderError for stages of a mix, and for buckets without a global batch or with
    samples left out.
    """
    has_schedule = isinstance(order, MixedOrder) and order.schedule is not None
    if has_schedule and (spec.pack or spec.bucket):
        raise OrderError(
            "stages of a mix count positions of samples: no packs and no buckets, which have others"
        )
    if spec.pack is not None:
        order = PackedOrder(
            base=order,
            pack=spec.pack,
            costs=costs.pack,
            seed=spec.seed,
        )
    if spec.bucket is not None:
        if hidden:
            raise OrderError(
                "`without` shifts positions, and the global batches of buckets keep theirs: no "
                "buckets"
            )
        order = BucketedOrder(
            base=order,
            bucket=spec.bucket,
            costs=costs.bucket,
            seed=spec.seed,
            global_batch=global_batch,
        )
    for hidden_of_parts in hidden:
        order = ThinnedOrder(order, hidden_of_parts)
    if spec.balance is None:
        return order
    return BalancedOrder(order, spec.balance, costs.balance)


def plain(settings: object) -> Any:
    """Return settings in plain JSON types: a state that was saved as JSON has lists where these
    have tuples.
    """
    return msgspec.json.decode(msgspec.json.encode(settings))


def _describe_rows(rows: Rows) -> str:
    return f"{len(rows)} samples {digest(rows)}"


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
        number: int,
        name: str,
        part_spec: OrderSpec,
        unknown: set[str],
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
    schedule = None
    if isinstance(ratios, list | tuple):
        schedule = MixSchedule(ratios, list(datasets))
    final = check_ratios(ratios, datasets) if schedule is None else schedule.final
    feature = None
    if spec.mix is not None:
        feature = "a mix of its own"
    elif spec.kind == "lanes":
        feature = "kind 'lanes'"
    elif spec.stages:
        feature = "stages"
    elif spec.subset is not None:
        feature = "a subset"
    if feature is not None:
        raise OrderError(
            f"an order with {feature} is of one dataset; mix datasets by kind, filter, "
            "weights, epoch_length"
        )
    compiled: list[EndlessOrder] = []
    unknown_of_parts: list[set[str]] = []
    for number, name in enumerate(datasets):
        part_spec = msgspec.structs.replace(
            spec,
            seed=derive_seed("order mix part", spec.seed, number),
            epoch_length=None,
        )
        unknown: set[str] = set()
        try:
            order = compile_one(number, name, part_spec, unknown)
        except OrderError as error:
            raise OrderError(f"dataset {name!r}: {error}") from error
        compiled.append(order)
        unknown_of_parts.append(unknown)
    missing = set.intersection(*unknown_of_parts)
    if missing:
        raise unknown_names(missing)
    # The parts are regrouped together: packs, buckets and what is left out are taken off them.
    orders: list[EndlessOrder] = []
    costs: dict[str, tuple[NDArray[np.integer], ...]] = {}
    hidden: list[list[Rows]] = []
    for order in compiled:
        rounds: list[Rows] = []
        below: Any = order
        while isinstance(below, RegroupedOrder | ThinnedOrder):
            if isinstance(below, ThinnedOrder):
                rounds.insert(0, below.hidden[0])
            else:
                earlier_costs = costs.get(below.use, ())
                costs[below.use] = (*earlier_costs, *below.costs)
            below = below.base
        orders.append(below)
        hidden.append(rounds)
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
    return regroup(
        mixed,
        spec,
        costs=OrderCosts(**costs),
        global_batch=global_batch,
        hidden=list(zip(*hidden, strict=True)),
    )


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
    values = ratio_of.values()
    are_positive = all(type(ratio) is int and ratio >= 1 for ratio in values)
    if not are_positive or sum(values) > MAX_BLOCK:
        raise OrderError(f"mix={ratio_of!r} is not allowed: {rule}")
    return tuple(ratio_of[name] for name in datasets)


def _names(named: Mapping[str, object]) -> str:
    return ", ".join(map(repr, named)) or "none"
