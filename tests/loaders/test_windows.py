"""Temporal windows through the DataLoader, against frames picked out of the dataset by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail import BevAugment, ImageAugment, OrderSpec, PixelAugment
from fuelrail.loaders.records import batch_entries
from fuelrail.loaders.storage.cache.future_uses import coming_rows
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, OrderError, StateMismatchError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.batching import Cursor, Walk
from support.batches import TINY, batches, load
from support.datasets import CAMERAS, build_dataset
from support.storage_suite import spoil

TRAIN = ImageAugment(
    height=32,
    width=48,
    train=True,
    resize_range=(0.5, 0.7),
    flip_prob=0.5,
    rotate_deg=(-5, 5),
)
# rows 5 .. 25: clips of four frames, the first without its frame 0, the last with two
FIRST = 5
NUM = 21
ROWS = range(FIRST, FIRST + NUM)
OF_FRAMES = (
    "img",
    "cam_valid",
    "intrinsics",
    "ida_mat",
    "cam2ego",
    "ego2img",
    "lidar2img",
    "lidar2ego",
    "dist",
    "timestamp_ns",
    "img_timestamp_ns",
)
LENGTHS = {"val": (FIRST,), "train": (9, NUM - 9)}


@pytest.fixture(scope="module")
def root(build_once):
    return build_once(LENGTHS, missing=frozenset({(11, CAMERAS[1])}))[0]


def expected_window(row, frames, stride=1, padding="repeat_edge"):
    """The rows of a sample's window and which are the frames asked for, by walking through its clip."""
    rows = []
    present = []
    for offset in frames:
        target = row + offset * stride
        shown_row = row
        inside = target in ROWS and target // 4 == row // 4
        if inside:
            shown_row = target
        elif padding == "repeat_edge":
            step = 1 if offset > 0 else -1
            while shown_row + step in ROWS and (shown_row + step) // 4 == row // 4:
                shown_row += step
        rows.append(shown_row)
        present.append(inside)
    return rows, present


@pytest.fixture(scope="module")
def single(root):
    """Each sample alone, by row."""
    return {
        int(batch["global_index"]): batch for batch in batches(root, 1, shuffle=False, points=True)
    }


@pytest.mark.costly
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
def test_every_frame_is_the_single_sample_of_its_row(root, single, frames, stride, padding):
    reader = SampleReader(open_dataset(root))
    all_rows = []
    options = {
        "frames": frames,
        "stride": stride,
        "pad": padding,
        "points": True,
        "drop_last": False,
    }
    for batch in batches(root, shuffle=False, **options):
        assert batch["img"].shape == (3, len(frames), len(CAMERAS), 3, 32, 48)
        for index in range(3):
            key = int(batch["global_index"][index])
            rows, present = expected_window(key, frames, stride, padding)
            all_rows += [key] if batch["valid"][index] else []
            assert batch["frame_valid"][index].tolist() == present
            assert batch["frame_global_index"][index].tolist() == rows
            assert torch.equal(batch["gt_boxes_3d"][index], single[key]["gt_boxes_3d"][0])
            for name in ("sample_key", "clip_id", "frame"):
                assert batch[name][index] == single[key][name][0]
            key2global = reader.sample(key).geometry.ego2global
            for t, row in enumerate(rows):
                alone = single[row]
                geometry = reader.sample(row).geometry
                hides = padding == "mask" and not present[t]
                for name in OF_FRAMES:
                    expected = alone[name][0]
                    if hides and name in ("img", "cam_valid"):
                        expected = torch.zeros_like(expected)
                    assert torch.equal(batch[name][index, t], expected), (
                        name,
                        key,
                        t,
                    )
                assert torch.equal(
                    batch["points"][index][t],
                    alone["points"][0][:0] if hides else alone["points"][0],
                )
                assert np.array_equal(batch["ego2global"][index, t].numpy(), geometry.ego2global)
                ego2key = np.linalg.solve(key2global, geometry.ego2global)
                np.testing.assert_allclose(batch["ego2key"][index, t].numpy(), ego2key, atol=1e-3)
                for camera in range(len(CAMERAS)):
                    cam2global = geometry.cam_ego2global[camera] @ geometry.cam2ego[camera]
                    cam2key = np.linalg.solve(key2global, cam2global)
                    np.testing.assert_allclose(
                        batch["cam2keyego"][index, t, camera].numpy(),
                        cam2key,
                        atol=1e-3,
                    )
    complete = [row for row in ROWS if all(expected_window(row, frames, stride, padding)[1])]
    assert all_rows == (complete if padding == "drop" else [*ROWS])


