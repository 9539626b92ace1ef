"""Shards that are cut or rewritten in place while a loader reads them: an error with a name, or no harm."""

from __future__ import annotations

import os
import shutil

import pytest

from fuelrail import DataLoader, ImageAugment
from fuelrail.pipeline.errors import (
    BadSamplesError,
    ChecksumError,
    TruncatedShardError,
)
from support.datasets import build_dataset


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("changed") / "pristine"
    # More samples than the stages hold, so that some are read after the change on a busy machine too.
    build_dataset(root, {"train": (25, 25, 25)}, size=(320, 240), layout="none")
    return root


CHANGES = {
    "cut": lambda tar, _: os.truncate(tar, 1000),
    "half": lambda tar, _: os.truncate(tar, tar.stat().st_size // 2),
    "copied over itself": lambda tar, source: shutil.copyfile(source, tar),
    "zeroed": lambda tar, _: tar.write_bytes(bytes(tar.stat().st_size)),
}


@pytest.mark.costly
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_a_shard_changed_during_an_epoch_is_a_named_error_or_no_harm(
    pristine, tmp_path, on_error, how
):
    for turn in range(2):
        root = shutil.copytree(pristine, tmp_path / f"turn-{turn}")
        error = None
        with DataLoader(
            root,
            1,
            shuffle=True,
            transforms={"image": ImageAugment(height=64, width=176)},
            seed=turn,
            num_workers=2,
            bad_samples={"on_error": on_error, "file": None},
            prefetch_factor=1,
            storage={"look_ahead_bytes": 1},
        ) as loader:
            try:
                for number, _ in enumerate(loader):
                    if number == 1 + turn:
                        for tar in sorted(root.glob("*.tar")):
                            CHANGES[how](tar, pristine / tar.name)
            except (
                ChecksumError,
                TruncatedShardError,
                BadSamplesError,
            ) as raised:
                error = raised
        if error is not None:
            assert "train-0000" in str(error)
            assert "clip-" in str(error)
            assert on_error == "substitute" or not isinstance(error, BadSamplesError)
        # Of the shard that is copied over itself a reader may meet no moment in which it is short.
        assert error is not None or how == "copied over itself" or on_error == "substitute"
