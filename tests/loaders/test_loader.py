"""The DataLoader from outside: what batches hold, in which order, on which rank, after which restore."""

from __future__ import annotations

import gc
import json
import threading
from itertools import islice

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuelrail.loaders import ImageAugment, IterableView, OrderSpec, World
from fuelrail.loaders.config import Normalize
from fuelrail.loaders.decode.lens import Undistort
from fuelrail.pipeline.errors import (
    ChecksumError,
    ConfigError,
    DatasetNotReadyError,
    FuelrailError,
    ImageError,
    StateMismatchError,
    TruncatedShardError,
    WorldError,
)
from fuelrail.pipeline.sample.schema import decode_sample
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment
from support.datasets import CAMERAS, build_dataset
from support.loaders import make_loader

FULL = ImageAugment(height=64, width=96, resize=1.0)
"""Output images are the stored ones, pixel for pixel."""

TRAIN = (5, 7, 9)
NUM_TRAIN = sum(TRAIN)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets") / "tiny"
    return root, build_dataset(root, {"train": TRAIN, "val": (4,)})


def make(root, batch_size=3, *, rank=0, size=1, image=FULL, num_workers=2, **options):
    return make_loader(root, batch_size, world=World(rank, size), image=image, num_workers=num_workers, **options)


def keys(batches):
    return [key for batch in batches for key in batch["sample_key"]]


def global_sequence(loaders):
    """The keys of one epoch over all ranks, in global order: step by step, rank by rank."""
    per_rank = [[batch["sample_key"] for batch in loader] for loader in loaders]
    assert len({len(steps) for steps in per_rank}) == 1, "ranks have different numbers of batches"
    return [key for step in zip(*per_rank, strict=True) for rank_keys in step for key in rank_keys]