def test_shapes_and_dtypes_are_those_of_the_table(root):
    sizes = {"B": 3, "T": 2, "N": len(CAMERAS), "H": 32, "W": 48, "C": 5}
    stated = {
        name: form for name, (form, _) in batch_entries().items() if re.search(r"\bT\b", form)
    }
    batch, alone = (batches(root, frames=frames, points=True)[0] for frames in ([-1, 0], None))
    assert (
        {"ego2key", "frame_valid", "frame_global_index", *OF_FRAMES}
        <= stated.keys()
        <= batch.keys()
    )
    for name, kind in stated.items():
        match = re.fullmatch(r"(list of \(T of\) )?\[(.*)\] (\w+)", kind)
        assert match is not None, kind
        tensors = (
            [frame for sample in batch[name] for frame in sample] if match[1] else [batch[name]]
        )
        assert not match[1] or [len(sample) for sample in batch[name]] == [
            2,
            2,
            2,
        ]
        axes = [sizes.get(axis, axis) for axis in re.findall(r"\w+", match[2])]
        for tensor in tensors:
            assert str(tensor.dtype) == f"torch.{match[3]}", name
            assert tensor.ndim == len(axes), name
            assert all(
                n == int(axis) for n, axis in zip(tensor.shape, axes, strict=True) if axis != "P"
            ), name
    for name in alone.keys() - stated.keys():
        assert getattr(alone[name], "shape", None) == getattr(batch[name], "shape", None), name


def test_all_frames_of_a_sample_are_augmented_alike_and_as_the_sample_alone(
    root,
):
    options = {
        "image": TRAIN,
        "seed": 3,
        "ego": BevAugment(train=True, rotate_deg=(-30, 30), flip_y_prob=0.5),
        "pixels": PixelAugment(train=True, brightness=32, prob=1.0),
    }
    for batch, plain in zip(
        batches(root, frames=[-2, 0, 1], **options),
        batches(root, **options),
        strict=True,
    ):
        assert batch["sample_key"] == plain["sample_key"]
        for name in ("img", "ida_mat", "ego2img", "cam2keyego", "lidar2img"):
            assert torch.equal(batch[name][:, 1], plain[name]), name
        assert torch.equal(batch["bda_mat"], plain["bda_mat"])
        assert (batch["ida_mat"] == batch["ida_mat"][:, 1:2]).all()
        # From a camera to the key frame's ego, back to its own frame's and onto the image: only K is left.
        matrices = [
            batch[name].double() for name in ("ego2img", "ego2key", "cam2keyego", "intrinsics")
        ]
        ego2img, ego2key, cam2keyego, intrinsics = matrices
        projection = ego2img @ torch.linalg.inv(ego2key)[:, :, None] @ cam2keyego
        assert torch.allclose(
            projection[..., :2, 2] / projection[..., 2:3, 2],
            intrinsics[..., :2, 2],
            atol=0.1,
        )
        assert torch.allclose(ego2key[:, 1], torch.eye(4).double(), atol=1e-5)


@settings(max_examples=15)
@given(
    offsets=st.lists(st.integers(-3, 3), max_size=3, unique=True),
    stride=st.integers(1, 2),
    epoch=st.integers(0, 2),
    pad=st.sampled_from(["repeat_edge", "repeat_current", "mask", "drop"]),
)
def test_any_window_shows_the_rows_of_its_clip(root, offsets, stride, pad, epoch):
    frames = [*(offset for offset in offsets if offset), 0]
    complete = [row for row in ROWS if all(expected_window(row, frames, stride, pad)[1])]
    if len(frames) > 1 and not any(
        sum(expected_window(row, frames, stride)[1]) > 1 for row in ROWS
    ):
        return
    if pad == "drop" and len(complete) < 2:
        return
    options = {
        "frames": frames,
        "stride": stride,
        "pad": pad,
        "drop_last": False,
        "verify": False,
        "image": TINY,
    }
    with load(root, 2, seed=1, **options) as loader:
        loader.set_epoch(epoch)
        windows = [rows for batch in loader for rows in batch["frame_global_index"].tolist()]
    assert windows == [expected_window(rows[-1], frames, stride, pad)[0] for rows in windows]
    expected = complete if pad == "drop" else [*ROWS]
    assert sorted(rows[-1] for rows in windows[: len(expected)]) == expected


