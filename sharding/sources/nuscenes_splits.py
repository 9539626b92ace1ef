"""Which nuScenes scene belongs to which split.

``splits.json`` beside the tables (split name to scene names, as the devkit reads it) comes first; else the official
split of v1.0-trainval, v1.0-mini and v1.0-test, where all scenes are the official ones. The lists are those of the
devkit's ``utils/splits.py``, written as runs of scene numbers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.pipeline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPLITS_FILE: Final = "splits.json"

_VAL_RUNS: Final = (
    (3, 3), (12, 18), (35, 36), (38, 39), (92, 110), (221, 221), (268, 278), (329, 332), (344, 346), (519, 524),
    (552, 565), (625, 627), (629, 630), (632, 638), (770, 771), (775, 775), (777, 778), (780, 784), (794, 800),
    (802, 802), (904, 917), (919, 931), (962, 963), (966, 969), (971, 972), (1059, 1073),
)  # fmt: skip
_VAL: Final = frozenset(number for first, last in _VAL_RUNS for number in range(first, last + 1))
_MINI_TRAIN: Final = frozenset({61, 553, 655, 757, 796, 1077, 1094, 1100})
_MINI_VAL: Final = frozenset({103, 916})
_NUM_SCENES: Final = 1110
_SCENE: Final = re.compile(r"scene-([0-9]{4})\Z")


def source_splits(folder: Path, scenes: Sequence[str]) -> dict[str, list[str]] | None:
    """Split name to scene names for the tables in ``folder``, None where they say nothing and are not official."""
    path = folder / SPLITS_FILE
    if path.is_file():
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceError(f"'{path}' does not map split names to lists of scene names: {error}") from error
    numbers = [int(match.group(1)) if (match := _SCENE.match(name)) else 0 for name in scenes]
    if not all(1 <= number <= _NUM_SCENES for number in numbers):
        return None
    if folder.name == "v1.0-test":
        return {"test": list(scenes)}
    if folder.name == "v1.0-mini":
        if not set(numbers) <= _MINI_TRAIN | _MINI_VAL:
            return None
        val = _MINI_VAL
    elif folder.name == "v1.0-trainval":
        val = _VAL
    else:
        return None
    both: dict[str, list[str]] = {"train": [], "val": []}
    for name, number in zip(scenes, numbers, strict=True):
        both["val" if number in val else "train"].append(name)
    return both
