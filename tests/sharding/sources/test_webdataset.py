"""Tars in WebDataset's naming, against the library `webdataset`; compressed ones, damaged ones, those of others."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import simplejpeg
import torch
import zstandard

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources import webdataset
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.sources.shared.files import source_files
from fuelrail.sharding.sources.shared.tars import tar_members
from fuelrail.sharding.verify.dataset import verify
from support.batches import batches
from support.sharding import scanned
from support.shared_data import shared_data
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.source_world import make_world, samples_of


def write_tars(world, root, ending="tar"):
    """A tar a clip, a sample a frame; calibration, poses and times in JSON."""
    for clip in world.clips:
        blob = io.BytesIO()
        with tarfile.open(fileobj=blob, mode="w") as tar:
            for number, frame in enumerate(clip.frames):
                meta = {
                    "t": frame.timestamp_ns,
                    "pose": frame.ego2global.tolist(),
                    "cams": {
                        name: {
                            "k": picture.intrinsics.ravel().tolist(),
                            "cam2ego": picture.cam2ego.tolist(),
                        }
                        for name, picture in frame.images.items()
                    },
                }
                members = {"json": json.dumps(meta).encode()}
                members |= {f"{name}.jpg": image.jpeg for name, image in frame.images.items()}
                for extension, data in members.items():
                    info = tarfile.TarInfo(f"{clip.name}/{number:04d}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        data = blob.getvalue()
        if ending != "tar":
            data = gzip.compress(data) if ending.endswith("gz") else zstandard.compress(data)
        (root / f"{clip.name}.{ending}").write_bytes(data)
    return str(root)


class TestTars(AtUrl, SourceSuite):
    """Images share their frame's time and pose in these tars, so samples are compared by a test of its own."""

    kind = "webdataset"
    impossible = ("no file",)
    states_sizes = False
    options: ClassVar = {
        "timestamp_ns": "t",
        "ego2global": "pose",
        "intrinsics": "cams.{camera}.k",
        "cam2ego": "cams.{camera}.cam2ego",
    }
    compare = None
    ending = "tar"

    def world(self, **changes):
        return make_world(**{"lidars": (), "num_boxes": 0, **changes})

    def write(self, world, root):
        return write_tars(world, root, self.ending)

    def test_samples_are_those_of_the_world(self, made):
        samples = {
            (stored.meta.clip_name, stored.meta.timestamp_ns): stored
            for stored in samples_of(made.folder / "out").values()
        }
        assert len(samples) == 8
        for clip, number, frame in made.world.frames():
            sample = samples[clip.name, frame.timestamp_ns]
            assert sample.meta.sample_token == f"{clip.name}/{number:04d}"
            np.testing.assert_allclose(sample.geometry.ego2global, frame.ego2global, atol=1e-6)
            for index, (name, image) in enumerate(frame.images.items()):
                assert bytes(sample.images[name]) == image.jpeg
                np.testing.assert_allclose(sample.geometry.intrinsics[index], image.intrinsics)
                np.testing.assert_allclose(sample.geometry.cam2ego[index], image.cam2ego, atol=1e-6)


class TestGzip(TestTars):
    ending = "tar.gz"
    reads_heads = False


class TestZstd(TestTars):
    ending = "tar.zst"
    reads_heads = False