@pytest.mark.parametrize(
    "order",
    [OrderSpec(kind="lanes", seed=1), OrderSpec(filter="frame >= 2", seed=4)],
)
def test_windows_go_with_lanes_and_filters_and_look_at_frames_that_are_not_selected(root, order):
    loaded = batches(root, 2, order=order, frames=[-2, 0], drop_last=False)
    for batch in loaded:
        for rows, present in zip(
            batch["frame_global_index"].tolist(),
            batch["frame_valid"].tolist(),
            strict=True,
        ):
            assert (rows, present) == expected_window(rows[1], [-2, 0])
    rows = [row for batch in loaded for row in batch["global_index"][batch["valid"]].tolist()]
    assert sorted(rows) == [row for row in ROWS if order.filter is None or row % 4 >= 2]
    assert ("prev_exists" in loaded[0]) == (order.kind == "lanes")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frames": [-1, 0]},
        {"frames": [-2, -1, 0], "stride": 2},
        {"frames": [-2, -1, 0], "pad": "mask"},
    ],
)
def test_a_state_of_another_window_is_refused_showing_both(root, options):
    with (
        load(root, frames=[-2, -1, 0]) as loader,
        load(root, **options) as another,
    ):
        assert json.loads(loader.state_dict()["identity"])["frames"]["frames"] == [-2, -1, 0]
        state = another.state_dict()
        with pytest.raises(
            StateMismatchError,
            match=r"frames: state has .*, loader has \{'frames': \[-2, -1, 0\]",
        ):
            loader.load_state_dict(state)
        with pytest.raises(
            StateMismatchError,
            match=r"frames: state has \{'frames': \[-2, -1, 0\].*, loader has",
        ):
            another.load_state_dict(loader.state_dict())


def test_future_uses_and_requests_know_all_frames(root, tmp_path, monkeypatch):
    options = {
        "backend": "remote",
        "cache_dir": tmp_path / "cache",
        "look_ahead_bytes": 30_000,
    }
    with load(root, 4, frames=[-1, 0], seed=2, **options) as loader:
        where = loader._schedule.where
        storage = loader._schedule.sources[0].storage
        requested = []
        session_of = storage.session

        def session(*arguments):
            opened = session_of(*arguments)
            request = opened.request
            opened.request = lambda rows: requested.extend(row for row, _ in rows) or request(rows)
            return opened

        monkeypatch.setattr(storage, "session", session)
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert len(list(loader)) == NUM // 4
        coming, per_step = coming_rows(
            where.numbers,
            Walk(Cursor(), loader._batching),
            range(1),
            where.frames,
        )
        assert per_step == 8
        num_steps = 2 * (NUM // 4)
        assert requested[: per_step * num_steps] == coming(0, per_step * num_steps).tolist()
        stats = loader.stats()
        assert stats.images == num_steps * 4 * 2 * len(CAMERAS)
        assert stats.storage.cache_hits > 0


def test_a_bad_frame_makes_way_for_the_next_sample_of_the_order(tmp_path):
    folder = tmp_path / "OUT"
    file = tmp_path / "bad.jsonl"
    build_dataset(folder, LENGTHS)
    spoil(folder, open_dataset(folder).index.row(13))
    options = {
        "shuffle": False,
        "frames": [-1, 0],
        "on_error": "substitute",
        "drop_last": False,
        "file": file,
    }
    with load(folder, 1, **options) as loader:
        rows = [batch["frame_global_index"][0].tolist() for batch in loader]
        assert loader.stats().bad_samples == 1
    # Samples 13 and 14 hold the bad frame; 15 is good.
    assert rows == [
        window if 13 not in window else [14, 15]
        for window in (expected_window(row, [-1, 0])[0] for row in ROWS)
    ]
    assert file.read_text().count('"row": 13,') == 1


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"frames": [-1, 1]},
            ConfigError,
            "different offsets with 0 among them",
        ),
        (
            {"frames": [0, 0]},
            ConfigError,
            "different offsets with 0 among them",
        ),
        (
            {"frames": [-9, 0]},
            OrderError,
            "no sample of dataset .* has any of these frames in its clip",
        ),
        (
            {"frames": [-3, 0, 3], "pad": "drop"},
            OrderError,
            "pad='drop'.* selects no sample",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(root, options, kind, text):
    with pytest.raises(kind, match=text):
        load(root, **options)
