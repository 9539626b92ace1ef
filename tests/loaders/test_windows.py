"""Temporal windows through the DataLoader, against frames picked out of the dataset by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fuelrail.loaders.batch.temporal as temporal_module
from fuelrail.loaders import BevAugment, ImageAugment, OrderSpec, PixelAugment, World
from fuelrail.loaders.storage.cache.future_uses import coming_rows
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, OrderError, StateMismatchError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Cursor, Walk
from support.datasets import CAMERAS, build_dataset
from support.loaders import make_loader

SMALL = ImageAugment(height=32, width=48, resize=0.5)
TRAIN = ImageAugment(height=32, width=48, train=True, resize_range=(0.5, 0.7), flip_prob=0.5, rotate_deg=(-5, 5))
FIRST, NUM = 5, 21  # rows 5 .. 25: clips of four frames, the first without its frame 0, the last with two
OF_FRAMES = (
    "img", "cam_valid", "intrinsics", "ida_mat", "cam2ego", "ego2img", "lidar2img", "lidar2ego", "dist", "timestamp_ns",
    "img_timestamp_ns",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows") / "OUT"
    build_dataset(folder, {"val": (5,), "train": (9, NUM - 9)}, missing=frozenset({(11, CAMERAS[1])}))
    return folder


@pytest.fixture(scope="module")
def dataset(root):
    return open_dataset(root)


def make(root, batch_size=3, *, rank=0, size=1, image=SMALL, **options):
    options.setdefault("num_workers", 1)
    return make_loader(root, batch_size, world=World(rank, size), image=image, **options)


def shown(row, frames, stride=1, padding="repeat_edge"):
    """The rows of a sample's window and which are the frames asked for, by walking through its clip."""
    rows, present = [], []
    for offset in frames:
        wanted, there = row + offset * stride, row
        inside = FIRST <= wanted < FIRST + NUM and wanted // 4 == row // 4
        if inside:
            there = wanted
        elif padding == "repeat_edge":
            step = 1 if offset > 0 else -1
            while FIRST <= there + step < FIRST + NUM and (there + step) // 4 == row // 4:
                there += step
        rows.append(there)
        present.append(inside)
    return rows, present


@pytest.fixture(scope="module")
def single(root):
    """Each sample alone, by row."""
    with make(root, 1, shuffle=False, points=True) as loader:
        return {int(batch["global_index"]): batch for batch in loader}


@pytest.mark.parametrize(
    ("frames", "stride", "padding"),
    [
        ([-2, -1, 0], 1, "repeat_edge"),
        ([-1, 0, 1], 1, "repeat_current"),
        ([0, -1], 2, "mask"),
        ([0], 1, "repeat_edge"),
        ([-1, 0], 3, "drop"),
    ],
)
def test_every_frame_is_the_single_sample_of_its_row(root, dataset, single, frames, stride, padding):
    reader, seen = SampleReader(dataset), []
    with make(root, shuffle=False, frames=frames, stride=stride, pad=padding, points=True, drop_last=False) as made:
        batches = list(made)
    for batch in batches:
        assert batch["img"].shape == (3, len(frames), len(CAMERAS), 3, 32, 48)
        for at in range(3):
            key = int(batch["global_index"][at])
            rows, present = shown(key, frames, stride, padding)
            seen += [key] if batch["valid"][at] else []
            assert batch["frame_valid"][at].tolist() == present
            assert batch["frame_global_index"][at].tolist() == rows
            assert torch.equal(batch["gt_boxes_3d"][at], single[key]["gt_boxes_3d"][0])
            for name in ("sample_key", "clip_id", "frame"):
                assert batch[name][at] == single[key][name][0]
            key2global = reader.sample(key).geometry.ego2global
            for t, row in enumerate(rows):
                alone, geometry = single[row], reader.sample(row).geometry
                hides = padding == "mask" and not present[t]
                for name in OF_FRAMES:
                    expected = alone[name][0]
                    if hides and name in ("img", "cam_valid"):
                        expected = torch.zeros_like(expected)
                    assert torch.equal(batch[name][at, t], expected), (name, key, t)
                assert torch.equal(batch["points"][at][t], alone["points"][0][:0] if hides else alone["points"][0])
                assert np.array_equal(batch["ego2global"][at, t].numpy(), geometry.ego2global)
                ego2key = np.linalg.solve(key2global, geometry.ego2global)
                np.testing.assert_allclose(batch["ego2key"][at, t].numpy(), ego2key, atol=1e-3)
                for camera in range(len(CAMERAS)):
                    there = geometry.cam_ego2global[camera] @ geometry.cam2ego[camera]
                    cam2key = np.linalg.solve(key2global, there)
                    np.testing.assert_allclose(batch["cam2keyego"][at, t, camera].numpy(), cam2key, atol=1e-3)
    complete = [row for row in range(FIRST, FIRST + NUM) if all(shown(row, frames, stride, padding)[1])]
    assert seen == (complete if padding == "drop" else list(range(FIRST, FIRST + NUM)))


