"""Rows with the bytes of images: Parquet, Arrow files and Lance, written by pyarrow, `datasets` and `pylance`."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import tomllib
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.limits import TABLE
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import (
    SourceSpec,
    make_source,
    parse_source,
)
from fuelrail.sharding.sources.shared import arrow
from support.manifest_world import write_wide
from support.neutral_source import install_plugin
from support.sharding import digests
from support.source_suite import SourceSuite

FOLDER = Path(__file__).parents[3] / "configs" / "sources" / "arrow"
NAMES = ["cat", "dog", "owl"]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TYPES = {
    "image": IMAGE,
    "label": pa.int64(),
    "Caption": pa.string(),
    "words": pa.list_(pa.string()),
    "box": pa.list_(pa.float32(), 4),
    "areas": pa.list_(pa.list_(pa.float32())),
    "score": pa.float64(),
    "talk": pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())])),
    "sure": pa.bool_(),
    "source": pa.dictionary(pa.int32(), pa.string()),
    "sound": IMAGE,
}


@pytest.fixture(autouse=True)
def plugin(tmp_path_factory, monkeypatch):
    place = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"][
        "fuelrail.sources"
    ]
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "arrow", place["arrow"])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(folder)


def picture(number, form="JPEG"):
    pixels = np.random.default_rng(number).integers(
        0, 256, (24 + number % 3, 32, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def row(number):
    return {
        "image": {
            "bytes": picture(number, "PNG" if number % 4 == 3 else "JPEG"),
            "path": f"{number}.jpg",
        },
        "label": number % 3,
        "Caption": None if number == 5 else f"Straße {number}",
        "words": [f"w{word}" for word in range(number % 3)],
        "box": [number, 1.5, 2, 3],
        "areas": [[number, area] for area in range(number % 2)],
        "score": None if number == 6 else number / 7,
        "talk": [{"from": "human", "value": f"question {number}"}],
        "sure": number % 2 == 0,
        "source": "web" if number % 2 else "book",
        "sound": {"bytes": b"RIFF", "path": "a.wav"},
    }


def schema_metadata():
    """What Hugging Face writes into the schema of its files."""
    features = {
        "image": {"_type": "Image"},
        "label": {"names": NAMES, "_type": "ClassLabel"},
        "sound": {"_type": "Audio"},
        "words": {
            "feature": {"dtype": "string", "_type": "Value"},
            "_type": "List",
        },
        "talk": [{"from": {"dtype": "string", "_type": "Value"}}],
    }
    return {"huggingface": json.dumps({"info": {"features": features}})}


def table(rows, types=TYPES, metadata=None):
    """The rows with these columns."""
    columns = {
        name: pa.array([record[name] for record in rows], kind) for name, kind in types.items()
    }
    return pa.table(columns).replace_schema_metadata(
        schema_metadata() if metadata is None else metadata
    )


def write(root, name, content, form="parquet", rows=5):
    """Write a file of Parquet, or Arrow's stream or file format, with groups of some rows."""
    path = root / f"{name}.{'parquet' if form == 'parquet' else 'arrow'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        pq.write_table(content, path, row_group_size=rows)
        return path
    make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with (
        pa.OSFile(str(path), "wb") as file,
        make(file, content.schema) as writer,
    ):
        writer.write_table(content, max_chunksize=rows)
    return path


def scan(root, **options):
    return scan_source(SourceSpec("arrow", str(root), options))


def shard(root, out, workers=1, **options):
    report = fr.shard(f"arrow:{root}", out, options=options, workers=workers)
    assert not fr.verify(out, deep=True).faults
    return report


def by_token(out):
    """Each sample and its attributes, by the source's name."""
    dataset = fr.open(out)
    table = dataset.table.to_pylist()
    samples = {}
    for number in range(len(dataset)):
        sample = dataset.read(number)
        samples[sample["meta"].sample_token] = sample | {"attributes": table[number]}
    return samples


def check(sample, record):
    """Compare a sample with the row that it was made of."""
    assert sample["image"] == record["image"]["bytes"]
    assert sample.get("caption") == record["Caption"]
    assert sample["words"] == record["words"]
    np.testing.assert_array_equal(sample["box"], np.array(record["box"], np.float32))
    np.testing.assert_array_equal(
        sample["areas"]["values"],
        np.array(record["areas"], np.float32).reshape(-1, 2),
    )
    assert json.loads(sample["talk"]) == record["talk"]
    assert (sample["attributes"]["label"], sample["attributes"]["score"]) == (
        record["label"],
        record["score"],
    )
    assert sample["attributes"]["sure"] is record["sure"]