class TestContent:
    def test_every_value_equals_the_source(self, tiny):
        root, raw = tiny
        seen = set()
        for batch in make(root, 7, points=True):
            for at, key in enumerate(batch["sample_key"]):
                expected = decode_sample(key, raw[key])
                seen.add(key)
                for camera, channel in enumerate(CAMERAS):
                    pixels = simplejpeg.decode_jpeg(raw[key][f"{channel}.jpg"], "RGB")
                    np.testing.assert_array_equal(batch["img"][at, camera].permute(1, 2, 0).numpy(), pixels)
                geometry = expected.geometry
                np.testing.assert_allclose(batch["intrinsics"][at], geometry.intrinsics, rtol=1e-6, atol=1e-6)
                np.testing.assert_allclose(batch["cam2ego"][at], geometry.cam2ego, rtol=1e-6)
                np.testing.assert_array_equal(batch["ego2global"][at], geometry.ego2global)
                np.testing.assert_array_equal(batch["img_timestamp_ns"][at], geometry.cam_timestamp_ns)
                assert batch["timestamp_ns"][at] == expected.meta.timestamp_ns
                np.testing.assert_array_equal(batch["gt_boxes_3d"][at], expected.boxes.boxes3d)
                np.testing.assert_array_equal(batch["gt_labels_3d"][at], expected.boxes.label)
                np.testing.assert_array_equal(batch["instance_id"][at], expected.boxes.instance_id)
                np.testing.assert_array_equal(batch["points"][at], expected.points["lidar_top"])
                assert batch["clip_id"][at] == expected.meta.clip_id
                assert batch["frame"][at] == expected.meta.frame_idx
        assert seen == {key for key, members in raw.items() if b'"split":"train"' in members["meta.json"]}

    def test_dtypes_and_shapes(self, tiny):
        batch = next(iter(make(tiny[0], 4, points=True)))
        shapes = {
            "img": ((4, 2, 3, 64, 96), torch.uint8), "cam_valid": ((4, 2), torch.bool),
            "intrinsics": ((4, 2, 3, 3), torch.float32), "ida_mat": ((4, 2, 4, 4), torch.float32),
            "cam2ego": ((4, 2, 4, 4), torch.float32), "cam2keyego": ((4, 2, 4, 4), torch.float32),
            "ego2img": ((4, 2, 4, 4), torch.float32), "lidar2img": ((4, 2, 4, 4), torch.float32),
            "lidar2ego": ((4, 4, 4), torch.float32), "ego2global": ((4, 4, 4), torch.float64),
            "bda_mat": ((4, 4, 4), torch.float32), "dist": ((4, 2, 14), torch.float32),
            "timestamp_ns": ((4,), torch.int64), "img_timestamp_ns": ((4, 2), torch.int64),
            "frame": ((4,), torch.int64), "global_index": ((4,), torch.int64), "valid": ((4,), torch.bool),
        }  # fmt: skip
        assert {name: (tuple(batch[name].shape), batch[name].dtype) for name in shapes} == shapes
        lists = {"gt_boxes_3d", "gt_labels_3d", "gt_velocity", "gt_valid", "instance_id", "points"}
        assert set(batch) == set(shapes) | lists | {"sample_key", "clip_id", "epoch", "step"}
        assert all(len(batch[name]) == 4 for name in lists)

    def test_a_missing_camera_is_zeros_and_flagged(self, tmp_path):
        build_dataset(tmp_path / "gaps", {"train": (4,)}, missing=frozenset({(2, "cam_back")}))
        batch = next(iter(make(tmp_path / "gaps", 4, shuffle=False)))
        assert batch["cam_valid"].tolist() == [[True, True], [True, True], [True, False], [True, True]]
        assert not batch["img"][2, 1].any()
        assert batch["img"][2, 0].any()

    def test_an_unlabelled_dataset_has_no_box_keys(self, tmp_path):
        build_dataset(tmp_path / "bare", {"train": (4,)}, labelled=False)
        batch = next(iter(make(tmp_path / "bare", 4)))
        assert not [name for name in batch if name.startswith("gt_")]

    def test_the_matrices_follow_the_augmented_pixels(self, tiny):
        """A point on a camera's axis grid lands on the same colour in the full and in the flipped, scaled picture."""
        root, _ = tiny
        flipped = ImageAugment(height=64, width=96, train=True, resize=1.0, flip_prob=1.0)
        plain = next(iter(make(root, 4, shuffle=False)))
        turned = next(iter(make(root, 4, shuffle=False, image=flipped)))
        assert torch.equal(plain["img"].flip(-1), turned["img"])
        point = torch.tensor([10.0, 1.5, 0.5, 1.0])
        u = [float((b["ego2img"][0, 0] @ point)[0] / (b["ego2img"][0, 0] @ point)[2]) for b in (plain, turned)]
        assert u[1] == pytest.approx(95 - u[0], abs=1e-3)

    def test_a_batch_that_is_kept_is_never_overwritten(self, tiny):
        loader = make(tiny[0], 2)
        kept = [(batch["img"], batch["img"].clone()) for batch in loader]
        for _ in loader:
            pass
        assert all(torch.equal(image, copy) for image, copy in kept)


