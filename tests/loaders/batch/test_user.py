"""The user's own code in the pipeline: what a sample holds, what comes back, what is said when it fails."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from fuelrail.loaders import ImageAugment, World
from fuelrail.pipeline.errors import ConfigError, StageError
from support.datasets import build_dataset
from support.loaders import make_loader

FULL = ImageAugment(height=64, width=96, resize=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets") / "tiny"
    build_dataset(root, {"train": (5, 7, 9)})
    return root


def make(root, batch_size=3, *, num_workers=2, rank=0, size=1, **options):
    return make_loader(root, batch_size, world=World(rank, size), image=FULL, num_workers=num_workers, **options)


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(ours[name], value), name
            assert ours[name].dtype == value.dtype, name
        elif isinstance(value, list) and isinstance(value[0], torch.Tensor):
            assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(ours[name], value, strict=True)), name
        else:
            assert ours[name] == value, name


def identity(sample):
    return sample


class TestTransform:
    def test_one_that_changes_nothing_changes_nothing(self, tiny):
        """The way over single samples against the vectorised one."""
        for ours, theirs in zip(make(tiny, transform=identity, points=True), make(tiny, points=True), strict=True):
            seeds = ours.pop("seed")
            assert seeds.shape == (3,)
            assert_equal(ours, theirs)

    def test_a_sample_is_a_batch_without_its_first_axis(self, tiny):
        seen = []
        next(iter(make(tiny, transform=lambda s: seen.append(s) or s, points=True, shuffle=False, num_workers=1)))
        sample = seen[0]
        assert sample["img"].shape == (2, 3, 64, 96)
        assert sample["ego2img"].shape == (2, 4, 4)
        assert sample["gt_boxes_3d"].shape[1] == 7
        assert sample["points"].ndim == 2
        assert sample["sample_key"] == "clip-0000-000000"
        assert (sample["epoch"], sample["step"]) == (0, 0)
        assert isinstance(sample["seed"], int)

    def test_an_image_changed_in_place_is_not_copied(self, tiny):
        def invert(sample):
            torch.bitwise_not(sample["img"], out=sample["img"])
            return sample

        for ours, theirs in zip(make(tiny, transform=invert), make(tiny), strict=True):
            assert torch.equal(255 - ours["img"], theirs["img"])
            assert ours["img"].is_contiguous()

    def test_an_image_of_another_shape_or_dtype_is_stacked(self, tiny):
        def half(sample):
            return sample | {"img": sample["img"][..., ::2, ::2].half()}

        batch = next(iter(make(tiny, transform=half)))
        assert batch["img"].shape == (3, 2, 3, 32, 48)
        assert batch["img"].dtype == torch.float16

    def test_what_is_kept_of_a_sample_is_not_overwritten_by_later_batches(self, tiny):
        kept = []
        loader = make(tiny, transform=lambda s: kept.append((s["img"], s["img"].clone())) or {"n": 1})
        for _ in range(3):
            list(loader)
        assert len(kept) >= 63
        assert all(torch.equal(image, copy) for image, copy in kept)

    def test_added_values_are_stacked_where_they_can_be(self, tiny):
        def add(sample):
            size = len(sample["gt_boxes_3d"])
            return {"count": size, "flag": size > 1, "vector": torch.ones(4), "ragged": torch.ones(size), "text": "x"}

        batch = next(iter(make(tiny, 7, transform=add)))
        assert batch["count"].dtype == torch.int64
        assert batch["flag"].dtype == torch.bool
        assert batch["vector"].shape == (7, 4)
        assert isinstance(batch["ragged"], list)
        assert batch["text"] == ["x"] * 7

    @pytest.mark.parametrize("num_workers", [1, 3])
    def test_randomness_from_the_samples_seed_is_the_same_under_any_workers_and_ranks(self, tiny, num_workers):
        def noise(sample):
            draw = torch.Generator().manual_seed(sample["seed"])
            return {"key": sample["sample_key"], "noise": float(torch.rand((), generator=draw))}

        def drawn(loaders):
            found = {}
            for loader in loaders:
                for batch in loader:
                    found |= dict(zip(batch["key"], batch["noise"].tolist(), strict=True))
            return found

        alone = drawn([make(tiny, 6, transform=noise)])
        ranks = [make(tiny, 2, transform=noise, num_workers=num_workers, rank=r, size=3) for r in range(3)]
        assert drawn(ranks) == alone
        assert len(set(alone.values())) == len(alone) == 18
        second = make(tiny, 6, transform=noise)
        second.set_epoch(1)
        later = drawn([second])
        assert all(later[key] != value for key, value in alone.items() if key in later), "each epoch draws again"

    def test_an_exception_names_stage_key_and_line_and_keeps_the_traceback(self, tiny):
        def broken(sample):
            if sample["sample_key"] == "clip-0001-000002":
                sample["no_such_name"]
            return sample

        with pytest.raises(StageError) as caught:
            list(make(tiny, transform=broken))
        message = str(caught.value)
        assert "stage 'transform' failed on sample 'clip-0001-000002'" in message
        assert "KeyError: 'no_such_name'" in message
        assert "test_user.py" in message
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.__cause__.__traceback__ is not None

    def test_a_failing_collate_fn_names_the_first_and_last_sample(self, tiny):
        with pytest.raises(
            StageError, match=r"stage 'collate' failed on sample 'clip-.*\.\. sample 'clip-.*ZeroDivision"
        ):
            list(make(tiny, collate_fn=lambda samples: 1 / 0))

    def test_no_dict_or_other_names_are_refused_naming_the_sample(self, tiny):
        with pytest.raises(ConfigError, match=r"transform returned NoneType for sample 'clip-"):
            list(make(tiny, transform=lambda sample: None))
        with pytest.raises(ConfigError, match=r"other names than .*: count"):
            list(make(tiny, 7, transform=lambda s: {"n": 1} | ({"count": 1} if s["frame"] == 2 else {})))

    def test_a_slow_one_is_warned_of(self, tiny, caplog):
        def slow(sample):
            time.sleep(0.01)
            return sample

        with caplog.at_level(logging.WARNING, "fuelrail"):
            list(make(tiny, transform=slow))
        assert "transform takes" in caplog.text
        caplog.clear()
        list(make(tiny))
        assert not caplog.text

    def test_its_time_is_a_stage_of_its_own(self, tiny):
        loader = make(tiny, transform=identity)
        list(loader)
        stages = loader.stats().stages
        assert [stage.name for stage in stages] == ["fetch", "parse", "decode", "transform", "collate"]
        assert stages[3].items >= 21


class TestCollate:
    def test_it_gets_the_samples_and_gives_the_batch(self, tiny):
        def pairs(samples):
            return torch.stack([s["img"] for s in samples]), [s["sample_key"] for s in samples]

        for (images, names), batch in zip(make(tiny, collate_fn=pairs), make(tiny), strict=True):
            assert torch.equal(images, batch["img"])
            assert names == batch["sample_key"]

    def test_state_and_resume_do_not_need_a_dict(self, tiny):
        loader = make(tiny, collate_fn=lambda samples: [s["sample_key"] for s in samples])
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        rest = list(iterator)
        again = make(tiny, collate_fn=lambda samples: [s["sample_key"] for s in samples])
        again.load_state_dict(state)
        assert list(again) == rest
