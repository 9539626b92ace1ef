"""The thirteen tables of nuScenes v1.0 for a synthetic world.

Layout: https://github.com/nutonomy/nuscenes-devkit/blob/master/docs/schema_nuscenes.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fuelrail.sharding.demo.capture import Recorded, Sighting, filename
from fuelrail.sharding.demo.rig import CAMERA_CHANNELS, LIDAR_CHANNEL, yaw_quaternion
from fuelrail.sharding.demo.solids import VISIBILITY_LEVELS, visibility_level
from fuelrail.sharding.demo.world import Capture, Clip, WorldSpec, captures, log_facts, make_clip, token

Row = dict[str, Any]

# nuScenes' names in full, so that tools which look for one of them find it, whether or not the world has any.
_CATEGORIES: Final = (
    "human.pedestrian.adult", "human.pedestrian.child", "human.pedestrian.wheelchair", "human.pedestrian.stroller",
    "human.pedestrian.personal_mobility", "human.pedestrian.police_officer", "human.pedestrian.construction_worker",
    "animal", "vehicle.car", "vehicle.motorcycle", "vehicle.bicycle", "vehicle.bus.bendy", "vehicle.bus.rigid",
    "vehicle.truck", "vehicle.construction", "vehicle.emergency.ambulance", "vehicle.emergency.police",
    "vehicle.trailer",
    "movable_object.barrier", "movable_object.trafficcone", "movable_object.pushable_pullable", "movable_object.debris",
    "static_object.bicycle_rack",
)  # fmt: skip
_ATTRIBUTES: Final = {
    "vehicle.moving": "Vehicle is moving.",
    "vehicle.stopped": "Vehicle, with a driver in or near it, stands but has an intent to move.",
    "vehicle.parked": "Vehicle is stationary with no intent to move.",
    "cycle.with_rider": "There is a rider on the bicycle or motorcycle.",
    "cycle.without_rider": "There is no rider on the bicycle or motorcycle.",
    "pedestrian.sitting_lying_down": "The person is sitting or lying down.",
    "pedestrian.standing": "The person is standing.",
    "pedestrian.moving": "The person is moving.",
}
_SENSORS: Final = (*CAMERA_CHANNELS, LIDAR_CHANNEL)
_VAL_EVERY: Final = 4


class _Tokens:
    """Tokens of a world's records."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, *path: object) -> str:
        return token(self._seed, *path)


def map_filename(spec: WorldSpec) -> str:
    """Path below the dataroot of the one map mask, which the devkit wants to exist."""
    return f"maps/{token(spec.seed, 'map')}.png"


def splits(spec: WorldSpec) -> dict[str, list[str]]:
    """Split name to scene names: every fourth clip, or the last of fewer, is val; a single one is train."""
    names = [make_clip(spec, index).name for index in range(spec.num_clips)]
    val = names[_VAL_EVERY - 1 :: _VAL_EVERY] or names[1:][-1:]
    return {"train": [name for name in names if name not in val], "val": val}


def make_tables(spec: WorldSpec, recorded: Iterable[Recorded]) -> dict[str, list[Row]]:
    """All thirteen tables, by name, from what was recorded of each capture (in any order)."""
    tokens = _Tokens(spec.seed)
    sightings = {
        (item.capture.clip, item.capture.frame): item.sightings for item in recorded if item.capture.is_key_frame
    }
    tables: dict[str, list[Row]] = {
        "category": [
            {"token": tokens("category", name), "name": name, "description": f"As nuScenes' {name}."}
            for name in _CATEGORIES
        ],
        "attribute": [
            {"token": tokens("attribute", name), "name": name, "description": text}
            for name, text in _ATTRIBUTES.items()
        ],
        "visibility": [
            {
                "token": str(number),
                "level": level,
                "description": f"visibility of whole object is between {level[1:].replace('-', ' and ')}%",
            }
            for number, level in enumerate(VISIBILITY_LEVELS, 1)
        ],
        "sensor": [
            {
                "token": tokens("sensor", name),
                "channel": name,
                "modality": "lidar" if name == LIDAR_CHANNEL else "camera",
            }
            for name in _SENSORS
        ],
    }
    for name in (
        "instance",
        "calibrated_sensor",
        "ego_pose",
        "log",
        "scene",
        "sample",
        "sample_data",
        "sample_annotation",
    ):
        tables[name] = []
    logs = []
    for index in range(spec.num_clips):
        clip = make_clip(spec, index)
        if clip.log not in logs:
            logs.append(clip.log)
        key_times = _scene(spec, clip, tokens, tables)
        _sensor_data(spec, clip, tokens, tables)
        _annotations(clip, key_times, [sightings[index, frame] for frame in range(spec.num_frames)], tokens, tables)
    tables["log"] = [{"token": tokens("log", log), **log_facts(spec, log)} for log in logs]
    tables["map"] = [
        {
            "token": tokens("map"),
            "log_tokens": [row["token"] for row in tables["log"]],
            "category": "semantic_prior",
            "filename": map_filename(spec),
        }
    ]
    return tables


