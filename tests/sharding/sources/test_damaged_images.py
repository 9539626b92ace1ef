"""Images that are damaged, of another size, or turned: what a check finds, and what an option leaves out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image as Pillow

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from support.manifest_world import write_wide
from support.nuscenes_tables import build_nuscenes
from support.source_world import make_world, samples_of


class ImageSource(NamedTuple):
    """A source with several files of images; ``file`` is one of them, of the camera ``channel``."""

    kind: str
    root: Path
    file: Path
    channel: str

    def check(self, **options):
        return scan_source(SourceSpec(self.kind, str(self.root), options))

    def shard(self, out: Path, **options):
        return fr.shard(
            f"{self.kind}:{self.root}",
            out,
            options=options,
            workers=1,
            splits={"train": 1.0},
        )


def _with_sizes(root: Path) -> None:
    """State the size of each image, so that a scan needs no head."""
    rows = [json.loads(line) for line in (root / "frames.jsonl").read_text().splitlines()]
    for row in rows:
        for name in [name for name in row if name.startswith("cam.") and name.endswith(".path")]:
            with Pillow.open(root / row[name]) as picture:
                (
                    row[name.replace("path", "width")],
                    row[name.replace("path", "height")],
                ) = picture.size
    (root / "frames.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(params=["manifest", "nuscenes"])
def source(request, tmp_path):
    root = tmp_path / "source"
    if request.param == "nuscenes":
        built = build_nuscenes(root, {"a": 4}, cameras=("CAM_FRONT", "CAM_BACK"), num_tracks=4)
        name = sorted(
            row["filename"]
            for row in built.tables["sample_data"]
            if "/CAM_FRONT/" in row["filename"]
        )[1]
        return ImageSource("nuscenes", root, root / name, "cam_front")
    root.mkdir()
    write_wide(make_world(1, lidars=()), root, "jsonl")
    _with_sizes(root)
    return ImageSource("manifest", root, root / "drive-0/cam_left/2.jpg", "cam_left")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _pointer(file: Path) -> None:
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")


def _smaller(file: Path) -> None:
    with Pillow.open(file) as picture:
        half = picture.resize((picture.width // 2, picture.height // 2))
    half.save(file)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (_cut, "truncated JPEG"),
        (_pointer, "git-LFS pointer"),
        (_smaller, r"\d+ x \d+ px"),
    ],
    ids=["cut", "pointer", "smaller"],
)
def test_a_check_finds_what_the_run_would_stop_at(
    source: ImageSource, tmp_path, spoil: Callable[[Path], None], match: str
):
    source.check()
    spoil(source.file)
    with pytest.raises(SourceError, match=rf"(?s){source.file.name}.*{match}"):
        source.check()
    with pytest.raises(SourceError, match=source.file.name):
        source.shard(tmp_path / "out")


@pytest.mark.parametrize("spoil", [_cut, _pointer], ids=["cut", "pointer"])
def test_damaged_images_are_masked_and_counted(
    source: ImageSource, tmp_path, spoil: Callable[[Path], None]
):
    before = source.check()
    spoil(source.file)
    report = source.shard(tmp_path / "out", damaged_image="mask", max_damaged=0.2)
    assert report.num_samples == before.num_samples
    assert report.scan.damaged == {source.channel: 1}
    assert report.scan.masked == {source.channel: {"damaged": 1}}
    assert f"damaged images: {source.channel} 1" in report.as_text()
    assert fr.verify(tmp_path / "out", deep=True).faults == []
    provenance = fr.open(tmp_path / "out").manifest.provenance
    assert provenance["scan"]["damaged"] == {source.channel: 1}
    assert provenance["recipe"]["source_options"]["damaged_image"] == "mask"
    lacking = [
        sample
        for sample in samples_of(tmp_path / "out").values()
        if source.channel not in sample.images
    ]
    assert len(lacking) == 1
    assert lacking[0].geometry.cam_valid.sum() == len(lacking[0].geometry.cam_valid) - 1
    assert lacking[0].meta.sync["dropped"] == [source.channel]


def test_more_damaged_images_than_allowed_are_an_error(source: ImageSource):
    _cut(source.file)
    with pytest.raises(
        SourceError,
        match=rf"1 of \d+ images are damaged, more .*max_damaged=0.01: .*{source.file.name}",
    ):
        source.check(damaged_image="mask")


def test_pixels_are_decoded_on_demand(source: ImageSource):
    data = bytearray(source.file.read_bytes())
    middle = len(data) * 3 // 4
    data[middle : middle + 60] = bytes(range(190, 250))
    source.file.write_bytes(data)
    source.check()
    with pytest.raises(SourceError, match=rf"{source.file.name}.*damaged JPEG"):
        source.check(check_images="pixels")


def test_options_on_damaged_images_are_no_part_of_a_recipe_without_them(
    source: ImageSource, tmp_path
):
    source.shard(tmp_path / "out")
    recipe = fr.open(tmp_path / "out").manifest.provenance["recipe"]
    assert not [
        name
        for name in recipe["source_options"]
        if "damaged_image" in name or name == "check_images"
    ]


def test_a_frame_with_a_damaged_image_is_dropped(tmp_path):
    write_wide(make_world(1, lidars=()), tmp_path, "jsonl")
    _cut(tmp_path / "drive-0/cam_left/2.jpg")
    spec = SourceSpec("manifest", str(tmp_path), {"damaged_image": "drop", "max_damaged": 0.1})
    report = scan_source(spec).report
    assert (report.samples, report.dropped_samples) == (
        3,
        {"cam_left: damaged": 1},
    )


def test_a_check_applies_the_rules_of_the_writer(tmp_path):
    write_wide(make_world(1, lidars=()), tmp_path, "jsonl")
    rows = [json.loads(line) for line in (tmp_path / "frames.jsonl").read_text().splitlines()]
    for row in rows:
        row["cam.cam_left.dist_model"], row["cam.cam_left.dist"] = (
            "fisheye_of_mine",
            [0.1, 0.2],
        )
    (tmp_path / "frames.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        SourceError,
        match=r"(?s)4 faults.*dist_model of cam_left is 'fisheye_of_mine'; known: none",
    ):
        scan_source(SourceSpec("manifest", str(tmp_path), {}))


def test_turned_images_and_foreign_calibrations_are_reported(
    source: ImageSource,
):
    with Pillow.open(source.file) as picture:
        exif = Pillow.Exif()
        turned = io.BytesIO()
        exif[0x0112] = 6
        picture.save(turned, "jpeg", exif=exif)
    source.file.write_bytes(turned.getvalue())
    if source.kind == "nuscenes":
        table = source.root / "v1.0-mini/calibrated_sensor.json"
        rows = json.loads(table.read_text())
        for row in rows:
            if row["camera_intrinsic"]:
                row["camera_intrinsic"][0][2] = 1e4
        table.write_text(json.dumps(rows))
    else:
        table = source.root / "frames.jsonl"
        rows = [json.loads(line) for line in table.read_text().splitlines()]
        for row in rows:
            row["cam.cam_left.intrinsics"][0][2] = 1e4
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    noted = source.check().report.noted
    (turned_note,) = (name for name in noted if "Exif orientation 6" in name)
    assert turned_note.startswith(source.channel)
    assert noted[turned_note] == 1
    outside = {name: number for name, number in noted.items() if "principal point outside" in name}
    assert outside[next(name for name in outside if name.startswith(f"{source.channel}:"))] == 4


def test_the_form_of_bytes_without_a_name_of_their_own_is_read(tmp_path):
    """Blobs, stored zips: what their names end with says nothing."""
    root = tmp_path / "source"
    root.mkdir()
    write_wide(make_world(1, lidars=()), root, "jsonl", "range")
    table = root / "frames.jsonl"
    (root / "blob.jpg").rename(root / "images.zip")
    table.write_text(table.read_text().replace("blob.jpg#", "images.zip#"))
    with_sizes = [json.loads(line) for line in table.read_text().splitlines()]
    assert ImageSource("manifest", root, root, "").check().num_samples == 4
    size = next(iter(samples_of_shard(root, tmp_path / "out"))).geometry.img_wh[0].tolist()
    for row in with_sizes:
        row["cam.cam_left.width"], row["cam.cam_left.height"] = size
    table.write_text("".join(json.dumps(row) + "\n" for row in with_sizes))
    (sample, *_) = samples_of_shard(root, tmp_path / "again")
    assert np.array_equal(sample.geometry.img_wh[0], size)


def samples_of_shard(root: Path, out: Path):
    ImageSource("manifest", root, root, "").shard(out)
    return list(samples_of(out).values())


def test_images_of_other_forms_are_named_by_their_content(tmp_path):
    write_wide(make_world(1, lidars=()), tmp_path, "jsonl")
    with Pillow.open(tmp_path / "drive-0/cam_left/0.jpg") as picture:
        picture.save(tmp_path / "drive-0/cam_left/0.webp")
    table = tmp_path / "frames.jsonl"
    table.write_text(table.read_text().replace("drive-0/cam_left/0.jpg", "drive-0/cam_left/0.webp"))
    with pytest.raises(
        SourceError,
        match=r"0\.webp': image is WebP; JPEG and PNG are supported",
    ):
        scan_source(SourceSpec("manifest", str(tmp_path), {}))
