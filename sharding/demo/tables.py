"""The thirteen tables of nuScenes v1.0 for a synthetic world.

Layout: https://github.com/nutonomy/nuscenes-devkit/blob/master/docs/schema_nuscenes.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fuelrail.sharding.demo.capture import Sighting, filename
from fuelrail.sharding.demo.rig import (
    CAMERA_CHANNELS,
    LIDAR_CHANNEL,
    RigSensor,
    yaw_quaternion,
)
from fuelrail.sharding.demo.world import (
    SynthClip,
    captures,
    log_facts,
    make_clip,
    token,
)

if TYPE_CHECKING:
    from fuelrail.sharding.demo.options import SynthOptions

Row = dict[str, Any]
Tokens = Callable[..., str]
"""Makes the token of a record of this world from what the record is."""

# nuScenes' names in full, so that tools which look for one of them find it, whether or not the
# world has any.
_CATEGORIES: Final = (
    "human.pedestrian.adult",
    "human.pedestrian.child",
    "human.pedestrian.wheelchair",
    "human.pedestrian.stroller",
    "human.pedestrian.personal_mobility",
    "human.pedestrian.police_officer",
    "human.pedestrian.construction_worker",
    "animal",
    "vehicle.car",
    "vehicle.motorcycle",
    "vehicle.bicycle",
    "vehicle.bus.bendy",
    "vehicle.bus.rigid",
    "vehicle.truck",
    "vehicle.construction",
    "vehicle.emergency.ambulance",
    "vehicle.emergency.police",
    "vehicle.trailer",
    "movable_object.barrier",
    "movable_object.trafficcone",
    "movable_object.pushable_pullable",
    "movable_object.debris",
    "static_object.bicycle_rack",
)
_ATTRIBUTES: Final = (
    "vehicle.moving",
    "vehicle.stopped",
    "vehicle.parked",
    "cycle.with_rider",
    "cycle.without_rider",
    "pedestrian.sitting_lying_down",
    "pedestrian.standing",
    "pedestrian.moving",
)
_FILLED: Final = (
    "instance",
    "calibrated_sensor",
    "ego_pose",
    "log",
    "scene",
    "sample",
    "sample_data",
    "sample_annotation",
)
_VAL_EVERY: Final = 4
_VISIBILITY_LEVELS: Final = ("v0-40", "v40-60", "v60-80", "v80-100")


def visibility_level(share: float) -> str:
    """Return the token of the visibility table for a share of 0 to 1: ``"1"`` to ``"4"``."""
    return str(1 + sum(share > limit for limit in (0.4, 0.6, 0.8)))


def map_filename(world: SynthOptions) -> str:
    """Return the path below the dataroot of the one map mask, which the devkit wants to exist."""
    return f"maps/{token(world.seed, 'map')}.png"


def splits(world: SynthOptions) -> dict[str, list[str]]:
    """Return split name to scene names: every fourth clip, or the last of fewer, is val; a
    single one is train.
    """
    names = [make_clip(world, index).name for index in range(world.clips)]
    val = names[_VAL_EVERY - 1 :: _VAL_EVERY] or names[1:][-1:]
    train = [name for name in names if name not in val]
    return {"train": train, "val": val}


def make_tables(
    world: SynthOptions, sightings: Mapping[tuple[int, int], Sequence[Sighting]]
) -> dict[str, list[Row]]:
    """Return all thirteen tables by name, from what each keyframe (clip, frame) shows of the
    actors.
    """
    tokens: Tokens = partial(token, world.seed)
    clips = [make_clip(world, index) for index in range(world.clips)]
    tables: dict[str, list[Row]] = {
        name: [
            {
                "token": tokens(name, entry_name),
                "name": entry_name,
                "description": f"As nuScenes' {entry_name}.",
            }
            for entry_name in names
        ]
        for name, names in (
            ("category", _CATEGORIES),
            ("attribute", _ATTRIBUTES),
        )
    }
    tables["visibility"] = [
        {
            "token": str(number),
            "level": level,
            "description": "visibility of whole object is between "
            f"{level[1:].replace('-', ' and ')}%",
        }
        for number, level in enumerate(_VISIBILITY_LEVELS, 1)
    ]
    tables["sensor"] = [
        {
            "token": tokens("sensor", name),
            "channel": name,
            "modality": "lidar" if name == LIDAR_CHANNEL else "camera",
        }
        for name in (*CAMERA_CHANNELS, LIDAR_CHANNEL)
    ]
    tables |= {name: [] for name in _FILLED}
    for clip in clips:
        key_times = [
            capture.timestamp_us for capture in captures(world, clip) if capture.is_key_frame
        ]
        samples = [tokens("sample", clip.index, frame) for frame in range(len(key_times))]
        scene = tokens("scene", clip.index)
        tables["scene"].append(
            {
                "token": scene,
                "log_token": tokens("log", clip.log),
                "nbr_samples": len(samples),
                "first_sample_token": samples[0],
                "last_sample_token": samples[-1],
                "name": clip.name,
                "description": clip.description,
            }
        )
        rows: list[Row] = []
        for sample, time in zip(samples, key_times, strict=True):
            rows.append({"token": sample, "timestamp": time, "scene_token": scene})
        tables["sample"] += _chain_rows(rows)
        for sensor in (*clip.rig.cameras, clip.rig.lidar):
            _add_sensor_data(
                world,
                clip=clip,
                sensor=sensor,
                tokens=tokens,
                tables=tables,
            )
        clip_sightings = [sightings[clip.index, frame] for frame in range(world.frames)]
        _annotate_actors(
            clip,
            times=key_times,
            sightings=clip_sightings,
            tokens=tokens,
            tables=tables,
        )
    logs = dict.fromkeys(clip.log for clip in clips)
    tables["log"] = [{"token": tokens("log", log), **log_facts(world, log)} for log in logs]
    tables["map"] = [
        {
            "token": tokens("map"),
            "log_tokens": [row["token"] for row in tables["log"]],
            "category": "semantic_prior",
            "filename": map_filename(world),
        }
    ]
    return tables


def _chain_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, each with the tokens of those before and after it."""
    tokens = ["", *(row["token"] for row in rows), ""]
    return [
        {**row, "prev": tokens[place], "next": tokens[place + 2]} for place, row in enumerate(rows)
    ]


