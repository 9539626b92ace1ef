"""Dataroots in nuScenes' tables that are not nuScenes: T4, Lyft, home-made ones; and what the report says was left."""

from __future__ import annotations

import json

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg

from fuelrail import ImageAugment, Undistort
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.manifest import load_manifest
from fuelrail.pipeline.order.select import Filter
from fuelrail.pipeline.sample.schema import (
    Boxes,
    Geometry,
    decode_arrays,
    decode_meta,
)
from fuelrail.pipeline.transforms.lens import read_lens
from fuelrail.sharding.planning.recipe import parse_images
from fuelrail.sharding.sources.nuscenes.boxes import CLASSES
from fuelrail.sharding.sources.shared.scan_report import ScanReport
from fuelrail.sharding.verify.dataset import verify
from support.loaders import make_loader
from support.nuscenes_sweeps import add_sweeps
from support.nuscenes_tables import build_nuscenes, token
from support.pictures import psnr_db
from support.sharding import scanned, shard_nuscenes
from support.shared_data import shared_data

TWO = ("CAM_FRONT", "CAM_BACK")
RADTAN = [-0.35, 0.12, 0.001, -0.002, 0.03]
RATIONAL = [0.1, -0.2, 0.001, 0.002, 0.03, 0.4, -0.05, 0.006]
T4_LEVELS = {"none": 1, "partial": 2, "most": 3, "full": 4, "unavailable": -1}


@pytest.fixture
def nuscenes(tmp_path):
    return build_nuscenes(tmp_path / "root", {"a": 4, "b": 3}, cameras=TWO, num_tracks=4)


def scan(nuscenes, tmp_path, **options):
    return scanned("nuscenes", nuscenes.root, tmp_path, **options)


def boxes_of(table, number=0):
    return decode_arrays(table.row(number).boxes, Boxes)


def data_rows(nuscenes, channel, frames=None):
    """Keyframe rows of ``sample_data`` of one channel, in the order of the frames."""
    rows = [
        row
        for row in nuscenes.tables["sample_data"]
        if row["is_key_frame"] and f"/{channel}/" in row["filename"]
    ]
    return rows if frames is None else [rows[frame] for frame in frames]


@pytest.mark.parametrize(
    ("lidar", "radar", "stored", "valid"),
    [
        (-1, 0, (-1, 0), 1),  # Lyft
        (0, -1, (0, -1), 0),  # most count lidar points alone
        (-1, -1, (-1, -1), 1),
        (-7, None, (-1, -1), 1),
        ("left out", "left out", (-1, -1), 1),
        (0, 0, (0, 0), 0),
        (3, 0, (3, 0), 1),
        (0, 2, (0, 2), 1),
    ],
)
def test_nuscenes_boxes_are_valid_unless_no_point_is_known(
    nuscenes, tmp_path, lidar, radar, stored, valid
):
    for row in nuscenes.tables["sample_annotation"]:
        for column, number in (
            ("num_lidar_pts", lidar),
            ("num_radar_pts", radar),
        ):
            row[column] = number
            if number == "left out":
                del row[column]
    nuscenes.write("sample_annotation")
    _, info, table = scan(nuscenes, tmp_path)
    boxes = boxes_of(table)
    assert boxes.valid.tolist() == [valid] * 4
    assert {
        *zip(
            boxes.num_lidar_pts.tolist(),
            boxes.num_radar_pts.tolist(),
            strict=True,
        )
    } == {stored}
    assert info.report.unknown_points == (4 * 7 if stored[0] < 0 else 0)


def test_nuscenes_a_count_that_int32_does_not_hold_is_refused(nuscenes, tmp_path):
    nuscenes.tables["sample_annotation"][0]["num_lidar_pts"] = 2**31
    nuscenes.write("sample_annotation")
    with pytest.raises(SourceError, match=r"sample_annotation\.json.*num_lidar_pts"):
        scan(nuscenes, tmp_path)


