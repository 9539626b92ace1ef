"""ORDER.md, computed by its letter: one position at a time, whole numbers only, nothing shared with the product."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import math
import operator
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.compile import (
    CompiledOrder,
    compile_order,
    compile_table,
)
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import Mix, MixedOrder, MixSchedule, MixStage
from fuelrail.pipeline.order.select import Filter
from fuelrail.pipeline.order.spec import OrderSpec, OrderStage
from fuelrail.pipeline.order.table import Table
from fuelrail.pipeline.order.weights import (
    AttributeWeights,
    ClassBalance,
    SystematicSampling,
    compute_weights,
    natural_length,
)
from support.sized_datasets import write_synthetic_index

VECTORS = json.loads((Path(__file__).parent / "order" / "vectors.json").read_text(encoding="utf-8"))
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**20)


def key(purpose, *numbers):
    """Section 2."""
    data = b"fuelrail key 1" + len(purpose).to_bytes(8, "little") + purpose.encode()
    data += b"".join(number.to_bytes(16, "little") for number in numbers)
    return int.from_bytes(hashlib.shake_128(data).digest(16), "little")


def permutation(n, k):
    """Section 3, as a function of the position."""
    seed = b"fuelrail permutation 1" + n.to_bytes(8, "little") + k.to_bytes(16, "little")

    def words(count):
        digest = hashlib.shake_128(seed).digest(8 * count)
        return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(count)]

    if n <= 1024:
        table = words(n)
        return sorted(range(n), key=lambda i: table[i] // 1024 * 1024 + i).__getitem__
    root = math.isqrt(n)
    root += root * root < n
    a = root + root % 2
    b = -(-n // a)
    round_words = words(8)

    def fmix64(x):
        x ^= x >> 33
        x = x * 0xFF51AFD7ED558CCD % 2**64
        x ^= x >> 33
        x = x * 0xC4CEB9FE1A85EC53 % 2**64
        return x ^ x >> 33

    def permuted(x):
        while True:
            left, right = divmod(x, b)
            size = a
            other_size = b
            for word in round_words:
                left = (left + ((fmix64(right ^ word) >> 32) * size >> 32)) % size
                left, right = right, left
                size, other_size = other_size, size
            x = left * b + right
            if x < n:
                return x

    return permuted


def copies(weights, length, seed, epoch):
    """Section 4: the samples of all copies, in stored order."""
    if weights is None:
        return list(range(length))
    bits = min(32, 62 - len(weights).bit_length())
    ticks = [round(weight / max(weights) * 2**bits) for weight in weights]
    total = sum(ticks)
    samples = []
    phase = key("order weights", seed, epoch) % total
    for j in range(length):
        tick = (j * total + phase) // length
        sample = 0
        while sum(ticks[: sample + 1]) <= tick:
            sample += 1
        samples.append(sample)
    return samples


def windowed(shard_of_copy, window, seed, epoch):
    """Section 5: which copy stands at each position."""
    shards = sorted(set(shard_of_copy))
    num = len(shards)
    slots = [
        shards[permutation(num, key("order windowed shards", seed, epoch))(i)] for i in range(num)
    ]
    num_windows = -(-num // window)
    placed = []
    for k in range(num_windows):
        inside = slots[k * num // num_windows : (k + 1) * num // num_windows]
        held = []
        for slot in inside:
            held += [copy for copy, shard in enumerate(shard_of_copy) if shard == slot]
        places = permutation(len(held), key("order windowed samples", seed, epoch, k))
        placed += [held[places(q)] for q in range(len(held))]
    return placed


@given(
    st.sampled_from(["shuffled", "windowed", "sequential"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 40)),
    st.booleans(),
    SEEDS,
    EPOCHS,
    st.data(),
)
def test_kinds_weights_and_selections(kind, shards, window, length, filtered, seed, epoch, data):
    n = sum(shards)
    selected = None
    if filtered:
        selected = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    num_selected = n if selected is None else len(selected)
    weights = None
    if length is not None:
        weights = data.draw(
            st.lists(st.integers(0, 5), min_size=num_selected, max_size=num_selected).filter(any)
        )
    spec = OrderSpec(
        kind=kind,
        seed=seed,
        window=window if kind == "windowed" else None,
        weights=() if weights is None else (AttributeWeights(attribute="any"),),
    )
    sampling = None if weights is None else SystematicSampling(weights, length)
    ours = CompiledOrder(
        spec=spec,
        identity={},
        shard_lengths=shards,
        selected=selected,
        sampling=sampling,
    ).epoch(epoch)

    samples = list(range(n)) if selected is None else selected.tolist()
    by_copy = [samples[i] for i in copies(weights, length or num_selected, seed, epoch)]
    order = range(len(by_copy))
    if kind == "shuffled":
        order = map(permutation(len(by_copy), key("order shuffled", seed, epoch)), order)
    if kind == "windowed":
        shard_of = np.repeat(np.arange(len(shards)), shards).tolist()
        order = windowed([shard_of[sample] for sample in by_copy], window, seed, epoch)
    assert ours(np.arange(len(ours))).tolist() == [by_copy[copy] for copy in order]


@given(st.integers(1025, 2**62), SEEDS, st.data())
def test_large_permutations(n, seed, data):
    order = CompiledOrder(OrderSpec(seed=seed), {}, [n]).epoch(2)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    permuted = permutation(n, key("order shuffled", seed, 2))
    assert order(positions).tolist() == [permuted(position) for position in positions]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(1, 3),
    SEEDS,
    EPOCHS,
)
def test_lanes(lengths, num_lanes, pieces_per_clip, seed, epoch):
    pieces = []
    first = 0
    for length in lengths:
        parts = min(length, pieces_per_clip)
        for part in range(parts):
            size = length // parts + (part < length % parts)
            pieces.append(list(range(first, first + size)))
            first += size
    num_lanes = min(num_lanes, len(pieces))
    clips = np.repeat(np.arange(len(lengths)), lengths)
    frames = np.concatenate([np.arange(length) for length in lengths])
    table = ClipTable.build(clips, frames)
    ours = LaneOrder(table, num_lanes, seed=seed, pieces_per_clip=pieces_per_clip).epoch(epoch)

    loads = [0] * num_lanes
    lane_of_slot = []
    for length in sorted(map(len, pieces), reverse=True):
        lane_of_slot.append(loads.index(min(loads)))
        loads[lane_of_slot[-1]] += length
    shuffled = map(
        permutation(len(pieces), key("order lanes pieces", seed, epoch)),
        range(len(pieces)),
    )
    in_slots = sorted((pieces[i] for i in shuffled), key=len, reverse=True)
    called = permutation(num_lanes, key("order lanes", seed, epoch))
    place = permutation(len(pieces), key("order lanes places", seed, epoch))
    pieces_by_lane = {lane: [] for lane in range(num_lanes)}
    for slot in sorted(range(len(pieces)), key=place):
        pieces_by_lane[called(lane_of_slot[slot])].append(in_slots[slot])
    for lane, its_pieces in pieces_by_lane.items():
        frames_shown = [
            (sample, True, number > 0)
            for piece in its_pieces
            for number, sample in enumerate(piece)
        ]
        padding = [(sample, False, number > 0) for number, sample in enumerate(its_pieces[0])]
        while len(frames_shown) < max(loads):
            frames_shown += padding[: max(loads) - len(frames_shown)]
        entries = ours.entries(np.arange(max(loads)) * num_lanes + lane)
        columns = (entries.samples, entries.valid, entries.flags["prev_exists"])
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == frames_shown
        assert set(entries.flags["lane"].tolist()) == {lane}
    assert len(ours) == max(loads) * num_lanes


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=3),
    st.none() | st.integers(1, 60),
    SEEDS,
    st.integers(0, 3),
)
def test_mixes(parts, length, seed, epoch):
    orders = [CompiledOrder(OrderSpec(seed=number), {}, [n]) for number, (n, _) in enumerate(parts)]
    mix = MixedOrder(orders, [ratio for _, ratio in parts], seed=seed, epoch_length=length)
    entries = mix.epoch(epoch).entries(np.arange(mix.epoch_length))

    block = sum(ratio for _, ratio in parts)
    num_blocks = mix.epoch_length // block
    places = [dataset for dataset, (_, ratio) in enumerate(parts) for _ in range(ratio)]
    word = permutation(2**62, key("order mix", seed))
    num_drawn = [epoch * num_blocks * ratio for _, ratio in parts]
    expected = []
    for number in range(epoch * num_blocks, (epoch + 1) * num_blocks):
        for entry in sorted(range(block), key=lambda k, number=number: word(number * block + k)):
            dataset = places[entry]
            turns, position = divmod(num_drawn[dataset], parts[dataset][0])
            shuffled = permutation(parts[dataset][0], key("order shuffled", dataset, turns))
            expected.append((dataset, shuffled(position)))
            num_drawn[dataset] += 1
    assert list(zip(entries.parts.tolist(), entries.samples.tolist(), strict=True)) == expected


def list_changes(old, new):
    """Section 6: which dataset each change takes an entry from, and which it gives one to."""

    def turns(more):
        named = [((2 * j + 1) / times, d) for d, times in enumerate(more) for j in range(times)]
        return [d for _, d in sorted(named)]

    pairs = list(zip(old, new, strict=True))
    return list(
        zip(
            turns([max(a - b, 0) for a, b in pairs]),
            turns([max(b - a, 0) for a, b in pairs]),
            strict=True,
        )
    )


@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any),
        min_size=2,
        max_size=3,
    ),
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=2),
    SEEDS,
    st.integers(0, 2),
)
def test_scheduled_mixes(ratios, ends, seed, epoch):
    size = math.lcm(*map(sum, ratios))
    lengths = (11, 7)
    ratios = [
        [ratio * size // sum(stage_ratios) for ratio in stage_ratios] for stage_ratios in ratios
    ]
    stages = []
    until = 0
    for stage_ratios, (blocks, ramp) in zip(ratios[:-1], ends, strict=False):
        until += blocks * size
        stages.append(
            MixStage(
                ratios=dict(zip("ab", stage_ratios, strict=True)),
                until=until,
                ramp=ramp,
            )
        )
    stages.append(MixStage(ratios=dict(zip("ab", ratios[-1], strict=True))))
    schedule = MixSchedule(stages, "ab")
    orders = [CompiledOrder(OrderSpec(seed=number), {}, [n]) for number, n in enumerate(lengths)]
    mix = MixedOrder(orders, schedule.final, seed=seed, schedule=schedule)
    entries = mix.epoch(epoch).entries(np.arange(mix.epoch_length))

    word = permutation(2**62, key("order mix", seed))
    u = [0, 0]
    expected = []
    num_blocks = max(-(-n // ratio) for n, ratio in zip(lengths, ratios[-1], strict=True) if ratio)
    for block in range((epoch + 1) * num_blocks):
        number = 0
        start = 0
        while number < len(ratios) - 1 and block >= start + ends[number][0]:
            start += ends[number][0]
            number += 1
        held = list(ratios[number])
        if number < len(ratios) - 1 and ends[number][1]:
            changes = list_changes(ratios[number], ratios[number + 1])
            c = block - start
            n = ends[number][0]
            for i in range(
                len(changes) * c * c // (2 * n),
                len(changes) * (c + 1) * (c + 1) // (2 * n),
            ):
                taken_from, given_to = changes[i % len(changes)]
                held[taken_from] -= 1
                held[given_to] += 1
        places = [dataset for dataset, times in enumerate(held) for _ in range(times)]
        for entry in sorted(range(size), key=lambda k, block=block: word(block * size + k)):
            dataset = places[entry]
            turn, position = divmod(u[dataset], lengths[dataset])
            u[dataset] += 1
            if block >= epoch * num_blocks:
                expected.append(
                    (
                        dataset,
                        permutation(
                            lengths[dataset],
                            key("order shuffled", dataset, turn),
                        )(position),
                    )
                )
    assert list(zip(entries.parts.tolist(), entries.samples.tolist(), strict=True)) == expected


@given(
    st.data(),
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=2),
    SEEDS,
    st.integers(0, 2),
)
def test_stages(data, ends, seed, epoch):
    n = 30
    epoch_length = data.draw(st.none() | st.integers(1, 50))
    columns = {
        f"w{d}": data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
        for d in range(len(ends) + 1)
    }
    bounds = [data.draw(st.integers(0, n - 1)) for _ in columns]
    weighted = [data.draw(st.booleans()) for _ in columns]
    until = np.cumsum([length for length, _ in ends]).tolist()
    stages = tuple(
        OrderStage(
            filter=f"at >= {bound}",
            weights=(AttributeWeights(attribute=name),) if has_weights else (),
            until=until[d] if d < len(until) else None,
            ramp=d < len(until) and ends[d][1],
        )
        for d, (name, bound, has_weights) in enumerate(zip(columns, bounds, weighted, strict=True))
    )
    spec = OrderSpec(seed=seed, stages=stages, epoch_length=epoch_length)
    table = Table({"at": range(n), **columns}, spec, None, None)
    order = compile_table(spec, table, table.lengths)

    @functools.cache
    def samples(d, e, length):
        """Epoch e of the order of stage d."""
        its_seed = key("order stage", seed, d) % 2**63 if d else seed
        held = range(bounds[d], n)
        weights = [columns[f"w{d}"][i] for i in held] if weighted[d] else None
        shuffled = permutation(length, key("order shuffled", its_seed, e))
        chosen = copies(weights, length, its_seed, e)
        return [held[chosen[shuffled(place)]] for place in range(length)]

    length = epoch_length or n - bounds[0]
    assert order.epoch_length == length
    expected = []
    u = [0] * len(stages)
    for position in range((epoch + 1) * length):
        d = sum(position >= end for end in until)
        start = until[d - 1] if d else 0
        c = position - start
        num = (until[d] if d < len(until) else 0) - start
        if stages[d].ramp and (c + 1) ** 2 // (2 * num) > c**2 // (2 * num):
            d += 1
        if position >= epoch * length:
            own_length = (weighted[d] and epoch_length) or n - bounds[d]
            expected.append(samples(d, u[d] // own_length, own_length)[u[d] % own_length])
        u[d] += 1
    assert order.epoch(epoch)(np.arange(length)).tolist() == expected


def as_text(value):
    """Section 8: how a value is written to be compared."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )


def compute_weights_plainly(entries, rows):
    """Section 8: the weight of each of some samples, given as dicts."""
    row_weights = [1.0] * len(rows)
    for entry in entries:
        if isinstance(entry, ClassBalance):
            held = {name: sum((row[name] or 0) > 0 for row in rows) for name in entry.classes}
        for number, row in enumerate(rows):
            if isinstance(entry, ClassBalance):
                weight = 0.0
                for name in entry.classes:
                    if (row[name] or 0) > 0:
                        weight += 1 / held[name]
            elif entry.values is None:
                weight = float(row[entry.attribute])
            else:
                value = row[entry.attribute]
                weight = (
                    entry.default
                    if value is None
                    else entry.values.get(as_text(value), entry.default)
                )
            row_weights[number] *= weight
    return row_weights


def natural(entries, rows):
    """Section 8: the natural length."""
    balances = [entry for entry in entries if isinstance(entry, ClassBalance)]
    if len(balances) != 1:
        return len(rows)
    classes = balances[0].classes
    total = sum((row[name] or 0) > 0 for row in rows for name in classes)
    return total - total % len(classes)


ROWS = st.fixed_dictionaries(
    {
        "cars": st.one_of(st.none(), st.integers(0, 2)),
        "buses": st.one_of(st.none(), st.integers(0, 1)),
        "night": st.one_of(st.none(), st.booleans()),
        "speed": st.sampled_from([0.5, 1.0, 1e-7, 12.25, 3.0]),
        "place": st.one_of(st.none(), st.sampled_from(["a", "b", "\u00e9"])),
    }
)
TYPES = pa.schema(
    {
        "cars": pa.int16(),
        "buses": pa.int16(),
        "night": pa.bool_(),
        "speed": pa.float64(),
        "place": pa.string(),
    }
)
ENTRIES = st.one_of(
    st.permutations(["cars", "buses"]).map(lambda names: ClassBalance(classes=tuple(names))),
    st.just(AttributeWeights(attribute="speed")),
    st.just(AttributeWeights(attribute="night", values={"true": 2.5, "false": 1.0}, default=0.3)),
    st.just(AttributeWeights(attribute="speed", values={"0.5": 3, "1e-07": 7, "12.25": 0.1})),
    st.just(AttributeWeights(attribute="place", values={"\u00e9": 4, "a": 0.7})),
    st.just(AttributeWeights(attribute="cars", values={"2": 9}, default=0.1)),
)


