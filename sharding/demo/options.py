"""The options of a synthetic world, and the report of what was made."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import CheckedSettings, flag

MOST_WORKERS: Final = 8  # by default: each takes some 600 MB
CAPTURES_OF_A_WORKER: Final = 100
"""A process for fewer of them takes longer to start than it saves."""
VERSION: Final = "v1.0-mini"
"""The folder of the tables."""


def _number(description: str, low: int, high: int) -> Meta:
    words = {"must be": f"an integer from {low} to {high}"}
    return Meta(
        ge=low,
        le=high,
        description=description,
        extra=words,
    )


def _parse_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError("it must be WIDTHxHEIGHT in pixels, such as 1600x900")
    return int(parts[0]), int(parts[1])


class SynthOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of a synthetic world; all but ``workers`` decide its bytes."""

    seed: Annotated[int, _number("random seed of the world", 0, 2**63 - 1)] = 0
    clips: Annotated[int, _number("number of clips", 1, 999)] = 4
    frames: Annotated[int, _number("number of keyframes in each clip, 2 a second", 1, 400)] = 10
    size: Annotated[
        tuple[
            Annotated[int, Meta(ge=64, le=4096)],
            Annotated[int, Meta(ge=36, le=2304)],
        ],
        Meta(extra={"must be": "(width, height) in pixels, from (64, 36) to (4096, 2304)"}),
        flag(
            "size of the images in pixels (default: 1600x900)",
            parse=_parse_size,
            metavar="WxH",
        ),
    ] = (1600, 900)
    lidar_sweeps: Annotated[int, _number("number of lidar sweeps between two keyframes", 0, 9)] = 1
    tokens: Annotated[
        bool,
        flag("write what is around the vehicle in each keyframe as tokens, for a decoder"),
    ] = False
    workers: Annotated[
        int,
        _number(
            f"number of workers (default: one for {CAPTURES_OF_A_WORKER} captures, at most one per "
            f"usable CPU and {MOST_WORKERS})",
            0,
            999,
        ),
    ] = 0


class SynthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The world in a folder; ``reused``: an earlier call had made it completely.

    ``num_bytes`` is that of all files but ``synth.json``, which holds this report.
    """

    folder: str
    world: SynthOptions
    num_images: int
    num_sweeps: int
    num_annotations: int
    num_bytes: int
    reused: bool

    def as_text(self) -> str:
        """Return the report as one line."""
        world = self.world
        return (
            f"{'already complete' if self.reused else 'wrote'}: {self.folder}, {VERSION}, "
            f"seed {world.seed}: {world.clips} clips of {world.frames} keyframes, "
            f"{self.num_images:,} images, {self.num_sweeps:,} lidar sweeps, "
            f"{self.num_annotations:,} boxes, {self.num_bytes / 1e6:,.1f} MB\n"
        )
