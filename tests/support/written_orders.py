"""The kinds of order that change their ranks, computed from ORDER.md by its letter: plain lists, no product.

A position is a list of rows, in packs of several; a row is (row, valid, lane, prev_exists, frames, present).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count, pairwise
from typing import Any, TypeAlias

Row: TypeAlias = tuple[int, bool, int, bool, tuple[int, ...], tuple[bool, ...]]
Position: TypeAlias = list[Row]


def key(purpose: str, *numbers: int) -> int:
    """Section 2."""
    data = b"fuelrail key 1" + len(purpose).to_bytes(8, "little") + purpose.encode()
    data += b"".join(number.to_bytes(16, "little") for number in numbers)
    return int.from_bytes(hashlib.shake_128(data).digest(16), "little")


@cache
def permutation(n: int, k: int) -> list[int]:
    """Section 3, of up to 1024 values."""
    assert n <= 1024, "a permutation of more is another one"
    seed = b"fuelrail permutation 1" + n.to_bytes(8, "little") + k.to_bytes(16, "little")
    digest = hashlib.shake_128(seed).digest(8 * n)
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(n)]
    return sorted(range(n), key=lambda i: words[i] // 1024 * 1024 + i)


def word(k: int, x: int) -> int:
    """P(2^62, k)(x), by section 3."""
    n = 2**62
    seed = b"fuelrail permutation 1" + n.to_bytes(8, "little") + k.to_bytes(16, "little")
    digest = hashlib.shake_128(seed).digest(64)
    left, right = divmod(x, 2**31)
    for i in range(0, 64, 8):
        v = right ^ int.from_bytes(digest[i : i + 8], "little")
        v ^= v >> 33
        v = v * 0xFF51AFD7ED558CCD % 2**64
        v ^= v >> 33
        v = v * 0xC4CEB9FE1A85EC53 % 2**64
        v ^= v >> 33
        left, right = right, (left + ((v >> 32) * 2**31 >> 32)) % 2**31
    return left * 2**31 + right


def plain(rows: Sequence[int]) -> list[Position]:
    """Positions of one row each, with nothing else to say of them."""
    return [[(row, True, 0, False, (), ())] for row in rows]


def shuffled(rows: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Section 5."""
    return [rows[i] for i in permutation(len(rows), key("order shuffled", seed, epoch))]


