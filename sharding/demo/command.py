"""`fuelrail synth`: arguments, progress, result. What it needs is imported when it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

_MOST_WORKERS: Final = 8  # by default: each takes some 600 MB


def configure_synth(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Render a synthetic street world with true calibration, poses, boxes and lidar, as nuScenes v1.0 tables. "
        "The same options give the same bytes."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the world: new or empty")
    parser.add_argument("--seed", type=int, default=0, help="the world (default 0)")
    parser.add_argument("--clips", type=int, default=4, metavar="N", help="drive segments (default 4)")
    parser.add_argument(
        "--frames", type=int, default=10, metavar="N", help="keyframes of each clip, 2 a second (default 10)"
    )
    parser.add_argument(
        "--version", default="v1.0-mini", metavar="FOLDER", help="folder of the tables (default %(default)s)"
    )
    parser.add_argument(
        "--size", default="1600x900", metavar="WxH", help="of the images in pixels (default %(default)s)"
    )
    parser.add_argument(
        "--lidar-sweeps", type=int, default=1, metavar="N", help="lidar sweeps between two keyframes (default 1)"
    )
    parser.add_argument(
        "--camera-sweeps",
        type=int,
        default=0,
        metavar="N",
        help="images of each camera between two keyframes (default 0)",
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default: one for each core, 8 at most)"
    )


def run_synth(arguments: argparse.Namespace) -> int:
    """Make the world, or say that it is there already."""
    from fuelrail.sharding.demo.build import build
    from fuelrail.sharding.demo.world import WorldSpec

    if arguments.workers < 0:
        raise ConfigError(f"--workers: got {arguments.workers}, must be 1 or more, or 0 for one for each core")
    width_px, height_px = _parse_size(arguments.size)
    spec = WorldSpec(
        seed=arguments.seed,
        num_clips=arguments.clips,
        num_frames=arguments.frames,
        version=arguments.version,
        num_lidar_sweeps=arguments.lidar_sweeps,
        num_camera_sweeps=arguments.camera_sweeps,
        width_px=width_px,
        height_px=height_px,
    )
    num_workers = arguments.workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    with _bar() as advance:
        built = build(spec, arguments.out, num_workers, advance)
    sys.stdout.write(
        f"{'already there' if built.was_there else 'wrote'}: {arguments.out}, {spec.version}, seed {spec.seed}: "
        f"{built.num_clips} clips of {built.num_frames} keyframes, {built.num_images:,} images, "
        f"{built.num_sweeps:,} lidar sweeps, {built.num_annotations:,} boxes, {built.num_bytes / 1e6:,.1f} MB\n"
    )
    return 0


def _parse_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--size: got '{text}', must be WIDTHxHEIGHT in pixels, such as 1600x900")
    return int(parts[0]), int(parts[1])


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("rendering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("captures"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