@pytest.mark.costly
@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_samples_are_the_rows(tmp_path, form):
    rows = [row(number) for number in range(12)]
    write(tmp_path / "in", "data/train-00000-of-00002", table(rows[:8]), form)
    write(tmp_path / "in", "data/train-00001-of-00002", table(rows[8:10]), form)
    write(
        tmp_path / "in",
        "data/validation-00000-of-00001",
        table(rows[10:]),
        form,
    )
    assert make_source(SourceSpec("arrow", str(tmp_path / "in"), {})).reads == (
        "clip" if form == "parquet" else "random"
    )
    report = shard(tmp_path / "in", tmp_path / "out", columns={"source": "source"})
    assert report.scan.noted == {"column sound left out, struct<bytes: binary, path: string>": 1}
    dataset = fr.open(tmp_path / "out")
    assert list(dataset.manifest.classes) == NAMES
    assert {
        name: (split.num_samples, split.num_clips) for name, split in dataset.splits.items()
    } == {
        "train": (10, 3),
        "val": (2, 1),
    }
    samples = by_token(tmp_path / "out")
    ending = "parquet" if form == "parquet" else "arrow"
    places = [
        (0, 8, "data/train-00000-of-00002"),
        (8, 10, "data/train-00001-of-00002"),
        (10, 12, "data/validation-00000-of-00001"),
    ]
    names = [
        f"{name}.{ending}#{row_number}"
        for begin, end, name in places
        for row_number in range(end - begin)
    ]
    assert samples.keys() == set(names)
    for name, expected in zip(names, rows, strict=True):
        check(samples[name], expected)
        assert samples[name]["attributes"]["source"] == expected["source"]
    shard(
        tmp_path / "in",
        tmp_path / "again",
        workers=3,
        columns={"source": "source"},
    )
    assert digests(tmp_path / "again") == digests(tmp_path / "out")
    transforms = {
        "select": ["words", "caption"],
        "image": {"height": 24, "width": 32},
    }
    with fr.DataLoader(tmp_path / "out", 4, shuffle=False, transforms=transforms) as loader:
        (batch, *_) = loader
    assert batch["words"] == [samples[token]["words"] for token in batch["sample_token"]]


@pytest.mark.costly
def test_columns_may_be_those_of_a_manifest(tmp_path):
    rows = [
        {
            "drive": f"d{number // 4}",
            "t": 1_600_000_000.0 + number / 2,
            "img": picture(number),
            "id": 100 + number,
        }
        for number in range(8)
    ]
    types = {
        "drive": pa.string(),
        "t": pa.float64(),
        "img": pa.large_binary(),
        "id": pa.int64(),
    }
    names = {
        "drive": "clip_id",
        "t": "timestamp_s",
        "img": "cam.Front",
        "id": "sample_token",
    }
    for form in ("parquet", "stream"):
        write(tmp_path / form, "rows", table(rows, types, {}), form, rows=3)
        shard(tmp_path / form, tmp_path / f"{form}-out", columns=names)
        dataset = fr.open(tmp_path / f"{form}-out")
        samples = by_token(tmp_path / f"{form}-out")
        assert dataset.manifest.time_base == "unix" and set(
            dataset.table["clip_name"].to_pylist()
        ) == {"d0", "d1"}
        for number, record in enumerate(rows):
            sample = samples[str(100 + number)]
            assert sample["front"] == record["img"]
            assert sample["meta"].timestamp_ns == round(record["t"] * 1e9)


class TestParquetWorld(SourceSuite):
    """The suite of all sources, on a manifest whose images are in its rows."""

    kind = "arrow"
    impossible = ("no file",)
    states_sizes = False
    options: ClassVar = {
        "boxes_in": "global",
        "lidar_columns": ["x", "y", "z", "intensity", "ring"],
    }
    reads_heads = False
    form = "parquet"

    def write(self, world, root):
        write_wide(world, root, "parquet")
        rows = pq.read_table(root / "frames.parquet")
        (root / "frames.parquet").unlink()
        for position, name in enumerate(rows.column_names):
            if name.startswith("cam.") and name.endswith(".path"):
                data = [
                    None if path is None else (root / path).read_bytes()
                    for path in rows.column(name).to_pylist()
                ]
                rows = rows.set_column(
                    position,
                    name.removesuffix(".path"),
                    pa.array(data, pa.binary()),
                )
        for path in root.rglob("*.jpg"):
            path.unlink()
        write(root, "rows", rows, self.form, rows=4)
        return str(root)