LYFT = (
    "car",
    "pedestrian",
    "other_vehicle",
    "truck",
    "bus",
    "bicycle",
    "motorcycle",
    "emergency_vehicle",
    "animal",
)


def test_nuscenes_lyft_categories(tmp_path):
    nuscenes = build_nuscenes(tmp_path / "root", {"a": 2}, cameras=TWO, num_tracks=9)
    nuscenes.tables["category"] = [
        {"token": token("category", name), "name": name} for name in LYFT
    ]
    for number, instance in enumerate(nuscenes.tables["instance"]):
        instance["category_token"] = token("category", LYFT[number])
    nuscenes.write("category", "instance")
    _, info, table = scan(nuscenes, tmp_path)
    expected = [CLASSES.index(name) if name in CLASSES else -1 for name in LYFT]
    assert boxes_of(table).label.tolist() == expected
    assert expected.count(-1) == 3
    assert info.report.unmapped == {"other_vehicle": 2, "emergency_vehicle": 2}
    assert info.report.outside_classes == {"animal": 2}
    assert info.report.boxes == 18
    attributes = next(table.attribute_parts()).to_pylist()[0]
    assert [
        attributes[f"num_{name}"] for name in ("car", "pedestrian", "truck", "bus", "bicycle")
    ] == [1] * 5


@pytest.mark.real
def test_nuscenes_nuscenes_own_categories_are_none_unmapped(tmp_path):
    oracle = pytest.importorskip(
        "nuscenes.eval.detection.utils",
        reason="nuscenes-devkit is not installed",
    )
    folder = shared_data("nuscenes-mini") / "v1.0-mini"
    names = [record["name"] for record in json.loads((folder / "category.json").read_text())]
    nuscenes = build_nuscenes(tmp_path / "root", {"a": 1}, cameras=TWO, num_tracks=len(names))
    nuscenes.tables["category"] = [
        {"token": token("category", name), "name": name} for name in names
    ]
    for number, instance in enumerate(nuscenes.tables["instance"]):
        instance["category_token"] = token("category", names[number])
    nuscenes.write("category", "instance")
    _, info, table = scan(nuscenes, tmp_path)
    detection_names = [oracle.category_to_detection_name(name) for name in names]
    assert boxes_of(table).label.tolist() == [
        -1 if name is None else CLASSES.index(name) for name in detection_names
    ]
    assert info.report.unmapped == {}
    assert info.report.outside_classes == {
        name: 1
        for name, detection_name in zip(names, detection_names, strict=True)
        if detection_name is None
    }


@pytest.mark.parametrize(
    ("stated", "model"),
    [
        (RADTAN[:4], "opencv_radtan"),
        (RADTAN, "opencv_radtan"),
        (RATIONAL, "opencv_rational"),
        ([*RATIONAL, 0.01, 0.02, 0.03, 0.04], "opencv_rational"),
        ([*RATIONAL, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06], "opencv_rational"),
        ([0.0] * 5, "none"),
        ([0.0] * 7, "none"),
        ([], "none"),
        (None, "none"),
    ],
)
def test_nuscenes_camera_distortion(nuscenes, tmp_path, stated, model):
    nuscenes.tables["calibrated_sensor"][0]["camera_distortion"] = stated
    nuscenes.write("calibrated_sensor")
    _, info, table = scan(nuscenes, tmp_path)
    row = table.row(0)
    meta = decode_meta(row.meta)
    geometry = decode_arrays(row.geometry, Geometry)
    assert meta.cameras["cam_front"].dist_model == model
    assert meta.cameras["cam_back"].dist_model == "none"
    assert np.isnan(geometry.dist[1]).all()
    lens = read_lens(model, geometry.dist[0], geometry.intrinsics[0])
    if model == "none":
        assert lens is None
        assert np.isnan(geometry.dist[0]).all()
        assert info.report.distorted == {}
    else:
        assert lens.coefficients == tuple(stated)
        assert info.report.distorted == {"cam_front": 7}


