"""One capture of a clip made into files: pictures, lidar sweep, and what was seen of each object."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fuelrail.sharding.demo.channels import (
    RADAR,
    TOKENS,
    radar_points,
    top_view_tokens,
    write_channel,
    write_image_channels,
)
from fuelrail.sharding.demo.lidar import cast, points_in_box
from fuelrail.sharding.demo.picture.camera import render
from fuelrail.sharding.demo.rig import LIDAR_CHANNEL
from fuelrail.sharding.demo.solids import Solid, solids_near, visible_shares
from fuelrail.sharding.demo.world import Capture, Clip, WorldSpec, log_facts, make_clip, sample_token

# As in nuScenes' own files, by their quantisation tables.
JPEG_QUALITY: Final = 80
JPEG_SUBSAMPLING: Final = "420"


class Sighting(NamedTuple):
    """What a keyframe has of an actor: lidar points in its box, visible share of its silhouettes in the images."""

    actor: int
    num_lidar_points: int
    visible_share: float


class Recorded(NamedTuple):
    """What came of a capture: the bytes it wrote, and sightings where it is a keyframe."""

    capture: Capture
    num_bytes: int
    sightings: tuple[Sighting, ...]


def filename(spec: WorldSpec, clip: Clip, channel: str, timestamp_us: int, *, is_key_frame: bool) -> str:
    """Path of a sensor file below the dataroot, as nuScenes names them."""
    suffix = "pcd.bin" if channel == LIDAR_CHANNEL else "jpg"
    logfile = log_facts(spec, clip.log)["logfile"]
    return f"{'samples' if is_key_frame else 'sweeps'}/{channel}/{logfile}__{channel}__{timestamp_us}.{suffix}"


def record(spec: WorldSpec, capture: Capture, root: Path) -> Recorded:
    """Write the files of a capture below ``root``, whose folders exist. A pure function of spec and capture."""
    clip = make_clip(spec, capture.clip)
    solids = solids_near(clip, capture.timestamp_us)
    num_bytes = 0
    sample = sample_token(spec, capture.clip, capture.frame)
    if spec.channels and capture.is_key_frame:
        num_bytes += write_channel(root, RADAR, sample, radar_points(clip, solids, capture.timestamp_us))
    if spec.tokens and capture.is_key_frame:
        num_bytes += write_channel(root, TOKENS, sample, top_view_tokens(clip, solids, capture.timestamp_us))
    if capture.cameras:
        for camera in clip.rig.cameras:
            exposure_us = capture.timestamp_us - camera.lead_us
            with_channels = spec.channels and capture.is_key_frame
            image, owners = render(clip, camera, solids, exposure_us, owners=with_channels)
            if with_channels:
                cam2global = clip.ego2global(exposure_us) @ camera.cam2ego
                num_bytes += write_image_channels(root, camera, sample, cam2global, solids, owners)
            encoded = simplejpeg.encode_jpeg(
                image, quality=JPEG_QUALITY, colorspace="RGB", colorsubsampling=JPEG_SUBSAMPLING
            )
            name = filename(spec, clip, camera.channel, exposure_us, is_key_frame=capture.is_key_frame)
            num_bytes += (root / name).write_bytes(encoded)
    sightings: tuple[Sighting, ...] = ()
    if capture.lidar:
        points = cast(clip, solids, capture.timestamp_us)
        name = filename(spec, clip, LIDAR_CHANNEL, capture.timestamp_us, is_key_frame=capture.is_key_frame)
        num_bytes += (root / name).write_bytes(points.astype("<f4").tobytes())
        if capture.is_key_frame:
            sightings = _sightings(clip, solids, capture.timestamp_us, points)
    return Recorded(capture, num_bytes, sightings)


def _sightings(clip: Clip, solids: list[Solid], capture_us: int, points: NDArray[np.float32]) -> tuple[Sighting, ...]:
    lidar2global = clip.ego2global(capture_us) @ clip.rig.lidar.lidar2ego
    places = points[:, :3].astype(np.float64) @ lidar2global[:3, :3].T + lidar2global[:3, 3]
    shares = visible_shares(clip, solids, capture_us)
    return tuple(
        Sighting(
            solid.actor,
            points_in_box(places, solid.centre, solid.yaw_rad, solid.size_lwh),
            round(shares.get(solid.actor, 0.0), 6),
        )
        for solid in solids
        if solid.actor >= 0
    )