class TestArrowWorld(TestParquetWorld):
    form = "stream"


def test_paths_of_images_without_bytes_are_read_below_the_root(tmp_path):
    rows = [
        {"image": {"bytes": None, "path": "a.jpg"}},
        {"image": {"bytes": picture(1), "path": "gone.jpg"}},
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(picture(0))
    for form in ("parquet", "file"):
        write(tmp_path / "in", "rows", table(rows, {"image": IMAGE}), form)
        shard(tmp_path / "in", tmp_path / form)
        assert sorted(sample["image"] for sample in by_token(tmp_path / form).values()) == sorted(
            [picture(0), picture(1)]
        )
        (tmp_path / "in" / f"rows.{'parquet' if form == 'parquet' else 'arrow'}").unlink()
    rows[0]["image"]["path"] = "../a.jpg"
    write(tmp_path / "in", "rows", table(rows, {"image": IMAGE}))
    with pytest.raises(
        SourceError,
        match=r"row 0, column path: '../a.jpg' is not inside the source",
    ):
        scan(tmp_path / "in")


@pytest.mark.parametrize("form", ["parquet", "stream"])
def test_damaged_images_follow_the_policy(tmp_path, form):
    rows = [row(number) for number in range(6)]
    rows[2]["image"] = {"bytes": b"no picture", "path": None}
    rows[4]["image"] = {"bytes": b"", "path": None}
    rows[5]["image"] = None
    write(tmp_path, "train", table(rows), form)
    with pytest.raises(
        SourceError,
        match=r"train.*(is neither JPEG nor PNG|is empty).*damaged_image=mask",
    ):
        scan(tmp_path, missing_camera="mask")
    with pytest.raises(
        SourceError,
        match=r"images are damaged, more than the share of max_damaged=0\.1",
    ):
        scan(
            tmp_path,
            damaged_image="drop",
            missing_camera="drop",
            max_damaged=0.1,
        )
    info = scan(tmp_path, damaged_image="drop", missing_camera="drop", max_damaged=0.5)
    assert info.report.samples == 3 and info.report.damaged == {"image": 2}
    info = scan(tmp_path, damaged_image="mask", missing_camera="mask", max_damaged=0.5)
    assert info.report.samples == 3 and info.report.damaged == {"image": 2}


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_damaged_files_are_named(tmp_path, form):
    path = write(tmp_path, "train", table([row(number) for number in range(9)]), form)
    content = path.read_bytes()
    for size in (0, 5, len(content) // 2, len(content) - 3):
        path.write_bytes(content[:size])
        if (form, size) == ("stream", len(content) - 3):
            continue  # the mark of the end, which a stream may lack
        with pytest.raises(SourceError, match="train"):
            scan(tmp_path)


@pytest.mark.costly
@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_changed_bytes_end_in_one_sentence_or_in_other_values(tmp_path, form):
    """Offsets, indices and texts of a file are checked before any is used: pyarrow itself would read elsewhere."""
    path = write(tmp_path, "train", table([row(number) for number in range(4)]), form)
    content = path.read_bytes()
    rng = random.Random(form)
    for _ in range(40):
        data = bytearray(content)
        for _ in range(rng.choice((1, 3, 20))):
            position = rng.choice(
                (
                    rng.randrange(3000),
                    len(data) - 1 - rng.randrange(3000),
                    rng.randrange(len(data)),
                )
            )
            data[position] = rng.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(fr.errors.FuelrailError):
            scan(tmp_path)


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    rows = [row(number) for number in range(3)]
    with pytest.raises(SourceError, match=r"has no \.parquet, \.arrow, \.lance"):
        scan(tmp_path)
    path = write(tmp_path, "a", table(rows), "file")
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(str(path), table(rows).schema, options=options) as writer:
        writer.write_table(table(rows))
    with pytest.raises(
        SourceError,
        match="record batches are compressed: write them without compression",
    ):
        scan(tmp_path)
    write(tmp_path, "a", table(rows), "file")
    with pytest.raises(SourceError, match=r"has no column 'nothing'; it has image, label"):
        scan(tmp_path, columns={"nothing": "clip_id"})
    with pytest.raises(SourceError, match="two columns are label"):
        scan(tmp_path, columns={"source": "label"})
    (tmp_path / "names.yaml").write_text("cat: animal\n")
    with pytest.raises(SourceError, match="leave the option classes out"):
        scan(tmp_path, classes=str(tmp_path / "names.yaml"))
    write(tmp_path, "b", table(rows, {"image": IMAGE}), "file")
    with pytest.raises(SourceError, match=r"b\.arrow.*it has no column '.*', as 'a.arrow' has"):
        scan(tmp_path)
    shutil.rmtree(tmp_path)
    write(tmp_path, "a", table(rows, {"label": pa.int64()}))
    with pytest.raises(SourceError, match="names no camera"):
        scan(tmp_path)
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.arrow").symlink_to("/etc/hostname")
    with pytest.raises(SourceError, match="outside of the source"):
        scan(tmp_path)


def write_batches(path, content, form, compression="zstd"):
    """Write the record batches of a table as an Arrow file or stream."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with new(str(path), content.schema, options=options) as writer:
        for batch in content.to_batches():
            writer.write_batch(batch)


ZEROS = pa.array(np.zeros(3000))
TEXT = pa.DictionaryArray.from_arrays(np.zeros(400, np.int8), [50_000 * "x"])
TEXT_STORED = pa.DictionaryArray.from_arrays(np.zeros(400, np.int8), [10_000 * "x"])
BATCH = "a record batch, decoded"
ROWS = r"\d+ rows, decoded"
ELEMENTS = pa.ListArray.from_arrays([0, 3000], pa.nulls(3000))
LARGE = {
    "compressed numbers": (BATCH, pa.table({"score": ZEROS})),
    "a compressed dictionary": (BATCH, pa.table({"source": TEXT.slice(0, 1)})),
    "a text of many rows": (ROWS, pa.table({"source": TEXT_STORED})),
    "rows without bytes": (ROWS, pa.table({"score": pa.nulls(3000)})),
    "a text of many rows inside": (
        ROWS,
        pa.table({"talk": pa.StructArray.from_arrays([TEXT_STORED], ["a"])}),
    ),
    "elements without bytes": (ROWS, pa.table({"words": ELEMENTS})),
}


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize(("words", "content"), LARGE.values(), ids=LARGE)
def test_rows_that_decode_to_more_than_the_limit_are_refused(
    tmp_path, monkeypatch, form, words, content
):
    write_batches(tmp_path / "a.arrow", content, form)
    assert (tmp_path / "a.arrow").stat().st_size < 20_000
    monkeypatch.setattr(arrow, "TABLE", TABLE._replace(maximum=20_000))
    with pytest.raises(SourceError, match=rf"a\.arrow'.*{words}, has \d+ bytes, .* most 20000"):
        scan(tmp_path)


@pytest.mark.parametrize("form", ["file", "stream"])
def test_what_is_stored_as_it_is_stays_in_the_file_and_has_no_limit(tmp_path, monkeypatch, form):
    rows = [row(number) for number in range(4)]
    write_batches(tmp_path / "a.arrow", table(rows), form, compression=None)
    num_bytes = sum(len(record["image"]["bytes"]) for record in rows)
    monkeypatch.setattr(arrow, "TABLE", TABLE._replace(maximum=num_bytes // 2))
    assert scan(tmp_path).num_samples == 4


def test_columns_of_views_and_runs_are_left_out_by_name(tmp_path):
    rows = table([row(number) for number in range(4)])
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([4], pa.int32()), pa.array(["x"]))
    rows = rows.append_column("runs", runs)
    rows = rows.append_column("seen", pa.array([["x"]] * 4, pa.list_(pa.string_view())))
    write_batches(tmp_path / "a.arrow", rows, "file", compression=None)
    noted = str(scan(tmp_path).report)
    assert "column runs left out" in noted
    assert "column seen left out" in noted
    with pytest.raises(
        SourceError,
        match=r"column 'runs' of run_end_encoded.* write plain values",
    ):
        scan(tmp_path, columns={"runs": "clip_id"})


def test_the_kind_says_how_to_install_it(monkeypatch):
    from fuelrail.sharding.sources import registry

    monkeypatch.setattr(registry, "entry_points", lambda **_: ())
    with pytest.raises(fr.errors.ConfigError, match=r"pip install ./configs/sources/arrow"):
        parse_source("arrow:somewhere", {})


@pytest.mark.costly
def test_what_hugging_face_saves_is_read(tmp_path):
    hf = pytest.importorskip("datasets")
    features = hf.Features(
        {
            "image": hf.Image(),
            "label": hf.ClassLabel(names=NAMES),
            "Caption": hf.Value("string"),
            "words": hf.Sequence(hf.Value("string")),
            "box": hf.Sequence(hf.Value("float32"), length=4),
            "areas": hf.Sequence(hf.Sequence(hf.Value("float32"))),
            "score": hf.Value("float64"),
            "talk": [{"from": hf.Value("string"), "value": hf.Value("string")}],
            "sure": hf.Value("bool"),
            "grid": hf.Array2D((2, 3), "int32"),
        }
    )
    rows = [{**row(number), "grid": [[number, 1, 2], [3, 4, 5]]} for number in range(25)]
    columns = {name: [record[name] for record in rows] for name in features}
    saved = hf.Dataset.from_dict(columns, features=features)
    dataset_dict = hf.DatasetDict(
        {"train": saved.select(range(20)), "test": saved.select(range(20, 25))}
    )
    dataset_dict.save_to_disk(tmp_path / "disk", num_shards={"train": 2, "test": 1})
    (tmp_path / "hub").mkdir()
    for split, split_rows in dataset_dict.items():
        split_rows.to_parquet(tmp_path / "hub" / f"{split}-00000-of-00001.parquet", batch_size=8)
    for folder in ("disk", "hub"):
        shard(tmp_path / folder, tmp_path / f"{folder}-out")
        dataset = fr.open(tmp_path / f"{folder}-out")
        samples = by_token(tmp_path / f"{folder}-out")
        assert list(dataset.manifest.classes) == NAMES
        assert {name: split.num_samples for name, split in dataset.splits.items()} == {
            "train": 20,
            "test": 5,
        }
        if folder == "disk":
            reloaded = hf.load_from_disk(tmp_path / "disk")
        else:
            files = {
                name: str(tmp_path / "hub" / f"{name}-00000-of-00001.parquet")
                for name in dataset_dict
            }
            reloaded = hf.load_dataset(
                "parquet", data_files=files, cache_dir=str(tmp_path / "cache")
            )
        theirs = [
            example
            for part in reloaded.values()
            for example in part.cast_column("image", hf.Image(decode=False))
        ]
        sample_by_score = {sample["attributes"]["score"]: sample for sample in samples.values()}
        for example in theirs:
            sample = sample_by_score[example["score"]]
            check(sample, example)
            np.testing.assert_array_equal(sample["grid"], np.array(example["grid"], np.int32))


@pytest.mark.costly
def test_lance_datasets_are_read_also_after_deletions(tmp_path):
    lance = pytest.importorskip("lance")
    rows = [
        {"image": picture(number), "label": number % 3, "number": number} for number in range(40)
    ]
    types = {
        "image": pa.large_binary(),
        "label": pa.int64(),
        "number": pa.int32(),
    }
    place = tmp_path / "in" / "train.lance"
    lance.write_dataset(table(rows[:25], types, {}), place)
    lance.write_dataset(table(rows[25:], types, {}), place, mode="append")
    lance.dataset(place).delete("label = 2")
    remaining = lance.dataset(place).to_table().to_pylist()
    for location, out in (
        (tmp_path / "in", tmp_path / "a"),
        (place, tmp_path / "b"),
    ):
        shard(location, out)
        samples = {sample["attributes"]["number"]: sample for sample in by_token(out).values()}
        assert samples.keys() == {record["number"] for record in remaining} and len(remaining) == 27
        assert all(samples[record["number"]]["image"] == record["image"] for record in remaining)


def test_lance_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lance", None)
    (tmp_path / "train.lance").mkdir()
    with pytest.raises(SourceError, match="is a Lance dataset: pip install pylance"):
        scan(tmp_path)


def test_jpegs_are_those_that_were_written(tmp_path):
    """A check of the pictures themselves, by a decoder."""
    write(tmp_path / "in", "train", table([row(0)]))
    shard(tmp_path / "in", tmp_path / "out")
    (sample,) = by_token(tmp_path / "out").values()
    assert simplejpeg.decode_jpeg(sample["image"]).shape == (24, 32, 3)
