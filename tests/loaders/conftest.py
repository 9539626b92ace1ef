"""Datasets that the tests of several rooms read."""

from __future__ import annotations

import shutil

import pytest

from support.datasets import build_dataset


@pytest.fixture(scope="session")
def build_once(tmp_path_factory):
    """``build_once(splits, **options)``: folder and raw members of `build_dataset`; read only.

    Equal arguments give one dataset.
    """
    base = tmp_path_factory.mktemp("made")
    datasets = {}

    def make(splits, **options):
        name = repr((splits, sorted(options.items())))
        if name not in datasets:
            root = base / str(len(datasets))
            datasets[name] = root, build_dataset(root, splits, **options)
        return datasets[name]

    return make


@pytest.fixture(scope="session")
def tiny(build_once):
    """Three shards to train on, of 5, 7 and 9 samples, and one of 4 to evaluate on; read only."""
    return build_once({"train": (5, 7, 9), "val": (4,)})[0]


@pytest.fixture(scope="session")
def raw(build_once, tiny):
    """The members of ``tiny`` by the samples' keys."""
    return build_once({"train": (5, 7, 9), "val": (4,)})[1]


@pytest.fixture(scope="session")
def pristine(tiny):
    """The same, for those who read it as storage."""
    return tiny


@pytest.fixture
def tiny_copy(tiny, tmp_path):
    """A copy of ``tiny`` that the test may spoil."""
    return shutil.copytree(tiny, tmp_path / "own")
