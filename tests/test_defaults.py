"""No default changes data without a word: a table of all defaults, and of what each may throw away.

A new default fails this test until it is in the table. Before it gets there, ask what it throws away where nobody has
named it: pixels, rows, labels, randomness. That must be asked for, or be said once: in a report, an error, the batch.
``NOTHING`` throws nothing away. All other texts say what is lost, and where it is said.
"""

from __future__ import annotations

import inspect

import msgspec
import pytest

import fuelrail as fr
from fuelrail.loaders.config import Transforms
from fuelrail.sharding.demo.options import SynthOptions

NOTHING = ""
REPORT = "; the scan's report counts it"
OPT_IN = " of the source is stored on request; `fuelrail sources KIND` lists it"

LOADER = {
    "shuffle": (None, NOTHING),  # the stored order, or what `order` says
    "seed": (0, NOTHING),
    "drop_last": (
        False,
        "repeats samples to fill the last batch; `valid` says which",
    ),
    "num_workers": (None, NOTHING),
    "prefetch_factor": (2, NOTHING),
    "pin_memory": (None, NOTHING),
    "collate_fn": (None, NOTHING),
    "order": (None, NOTHING),
    "split": ("train", "other splits; the loader's text names the split"),
    "mix": (None, NOTHING),
    "window": (None, NOTHING),
    "layers": (None, NOTHING),
    "transforms": (Transforms(), NOTHING),
    "transform": (None, NOTHING),
    "transform_in": ("thread", NOTHING),
    "batch_transform": (None, NOTHING),
    "storage": (fr.StorageOptions(), NOTHING),
    "bad_samples": (fr.BadSamplePolicy(), NOTHING),  # they are errors
    "device": (None, NOTHING),
    "world": (None, NOTHING),
    "trace": (None, NOTHING),
    "check_ranks": (False, NOTHING),
    "ledger": (None, NOTHING),
    "where": (None, NOTHING),
}
TRANSFORMS = {
    "image": (None, NOTHING),  # as stored; an error where sizes differ
    "camera_groups": (None, NOTHING),
    "cameras": (None, NOTHING),
    "pixels": (fr.PixelAugment(), NOTHING),
    "ego": (fr.BevAugment(), NOTHING),
    "points": (
        False,
        "lidar points; `describe()` does not decode them unless they are selected",
    ),
    "select": (
        None,
        "channels and attributes but labels; `describe()` lists what can be selected",
    ),
    "undistort": (None, NOTHING),
    "normalize": (None, NOTHING),
    "decoder": ("auto", NOTHING),
    "box_frame": ("ego", NOTHING),
    "dali": (fr.DaliOptions(), NOTHING),
    "static": (False, NOTHING),
    "two_views": (False, NOTHING),
    "channels": (None, NOTHING),
    "attributes": ((), NOTHING),
}
IMAGE = {
    "train": (False, NOTHING),  # random fields are refused without it
    "resize": (
        "cover",
        "what is beyond the aspect of the size that was asked for",
    ),
    "resize_jitter": (None, NOTHING),
    "resize_range": (None, NOTHING),
    "crop_y": ("bottom", "the upper rows, of a size that was asked for"),
    "crop_bottom": ((0.0, 0.0), NOTHING),
    "crop_x": ("random", "the sides, of a size that was asked for"),
    "flip_prob": (0.0, NOTHING),
    "rotate_deg": ((0.0, 0.0), NOTHING),
    "geometry": ("exact", NOTHING),
    "scope": ("camera", NOTHING),
}
EGO = {
    "train": (False, NOTHING),
    "rotate_deg": ((0.0, 0.0), NOTHING),
    "scale": ((1.0, 1.0), NOTHING),
    "flip_x_prob": (0.0, NOTHING),
    "flip_y_prob": (0.0, NOTHING),
    "translate_std_m": (0.0, NOTHING),
}
PIXELS = {
    "train": (False, NOTHING),
    "brightness": (0.0, NOTHING),
    "contrast": ((1.0, 1.0), NOTHING),
    "saturation": ((1.0, 1.0), NOTHING),
    "hue_deg": (0.0, NOTHING),
    "swap_channels": (False, NOTHING),
    "prob": (0.5, NOTHING),
    "grid_mask_prob": (0.0, NOTHING),
    "grid_mask_ratio": (0.5, NOTHING),
    "grid_mask_fill": ((124, 116, 104), NOTHING),
    "scope": ("camera", NOTHING),
}
POINTS = {
    "choose": ("latest", NOTHING),
    "min_distance_m": (0.0, NOTHING),
    "repeat_if_alone": (False, NOTHING),
}
SYNTH = {
    "seed": (0, NOTHING),
    "clips": (4, NOTHING),
    "frames": (10, NOTHING),
    "size": ((1600, 900), NOTHING),
    "lidar_sweeps": (1, NOTHING),
    "tokens": (False, NOTHING),
    "workers": (0, NOTHING),
}
SETTINGS = {
    Transforms: TRANSFORMS,
    fr.ImageAugment: IMAGE,
    fr.BevAugment: EGO,
    fr.PixelAugment: PIXELS,
    fr.PointSweeps: POINTS,
    SynthOptions: SYNTH,
}

