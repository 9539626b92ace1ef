"""The DataLoader from outside: what batches hold, in which order, and which states it takes; see also `test_resume`."""

from __future__ import annotations

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
import simplejpeg
import torch

from fuelrail import DataLoader, ImageAugment, IterableView, OrderSpec, World
from fuelrail.loaders.config import Normalize
from fuelrail.loaders.decode.lens import Undistort
from fuelrail.loaders.integrations.map_style import MapView
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
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.schema import decode_sample
from fuelrail.pipeline.transforms.ego import BevAugment
from fuelrail.pipeline.transforms.pixels import PixelAugment
from support.batches import FULL, SMALL, keys, load
from support.datasets import CAMERAS, build_dataset

NUM_TRAIN = 21


class TestContent:
    def test_every_value_equals_the_source(self, tiny, raw):
        seen_keys = set()
        for batch in load(tiny, 7, image=FULL, points=True):
            for index, key in enumerate(batch["sample_key"]):
                expected = decode_sample(key, raw[key])
                seen_keys.add(key)
                for camera, channel in enumerate(CAMERAS):
                    pixels = simplejpeg.decode_jpeg(raw[key][f"{channel}.jpg"], "RGB")
                    np.testing.assert_array_equal(
                        batch["img"][index, camera].permute(1, 2, 0).numpy(),
                        pixels,
                    )
                geometry = expected.geometry
                np.testing.assert_allclose(
                    batch["intrinsics"][index],
                    geometry.intrinsics,
                    rtol=1e-6,
                    atol=1e-6,
                )
                np.testing.assert_allclose(batch["cam2ego"][index], geometry.cam2ego, rtol=1e-6)
                for name, value in {
                    "ego2global": geometry.ego2global,
                    "img_timestamp_ns": geometry.cam_timestamp_ns,
                    "timestamp_ns": expected.meta.timestamp_ns,
                    "gt_boxes_3d": expected.boxes.boxes3d,
                    "gt_labels_3d": expected.boxes.label,
                    "instance_id": expected.boxes.instance_id,
                    "points": expected.points["lidar_top"],
                    "frame": expected.meta.frame_idx,
                }.items():
                    np.testing.assert_array_equal(batch[name][index], value, name)
                assert batch["clip_id"][index] == expected.meta.clip_id
        assert seen_keys == {
            key for key, members in raw.items() if b'"split":"train"' in members["meta.json"]
        }

    def test_a_missing_camera_is_zeros_and_flagged(self, build_once):
        root, _ = build_once({"train": (4,)}, missing=frozenset({(2, "cam_back")}))
        batch = next(iter(load(root, 4, shuffle=False)))
        assert batch["cam_valid"].tolist() == [
            [True, True],
            [True, True],
            [True, False],
            [True, True],
        ]
        assert not batch["img"][2, 1].any()
        assert batch["img"][2, 0].any()

    def test_an_unlabelled_dataset_has_no_box_keys(self, build_once):
        batch = next(iter(load(build_once({"train": (4,)}, labelled=False)[0], 4)))
        assert not [name for name in batch if name.startswith("gt_")]

    def test_the_matrices_follow_the_augmented_pixels(self, tiny):
        """A point on a camera's axis grid lands on the same colour in the full and in the flipped, scaled picture."""
        flipped = ImageAugment(height=64, width=96, train=True, resize=1.0, flip_prob=1.0)
        plain, turned = (
            next(iter(load(tiny, 4, shuffle=False, image=image))) for image in (FULL, flipped)
        )
        assert torch.equal(plain["img"].flip(-1), turned["img"])
        point = torch.tensor([10.0, 1.5, 0.5, 1.0])
        u = [
            float((b["ego2img"][0, 0] @ point)[0] / (b["ego2img"][0, 0] @ point)[2])
            for b in (plain, turned)
        ]
        assert u[1] == pytest.approx(95 - u[0], abs=1e-3)

    def test_a_batch_that_is_kept_is_never_overwritten(self, tiny):
        loader = load(tiny, 2)
        copies = [(batch["img"], batch["img"].clone()) for batch in loader]
        assert len(list(loader)) == len(copies)
        assert all(torch.equal(image, copy) for image, copy in copies)


