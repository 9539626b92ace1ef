"""A model that was made without memory gets the weights of the whole one; on ranks, each its share, and no more."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fuelrail.bench.trainer.models.build import build_model, draft
from fuelrail.bench.trainer.models.settings import MODELS, GptSettings
from fuelrail.bench.trainer.strategies.parallel import parallelise
from support.allocator import peak_of
from support.models import build
from support.ranks import run_ranks

RANKS = 4
WIDE = GptSettings(width=256, depth=24, heads=8, vocabulary=64, context=64)
WIDE_BYTES = 4 * 19_000_000
DIVIDED = [
    ("gpt-tiny", {"strategy": "fsdp2"}),
    ("resnet-tiny", {"strategy": "zero2"}),
    ("vit-tiny", {"mesh": "dp_shard=2,tp=2"}),
    ("bev-tiny", {"mesh": "pp=2,dp_shard=2"}),
    ("gpt-tiny", {"mesh": "pp=2,tp=2"}),
    ("gpt-tiny", {"strategy": "tensor"}),
]


def tensors(models):
    """Parameters and buffers of this rank's part by name, each of them whole."""
    named = (
        pair for model in models for pair in (*model.named_parameters(), *model.named_buffers())
    )
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named
    }


@pytest.mark.parametrize("name", ["bev-tiny", "resnet-tiny", "vit-tiny", "gpt-tiny"])
def test_a_filled_draft_is_the_model(name):
    built = build(MODELS[name], "cpu", 5)
    drawn = torch.rand(1)
    model, fill = draft(partial(build_model, MODELS[name]), "cpu", 5)
    assert {value.device.type for value in model.parameters()} == {"meta"}
    fill([model], False)
    assert torch.rand(1) == drawn
    expected = tensors([built])
    filled = tensors([model])
    assert expected.keys() == filled.keys()
    assert all(torch.equal(value, filled[key]) for key, value in expected.items())


@pytest.mark.process
@pytest.mark.slow
def test_ranks_have_their_share_of_the_same_weights_and_never_the_whole_model():
    assert run_ranks(RANKS, __file__).count("compared") == RANKS


def divided(size, options):
    return parallelise(partial(build_model, size), **options, seed=5, micro_batches=2)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallels = []
    peak = peak_of(lambda: parallels.append(divided(WIDE, {"strategy": "fsdp2"})))
    assert (
        sum(value.numel() for value in parallels[0].models[0].parameters()) * 4 > 0.99 * WIDE_BYTES
    )
    assert WIDE_BYTES / RANKS < peak < 0.4 * WIDE_BYTES, f"{peak} bytes, the model has {WIDE_BYTES}"
    for name, options in DIVIDED:
        expected = tensors([build(MODELS[name], "cpu", 5)])
        filled = tensors(divided(MODELS[name], options).models)
        if "pp" not in options.get("mesh", ""):
            assert filled.keys() == expected.keys()
        assert filled
        assert all(torch.equal(value, expected[key]) for key, value in filled.items()), (
            name,
            options,
        )
    dist.barrier()
    print("compared", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
