"""The manifest: exact round trip, a fingerprint anybody can compute, and everything that does not add up refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from fuelrail.pipeline.channels.sensors import (
    BOXES_CHANNEL,
    CameraEntry,
    LidarEntry,
    camera_channel,
    lidar_channel,
)
from fuelrail.pipeline.channels.table import Channel
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
    example = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name="straße",
        fingerprint="",
        num_samples=9,
        num_clips=3,
        seed=7,
        order_unit="frame",
        channels=(camera_channel(FRONT), lidar_channel(TOP), BOXES_CHANNEL),
        classes=("car",),
        attributes=(),
        time_base="unix",
        ego_origin="rear_axle_ground",
        license=None,
        compression={"level": 3, "ratio": 0.5},
        splits={
            "train": SplitEntry(
                first_sample=0,
                num_samples=7,
                first_shard=0,
                num_shards=2,
                num_clips=2,
            ),
            "val": SplitEntry(
                first_sample=7,
                num_samples=2,
                first_shard=2,
                num_shards=1,
                num_clips=1,
            ),
        },
        num_bytes=12_288,
        lineage=Lineage(),
        files=(FileEntry(name="index.arrow", bytes=100, sha256="0" * 64),),
        provenance={
            "source": "nuscenes",
            "options": {"version": None, "nested": [1, "zwei"]},
        },
    )
    return msgspec.structs.replace(example, **changes)


def sign_manifest(**changes: Any) -> bytes:
    """The file with a right fingerprint, whatever else is wrong."""
    return encode_manifest(manifest(**changes))


GOOD = sign_manifest()


def test_round_trip() -> None:
    decoded = decode_manifest(GOOD, "here")
    assert decoded == manifest(fingerprint=decoded.fingerprint, digest=decoded.digest)
    assert encode_manifest(decoded) == GOOD


def test_the_file_is_indented_json_with_a_closing_newline() -> None:
    assert GOOD.endswith(b"}\n")
    assert list(json.loads(GOOD)) == list(Manifest.__struct_fields__)
    assert "straße" in GOOD.decode()


NOT_COVERED = (
    "name",
    "fingerprint",
    "seed",
    "order_unit",
    "license",
    "compression",
    "lineage",
    "provenance",
    "digest",
)


def test_fingerprint_is_what_plain_python_computes() -> None:
    content = json.loads(
        sign_manifest(
            files=(
                *manifest().files,
                FileEntry(name="train-000000.idx", bytes=1, sha256="1" * 64),
            )
        )
    )
    stated = content["fingerprint"]
    covered = {name: value for name, value in content.items() if name not in NOT_COVERED}
    covered["files"] = [
        file
        for file in content["files"]
        if file["name"] in ("shards.arrow", "index.arrow", "zstd.dict")
    ]
    canonical = json.dumps(
        covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    assert hashlib.sha256(canonical).hexdigest() == stated


def test_fingerprint_covers_what_a_training_run_depends_on_and_nothing_else() -> None:
    dictionary = FileEntry(name="zstd.dict", bytes=9, sha256="2" * 64)
    covered: list[dict[str, Any]] = [
        {"num_clips": 4},
        {"num_samples": 1},
        {"channels": ()},
        {"channels": manifest().channels[:1]},
        {"classes": ()},
        {"attributes": ("parked",)},
        {"time_base": "clip"},
        {"ego_origin": "imu"},
        {"splits": {}},
        {"num_bytes": 1},
        {"files": ()},
        {"files": (*manifest().files, dictionary)},
        {"format": "x"},
        {"version": 2},
        {"files": (FileEntry(name="index.arrow", bytes=100, sha256="3" * 64),)},
        {
            "files": (
                *manifest().files,
                FileEntry(name="shards.arrow", bytes=100, sha256="3" * 64),
            )
        },
    ]
    parquet = FileEntry(name="attributes.parquet", bytes=9, sha256="4" * 64)
    uncovered: list[dict[str, Any]] = [
        {"name": "other"},
        {"seed": 8},
        {"order_unit": "clip"},
        {"license": "MIT"},
        {"compression": {}},
        {"provenance": {}},
        {"lineage": Lineage(parents=("a",))},
        {"fingerprint": "f"},
        {"digest": "f"},
        {"files": (*manifest().files, parquet)},
    ]
    assert {name for change in covered + uncovered for name in change} == set(
        Manifest.__struct_fields__
    )
    assert len(
        {fingerprint(manifest())} | {fingerprint(manifest(**change)) for change in covered}
    ) == 1 + len(covered)
    assert {fingerprint(manifest(**change)) for change in uncovered} == {fingerprint(manifest())}


def test_digest_is_what_plain_python_computes() -> None:
    content = json.loads(GOOD)
    stated = content["digest"]
    content["digest"] = ""
    canonical = json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode()
    assert hashlib.sha256(canonical).hexdigest() == stated


def test_channels_are_cameras_then_lidars_then_boxes() -> None:
    assert [channel.name for channel in manifest().channels] == [
        "cam_front",
        "lidar_top",
        "boxes",
    ]
    assert [camera.channel for camera in manifest().cameras] == ["cam_front"]
    assert manifest().lidars == (TOP,)
    assert manifest().extra_channels == ()


def sign_with_file(name: str) -> bytes:
    return sign_manifest(files=(FileEntry(name=name, bytes=1, sha256=""),))


def sign_with_train_split(*entry: int) -> bytes:
    """First sample, samples, first shard, shards and clips of the split ``train``."""
    return sign_manifest(splits=manifest().splits | {"train": SplitEntry(*entry)})


def sign_with_split_name(name: str) -> bytes:
    return sign_manifest(
        splits={name if key == "val" else key: entry for key, entry in manifest().splits.items()}
    )


def sign_with_camera(name: str) -> bytes:
    return sign_manifest(channels=(camera_channel(msgspec.structs.replace(FRONT, channel=name)),))


def without(name: str) -> bytes:
    return json.dumps(
        {key: value for key, value in json.loads(GOOD).items() if key != name}
    ).encode()


ANCESTOR = Ancestor(fingerprint="0" * 64, name="", num_samples=1, made_by="", parents=())
TWICE = (
    camera_channel(FRONT),
    lidar_channel(msgspec.structs.replace(TOP, channel="cam_front")),
)
NOT_FUELRAIL = "not a Fuelrail manifest"
HEAD = b'{"format": "fuelrail-dataset", "version": '
REFUSED = [
    (b"", "is not JSON"),
    (GOOD[:-3], "is not JSON"),
    (b"\xff", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b"[]", f"{NOT_FUELRAIL}: its format is not 'fuelrail-dataset'"),
    (b"{}", NOT_FUELRAIL),
    (b'{"format": "webdataset"}', NOT_FUELRAIL),
    (
        b'{"format": "fuelrail-dataset"}',
        "has format version none; this reads 1: use the Fuelrail that wrote it",
    ),
    (HEAD + b"2}", "has format version 2; this reads 1"),
    (HEAD + b"true}", "has format version true; this reads 1"),
    (HEAD + b'"' + b"9" * 2_000_000 + b'"}', "has format version "),
    (without("seed"), "the field 'seed' is missing; allowed here: format, "),
    (without("digest"), "was edited or damaged"),
    (
        GOOD.replace(b'"seed"', b'"sed": 1, "seed"'),
        "the field 'sed' is unknown; allowed here: format, ",
    ),
    (
        GOOD.replace(b'"seed": 7', b'"seed": "7"'),
        "at 'seed': must be a whole number; got the text '7'; bring it back",
    ),
    *(
        (GOOD.replace(old, new), "was edited or damaged")
        for old, new in (
            (b'"num_clips": 3', b'"num_clips": 4'),
            (b'"seed": 7', b'"seed": 8'),
            (b'"zwei"', b'"drei"'),
            (b'"unix"', b'"clip"'),
        )
    ),
    (sign_manifest(num_samples=10), "the splits hold 9 samples, stated are 10"),
    (
        sign_manifest(
            splits=manifest().splits
            | {
                "val": SplitEntry(
                    first_sample=7,
                    num_samples=3,
                    first_shard=2,
                    num_shards=1,
                    num_clips=1,
                )
            }
        ),
        "10 samples, stated are 9",
    ),
    (sign_with_train_split(1, 7, 0, 2, 2), "'train' does not continue at"),
    (sign_with_train_split(0, 7, 0, 1, 2), "'val' does not continue at"),
    (sign_with_train_split(0, 7, 0, 0, 2), "7 samples and no shard"),
    (sign_with_train_split(0, 7, 0, 8, 2), "'train' does not continue at"),
    *(
        (sign_with_file(name), "is not a plain file name")
        for name in (
            "",
            ".",
            "..",
            "../train.tar",
            "/etc/passwd",
            "sub/train.tar",
            "train/",
            "a\0.tar",
            "dataset.json",
        )
    ),
    (sign_with_file("a\x1b[2J"), "'a\\x1b[2J' is not a plain file name"),
    (
        sign_with_file("a" * 300),
        "... (300 characters)' is not a plain file name",
    ),
    (
        sign_manifest(files=2 * manifest().files),
        "file 'index.arrow' occurs twice",
    ),
    (sign_manifest(channels=TWICE), "channel 'cam_front' occurs twice"),
    *(
        (sign_with_camera(name), "' does not match [a-z0-9_]")
        for name in (
            "",
            "CAM_FRONT",
            "cam.front",
            "cam-front",
            "cam/front",
            "cam_front\n",
        )
    ),
    *(
        (sign_with_split_name(name), "' does not match")
        for name in ("", "Train", "1st", "../train", "train\n")
    ),
    (
        sign_manifest(channels=2_000 * (camera_channel(FRONT),)),
        "at 'channels': must be a list of at most 1024 entries; got ",
    ),
    (
        sign_manifest(channels=300 * (camera_channel(FRONT),)),
        "300 cameras, at most 256",
    ),
    (
        sign_manifest(provenance={"recipe": 5}),
        "provenance.recipe is not an object",
    ),
    (
        sign_manifest(compression={"codecs": 5}),
        "compression.codecs does not map",
    ),
    (
        sign_manifest(provenance={"a": "x" * (5 << 20)}),
        "bytes, at most 4194304 are read",
    ),
    (
        sign_manifest(lineage=Lineage(ancestors=(ANCESTOR,) * 129)),
        "at 'lineage.ancestors': must be a list of at most 128 entries; got ",
    ),
    (sign_manifest() + b" " * (16 << 20), "more than a manifest may have"),
]


@pytest.mark.parametrize(("data", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_reader_can_use_is_refused_in_a_short_message(data, words) -> None:
    with pytest.raises(ManifestError) as caught:
        decode_manifest(data, "OUT/dataset.json")
    assert words in str(caught.value)
    assert "'OUT/dataset.json'" in str(caught.value)
    assert len(str(caught.value)) < 600


NOT_READY: list[tuple[Callable[[Path], Path], str]] = [
    (
        lambda folder: folder,
        "has no dataset.json, so no dataset; make it with `fuelrail shard SOURCE",
    ),
    (
        lambda folder: folder / "missing",
        "is not a folder; make it with `fuelrail shard SOURCE",
    ),
    (lambda folder: Path(__file__), "is a file, not a dataset's folder"),
]


@pytest.mark.parametrize(("place", "words"), NOT_READY)
def test_a_folder_without_manifest_is_not_ready(tmp_path: Path, place, words) -> None:
    with pytest.raises(DatasetNotReadyError, match=words) as caught:
        load_manifest(place(tmp_path))
    assert str(place(tmp_path)) in str(caught.value)


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).rmdir()
    (tmp_path / MANIFEST_FILE).write_bytes(GOOD)
    assert load_manifest(str(tmp_path)).seed == 7


def test_what_to_do_where_there_is_no_manifest(tmp_path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(
        DatasetNotReadyError,
        match=r"is not a folder; make it with `fuelrail annotate DATASET",
    ):
        load_manifest(folder, LAYERS)
    for make, hint in (
        (lambda: None, r"is not a folder; make it with `fuelrail shard SOURCE"),
        (lambda: folder.mkdir(), r"so no dataset; make it with"),
        (
            lambda: (folder / "train-000000.tar.zst").touch(),
            r"its dataset\.json is gone; bring it back",
        ),
        (
            lambda: (folder / ".fuelrail").mkdir(),
            r"not finished there; run the same `fuelrail shard` again to resume",
        ),
        (
            lambda: (folder / ".fuelrail" / "layer.json").touch(),
            r"layer is not finished; run the same `fuelrail an",
        ),
    ):
        make()
        with pytest.raises(DatasetNotReadyError, match=hint):
            load_manifest(folder)


def test_it_never_proposes_to_write_into_a_folder_of_other_files(
    tmp_path,
) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        DatasetNotReadyError,
        match=r"so no dataset; make one in a new folder: `fuelrail shard SOURCE OUT`$",
    ):
        load_manifest(tmp_path)
    with pytest.raises(
        DatasetNotReadyError,
        match=r"new folder: `fuelrail annotate DATASET OUT --model MODULE:FUNCTION`$",
    ):
        load_manifest(tmp_path, LAYERS)


def make_fingerprint(number: int) -> str:
    """A fingerprint for each number."""
    return f"{number:064x}"


def test_the_lineage_names_every_ancestor_once_nearest_first() -> None:
    first_print, second_print, joined_print = map(make_fingerprint, (1, 2, 3))
    first = manifest(name="a", fingerprint=first_print)
    second = manifest(name="b", fingerprint=second_print)
    joined = manifest(
        name="ab",
        fingerprint=joined_print,
        lineage=Lineage.from_parents([first, second]),
    )
    lineage = Lineage.from_parents([joined, first])
    assert lineage.parents == (joined_print, first_print)
    assert [(ancestor.fingerprint, ancestor.parents) for ancestor in lineage.ancestors] == [
        (joined_print, (first_print, second_print)),
        (first_print, ()),
        (second_print, ()),
    ]
    assert decode_manifest(sign_manifest(lineage=lineage), "here").lineage == lineage


def test_a_lineage_keeps_the_nearest_ancestors() -> None:
    chain = [manifest(fingerprint=make_fingerprint(0))]
    for number in range(1, 200):
        chain.append(
            manifest(
                fingerprint=make_fingerprint(number),
                lineage=Lineage.from_parents(chain[-1:]),
            )
        )
    ancestors = chain[-1].lineage.ancestors
    assert [ancestor.fingerprint for ancestor in ancestors] == [
        make_fingerprint(number) for number in range(198, 70, -1)
    ]
    decode_manifest(sign_manifest(lineage=chain[-1].lineage), "here")


@pytest.mark.parametrize("text", ["../../x", "", "1" * 63, "A" * 64, "1" * 64 + "\n"])
def test_what_is_not_a_fingerprint_is_refused_in_a_lineage(text) -> None:
    good = Ancestor(
        fingerprint=make_fingerprint(1),
        name="a",
        num_samples=1,
        made_by="x",
        parents=(),
    )
    for lineage in (
        Lineage(parents=(text,)),
        Lineage(ancestors=(msgspec.structs.replace(good, fingerprint=text),)),
        Lineage(ancestors=(msgspec.structs.replace(good, parents=(make_fingerprint(2), text)),)),
    ):
        with pytest.raises(
            ManifestError,
            match=r"at 'lineage\..*': must be 64 hexadecimal digits, 0-9 and a-f; got ",
        ):
            decode_manifest(sign_manifest(lineage=lineage), "here")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"seed": 7', '"seed": 8, "seed": 7'),
        ('"ratio": 0.5', '"ratio": 0.5, "nested": {"a": 1, "a": 1}'),
        (
            '"name": "index.arrow"',
            '"na\\u006de": "other.arrow", "name": "index.arrow"',
        ),
        ('"version": null', '"version": 1, "version": null'),
    ],
)
def test_a_key_twice_in_an_object_is_refused_wherever_it_is(old, new) -> None:
    text = GOOD.decode()
    assert old in text
    with pytest.raises(ManifestError, match=r"the key '\w+' occurs twice in an object"):
        decode_manifest(text.replace(old, new, 1).encode(), "here")


def plain_sealed(content: dict[str, Any]) -> bytes:
    """The file by the rules of FORMAT.md, made with the standard library alone."""

    def digest(value: dict[str, Any]) -> str:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    covered = {name: value for name, value in content.items() if name not in NOT_COVERED}
    covered["files"] = [file for file in content["files"] if file["name"] == "index.arrow"]
    content = content | {"fingerprint": digest(covered), "digest": ""}
    return json.dumps(content | {"digest": digest(content)}).encode()


RASTER = {
    "name": "mask",
    "kind": "array",
    "field": "mask.npy",
    "dtype": "uint8",
    "axes": ["height", "width"],
    "shape": [900, 1600],
    "frame": "image:cam_front",
}


@pytest.mark.parametrize(
    ("more", "law", "is_taken"),
    [
        ({}, {}, True),
        ({}, {"fill": 0.0, "interpolation": "nearest", "fraction": 1}, True),
        ({}, {"fill": 0}, False),
        ({}, {"fill": None}, False),
        ({}, {"roles": {}}, False),
        ({"optional": False}, {}, False),
        ({"description": ""}, {}, False),
    ],
)
def test_which_defaults_a_channel_and_its_law_may_state(more, law, is_taken) -> None:
    content = json.loads(GOOD)
    content["channels"].append(
        {
            **RASTER,
            "law": {"name": "image", "camera": "cam_front", **law},
            **more,
        }
    )
    data = plain_sealed(content)
    if is_taken:
        assert decode_manifest(data, "here").channels[-1].name == "mask"
    else:
        with pytest.raises(
            ManifestError,
            match="its fingerprint or digest is not that of its content",
        ):
            decode_manifest(data, "here")


@pytest.mark.parametrize("name", ["boxes", "meta", "geometry", "lidar_top_sweeps"])
def test_channels_with_the_names_of_other_parts_are_refused(name) -> None:
    entry = msgspec.convert(
        {
            **RASTER,
            "name": name,
            "field": f"{name}.npy",
            "law": {"name": "image", "camera": "cam_front"},
        },
        Channel,
    )
    with pytest.raises(
        ManifestError,
        match=f"channel '{name}' (is not as the format has boxes|has the name of an)",
    ):
        decode_manifest(
            sign_manifest(channels=(camera_channel(FRONT), lidar_channel(TOP), entry)),
            "here",
        )
