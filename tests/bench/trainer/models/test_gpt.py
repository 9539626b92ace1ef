"""Tokens of the decoder: the dataset's own channel, or made ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.bench.studies.train.experiment import token_channel
from fuelrail.bench.trainer.models.gpt import tokens_of
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary
from fuelrail.pipeline.errors import ConfigError
from support.datasets import build_dataset

TINY = MODELS["gpt-tiny"]


def build_tokens(folder, length=33, words=64):
    channel = Channel(
        name="tokens",
        kind="tokens",
        field="tokens.npy",
        law=Law("fixed"),
        dtype="uint16",
        axes=("token",),
        shape=(length,),
        vocabulary=Vocabulary("words", words),
    )
    build_dataset(
        folder,
        {"train": (4,)},
        extra=[(channel, lambda row: np.arange(length, dtype=np.uint16) + row)],
    )
    return folder


def test_the_decoder_reads_the_channel_of_the_dataset(tmp_path):
    place = build_tokens(tmp_path / "data", length=40)
    channels = token_channel(str(place), "gpt-tiny")
    chosen = Transforms(image=ImageAugment(height=32, width=48), select=channels)
    with DataLoader(place, 2, shuffle=False, num_workers=1, transforms=chosen) as loader:
        tokens = tokens_of(next(iter(loader)), TINY)
    torch.testing.assert_close(tokens, torch.arange(33) + torch.tensor([[0], [1]]))


def test_without_the_channel_tokens_are_made_of_the_keys(tmp_path):
    build_dataset(tmp_path / "plain", {"train": (2,)})
    assert token_channel(str(tmp_path / "plain"), "gpt-tiny") == []
    tokens = tokens_of({"sample_key": ["a", "b"], "valid": torch.ones(2)}, TINY)
    assert tokens.shape == (2, 33)
    assert not torch.equal(tokens[0], tokens[1])


def test_other_models_read_no_tokens(tmp_path):
    assert token_channel(str(build_tokens(tmp_path / "data")), "bev-tiny") == []


def test_tokens_that_the_model_cannot_read_are_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"shape \[32\]; model 'gpt-tiny' reads kind 'tokens' of any length, or of 33 or more",
    ):
        token_channel(str(build_tokens(tmp_path / "short", length=32)), "gpt-tiny")
    with pytest.raises(ConfigError, match="has 65 words, model 'gpt-tiny' knows 64"):
        token_channel(str(build_tokens(tmp_path / "wordy", words=65)), "gpt-tiny")