class TestOrder:
    def test_a_consumer_that_counts_batches_gets_the_next_epoch_too(self, tiny):
        """Lightning and others take len(loader) batches and never ask for one more."""
        loader = load(tiny, 4)
        counted = load(tiny, 4)
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
        loader = load(tiny, 4)
        old = iter(loader)
        assert len(list(islice(old, len(loader)))) == len(loader)
        new = iter(loader)
        assert next(new)["epoch"] == 1
        assert list(old) == []
        del old
        assert loader.state_dict()["samples_consumed"] == 4
        assert [batch["step"] for batch in new] == [1, 2, 3, 4]

    def test_drop_last_leaves_out_the_rest(self, tiny):
        loader = load(tiny, 6)
        assert len(loader) == len(list(loader)) == 3

    def test_epochs_and_seeds_differ_and_repeat(self, tiny):
        loader = load(tiny, 7)
        first = keys(loader)
        second = keys(loader)
        assert first != second
        assert sorted(first) == sorted(second)
        loader.set_epoch(0)
        assert keys(loader) == first
        reseeded = load(tiny, 7, seed=1)
        reseeded.set_epoch(1)
        assert keys(reseeded) not in (first, second)

    @pytest.mark.costly
    def test_the_next_epoch_continues_in_the_same_threads_and_another_one_does_not_see_them(
        self, tiny
    ):
        epochs = []
        for epoch in range(4):
            loader = load(tiny, 7)
            loader.set_epoch(epoch)
            epochs.append(keys(loader))
        loader = load(tiny, 7)
        gc.collect()  # loaders of tests before, whose threads would end at any time
        assert keys(loader) == epochs[0]
        threads = {thread for thread in threading.enumerate() if thread.name.startswith("fuelrail")}
        assert keys(loader) == epochs[1]
        assert threads <= set(threading.enumerate())
        loader.set_epoch(3)
        assert keys(loader) == epochs[3]
        loader.load_state_dict(loader.state_dict() | {"epoch": 1, "samples_consumed": 7})
        assert keys(loader) == epochs[1][7:]
        assert keys(loader) == epochs[2]

    def test_sequential_is_as_stored_in_each_split(self, tiny, raw):
        assert keys(load(tiny, 7, shuffle=False)) == list(raw)[:NUM_TRAIN]
        assert sorted(keys(load(tiny, 4, split="val"))) == sorted(raw)[NUM_TRAIN:]

    def test_an_iteration_that_another_one_ended_says_so(self, tiny):
        loader = load(tiny)
        first = iter(loader)
        next(first)
        second = iter(loader)
        next(second)
        with pytest.raises(
            FuelrailError,
            match=r"another iteration .* ended this one after 1 of 7 batches",
        ):
            next(first)
        assert len(list(second)) == len(loader) - 1, "the second is not disturbed"

    def test_of_iterations_in_several_threads_all_but_the_last_one_say_so(self, tiny, monkeypatch):
        loader = load(tiny)
        first = iter(loader)
        next(first)
        stopped = threading.Event()
        go_on = threading.Event()
        start = loader._runner.start

        def slow_start(*arguments):
            stopped.set()
            assert go_on.wait(200)
            start(*arguments)

        monkeypatch.setattr(loader._runner, "start", slow_start)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(iter, loader)]
            assert stopped.wait(200)
            futures.append(pool.submit(iter, loader))
            with pytest.raises(FuelrailError, match="ended this one after 1 of 7 batches"):
                next(first)
            go_on.set()
            second, third = [future.result() for future in futures]
        with pytest.raises(FuelrailError, match="ended this one after 0 of 7 batches"):
            next(second)
        assert len(list(third)) == len(loader)

    @pytest.mark.costly
    def test_each_iteration_is_an_epoch_of_its_own_however_far_the_one_before_it_went(self, tiny):
        epochs = [keys(loader) for loader in [load(tiny)] for _ in range(6)]
        loader = load(tiny)
        assert keys(islice(loader, 2)) == epochs[0][:6]
        assert loader.state_dict()["samples_consumed"] == 6, "where it was left"
        assert next(iter(loader))["sample_key"] == epochs[1][:3]
        assert keys(loader) == epochs[2]
        iter(loader)
        iter(loader)  # iterations that give no batch do not count
        running = iter(loader)
        assert next(running)["sample_key"] == epochs[3][:3]
        newer = iter(loader)
        assert next(newer)["sample_key"] == epochs[4][:3], (
            "one that another one ended has been an epoch too"
        )
        assert keys(loader) == epochs[5]

    def test_a_restored_position_is_that_of_one_iteration(self, tiny):
        epochs = [keys(loader) for loader in [load(tiny)] for _ in range(3)]
        stopped = load(tiny)
        assert keys(islice(stopped, 2)) == epochs[0][:6]
        loader = load(tiny)
        loader.load_state_dict(stopped.state_dict())
        iter(loader)
        assert keys(islice(loader, 2)) == epochs[0][6:12]
        assert keys(loader) == epochs[1]
        loader.load_state_dict(stopped.state_dict())
        loader.set_epoch(1)  # the state was saved at a break: the run went on with the next epoch
        assert keys(loader) == epochs[1]

    @pytest.mark.costly
    def test_an_epoch_that_is_set_is_the_next_iterations_wherever_the_one_before_is(self, tiny):
        epochs = [keys(loader) for loader in [load(tiny)] for _ in range(4)]
        loader = load(tiny)
        assert keys(islice(loader, 2)) == epochs[0][:6]
        loader.set_epoch(0)
        assert loader.state_dict()["samples_consumed"] == 0
        assert keys(loader) == epochs[0]
        running = iter(loader)
        loader.set_epoch(3)  # before its first batch
        assert next(running)["epoch"] == 1
        assert keys(loader) == epochs[3]
        running = iter(loader)
        next(running)
        loader.set_epoch(2)  # in its middle
        assert next(running)["epoch"] == 4
        assert keys(loader) == epochs[2]

    @pytest.mark.costly
    def test_a_validation_loader_that_only_changes_its_class_gives_the_same_samples(self, tiny):
        """The order is torch's with its defaults, on one rank and with a DistributedSampler on several."""
        view = MapView(open_dataset(tiny), ["boxes"], transform=lambda item: item["key"])
        train = torch.utils.data.Subset(view, range(NUM_TRAIN))
        for batch_size in (1, 4, 7, 32):
            theirs = [
                key for batch in torch.utils.data.DataLoader(train, batch_size) for key in batch
            ]
            with DataLoader(tiny, batch_size, transforms={"image": SMALL}) as loader:
                loaded = list(loader)
            valid_keys = []
            for batch in loaded:
                samples = zip(batch["sample_key"], batch["valid"], strict=True)
                valid_keys += [key for key, is_valid in samples if is_valid]
            assert valid_keys == theirs
        for rank in range(2):
            sampler = torch.utils.data.DistributedSampler(
                train, num_replicas=2, rank=rank, shuffle=False
            )
            theirs = torch.utils.data.DataLoader(train, 3, sampler=sampler)
            with DataLoader(tiny, 3, world=World(rank, 2), transforms={"image": SMALL}) as loader:
                assert len(loader) == len(list(loader)) == len(theirs)