def _scene(spec: WorldSpec, clip: Clip, tokens: _Tokens, tables: dict[str, list[Row]]) -> list[int]:
    times = [capture.timestamp_us for capture in captures(spec, clip) if capture.is_key_frame]
    samples = [tokens("sample", clip.index, frame) for frame in range(len(times))]
    tables["scene"].append(
        {
            "token": tokens("scene", clip.index),
            "log_token": tokens("log", clip.log),
            "nbr_samples": len(samples),
            "first_sample_token": samples[0],
            "last_sample_token": samples[-1],
            "name": clip.name,
            "description": clip.description,
        }
    )
    rows = [
        {"token": sample, "timestamp": time, "scene_token": tokens("scene", clip.index)}
        for sample, time in zip(samples, times, strict=True)
    ]
    tables["sample"] += _chained(rows)
    return times


def _chained(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with the tokens of those before and after it."""
    tokens = ["", *(row["token"] for row in rows), ""]
    return [{**row, "prev": tokens[place], "next": tokens[place + 2]} for place, row in enumerate(rows)]


def _sensor_data(spec: WorldSpec, clip: Clip, tokens: _Tokens, tables: dict[str, list[Row]]) -> None:
    taken = captures(spec, clip)
    for camera in clip.rig.cameras:
        place = (camera.translation, camera.rotation, camera.intrinsics.tolist())
        size = (camera.width_px, camera.height_px)
        shots = [(capture, capture.timestamp_us - camera.lead_us) for capture in taken if capture.cameras]
        _channel(spec, clip, camera.channel, place, size, shots, tokens, tables)
    lidar = clip.rig.lidar
    sweeps = [(capture, capture.timestamp_us) for capture in taken if capture.lidar]
    _channel(spec, clip, LIDAR_CHANNEL, (lidar.translation, lidar.rotation, []), (0, 0), sweeps, tokens, tables)


def _channel(
    spec: WorldSpec,
    clip: Clip,
    channel: str,
    place: tuple[tuple[float, ...], tuple[float, ...], list[list[float]]],
    size: tuple[int, int],
    shots: list[tuple[Capture, int]],
    tokens: _Tokens,
    tables: dict[str, list[Row]],
) -> None:
    calibrated = tokens("calibrated_sensor", clip.index, channel)
    translation, rotation, intrinsic = place
    tables["calibrated_sensor"].append(
        {
            "token": calibrated,
            "sensor_token": tokens("sensor", channel),
            "translation": list(translation),
            "rotation": list(rotation),
            "camera_intrinsic": intrinsic,
        }
    )
    rows = []
    for capture, time in shots:
        own = tokens("sample_data", clip.index, channel, time)
        ego_translation, ego_rotation = clip.ego(time)
        # As in nuScenes, the pose of a file has the file's own token.
        tables["ego_pose"].append(
            {"token": own, "timestamp": time, "rotation": list(ego_rotation), "translation": list(ego_translation)}
        )
        rows.append(
            {
                "token": own,
                "sample_token": tokens("sample", clip.index, capture.frame),
                "ego_pose_token": own,
                "calibrated_sensor_token": calibrated,
                "timestamp": time,
                "fileformat": "pcd" if channel == LIDAR_CHANNEL else "jpg",
                "is_key_frame": capture.is_key_frame,
                "height": size[1],
                "width": size[0],
                "filename": filename(spec, clip, channel, time, is_key_frame=capture.is_key_frame),
            }
        )
    tables["sample_data"] += _chained(rows)


def _annotations(
    clip: Clip, times: list[int], sightings: list[tuple[Sighting, ...]], tokens: _Tokens, tables: dict[str, list[Row]]
) -> None:
    """An actor is annotated from the first to the last keyframe in which the lidar has a point of it."""
    by_actor: dict[int, dict[int, Sighting]] = defaultdict(dict)
    for frame, found in enumerate(sightings):
        for sighting in found:
            by_actor[sighting.actor][frame] = sighting
    for number, seen in sorted(by_actor.items()):
        with_points = [frame for frame, sighting in seen.items() if sighting.num_lidar_points > 0]
        if not with_points:
            continue
        actor = clip.actors[number]
        instance = tokens("instance", clip.index, number)
        rows = []
        for frame in range(min(with_points), max(with_points) + 1):
            sighting = seen.get(frame, Sighting(number, 0, 0.0))
            centre, yaw = clip.actor_box(actor, times[frame])
            rows.append(
                {
                    "token": tokens("sample_annotation", clip.index, number, frame),
                    "sample_token": tokens("sample", clip.index, frame),
                    "instance_token": instance,
                    "visibility_token": visibility_level(sighting.visible_share),
                    "attribute_tokens": [tokens("attribute", actor.attribute)] if actor.attribute else [],
                    "translation": list(centre),
                    "size": list(actor.size_wlh),
                    "rotation": list(yaw_quaternion(yaw)),
                    "num_lidar_pts": sighting.num_lidar_points,
                    "num_radar_pts": 0,
                }
            )
        tables["sample_annotation"] += _chained(rows)
        tables["instance"].append(
            {
                "token": instance,
                "category_token": tokens("category", actor.category),
                "nbr_annotations": len(rows),
                "first_annotation_token": rows[0]["token"],
                "last_annotation_token": rows[-1]["token"],
            }
        )
