"""Video files that are none."""

from __future__ import annotations

import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.video import VideoFile


@pytest.mark.parametrize("head", [b"", b"\0\0\0\x18ftypisom"])
def test_a_large_file_that_was_not_written_to_its_end_is_not_searched(tmp_path, head):
    with (tmp_path / "a.mp4").open("wb") as file:
        file.write(head)
        file.truncate(1 << 40)
    with pytest.raises(SourceError, match=r"a\.mp4' ends with zeros"):
        VideoFile(str(tmp_path / "a.mp4")).facts()
