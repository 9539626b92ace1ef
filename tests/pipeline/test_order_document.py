"""ORDER.md, computed by its letter: one position at a time, whole numbers only, nothing shared with the product."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.clips import ClipTable
from fuelrail.pipeline.compiled_order import CompiledOrder
from fuelrail.pipeline.lanes import Lanes
from fuelrail.pipeline.mix import MixedOrder
from fuelrail.pipeline.order import OrderSpec
from fuelrail.pipeline.weights import AttributeWeights, SystematicSampling

SEEDS, EPOCHS = st.integers(0, 2**63 - 1), st.integers(0, 2**20)


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

    def at(x):
        while True:
            (left, right), (size, other) = divmod(x, b), (a, b)
            for word in round_words:
                left = (left + ((fmix64(right ^ word) >> 32) * size >> 32)) % size
                left, right, size, other = right, left, other, size
            x = left * b + right
            if x < n:
                return x

    return at


def copies(weights, length, seed, epoch):
    """Section 4: the samples of all copies, in stored order."""
    if weights is None:
        return list(range(length))
    bits = min(32, 62 - len(weights).bit_length())
    ticks = [round(weight / max(weights) * 2**bits) for weight in weights]
    total, found = sum(ticks), []
    phase = key("order weights", seed, epoch) % total
    for j in range(length):
        at, sample = (j * total + phase) // length, 0
        while sum(ticks[: sample + 1]) <= at:
            sample += 1
        found.append(sample)
    return found


def windowed(shard_of_copy, window, seed, epoch):
    """Section 5: which copy stands at each position."""
    shards = sorted(set(shard_of_copy))
    num = len(shards)
    slots = [shards[permutation(num, key("order windowed shards", seed, epoch))(i)] for i in range(num)]
    num_windows, found = -(-num // window), []
    for k in range(num_windows):
        inside = slots[k * num // num_windows : (k + 1) * num // num_windows]
        held = [copy for slot in inside for copy, shard in enumerate(shard_of_copy) if shard == slot]
        places = permutation(len(held), key("order windowed samples", seed, epoch, k))
        found += [held[places(q)] for q in range(len(held))]
    return found


@given(
    st.sampled_from(["shuffled", "windowed", "sequential"]), st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4), st.one_of(st.none(), st.integers(1, 40)), st.booleans(), SEEDS, EPOCHS, st.data(),
)  # fmt: skip
def test_kinds_weights_and_selections(kind, shards, window, length, filtered, seed, epoch, data):
    n = sum(shards)
    selected = None
    if filtered:
        selected = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))))
    num_selected = n if selected is None else len(selected)
    weights = None
    if length is not None:
        weights = data.draw(st.lists(st.integers(0, 5), min_size=num_selected, max_size=num_selected).filter(any))
    spec = OrderSpec(
        kind=kind, seed=seed, window=window if kind == "windowed" else None,
        weights=() if weights is None else (AttributeWeights(attribute="any"),),
    )  # fmt: skip
    sampling = None if weights is None else SystematicSampling(weights, length)
    ours = CompiledOrder(spec, {}, shards, selected, sampling).epoch(epoch)

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
    at = permutation(n, key("order shuffled", seed, 2))
    assert order(positions).tolist() == [at(position) for position in positions]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 3), SEEDS, EPOCHS)
def test_lanes(lengths, num_lanes, pieces_per_clip, seed, epoch):
    pieces, first = [], 0
    for length in lengths:
        parts = min(length, pieces_per_clip)
        for part in range(parts):
            size = length // parts + (part < length % parts)
            pieces.append(list(range(first, first + size)))
            first += size
    num_lanes = min(num_lanes, len(pieces))
    clips = np.repeat(np.arange(len(lengths)), lengths)
    frames = np.concatenate([np.arange(length) for length in lengths])
    ours = Lanes(ClipTable.build(clips, frames), num_lanes, pieces_per_clip=pieces_per_clip).epoch(seed, epoch)

    loads, lane_of_slot = [0] * num_lanes, []
    for length in sorted(map(len, pieces), reverse=True):
        lane_of_slot.append(loads.index(min(loads)))
        loads[lane_of_slot[-1]] += length
    shuffled = map(permutation(len(pieces), key("order lanes pieces", seed, epoch)), range(len(pieces)))
    in_slots = sorted((pieces[i] for i in shuffled), key=len, reverse=True)
    called = permutation(num_lanes, key("order lanes", seed, epoch))
    place = permutation(len(pieces), key("order lanes places", seed, epoch))
    shown = {lane: [] for lane in range(num_lanes)}
    for slot in sorted(range(len(pieces)), key=place):
        shown[called(lane_of_slot[slot])].append(in_slots[slot])
    for lane, its_pieces in shown.items():
        frames_shown = [(sample, True, at > 0) for piece in its_pieces for at, sample in enumerate(piece)]
        again = [(sample, False, at > 0) for at, sample in enumerate(its_pieces[0])]
        while len(frames_shown) < max(loads):
            frames_shown += again[: max(loads) - len(frames_shown)]
        entries = ours.entries(np.arange(max(loads)) * num_lanes + lane)
        assert list(zip(*(part.tolist() for part in entries), strict=True)) == frames_shown
    assert len(ours) == max(loads) * num_lanes


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=3), SEEDS, st.integers(0, 3))
def test_mixes(parts, seed, epoch):
    orders = [CompiledOrder(OrderSpec(seed=number), {}, [n]) for number, (n, _) in enumerate(parts)]
    mix = MixedOrder(orders, [ratio for _, ratio in parts], seed=seed)
    entries = mix.epoch(epoch).entries(np.arange(mix.epoch_length))

    block = sum(ratio for _, ratio in parts)
    num_blocks = mix.epoch_length // block
    places = [dataset for dataset, (_, ratio) in enumerate(parts) for _ in range(ratio)]
    word = permutation(2**62, key("order mix", seed))
    taken = [epoch * num_blocks * ratio for _, ratio in parts]
    expected = []
    for number in range(epoch * num_blocks, (epoch + 1) * num_blocks):
        for entry in sorted(range(block), key=lambda k, number=number: word(number * block + k)):
            dataset = places[entry]
            turns, at = divmod(taken[dataset], parts[dataset][0])
            own = permutation(parts[dataset][0], key("order shuffled", dataset, turns))
            expected.append((dataset, own(at)))
            taken[dataset] += 1
    assert list(zip(entries.parts.tolist(), entries.samples.tolist(), strict=True)) == expected
