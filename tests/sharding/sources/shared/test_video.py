"""Video files that are none."""

from __future__ import annotations

import numpy as np
import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.video import VideoFile
from support.manifest_world import write_video


@pytest.mark.parametrize("head", [b"", b"\0\0\0\x18ftypisom"])
def test_a_large_file_that_was_not_written_to_its_end_is_not_searched(tmp_path, head):
    with (tmp_path / "a.mp4").open("wb") as file:
        file.write(head)
        file.truncate(1 << 40)
    with pytest.raises(SourceError, match=r"a\.mp4' ends with zeros"):
        VideoFile(str(tmp_path / "a.mp4")).facts()


def test_a_codec_that_nobody_knows_is_named(tmp_path):
    path = tmp_path / "a.mp4"
    write_video(path, [np.zeros((48, 64, 3), np.uint8)] * 3)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"\0vc1"))
    with pytest.raises(
        SourceError,
        match=r"a\.mp4' has no video stream of a codec that FFmpeg knows",
    ):
        VideoFile(str(path)).facts()
