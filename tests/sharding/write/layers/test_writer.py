"""A layer's bytes do not depend on the process that writes a row; a value that differs from the table is refused."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tarfile
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash

from fuelrail.__main__ import main
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetExistsError,
    ManifestError,
    SchemaError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.tables import file_entry, seal_tables
from fuelrail.pipeline.format.layers import LAYERS, LayerView, open_layer
from fuelrail.pipeline.format.manifest import encode_manifest, load_manifest
from fuelrail.sharding.api import verify
from fuelrail.sharding.verify.inspect import describe_dataset, describe_sample
from fuelrail.sharding.write.layers import finish as finish_module
from fuelrail.sharding.write.layers import writer as writer_module
from fuelrail.sharding.write.layers.rebase import rebase_layer
from fuelrail.sharding.write.layers.writer import LayerWriter
from support.batches import load
from support.datasets import build_dataset
from support.forked import fork, join
from support.hostile import edited, small_dataset, small_layer
from support.layers import TABLE, digests, values_of, write_layer
from support.sharding import flip

NUM_SAMPLES = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "base"
    build_dataset(root, {"train": (3, 4), "val": (5,)})
    return root


@pytest.mark.costly
def test_bytes_do_not_depend_on_who_wrote_what(base, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "ROWS_PER_SEGMENT", 3)
    monkeypatch.setattr(finish_module, "SHARD_BYTES", 20_000)
    expected = digests(write_layer(base, tmp_path / "a" / "teacher"))
    assert len([name for name in expected if name.endswith(".tar")]) > 1
    for number, split in enumerate(
        (
            [range(12)],
            [range(5, 12), range(6)],
            [range(k, 12, 4) for k in range(4)],
        )
    ):
        out = tmp_path / str(number) / "teacher"
        for positions in split:
            shuffled = np.random.default_rng(number).permutation(positions).tolist()
            with LayerWriter(base, out, channels=TABLE) as writer:
                for position in shuffled:
                    writer.write(position, values_of(position))
        assert writer.written().all()
        writer.finish()
        writer.finish()
        assert digests(out) == expected


def write_as_rank(base, out, rank: int, world: int) -> None:
    """Write every ``world``-th row that is not there, and finish the layer where all rows are there."""
    with LayerWriter(base, out, channels=TABLE) as writer:
        done = writer.written()
        for position in range(rank, NUM_SAMPLES, world):
            if not done[position]:
                writer.write(position, values_of(position))
                writer.flush()
    if writer.written().all():
        writer.finish()


def ranks(base, out, world: int) -> list[int]:
    """A process for each rank; their ids."""
    return [fork(partial(write_as_rank, base, out, rank, world)) for rank in range(world)]


NUM_KILLS = 100 if os.environ.get("FUELRAIL_ATTACK") == "all" else 8


@pytest.mark.process
def test_ranks_and_kills_do_not_show_in_the_bytes(base, tmp_path) -> None:
    expected = digests(write_layer(base, tmp_path / "alone" / "teacher"))
    for world in (1, 2, 4):
        out = tmp_path / str(world) / "teacher"
        assert [join(pid) for pid in ranks(base, out, world)] == [0] * world
        assert digests(out) == expected
    rng = random.Random(0)
    out = tmp_path / "killed" / "teacher"
    done = 0
    while done < NUM_KILLS:
        if (out / "dataset.json").exists():
            # A process that is killed after it wrote this file leaves its working folder, which the next one removes.
            assert join(ranks(base, out, 1)[0]) == 0
            assert digests(out) == expected
            shutil.rmtree(out)
        running = ranks(base, out, rng.choice((1, 4, 4)))
        time.sleep(rng.uniform(0.0, 0.15))
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            done += join(pid) == -signal.SIGKILL
    assert join(ranks(base, out, 1)[0]) == 0
    assert digests(out) == expected


def test_other_tools_and_commands_know_layers(base, tmp_path) -> None:
    before = digests(base)
    layer = write_layer(base, tmp_path / "teacher")
    assert digests(base) == before
    assert not verify(layer, deep=True).faults
    text = describe_dataset(layer).text
    assert "layer of" in text
    assert "complete" in text
    key = open_dataset(base).index.row(3).key
    assert "row 3" in describe_sample(layer, key).text
    shard = layer / "layer-000000.tar"
    with tarfile.open(shard) as tar:
        assert f"{key}.caption.txt" in tar.getnames()
    partial_layer = write_layer(base, tmp_path / "some", positions=[1, 5, 7])
    flip(shard, 700)
    flip(partial_layer / "rows.npy", -8)  # now two samples have one row
    assert verify(layer, deep=False).faults[0].file == "layer-000000.tar"
    assert "SHA-256" in verify(partial_layer, deep=False).faults[0].text
    with pytest.raises(ConfigError, match="is a layer, which no source has: write it again"):
        verify(partial_layer, repair=f"fuelrail:{base}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"logits": np.zeros(9, np.float16), "loss": np.float32(0)},
            r"float16\[9\]; the table has float16\[10\]",
        ),
        (
            {"logits": np.zeros(10, np.float32), "loss": np.float32(0)},
            "float32.*the table has float16",
        ),
        (
            {"logits": np.full(10, np.nan, np.float16), "loss": np.float32(0)},
            "NaN at .* forbids",
        ),
        (
            {"logits": np.full(10, np.inf, np.float16), "loss": np.float32(0)},
            "an infinity at .* forbids",
        ),
        ({"loss": np.float32(0)}, "'logits' is missing"),
        (
            {**values_of(0), "logits": torch.zeros(10, dtype=torch.bfloat16)},
            "'logits': numpy cannot take Tensor: ",
        ),
        (
            {**values_of(0), "caption": b"text"},
            "'caption' is bytes; kind 'text' takes str",
        ),
        (
            {**values_of(0), "caption": "\ud800"},
            "'caption' cannot be stored as UTF-8",
        ),
        (
            {**values_of(0), "logit": 1},
            "no channel 'logit'; it has: logits, loss, caption",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_key_and_channel(base, tmp_path, values, message) -> None:
    with (
        LayerWriter(base, tmp_path / "teacher", channels=TABLE) as writer,
        pytest.raises(SchemaError, match=message),
    ):
        writer.write(0, values)


@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (
            {
                **TABLE[0],
                "law": {"name": "image"},
                "kind": "image",
                "field": "logits.png",
                "dtype": "uint8",
                "axes": ["height", "width"],
                "shape": [None, None],
            },
            "camera",
        ),
        (
            {
                **TABLE[0],
                "law": {"name": "image", "camera": "cam_nowhere"},
                "kind": "image",
                "field": "logits.png",
                "dtype": "uint8",
                "axes": ["height", "width"],
                "shape": [None, None],
            },
            "cam_nowhere",
        ),
        ({**TABLE[0], "sensor": "camera"}, "cannot be in a layer"),
        ({**TABLE[0], "kind": "hologram"}, "kind 'hologram' is unknown"),
        ("logits", "must be a mapping; got the text 'logits'"),
        (
            {**TABLE[1], "name": "frame", "field": "frame.npy"},
            "'frame' is a number .* give it another name",
        ),
    ],
)
def test_a_wrong_table_is_refused(base, tmp_path, channel, message) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerWriter(base, tmp_path / "teacher", channels=[channel])


def test_damaged_work_in_progress_is_named(base, tmp_path) -> None:
    work = tmp_path / "layer" / ".fuelrail"
    with LayerWriter(base, tmp_path / "layer", channels=TABLE) as writer:
        for position in range(NUM_SAMPLES):
            writer.write(position, values_of(position))
    (segment,) = (work / "segments").iterdir()
    content = segment.read_bytes()
    for damaged in (
        b"",
        content[:20],
        content[:96] + b"\x00" + content[97:],
        content[:-30],
        content[:-9] + b"?" + content[-8:],
    ):
        segment.write_bytes(damaged)
        with pytest.raises(
            DatasetError,
            match=r"segments/000000000000-\w+\.rows' is damaged: remove it",
        ):
            writer.finish()
    (work / "layer.json").write_bytes(b"{")
    with pytest.raises(DatasetError, match=r"layer\.json' is cut or damaged"):
        writer.finish()
    (work / "layer.json").unlink()
    segment.write_bytes(content)
    assert writer.finish().num_samples == NUM_SAMPLES


def test_what_lies_on_images_is_not_bound_to_images_of_other_sizes(base, tmp_path) -> None:
    points = {
        "name": "kp",
        "kind": "points",
        "field": "kp.npy",
        "dtype": "float32",
        "axes": ["point", "column"],
        "shape": [None, 2],
        "columns": ["u", "v"],
        "law": {
            "name": "image_points",
            "camera": "cam_back",
            "roles": {"points": [["u", "v"]]},
        },
    }
    with LayerWriter(base, tmp_path / "layer", channels=[points]) as writer:
        writer.write(0, {"kp": np.ones((1, 2), np.float32)})
    writer.finish(partial=True)
    build_dataset(tmp_path / "small", {"train": (3,)}, back_size=(48, 32))
    with pytest.raises(
        DatasetError,
        match=r"'cam_back' of \[\(96, 64\)\] pixels, and .* in \[\(48, 32\)\]",
    ):
        rebase_layer(tmp_path / "layer", tmp_path / "small", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_raster_needs_the_size_of_its_camera(base, tmp_path) -> None:
    mask = {
        "name": "mask",
        "kind": "image",
        "field": "mask.png",
        "law": {"name": "image", "camera": "cam_front"},
        "dtype": "uint8",
        "axes": ["height", "width"],
        "shape": [None, None],
    }
    with LayerWriter(base, tmp_path / "masks", channels=[mask]) as writer:
        writer.write(0, {"mask": np.zeros((64, 96), np.uint8)})
        with pytest.raises(SchemaError, match=r"\[32, 96\] pixels .* need \[64, 96\]"):
            writer.write(1, {"mask": np.zeros((32, 96), np.uint8)})


def test_overlapping_writers_are_refused_where_they_disagree(base, tmp_path) -> None:
    for loss in (1.0, 2.0):
        with LayerWriter(base, tmp_path / "teacher", channels=TABLE) as writer:
            writer.write(4, {**values_of(4), "loss": np.float32(loss)})
    with pytest.raises(DatasetError, match="was written twice, with different values"):
        writer.finish(partial=True)


def test_a_writer_with_another_table_base_or_view_is_refused_with_both_sides(
    base, tmp_path
) -> None:
    LayerWriter(base, tmp_path / "teacher", channels=TABLE)
    with pytest.raises(
        DatasetExistsError,
        match=r"layer: channels\.loss: {.* there, none here; channels\.caption",
    ):
        LayerWriter(base, tmp_path / "teacher", channels=TABLE[:1])
    with pytest.raises(
        DatasetExistsError,
        match=r"layer: channels\.logits\.shape: \[10\] there, \[9\] here; choose",
    ):
        LayerWriter(
            base,
            tmp_path / "teacher",
            channels=[{**TABLE[0], "shape": [9]}, *TABLE[1:]],
        )
    with pytest.raises(DatasetExistsError, match="the order of its channels is another"):
        LayerWriter(base, tmp_path / "teacher", channels=TABLE[::-1])
    with pytest.raises(DatasetExistsError, match=r'view\.kind: none there, "per_view" here'):
        LayerWriter(
            base,
            tmp_path / "teacher",
            channels=TABLE,
            view=LayerView("per_view", 1, {}),
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "per_view"},
        {"kind": "per_view", "epoch": 1},
        {"kind": "per_view", "settings": {}},
        {"epoch": 1},
        {"settings": {}},
    ],
)
def test_a_view_without_epoch_and_settings_is_refused(base, tmp_path, fields) -> None:
    with pytest.raises(
        ConfigError,
        match="a view of kind 'per_view' has epoch and settings, one of kind 'fixed' has",
    ):
        LayerView(**fields)
    layer = write_layer(base, tmp_path / "teacher")
    manifest = json.loads((layer / "dataset.json").read_text())
    manifest["view"] = fields
    (layer / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ManifestError,
        match=r"at 'view': a view of kind .* has epoch and settings",
    ):
        open_layer("teacher", layer, open_dataset(base))


@pytest.mark.parametrize("stated", [7.5, None, float("nan")])
def test_attributes_that_are_not_the_members_values_are_found(base, tmp_path, stated) -> None:
    layer = write_layer(base, tmp_path / "teacher", positions=[3, 4, 6])
    table = pq.read_table(layer / "attributes.parquet")
    losses = pa.array([1.5, stated, 3.0], pa.float64())
    pq.write_table(table.set_column(5, "loss", losses), layer / "attributes.parquet")
    mend(layer)
    assert not verify(layer).faults
    (fault,) = verify(layer, deep=True).faults
    assert (fault.file, fault.key) == ("attributes.parquet", "clip-0001-000000")
    assert fault.text == f"row 1 has the loss {stated}, loss.npy has 2.0"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda table: table.drop_columns(["loss"]),
            "the channels of the layer make",
        ),
        (
            lambda table: table.append_column("night", pa.array([True] * 3)),
            "the channels of the layer make",
        ),
        (
            lambda table: table.drop_columns(["clip_id"]),
            "has no column 'clip_id'",
        ),
    ],
)
def test_other_columns_of_a_layers_attributes_are_found(base, tmp_path, edit, says) -> None:
    layer = write_layer(base, tmp_path / "teacher", positions=[3, 4, 6])
    pq.write_table(
        edit(pq.read_table(layer / "attributes.parquet")),
        layer / "attributes.parquet",
    )
    mend(layer)
    (fault,) = verify(layer).faults
    assert fault.file == "attributes.parquet"
    assert says in fault.text


def mend(layer) -> None:
    """Make blocks and manifest agree with changed attributes."""
    manifest = load_manifest(layer, LAYERS)
    seal_tables(layer)
    files = tuple(file_entry(layer / file.name) for file in manifest.files)
    (layer / "dataset.json").write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, files=files))
    )


def test_missing_rows_are_named_and_allowed_where_asked_for(base, tmp_path) -> None:
    with LayerWriter(base, tmp_path / "teacher", channels=TABLE) as writer:
        writer.write(4, values_of(4))
    with pytest.raises(DatasetError, match=r"11 of 12 samples have no row .* clip-"):
        writer.finish()
    assert writer.finish(partial=True).num_samples == 1
    with pytest.raises(DatasetError, match="is finished"):
        writer.write(5, values_of(5))


def test_a_writer_that_ends_after_the_layer_was_finished_leaves_no_file(base, tmp_path) -> None:
    expected = digests(write_layer(base, tmp_path / "a" / "teacher"))
    late = LayerWriter(base, tmp_path / "b" / "teacher", channels=TABLE)
    late.write(4, values_of(4))
    write_layer(base, tmp_path / "b" / "teacher")
    late.flush()
    late.finish()
    assert digests(tmp_path / "b" / "teacher") == expected
    assert not (tmp_path / "b" / "teacher" / ".fuelrail").exists()


def test_rows_of_a_writer_that_ends_after_a_partial_layer_are_not_lost_in_silence(
    base, tmp_path
) -> None:
    late = LayerWriter(base, tmp_path / "teacher", channels=TABLE)
    late.write(5, values_of(5))
    with LayerWriter(base, tmp_path / "teacher", channels=TABLE) as writer:
        writer.write(4, values_of(4))
    writer.finish(partial=True)
    with pytest.raises(
        DatasetError,
        match=r"finished with partial=True while .* of positions 5: finish",
    ):
        late.flush()


@pytest.mark.process
def test_processes_that_finish_at_once_do_not_disturb_each_other(base, tmp_path) -> None:
    """All find all rows there; one removes the working folder while others make their writers or finish."""

    def write_all() -> None:
        with LayerWriter(base, tmp_path / str(number) / "teacher", channels=TABLE) as writer:
            if not writer.is_finished:
                writer.write(4, values_of(4))
        writer.finish(partial=True)

    context = multiprocessing.get_context("fork")
    for number in range(4):
        processes = [context.Process(target=write_all) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 6
        assert not (tmp_path / str(number) / "teacher" / ".fuelrail").exists()


def test_a_run_that_was_killed_between_its_files_is_finished_by_the_next(base, tmp_path) -> None:
    expected = digests(write_layer(base, tmp_path / "a" / "teacher"))
    out = tmp_path / "b" / "teacher"
    with LayerWriter(base, out, channels=TABLE) as writer:
        for position in range(NUM_SAMPLES):
            writer.write(position, values_of(position))
    segments = tmp_path / "segments"
    shutil.copytree(out / ".fuelrail", segments)
    writer.finish()
    (out / "dataset.json").unlink()
    (out / "keys.arrow").unlink()
    shutil.copytree(segments, out / ".fuelrail")
    LayerWriter(base, out, channels=TABLE).finish()
    assert digests(out) == expected


def test_a_layer_of_another_dataset_and_of_an_older_version_is_refused_and_rebased(
    base, tmp_path
) -> None:
    layer = write_layer(base, tmp_path / "teacher")
    build_dataset(tmp_path / "other", {"train": (2,)}, seed=5)
    with pytest.raises(
        ManifestError,
        match=r"belongs to dataset .* give the dataset that it was made for",
    ):
        open_layer("teacher", layer, open_dataset(tmp_path / "other"))
    newer = tmp_path / "newer"
    build_dataset(newer, {"train": (3, 4), "val": (5, 2)})
    with pytest.raises(
        ManifestError,
        match=r"2 samples have no value: .*`fuelrail layer rebase",
    ):
        open_layer("teacher", layer, open_dataset(newer))
    report = rebase_layer(layer, newer, tmp_path / "rebased")
    assert (report.num_rows, report.num_without_value, report.num_unused) == (
        12,
        2,
        0,
    )
    assert (tmp_path / "rebased" / "layer-000000.tar").samefile(layer / "layer-000000.tar")
    rebased = open_layer("teacher", tmp_path / "rebased", open_dataset(newer), "mask")
    assert rebased.rows is not None
    assert rebased.manifest.lineage.parents == (
        open_layer("teacher", layer, open_dataset(base)).manifest.fingerprint,
    )
    keys = [open_dataset(newer).index.row(position).key for position in range(14)]
    rebased_keys = [
        None if row < 0 else rebased.data.index.row(row).key for row in rebased.rows.tolist()
    ]
    assert rebased_keys == [*keys[:12], None, None]
    assert not verify(tmp_path / "rebased", deep=True).faults
    expected = digests(tmp_path / "rebased")
    for name in (
        "dataset.json",
        "rows.npy",
        "keys.arrow",
    ):  # as if it had been killed before, or while it cleared up
        (tmp_path / "rebased" / ".fuelrail" / "tmp").mkdir(parents=True)
        (tmp_path / "rebased" / ".fuelrail" / "tmp" / "keys.arrow").write_bytes(b"part")
        (tmp_path / "rebased" / name).unlink()
        rebase_layer(layer, newer, tmp_path / "rebased")
        assert digests(tmp_path / "rebased") == expected
    (tmp_path / "rebased" / ".fuelrail").mkdir()
    (tmp_path / "rebased" / ".fuelrail" / "layer.json").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        rebase_layer(layer, newer, tmp_path / "rebased")
    (layer / "layer-000000.tar").unlink()
    with pytest.raises(
        DatasetError,
        match=r"teacher' has no file layer-000000\.tar; bring it back",
    ):
        rebase_layer(layer, newer, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(ManifestError, match="it is a layer"):
        open_dataset(layer)
    with pytest.raises(ConfigError, match="must match"):
        open_layer("Teacher!", layer, open_dataset(base))


def test_a_full_disk_is_one_error(base, tmp_path) -> None:
    with LayerWriter(base, tmp_path / "layer", channels=TABLE) as writer:
        for position in range(NUM_SAMPLES):
            writer.write(position, values_of(position))
    with (
        small_files(512),  # the file of attributes is open by then
        pytest.raises(
            DatasetError,
            match="File too large; rows that were published are kept; run the same",
        ),
    ):
        writer.finish()
    writer.finish()
    assert not verify(tmp_path / "layer", deep=True).faults
    with (
        small_files(64),
        pytest.raises(
            DatasetError,
            match="File too large; files that were linked are kept; run",
        ),
    ):
        rebase_layer(tmp_path / "layer", base, tmp_path / "rebased")
    rebase_layer(tmp_path / "layer", base, tmp_path / "rebased")
    assert not verify(tmp_path / "rebased", deep=True).faults


@contextlib.contextmanager
def small_files(max_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_layer_without_channels_is_attached_nowhere(tmp_path, capsys):
    base = small_dataset(tmp_path / "d")
    with edited(small_layer(base, tmp_path / "layer"), tmp_path / "empty") as parts:
        parts.manifest["channels"] = []
    with pytest.raises(ManifestError, match="has no channels"):
        open_layer("t", tmp_path / "empty", open_dataset(base))
    with pytest.raises(ManifestError, match="has no channels"):
        load(base, 2, layers={"t": tmp_path / "empty"})
    for word in ("verify", "inspect", "log"):
        assert main([word, str(tmp_path / "empty")]) != 0
        assert "has no channels" in "".join(capsys.readouterr())


def test_an_edited_segment_is_named(tmp_path):
    base = small_dataset(tmp_path / "d")
    for spoil in ("ends", "row", "key", "attributes"):
        out = tmp_path / spoil
        with LayerWriter(base, out, channels=TABLE) as writer:
            for position in range(8):
                writer.write(position, values_of(position))
        (path,) = (out / ".fuelrail" / "segments").iterdir()
        words = np.frombuffer(path.read_bytes()[: 17 * 8], "<i8").copy()
        blobs = path.read_bytes()[17 * 8 :]
        first = msgspec.msgpack.decode(blobs[: words[9]])
        if spoil == "ends":
            words[9] = 1 << 40
        elif spoil == "row":
            blobs = b"\xc1" + blobs[1:]
        else:
            if spoil == "key":
                first[0][0] = "../x"
            else:
                first[1] = ["text"] * len(first[1])
            encoded = msgspec.msgpack.encode(first)
            blobs = encoded + blobs[words[9] :]
            words[9:] += len(encoded) - words[9]
        content = words.tobytes() + blobs
        path.unlink()
        name = f"{path.name.partition('-')[0]}-{xxhash.xxh3_128_hexdigest(content)}.rows"
        (path.parent / name).write_bytes(content)
        with pytest.raises(DatasetError, match="segment"):
            LayerWriter(base, out, channels=TABLE).finish()