FRAMES = {
    "classes": ("source", NOTHING),
    "missing_camera": ("error", NOTHING),
    "damaged_image": ("error", NOTHING),
    "max_damaged": (
        "0.01",
        NOTHING,
    ),  # of images that `damaged_image` leaves out
    "check_images": ("head", NOTHING),
    "rate": ("0.0", NOTHING),
    "points": ("true", NOTHING),
    "cameras": ("none", NOTHING),
}
VIDEO = {
    "video_quality": (
        "90",
        "what JPEG loses of frames of video; the manifest names the quality",
    ),
    "frames": ("all", NOTHING),
}
LOGS = {
    **FRAMES,
    **VIDEO,
    "missing_camera": ("drop", f"frames without a camera's image{REPORT}"),
    "lidars": ("none", NOTHING),
    "radars": ("none", f"radar{OPT_IN}"),
    "camera_infos": ("none", NOTHING),
    "levels": (
        "none",
        f"pictures of 16 bits, whose range nobody knows{REPORT}",
    ),
    "reference": (
        "none",
        f"messages of sensors between the reference's{REPORT}",
    ),
    "offsets_ms": ("none", NOTHING),
    "tolerance_ms": ("25.0", f"messages that are too far from a frame{REPORT}"),
    "ego_frame": ("base_link", NOTHING),
    "global_frame": ("none", NOTHING),
    "poses": ("tf", NOTHING),
    "gps": ("none", NOTHING),
    "signals": ("none", f"signals{OPT_IN}"),
    "series": ("false", NOTHING),
    "boxes2d": ("none", f"boxes in pictures{OPT_IN}"),
    "clock": ("header", NOTHING),
    "clock_jumps": ("error", NOTHING),
    "clip_seconds": ("20.0", NOTHING),
    "max_gap_s": ("0.5", NOTHING),
    "damaged": ("error", NOTHING),
    "checksums": ("false", NOTHING),
}
SOURCES = {
    "argoverse2": {
        **FRAMES,
        "match": ("forward", f"images between sweeps{REPORT}"),
        "stereo": ("false", f"stereo cameras{OPT_IN}"),
        "boxes": ("true", NOTHING),
        "map": ("false", f"the map{OPT_IN}"),
    },
    "fuelrail": {"points": ("true", NOTHING), "cameras": ("none", NOTHING)},
    "imagefolder": FRAMES,
    "kitti": {
        **FRAMES,
        "gray": ("false", f"gray cameras{OPT_IN}"),
        "oxts": ("false", f"rows of oxts{OPT_IN}"),
    },
    "kitti_object": {
        **FRAMES,
        "right": ("false", f"the right camera{OPT_IN}"),
        "boxes2d": ("false", f"boxes in images{OPT_IN}"),
    },
    "lerobot": {**FRAMES, **VIDEO},
    "manifest": {
        **FRAMES,
        **VIDEO,
        "root": ("none", NOTHING),
        "ignore_zeros": (
            "false",
            NOTHING,
        ),  # a tar that goes on behind its end is an error
        "pixel_origin": ("center", NOTHING),
        "camera_axes": ("optical", NOTHING),
        "boxes_in": ("ego", NOTHING),
        "lidar_columns": ("('x', 'y', 'z', 'intensity')", NOTHING),
        "time_base": ("unix", NOTHING),
        "ego_origin": ("unknown", NOTHING),
        "reference": (
            "none",
            f"files of sensor_data between the reference's{REPORT}",
        ),
        "tolerance_ms": (
            "50.0",
            f"files that are too far from a frame{REPORT}",
        ),
        "max_gap_s": ("0.5", NOTHING),
    },
    "mcap": LOGS,
    "nuscenes": {
        **FRAMES,
        "classes": (
            "nuscenes10",
            "names of other categories: their boxes stay, with label -1",
        ),
        "version": ("none", NOTHING),  # several versions are an error
        "sweeps": ("0", f"lidar sweeps between keyframes{OPT_IN}"),
        "dangling_links": ("error", NOTHING),
        "channels": ("none", f"radar, CAN bus, maps and more{OPT_IN}"),
        "series": ("false", NOTHING),
        "radar_sweeps": ("0", f"radar sweeps between keyframes{OPT_IN}"),
    },
    "openscene": {**FRAMES, "part": ("none", NOTHING)},
    "rosbag1": LOGS,
    "rosbag2": LOGS,
    "t4": {
        **FRAMES,
        "missing_camera": (
            "mask",
            f"images that are marked as not valid{REPORT}",
        ),
        "boxes2d": ("false", f"boxes in images{OPT_IN}"),
        "vehicle_state": ("false", f"signals of the vehicle{OPT_IN}"),
        "series": ("false", NOTHING),
        "map": ("false", f"the map{OPT_IN}"),
        "radars": ("false", f"radars{OPT_IN}"),
    },
    "waymo": {
        **FRAMES,
        "boxes": ("lidar", NOTHING),
        "boxes2d": ("false", f"boxes in images{OPT_IN}"),
        "map": ("false", f"the map{OPT_IN}"),
        "payload_crc": ("false", NOTHING),
    },
    "waymo_v2": {
        **FRAMES,
        "boxes": ("lidar", NOTHING),
        "boxes2d": ("false", f"boxes in images{OPT_IN}"),
    },
    "webdataset": {
        **FRAMES,
        "images": ("none", NOTHING),
        "meta": ("json", NOTHING),
        "timestamp_ns": ("none", NOTHING),
        "intrinsics": ("none", NOTHING),
        "cam2ego": ("none", NOTHING),
        "ego2global": ("none", NOTHING),
        "first_samples": (
            "1000",
            f"members and values that the first samples lack{REPORT}",
        ),
        "ignore_zeros": (
            "false",
            NOTHING,
        ),  # a tar that goes on behind its end is an error
        "gather": ("false", NOTHING),  # a sample in two places is an error
        "clip": ("none", NOTHING),
    },
}


def test_the_loader_has_the_defaults_of_the_table() -> None:
    parameters = inspect.signature(fr.DataLoader.__init__).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }
    assert defaults == {name: default for name, (default, _) in LOADER.items()}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_have_the_defaults_of_the_table(kind) -> None:
    required = {
        fr.ImageAugment: {"height": 8, "width": 8},
        fr.PointSweeps: {"num_sweeps": 1},
    }
    defaults = msgspec.structs.asdict(kind(**required.get(kind, {})))
    for name in required.get(kind, {}):
        del defaults[name]
    assert defaults == {name: default for name, (default, _) in SETTINGS[kind].items()}


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_have_the_defaults_of_the_table(kind) -> None:
    (source,) = fr.sources(kind)
    defaults = {option.name: option.default for option in source.options}
    assert defaults == {name: default for name, (default, _) in SOURCES[kind].items()}


def test_all_sources_of_the_package_are_in_the_table() -> None:
    kinds = {source.kind for source in fr.sources() if source.package == "fuelrail"}
    assert kinds == SOURCES.keys()
