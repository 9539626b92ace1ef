"""One capture of a clip made into files: pictures, lidar sweep, tokens, and what was seen of
each object.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.sharding.demo.lidar import cast, points_in_box
from fuelrail.sharding.demo.picture import render, visible_shares
from fuelrail.sharding.demo.rig import LIDAR_CHANNEL
from fuelrail.sharding.demo.world import (
    Capture,
    SynthClip,
    log_facts,
    make_clip,
    token,
)
from fuelrail.sharding.sources.nuscenes.extras.groups import channel_file

if TYPE_CHECKING:
    from fuelrail.sharding.demo.options import SynthOptions
    from fuelrail.sharding.demo.shapes import Solid

_CELLS: Final = 32
_CELL_M: Final = 3.2
_START: Final = 63
_KINDS: Final = (
    "vehicle.",
    "human.",
    "movable_object.",
    "static_object.",
    "animal",
)
TOKENS: Final = Channel(
    name="tokens",
    kind="tokens",
    field="tokens.npy",
    law=Law("fixed"),
    dtype="uint16",
    axes=("token",),
    shape=(1 + _CELLS**2,),
    vocabulary=Vocabulary("top-view", 64),
    description="63, then the cells of 3.2 m around the vehicle, the nearest first: 0: free; else "
    "the kind of object whose centre is in it (from 1: vehicle, human, movable, static, animal) "
    "and, times 6, its heading in ego (0 to 7)",
)


class Sighting(NamedTuple):
    """What a keyframe has of an actor: lidar points in its box, visible share of its silhouettes
    in the images.
    """

    actor: int
    num_lidar_points: int
    visible_share: float


def filename(
    world: SynthOptions,
    clip: SynthClip,
    channel: str,
    timestamp_us: int,
    *,
    is_key_frame: bool,
) -> str:
    """Return the path of a sensor file below the dataroot, as nuScenes names them."""
    suffix = "pcd.bin" if channel == LIDAR_CHANNEL else "jpg"
    logfile = log_facts(world, clip.log)["logfile"]
    folder = "samples" if is_key_frame else "sweeps"
    return f"{folder}/{channel}/{logfile}__{channel}__{timestamp_us}.{suffix}"


def record(
    world: SynthOptions,
    root: Path,
    capture: Capture,
) -> tuple[Capture, list[Sighting]]:
    """Write the files of a capture below ``root``, whose folders exist; return what a keyframe
    shows of each actor.

    The files are a pure function of world and capture.
    """
    cv2.setNumThreads(1)  # pieces are too small to share out
    clip = make_clip(world, capture.clip)
    solids = clip.solids(capture.timestamp_us)
    if world.tokens and capture.is_key_frame:
        tokens = KINDS[TOKENS.kind].encode(
            top_view_tokens(clip, solids, capture.timestamp_us), TOKENS
        )
        sample = token(world.seed, "sample", capture.clip, capture.frame)
        (root / channel_file(TOKENS, sample)).write_bytes(tokens)
    if capture.is_key_frame:
        for camera in clip.rig.cameras:
            exposure_us = capture.timestamp_us - camera.lead_us
            image = render(clip, camera, solids, exposure_us)
            # As in nuScenes' own files, by their quantisation tables.
            encoded = simplejpeg.encode_jpeg(
                image,
                quality=80,
                colorspace="RGB",
                colorsubsampling="420",
            )
            name = filename(
                world,
                clip=clip,
                channel=camera.channel,
                timestamp_us=exposure_us,
                is_key_frame=True,
            )
            (root / name).write_bytes(encoded)
    points = cast(clip, solids, capture.timestamp_us)
    name = filename(
        world,
        clip,
        LIDAR_CHANNEL,
        capture.timestamp_us,
        is_key_frame=capture.is_key_frame,
    )
    (root / name).write_bytes(points.astype("<f4").tobytes())
    if not capture.is_key_frame:
        return capture, []
    lidar2global = clip.ego2global(capture.timestamp_us) @ clip.rig.lidar.sensor2ego
    in_lidar = points[:, :3].astype(np.float64)
    places = move_points(in_lidar, lidar2global)
    by_x = np.argsort(places[:, 0], kind="stable")
    places = places[by_x]
    shares = visible_shares(clip, solids, capture.timestamp_us)
    sightings = []
    for solid in solids:
        if solid.actor < 0:
            continue
        # Only points near in x can be in its box.
        reach = math.hypot(*solid.size_lwh[:2])
        x = solid.centre[0]
        ends = (x - reach, x + reach)
        low, high = np.searchsorted(places[:, 0], ends)
        sightings.append(
            Sighting(
                actor=solid.actor,
                num_lidar_points=points_in_box(places[low:high], solid),
                visible_share=round(shares.get(solid.actor, 0.0), 6),
            )
        )
    return capture, sightings


def top_view_tokens(
    clip: SynthClip,
    solids: list[Solid],
    capture_us: int,
) -> NDArray[np.uint16]:
    """Return the tokens (1025,) that `TOKENS` describes."""
    global2ego = invert_rigid(clip.ego2global(capture_us))
    cells = np.zeros((_CELLS, _CELLS), np.uint16)
    for solid in solids:
        place = global2ego[:3, :3] @ solid.centre + global2ego[:3, 3]
        row, column = (int(coordinate // _CELL_M) + _CELLS // 2 for coordinate in place[:2])
        is_inside = 0 <= row < _CELLS and 0 <= column < _CELLS
        if solid.actor < 0 or not is_inside:
            continue
        category = clip.actors[solid.actor].category
        kind = next(
            number for number, prefix in enumerate(_KINDS, 1) if category.startswith(prefix)
        )
        along = global2ego[:2, :2] @ (
            np.cos(solid.yaw_rad),
            np.sin(solid.yaw_rad),
        )
        turn = np.arctan2(along[1], along[0]) / np.pi
        heading = int(turn * 4) % 8
        cells[row, column] = kind + 6 * heading
    middle = np.arange(_CELLS) - (_CELLS - 1) / 2
    squared_distance = middle[:, None] ** 2 + middle**2
    nearest = np.argsort(squared_distance.ravel(), kind="stable")
    begin = np.array([_START], np.uint16)
    return np.concatenate([begin, cells.ravel()[nearest]])
