"""Degrees of a mesh: what fits, and what is refused with a word on what would fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fuelrail.bench.trainer.models.settings import MODELS, num_blocks
from fuelrail.bench.trainer.strategies.optimiser import usual_optimiser
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    ParallelSettings,
    check_fits,
    degrees_of,
)
from fuelrail.pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("options", "world", "degrees"),
    [
        ({}, 3, Degrees(dp_replicate=3)),
        ({"strategy": "zero1"}, 4, Degrees(dp_replicate=4)),
        ({"strategy": "fsdp2"}, 4, Degrees(dp_shard=4)),
        ({"strategy": "hsdp"}, 8, Degrees(dp_replicate=4, dp_shard=2)),
        ({"strategy": "tensor"}, 2, Degrees(tp=2)),
        ({"strategy": "pipeline"}, 4, Degrees(pp=4)),
        ({"mesh": "tp=2, pp=2,dp_shard=2"}, 8, Degrees(pp=2, dp_shard=2, tp=2)),
    ],
)
def test_degrees_of_a_world(options, world, degrees):
    world_degrees = degrees_of(ParallelSettings(**options), world)
    assert world_degrees == degrees
    assert world_degrees.data * world_degrees.pp * world_degrees.tp == world


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        (
            {"mesh": "pp=2,tp=2"},
            8,
            "is for 4 ranks, the run has 8; use ranks=4 or dp_shard=2",
        ),
        (
            {"mesh": "dp_shard=3"},
            8,
            "is for 3 ranks, the run has 8; use ranks=3 or dp_shard=8",
        ),
        ({"mesh": "tp=3"}, 8, "is for 3 ranks, the run has 8; use ranks=3$"),
        (
            {"mesh": "dp=2"},
            2,
            "has the part 'dp=2'; write AXIS=N .* axes: pp, dp_replicate, dp_shard, tp",
        ),
        ({"mesh": "tp=2,tp=2"}, 4, "each axis once"),
        ({"mesh": "tp=0"}, 2, "N of at least 1"),
        (
            {"strategy": "hsdp"},
            3,
            "two ranks, which do not divide 3; use ranks=4",
        ),
        (
            {"strategy": "hsdp"},
            1,
            "two ranks, which do not divide 1; use ranks=2",
        ),
        (
            {"strategy": "ddp", "offload": True},
            2,
            "offload needs sharded parameters",
        ),
        (
            {"strategy": "fsdp2", "compression": "fp16"},
            2,
            "compression needs whole models",
        ),
        (
            {"compile": "inductor", "bucket_mib": 0.5},
            2,
            "no bucket_mib below 1, and it is 0.5; use 1 or more",
        ),
    ],
)
def test_degrees_that_do_not_make_the_world_are_refused(options, world, message):
    with pytest.raises(ConfigError, match=message):
        degrees_of(ParallelSettings(**options), world)


@pytest.mark.parametrize(
    ("model", "degrees", "options", "batch_size", "message"),
    [
        (
            "gpt-tiny",
            Degrees(tp=3),
            {},
            4,
            "tp=3 does not divide the 8 heads of the model; tp of 1, 2, 4, 8 would",
        ),
        ("vit-base", Degrees(tp=5), {}, 4, "tp=5 does not divide the 12 heads"),
        (
            "vit-base",
            Degrees(tp=4),
            {},
            4,
            "tp=4 does not divide the 35 patches of an image .*; tp of 1, 5, 7, 35",
        ),
        (
            "gpt-tiny",
            Degrees(pp=3),
            {},
            6,
            "3 stages .* do not divide the model's 8 layers; stages of 1, 2, 4, 8",
        ),
        ("light", Degrees(pp=2), {}, 4, "more than the model's 1 layers"),
        (
            "gpt-tiny",
            Degrees(pp=2),
            {"micro_batches": 3},
            4,
            "does not divide the batch of 4 .* of 1, 2, 4 would",
        ),
        (
            "gpt-tiny",
            Degrees(pp=4),
            {},
            2,
            "1F1B with pp=4 needs 4 micro-batches or more, .* is cut into 2",
        ),
        (
            "gpt-tiny",
            Degrees(pp=2),
            {"pipeline_schedule": "Interleaved1F1B"},
            3,
            "2 micro-batches or a multiple",
        ),
        (
            "gpt-tiny",
            Degrees(pp=2, dp_shard=2),
            {"pipeline_schedule": "DualPipeV"},
            4,
            "loses gradients .*dp_shard=2",
        ),
    ],
)
def test_degrees_that_do_not_divide_model_or_batch_are_refused(
    model, degrees, options, batch_size, message
):
    with pytest.raises(ConfigError, match=message):
        check_fits(
            ParallelSettings(**options),
            degrees=degrees,
            model=MODELS[model],
            batch_size=batch_size,
            image=(80, 112),
        )


@pytest.mark.costly
def test_sizes_and_numbers_of_blocks_are_those_of_the_models():
    torch = pytest.importorskip("torch")
    from fuelrail.bench.trainer.models.build import build_model

    billions = {"vit-2b": 2.03, "gpt2": 0.16, "gpt-1.3b": 1.4, "gpt-100b": 102}
    with torch.device("meta"):
        for name, size in MODELS.items():
            model = build_model(size)
            assert len(model.blocks) == num_blocks(size), name
            if name in billions:
                count = sum(p.numel() for p in model.parameters()) / 1e9
                assert count == pytest.approx(billions[name], rel=0.06), name


@pytest.mark.parametrize("page", ["docs/training.md", "docs/guides/own-model.md"])
def test_pages_that_name_sgd_say_its_momentum(page):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = usual_optimiser([("weight", parameter)], ParallelSettings(optimiser="sgd"))
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    (momentum,) = re.findall(r"`\"?sgd\"?` \(?(?:has a )?momentum (?:of )?([\d.]+)", text)
    assert float(momentum) == optimiser.defaults["momentum"]