def _add_sensor_data(
    world: SynthOptions,
    clip: SynthClip,
    sensor: RigSensor,
    tokens: Tokens,
    tables: dict[str, list[Row]],
) -> None:
    channel = sensor.channel
    is_lidar = sensor.channel == LIDAR_CHANNEL
    calibrated = tokens("calibrated_sensor", clip.index, channel)
    tables["calibrated_sensor"].append(
        {
            "token": calibrated,
            "sensor_token": tokens("sensor", channel),
            "translation": list(sensor.translation),
            "rotation": list(sensor.rotation),
            "camera_intrinsic": sensor.intrinsics.tolist(),
        }
    )
    rows = []
    for capture in captures(world, clip):
        if not (is_lidar or capture.is_key_frame):
            continue
        time = capture.timestamp_us - sensor.lead_us
        data_token = tokens("sample_data", clip.index, channel, time)
        translation, rotation = clip.ego(time)
        # As in nuScenes, the pose of a file has the file's own token.
        tables["ego_pose"].append(
            {
                "token": data_token,
                "timestamp": time,
                "rotation": list(rotation),
                "translation": list(translation),
            }
        )
        rows.append(
            {
                "token": data_token,
                "sample_token": tokens("sample", clip.index, capture.frame),
                "ego_pose_token": data_token,
                "calibrated_sensor_token": calibrated,
                "timestamp": time,
                "fileformat": "pcd" if is_lidar else "jpg",
                "is_key_frame": capture.is_key_frame,
                "height": sensor.size[1],
                "width": sensor.size[0],
                "filename": filename(
                    world,
                    clip,
                    channel,
                    time,
                    is_key_frame=capture.is_key_frame,
                ),
            }
        )
    tables["sample_data"] += _chain_rows(rows)


def _annotate_actors(
    clip: SynthClip,
    times: list[int],
    sightings: list[Sequence[Sighting]],
    tokens: Tokens,
    tables: dict[str, list[Row]],
) -> None:
    """Annotate each actor from the first to the last keyframe in which the lidar has a point of
    it.
    """
    by_actor: dict[int, dict[int, Sighting]] = defaultdict(dict)
    for frame, frame_sightings in enumerate(sightings):
        for sighting in frame_sightings:
            by_actor[sighting.actor][frame] = sighting
    for number, by_frame in sorted(by_actor.items()):
        with_points = [
            frame for frame, sighting in by_frame.items() if sighting.num_lidar_points > 0
        ]
        if not with_points:
            continue
        actor = clip.actors[number]
        instance = tokens("instance", clip.index, number)
        rows = []
        for frame in range(min(with_points), max(with_points) + 1):
            sighting = by_frame.get(frame, Sighting(number, 0, 0.0))
            centre, yaw = clip.actor_box(actor, times[frame])
            rows.append(
                {
                    "token": tokens("sample_annotation", clip.index, number, frame),
                    "sample_token": tokens("sample", clip.index, frame),
                    "instance_token": instance,
                    "visibility_token": visibility_level(sighting.visible_share),
                    "attribute_tokens": [tokens("attribute", actor.attribute)]
                    if actor.attribute
                    else [],
                    "translation": list(centre),
                    "size": list(actor.size_wlh),
                    "rotation": list(yaw_quaternion(yaw)),
                    "num_lidar_pts": sighting.num_lidar_points,
                    "num_radar_pts": 0,
                }
            )
        tables["sample_annotation"] += _chain_rows(rows)
        tables["instance"].append(
            {
                "token": instance,
                "category_token": tokens("category", actor.category),
                "nbr_annotations": len(rows),
                "first_annotation_token": rows[0]["token"],
                "last_annotation_token": rows[-1]["token"],
            }
        )
