"""The user's own code in the pipeline: what a sample holds, what comes back, what is said when it fails."""

from __future__ import annotations

import pytest
import torch

from fuelrail.pipeline.errors import ConfigError, StageError
from support.batches import load


def identity(sample):
    return sample


class TestTransform:
    def test_a_sample_is_a_batch_without_its_first_axis(self, tiny):
        samples = []
        next(
            iter(
                load(
                    tiny,
                    transform=lambda s: samples.append(s) or s,
                    points=True,
                    shuffle=False,
                    num_workers=1,
                )
            )
        )
        sample = samples[0]
        assert sample["img"].shape == (2, 3, 32, 48)
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

        for ours, theirs in zip(load(tiny, transform=invert), load(tiny), strict=True):
            assert torch.equal(255 - ours["img"], theirs["img"])
            assert ours["img"].is_contiguous()

    def test_an_image_of_another_shape_or_dtype_is_stacked(self, tiny):
        def half(sample):
            return sample | {"img": sample["img"][..., ::2, ::2].half()}

        batch = next(iter(load(tiny, transform=half)))
        assert batch["img"].shape == (3, 2, 3, 16, 24)
        assert batch["img"].dtype == torch.float16

    def test_added_values_are_stacked_where_they_can_be(self, tiny):
        def add(sample):
            size = len(sample["gt_boxes_3d"])
            return {
                "count": size,
                "flag": size > 1,
                "vector": torch.ones(4),
                "ragged": torch.ones(size),
                "text": "x",
            }

        batch = next(iter(load(tiny, 7, transform=add)))
        assert batch["count"].dtype == torch.int64
        assert batch["flag"].dtype == torch.bool
        assert batch["vector"].shape == (7, 4)
        assert isinstance(batch["ragged"], list)
        assert batch["text"] == ["x"] * 7

    def test_the_samples_seed_is_another_one_for_each_sample_and_epoch(self, tiny):
        with load(tiny, 7, transform=lambda sample: {"seed": sample["seed"]}) as loader:
            seeds = []
            for _ in range(2):
                for batch in loader:
                    seeds += batch["seed"].tolist()
        assert len(set(seeds)) == len(seeds) == 42

    def test_an_exception_names_stage_key_and_line_and_keeps_the_traceback(self, tiny):
        def broken(sample):
            if sample["sample_key"] == "clip-0001-000002":
                sample["no_such_name"]
            return sample

        with pytest.raises(StageError) as caught:
            list(load(tiny, transform=broken))
        message = str(caught.value)
        assert "stage 'transform' failed on sample 'clip-0001-000002'" in message
        assert "KeyError: 'no_such_name'" in message
        assert "test_user.py" in message
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.__cause__.__traceback__ is not None

    def test_a_failing_collate_fn_names_the_first_and_last_sample(self, tiny):
        with pytest.raises(
            StageError,
            match=r"stage 'collate' failed on sample 'clip-.*\.\. sample 'clip-.*ZeroDivision",
        ):
            list(load(tiny, collate_fn=lambda samples: 1 / 0))

    def test_no_dict_or_other_names_are_refused_naming_the_sample(self, tiny):
        with pytest.raises(ConfigError, match=r"transform returned NoneType for sample 'clip-"):
            list(load(tiny, transform=lambda sample: None))
        with pytest.raises(ConfigError, match=r"other names than .*: count"):
            list(
                load(
                    tiny,
                    7,
                    transform=lambda s: {"n": 1} | ({"count": 1} if s["frame"] == 2 else {}),
                )
            )

    def test_its_time_is_a_stage_of_its_own(self, tiny):
        loader = load(tiny, transform=identity)
        list(loader)
        stages = loader.stats().stages
        assert [stage.name for stage in stages] == [
            "fetch",
            "parse",
            "decode",
            "transform",
            "collate",
        ]
        assert stages[3].items >= 21


class TestCollate:
    def test_it_gets_the_samples_and_gives_the_batch(self, tiny):
        def pairs(samples):
            return torch.stack([s["img"] for s in samples]), [s["sample_key"] for s in samples]

        for (images, names), batch in zip(load(tiny, collate_fn=pairs), load(tiny), strict=True):
            assert torch.equal(images, batch["img"])
            assert names == batch["sample_key"]

    def test_state_and_resume_do_not_need_a_dict(self, tiny):
        loader, restored = (
            load(
                tiny,
                collate_fn=lambda samples: [s["sample_key"] for s in samples],
            )
            for _ in range(2)
        )
        iterator = iter(loader)
        next(iterator)
        restored.load_state_dict(loader.state_dict())
        assert list(restored) == list(iterator)
