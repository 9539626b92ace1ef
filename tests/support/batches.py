"""Loaders, their batches and how two of them compare; one sequence of samples on any world, from any step."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fuelrail import ImageAugment, World
from fuelrail.pipeline.channels.kinds import Packed
from support.loaders import make_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fuelrail import DataLoader

FULL = ImageAugment(height=64, width=96, resize=1.0)
"""Output images are the stored ones, pixel for pixel."""
SMALL = ImageAugment(height=32, width=48, resize=0.5)
TINY = ImageAugment(height=8, width=8, resize="stretch")
TRAIN = ImageAugment(height=32, width=48, train=True, resize_range=(0.6, 0.9), flip_prob=0.5)
GROUPS = {
    "back": {"cameras": ["cam_back"], "image": ImageAugment(height=24, width=40)},
    "front": {"cameras": ["cam_front"], "image": TRAIN},
}
"""Cameras in groups of two sizes."""


def load(
    root: Any,
    batch_size: int = 3,
    *,
    rank: int = 0,
    size: int = 1,
    **options: Any,
) -> DataLoader:
    """Make a loader of small images with two threads, where the options do not say otherwise."""
    options = {"image": SMALL, "num_workers": 2, **options}
    if "camera_groups" in options:
        del options["image"]  # each group has its own
    return make_loader(root, batch_size, world=World(rank, size), **options)


def batches(root: Any, batch_size: int = 3, **options: Any) -> list[Any]:
    """Return the batches of one epoch."""
    with load(root, batch_size, **options) as loader:
        return list(loader)


def check_equal_elsewhere(
    root: Any, load_elsewhere: Callable[..., DataLoader], options: dict[str, Any]
) -> None:
    """Check that batches made elsewhere are those of threads, for three epochs and over resumes."""
    with load(root, **options) as loader:
        expected = [copied(batch) for _ in range(3) for batch in loader]
    with load_elsewhere(root, **options) as loader:
        received = [copied(batch) for batch in islice(loader, 2)]
        state = loader.state_dict()
    with load(root, **options) as loader:  # a state is the same wherever it is saved
        loader.load_state_dict(state)
        received += [copied(batch) for batch in islice(loader, 1)]
        state = loader.state_dict()
    with load_elsewhere(root, **options) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        received += [copied(batch) for _ in range(3) for batch in loader]
        assert loader.stats().storage.spans > 0
    assert unlike(expected, received[: len(expected)]) == []


def copied(batch: Any) -> Any:
    """A batch on memory of its own, so that the loader's is free."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return {name: copied(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(map(copied, batch))
    return type(batch)(*map(copied, batch)) if isinstance(batch, tuple) else batch


def keys(batches: Iterable[Any]) -> list[str]:
    """Return the samples' keys, in order."""
    return [key for batch in batches for key in batch["sample_key"]]


def unlike(actual: Any, expected: Any, name: str = "") -> list[str]:
    """Name the parts in which two values differ; tensors are the same with equal dtype, shape and bytes."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        return [] if _bytes(actual) == _bytes(expected) else [name]
    if isinstance(actual, np.ndarray) and isinstance(expected, np.ndarray):
        return unlike(torch.from_numpy(actual), torch.from_numpy(expected), name)
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        return [
            part for key in actual for part in unlike(actual[key], expected[key], f"{name}.{key}")
        ]
    if (
        isinstance(actual, (list, tuple))
        and type(actual) is type(expected)
        and len(actual) == len(expected)
    ):
        return [
            part
            for index, pair in enumerate(zip(actual, expected, strict=True))
            for part in unlike(*pair, f"{name}[{index}]")
        ]
    return [] if type(actual) is type(expected) and actual == expected else [name]


def _bytes(tensor: torch.Tensor) -> tuple[str, torch.Size, bytes]:
    flat = tensor.cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return (
        str(tensor.dtype),
        tensor.shape,
        flat.view(torch.uint8).numpy().tobytes(),
    )


def rows(batch: dict[str, Any]) -> list[Any]:
    """Return what a batch holds of each sample, in both its views where there are two, to be compared by ``==``."""
    num_rows = len(batch["global_index"])
    num_samples = num_rows // 2 if "view" in batch else num_rows
    return [
        [
            {name: _row(value, row, num_rows) for name, value in batch.items()}
            for row in range(sample, num_rows, num_samples)
        ]
        for sample in range(num_samples)
    ]


def _row(value: Any, row: int, num_rows: int) -> Any:
    if isinstance(value, Packed):
        frames = (len(value.offsets) - 1) // num_rows
        offsets = value.offsets[row * frames : (row + 1) * frames + 1]
        return (offsets - offsets[0]).tolist(), _bytes(value.values[offsets[0] : offsets[-1]])
    if isinstance(value, dict):
        return {name: _row(entry, row, num_rows) for name, entry in value.items()}
    return _plain(value[row]) if isinstance(value, (list, torch.Tensor)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _bytes(value) if isinstance(value, torch.Tensor) else value


def check_one_sequence(
    make: Callable[..., DataLoader],
    global_batch: int = 4,
    sizes: tuple[int, ...] = (1, 2, 4),
) -> None:
    """Check that ranks, threads and restarts change nothing.

    ``make(batch_size, rank=, size=, num_workers=)`` makes the loader of a rank. Worlds of all ``sizes`` give the same
    samples, to the byte, over an epoch and the first steps of the next. A state that is saved after any step, the same
    on all ranks, continues on a world of another size with exactly the rest.
    """

    def run(size: int, count: int, state: Any = None) -> tuple[list[Any], list[Any]]:
        """Return the samples of each step over all ranks, and the states before the first step and after each."""
        rank_steps = []
        states = []
        for rank in range(size):
            with make(
                global_batch // size,
                rank=rank,
                size=size,
                num_workers=1 + rank % 3,
            ) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                mine = []
                said = [loader.state_dict()]
                while len(mine) < count:
                    for batch in loader:
                        mine.append(rows(batch))
                        said.append(loader.state_dict())
                        if len(mine) == count:
                            break
            rank_steps.append(mine)
            states.append(said)
        assert all(rank_state == states[0] for rank_state in states)
        return [
            [row for part in parts for row in part] for parts in zip(*rank_steps, strict=True)
        ], states[0]

    with make(global_batch, rank=0, size=1, num_workers=3) as loader:
        count = len(loader) + 2
    runs = {size: run(size, count) for size in sizes}
    expected_sequence, _ = runs[sizes[0]]
    for size, (sequence, _) in runs.items():
        assert sequence == expected_sequence, f"{size} ranks"
    for done in range(count):
        before = sizes[done % len(sizes)]
        after = sizes[(done + 1) % len(sizes)]
        state = runs[before][1][done]
        state = pickle.loads(pickle.dumps(state)) if done % 2 else json.loads(json.dumps(state))
        assert run(after, count - done, state)[0] == expected_sequence[done:], (
            f"from {before} to {after} ranks at step {done}"
        )
