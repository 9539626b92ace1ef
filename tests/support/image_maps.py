"""Image maps that decoders are tested with, by name: of the pipelines that trainers use, and odd ones; a photograph."""

from __future__ import annotations

import functools
from pathlib import Path

from fuelrail.pipeline.settings import load_yaml
from fuelrail.pipeline.transforms.image import ImageAugment
from fuelrail.pipeline.transforms.image_map import ImageMap
from support.pictures import encode, natural

NUSCENES_WH = (1600, 900)
PRESETS = {
    "bevdet": ImageAugment(
        height=256,
        width=704,
        train=True,
        resize="width",
        resize_jitter=(-0.06, 0.11),
        flip_prob=0.5,
        rotate_deg=(-5.4, 5.4),
    ),
    "streampetr": ImageAugment(
        height=256,
        width=704,
        train=True,
        resize_range=(0.38, 0.55),
        flip_prob=0.5,
        scope="sample",
    ),
    "eval": ImageAugment(height=256, width=704),
    "bevformer-tiny": ImageAugment(height=480, width=800, resize=0.5, crop_y="top", crop_x="left"),
    "stretched": ImageAugment(height=320, width=800, resize="stretch"),
    "padded": ImageAugment(height=512, width=704, resize="contain"),
}
"""Names to image pipelines, those of the trainers and two odd ones."""

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = {
    file.stem: load_yaml(file, ImageAugment) for file in sorted((CONFIGS / "images").glob("*.yaml"))
}
EVERY_PRESET = {
    **PRESETS,
    **SHIPPED,
    **{
        f"{name}, evaluation": preset.evaluation()
        for name, preset in SHIPPED.items()
        if preset.train
    },
}
"""Those that come with the product too, as they train and as they evaluate."""


def preset_map(name: str, sample: int = 3) -> ImageMap:
    return EVERY_PRESET[name].draw([NUSCENES_WH], seed=11, epoch=0, sample=sample)[0]


START = ImageMap.identity(NUSCENES_WH)
SPECIAL_MAPS = {
    "identity": START,
    "half": START.resize(800, 450),
    "quarter": START.resize(400, 225),
    "eighth": START.resize(200, 113),
    "between": START.resize(799, 451).crop(13, 27, 640, 400),
    "sixteenth": START.resize(100, 56),
    "larger": START.crop(600, 300, 301, 203).resize(500, 371),
    "upside-down": START.resize(704, 396).rotate(180.0),
    "flipped": START.resize(705, 397).crop(1, 141, 703, 255).flip(),
    "turned": START.resize(704, 396).crop(0, 140, 704, 256).rotate(17.0),
    "quarter-turn": START.resize(500, 300).rotate(90.0),
    "beyond": START.resize(704, 396).crop(-30, -20, 760, 440),
}
ALL_MAPS = {**SPECIAL_MAPS, **{name: preset_map(name) for name in PRESETS}}


@functools.cache
def photograph(restart_marker_rows: int = 0) -> bytes:
    """A file as cameras write them: of nuScenes' size and subsampling."""
    options = {"restart_marker_rows": restart_marker_rows} if restart_marker_rows else {}
    return encode(natural(*NUSCENES_WH), quality=92, subsampling="4:2:0", **options)