def windowed(num_rows: int, shard: int, window: int, seed: int, epoch: int) -> list[int]:
    """Section 5, for shards of so many rows."""
    shards = [[*range(first, min(first + shard, num_rows))] for first in range(0, num_rows, shard)]
    slots = permutation(len(shards), key("order windowed shards", seed, epoch))
    num_windows = -(-len(shards) // window)
    shown = []
    for k in range(num_windows):
        its_slots = range(k * len(shards) // num_windows, (k + 1) * len(shards) // num_windows)
        rows = [row for slot in its_slots for row in shards[slots[slot]]]
        order = permutation(len(rows), key("order windowed samples", seed, epoch, k))
        shown += [rows[i] for i in order]
    return shown


def lanes(
    lengths: Sequence[int], num_lanes: int, pieces_per_clip: int, seed: int, epoch: int
) -> list[Position]:
    """Section 5, for clips that lie one behind the other."""
    pieces = []
    first = 0
    for length in lengths:
        parts = min(length, pieces_per_clip)
        for part in range(parts):
            size = length // parts + (part < length % parts)
            pieces.append([*range(first, first + size)])
            first += size
    loads = [0] * num_lanes
    lane_of_slot = []
    for length in sorted(map(len, pieces), reverse=True):
        lane_of_slot.append(loads.index(min(loads)))
        loads[lane_of_slot[-1]] += length
    drawn = permutation(len(pieces), key("order lanes pieces", seed, epoch))
    in_slots = sorted((pieces[i] for i in drawn), key=len, reverse=True)
    called = permutation(num_lanes, key("order lanes", seed, epoch))
    places = permutation(len(pieces), key("order lanes places", seed, epoch))
    steps: list[list[Row]] = [[] for _ in range(max(loads))]
    for lane in range(num_lanes):
        number = called.index(lane)
        slots = sorted(
            (s for s, own in enumerate(lane_of_slot) if own == number), key=places.__getitem__
        )
        its_pieces = [in_slots[slot] for slot in slots]
        shown = [(row, True, frame > 0) for piece in its_pieces for frame, row in enumerate(piece)]
        again = [(row, False, frame > 0) for frame, row in enumerate(its_pieces[0])]
        while len(shown) < len(steps):
            shown += again
        for step, (row, valid, prev_exists) in zip(steps, shown, strict=False):
            step.append((row, valid, lane, prev_exists, (), ()))
    return [[row] for step in steps for row in step]


def packed(
    rows: Sequence[int], costs: Sequence[int], budget: int, window: int, seed: int, epoch: int
) -> list[Position]:
    """Section 10, packs."""
    shown: list[Position] = []
    for k, first in enumerate(range(0, len(rows), window)):
        own = rows[first : first + window]
        its_costs = [costs[row] for row in own]
        packs: list[list[int]] = [[] for _ in range(-(-sum(its_costs) // budget))]
        for place in sorted(range(len(own)), key=lambda place: (-its_costs[place], place)):
            emptiest = min(packs, key=lambda pack: sum(its_costs[i] for i in pack))
            if sum(its_costs[i] for i in emptiest) + its_costs[place] > budget:
                emptiest = []
                packs.append(emptiest)
            emptiest.append(place)
        for q in permutation(len(packs), key("order packs", seed, epoch, k)):
            shown.append([(own[i], True, 0, False, (), ()) for i in sorted(packs[q])])
    return shown


def bucketed(
    rows: Sequence[int],
    values: Sequence[int],
    bounds: Sequence[int],
    window: int,
    size: int,
    seed: int,
    epoch: int,
) -> list[Position]:
    """Section 10, buckets."""
    own = [
        [row for row in rows if low < values[row] <= high] for low, high in pairwise((-1, *bounds))
    ]
    taken = [0] * len(bounds)
    shown: list[Position] = []
    for k, first in enumerate(range(0, len(rows), window)):
        seen = set(rows[: first + window])
        is_last = first + window >= len(rows)
        batches = []
        for bucket, its_rows in enumerate(own):
            num_seen = sum(row in seen for row in its_rows)
            end = -(-num_seen // size) if is_last else num_seen // size
            for j in range(taken[bucket], end):
                part = its_rows[j * size : (j + 1) * size]
                batches.append([(part[i % len(part)], i < len(part)) for i in range(size)])
            taken[bucket] = end
        for q in permutation(len(batches), key("order buckets", seed, epoch, k)):
            shown += [[(row, valid, 0, False, (), ())] for row, valid in batches[q]]
    return shown


def mixed(lengths: Sequence[int], ratios: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Section 6, for shuffled datasets whose rows lie one behind the other."""
    block = sum(ratios)
    num_blocks = max(-(-length // ratio) for length, ratio in zip(lengths, ratios, strict=True))
    datasets = [dataset for dataset, ratio in enumerate(ratios) for _ in range(ratio)]
    order_key = key("order mix", seed)
    drawn = [epoch * num_blocks * ratio for ratio in ratios]
    shown = []
    for number in range(epoch * num_blocks, (epoch + 1) * num_blocks):
        entries = sorted(range(block), key=lambda i: word(order_key, number * block + i))
        for dataset in map(datasets.__getitem__, entries):
            turn, place = divmod(drawn[dataset], lengths[dataset])
            part_seed = key("order mix part", seed, dataset) % 2**63
            order = permutation(lengths[dataset], key("order shuffled", part_seed, turn))
            shown.append(sum(lengths[:dataset]) + order[place])
            drawn[dataset] += 1
    return shown


def batch_of_run(
    positions: Callable[[int], list[Position]], step: int, global_batch: int, drop_last: bool
) -> list[Position]:
    """Section 1: the rows of a step of a run from its beginning, through the epochs."""
    for epoch in count():
        shown = positions(epoch)
        num_steps, rest = divmod(len(shown), global_batch)
        num_steps += bool(rest) and not drop_last
        if step < num_steps:
            break
        step -= num_steps
    places = range(step * global_batch, (step + 1) * global_batch)
    return [
        [(row[0], row[1] and place < len(shown), *row[2:]) for row in shown[place % len(shown)]]
        for place in places
    ]


def dealt(costs: Sequence[int], num_ranks: int) -> list[int]:
    """Section 10, balance: the rows of a global batch in the order in which the ranks have them."""
    size = len(costs)
    bounds = [rank * size // num_ranks for rank in range(num_ranks + 1)]
    groups: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in sorted(range(size), key=lambda row: (-costs[row], row)):
        not_full = [
            g
            for g, ends in zip(groups, pairwise(bounds), strict=True)
            if len(g) < ends[1] - ends[0]
        ]
        min(not_full, key=lambda group: sum(costs[i] for i in group)).append(row)
    return [row for group in groups for row in sorted(group)]


def with_frames(positions: list[Position], lengths: Sequence[int]) -> list[Position]:
    """Section 7: the frame before each row, and itself, in clips one behind the other; the nearest stands in."""
    starts = {sum(lengths[:clip]) for clip in range(len(lengths))}
    shown: list[Any] = []
    for [(row, *rest)] in positions:
        is_first = row in starts
        frames = (row if is_first else row - 1, row)
        shown.append([(row, *rest[:3], frames, (not is_first, True))])
    return shown