class TestOrder:
    @pytest.mark.parametrize("num_workers", [1, 2, 5])
    def test_threads_do_not_change_a_byte(self, tiny, num_workers):
        image = ImageAugment(
            height=32, width=48, train=True, resize_range=(0.5, 0.8), flip_prob=0.5, rotate_deg=(-5.0, 5.0)
        )
        reference = list(make(tiny[0], 4, image=image, num_workers=3, seed=9))
        got = list(make(tiny[0], 4, image=image, num_workers=num_workers, prefetch_factor=1, seed=9))
        for ours, theirs in zip(got, reference, strict=True):
            assert ours["sample_key"] == theirs["sample_key"]
            assert torch.equal(ours["img"], theirs["img"])
            assert torch.equal(ours["ego2img"], theirs["ego2img"])

    @pytest.mark.parametrize(("size", "batch_size"), [(1, 6), (2, 3), (3, 2), (6, 1)])
    def test_ranks_are_disjoint_and_together_the_same_epoch(self, tiny, size, batch_size):
        loaders = [make(tiny[0], batch_size, rank=rank, size=size, drop_last=False, seed=4) for rank in range(size)]
        sequence = global_sequence(loaders)
        alone = global_sequence([make(tiny[0], 6, drop_last=False, seed=4)])
        assert sequence == alone
        assert len(sequence) == 24
        assert len(set(sequence[:NUM_TRAIN])) == NUM_TRAIN
        assert sequence[NUM_TRAIN:] == sequence[:3], "padding is the epoch's beginning"

    def test_a_consumer_that_counts_batches_gets_the_next_epoch_too(self, tiny):
        """Lightning and others take len(loader) batches and never ask for one more."""
        loader, counted = make(tiny[0], 4), make(tiny[0], 4)
        expected = [[batch["sample_key"] for batch in loader] for _ in range(3)]
        for epoch in range(3):
            iterator = iter(counted)
            got = [next(iterator)["sample_key"] for _ in range(len(counted))]
            assert got == expected[epoch]
            assert counted.state_dict()["samples_consumed"] == 20, "still that epoch's end"
            if epoch == 1:
                del iterator
        counted.set_epoch(0)
        assert [batch["sample_key"] for batch in counted] == expected[0]

    def test_an_old_iterator_does_not_disturb_the_one_that_follows(self, tiny):
        loader = make(tiny[0], 4)
        old = iter(loader)
        for _ in range(len(loader)):
            next(old)
        new = iter(loader)
        first = next(new)
        assert first["epoch"] == 1
        assert list(old) == []
        del old
        assert loader.state_dict()["samples_consumed"] == 4
        assert [batch["step"] for batch in new] == [1, 2, 3, 4]

    def test_padding_is_flagged(self, tiny):
        batches = list(make(tiny[0], 6, drop_last=False))
        assert [batch["valid"].tolist() for batch in batches] == [[True] * 6] * 3 + [[True] * 3 + [False] * 3]

    def test_drop_last_leaves_out_the_rest(self, tiny):
        loader = make(tiny[0], 6)
        assert len(loader) == len(list(loader)) == 3

    def test_epochs_and_seeds_differ_and_repeat(self, tiny):
        loader = make(tiny[0], 7)
        first, second = keys(loader), keys(loader)
        assert first != second
        assert sorted(first) == sorted(second)
        loader.set_epoch(0)
        assert keys(loader) == first
        other = make(tiny[0], 7, seed=1)
        other.set_epoch(1)
        assert keys(other) not in (first, second)

    def test_the_next_epoch_continues_in_the_same_threads_and_another_one_does_not_see_them(self, tiny):
        fresh = [make(tiny[0], 7) for _ in range(4)]
        for epoch, loader in enumerate(fresh):
            loader.set_epoch(epoch)
        epochs = [keys(loader) for loader in fresh]
        loader = make(tiny[0], 7)
        assert keys(loader) == epochs[0]
        threads = set(threading.enumerate())
        assert keys(loader) == epochs[1]
        assert {thread for thread in threads if thread.name.startswith("fuelrail")} <= set(threading.enumerate())
        loader.set_epoch(3)
        assert keys(loader) == epochs[3]
        state = loader.state_dict() | {"epoch": 1, "samples_consumed": 7}
        loader.load_state_dict(state)
        assert keys(loader) == epochs[1][7:]
        assert keys(loader) == epochs[2]

    def test_sequential_is_as_stored(self, tiny):
        root, raw = tiny
        assert keys(make(root, 7, shuffle=False)) == list(raw)[:NUM_TRAIN]

    def test_a_split_of_its_own(self, tiny):
        root, raw = tiny
        assert sorted(keys(make(root, 4, split="val"))) == sorted(raw)[NUM_TRAIN:]

    def test_an_iteration_that_another_one_ended_says_so(self, tiny):
        loader = make(tiny[0])
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(FuelrailError, match=r"another iteration .* ended this one after 1 of 7 batches"):
            next(first)
        assert len(list(second)) == len(loader) - 1, "the second is not disturbed"

    def test_leaving_an_epoch_in_the_middle_and_iterating_again_goes_over_it_again(self, tiny):
        loader = make(tiny[0], 3)
        whole = keys(loader)
        loader.set_epoch(0)
        for _ in islice(loader, 2):
            pass
        assert keys(loader) == whole