def test_nuscenes_the_loader_rectifies_what_the_table_states(tmp_path):
    ramp = (
        np.linspace(0, 6, 96)[None, :, None] + np.linspace(0, 4, 64)[:, None, None] + np.arange(3)
    )
    picture = (127 + 100 * np.sin(ramp)).astype(np.uint8)
    images = [simplejpeg.encode_jpeg(picture, 98, "RGB", "444")]
    nuscenes = build_nuscenes(
        tmp_path / "root", {"a": 2}, cameras=TWO, size=(96, 64), images=images
    )
    camera = np.array([[90.0, 0, 47.5], [0, 90, 31.5], [0, 0, 1]])
    nuscenes.tables["calibrated_sensor"][0].update(
        camera_intrinsic=camera.tolist(), camera_distortion=RADTAN
    )
    nuscenes.write("calibrated_sensor")
    shard_nuscenes(nuscenes.root, tmp_path / "out")
    stored = simplejpeg.decode_jpeg(images[0])
    expected = cv2.undistort(stored, camera, np.array(RADTAN)).transpose(2, 0, 1)
    image = ImageAugment(height=64, width=96, resize="stretch")
    with make_loader(
        tmp_path / "out", 2, image=image, undistort=Undistort(), num_workers=1
    ) as loader:
        images_of_batch = next(iter(loader))["img"].numpy()
    where = np.zeros((64, 96), bool)
    where[8:-8, 12:-12] = True
    assert (
        psnr_db(images_of_batch[0, 0], expected, where)
        > 40
        > psnr_db(stored.transpose(2, 0, 1), expected, where)
    )
    assert (
        psnr_db(images_of_batch[0, 1], stored.transpose(2, 0, 1), where) > 40
    )  # the other camera is a pinhole


@pytest.mark.parametrize("length", [1, 3, 6, 7, 13, 15, 1000])
def test_nuscenes_a_length_that_no_lens_has_is_refused(nuscenes, tmp_path, length):
    nuscenes.tables["calibrated_sensor"][1]["camera_distortion"] = [0.1] * length
    nuscenes.write("calibrated_sensor")
    says = rf"{token('calibrated', 'CAM_BACK')}' has {length} values in camera_distortion; allowed are 0 \(none\), 4 \("
    with pytest.raises(SourceError, match=says):
        scan(nuscenes, tmp_path)


def test_nuscenes_data_that_is_not_valid_is_masked(nuscenes, tmp_path):
    add_sweeps(nuscenes, 2)
    for row in (
        *data_rows(nuscenes, "CAM_BACK", [1, 2]),
        *data_rows(nuscenes, "LIDAR_TOP", [1]),
    ):
        row["is_valid"] = False
    (nuscenes.root / data_rows(nuscenes, "CAM_BACK")[1]["filename"]).unlink()  # nobody looks for it
    earlier = [
        row
        for row in nuscenes.tables["sample_data"]
        if row["token"] == token("sweep", last_token(nuscenes, 3), 1)
    ]
    earlier[0]["is_valid"] = False
    nuscenes.write("sample_data")
    _, info, table = scan(nuscenes, tmp_path, sweeps=2)
    assert info.report.masked == {
        "cam_back": {"marked as not valid": 2},
        "lidar_top": {"marked as not valid": 1},
    }
    row = table.row(1)
    assert decode_arrays(row.geometry, Geometry).cam_valid.tolist() == [1, 0]
    assert [member.name for member in row.members] == ["cam_front.jpg"]
    assert decode_meta(row.meta).sync["dropped"] == ["cam_back"]
    sweeps = [
        member.ref
        for member in table.row(3).members
        if member.name == "lidar_top_sweeps.safetensors"
    ]
    assert earlier[0]["filename"] not in sweeps[0]


def last_token(nuscenes, frame):
    return data_rows(nuscenes, "LIDAR_TOP", [frame])[0]["token"]