class TestState:
    def test_only_batches_handed_out_count(self, tiny):
        loader = load(tiny, 3, prefetch_factor=3)
        iterator = iter(loader)
        next(iterator)
        while loader.stats().stages[-1].waiting < 3:
            threading.Event().wait(0.01)
        assert loader.state_dict()["samples_consumed"] == 3
        loader.close()

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"seed": 1}, "order"),
            ({"split": "val"}, "split"),
            ({"drop_last": False}, "drop_last"),
        ],
    )
    def test_a_state_of_another_sequence_is_refused_showing_both_sides(self, tiny, options, word):
        state = load(tiny).state_dict()
        with pytest.raises(
            StateMismatchError, match=rf"{word}: state has .* loader has "
        ) as caught:
            load(tiny, **options).load_state_dict(state)
        assert repr(json.loads(state["identity"])[word]) in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"seed": 9}, "seed: state has 0, loader has 9"),
            ({"image": FULL}, "image.height: state has "),
            (
                {"ego": BevAugment(train=True, flip_x_prob=0.5)},
                "ego.flip_x_prob: state has none, loader has 0.5",
            ),
            (
                {"pixels": PixelAugment(train=True, hue_deg=18.0)},
                "pixels.hue_deg: state has none, loader has 18.0",
            ),
            (
                {"normalize": Normalize()},
                "normalize.dtype: state has none, loader has 'float32'",
            ),
            (
                {"undistort": Undistort()},
                "undistort.alpha: state has none, loader has None",
            ),
            ({"points": True}, "points: state has none, loader has True"),
            ({"two_views": True}, "two_views: state has none, loader has True"),
        ],
    )
    def test_a_state_of_another_augmentation_is_refused_unless_allowed(
        self, tiny, options, message
    ):
        order = OrderSpec(seed=3)
        with load(tiny, order=order) as saved:
            next(iter(saved))
            state = saved.state_dict()
        for loader in (
            load(tiny, order=order, **options),
            IterableView(load(tiny, order=order, **options)),
        ):
            with pytest.raises(StateMismatchError, match="other settings") as caught:
                loader.load_state_dict(state)
            assert message in str(caught.value)
            loader.load_state_dict(state, strict=False)
            assert loader.state_dict()["samples_consumed"] == state["samples_consumed"] > 0
        with pytest.raises(StateMismatchError, match="another training sequence"):
            load(tiny, order=OrderSpec(seed=4)).load_state_dict(state, strict=False)

    def test_what_changes_no_sample_is_not_a_mismatch(self, tiny):
        quiet = {
            "pixels": PixelAugment(train=False, hue_deg=18.0),
            "ego": BevAugment(train=False, flip_x_prob=0.5),
        }
        changed = load(tiny, decoder="pillow", backend="pread", verify=False, **quiet)
        changed.load_state_dict(load(tiny).state_dict())

    def test_a_state_of_another_dataset_is_refused(self, tiny, build_once):
        with pytest.raises(StateMismatchError, match="dataset: state has"):
            load(build_once({"train": (5, 7, 9)}, seed=1)[0]).load_state_dict(
                load(tiny).state_dict()
            )

    def test_more_samples_than_the_epoch_has_are_refused(self, tiny):
        loader = load(tiny)
        with pytest.raises(WorldError, match="22 samples consumed"):
            loader.load_state_dict(loader.state_dict() | {"samples_consumed": 22})

    def test_a_restored_position_survives_set_epoch_of_its_own_epoch_only(self, tiny):
        loader = load(tiny)
        epoch_keys = keys(loader)
        state = loader.state_dict() | {"epoch": 0, "samples_consumed": 6}
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert keys(loader) == epoch_keys[6:]
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert len(keys(loader)) == NUM_TRAIN

    def test_a_state_after_the_last_batch_is_restored_as_the_next_epoch(self, tiny):
        loader = load(tiny)
        last = [loader.state_dict() for _ in loader][-1]
        assert last["epoch"] == 0
        resumed = load(tiny)
        resumed.load_state_dict(last)
        assert resumed.state_dict()["epoch"] == 1, "a script loops from this epoch on"
        assert keys(resumed) == keys(loader)
        resumed.load_state_dict(last)
        resumed.set_epoch(0)
        assert keys(resumed) == []


