"""Every source of Fuelrail's own does what a source must do: images in files, in ranges of a file, and made."""

from __future__ import annotations

from typing import ClassVar

import pytest

from support.neutral_source import Neutral, write_neutral
from support.sharding import Interrupt, digests
from support.source_suite import SourceSuite


class TestFiles(SourceSuite):
    kind = "neutral"
    states_sizes = False

    def write(self, world, root):
        return write_neutral(world, root)


class TestRanges(TestFiles):
    options: ClassVar = {"images": "range", "sizes": True}
    impossible = ("no file",)
    states_sizes = True


class TestRangesWithHeads(TestFiles):
    options: ClassVar = {"images": "range"}
    impossible = ("no file",)


class TestMade(TestFiles):
    options: ClassVar = {"images": "made"}
    impossible = ("no file",)
    states_sizes = True


class TestByClip(TestFiles):
    kind = "neutral_by_clip"
    options: ClassVar = {"images": "made"}
    impossible = ("no file",)
    states_sizes = True

    def test_each_image_is_made_once_and_nothing_is_left(self, tmp_path):
        world = self.world()
        spec = self.spec(tmp_path, world)
        Neutral.num_made = 0
        self.make(spec, tmp_path / "out", workers=2)
        assert Neutral.num_made == sum(len(frame.images) for _, _, frame in world.frames())
        assert not (tmp_path / "out" / ".fuelrail").exists()

    def test_a_clip_that_was_staged_is_not_read_again(self, tmp_path):
        world = self.world(noise=True)
        spec = self.spec(tmp_path, world)
        self.make(spec, tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            self.make(spec, tmp_path / "out", progress=Interrupt(1))
        staging = tmp_path / "out" / ".fuelrail" / "staging"
        first, second = sorted(staging.glob("*.bin"))
        images = sum(
            len(image.jpeg) for _, _, frame in world.frames() for image in frame.images.values()
        )
        assert sum(file.stat().st_size for file in (first, second)) < 2 * images
        second.write_bytes(second.read_bytes()[:-1])  # as if it had been killed in between
        Neutral.num_made = 0
        self.make(spec, tmp_path / "out")
        num_clip_images = sum(
            len(frame.images) for clip, _, frame in world.frames() if clip is world.clips[1]
        )
        assert (
            0 < Neutral.num_made < num_clip_images
        )  # those of the finished shard are not needed again
        assert digests(tmp_path / "out") == digests(tmp_path / "whole")
