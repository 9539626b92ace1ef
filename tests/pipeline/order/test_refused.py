"""Orders, parts of orders, and numbers that cannot be: one table of (what is made, error class, words)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from fuelrail.pipeline.errors import (
    ConfigError,
    FuelrailError,
    IndexFileError,
    OrderError,
    WorldError,
)
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.order.batching import Batching, Cursor, Walk, World
from fuelrail.pipeline.order.bucket import MAX_BUCKETS
from fuelrail.pipeline.order.compile import compile_table
from fuelrail.pipeline.order.lanes import LaneOrder
from fuelrail.pipeline.order.mix import MAX_BLOCK, Mix, MixedOrder
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.permutation import (
    MAX_LENGTH,
    KeyedPermutation,
    derive_key,
)
from fuelrail.pipeline.order.spec import CompiledOrder, OrderSpec, OrderStage, position_map
from fuelrail.pipeline.order.table import Table
from fuelrail.pipeline.order.weights import (
    MAX_POSITIONS,
    AttributeWeights,
    ClassBalance,
    SystematicSampling,
    compute_weights,
)
from fuelrail.pipeline.order.windows import FrameWindow
from fuelrail.pipeline.settings import convert

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).resolve().parents[3] / "pipeline" / "order" / "ORDER.md"
SMALL = (3, 1, 4, 2, 5)
BY_A = (AttributeWeights(attribute="a"),)
MIX_A = Mix(attribute="a", ratios={"b": 1})
TABLE = pa.table({"n": [1, 0], "none": [0, None], "city": ["a", "b"], "gap": [1.0, None]})


def order(num_samples: int) -> CompiledOrder:
    return CompiledOrder(OrderSpec(), {}, [num_samples])


def lanes(clips: int, num_lanes: int, **options: Any) -> LaneOrder:
    """Lanes over clips of five frames."""
    table = ClipTable.build(np.repeat(np.arange(clips), 5), np.tile(np.arange(5), clips))
    return LaneOrder(table, num_lanes, **options)


BATCH = partial(Batching, 10, 2, World())
ROWS: list[tuple[Callable[[], object], type[FuelrailError], str]] = [
    *(
        (partial(OrderSpec, **fields), OrderError, words)
        for fields, words in (
            (
                {"kind": "random"},
                "kind='random' must be one of lanes, sequential, shuffled, windowed",
            ),
            ({"seed": -1}, "seed=-1 must be a whole number"),
            (
                {"seed": 2**63},
                "must be a whole number from 0 to 9223372036854775807",
            ),
            ({"seed": 1.5}, "seed=1.5"),
            ({"kind": "windowed"}, "needs window >= 1"),
            (
                {"kind": "windowed", "window": 0},
                "window=0 must be a whole number >= 1",
            ),
            (
                {"window": 4},
                "window=4 requires order kind 'windowed', got 'shuffled'",
            ),
            ({"kind": "lanes", "weights": BY_A}, "take no weights"),
            ({"kind": "lanes", "mix": MIX_A}, "no mix"),
            ({"kind": "lanes", "stages": (OrderStage(),)}, "no stages"),
            (
                {"mix": MIX_A, "stages": (OrderStage(),)},
                "a mix or stages, not both",
            ),
            ({"stages": ("v1",)}, "stages=.* is not allowed"),
            (
                {"pieces_per_clip": 2},
                "pieces_per_clip=2 requires order kind 'lanes', got 'shuffled'",
            ),
            (
                {"kind": "lanes", "pieces_per_clip": 0},
                "pieces_per_clip=0 must be a whole number >= 1",
            ),
            ({"epoch_length": 0}, "epoch_length=0 must be a whole number >= 1"),
            ({"seed": True}, "OrderSpec: seed=True must be a whole number"),
            ({"kind": "windowed", "window": "4"}, "window='4' must be"),
            ({"filter": 3}, "filter=3 must be"),
            ({"subset": 3}, "subset=3 must be"),
            ({"weights": 3}, "weights=3 must be"),
            ({"weights": ("cbgs",)}, "weights=.* is not allowed"),
            ({"mix": 3}, "mix=3 must be a Mix, a dict of its fields"),
            ({"epoch_length": "9"}, "epoch_length='9' must be"),
            (
                {"kind": "lanes", "pieces_per_clip": "2"},
                "pieces_per_clip='2' must be",
            ),
        )
    ),
    (partial(OrderStage, until="9"), OrderError, "until='9' must be"),
    (
        lambda: convert({"king": "shuffled"}, OrderSpec, "order.yaml"),
        ConfigError,
        "allowed here: kind, seed, window",
    ),
    (
        lambda: convert({"weights": [{"by": "luck"}]}, OrderSpec, "order.yaml"),
        ConfigError,
        "weights",
    ),
    (
        lambda: convert({"frames": [0], "pad": "zeros"}, FrameWindow, "w"),
        ConfigError,
        "repeat_edge",
    ),
    *(
        (
            partial(position_map, OrderSpec(), shards, 0),
            OrderError,
            rf"length in 1 .. 2\*\*62, got {sum(shards)}",
        )
        for shards in ((), (MAX_LENGTH, 1))
    ),
    (
        lambda: compile_table(OrderSpec(epoch_length=5), Table(9, OrderSpec(), None, None), [9]),
        OrderError,
        "requires weights, a mix or stages",
    ),
    *(
        (partial(make, epoch), OrderError, f"{words}.*got {epoch}")
        for words, make, epochs in (
            (
                "epoch must be in 0",
                partial(position_map, OrderSpec(), SMALL),
                (-1, 2**63),
            ),
            ("epoch must be in 0", order(5).epoch, (-1, 2**63)),
            ("epoch must be in 0", lanes(5, 2).epoch, (-1, 2**63)),
            ("", MixedOrder([order(5)], [1]).epoch, (-1, 2**62)),
        )
        for epoch in epochs
    ),
    *(
        (
            partial(read_rows, [0, position]),
            OrderError,
            rf"(position|value) {position} is outside 0 .. {last}",
        )
        for read_rows, last in (
            (position_map(OrderSpec(), SMALL, 0), 14),
            (position_map(OrderSpec(kind="windowed", window=2), SMALL, 0), 14),
            (position_map(OrderSpec(kind="sequential"), SMALL, 0), 14),
            (lanes(2, 2).epoch(0), 9),
            (MixedOrder([order(5)], [1]).epoch(0).entries, 4),
            (KeyedPermutation(10, 1), 9),
            (KeyedPermutation(10, 1).inverse, 9),
        )
        for position in (-1, last + 1, 2**40)
    ),
    *(
        (
            partial(call, np.array([2**63], np.uint64)),
            OrderError,
            rf"{2**63} is outside 0 .. 9",
        )
        for call in (KeyedPermutation(10, 1), KeyedPermutation(10, 1).inverse)
    ),
    *(
        (
            partial(KeyedPermutation(10, 1), bad),
            OrderError,
            "must be integers, got dtype",
        )
        for bad in ([0.5], [True], ["1"])
    ),
    *(
        (partial(KeyedPermutation, n, key), OrderError, words)
        for n, key, words in (
            (0, 0, "length in 1"),
            (-1, 0, "got -1"),
            (2**62 + 1, 0, r"2\*\*62"),
            (5, -1, "key"),
            (5, 2**128, "key"),
        )
    ),
    *(
        (partial(derive_key, "p", number), OrderError, "'p' must be in 0")
        for number in (-1, 2**128)
    ),
    *(
        (partial(MixedOrder, orders, ratios, **options), OrderError, words)
        for orders, ratios, options, words in (
            (
                [order(5), order(5)],
                [1, 0],
                {},
                r"integers >= 1, at most 1024 in sum, got \[1, 0\]",
            ),
            ([order(5)], [MAX_BLOCK + 1], {}, r"got \[1025\]"),
        )
    ),
    (
        lambda: lanes(3, 4),
        OrderError,
        r"3 pieces of clips for 4 lanes.*batch of at most 3.*pieces_per_clip than 1",
    ),
    (lambda: lanes(1, 0), OrderError, ">= 1"),
    (lambda: lanes(1, 1, pieces_per_clip=0), OrderError, ">= 1"),
    *(
        (partial(FrameWindow, **window), OrderError, words)
        for window, words in (
            (
                {"frames": (-1, 0), "stride": 0},
                "stride=0 must be a whole number >= 1",
            ),
            ({"frames": ()}, r"0 among them, got \[\]"),
            ({"frames": (-2, -1)}, r"0 among them, got \[-2, -1\]"),
            ({"frames": (0, -1, -1)}, "different offsets"),
            ({"frames": (0, 2**20), "stride": 2**10}, r"less than 2\*\*30"),
        )
    ),
    *(
        (partial(ClipTable.build, clips, frames), IndexFileError, words)
        for clips, frames, words in (
            (
                [0, 1, 0],
                [4, 4, 4],
                "samples 0 and 2 of the split are the same frame",
            ),
            ([0], [-1], r"frame numbers must be in 0 .. 2\*\*31 - 1, got -1"),
            ([0], [2**31], "got 2147483648"),
        )
    ),
    *(
        (partial(SystematicSampling, weights, length), OrderError, words)
        for weights, length, words in (
            ([], 5, "all 0 weights are 0"),
            ([0, 0, 0], 5, "all 3 weights are 0: there is nothing"),
            ([1, float("nan"), float("nan")], 5, r"got nan \(number 1; 2 of 3"),
            ([1, float("inf")], 5, "got inf"),
            ([1, -0.5], 5, "got -0.5"),
            ([1], 0, r"1 .. 2\*\*31 - 1 positions, got 0"),
            ([1], MAX_POSITIONS, "got 2147483648"),
        )
    ),
    *(
        (partial(compute_weights, [weighting], TABLE), OrderError, words)
        for weighting, words in (
            (ClassBalance(classes=()), r"needs different classes, got \[\]"),
            (ClassBalance(classes=("n", "n")), "needs different classes"),
            (
                ClassBalance(classes=("n", "none")),
                "no selected sample has 'none' above 0",
            ),
            (
                ClassBalance(classes=("city",)),
                "attribute 'city' is string, and a weight needs a number",
            ),
            (
                AttributeWeights(attribute="gap"),
                r"'gap' is unknown \(null\) for . of",
            ),
            (
                AttributeWeights(attribute="city", values={"a": -1}),
                "weights of 'city'.*got -1.0",
            ),
            (
                AttributeWeights(attribute="city", values={}, default=float("nan")),
                "got nan",
            ),
        )
    ),
    *(
        (make, WorldError, words)
        for make, words in (
            (lambda: World(0, 0), "at least 1, got 0"),
            (lambda: World(2, 2), "rank 2 is outside 0 .. 1"),
            (lambda: World(-1, 2), "rank -1"),
            (lambda: World(0.0, 1), "must be an integer"),
            (lambda: Batching(0, 1, World()), r"1 .. 2\*\*62 positions, got 0"),
            (lambda: Batching(10, 0, World()), "got 0"),
            (
                lambda: Batching(10, 2**31 + 1, World()),
                "a global batch must have",
            ),
            (
                lambda: Batching(10, 11, World()),
                "no full global batch of 11.*drop_last=False",
            ),
            (
                lambda: BATCH(start=11),
                "11 samples consumed in an epoch that has 10",
            ),
            (
                lambda: Batching(10, 3, World(0, 7)),
                "a global batch of 3 has no row for some of 7 ranks: use at most 3 ranks",
            ),
            (lambda: BATCH(start=-1), "-1 samples consumed"),
            (
                lambda: BATCH().positions(5),
                "step 5 is outside the 5 steps left",
            ),
            (lambda: BATCH().valid(-1), "step -1"),
            (lambda: BATCH().consumed(6), "6 steps done of the 5"),
            (lambda: Cursor(-1), "cannot be negative"),
            (lambda: Cursor(0, -1), "samples -1"),
            (lambda: Walk(Cursor(0, 11), BATCH()), "11 samples consumed"),
            (lambda: Cursor(0, 11).rest(BATCH()), "11 samples consumed"),
        )
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), ROWS)
def test_what_cannot_be_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_the_page_states_the_limits_that_hold() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    (most_window,) = re.findall(r"W being `window`, from 1 to 2\^(\d+)", page)
    (most_budget,) = re.findall(r"budget C, from 1 to 2\^(\d+)", page)
    Pack(budget=2 ** int(most_budget), cost="c", window=2 ** int(most_window))
    for past in (
        {"budget": 2 ** int(most_budget) + 1},
        {"window": 2 ** int(most_window) + 1},
    ):
        with pytest.raises(OrderError, match="must be a whole number from 1 to"):
            Pack(**{"budget": 1, "cost": "c"} | past)
    assert f"There are at most {MAX_BUCKETS:,} buckets" in page
    assert f"B, their sum, is at most {MAX_BLOCK:,}" in page
    assert f"the sums of all stages, at most {MAX_BLOCK:,}" in page
