"""The options of logs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fuelrail.sharding.sources.adapter.channels import SIGNALS_AS_SERIES
from fuelrail.sharding.sources.shared.video import VideoSettings


class LogSettings(VideoSettings, frozen=True, kw_only=True):
    """Options of logs."""

    missing_camera: Annotated[
        Literal["error", "mask", "drop"],
        Meta(
            description="a frame without the image of a camera: drop (leave the frame out); mask "
            "(leave the member out, mark it invalid); error"
        ),
    ] = "drop"
    cameras: Annotated[
        tuple[str, ...] | dict[str, str],
        Meta(
            description="channel to topic: {cam_front: /front/image}; empty: all topics of "
            "pictures; or a list of the channels to keep of these"
        ),
    ] = ()  # type: ignore[assignment]  # a list, as of other sources, or more
    lidars: Annotated[
        dict[str, str],
        Meta(description="channel to topic; empty: all topics of point clouds"),
    ] = msgspec.field(default_factory=dict)
    radars: Annotated[
        dict[str, str],
        Meta(
            description="channel to topic of point clouds: {radar_front: /radar} stores the "
            "channel radar_front, with all columns of the cloud"
        ),
    ] = msgspec.field(default_factory=dict)
    camera_infos: Annotated[
        dict[str, str],
        Meta(
            description="channel to topic of its calibration; else camera_info beside the pictures"
        ),
    ] = msgspec.field(default_factory=dict)
    levels: Annotated[
        dict[str, tuple[int, int]],
        Meta(
            description=(
                "channel to the values that become black and white, of raw pictures of 16 bits: "
                "[0, 4095]"
            )
        ),
    ] = msgspec.field(default_factory=dict)
    reference: Annotated[
        str,
        Meta(description="channel that makes the frames; empty: the first lidar, else camera"),
    ] = ""
    rate: Annotated[
        float,
        Meta(
            ge=0,
            description="frames a second at most; 0: each message of the reference",
        ),
    ] = 0.0
    offsets_ms: Annotated[
        dict[str, float],
        Meta(
            description=(
                "channel to its delay after the reference [ms]; others are estimated and reported"
            )
        ),
    ] = msgspec.field(default_factory=dict)
    tolerance_ms: Annotated[
        float,
        Meta(gt=0, description="how far from its delay a message may be [ms]"),
    ] = 25.0
    ego_frame: Annotated[str, Meta(description="frame of the vehicle")] = "base_link"
    global_frame: Annotated[
        str,
        Meta(description="frame of the world; empty: map, else odom, else the uppermost"),
    ] = ""
    poses: Annotated[str, Meta(description="tf; a topic of Odometry or PoseStamped; or none")] = (
        "tf"
    )
    gps: Annotated[
        str,
        Meta(
            description=(
                "topic of NavSatFix for the attributes latitude, longitude, altitude_m; empty: "
                "the first"
            )
        ),
    ] = ""
    signals: Annotated[
        dict[str, str],
        Meta(
            description="name to topic of messages of numbers, such as Imu, Odometry, "
            "TwistStamped: {imu: /imu/data} stores the channel can_imu"
        ),
    ] = msgspec.field(default_factory=dict)
    series: Annotated[bool, Meta(description=SIGNALS_AS_SERIES)] = False
    boxes2d: Annotated[
        dict[str, str],
        Meta(
            description="camera to topic of boxes in its pictures (Detection2DArray, "
            "ImageAnnotations): {cam_front: /front/detections} stores the channel "
            "boxes2d_cam_front"
        ),
    ] = msgspec.field(default_factory=dict)
    clock: Annotated[
        Literal["header", "log_time"],
        Meta(description="times of the messages, or of the recording"),
    ] = "header"
    clock_jumps: Annotated[
        Literal["error", "drop"],
        Meta(
            description="a clock set back by more than max_gap_s: error; drop (leave messages out "
            "until it is past where it was, counted)"
        ),
    ] = "error"
    clip_seconds: Annotated[float, Meta(ge=0, description="length of clips [s]; 0: whole logs")] = (
        20.0
    )
    max_gap_s: Annotated[
        float,
        Meta(
            gt=0,
            description="gap that ends a clip, and that poses do not reach across",
        ),
    ] = 0.5
    damaged: Annotated[
        Literal["error", "skip"],
        Meta(description="a chunk of MCAP with a wrong checksum: error; skip (left out, counted)"),
    ] = "error"
    checksums: Annotated[
        bool,
        Meta(description="check uncompressed chunks of MCAP also, which reads whole files"),
    ] = False
