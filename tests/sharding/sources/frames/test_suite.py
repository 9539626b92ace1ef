"""Every source of Fuelrail's own does what a source must do: images in files, in ranges of a file, and made."""

from __future__ import annotations

from typing import ClassVar

import pytest

from support.neutral_source import install_plugin, write_neutral
from support.source_suite import SourceSuite


@pytest.fixture(autouse=True)
def plugins(tmp_path_factory, monkeypatch):
    """The tests' own kinds, installed as a plug-in's are."""
    folder = tmp_path_factory.mktemp("site")
    install_plugin(folder, "neutral", "support.neutral_source:Neutral")
    install_plugin(folder, "neutral_by_clip", "support.neutral_source:NeutralByClip")
    install_plugin(folder, "neutral_without_poses", "support.neutral_source:NeutralWithoutPoses")
    monkeypatch.syspath_prepend(folder)


class TestFiles(SourceSuite):
    kind = "neutral"

    def write(self, world, root):
        return write_neutral(world, root)


class TestRanges(TestFiles):
    options: ClassVar = {"images": "range", "sizes": True}


class TestRangesWithHeads(TestFiles):
    options: ClassVar = {"images": "range"}


class TestMade(TestFiles):
    options: ClassVar = {"images": "made"}