@pytest.fixture
def tars(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    write_tars(make_world(lidars=(), num_boxes=0), root)
    return root


def scan(root, **options):
    return scan_source(SourceSpec("webdataset", str(root), options))


def test_without_options_images_have_no_calibration_and_no_pose(tars, tmp_path):
    spec = SourceSpec("webdataset", str(tars), {})
    TestTars().make(spec, tmp_path / "out")
    samples = samples_of(tmp_path / "out")
    assert len(samples) == 8
    for sample in samples.values():
        assert np.isnan(sample.geometry.intrinsics).all()
        assert np.isnan(sample.geometry.cam2ego).all()
        assert sample.geometry.cam_valid.all()
    info = scan(tars)
    assert (info.time_base, info.facts) == (
        "order",
        {"poses": "none", "calibration": "none"},
    )


def test_options_map_extensions_and_cut_clips(tars):
    info = scan(tars, images={"cam_a": "cam_back.jpg"}, clip="(.*)/")
    assert [camera.channel for camera in info.cameras] == ["cam_a"]
    assert [clip.clip_name for clip in info.clips] == ["drive-0", "drive-1"]
    with pytest.raises(SourceError, match="finds nothing in key 'drive-0/0000'"):
        scan(tars, clip="(x)")
    with pytest.raises(SourceError, match=r"clip '0000' comes again at key 'drive-1/0000'"):
        scan(tars, clip="/(.*)")
    for bad in ("x", "("):
        with pytest.raises(ConfigError, match="clip="):
            scan(tars, clip=bad)
    with pytest.raises(ConfigError, match="go together"):
        scan(tars, intrinsics="k")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"timestamp_ns": "time"}, r"key 'drive-0/0000': the JSON has no time"),
        ({"timestamp_ns": "pose"}, r"expected a whole number"),
        ({"ego2global": "cams.cam_left.k"}, r"not a 4x4 matrix"),
        ({"timestamp_ns": "t", "meta": "yaml"}, r"there is no .yaml, but json"),
        ({"timestamp_ns": "t", "meta": "cam_left.jpg"}, r"is not JSON"),
        (
            {"images": {"a": "b"}},
            r"no frame of the webdataset source .* is kept: no camera image 8",
        ),
    ],
)
def test_wrong_paths_are_named(tars, options, match):
    with pytest.raises(SourceError, match=match):
        scan(tars, **options)


def npy(array) -> bytes:
    with io.BytesIO() as file:
        np.save(file, array)
        return file.getvalue()


def labelled(number: int) -> dict[str, bytes]:
    """Members of a sample with labels, as tools around the library write them."""
    facts = {
        "score": number / 2,
        "count": number,
        "night": number % 2 == 0,
        "Place": f"place {number}",
        "action": [number + 0.5, 1, 2],
        "deep": {"speed": 3.5 * number},
        "tags": ["a", "b"],
        "nothing": None,
        "key": "reserved",
        "path": list(range(2 * number)),
        "boxes": [1, 2],
    }
    rng = np.random.default_rng(number)
    members = {
        "jpg": simplejpeg.encode_jpeg(rng.integers(0, 255, (48, 64, 3), np.uint8)),
        "cls": b"%d\n" % (number % 3),
        "txt": f"caption {number}, Zebrastreifen über".encode(),
        "json": json.dumps(facts).encode(),
        "feature.npy": npy(rng.normal(size=(2, 3)).astype(np.float32)),
        "steps.npy": npy(np.asfortranarray(rng.integers(0, 9, (number + 1, 2)))),
        "weights.pth": b"any",
    }
    return (
        members if number % 2 else {name: data for name, data in members.items() if name != "txt"}
    )