@given(
    st.lists(ROWS, max_size=30).map(
        lambda rows: [
            {
                "cars": 1,
                "buses": 1,
                **dict.fromkeys(("night", "place")),
                "speed": 1.0,
            },
            *rows,
        ]
    ),
    st.lists(ENTRIES, min_size=1, max_size=4),
)
def test_weights_and_lengths(rows, entries):
    table = pa.Table.from_pylist(rows, TYPES)
    weights = compute_weights_plainly(entries, rows)
    assert compute_weights(entries, table).tolist() == weights
    assert natural_length(entries, table) == natural(entries, rows)
    ours = SystematicSampling(weights, natural(entries, rows)).epoch(key("order weights", 5, 2))
    assert ours(np.arange(len(ours))).tolist() == copies(weights, natural(entries, rows), 5, 2)


def test_ties_in_rounding_to_ticks_go_to_the_even_number():
    """0.5, 1.5 and 2.5 ticks become 0, 2 and 2: these weights' shares say so."""
    weights = [2.0**33, 1.0, 3.0, 5.0]
    expected = np.array([2**32, 0, 2, 2])
    counts = SystematicSampling(weights, 1000).expected_counts()
    assert np.allclose(counts, expected * (1000 / expected.sum()), rtol=1e-12, atol=0)