def test_nuscenes_data_that_is_not_valid_may_have_no_size(nuscenes, tmp_path):
    data_rows(nuscenes, "CAM_BACK")[0].update(is_valid=False, width=0, height=0)
    nuscenes.write("sample_data")
    _, _, table = scan(nuscenes, tmp_path)
    row = table.row(0)
    assert decode_arrays(row.geometry, Geometry).img_wh.tolist() == [
        [48, 32],
        [-1, -1],
    ]
    assert list(decode_meta(row.meta).cameras) == ["cam_front"]
    shard_nuscenes(nuscenes.root, tmp_path / "out", images=parse_images("resize=0.5"))
    assert verify(tmp_path / "out", deep=True, num_threads=1).faults == []


def test_nuscenes_visibility_levels_of_t4(tmp_path):
    nuscenes = build_nuscenes(tmp_path / "root", {"a": 2}, cameras=TWO, num_tracks=6)
    nuscenes.tables["visibility"] = [
        {"token": name, "level": name, "description": ""} for name in T4_LEVELS
    ]
    names = [*T4_LEVELS, ""]
    for track, name in enumerate(names):
        for frame in range(2):
            annotation_token = token("annotation", "a", track, frame)
            row = next(
                row
                for row in nuscenes.tables["sample_annotation"]
                if row["token"] == annotation_token
            )
            row["visibility_token"] = name
    nuscenes.write("visibility", "sample_annotation")
    _, info, table = scan(nuscenes, tmp_path)
    assert boxes_of(table).visibility.tolist() == [*T4_LEVELS.values(), -1]
    assert info.report.unknown_visibility == {"unavailable": 2, "not stated": 2}


CONDITIONS = {
    "Minimal T4 dataset scene for unit testing": (None, None),
    "derived": (None, None),
    "": (None, None),
    "Night, big street": (True, None),
    "heavy rain, peds": (None, True),
    "Rainy night-time drive": (True, True),
    "no rain, nightclub, rainbow": (None, None),
}


@pytest.mark.parametrize("text", CONDITIONS)
def test_nuscenes_night_and_rain_are_unknown_unless_stated(nuscenes, tmp_path, text):
    nuscenes.tables["scene"][0]["description"] = text
    nuscenes.write("scene")
    _, _, table = scan(nuscenes, tmp_path)
    attributes = next(table.attribute_parts()).to_pylist()[0]
    assert (attributes["night"], attributes["rain"]) == CONDITIONS[text]
    stated = {"night": CONDITIONS[text][0], "rain": CONDITIONS[text][1]}
    tags = decode_meta(table.row(0).meta).tags
    assert {name: tags.get(name) for name in stated} == stated
    # For nuScenes itself, whose descriptions name both wherever they occur, silence is a denial.
    expected = tuple(bool(value) for value in CONDITIONS[text]) if text else (None, None)
    for location in (
        "boston-seaport",
        "singapore-onenorth",
        "singapore-queenstown",
        "singapore-hollandvillage",
        "synth-city",
        "boston-seaport-2",
    ):
        for log in nuscenes.tables["log"]:
            log["location"] = location
        nuscenes.write("log")
        _, _, table = scan(nuscenes, tmp_path)
        attributes = next(table.attribute_parts()).to_pylist()[0]
        conditions = (attributes["night"], attributes["rain"])
        assert conditions == (CONDITIONS[text] if location == "boston-seaport-2" else expected), (
            location
        )


def test_nuscenes_an_unknown_condition_is_selected_neither_way(nuscenes, tmp_path):
    nuscenes.tables["scene"][0]["description"] = "derived"
    nuscenes.tables["scene"][1]["description"] = "Night"
    nuscenes.write("scene")
    shard_nuscenes(nuscenes.root, tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "attributes.parquet")
    assert table.column("night").null_count == 4
    chosen = {
        text: len(Filter(text, table.column_names).select(table, len(table)))
        for text in (
            "night",
            "not night",
            "night is None",
            "night or num_boxes > 0",
        )
    }
    assert chosen == {
        "night": 3,
        "not night": 0,
        "night is None": 4,
        "night or num_boxes > 0": 7,
    }


