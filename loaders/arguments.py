"""What the loader's arguments may be: each is checked by itself, before anything is opened or computed.

One table feeds both the check and the message. What depends on the dataset, or on several arguments, is checked where
it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from fuelrail.loaders.assemble import BoxFrame
from fuelrail.loaders.budget import Budget
from fuelrail.loaders.normalize import Normalize
from fuelrail.loaders.quarantine import ON_ERROR
from fuelrail.loaders.storage import BACKENDS
from fuelrail.loaders.undistort import Undistort
from fuelrail.pipeline.augment import ImageAugment
from fuelrail.pipeline.bev_augment import BevAugment
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.order import OrderSpec
from fuelrail.pipeline.pixel_augment import PixelAugment
from fuelrail.pipeline.retry import RetryPolicy
from fuelrail.pipeline.sweeps import PointSweeps
from fuelrail.pipeline.windows import FrameWindow, Padding


class _Rule(NamedTuple):
    """What an argument may be: a check, and the same in words."""

    holds: Callable[[Any], bool]
    words: str


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(least: int, *others: object) -> _Rule:
    *some, last = (f"a whole number of {least} or more", *map(repr, others))
    return _Rule(
        lambda value: any(value is other or value == other for other in others) or (_is_int(value) and value >= least),
        f"{', '.join(some)} or {last}" if some else last,
    )


def _settings(kind: type, *, optional: bool = False) -> _Rule:
    none = " or None" if optional else ""
    name = kind.__name__
    article = "an" if name[0] in "AEIOU" else "a"
    return _Rule(
        lambda value: isinstance(value, kind) or (optional and value is None),
        f"{article} {name}{none}; `fuelrail.pipeline.settings.load_yaml(file, {name})` reads one from a file",
    )


def _one_of(*names: str) -> _Rule:
    return _Rule(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}")


def _path(value: object) -> bool:
    return value is None or isinstance(value, (str, os.PathLike))


def _numbers(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and all(map(_is_int, value))


def _ratios(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_int(ratio) and ratio >= 1 for ratio in value.values())


_BOOL: Final = _Rule(lambda value: isinstance(value, bool), "True or False")
_CALLABLE: Final = _Rule(lambda value: value is None or callable(value), "a function or None")
_FOLDER: Final = _Rule(_path, "a path or None")

_RULES: Final[dict[str, _Rule]] = {
    "batch_size": _whole(1),
    "mix": _Rule(
        lambda value: value is None or _ratios(value),
        "a dict of whole numbers of 1 or more, one for each dataset by its name, or None",
    ),
    "split": _Rule(lambda value: isinstance(value, str) and value != "", "a split's name, such as 'train'"),
    "frames": _Rule(
        lambda value: value is None or _numbers(value), "a list of whole numbers, such as [-2, -1, 0], or None"
    ),
    "stride": _whole(1),
    "padding": _one_of(*get_args(Padding)),
    "image": _settings(ImageAugment),
    "pixels": _settings(PixelAugment),
    "bev": _settings(BevAugment),
    "undistort": _settings(Undistort, optional=True),
    "shuffle": _BOOL,
    "seed": _whole(0),
    "order": _settings(OrderSpec, optional=True),
    "drop_last": _BOOL,
    "num_workers": _whole(1, "auto", None),
    "budget": _settings(Budget),
    "prefetch_factor": _whole(1),
    "pin_memory": _Rule(lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "points": _Rule(lambda value: isinstance(value, (bool, PointSweeps)), "True, False or a PointSweeps"),
    "box_frame": _one_of(*get_args(BoxFrame)),
    "decoder": _Rule(lambda value: isinstance(value, str), "a decoder's name, such as 'auto'"),
    "normalize": _settings(Normalize, optional=True),
    "verify": _BOOL,
    "storage": _one_of(*BACKENDS),
    "storage_options": _Rule(lambda value: value is None or isinstance(value, Mapping), "a dict or None"),
    "cache_dir": _FOLDER,
    "cache_size": _Rule(
        lambda value: value is None or isinstance(value, str) or (_is_int(value) and value >= 1),
        "a number of bytes, a text such as '500GB', or None",
    ),
    "look_ahead_bytes": _whole(1, None),
    "retry": _settings(RetryPolicy, optional=True),
    "on_error": _one_of(*ON_ERROR),
    "max_bad": _whole(0),
    "quarantine": _FOLDER,
    "transform": _CALLABLE,
    "collate_fn": _CALLABLE,
    "check_ranks": _BOOL,
    "trace": _CALLABLE,
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first argument that is not what it may be: its name, its value, what is allowed."""
    for name, (holds, words) in _RULES.items():
        if name in given and not holds(given[name]):
            raise ConfigError(f"{name}={_shown(given[name])} must be {words}")


def choose_window(frames: Sequence[int] | None, stride: int, padding: Padding) -> FrameWindow | None:
    """The temporal window of the loader's arguments; raises ConfigError for what is none."""
    if frames is None:
        if (stride, padding) != (1, "repeat_edge"):
            given = f"stride={stride!r}" if stride != 1 else f"padding={padding!r}"
            raise ConfigError(f"{given} means something with frames only, such as frames=[-2, -1, 0]")
        return None
    try:
        return FrameWindow(frames=tuple(map(int, frames)), stride=int(stride), pad=padding)
    except OrderError as error:
        raise ConfigError(f"frames={list(frames)}, stride={stride}: {error}") from error


def _shown(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 200 else f"{said[:200]}..."
