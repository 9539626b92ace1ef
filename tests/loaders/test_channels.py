"""Selected channels in batches: shapes by kind, frames, missing values, the user's functions, mixes, resuming."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from fuelrail import (
    BevAugment,
    DataLoader,
    FrameWindow,
    ImageAugment,
    OrderSpec,
    Transforms,
    World,
)
from fuelrail.loaders.batch.channels import (
    OWN_NAMES,
    SelectedChannels,
    choose_channels,
)
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.layers import LayeredStorage
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law
from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    ManifestError,
    SchemaError,
    StateMismatchError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from support.batches import unlike
from support.channels import fixed, points, tokens
from support.datasets import LIDAR, build_dataset
from support.edits import reseal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fuelrail.loaders.storage.protocol import StorageStats

CHANNELS = (
    points("radar", optional=True),
    points("returns", frame=f"sensor:{LIDAR}"),
    Channel(
        name="mask",
        kind="image",
        field="mask.png",
        law=Law("image", camera="cam_front"),
        dtype="uint16",
        axes=("height", "width"),
        shape=(None, None),
        frame="image:cam_front",
        optional=True,
    ),
    Channel(
        name="occupancy",
        kind="array",
        field="occupancy.npy",
        dtype="uint8",
        axes=("x", "y"),
        shape=(8, 6),
        frame="ego",
        law=Law("ego_grid", extent_m=(-8.0, -6.0, 8.0, 6.0)),
    ),
    fixed("score", "array", "npy", dtype="float16", optional=True),
    fixed(
        "agents",
        "ragged",
        "safetensors",
        optional=True,
        arrays=(ArraySpec("speed", "float32"), ArraySpec("kind", "int8", (2,))),
    ),
    fixed("caption", "text", "txt", optional=True),
    fixed("blob", "bytes", "bin", optional=True),
    tokens("topics", dtype="int32", length=3),
    tokens("words", optional=True),
)
NAMES = [channel.name for channel in CHANNELS]
LACKING = 2
"""Rows with this remainder by 5 lack the optional channels."""


def stored(name: str, row: int) -> Any:
    """The value that the tiny dataset stores for a row; None where it lacks the channel."""
    optional = next(channel.optional for channel in CHANNELS if channel.name == name)
    if optional and row % 5 == LACKING:
        return None
    rng = np.random.default_rng((NAMES.index(name), row))
    return {
        "radar": lambda: rng.uniform(-20, 20, (row + 1, 3)).astype(np.float32),
        "returns": lambda: rng.uniform(-20, 20, (5, 3)).astype(np.float32),
        "mask": lambda: rng.integers(1, 60000, (64, 96)).astype(np.uint16),
        "occupancy": lambda: rng.integers(0, 255, (8, 6)).astype(np.uint8),
        "score": lambda: np.float16(row),
        "agents": lambda: {
            "speed": np.arange(row, dtype=np.float32),
            "kind": rng.integers(0, 9, (row, 2)).astype(np.int8),
        },
        "caption": lambda: f"frame {row}",
        "blob": lambda: bytes([row, row]),
        "topics": lambda: rng.integers(0, 1000, 3).astype(np.int32),
        "words": lambda: np.arange(row % 4, dtype=np.int64),
    }[name]()


def build(root: Path, channels: tuple[Channel, ...] = CHANNELS, **options: Any) -> Path:
    def maker(name: str) -> Callable[[int], Any]:
        return lambda row: stored(name, row)

    extra = [(channel, maker(channel.name)) for channel in channels]
    build_dataset(root, {"train": (8, 4)}, extra=extra, **options)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("channels") / "d")


PLAIN = Transforms(image=ImageAugment(height=64, width=96), decoder="pillow")
AUGMENTED = Transforms(
    image=ImageAugment(
        height=32,
        width=48,
        train=True,
        resize_range=(0.4, 0.7),
        flip_prob=0.5,
        rotate_deg=(-5, 5),
    ),
    ego=BevAugment(train=True, rotate_deg=(-90, 90), scale=(0.9, 1.1), flip_x_prob=0.5),
    decoder="pillow",
)


def loader(root: Any, size: int = 4, **options: Any) -> DataLoader:
    options = {
        "select": NAMES,
        "transforms": PLAIN,
        "shuffle": False,
        "num_workers": 2,
        **options,
    }
    chosen = {name: options.pop(name) for name in ("select", "points") if name in options}
    transforms = msgspec.structs.replace(options.pop("transforms"), **chosen)
    return DataLoader(
        root,
        size,
        world=World(),
        transforms=transforms,
        **{"shuffle": True, "drop_last": True, **options},
    )


def batches(data_loader: DataLoader) -> list[dict[str, Any]]:
    with data_loader:
        return list(data_loader)


def test_channels_of_little_work_are_parsed_by_one_thread_which_leaves_the_others_to_images() -> (
    None
):
    by_name = {channel.name: channel for channel in CHANNELS}
    large = [name for name in by_name if SelectedChannels((by_name[name],)).are_large]
    assert large == ["mask", "occupancy"], "decoded, and warped"
    score = msgspec.structs.replace(by_name["score"], axes=("x",), shape=(128 << 10,))
    assert not SelectedChannels((score,)).are_large
    assert SelectedChannels((score, by_name["topics"])).are_large, "beyond 256 KiB"
    assert SelectedChannels((msgspec.structs.replace(by_name["radar"], sensor="lidar"),)).are_large


def test_each_kind_is_collated_as_documented(root) -> None:
    (batch, *_) = batches(loader(root))
    lacking = [row == LACKING for row in range(4)]
    for channel in CHANNELS:
        assert batch[f"{channel.name}_valid"].tolist() == [
            not (channel.optional and gone) for gone in lacking
        ]
    assert batch["mask"].dtype == torch.uint16
    assert batch["mask"].shape == (4, 64, 96)
    assert batch["occupancy"].shape == (4, 8, 6)
    assert batch["score"].tolist() == [0.0, 1.0, 0.0, 3.0]
    assert batch["score"].dtype == torch.float16
    assert batch["topics"].shape == (4, 3)
    assert batch["caption"] == ["frame 0", "frame 1", None, "frame 3"]
    assert batch["blob"] == [b"\0\0", b"\1\1", None, b"\3\3"]
    assert batch["words"]._fields == ("values", "offsets")
    assert batch["words"].offsets.tolist() == [0, 0, 1, 1, 4]
    assert batch["words"].values.tolist() == [0, 0, 1, 2]
    for row in range(4):
        np.testing.assert_array_equal(batch["occupancy"][row], stored("occupancy", row))
        np.testing.assert_array_equal(batch["returns"][row], stored("returns", row))
        np.testing.assert_array_equal(batch["topics"][row], stored("topics", row))
        if row == LACKING:
            assert not batch["mask"][row].any()
            assert (
                batch["radar"][row]
                is batch["agents"]["speed"][row]
                is batch["agents"]["kind"][row]
                is None
            )
            continue
        np.testing.assert_array_equal(batch["mask"][row], stored("mask", row))
        np.testing.assert_array_equal(batch["radar"][row], stored("radar", row))
        for name, array in stored("agents", row).items():
            np.testing.assert_array_equal(batch["agents"][name][row], array)
            assert batch["agents"][name][row].shape == array.shape


def test_windows_put_an_axis_of_frames_behind_the_samples(root) -> None:
    window = FrameWindow(frames=(-1, 0), pad="mask")
    (batch, *_) = batches(loader(root, window=window, transforms=AUGMENTED))
    singles = {}
    for single in batches(loader(root, transforms=PLAIN)):
        singles |= {
            row: (single, index) for index, row in enumerate(single["global_index"].tolist())
        }
    assert batch["frame_valid"].tolist() == [
        [False, True],
        [True, True],
        [True, True],
        [True, True],
    ]
    assert batch["topics"].shape == (4, 2, 3)
    assert batch["mask"].shape == (4, 2, 32, 48)
    assert batch["words"].offsets.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 5]
    for index, rows in enumerate(batch["frame_global_index"].tolist()):
        for frame, row in enumerate(rows):
            is_shown = bool(batch["frame_valid"][index, frame])
            for channel in CHANNELS:
                is_present = is_shown and stored(channel.name, row) is not None
                assert batch[f"{channel.name}_valid"][index, frame] == is_present
            caption = stored("caption", row) if is_shown else None
            assert batch["caption"][index][frame] == caption
            speed = batch["agents"]["speed"][index][frame]
            assert (speed is None) == (caption is None)
            assert speed is None or speed.tolist() == list(range(row))
            if not is_shown:
                assert batch["radar"][index][frame] is batch["returns"][index][frame] is None
                assert not batch["topics"][index, frame].any()
            elif caption is not None:
                bda = batch["bda_mat"][index].numpy().astype(np.float64)
                moved = stored("radar", row) @ bda[:3, :3].T + bda[:3, 3]
                np.testing.assert_allclose(batch["radar"][index][frame], moved, atol=1e-4)


def test_points_of_a_lidar_move_as_the_lidars_own(root) -> None:
    (batch, *_) = batches(loader(root, transforms=AUGMENTED, points=True))
    bda = batch["bda_mat"].double()
    lidar2ego = batch["lidar2ego"].double()
    for index, row in enumerate(batch["global_index"].tolist()):
        matrix = (torch.linalg.inv(lidar2ego[index]) @ bda[index] @ lidar2ego[index]).numpy()
        afresh = stored("returns", row) @ matrix[:3, :3].T + matrix[:3, 3]
        np.testing.assert_allclose(batch["returns"][index], afresh, atol=1e-4)


def test_a_lidar_may_be_selected_by_name(root) -> None:
    (points, *_) = batches(loader(root, transforms=AUGMENTED, points=True, select=None))
    (named, *_) = batches(loader(root, transforms=AUGMENTED, select=[LIDAR]))
    assert named[f"{LIDAR}_valid"].all() and "points" not in named
    for cloud, lidar_points in zip(named[LIDAR], points["points"], strict=True):
        np.testing.assert_allclose(cloud, lidar_points, atol=1e-5)
    with pytest.raises(ConfigError, match=f"'{LIDAR}' is in the batch as `points` already"):
        loader(root, points=True, select=[LIDAR])


@pytest.mark.parametrize("window", [None, FrameWindow(frames=(-1, 0))])
def test_samples_for_a_transform_have_them_too(root, window) -> None:
    samples = []

    def replace_entries(sample: dict[str, Any]) -> dict[str, Any]:
        samples.append(sample)
        return {
            "agents": sample["caption"],
            "words": len(sample["words"]),
            "caption": sample["sample_key"],
        }

    (batch, *_) = batches(
        loader(root, transform=replace_entries, transforms=AUGMENTED, window=window)
    )
    sample = next(entry for entry in samples if entry["sample_key"] == "clip-0000-000003")
    assert sample["mask"].shape == ((32, 48) if window is None else (2, 32, 48))
    if window is None:
        assert sample["agents"]["speed"].tolist() == [0.0, 1.0, 2.0]
        assert samples[0].keys() - {*NAMES, *(f"{name}_valid" for name in NAMES)} <= OWN_NAMES
        # What a transform leaves in the place of an entry is joined as any other thing of the user's.
        assert batch["agents"] == ["frame 0", "frame 1", None, "frame 3"]
        assert batch["words"] == [0, 1, 0, 3]


def test_a_batch_without_any_value_keeps_its_shapes(root, tmp_path) -> None:
    (tmp_path / "keys.txt").write_text("clip-0000-000002\nclip-0001-000003\n")
    order = OrderSpec(kind="sequential", subset=str(tmp_path / "keys.txt"))
    (batch,) = batches(loader(root, 2, order=order, transforms=AUGMENTED))
    assert batch["mask"].shape == (2, 32, 48)
    assert batch["mask"].dtype == torch.uint16
    assert batch["score"].shape == (2,)
    assert batch["words"].offsets.tolist() == [0, 0, 0]
    assert batch["words"].values.dtype == torch.int64
    assert not batch["mask_valid"].any()
    assert batch["topics_valid"].all()


def test_only_what_is_selected_is_in_the_batch_and_decoded(root, tmp_path) -> None:
    nothing = batches(loader(root, select=None))[0]
    selected = batches(loader(root, select=("words", "score")))[0]
    assert selected.keys() - nothing.keys() == {
        "words",
        "words_valid",
        "score",
        "score_valid",
    }
    assert [name for name in selected if name in NAMES] == [
        "score",
        "words",
    ]  # in the table's order
    assert unlike({name: selected[name] for name in nothing}, nothing) == []
    build(tmp_path / "d")
    spoil(tmp_path / "d", "occupancy", shape=(8, 7))
    assert len(batches(loader(tmp_path / "d", select=["radar"]))) == 3
    with pytest.raises(
        SchemaError,
        match=re.escape("channel 'occupancy' is uint8[8, 6]; the table has uint8[8, 7]"),
    ):
        batches(loader(tmp_path / "d", select=["occupancy"]))


def read(root: Path, names: list[str] | None, **options: Any) -> StorageStats:
    """Read each sample once, as a loader that selects these channels does; returns what that took."""
    dataset = open_dataset(root)
    reader = SampleReader(
        dataset,
        storage=LayeredStorage(open_storage(dataset, **options)),
        channels=choose_channels(dataset, names),
    )
    for number in range(len(dataset)):
        assert len(reader.sample(number).images) == 2
    return reader.storage.stats()


@pytest.mark.parametrize("storage", ["pread", "remote"])
def test_what_is_behind_the_last_selected_member_is_not_fetched(root, tmp_path, storage) -> None:
    index = open_dataset(root).index
    rows = [index.row(number) for number in range(len(index))]

    def up_to(last: str) -> int:
        ends = [
            max(m.offset + m.stored_bytes for m in row.members if m.name == last) for row in rows
        ]
        return sum(-(-end // 512) * 512 for end in ends)

    num_bytes = sum(row.length for row in rows)
    nothing = read(root, None, backend=storage)
    assert nothing.span_bytes == up_to(f"{LIDAR}.npy") < 0.7 * num_bytes
    assert nothing.request_bytes == (nothing.span_bytes if storage == "remote" else 0)
    assert (
        read(root, ["occupancy"], backend=storage).span_bytes == up_to("occupancy.npy") < num_bytes
    )
    assert read(root, NAMES, backend=storage).span_bytes == num_bytes
    with loader(root, 12, select=None, storage=storage) as data_loader:
        next(iter(data_loader))
        stats = data_loader.stats().storage
    assert stats.span_bytes < 0.7 * num_bytes * stats.spans / len(rows)
    if storage == "remote":  # what is cached serves loaders that select others
        options = {"backend": "remote", "cache_dir": tmp_path / "cache"}
        assert read(root, None, **options).request_bytes == num_bytes
        assert read(root, ["radar"], **options).cache_hits == len(rows)


@pytest.mark.parametrize("layout", ["member", "none", "frame"])
def test_parts_of_samples_are_checked_by_their_members(root, tmp_path, layout) -> None:
    build(tmp_path / "d", layout=layout)
    chosen = {"select": ["mask"], "storage": "pread"}
    assert (
        unlike(
            batches(loader(tmp_path / "d", **chosen)),
            batches(loader(root, **chosen)),
        )
        == []
    )
    row = open_dataset(tmp_path / "d").index.row(1)
    shard = tmp_path / "d" / ("train-000000.tar.zst" if layout == "frame" else "train-000000.tar")
    for name, is_read in (
        ("topics.npy", layout == "frame"),
        ("cam_back.jpg", True),
    ):
        entry = next(entry for entry in row.members if entry.name == name)
        position = row.offset + min(entry.offset, row.length - 9)
        data = bytearray(shard.read_bytes())
        data[position] ^= 1
        shard.write_bytes(data)
        if is_read:
            text = (
                "checksum mismatch" if layout == "frame" else f"member '{name}': checksum mismatch"
            )
            with pytest.raises(ChecksumError, match=text):
                batches(loader(tmp_path / "d", **chosen))
        else:
            assert len(batches(loader(tmp_path / "d", **chosen))) == 3
        with pytest.raises(ChecksumError, match="checksum mismatch"):
            batches(loader(tmp_path / "d", storage="pread"))
        data[position] ^= 1
        shard.write_bytes(data)


def spoil(root: Path, name: str, **changes: Any) -> None:
    def edit(manifest: Any) -> Any:
        table = [
            msgspec.structs.replace(channel, **changes) if channel.name == name else channel
            for channel in manifest.channels
        ]
        return msgspec.structs.replace(manifest, channels=tuple(table))

    reseal(root, edit)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["radr"],
            "has no channel or attribute 'radr'; did you mean 'radar'? channels: radar, ",
        ),
        (["wrods"], "attributes: none"),
        (
            ["cam_front"],
            "'cam_front' is not selected by name; cameras and boxes are in every batch",
        ),
        (["boxes"], "'boxes' is not selected by name"),
        ([3], "must be a list of names of channels and attributes, or None"),
    ],
)
def test_what_cannot_be_selected_is_refused(root, names, says) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        loader(root, select=names)


def test_channels_whose_entries_have_names_of_others_are_refused(
    tmp_path,
) -> None:
    names = ("img", "gt", "cue", "cue_valid")
    channels = tuple(fixed(name, "text", "txt", optional=True) for name in names)
    build_dataset(
        tmp_path / "d",
        {"train": (4,)},
        extra=[(channel, lambda _: "text") for channel in channels],
    )
    for chosen, entry in (
        (["img"], "img"),
        (["gt"], "gt_valid"),
        (["cue", "cue_valid"], "cue_valid"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"needs the batch entry '{entry}', which another entry has",
        ):
            loader(tmp_path / "d", select=chosen)


def test_an_unknown_kind_or_law_is_refused_by_name(tmp_path) -> None:
    build(tmp_path / "d")
    spoil(tmp_path / "d", "radar", kind="voxels")
    with pytest.raises(ManifestError, match="channel 'radar': its kind 'voxels' is unknown"):
        loader(tmp_path / "d")
    assert batches(loader(tmp_path / "d", select=["words"]))


@pytest.mark.costly
def test_mixed_datasets_need_the_same_entries(root, tmp_path) -> None:
    build(tmp_path / "same")
    spoil(
        tmp_path / "same",
        "topics",
        optional=True,
        description="of somebody else",
    )
    roots = {"a": root, "b": tmp_path / "same"}
    batch = next(iter(batches(loader(roots, mix={"a": 1, "b": 1}))))
    assert batch["dataset"].count("b") == 2
    assert batch["topics"].shape == (4, 3)
    build(tmp_path / "other")
    spoil(
        tmp_path / "other",
        "occupancy",
        law=Law("ego_grid", extent_m=(-8.0, -6.0, 8.0, 7.0)),
    )
    build(tmp_path / "fewer", CHANNELS[:2])
    for name, says in (
        (
            "other",
            "their channels 'occupancy' (law) differ: 'a' has {'name': 'ego_grid', 'extent_m': [-8.0, -6.0, 8.0",
        ),
        ("fewer", f"'{tmp_path / 'fewer'}' has no channel or attribute 'mask'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            loader({"a": root, "b": tmp_path / name}, mix={"a": 1, "b": 1})
        assert batches(
            loader(
                {"a": root, "b": tmp_path / name},
                mix={"a": 1, "b": 1},
                select=["radar"],
            )
        )


def test_a_state_names_the_channels(root) -> None:
    with (
        loader(root, select=["words", "radar"]) as saved,
        loader(root, select=["radar", "words"]) as restored,
    ):
        restored.load_state_dict(saved.state_dict())
    with loader(root, select=["radar"]) as less:
        with pytest.raises(
            StateMismatchError,
            match=re.escape("channels: state has ['radar', 'words'], loader has"),
        ):
            less.load_state_dict(saved.state_dict())
        less.load_state_dict(saved.state_dict(), strict=False)
    with loader(root, select=None) as none, loader(root, select=[]) as empty:
        empty.load_state_dict(none.state_dict())


def test_a_sample_whose_channel_is_bad_is_substituted(tmp_path) -> None:
    build(tmp_path / "d")
    spoil(tmp_path / "d", "caption", optional=False)
    with pytest.raises(
        SchemaError,
        match=r"clip-0000-000002.*channel 'caption' is missing, and the table does not",
    ):
        batches(loader(tmp_path / "d"))
    policy = {"on_error": "substitute", "file": str(tmp_path / "bad.jsonl")}
    for window in (None, FrameWindow(frames=(-1, 0))):
        with loader(
            tmp_path / "d",
            select=["caption", "mask"],
            bad_samples=policy,
            window=window,
        ) as data_loader:
            rows = [row for batch in data_loader for row in batch["global_index"].tolist()]
            assert data_loader.stats().bad_samples == 2
        assert {2, 7} & set(rows) == set()
        assert len(rows) == 12
    assert '"member":"caption.txt"' in (tmp_path / "bad.jsonl").read_text().replace('": "', '":"')


@pytest.mark.parametrize(
    "parts",
    [
        {"decode"},
        {"decompression"},
        {"storage"},
        {"storage", "decompression", "decode"},
    ],
)
def test_parts_that_are_left_out_leave_the_shapes(root, parts) -> None:
    data_loader = loader(root, transforms=AUGMENTED)
    data_loader.leave_out(parts)
    (batch, *_) = batches(data_loader)
    assert batch["mask"].shape == (4, 32, 48)
    assert len(batch["radar"]) == len(batch["agents"]["speed"]) == 4
    assert isinstance(batch["words"], Packed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_they_come_to_the_device_with_the_rest(root) -> None:
    (ours, *_) = batches(loader(root, transforms=AUGMENTED))
    (batch, *_) = batches(loader(root, transforms=AUGMENTED, device="cuda"))
    tensors = [
        batch["mask"],
        batch["topics_valid"],
        batch["words"].values,
        batch["agents"]["speed"][0],
    ]
    assert {tensor.device.type for tensor in (*tensors, batch["radar"][0])} == {"cuda"}
    assert (
        len({tensor.untyped_storage().data_ptr() for tensor in (*tensors, batch["radar"][0])}) == 1
    )
    assert unlike(ours, batch) == []
