"""What this process may use of its host: CPUs and memory, its share of them among the ranks that run there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from fuelrail.loaders.decode.lens import Undistort
from fuelrail.loaders.schedule.bad_samples import ON_ERROR
from fuelrail.loaders.storage import BACKENDS
from fuelrail.pipeline.errors import ConfigError, OrderError
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.windows import FrameWindow, Padding
from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.storage.retry import RetryPolicy
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment
from fuelrail.pipeline.transforms.points import PointSweeps


def _column(levels: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)[:, None, None]


class Normalize(Settings, frozen=True):
    """How ``img`` becomes floating point: (channel - mean) / std, computed in float32, then cast.

    Attributes:
        mean, std: of grey levels 0 to 255, for the channels in ``channel_order``. The defaults are ImageNet's, RGB.
            (BEVDet applies the RGB numbers to BGR channels: ``channel_order="bgr"`` and the defaults.)
        channel_order: ``"rgb"`` or ``"bgr"`` of the result.
        dtype: of the result.
        channels_last: memory format of each image; the shape stays [..., 3, H, W].

    Raises ConfigError for a standard deviation that is not above 0.
    """

    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    channel_order: Literal["rgb", "bgr"] = "rgb"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not all(level > 0.0 for level in self.std):
            raise ConfigError(f"std={list(self.std)} must be three numbers above 0")

    def images(self, img: torch.Tensor) -> torch.Tensor:
        """Return the images uint8 [..., 3, H, W], RGB, as the settings say; on their device."""
        flat = img.flatten(0, -4) if img.ndim > 3 else img[None]
        if self.channel_order == "bgr":
            flat = flat.flip(1)
        values = flat.to(torch.float32)
        values.sub_(_column(self.mean, img.device)).div_(_column(self.std, img.device))
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return values.to(getattr(torch, self.dtype), memory_format=layout).view(img.shape)

    def __call__(self, batch: Any) -> Any:  # noqa: ANN401
        """The batch with its ``img`` normalised. Raises ConfigError for a batch that has none of uint8."""
        img = batch.get("img") if isinstance(batch, dict) else None
        if not isinstance(img, torch.Tensor) or img.dtype != torch.uint8 or img.ndim < 3 or img.shape[-3] != 3:
            kind = f"{img.dtype} {list(img.shape)}" if isinstance(img, torch.Tensor) else type(img).__name__
            raise ConfigError(
                f"normalize needs batches with a uint8 'img' [..., 3, H, W], got {kind}: "
                "let transform and collate_fn keep it, or normalise there"
            )
        return {**batch, "img": self.images(img)}


BoxFrame: TypeAlias = Literal["ego", "lidar"]
"""Frames of reference that boxes can be in."""

_CGROUP: Final = Path("/sys/fs/cgroup")


_MEMORY_SHARE: Final = 0.25


class Budget(Settings, frozen=True):
    """Bounds for ``num_workers="auto"``: what it picks stays within them, whatever it finds.

    ``cpus``: decoding threads at most; None: half as many again as this rank's share of the CPUs that the process may
    use (affinity mask and container quota, over the ranks on this host). ``memory_bytes``: batch buffers at most; None:
    a quarter of this rank's share of the memory that is free when the loader is made.
    """

    cpus: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"budget: {name}={value} must be 1 or more")


DEFAULT_BUDGET: Final = Budget()


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may use: its affinity mask, cut to its container's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken now without swapping: the host's, cut to what is left of the container's limit."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _read(cgroup / "memory.max")
    if limit is not None and limit != "max":
        used = _read(cgroup / "memory.current")
        free = min(free, max(0, int(limit) - int(used or 0)))
    return free


def ranks_on_host() -> int:
    """Ranks that share this host, as the launcher says (LOCAL_WORLD_SIZE), else 1."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def default_num_workers() -> int:
    """Decoding threads for this rank: its share of the CPUs that the process may use."""
    return max(1, available_cpus() // ranks_on_host())


def default_memory_bytes() -> int:
    """Memory for batch buffers of this rank, if nothing else is said."""
    return int(available_memory_bytes() * _MEMORY_SHARE) // ranks_on_host()


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs by the cgroup's bandwidth limit (version 2, then 1), None without one."""
    told = _read(cgroup / "cpu.max")
    if told is not None:
        quota, period = told.split()
    else:
        quota = _read(cgroup / "cpu" / "cpu.cfs_quota_us") or "max"
        period = _read(cgroup / "cpu" / "cpu.cfs_period_us") or "100000"
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # not mounted, or not for us to see: then there is no limit that we could keep to
        return None


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
