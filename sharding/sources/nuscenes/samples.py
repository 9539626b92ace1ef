"""Metadata of a nuScenes sample, its row of attributes, and the id of its clip."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.sample.schema import SCHEMA, CameraMeta, Meta
from fuelrail.sharding.sources.adapter.classes import count_column
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US
from fuelrail.sharding.sources.shared.scan_table import frame_key

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import Boxes
    from fuelrail.sharding.sources.nuscenes.geometry import Frame
    from fuelrail.sharding.sources.nuscenes.tables import Log, Scene
    from fuelrail.sharding.sources.shared.scan_table import Reference

_TYPES: Final[dict[str, type]] = {
    "clip_name": str,
    "log_id": str,
    "vehicle": str,
    "location": str,
    "description": str,
    "night": bool,
    "rain": bool,
    "num_cameras": int,
    "num_boxes": int,
}


def attribute_types(classes: Sequence[str]) -> dict[str, type]:
    """The columns of attributes, with a count for each class."""
    return {**_TYPES, **dict.fromkeys(map(count_column, classes), int)}


_CONDITIONS: Final = {
    "night": re.compile(r"\bnight(?:[ -]?time)?\b"),
    "rain": re.compile(r"(?<!\bno )(?<!\bwithout )\brain(?:s|y|ing|fall)?\b"),
}
_NUSCENES_LOCATIONS: Final = frozenset(
    ("boston-seaport", "singapore-hollandvillage", "singapore-onenorth", "singapore-queenstown")
)
"""Locations of nuScenes: the devkit has maps of these only."""
_SYNTHETIC: Final = "synth-"
"""Begins the locations of `fuelrail synth`, whose descriptions are made as nuScenes' are."""

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


class SceneFacts:
    """Facts that all samples of a scene share."""

    def __init__(
        self,
        scene: Scene,
        log: Log,
        clip_id: str,
        kept: NDArray[np.bool_],
        cameras: Sequence[str],
        classes: Sequence[str],
    ) -> None:
        """``kept``: which of the scene's frames are in the dataset; ``cameras``: the names of the rig's cameras.

        ``classes``: those that boxes are counted by.
        """
        conditions = _conditions(scene, log)
        self._cameras = [name.lower() for name in cameras]
        self._has_frame = np.pad(kept, 1)
        self._counts = [count_column(name) for name in classes]
        self._common: dict[str, Any] = {
            "schema": SCHEMA,
            "dataset": "",
            "clip_id": clip_id,
            "clip_token": scene.token,
            "clip_name": scene.name,
            "log_id": log.logfile or log.token,
            "vehicle": log.vehicle,
            "num_frames": len(kept),
            "is_key_frame": True,
            "split": "",
            "tags": {"location": log.location, "description": scene.description, **conditions},
        }
        self._attributes = {
            "clip_name": scene.name,
            "log_id": log.logfile or log.token,
            "vehicle": log.vehicle,
            "location": log.location,
            "description": scene.description,
            "night": conditions.get("night"),
            "rain": conditions.get("rain"),
        }

    def meta(self, number: int, frame: Frame, members: Sequence[Reference]) -> Meta:
        """The metadata of frame ``number``; dataset, split and license are filled in when shards are written.

        Frames keep their numbers in the scene: a frame next to a dropped one has no neighbour on that side.
        """
        clip_id = self._common["clip_id"]
        cameras: dict[str, CameraMeta] = {}
        latest_us = 0
        for name, row in zip(self._cameras, frame.sensors, strict=False):
            if row is not None:
                latest_us = max(latest_us, abs(row.timestamp_us - frame.timestamp_us))
                if row.width > 0 and row.height > 0:  # a masked image may have no size
                    cameras[name] = CameraMeta(
                        token=row.token,
                        timestamp_ns=row.timestamp_us * NS_PER_US,
                        width=row.width,
                        height=row.height,
                        dist_model=row.dist_model,
                    )
        present = {member.name.partition(".")[0] for member in members}
        return Meta(
            key=frame_key(clip_id, number),
            sample_token=frame.token,
            frame_idx=number,
            prev_key=frame_key(clip_id, number - 1) if self._has_frame[number] else None,
            next_key=frame_key(clip_id, number + 1) if self._has_frame[number + 2] else None,
            timestamp_ns=frame.timestamp_us * NS_PER_US,
            cameras=cameras,
            stats={
                "max_sync_offset_ns": latest_us * NS_PER_US,
                **({} if frame.boxes is None else {"num_boxes": len(frame.boxes.label)}),
            },
            sync={"policy": "keyframe", "dropped": [name for name in self._cameras if name not in present]},
            **self._common,
        )

    def attributes(self, num_cameras: int, boxes: Boxes | None) -> dict[str, Any]:
        """The row of ``attributes.parquet`` of a frame; what is not known is null."""
        names = self._counts
        counts: Sequence[int | None] = [None] * len(names)
        if boxes is not None:
            counts = np.bincount(boxes.label + 1, minlength=len(names) + 1).tolist()[1 : len(names) + 1]
        return {
            **self._attributes,
            "num_cameras": num_cameras,
            "num_boxes": None if boxes is None else len(boxes.label),
            **dict(zip(names, counts, strict=True)),
        }


def _conditions(scene: Scene, log: Log) -> dict[str, bool]:
    """Night and rain as far as the free-text description states them: what is not known is left out.

    nuScenes' own descriptions name both wherever they occur, so there a description without the word is a denial. Those
    of others deny nothing by silence, and an empty one (nuScenes' test split) says nothing at all.
    """
    text = scene.description.lower()
    stated = {word: bool(pattern.search(text)) for word, pattern in _CONDITIONS.items()}
    names_all = text and (log.location in _NUSCENES_LOCATIONS or log.location.startswith(_SYNTHETIC))
    return stated if names_all else {word: True for word, is_stated in stated.items() if is_stated}