class TestErrors:
    def test_unknown_split_and_decoder(self, tiny):
        with pytest.raises(ConfigError, match=r"'test'.*train, val"):
            load(tiny, split="test")
        with pytest.raises(ConfigError, match="'nvjpeg'"):
            load(tiny, decoder="nvjpeg")

    def test_a_folder_without_a_manifest_is_not_ready(self, tmp_path):
        with pytest.raises(DatasetNotReadyError):
            load(tmp_path)

    def test_a_flipped_bit_is_a_checksum_error_with_shard_and_key_and_the_loader_can_be_used_again(
        self, tiny_copy, raw
    ):
        shard = tiny_copy / "train-000001.tar"
        good = shard.read_bytes()
        offset = (
            good.rindex(b"\xff\xd8\xff") + 300
        )  # in an image: a loader without points does not read lidars
        shard.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        loader = load(tiny_copy, 7, shuffle=False)
        with pytest.raises(ChecksumError, match=r"train-000001\.tar") as caught:
            list(loader)
        assert caught.value.key in raw
        assert caught.value.key in str(caught.value)
        with shard.open("r+b") as file:  # the mapping stays the same file's
            file.write(good)
        assert len(list(loader)) == 3

    def test_a_cut_shard_is_an_error_with_its_name(self, tiny_copy):
        shard = tiny_copy / "train-000000.tar"
        shard.write_bytes(shard.read_bytes()[:-4096])
        with pytest.raises(TruncatedShardError, match=r"train-000000\.tar"):
            list(load(tiny_copy))

    def test_an_image_that_does_not_decode_names_sample_and_camera(self, tmp_path):
        raw = build_dataset(
            tmp_path / "broken",
            {"train": (2,)},
            rewrite=lambda row, channel, data: data[:400],
        )
        with pytest.raises(ImageError) as caught:
            list(load(tmp_path / "broken", 2, shuffle=False))
        assert (caught.value.key, caught.value.member) == (
            next(iter(raw)),
            "cam_front",
        )


