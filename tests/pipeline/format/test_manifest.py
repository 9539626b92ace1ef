"""The manifest: exact round trip, a fingerprint anybody can compute, and everything that does not add up refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.channels.sensors import BOXES_CHANNEL, CameraEntry, LidarEntry, camera_channel, lidar_channel
from fuelrail.pipeline.errors import DatasetNotReadyError, ManifestError
from fuelrail.pipeline.format.layers import LAYERS
from fuelrail.pipeline.format.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    Ancestor,
    FileEntry,
    Lineage,
    Manifest,
    SplitEntry,
    decode_manifest,
    encode_manifest,
    fingerprint,
    load_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable


FRONT = CameraEntry(channel="cam_front", source_name="CAM_FRONT", sizes=((1600, 900),))
TOP = LidarEntry(channel="lidar_top", source_name="LIDAR_TOP", columns=("x", "y", "z"))


def manifest(**changes: Any) -> Manifest:
    whole = Manifest(
        format=FORMAT, version=FORMAT_VERSION, name="straße", fingerprint="", num_samples=9, num_clips=3, seed=7,
        order_unit="frame",
        channels=(camera_channel(FRONT), lidar_channel(TOP), BOXES_CHANNEL),
        classes=("car",), attributes=(), time_base="unix", ego_origin="rear_axle_ground", license=None,
        compression={"level": 3, "ratio": 0.5},
        splits={
            "train": SplitEntry(first_sample=0, num_samples=7, first_shard=0, num_shards=2, num_clips=2),
            "val": SplitEntry(first_sample=7, num_samples=2, first_shard=2, num_shards=1, num_clips=1),
        },
        num_bytes=12_288, lineage=Lineage(),
        files=(FileEntry(name="index.arrow", bytes=100, sha256="0" * 64),),
        provenance={"source": "nuscenes", "options": {"version": None, "nested": [1, "zwei"]}},
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def signed(**changes: Any) -> bytes:
    """The file with a right fingerprint, whatever else is wrong."""
    return encode_manifest(manifest(**changes))


GOOD = signed()


def test_round_trip() -> None:
    found = decode_manifest(GOOD, "here")
    assert found == manifest(fingerprint=found.fingerprint, digest=found.digest)
    assert encode_manifest(found) == GOOD


def test_the_file_is_indented_json_with_a_closing_newline() -> None:
    assert GOOD.endswith(b"}\n")
    assert list(json.loads(GOOD)) == list(Manifest.__struct_fields__)
    assert "straße" in GOOD.decode()


NOT_COVERED = ("name", "fingerprint", "seed", "order_unit", "license", "compression", "lineage", "provenance", "digest")


def test_fingerprint_is_what_plain_python_computes() -> None:
    found = json.loads(signed(files=(*manifest().files, FileEntry(name="train-000000.idx", bytes=1, sha256="1" * 64))))
    stated = found["fingerprint"]
    covered = {name: value for name, value in found.items() if name not in NOT_COVERED}
    covered["files"] = [file for file in found["files"] if file["name"] in ("shards.arrow", "index.arrow", "zstd.dict")]
    canonical = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(canonical).hexdigest() == stated


def test_fingerprint_covers_what_a_training_run_depends_on_and_nothing_else() -> None:
    dictionary = FileEntry(name="zstd.dict", bytes=9, sha256="2" * 64)
    covered: list[dict[str, Any]] = [
        {"num_clips": 4}, {"num_samples": 1}, {"channels": ()}, {"channels": manifest().channels[:1]}, {"classes": ()},
        {"attributes": ("parked",)}, {"time_base": "clip"}, {"ego_origin": "imu"}, {"splits": {}}, {"num_bytes": 1},
        {"files": ()}, {"files": (*manifest().files, dictionary)}, {"format": "x"}, {"version": 2},
        {"files": (FileEntry(name="index.arrow", bytes=100, sha256="3" * 64),)},
        {"files": (*manifest().files, FileEntry(name="shards.arrow", bytes=100, sha256="3" * 64))},
    ]  # fmt: skip
    parquet = FileEntry(name="attributes.parquet", bytes=9, sha256="4" * 64)
    other: list[dict[str, Any]] = [
        {"name": "other"}, {"seed": 8}, {"order_unit": "clip"}, {"license": "MIT"}, {"compression": {}},
        {"provenance": {}}, {"lineage": Lineage(parents=("a",))}, {"fingerprint": "f"}, {"digest": "f"},
        {"files": (*manifest().files, parquet)},
    ]  # fmt: skip
    assert {name for change in covered + other for name in change} == set(Manifest.__struct_fields__)
    assert len({fingerprint(manifest())} | {fingerprint(manifest(**change)) for change in covered}) == 1 + len(covered)
    assert {fingerprint(manifest(**change)) for change in other} == {fingerprint(manifest())}


def test_digest_is_what_plain_python_computes() -> None:
    found = json.loads(GOOD)
    stated, found["digest"] = found["digest"], ""
    canonical = json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(canonical).hexdigest() == stated


def test_a_manifest_without_a_digest_is_refused() -> None:
    without = {name: value for name, value in json.loads(GOOD).items() if name != "digest"}
    with pytest.raises(ManifestError, match="was edited or damaged"):
        decode_manifest(json.dumps(without).encode(), "here")


def test_channels_are_cameras_then_lidars_then_boxes() -> None:
    assert [channel.name for channel in manifest().channels] == ["cam_front", "lidar_top", "boxes"]
    assert [camera.channel for camera in manifest().cameras] == ["cam_front"]
    assert manifest().lidars == (TOP,)
    assert manifest().extra_channels == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not JSON"),
        (GOOD[:-3], "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "not a Fuelrail manifest: its format is not 'fuelrail-dataset'"),
        (b"{}", "not a Fuelrail manifest"),
        (b'{"format": "webdataset"}', "not a Fuelrail manifest"),
        (b'{"format": "fuelrail-dataset"}', "has format version none; this reads 1"),
        (b'{"format": "fuelrail-dataset", "version": 2}', "has format version 2; this reads 1"),
        (b'{"format": "fuelrail-dataset", "version": true}', "has format version true; this reads 1"),
        (GOOD.replace(b'"seed": 7,', b""), "missing required field `seed`"),
        (GOOD.replace(b'"seed"', b'"sed": 1, "seed"'), "unknown field `sed`"),
        (GOOD.replace(b'"seed": 7', b'"seed": "7"'), "$.seed"),
        (GOOD.replace(b'"num_clips": 3', b'"num_clips": 4'), "was edited or damaged"),
        (GOOD.replace(b'"seed": 7', b'"seed": 8'), "was edited or damaged"),
        (GOOD.replace(b'"zwei"', b'"drei"'), "was edited or damaged"),
        (GOOD.replace(b'"unix"', b'"clip"'), "was edited or damaged"),
        (signed(num_samples=10), "the splits hold 9 samples, stated are 10"),
        (signed(splits={"train": manifest().splits["train"], "val": SplitEntry(
            first_sample=7, num_samples=3, first_shard=2, num_shards=1, num_clips=1)}), "10 samples, stated are 9"),
        (signed(splits=manifest().splits | {"train": SplitEntry(
            first_sample=1, num_samples=7, first_shard=0, num_shards=2, num_clips=2)}), "'train' does not continue at"),
        (signed(splits=manifest().splits | {"train": SplitEntry(
            first_sample=0, num_samples=7, first_shard=0, num_shards=1, num_clips=2)}), "'val' does not continue at"),
        (signed(splits=manifest().splits | {"train": SplitEntry(
            first_sample=0, num_samples=7, first_shard=0, num_shards=0, num_clips=2)}), "7 samples and no shard"),
        (signed(splits=manifest().splits | {"train": SplitEntry(
            first_sample=0, num_samples=7, first_shard=0, num_shards=8, num_clips=2)}), "'train' does not continue at"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused(data, words) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_manifest(data, "OUT/dataset.json")
    assert words in str(caught.value)
    assert "'OUT/dataset.json'" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../train.tar", "/etc/passwd", "sub/train.tar", "train/", "a\0.tar", "dataset.json"]
)
def test_file_names_cannot_leave_the_folder(name) -> None:
    first, *others = manifest().files
    changed = (msgspec.structs.replace(first, name=name), *others)
    with pytest.raises(ManifestError, match="not a plain file name"):
        decode_manifest(signed(files=changed), "here")


def test_nothing_stands_twice() -> None:
    (first,) = manifest().files
    with pytest.raises(ManifestError, match=r"file 'index\.arrow' occurs twice"):
        decode_manifest(signed(files=(first, first)), "here")
    channels = (camera_channel(FRONT), lidar_channel(msgspec.structs.replace(TOP, channel="cam_front")))
    with pytest.raises(ManifestError, match="channel 'cam_front' occurs twice"):
        decode_manifest(signed(channels=channels), "here")


@pytest.mark.parametrize("name", ["", "CAM_FRONT", "cam.front", "cam-front", "cam/front", "cam_front\n"])
def test_channels_can_be_member_names(name) -> None:
    cameras = (camera_channel(msgspec.structs.replace(FRONT, channel=name)),)
    with pytest.raises(ManifestError, match=r"channel name '.*' does not match \[a-z0-9_\]"):
        decode_manifest(signed(channels=cameras), "here")


@pytest.mark.parametrize("name", ["", "Train", "1st", "../train", "train\n"])
def test_splits_can_be_file_names(name) -> None:
    splits = {name if key == "val" else key: entry for key, entry in manifest().splits.items()}
    with pytest.raises(ManifestError, match=r"split name '.*' does not match"):
        decode_manifest(signed(splits=splits), "here")


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_found_or_changes_nothing(at, flip) -> None:
    damaged = bytearray(GOOD)
    damaged[at] ^= flip
    try:
        found = decode_manifest(bytes(damaged), "here")
    except ManifestError as error:
        assert "here" in str(error)
    else:
        assert found == decode_manifest(GOOD, "here")


@given(st.integers(0, len(GOOD) - len(b"}\n")))
def test_a_cut_file_is_found(length) -> None:
    with pytest.raises(ManifestError, match="'here'"):
        decode_manifest(GOOD[:length], "here")


NOT_READY: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: folder, "has no dataset.json: sharding has not finished there"),
    (lambda folder: folder / "missing", "is not a folder"),
    (lambda folder: Path(__file__), "is not a folder"),
]


@pytest.mark.parametrize(("place", "words"), NOT_READY)
def test_a_folder_without_manifest_is_not_ready(tmp_path: Path, place, words) -> None:
    with pytest.raises(DatasetNotReadyError, match=words) as caught:
        load_manifest(place(tmp_path))
    assert str(place(tmp_path)) in str(caught.value)
    assert "fuelrail shard" in str(caught.value)


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).rmdir()
    (tmp_path / MANIFEST_FILE).write_bytes(GOOD)
    assert load_manifest(str(tmp_path)).seed == 7


def test_what_to_do_where_there_is_no_manifest(tmp_path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(DatasetNotReadyError, match=r"is not a folder; make it with `fuelrail annotate DATASET"):
        load_manifest(folder, LAYERS)
    for make, hint in (
        (lambda: None, r"is not a folder; make it with `fuelrail shard SOURCE"),
        (lambda: folder.mkdir(), r"sharding has not finished there; make it with"),
        (
            lambda: (folder / "train-000000.tar.zst").touch(),
            r"its dataset\.json is gone; bring it back",
        ),
        (lambda: (folder / ".fuelrail").mkdir(), r"not finished there; run the same `fuelrail shard` again to resume"),
        (lambda: (folder / ".fuelrail" / "layer.json").touch(), r"layer is not finished; run the same `fuelrail an"),
    ):
        make()
        with pytest.raises(DatasetNotReadyError, match=hint):
            load_manifest(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"channels": 2_000 * (camera_channel(FRONT),)}, "2000 channels, at most 1024"),
        ({"channels": 300 * (camera_channel(FRONT),)}, "300 cameras, at most 256"),
        ({"provenance": {"recipe": 5}}, "provenance.recipe is not an object"),
        ({"compression": {"codecs": 5}}, "compression.codecs does not map"),
        ({"provenance": {"a": "x" * (5 << 20)}}, "bytes, at most 4194304 are read"),
        ({"files": (FileEntry(name="a\x1b[2J", bytes=1, sha256=""),)}, "'a\\x1b[2J' is not a plain file name"),
        ({"files": (FileEntry(name="a" * 300, bytes=1, sha256=""),)}, "... (300 characters)' is not a plain file name"),
    ],
)
def test_l1_what_no_reader_can_use_is_refused(changes, words) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_manifest(signed(**changes), "here")
    assert words in str(caught.value)


def test_l5_a_version_of_two_megabytes_is_not_printed_whole() -> None:
    with pytest.raises(ManifestError) as caught:
        decode_manifest(b'{"format": "fuelrail-dataset", "version": "' + b"9" * 2_000_000 + b'"}', "here")
    assert len(str(caught.value)) < 400


def test_l2_a_manifest_has_a_limit() -> None:
    with pytest.raises(ManifestError, match="more than a manifest may have"):
        decode_manifest(GOOD + b" " * (16 << 20), "here")


def test_the_lineage_names_every_ancestor_once_nearest_first() -> None:
    first, second = manifest(name="a", fingerprint="1"), manifest(name="b", fingerprint="2")
    both = manifest(name="ab", fingerprint="3", lineage=Lineage.of([first, second]))
    found = Lineage.of([both, first])
    assert found.parents == ("3", "1")
    assert [(one.fingerprint, one.parents) for one in found.ancestors] == [("3", ("1", "2")), ("1", ()), ("2", ())]
    assert decode_manifest(signed(lineage=found), "here").lineage == found


def test_a_lineage_keeps_the_nearest_ancestors() -> None:
    chain = [manifest(fingerprint="0")]
    for number in range(1, 200):
        chain.append(manifest(fingerprint=str(number), lineage=Lineage.of(chain[-1:])))
    found = chain[-1].lineage.ancestors
    assert [one.fingerprint for one in found] == [str(number) for number in range(198, 70, -1)]
    decode_manifest(signed(lineage=chain[-1].lineage), "here")
    one = Ancestor(fingerprint="", name="", num_samples=1, made_by="", parents=())
    with pytest.raises(ManifestError, match="129 ancestors, at most 128"):
        decode_manifest(signed(lineage=Lineage(ancestors=(one,) * 129)), "here")