def test_nuscenes_a_sample_without_any_image_is_dropped(nuscenes, tmp_path):
    for channel in TWO:
        for row in data_rows(nuscenes, channel, [2, 4, 5, 6]):  # one of clip a, all of clip b
            (nuscenes.root / row["filename"]).unlink()
    with pytest.raises(SourceError, match="missing_camera=mask"):
        scan(nuscenes, tmp_path)
    _, info, table = scan(nuscenes, tmp_path, missing_camera="mask")
    assert info.report.dropped_samples == {"no camera image (no file)": 4}
    assert (info.report.samples, len(table), info.num_samples) == (3, 3, 3)
    assert info.report.boxes == 12
    assert info.report.masked == {}
    assert [clip.clip_id for clip in info.clips] == ["a"]
    metas = [decode_meta(table.row(number).meta) for number in range(3)]
    assert [(meta.key, meta.prev_key, meta.next_key, meta.num_frames) for meta in metas] == [
        ("a-000000", None, "a-000001", 4),
        ("a-000001", "a-000000", None, 4),
        ("a-000003", None, None, 4),
    ]
    outcome = shard_nuscenes(nuscenes.root, tmp_path / "out", missing_camera="mask")
    assert outcome.manifest.num_samples == 3
    assert verify(tmp_path / "out", deep=True, num_threads=1).faults == []


def test_nuscenes_a_sample_of_images_marked_as_not_valid_is_dropped(nuscenes, tmp_path):
    for row in (
        *data_rows(nuscenes, "CAM_FRONT", [0, 1]),
        *data_rows(nuscenes, "CAM_BACK", [0]),
    ):
        row["is_valid"] = False
    nuscenes.write("sample_data")
    _, info, table = scan(nuscenes, tmp_path)
    assert info.report.dropped_samples == {"no camera image": 1}
    assert info.report.masked == {"cam_front": {"marked as not valid": 1}}
    assert decode_meta(table.row(0).meta).key == "a-000001"
    assert decode_meta(table.row(0).meta).prev_key is None


def test_nuscenes_a_source_without_any_image_is_refused(nuscenes, tmp_path):
    for row in nuscenes.tables["sample_data"]:
        row["is_valid"] = False
    nuscenes.write("sample_data")
    with pytest.raises(
        SourceError,
        match=r"no frame of the nuscenes source .* is kept: no camera image 7",
    ):
        scan(nuscenes, tmp_path)


def spoil_tables(nuscenes):
    """Break a little of everything that the report counts."""
    nuscenes.tables["category"][3]["name"] = "other\x1b]0;x\x07vehicle"
    nuscenes.tables["visibility"][1]["level"] = "unavailable"
    nuscenes.tables["sample_annotation"][0]["num_lidar_pts"] = -1
    nuscenes.tables["calibrated_sensor"][0]["camera_distortion"] = RADTAN
    data_rows(nuscenes, "CAM_BACK")[1]["is_valid"] = False
    for channel in TWO:
        data_rows(nuscenes, channel)[5]["is_valid"] = False
    nuscenes.write()


@pytest.mark.costly
def test_nuscenes_the_scan_report_is_printed_and_in_the_manifest(nuscenes, tmp_path, capsys):
    spoil_tables(nuscenes)
    arguments = [
        "shard",
        f"nuscenes:{nuscenes.root}",
        str(tmp_path / "out"),
        "--workers",
        "1",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1:] == [
        "scan: kept 6 of 7 samples, 24 boxes",
        "  dropped samples: no camera image 1",
        "  absent sensor members: cam_back, marked as not valid 1",
        "  largest time offsets from the sample [ms]: cam_back 14.0, cam_front 7.0",
        "  images with lens distortion (undistort=True rectifies them): cam_front 6",
        r"  unmapped categories, boxes have label -1: 'other\x1b]0;x\x07vehicle' 6",
        "  unknown visibility levels, boxes have visibility -1: not stated 6, unavailable 6",
        "  boxes with an unknown number of points, valid is 1: 1",
    ]
    manifest = load_manifest(tmp_path / "out")
    report = manifest.provenance["scan"]
    assert report["dropped_samples"] == {"no camera image": 1}
    assert report["unmapped"] == {nuscenes.tables["category"][3]["name"]: 6}
    assert main([*arguments, "--json"]) == 0  # the finished dataset again
    scanned = json.loads(capsys.readouterr().out.splitlines()[0])
    assert scanned == {
        "event": "scanned",
        "clips": 2,
        "samples": 6,
        "report": report,
    }