def test_shapes_and_dtypes_are_those_of_the_table(root):
    sizes = {"B": 3, "T": 2, "N": len(CAMERAS), "H": 32, "W": 48, "C": 5}
    rows = re.findall(r"^``(\w+)`` +(\S.*?)  +\S", temporal_module.__doc__ or "", re.MULTILINE)
    stated = dict(rows)
    with make(root, frames=[-1, 0], points=True) as loader:
        batch = next(iter(loader))
    assert {"ego2key", "frame_valid", "frame_global_index", *OF_FRAMES} <= stated.keys() <= batch.keys()
    for name, kind in stated.items():
        match = re.fullmatch(r"(list of T of )?\[(.*)\] (\w+)", kind)
        assert match is not None, kind
        tensors = [frame for sample in batch[name] for frame in sample] if match[1] else [batch[name]]
        assert not match[1] or [len(sample) for sample in batch[name]] == [2, 2, 2]
        axes = [sizes.get(axis, axis) for axis in match[2].split(", ")]
        for tensor in tensors:
            assert str(tensor.dtype) == f"torch.{match[3]}", name
            assert tensor.ndim == len(axes), name
            assert all(n == int(axis) for n, axis in zip(tensor.shape, axes, strict=True) if axis != "P"), name
    with make(root, points=True) as loader:
        alone = next(iter(loader))
    for name in alone.keys() - stated.keys():
        assert getattr(alone[name], "shape", None) == getattr(batch[name], "shape", None), name


def test_all_frames_of_a_sample_are_augmented_alike_and_as_the_sample_alone(root):
    options = {
        "image": TRAIN, "seed": 3, "ego": BevAugment(train=True, rotate_deg=(-30, 30), flip_y_prob=0.5),
        "pixels": PixelAugment(train=True, brightness=32, prob=1.0),
    }  # fmt: skip
    with make(root, frames=[-2, 0, 1], **options) as loader, make(root, **options) as alone:
        for batch, plain in zip(loader, alone, strict=True):
            assert batch["sample_key"] == plain["sample_key"]
            for name in ("img", "ida_mat", "ego2img", "cam2keyego", "lidar2img"):
                assert torch.equal(batch[name][:, 1], plain[name]), name
            assert torch.equal(batch["bda_mat"], plain["bda_mat"])
            assert (batch["ida_mat"] == batch["ida_mat"][:, 1:2]).all()
            # From a camera to the key frame's ego, back to its own frame's and onto the image: only K is left.
            matrices = [batch[name].double() for name in ("ego2img", "ego2key", "cam2keyego", "intrinsics")]
            ego2img, ego2key, cam2keyego, intrinsics = matrices
            left = ego2img @ torch.linalg.inv(ego2key)[:, :, None] @ cam2keyego
            assert torch.allclose(left[..., :2, 2] / left[..., 2:3, 2], intrinsics[..., :2, 2], atol=0.1)
            assert torch.allclose(ego2key[:, 1], torch.eye(4).double(), atol=1e-5)


