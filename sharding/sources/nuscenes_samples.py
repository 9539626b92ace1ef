"""What a nuScenes sample says about itself: its metadata, its row of attributes, its clip's id."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.schema import SCHEMA, CameraMeta, Meta
from fuelrail.sharding.sources.nuscenes_boxes import CLASSES
from fuelrail.sharding.sources.nuscenes_keyframes import NS_PER_US
from fuelrail.sharding.table import frame_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.schema import Boxes
    from fuelrail.sharding.sources.nuscenes_keyframes import Keyframes
    from fuelrail.sharding.sources.nuscenes_tables import Log, Scene
    from fuelrail.sharding.table import Reference

ATTRIBUTE_TYPES: Final[dict[str, type]] = {
    "clip_name": str,
    "log_id": str,
    "vehicle": str,
    "location": str,
    "description": str,
    "night": bool,
    "rain": bool,
    "num_cameras": int,
    "num_boxes": int,
    **{f"num_{name}": int for name in CLASSES},
}

_CLIP_ID: Final = re.compile(r"[a-z0-9_-]{1,64}\Z")


def clip_ids(scenes: Sequence[Scene]) -> list[str]:
    """A legal, unique id for each scene: its name where that is one, else a slug with a hash of its token."""
    count: dict[str, int] = {}
    for scene in scenes:
        count[scene.name] = count.get(scene.name, 0) + 1
    ids = []
    for scene in scenes:
        if _CLIP_ID.match(scene.name) and not scene.name.startswith("__") and count[scene.name] == 1:
            ids.append(scene.name)
        else:
            slug = re.sub(r"[^a-z0-9_-]+", "-", scene.name.lower())[:48].strip("-_")
            ids.append(f"{slug or 'clip'}-{hashlib.sha256(scene.token.encode()).hexdigest()[:8]}")
    return ids


def sample_meta(
    keyframes: Keyframes,
    scene_row: int,
    clip_id: str,
    sample: int,
    frame: int,
    num_frames: int,
    members: Sequence[Reference],
    boxes: Boxes | None,
) -> Meta:
    """The sample's metadata; dataset, split and license are filled in when shards are written."""
    scene, log = keyframes.scene[scene_row], keyframes.log[keyframes.scene_log[scene_row]]
    timestamp_us = int(keyframes.timestamp_us[sample])
    cameras: dict[str, CameraMeta] = {}
    offsets_us = [0]
    for column, name in enumerate(keyframes.cameras):
        if (row := int(keyframes.sensor_rows[sample, column])) >= 0:
            width, height = keyframes.image_wh[row].tolist()
            exposed_us = int(keyframes.data_timestamp_us[row])
            offsets_us.append(abs(exposed_us - timestamp_us))
            cameras[name.lower()] = CameraMeta(
                token=keyframes.data_tokens[row],
                timestamp_ns=exposed_us * NS_PER_US,
                width=width,
                height=height,
            )
    present = {member.name.partition(".")[0] for member in members}
    return Meta(
        schema=SCHEMA,
        dataset="",
        key=frame_key(clip_id, frame),
        sample_token=keyframes.sample_tokens[sample],
        clip_id=clip_id,
        clip_token=scene.token,
        clip_name=scene.name,
        log_id=log.logfile or log.token,
        vehicle=log.vehicle,
        frame_idx=frame,
        num_frames=num_frames,
        prev_key=frame_key(clip_id, frame - 1) if frame else None,
        next_key=frame_key(clip_id, frame + 1) if frame + 1 < num_frames else None,
        timestamp_ns=timestamp_us * NS_PER_US,
        is_key_frame=True,
        split="",
        cameras=cameras,
        tags={"location": log.location, "description": scene.description, **_conditions(scene)},
        stats={
            "max_sync_offset_ns": max(offsets_us) * NS_PER_US,
            **({} if boxes is None else {"num_boxes": len(boxes.label)}),
        },
        sync={
            "policy": "keyframe",
            "dropped": [name.lower() for name in keyframes.cameras if name.lower() not in present],
        },
    )


def sample_attributes(scene: Scene, log: Log, num_cameras: int, boxes: Boxes | None) -> dict[str, Any]:
    """The sample's row of ``attributes.parquet``; what is not known is null."""
    counts = None if boxes is None else np.bincount(boxes.label[boxes.label >= 0], minlength=len(CLASSES)).tolist()
    conditions = _conditions(scene)
    return {
        "clip_name": scene.name,
        "log_id": log.logfile or log.token,
        "vehicle": log.vehicle,
        "location": log.location,
        "description": scene.description,
        "night": conditions.get("night"),
        "rain": conditions.get("rain"),
        "num_cameras": num_cameras,
        "num_boxes": None if boxes is None else len(boxes.label),
        **{f"num_{name}": None if counts is None else counts[i] for i, name in enumerate(CLASSES)},
    }


def _conditions(scene: Scene) -> dict[str, bool]:
    """Night and rain as the free-text description has them; nothing where there is none (test split)."""
    text = scene.description.lower()
    return {word: re.search(rf"\b{word}", text) is not None for word in ("night", "rain")} if text else {}
