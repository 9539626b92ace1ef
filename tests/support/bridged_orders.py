"""Orders for bridges, and Grain's records of them: without torch, for Grain starts an interpreter for each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import fuelrail as fr

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL_BATCH = 64
WORLDS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (7, 12, 1, 9, 20, 5, 16, 30) * 8
NUM_ROWS = sum(LENGTHS)
CLIP = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
COLUMNS = {
    "key": np.array([f"k{row}" for row in range(NUM_ROWS)]),
    "clip_id": CLIP,
    "night": CLIP % 3 == 1,
    "loss": np.random.default_rng(0).random(NUM_ROWS),
}
BY_LOSS = (fr.AttributeWeights("loss"),)
BY_NIGHT = (fr.AttributeWeights("night", {"true": 3.0}),)
STAGES = (
    fr.order.OrderStage(weights=BY_LOSS, until=900, ramp=True),
    fr.order.OrderStage(filter="loss > 0.2"),
)
ORDERS: dict[str, tuple[fr.OrderSpec, dict[str, Any]]] = {
    "shuffled": (fr.OrderSpec(seed=7), {}),
    "padded": (fr.OrderSpec(seed=8), {"drop_last": False}),
    "windowed": (fr.OrderSpec(kind="windowed", window=3), {"blocks": 50}),
    "lanes": (fr.OrderSpec(kind="lanes", pieces_per_clip=2), {}),
    "weights": (fr.OrderSpec(filter="loss < 0.9", weights=BY_NIGHT), {}),
    "parts": (
        fr.OrderSpec(mix=fr.Mix(attribute="night", ratios={"true": 1, "false": 3})),
        {},
    ),
    "stages": (fr.OrderSpec(seed=3, stages=STAGES), {}),
    "sequential": (fr.OrderSpec(kind="sequential"), {}),
    "mix": (fr.OrderSpec(seed=4), {"mix": {"a": 3, "b": 1}}),
    "frames": (
        fr.OrderSpec(seed=5),
        {"window": fr.FrameWindow(frames=(-2, 0, 1), pad="drop")},
    ),
}
NUM_ORDERS = len(ORDERS) + 1
"""With that of :func:`add_subset`."""
HALF = NUM_ROWS // 2
HALVES = {
    name: {column: values[rows] for column, values in COLUMNS.items()}
    for name, rows in (("a", slice(HALF)), ("b", slice(HALF, None)))
}


def add_subset(folder: Path) -> None:
    """Add the order of a list of keys, in a file of the folder."""
    (folder / "keys.txt").write_text("".join(f"k{row}\n" for row in range(0, NUM_ROWS, 3)))
    ORDERS["subset"] = (
        fr.OrderSpec(seed=6, subset=str(folder / "keys.txt")),
        {},
    )


def sampler_of(name: str, world: fr.World, kind: type[Any] = fr.order.BatchSampler) -> Any:
    spec, options = ORDERS[name]
    return kind(
        HALVES if "mix" in options else COLUMNS,
        spec,
        global_batch=GLOBAL_BATCH,
        world=world,
        **options,
    )


class GrainBatches:
    """Batches of a rank as records of Grain, by number; its checkpoints compare what `repr` says of it."""

    def __init__(self, name: str, world: fr.World) -> None:
        self.order = sampler_of(name, world)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, step: int) -> Any:
        import grain

        return grain.RecordMetadata(index=step, record_key=self.order[step])

    def __repr__(self) -> str:
        return "GrainBatches"


class GrainRows:
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, rows: list[int]) -> Any:
        return np.arange(NUM_ROWS)[rows]

    def __repr__(self) -> str:
        return "GrainRows"