windows = st.tuples(
    st.lists(st.integers(-3, 3), max_size=3, unique=True), st.integers(1, 2),
    st.sampled_from(["repeat_edge", "repeat_current", "mask", "drop"]),
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(window=windows, size=st.sampled_from([1, 2]), epoch=st.integers(0, 2), step=st.integers(0, 3))
def test_any_window_on_any_ranks_from_any_step(root, window, size, epoch, step):
    offsets, stride, padding = window
    frames = [*(offset for offset in offsets if offset), 0]
    complete = [row for row in range(FIRST, FIRST + NUM) if all(shown(row, frames, stride, padding)[1])]
    if len(frames) > 1 and not any(sum(shown(row, frames, stride)[1]) > 1 for row in range(FIRST, FIRST + NUM)):
        return
    if padding == "drop" and len(complete) < 2:
        return
    options = {"frames": frames, "stride": stride, "pad": padding, "drop_last": False, "verify": False, "seed": 1}
    image = ImageAugment(height=8, width=8, resize="stretch")
    ranks = []
    for rank in range(size):
        with make(root, 2 // size, rank=rank, size=size, image=image, **options) as loader:
            loader.set_epoch(epoch)
            whole = [batch["frame_global_index"].tolist() for batch in loader]
            step = min(step, len(whole))
            loader.set_epoch(epoch)
            batches = iter(loader)
            for _ in range(step):
                next(batches)
            state = loader.state_dict()
        with make(root, 2 // size, rank=rank, size=size, image=image, **options) as other:
            other.load_state_dict(state)
            other.set_epoch(epoch)
            assert [batch["frame_global_index"].tolist() for batch in other] == whole[step:]
        ranks.append(whole)
    keys = []
    for parts in zip(*ranks, strict=True):
        for rows in [row for part in parts for row in part]:
            keys.append(rows[-1])
            assert rows == shown(rows[-1], frames, stride, padding)[0]
    expected = complete if padding == "drop" else list(range(FIRST, FIRST + NUM))
    assert sorted(keys[: len(expected)]) == expected


@pytest.mark.parametrize("order", [OrderSpec(kind="lanes", seed=1), OrderSpec(filter="frame >= 2", seed=4)])
def test_windows_go_with_lanes_and_filters_and_look_at_frames_that_are_not_selected(root, order):
    with make(root, 2, order=order, frames=[-2, 0], drop_last=False) as loader:
        batches = list(loader)
    for batch in batches:
        for rows, present in zip(batch["frame_global_index"].tolist(), batch["frame_valid"].tolist(), strict=True):
            assert (rows, present) == shown(rows[1], [-2, 0])
    rows = [row for batch in batches for row in batch["global_index"][batch["valid"]].tolist()]
    selected = [row for row in range(FIRST, FIRST + NUM) if order.filter is None or row % 4 >= 2]
    assert sorted(rows) == selected
    assert ("prev_exists" in batches[0]) == (order.kind == "lanes")


@pytest.mark.parametrize(
    "other", [{}, {"frames": [-1, 0]}, {"frames": [-2, -1, 0], "stride": 2}, {"frames": [-2, -1, 0], "pad": "mask"}]
)
def test_a_state_of_another_window_is_refused_showing_both(root, other):
    with make(root, frames=[-2, -1, 0]) as loader, make(root, **other) as another:
        assert json.loads(loader.state_dict()["identity"])["frames"]["frames"] == [-2, -1, 0]
        state = another.state_dict()
        with pytest.raises(StateMismatchError, match=r"frames: state has .*, loader has \{'frames': \[-2, -1, 0\]"):
            loader.load_state_dict(state)
        with pytest.raises(StateMismatchError, match=r"frames: state has \{'frames': \[-2, -1, 0\].*, loader has"):
            another.load_state_dict(loader.state_dict())


def test_future_uses_and_requests_know_all_frames(root, tmp_path, monkeypatch):
    options = {"backend": "remote", "cache_dir": tmp_path / "cache", "look_ahead_bytes": 30_000}
    with make(root, 4, frames=[-1, 0], seed=2, **options) as loader:
        where, storage = loader._supply.where, loader._supply.sources[0].storage
        asked, session_of = [], storage.session

        def session(*arguments):
            made = session_of(*arguments)
            request = made.request
            made.request = lambda rows: asked.extend(row for row, _ in rows) or request(rows)
            return made

        monkeypatch.setattr(storage, "session", session)
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert len(list(loader)) == NUM // 4
        coming, per_step = coming_rows(where.numbers, Walk(Cursor(), loader._batching), range(1), where.frames)
        assert per_step == 8
        num_steps = 2 * (NUM // 4)
        assert asked[: per_step * num_steps] == coming(0, per_step * num_steps).tolist()
        stats = loader.stats()
        assert stats.images == num_steps * 4 * 2 * len(CAMERAS)
        assert stats.storage.cache_hits > stats.storage.cache_misses


def test_a_bad_frame_makes_way_for_the_next_sample_of_the_order(root, tmp_path):
    own = tmp_path / "OUT"
    build_dataset(own, {"val": (5,), "train": (9, NUM - 9)})
    row = open_dataset(own).index.row(13)
    shard = own / f"train-{row.shard - 1:06d}.tar"
    content = bytearray(shard.read_bytes())
    content[row.offset + row.length // 2] ^= 255
    shard.write_bytes(content)
    options = {"shuffle": False, "frames": [-1, 0], "on_error": "substitute", "drop_last": False}
    with make(own, 1, file=tmp_path / "bad.jsonl", **options) as loader:
        rows = [batch["frame_global_index"][0].tolist() for batch in loader]
        assert loader.stats().bad_samples == 1
    bad = [shown(row, [-1, 0])[0] for row in range(FIRST, FIRST + NUM)]
    # Samples 13 and 14 hold the bad frame; 15 is good.
    assert rows == [window if 13 not in window else [14, 15] for window in bad]
    assert (tmp_path / "bad.jsonl").read_text().count('"row": 13,') == 1


def test_the_users_functions_get_the_frames_axis(root):
    seen = []

    def transform(sample):
        seen.append((tuple(sample["img"].shape), tuple(sample["ego2img"].shape), len(sample["points"])))
        return sample

    with (
        make(root, frames=[-1, 0], points=True, transform=transform) as loader,
        make(root, frames=[-1, 0], points=True) as plain,
    ):
        for batch, expected in zip(loader, plain, strict=True):
            assert torch.equal(batch["img"], expected["img"])
            assert torch.equal(batch["frame_valid"], expected["frame_valid"])
    assert set(seen) == {((2, len(CAMERAS), 3, 32, 48), (2, len(CAMERAS), 4, 4), 2)}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"frames": [-1, 1]}, ConfigError, "different offsets with 0 among them"),
        ({"frames": [0, 0]}, ConfigError, "different offsets with 0 among them"),
        ({"stride": 2}, ConfigError, "window: at .top level.: Object missing required field `frames`"),
        ({"frames": [-9, 0]}, OrderError, "no sample of dataset .* has any of these frames in its clip"),
        ({"frames": [-3, 0, 3], "pad": "drop"}, OrderError, "with pad='drop' selects no sample"),
    ],
)
def test_windows_that_cannot_be_are_refused(root, options, kind, text):
    with pytest.raises(kind, match=text):
        make(root, **options)