class TestResume:
    @pytest.mark.parametrize("drop_last", [True, False])
    def test_from_every_step_the_rest_is_the_same_across_the_epochs_end(self, tiny, drop_last):
        def sequence(loader, count):
            found = []
            while len(found) < count:
                found += [(batch["epoch"], batch["step"], batch["sample_key"]) for batch in loader]
            return found[:count]

        steps = len(make(tiny[0], 4, drop_last=drop_last))
        whole = sequence(make(tiny[0], 4, drop_last=drop_last), 2 * steps)
        for stop in range(steps + 1):
            loader = make(tiny[0], 4, drop_last=drop_last)
            for _ in islice(loader, stop):
                pass
            state = json.loads(json.dumps(loader.state_dict()))
            loader.close()
            restored = make(tiny[0], 4, drop_last=drop_last, num_workers=1)
            restored.load_state_dict(state)
            rest = sequence(restored, 2 * steps - stop)
            assert rest == whole[stop:], f"after {stop} steps"

    @given(data=st.data())
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_on_another_number_of_ranks_and_another_batch_each_remaining_sample_comes_once(self, tiny, data):
        before, after = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        batch_before, batch_after = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        loaders = [make(tiny[0], batch_before, rank=r, size=before, drop_last=False) for r in range(before)]
        stop = data.draw(st.integers(0, len(loaders[0])))
        done = [list(islice(loader, stop)) for loader in loaders]
        states = [loader.state_dict() for loader in loaders]
        for loader in loaders:
            loader.close()
        assert all(state == states[0] for state in states)
        restored = [make(tiny[0], batch_after, rank=r, size=after, drop_last=False) for r in range(after)]
        for loader in restored:
            loader.load_state_dict(states[0])
            loader.set_epoch(0)
        later = [list(loader) for loader in restored]
        seen = [
            key
            for ranks in (done, later)
            for batches in ranks
            for batch in batches
            for key, valid in zip(batch["sample_key"], batch["valid"].tolist(), strict=True)
            if valid
        ]
        assert len(seen) == len(set(seen)) == NUM_TRAIN

    def test_only_batches_handed_out_count(self, tiny):
        loader = make(tiny[0], 3, prefetch_factor=3)
        iterator = iter(loader)
        next(iterator)
        while loader.stats().stages[-1].waiting < 3:
            threading.Event().wait(0.01)
        assert loader.state_dict()["samples_consumed"] == 3
        loader.close()

    @pytest.mark.parametrize(
        ("options", "word"),
        [({"seed": 1}, "order"), ({"split": "val"}, "split"), ({"drop_last": False}, "drop_last")],
    )
    def test_a_state_of_another_sequence_is_refused_showing_both_sides(self, tiny, options, word):
        state = make(tiny[0]).state_dict()
        with pytest.raises(StateMismatchError, match=rf"{word}: state has .* loader has ") as caught:
            make(tiny[0], **options).load_state_dict(state)
        assert repr(json.loads(state["identity"])[word]) in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "both"),
        [
            ({"seed": 9}, "seed: state has 0, loader has 9"),
            ({"image": ImageAugment(height=32, width=48)}, "image.height: state has "),
            ({"ego": BevAugment(train=True, flip_x_prob=0.5)}, "ego.flip_x_prob: state has none, loader has 0.5"),
            ({"pixels": PixelAugment(train=True, hue_deg=18.0)}, "pixels.hue_deg: state has none, loader has 18.0"),
            ({"normalize": Normalize()}, "normalize.dtype: state has none, loader has 'float32'"),
            ({"undistort": Undistort()}, "undistort.alpha: state has none, loader has None"),
            ({"points": True}, "points: state has none, loader has True"),
        ],
    )
    def test_n1_a_state_of_another_augmentation_is_refused_unless_allowed(self, tiny, options, both):
        order = OrderSpec(seed=3)
        saved = make(tiny[0], order=order)
        next(iter(saved))
        state = saved.state_dict()
        saved.close()
        for one in (make(tiny[0], order=order, **options), IterableView(make(tiny[0], order=order, **options))):
            with pytest.raises(StateMismatchError, match="other settings") as caught:
                one.load_state_dict(state)
            assert both in str(caught.value)
            one.load_state_dict(state, strict=False)
            assert one.state_dict()["samples_consumed"] == state["samples_consumed"] > 0
        with pytest.raises(StateMismatchError, match="another training sequence"):
            make(tiny[0], order=OrderSpec(seed=4)).load_state_dict(state, strict=False)

    def test_n1_what_changes_no_sample_is_no_mismatch(self, tiny):
        state = make(tiny[0]).state_dict()
        quiet = {"pixels": PixelAugment(hue_deg=18.0), "ego": BevAugment(flip_x_prob=0.5)}  # train is False
        make(tiny[0], decoder="pillow", backend="pread", verify=False, **quiet).load_state_dict(state)

    def test_a_state_of_another_dataset_is_refused(self, tiny, tmp_path):
        build_dataset(tmp_path / "other", {"train": TRAIN}, seed=1)
        with pytest.raises(StateMismatchError, match="dataset: state has"):
            make(tmp_path / "other").load_state_dict(make(tiny[0]).state_dict())

    @pytest.mark.parametrize(
        "state",
        [{}, {"version": 99}, {"version": 1}, {"version": 1, "epoch": "x"}],
        ids=["empty", "new", "cut", "type"],
    )
    def test_what_is_no_state_is_refused(self, tiny, state):
        with pytest.raises(StateMismatchError):
            make(tiny[0]).load_state_dict(state)

    def test_more_samples_than_the_epoch_has_are_refused(self, tiny):
        loader = make(tiny[0])
        with pytest.raises(WorldError, match="22 samples consumed"):
            loader.load_state_dict(loader.state_dict() | {"samples_consumed": 22})

    def test_a_restored_position_survives_set_epoch_of_its_own_epoch_only(self, tiny):
        loader = make(tiny[0], 3)
        whole = keys(loader)
        state = loader.state_dict() | {"epoch": 0, "samples_consumed": 6}
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert keys(loader) == whole[6:]
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert len(keys(loader)) == NUM_TRAIN