class TestThreads:
    @pytest.fixture(autouse=True)
    def without_those_of_loaders_before(self):
        """A loader that an exception's traceback still refers to has its threads until it is collected."""
        gc.collect()

    def names(self):
        return {
            thread.name for thread in threading.enumerate() if thread.name.startswith("fuelrail")
        }

    @pytest.mark.costly
    def test_an_exhausted_a_closed_and_a_dropped_loader_leave_none(self, tiny):
        loader = load(tiny)
        list(loader)
        assert self.names(), "they load the next epoch's first batches"
        loader.close()
        assert not self.names()
        list(load(tiny))
        gc.collect()
        assert not self.names()
        with load(tiny) as loader:
            next(iter(loader))
        assert not self.names()
        loader = load(tiny)
        iterator = iter(loader)
        next(iterator)
        del loader, iterator
        gc.collect()
        assert not self.names()

    def test_breaking_out_of_the_loop_stops_them(self, tiny):
        loader = load(tiny)
        for _ in loader:
            break
        gc.collect()
        assert not self.names()

    def test_the_clocks_count_every_sample(self, tiny):
        loader = load(tiny)
        assert loader.stats()[:6] == ((), 0, 0, 0, 0.0, 0.0)
        count = len(list(loader)) + len(list(loader))
        loader.close()
        count += len(list(loader))
        stats = loader.stats()
        assert (stats.batches, stats.samples, stats.images) == (
            count,
            3 * count,
            6 * count,
        )
        assert [stage.name for stage in stats.stages] == [
            "fetch",
            "parse",
            "decode",
            "collate",
        ]
        # More than was handed out: the next epoch's first batches are on their way.
        assert all(stage.items >= 3 * count for stage in stats.stages[:3])
        assert stats.stages[3].items >= count
        assert all(
            stage.busy_s >= 0 and stage.starved_s >= 0 and stage.blocked_s >= 0
            for stage in stats.stages
        )


def test_a_torch_trainer_takes_it_as_it_takes_torchs_loader(tiny):
    """Real gradient steps over two epochs: the batch goes into a model without any adapter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 4), torch.nn.Flatten(), torch.nn.LazyLinear(1)
    )
    loader = load(tiny, 7)
    losses = []
    model(torch.zeros(1, 3, 32, 48))
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = model(batch["img"].flatten(0, 1).float() / 255).sub(1).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():  # torch.optim takes seconds to import
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad
            losses.append(float(loss.detach()))
    assert len(losses) == 2 * len(loader)
    assert losses[-1] < losses[0]


def test_an_order_has_the_seed_of_its_own(tiny):
    for seed, of_order in ((7, 3), (7, 7), (7, 0), (0, 7)):
        with load(tiny, seed=seed, order=OrderSpec(seed=of_order)) as loader:
            assert loader.order.seed == of_order
            assert loader.seed == seed
