"""Datasets that the tests of several rooms read."""

from __future__ import annotations

import shutil

import pytest

from support.datasets import build_dataset


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made(splits, **options)``: folder and raw members of `build_dataset`, made once for equal ones; read only."""
    base = tmp_path_factory.mktemp("made")
    known = {}

    def make(splits, **options):
        name = repr((splits, sorted(options.items())))
        if name not in known:
            root = base / str(len(known))
            known[name] = root, build_dataset(root, splits, **options)
        return known[name]

    return make


@pytest.fixture(scope="session")
def tiny(made):
    """Three shards to train on, of 5, 7 and 9 samples, and one of 4 to evaluate on; read only."""
    return made({"train": (5, 7, 9), "val": (4,)})[0]


@pytest.fixture(scope="session")
def raw(made, tiny):
    """The members of ``tiny`` by the samples' keys."""
    return made({"train": (5, 7, 9), "val": (4,)})[1]


@pytest.fixture(scope="session")
def pristine(tiny):
    """The same, for those who read it as storage."""
    return tiny


@pytest.fixture
def own(tiny, tmp_path):
    """A copy of ``tiny`` that the test may spoil."""
    return shutil.copytree(tiny, tmp_path / "own")
