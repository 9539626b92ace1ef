"""Dataroots and datasets that tests only read: each is made once a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.nuscenes_tables import Dataroot, build_nuscenes
from support.sharding import shard_nuscenes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def dataroot(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Dataroot]:
    """Make a dataroot of ``clips`` such as ``"a4 b5"``, of 4 and of 5 keyframes; options are of `build_nuscenes`."""
    dataroots: dict[str, Dataroot] = {}

    def make(clips: str, **options) -> Dataroot:
        key = repr((clips, options))
        if key not in dataroots:
            lengths = {name[0]: int(name[1:]) for name in clips.split()}
            dataroots[key] = build_nuscenes(tmp_path_factory.mktemp("dataroot"), lengths, **options)
        return dataroots[key]

    return make


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Shard a dataroot with one worker, undisturbed; options are of `shard_nuscenes`."""
    folders: dict[str, Path] = {}

    def make(source: Dataroot, **options) -> Path:
        key = repr((source.root, options))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("sharded") / "out"
            shard_nuscenes(source.root, folders[key], **options)
        return folders[key]

    return make