class TestErrors:
    @pytest.mark.parametrize("name", ["batch_size", "num_workers", "prefetch_factor"])
    def test_counts_below_one(self, tiny, name):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            make_loader(tiny[0], **({"batch_size": 2} | {name: 0}))

    def test_unknown_split_and_decoder(self, tiny):
        with pytest.raises(ConfigError, match=r"'test'.*train, val"):
            make(tiny[0], split="test")
        with pytest.raises(ConfigError, match="'nvjpeg'"):
            make(tiny[0], decoder="nvjpeg")

    def test_a_folder_without_a_manifest_is_not_ready(self, tmp_path):
        with pytest.raises(DatasetNotReadyError):
            make(tmp_path)

    def test_a_flipped_bit_is_a_checksum_error_with_shard_and_key(self, tiny, tmp_path):
        root = tmp_path / "damaged"
        raw = build_dataset(root, {"train": TRAIN})
        shard = root / "train-000001.tar"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        with pytest.raises(ChecksumError, match=r"train-000001\.tar") as caught:
            list(make(root, 7, shuffle=False))
        assert caught.value.key in raw
        assert caught.value.key in str(caught.value)

    def test_a_cut_shard_is_an_error_with_its_name(self, tmp_path):
        root = tmp_path / "cut"
        build_dataset(root, {"train": (4,)})
        shard = root / "train-000000.tar"
        shard.write_bytes(shard.read_bytes()[:-4096])
        with pytest.raises(TruncatedShardError, match=r"train-000000\.tar"):
            list(make(root, 4))

    def test_an_image_that_does_not_decode_names_sample_and_camera(self, tmp_path, monkeypatch):
        root = tmp_path / "broken"
        whole = simplejpeg.encode_jpeg
        monkeypatch.setattr(simplejpeg, "encode_jpeg", lambda *arguments: whole(*arguments)[:400])
        raw = build_dataset(root, {"train": (2,)})
        with pytest.raises(ImageError) as caught:
            list(make(root, 2, shuffle=False))
        assert caught.value.key == next(iter(raw))
        assert caught.value.member == "cam_front"

    def test_the_loader_can_be_used_again_after_an_error(self, tmp_path):
        root = tmp_path / "mended"
        build_dataset(root, {"train": (4,)})
        shard = root / "train-000000.tar"
        good = shard.read_bytes()
        shard.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
        loader = make(root, 4)
        with pytest.raises(ChecksumError):
            list(loader)
        with shard.open("r+b") as file:  # the mapping stays the same file's
            file.write(good)
        assert len(list(loader)) == 1


