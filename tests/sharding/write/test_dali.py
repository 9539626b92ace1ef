"""The .idx files say what DALI's own indexer would say of the tar."""

from __future__ import annotations

import tarfile

from fuelrail.pipeline.format.tar import StoredMember
from fuelrail.sharding.write.packer import IndexText
from support.nuscenes_tables import build_nuscenes
from support.sharding import shard_nuscenes


def test_lines():
    text = IndexText()
    text.add("k-0", 0, [StoredMember("a.json", b"123"), StoredMember("b.jpg", b"")], [512, 1536])
    text.add("k-1", 2048, [StoredMember("a.json", b"1234")], [512])
    assert text.encode() == b"v1.2 2\na.json 512 3 k-0.a.json b.jpg 1536 0 k-0.b.jpg\na.json 2560 4 k-1.a.json\n"


def test_they_agree_with_the_tar(tmp_path):
    # What wds2idx does: walk the members, split names at the first dot, a line for each run of one base name.
    build_nuscenes(tmp_path / "source", {"a": 5, "b": 3})
    shard_nuscenes(tmp_path / "source", tmp_path / "out", shard_size_bytes=20_000)
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert len(shards) > 1
    for shard in shards:
        lines: list[list[str]] = []
        last = None
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                if key != last:
                    lines.append([])
                last = key
                lines[-1].append(f"{field} {member.offset_data} {member.size} {member.name}")
        expected = "".join(f"{line}\n" for line in [f"v1.2 {len(lines)}", *map(" ".join, lines)])
        assert shard.with_suffix(".idx").read_text() == expected
