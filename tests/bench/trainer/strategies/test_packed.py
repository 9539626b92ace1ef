"""Packs train as their documents do alone: the same loss and gradients, however ranks and micro-batches share them."""

from __future__ import annotations

import pytest
import torch

from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.gpt import packed_rows
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.errors import ConfigError
from support.packed_ranks import QUICK, TOKENS, largest, words


@pytest.mark.process
@pytest.mark.slow
def test_packed_loss_and_gradients_are_those_of_the_documents_alone(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (16, 15)}, extra=[(TOKENS, words)], size=(16, 16)).root
    for loss, gradient in largest(root, tmp_path / "out.json", QUICK).values():
        assert loss <= 1e-6 and gradient <= 1e-5


def batch(*packs, valid=True):
    """A batch of packs of documents of these lengths."""
    lengths = [length for pack in packs for length in pack]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "tokens": Packed(torch.arange(int(offsets[-1])), offsets),
        "pack": torch.tensor([number for number, pack in enumerate(packs) for _ in pack]),
        "pack_offsets": torch.tensor([0, *map(len, packs)]).cumsum(0),
        "valid": torch.full((len(lengths),), valid),
    }


def test_rows_say_where_documents_begin_and_which_predictions_count():
    tokens, places, documents, weight = packed_rows(batch((2, 3), (1,)), 6)
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 0, 0], [5, 0, 0, 0, 0, 0, 0]]
    assert places.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 0, 0, 0]]
    assert documents.tolist() == [[0, 0, 1, 1, 1, -1], [2, -1, -1, -1, -1, -1]]
    assert weight.tolist() == [[1, 0, 1, 1, 0, 0], [0] * 6]


def test_no_token_sees_another_document():
    model = build_model(MODELS["gpt-tiny"]).eval()
    change = batch((4, 5, 3), (7,))
    first = model.predict(*model.inputs(change))[1]
    change["tokens"].values[4:9] += 20
    second = model.predict(*model.inputs(change))[1]
    assert torch.equal(first[0, :4], second[0, :4]) and torch.equal(first[0, 9:], second[0, 9:])
    assert not torch.equal(first[0, 4:9], second[0, 4:9]) and torch.equal(first[1], second[1])


def test_samples_that_fill_up_a_batch_count_for_nothing():
    model = build_model(MODELS["gpt-tiny"])
    padding = batch((4, 5), (7,), valid=False)
    assert (
        model(*model.inputs(padding)).item() == model.real_share(*model.inputs(padding)).item() == 0
    )


def test_a_pack_of_more_tokens_than_a_row_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"a pack has 8 tokens, and a row of the model 7: .* budget",
    ):
        packed_rows(batch((2, 6), (1,)), 6)