class TestThreads:
    @pytest.fixture(autouse=True)
    def without_those_of_loaders_before(self):
        """A loader that an exception's traceback still refers to has its threads until it is collected."""
        gc.collect()

    def names(self):
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("fuelrail")}

    def test_an_exhausted_a_closed_and_a_dropped_loader_leave_none(self, tiny):
        loader = make(tiny[0])
        list(loader)
        assert self.names(), "they load the next epoch's first batches"
        loader.close()
        assert not self.names()
        list(make(tiny[0]))
        gc.collect()
        assert not self.names()
        loader = make(tiny[0])
        next(iter(loader))
        loader.close()
        assert not self.names()
        with make(tiny[0]) as loader:
            next(iter(loader))
        assert not self.names()
        loader = make(tiny[0])
        iterator = iter(loader)
        next(iterator)
        del loader, iterator
        gc.collect()
        assert not self.names()

    def test_breaking_out_of_the_loop_stops_them(self, tiny):
        loader = make(tiny[0])
        for _ in loader:
            break
        gc.collect()
        assert not self.names()

    def test_the_clocks_count_every_sample(self, tiny):
        loader = make(tiny[0], 3)
        assert loader.stats()[:6] == ((), 0, 0, 0, 0.0, 0.0)
        count = len(list(loader)) + len(list(loader))
        loader.close()
        count += len(list(loader))
        stats = loader.stats()
        assert (stats.batches, stats.samples, stats.images) == (count, 3 * count, 6 * count)
        assert [stage.name for stage in stats.stages] == ["fetch", "parse", "decode", "collate"]
        # More than was handed out: the next epoch's first batches are on their way.
        assert all(stage.items >= 3 * count for stage in stats.stages[:3])
        assert stats.stages[3].items >= count
        assert all(stage.busy_s >= 0 and stage.starved_s >= 0 and stage.blocked_s >= 0 for stage in stats.stages)


def test_a_torch_trainer_takes_it_as_it_takes_torchs_loader(tiny):
    """Real gradient steps over two epochs: the batch goes into a model without any adapter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 4), torch.nn.Flatten(), torch.nn.LazyLinear(1))
    loader = make(tiny[0], 7)
    losses = []
    model(torch.zeros(1, 3, 64, 96))
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(batch["img"].flatten(0, 1).float() / 255).sub(1).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    assert len(losses) == 2 * len(loader)
    assert losses[-1] < losses[0]


def test_order_spec_replaces_shuffle(tiny):
    windowed = make(tiny[0], 7, order=OrderSpec(kind="windowed", seed=3, window=4))
    assert sorted(keys(windowed)) == sorted(keys(make(tiny[0], 7)))
    assert json.loads(windowed.state_dict()["identity"])["order"]["kind"] == "windowed"