def truth(node, row):
    """Section 9: what an expression is for a sample; None for unknown."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return row[name]
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=name)]):
            return row[name]
        case ast.Call(func=ast.Name(id=name), args=[subject, ast.Constant(value=text)]):
            value = truth(subject, row)
            calls = {
                "contains": lambda: text in value,
                "startswith": lambda: value.startswith(text),
                "endswith": lambda: value.endswith(text),
                "matches": lambda: re.search(text, value) is not None,
            }
            return None if value is None else calls[name]()
        case ast.UnaryOp(op=sign, operand=operand):
            value = truth(operand, row)
            change = {
                ast.Not: operator.not_,
                ast.USub: operator.neg,
                ast.UAdd: operator.pos,
            }[type(sign)]
            return None if value is None else change(value)
        case ast.BoolOp(op=kind, values=values):
            ends = isinstance(kind, ast.Or)
            sides = [truth(value, row) for value in values]
            return ends if ends in sides else None if None in sides else not ends
        case ast.BinOp(left=left, op=kind, right=right):
            a = truth(left, row)
            b = truth(right, row)
            if a is None or b is None:
                return None
            remainder = lambda a, b: int(math.fmod(a, b))  # noqa: E731
            return {
                ast.Add: operator.add,
                ast.Sub: operator.sub,
                ast.Mult: operator.mul,
                ast.Div: operator.truediv,
                ast.Mod: remainder,
            }[type(kind)](a, b)
        case ast.Compare(left=left, ops=kinds, comparators=rights):
            sides = [left, *rights]
            parts = [
                evaluate_comparison(*three, row)
                for three in zip(sides, kinds, rights, strict=False)
            ]
            return False if False in parts else None if None in parts else True
    raise AssertionError(ast.dump(node))


def evaluate_comparison(left, kind, right, row):
    a = truth(left, row)
    if isinstance(kind, (ast.Is, ast.IsNot)):
        return (a is None) == isinstance(kind, ast.Is)
    if isinstance(kind, (ast.In, ast.NotIn)):
        return a is not None and (
            a in [ast.literal_eval(item) for item in right.elts]
        ) == isinstance(kind, ast.In)
    b = truth(right, row)
    kinds = {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
    return None if a is None or b is None else kinds[type(kind)](a, b)


NUMBERS = st.recursive(
    st.sampled_from(["cars", "buses", "speed", "2", "-1", "0.5", "col('cars')"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda value: f"({value} / 4)"),
        inner.map(lambda value: f"-({value})"),
        st.just("(cars * -7 % 3)"),
        st.just("(buses % 2)"),
    ),
    max_leaves=4,
)
CONDITIONS = st.recursive(
    st.one_of(
        st.tuples(
            NUMBERS,
            st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
            NUMBERS,
        ).map(" ".join),
        st.tuples(NUMBERS, NUMBERS, NUMBERS).map(" < ".join),
        st.sampled_from(
            [
                "night",
                "True",
                "False",
                "night == True",
                "night is None",
                "place is not None",
                "place in ('a', 'b')",
                "place not in ['a']",
                "cars in {1, 2}",
                "cars not in (0, -1)",
                "contains(place, 'a')",
                "place < 'b'",
                "startswith(place, '\u00e9')",
                "endswith(place, 'b')",
                "matches(place, '^[ab]$')",
                "'b' <= place",
            ]
        ),
    ),
    lambda inner: st.one_of(
        inner.map(lambda condition: f"not ({condition})"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' and '.join(parts)})"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' or '.join(parts)})"),
    ),
    max_leaves=6,
)


@given(st.lists(ROWS, min_size=1, max_size=12), CONDITIONS)
def test_filters(rows, text):
    tree = ast.parse(text, mode="eval").body
    expected = [number for number, row in enumerate(rows) if truth(tree, row) is True]
    table = pa.Table.from_pylist(rows, TYPES)
    assert Filter(text, TYPES.names).select(table, len(rows)).tolist() == expected


@pytest.mark.parametrize("case", VECTORS["filters"]["cases"], ids=lambda case: case["filter"])
def test_the_filters_of_the_vectors_are_those_of_the_letter(case):
    columns = VECTORS["filters"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    tree = ast.parse(case["filter"], mode="eval").body
    expected = [number for number, row in enumerate(rows) if truth(tree, row) is True]
    assert case["selected"] == expected


@pytest.mark.parametrize("values", [("true", "false"), ("false", "true")])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixs_parts_count_in_the_order_of_the_ratios(tmp_path, values, weighted):
    rng = np.random.default_rng(0)
    rows = [{"night": bool(rng.random() < 0.4), "cars": int(rng.integers(0, 4))} for _ in range(60)]
    attributes = {name: [row[name] for row in rows] for name in ("night", "cars")}
    write_synthetic_index(
        tmp_path / "set",
        (20, 30, 10),
        samples_per_shard=8,
        attributes=attributes,
    )
    ratios = {values[0]: 2, values[1]: 3}
    entries = (AttributeWeights(attribute="cars"),) if weighted else ()
    spec = OrderSpec(
        seed=4,
        filter="cars != 3",
        weights=entries,
        mix=Mix(attribute="night", ratios=ratios),
    )
    ours = compile_order(spec, open_dataset(tmp_path / "set"))

    selected = [number for number, row in enumerate(rows) if row["cars"] != 3]
    parts = [[n for n in selected if as_text(rows[n]["night"]) == value] for value in values]
    block = [part for part, ratio in enumerate(ratios.values()) for _ in range(ratio)]
    num_blocks = max(
        -(-len(part) // ratio) for part, ratio in zip(parts, ratios.values(), strict=True)
    )
    word = permutation(2**62, key("order mix", 4))
    num_drawn = [0, 0]
    expected = []
    for number in range(num_blocks):
        for entry in sorted(range(5), key=lambda i, number=number: word(number * 5 + i)):
            part = block[entry]
            turns, position = divmod(num_drawn[part], len(parts[part]))
            num_drawn[part] += 1
            seed = key("order mix part", 4, part) % 2**63
            weights = (
                compute_weights_plainly(entries, [rows[n] for n in parts[part]])
                if weighted
                else None
            )
            place = permutation(len(parts[part]), key("order shuffled", seed, turns))(position)
            expected.append(parts[part][copies(weights, len(parts[part]), seed, turns)[place]])
    assert ours.epoch(0)(np.arange(ours.epoch_length)).tolist() == expected