def write_labelled(root, ending="tar", count=6, make=labelled) -> None:
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w") as tar:
        for number in range(count):
            for extension, data in make(number).items():
                info = tarfile.TarInfo(f"a/{number:04d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        tar.addfile(tarfile.TarInfo("README"))
    data = blob.getvalue()
    root.mkdir(exist_ok=True)
    (root / f"shard.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_labels_texts_and_arrays_are_those_that_the_library_decodes(tmp_path, ending):
    write_labelled(tmp_path / "tars", ending)
    report = fr.shard(f"webdataset:{tmp_path / 'tars'}", tmp_path / "out", workers=1)
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    dataset = fr.open(tmp_path / "out")
    names = [channel.name for channel in dataset.manifest.extra_channels]
    assert names == [
        "action",
        "cls",
        "feature_npy",
        "path",
        "steps_npy",
        "tags",
        "txt",
        "weights_pth",
    ]
    (batch,) = batches(
        dataset,
        6,
        select=names,
        shuffle=False,
        image={"height": 48, "width": 64},
    )
    wds = pytest.importorskip("webdataset")
    with (gzip.open if ending.endswith("gz") else open)(
        tmp_path / "tars" / f"shard.{ending}", "rb"
    ) as file:
        content = [{**member, "__url__": ""} for member in wds.tariterators.tar_file_iterator(file)]
    decoded = {name: wds.autodecode.decoders[name] for name in ("cls", "txt", "json")}
    decoded |= dict.fromkeys(("feature.npy", "steps.npy"), wds.autodecode.decoders["npy"])
    decoded["weights.pth"] = bytes  # the library would unpickle it
    theirs = {
        sample["__key__"]: {
            name: decode(sample[name]) for name, decode in decoded.items() if name in sample
        }
        for sample in wds.tariterators.group_by_keys(content)
    }
    table = dataset.table.to_pylist()
    assert sorted(batch["sample_token"]) == sorted(theirs) and len(theirs) == 6
    for position, key in enumerate(batch["sample_token"]):
        sample = theirs[key]
        attributes = table[int(batch["global_index"][position])]
        assert batch["cls"][position] == sample["cls"]
        assert batch["weights_pth"][position] == sample["weights.pth"]
        assert (batch["txt"][position], bool(batch["txt_valid"][position])) == (
            sample.get("txt"),
            "txt" in sample,
        )
        assert batch["feature_npy"].dtype == torch.float32
        np.testing.assert_array_equal(batch["feature_npy"][position], sample["feature.npy"])
        np.testing.assert_array_equal(batch["steps_npy"]["values"][position], sample["steps.npy"])
        np.testing.assert_array_equal(batch["path"]["values"][position], sample["json"]["path"])
        np.testing.assert_array_equal(batch["action"][position], sample["json"]["action"])
        assert batch["tags"][position] == sample["json"]["tags"]
        for name in ("score", "count", "night"):
            assert (attributes[name], type(attributes[name])) == (
                sample["json"][name],
                type(sample["json"][name]),
            )
        assert (attributes["place"], attributes["deep_speed"]) == (
            sample["json"]["Place"],
            sample["json"]["deep"]["speed"],
        )
    noted = report.scan.noted
    assert noted.pop("members left out, without a key or an extension") == 1
    assert noted.pop("samples without txt, which others have") == 3
    assert len(noted) == 2 and set(noted.values()) == {6}
    assert any(name.startswith("boxes left out, its name must") for name in noted)
    assert "key of the JSON left out, its name or its values are not those of an attribute" in noted


def test_what_the_first_samples_lack_is_counted_and_what_differs_is_named(
    tmp_path,
):
    def late(number: int) -> dict[str, bytes]:
        members = labelled(number)
        return (
            {"jpg": members["jpg"], "json": b'{"n": 1}'}
            if number < 4
            else members | {"json": b'{"n": 0.5}'}
        )

    write_labelled(tmp_path / "tars", make=late)
    with pytest.raises(
        SourceError,
        match=r"key 'a/0004': n is 0.5, and int in the first samples; first_samples=0",
    ):
        scan(tmp_path / "tars", first_samples=4)
    assert {channel.name for channel in scan(tmp_path / "tars", first_samples=0).channels} >= {
        "cls",
        "txt",
    }

    write_labelled(tmp_path / "tars", make=lambda number: late(number) | {"json": b"{}"})
    report = scan(tmp_path / "tars", first_samples=4).report
    assert (
        report.noted["cls left out, none of the first samples has it; first_samples=0 looks at all"]
        == 2
    )

    write_labelled(
        tmp_path / "tars",
        make=lambda number: labelled(number) | {"cls": b"7" if number < 4 else b"cat"},
    )
    with_words = scan(tmp_path / "tars").report
    assert (
        with_words.noted["members .cls left out, not what the library webdataset reads as such"]
        == 2
    )


def test_bytes_of_any_length_up_to_a_members(tmp_path, monkeypatch):
    lengths = (0, 1, 2, 3, 100, 101)
    write_labelled(
        tmp_path / "tars",
        make=lambda number: {
            "jpg": labelled(number)["jpg"],
            "bin": b"x" * lengths[number],
        },
    )
    monkeypatch.setattr(webdataset, "MAX_MEMBER_BYTES", 100)
    report = fr.shard(f"webdataset:{tmp_path / 'tars'}", tmp_path / "out", workers=1)
    assert report.scan.noted["members .bin left out, over 100 bytes"] == 1
    (batch,) = batches(tmp_path / "out", 6, select=["bin"], shuffle=False)
    assert sorted(len(content) for content in batch["bin"] if content is not None) == [
        0,
        1,
        2,
        3,
        100,
    ]
    assert int(batch["bin_valid"].sum()) == 5

    write_labelled(
        tmp_path / "tars",
        make=lambda number: labelled(number) | {"a.txt" if number else "a_txt": b"text"},
    )
    assert (
        scan(tmp_path / "tars").report.noted["a_txt left out, samples differ: bytes and text"] == 6
    )
    write_labelled(
        tmp_path / "tars",
        make=lambda number: labelled(number) | {"a.txt" if number > 3 else "a_txt": b"text"},
    )
    with pytest.raises(SourceError, match="a_txt is of another kind than in the first samples"):
        scan(tmp_path / "tars", first_samples=3)


def test_arrays_that_do_not_fit_the_first_samples_are_named(tmp_path):
    write_labelled(
        tmp_path / "tars",
        make=lambda number: labelled(1) | {"a.npy": npy(np.zeros(2 + number // 5))},
    )
    with pytest.raises(SourceError, match=r"frame 5: value 'a_npy'.*\[3\].*\[2\]"):
        scan(tmp_path / "tars", first_samples=5)


def spoil(root, how):
    file = root / "drive-1.tar"
    data = bytearray(file.read_bytes())
    if how == "cut":
        data = data[:-15_000]
    elif how == "flipped":
        position = data.rindex(b"drive-1/0002.json")
        data[position] ^= 1
    elif how == "LFS":
        data = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"
    else:
        data = b""
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("cut", "cut off"),
        ("flipped", "damaged header"),
        ("LFS", "damaged"),
        ("empty", "damaged"),
    ],
)
def test_damaged_tars_are_named(tars, how, match):
    spoil(tars, how)
    with pytest.raises(SourceError, match=rf"drive-1.tar.*{match}"):
        scan(tars)


@pytest.mark.parametrize("ending", ["tar.gz", "tar.zst", "tzst"])
def test_cut_compressed_tars_are_named(tmp_path, ending):
    write_tars(make_world(lidars=(), num_boxes=0), tmp_path, ending)
    file = tmp_path / f"drive-1.{ending}"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(SourceError, match=rf"drive-1.{ending}.*cut off"):
        scan(tmp_path)


def test_links_and_names_that_lead_out_are_refused(tmp_path):
    for kind, name in (
        (tarfile.SYMTYPE, "a.jpg"),
        (tarfile.LNKTYPE, "a.jpg"),
        (tarfile.REGTYPE, "../a.jpg"),
        (tarfile.REGTYPE, "/a.jpg"),
    ):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "b"
            tar.addfile(info)
        with pytest.raises(SourceError, match=r"x.tar.*a.jpg"):
            scan(tmp_path)


@pytest.mark.real
@pytest.mark.parametrize(
    "folder",
    ["tar-go", "tar-rs", "tar-libarchive", "tar-ratarmount", "tar-cpython"],
)
def test_tars_of_others_are_read_as_tarfile_reads_them_or_named(folder):
    """Whatever is in them: the same regular files, or an error with the name of the tar."""
    root = shared_data(folder)
    tars = sorted(path for path in Path(root).rglob("*.tar") if path.is_file())
    assert tars
    files = source_files(str(root))
    num_read = 0
    for path in tars:
        name = path.relative_to(root).as_posix()
        try:
            members = list(tar_members(files, name))
        except SourceError as error:
            assert name in str(error)
            continue
        num_read += 1
        with tarfile.open(path, "r:") as opened:
            expected = [
                (member.name, member.offset_data, member.size)
                for member in opened
                if member.isreg()
            ]
        assert [tuple(member) for member in members] == expected, name
    assert num_read or folder == "tar-cpython"


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tar.zst"])
@pytest.mark.parametrize(
    ("json_bytes", "says"),
    [
        (b"[" * 200_000, r"\.json is not JSON: it is nested too deeply"),
        (b'{"t": "\xff"}', r"\.json is not JSON: "),
        (17 << 20, "17825792 bytes, of which at most 16777216 are read"),
        (
            257 << 20,
            "269484032 bytes, of which at most 268435456 are read at once",
        ),
    ],
    ids=["nested", "not UTF-8", "long", "longer"],
)
def test_json_that_is_hostile_is_named(tmp_path, ending, json_bytes, says):
    """Also where little of a compressed tar becomes much. A number stands for as many spaces."""
    (clip, *_) = make_world(1, 2).clips
    if isinstance(json_bytes, int):
        json_bytes = b" " * json_bytes
    with tarfile.open(tmp_path / "plain", "w") as tar:
        for name, data in (
            ("0.json", json_bytes),
            ("0.jpg", next(iter(clip.frames[0].images.values())).jpeg),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = (tmp_path / "plain").read_bytes()
    packed = {
        "tar": bytes,
        "tar.gz": lambda data: gzip.compress(data, 1),
        "tar.zst": zstandard.compress,
    }[ending](data)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / f"a.{ending}").write_bytes(packed)
    with pytest.raises(SourceError, match=says):
        scan(tmp_path / "source", timestamp_ns="t")


@pytest.mark.real
@pytest.mark.parametrize("name", ["tendata.tar", "mpdata.tar", "compressed.tar", "n01491361.tar"])
def test_samples_of_real_tars_are_those_of_webdataset(name, tmp_path):
    """Keys, extensions and bytes against the library."""
    wds = pytest.importorskip("webdataset")
    tars = sorted(Path(shared_data("wds-shards")).rglob(name))
    assert tars
    shutil.copy(tars[0], tmp_path / name)
    with (tmp_path / name).open("rb") as file:
        content = [
            {**member, "__url__": name} for member in wds.tariterators.tar_file_iterator(file)
        ]
    expected = list(wds.tariterators.group_by_keys(content))
    images = [
        (sample["__key__"], extension)
        for sample in expected
        for extension in sample
        if extension.rpartition(".")[2] in ("jpg", "jpeg", "png")
    ]
    if not images:
        with pytest.raises(
            SourceError,
            match=r"no tars with images; its members have the extensions: \w",
        ):
            scan(tmp_path)
        return
    source, _, table = scanned("webdataset", tmp_path, tmp_path, missing_camera="mask")
    by_key = {sample["__key__"]: sample for sample in expected}
    num_images = 0
    for number in range(len(table)):
        row = table.row(number)
        key = json.loads(row.meta)["sample_token"]
        for member in row.members:
            extension = (
                member.name.removeprefix("image.")
                if member.name.startswith("image.")
                else member.name
            )
            theirs = by_key[key].get(extension, by_key[key].get("jpeg"))
            assert bytes(source.open(member.ref)) == theirs
            num_images += 1
    assert num_images == len(images)


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_members_of_a_sample_that_do_not_follow_each_other(tmp_path, ending):
    """First all images, then all captions, as `tar cf` of two folders has them."""
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w") as tar:
        for extension in ("jpg", "txt"):
            for number in range(4):
                data = labelled(number)["jpg"] if extension == "jpg" else b"caption %d" % number
                info = tarfile.TarInfo(f"{number:04d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    root = tmp_path / "tars"
    root.mkdir()
    data = gzip.compress(blob.getvalue()) if ending.endswith("gz") else blob.getvalue()
    (root / f"shard.{ending}").write_bytes(data)
    for missing in ("error", "mask", "drop"):
        with pytest.raises(SourceError, match=r"key '0000' comes again, with .txt.*gather=true"):
            scan(root, missing_camera=missing)
    spec = SourceSpec("webdataset", str(root), {"gather": True})
    TestTars().make(spec, tmp_path / "out")
    (batch,) = batches(tmp_path / "out", 4, channels=["txt"], shuffle=False)
    pairs = dict(zip(batch["sample_token"], batch["txt"], strict=True))
    assert pairs == {f"{number:04d}": f"caption {number}" for number in range(4)}
    assert "gather" not in scan_options({}) and scan_options({"gather": True})["gather"] is True


def scan_options(options):
    """The options that a recipe records."""
    return webdataset.WebDataset("nowhere", options).options


def test_joined_tars_are_refused_or_read_by_an_option(tars):
    first, second = sorted(tars.glob("*.tar"))
    first.write_bytes(first.read_bytes() + second.read_bytes())
    second.unlink()
    with pytest.raises(SourceError, match=r"another member follows.*ignore_zeros=true"):
        scan(tars)
    info = scan(tars, ignore_zeros=True)
    assert sum(clip.num_samples for clip in info.clips) == 8
    assert [count for text, count in info.report.noted.items() if "further tars" in text] == [1]


def test_what_is_left_out_of_a_folder_of_tars_is_counted(tars):
    (tars / "._drive-0.tar").write_bytes(b"\0\5\x16\7")
    (tars / "more.tar.bz2").write_bytes(b"BZh")
    with tarfile.open(tars / "mac.tar", "w") as tar:
        for name in (
            "__MACOSX/1.jpg",
            "a/.ipynb_checkpoints/1.jpg",
            "./1.jpg",
            "./._1.jpg",
        ):
            data = labelled(1)["jpg"]
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    info = scan(tars, images={"image": "jpg"}, missing_camera="drop")
    assert [clip.num_samples for clip in info.clips if clip.clip_name == "mac"] == [1]
    assert info.report.noted["hidden members left out"] == 3
    counts = {text.partition(",")[0]: count for text, count in info.report.noted.items()}
    assert counts["hidden files and folders left out"] == 1
    assert counts["files and folders beside the tars left out"] == 1


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_what_python_writes_for_numbers_that_json_has_not_is_unknown(tmp_path, ending):
    """Python's `json` writes NaN, Infinity and -Infinity; some editors write a byte order mark."""
    texts = [
        '{"score": 0.25, "caption": "a", "action": [1.5, 2]}',
        '{"score": NaN, "caption": "NaN \\" Infinity", "action": [NaN, -Infinity]}',
        '\ufeff{"score": 1, "caption": "c", "action": [3, 4]}',
        '{"score": -Infinity, "caption": "d", "deep": {"x": [0, NaN]}, "action": [5, 6]}',
    ]
    jpeg = labelled(0)["jpg"]
    write_labelled(
        tmp_path / "tars",
        ending,
        4,
        make=lambda number: {"jpg": jpeg, "json": texts[number].encode()},
    )
    report = fr.shard(f"webdataset:{tmp_path / 'tars'}", tmp_path / "out", workers=1)
    rows = fr.open(tmp_path / "out").table.to_pylist()
    assert [row["score"] for row in rows] == [0.25, None, 1.0, None]
    assert [row["caption"] for row in rows] == ["a", 'NaN " Infinity', "c", "d"]
    (batch,) = batches(tmp_path / "out", 4, channels=["action"], shuffle=False)
    np.testing.assert_array_equal(batch["action"], [[1.5, 2], [np.nan, -np.inf], [3, 4], [5, 6]])
    assert report.scan.noted["NaN and infinities in JSON, read as null outside of lists"] == 5


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_what_some_samples_lack_is_counted(tmp_path, ending):
    """A member, a list of the JSON, the JSON itself, and one without a byte."""

    def make(number):
        members = labelled(2 * number + 1)
        if number == 1:
            del members["feature.npy"]
        elif number == 2:
            members["json"] = b""
        elif number in (3, 4):
            del members["json"]
        return members

    write_labelled(tmp_path / "tars", ending, make=make)
    noted = scan(tmp_path / "tars").report.noted
    assert {text: count for text, count in noted.items() if "others have" in text} == {
        "samples without feature_npy, which others have": 1,
        "samples without json, which others have": 2,
        **{f"samples without {name}, which others have": 3 for name in ("action", "path", "tags")},
    }
    assert noted["members .json left out, empty (0 bytes)"] == 1
    with pytest.raises(SourceError, match=r"key 'a/0002': \.json is empty .* name t in it"):
        scan(tmp_path / "tars", timestamp_ns="t")
