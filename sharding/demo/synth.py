"""``fuelrail.synth``: the options of a synthetic world, and the function that makes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.workers import check_main_guard
from fuelrail.pipeline.settings import Settings, convert, flag
from fuelrail.pipeline.storage.filesystem import is_url, shown_url

_MOST_WORKERS: Final = 8  # by default: each takes some 600 MB


def _parse_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError("it must be WIDTHxHEIGHT in pixels, such as 1600x900")
    return int(parts[0]), int(parts[1])


class SynthOptions(Settings, frozen=True, kw_only=True):
    """Options of a synthetic world."""

    seed: Annotated[int, flag("random seed of the world")] = 0
    clips: Annotated[int, flag("number of clips")] = 4
    frames: Annotated[int, flag("number of keyframes in each clip, 2 a second")] = 10
    version: Annotated[str, flag("version folder of the tables", metavar="FOLDER")] = "v1.0-mini"
    size: Annotated[
        tuple[int, int], flag("size of the images in pixels (default: 1600x900)", parse=_parse_size, metavar="WxH")
    ] = (1600, 900)
    lidar_sweeps: Annotated[int, flag("number of lidar sweeps between two keyframes")] = 1
    camera_sweeps: Annotated[int, flag("number of images of each camera between two keyframes (default: 0)")] = 0
    channels: Annotated[bool, flag("write radar points, and instance masks and depth of each camera, too")] = False
    occupancy: Annotated[
        bool, flag("write an occupancy grid for each keyframe, voxelised from lidar sweeps and boxes")
    ] = False
    tokens: Annotated[bool, flag("write what is around the vehicle in each keyframe as tokens, for a decoder")] = False
    workers: Annotated[
        int, Meta(ge=0), flag(f"number of processes (default: one per core, at most {_MOST_WORKERS})")
    ] = 0


class SynthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The world in the output folder; ``reused``: an earlier call had made it completely."""

    folder: str
    version: str
    seed: int
    num_clips: int
    num_frames: int
    num_images: int
    num_sweeps: int
    num_annotations: int
    num_bytes: int
    reused: bool

    def as_text(self) -> str:
        """Return the report as one line."""
        return (
            f"{'already complete' if self.reused else 'wrote'}: {self.folder}, {self.version}, seed {self.seed}: "
            f"{self.num_clips} clips of {self.num_frames} keyframes, {self.num_images:,} images, "
            f"{self.num_sweeps:,} lidar sweeps, {self.num_annotations:,} boxes, {self.num_bytes / 1e6:,.1f} MB\n"
        )


def synth(
    out: str | os.PathLike[str],
    world: SynthOptions | None = None,
    *,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    **options: Any,  # noqa: ANN401 - checked by the conversion
) -> SynthReport:
    """Render a synthetic street world as nuScenes v1.0 tables; the same options give the same bytes.

    Options are the fields of :class:`SynthOptions` as keywords (``seed=7, clips=2``) or as one struct. ``progress`` is
    called with the number of captures done and in all. Raises ConfigError for options, DatasetExistsError where ``out``
    holds something else, DatasetError where it cannot be written.
    """
    check_main_guard()
    from fuelrail.sharding.demo.build import build
    from fuelrail.sharding.demo.world import WorldSpec

    if world is not None and options:
        raise ConfigError(f"give the options as a struct or as keywords, not both; got {', '.join(options)} too")
    chosen = convert(options, SynthOptions, "options") if world is None else world
    spec = WorldSpec(
        seed=chosen.seed,
        num_clips=chosen.clips,
        num_frames=chosen.frames,
        version=chosen.version,
        num_lidar_sweeps=chosen.lidar_sweeps,
        num_camera_sweeps=chosen.camera_sweeps,
        width_px=chosen.size[0],
        height_px=chosen.size[1],
        channels=chosen.channels,
        occupancy=chosen.occupancy,
        tokens=chosen.tokens,
    )
    if is_url(os.fspath(out)):
        raise ConfigError(f"the output of synth must be a folder of this machine, got '{shown_url(os.fspath(out))}'")
    num_workers = chosen.workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    built = build(spec, Path(out), num_workers, progress)
    return SynthReport(
        folder=os.fspath(out),
        version=spec.version,
        seed=spec.seed,
        num_clips=built.num_clips,
        num_frames=built.num_frames,
        num_images=built.num_images,
        num_sweeps=built.num_sweeps,
        num_annotations=built.num_annotations,
        num_bytes=built.num_bytes,
        reused=built.was_there,
    )