def test_nuscenes_boxes_without_any_class_are_said(nuscenes, tmp_path):
    for category in nuscenes.tables["category"]:
        category["name"] = f"Voiture {category['name']}"
    nuscenes.write("category")
    with pytest.raises(
        SourceError,
        match=r"none of the 28 boxes has a class.*Voiture vehicle\.car 7.*classes=source",
    ):
        scan(nuscenes, tmp_path)
    _, info, _ = scan(nuscenes, tmp_path, classes="source")
    assert info.classes == [category["name"] for category in nuscenes.tables["category"]]
    assert not info.report.unmapped
    names = {category["name"]: None for category in nuscenes.tables["category"]}
    names["Voiture vehicle.car"] = "auto"
    (tmp_path / "map.yaml").write_text(
        "".join(f"{name}: {value or 'null'}\n" for name, value in names.items())
    )
    _, info, _ = scan(nuscenes, tmp_path, classes=str(tmp_path / "map.yaml"))
    assert info.classes == ["auto"]
    assert sum(info.report.outside_classes.values()) == 21


def test_a_long_list_in_a_report_is_cut():
    report = ScanReport(
        samples=1,
        unmapped={f"category-{number:02d}" + "x" * 90: number for number in range(20)},
    )
    line = report.lines()[-1]
    assert line.endswith(", and 8 more names")
    assert len(line) < 1200
    assert "category-19" in line
    assert "category-07" not in line
    assert len(report.builtins()["unmapped"]) == 20
    *_, first, last = ScanReport(
        samples=1, noted={"t" * 90 + f"{number:02d}": 1 for number in range(20)}
    ).lines()
    assert (first, last) == (
        f"  noted: {'t' * 90}11: 1",
        "  noted: 8 more, in provenance.scan of the manifest",
    )


def test_dangling_links_of_a_cut_out_set_are_errors_or_cut(nuscenes, tmp_path):
    """The first sample of a scene, a track and a row of sample_data's sample are not there; the rest is kept."""
    tables = nuscenes.tables
    gone = tables["sample"].pop(1)["token"]
    track = tables["instance"].pop(0)["token"]
    num_track_boxes = sum(
        row["instance_token"] == track and row["sample_token"] != gone
        for row in tables["sample_annotation"]
    )
    num_boxes = (
        sum(row["sample_token"] != gone for row in tables["sample_annotation"]) - num_track_boxes
    )
    num_data = sum(
        row["sample_token"] == gone and row["is_key_frame"] for row in tables["sample_data"]
    )
    nuscenes.write("sample", "instance")
    with pytest.raises(SourceError, match=gone):
        scan(nuscenes, tmp_path)
    _, info, table = scan(nuscenes, tmp_path, dangling_links="cut")
    assert [clip.num_samples for clip in info.clips] == [3, 3]
    assert info.report.boxes == num_boxes
    counts = info.report.cut_links
    assert counts["sample.next"] == counts["sample.prev"] == 1
    assert counts["sample_data.sample_token"] <= num_data
    assert counts["sample_annotation.instance_token"] == num_track_boxes
    assert "cut_links" in info.report.builtins()
    assert any("cut: " in line for line in info.report.lines())
    metas = [decode_meta(table.row(number).meta) for number in range(3)]
    assert [meta.frame_idx for meta in metas] == sorted(meta.frame_idx for meta in metas)
    assert (
        "cut_links"
        not in scan(
            build_nuscenes(tmp_path / "whole", {"a": 2}, cameras=TWO), tmp_path
        ).info.report.builtins()
    )
