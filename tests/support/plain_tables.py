"""The tables of a dataset as FORMAT.md describes them, read with nothing of Fuelrail."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import xxhash

if TYPE_CHECKING:
    from pathlib import Path


def rows_of(path: Path) -> list[dict[str, Any]]:
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        return file.read_all().to_pylist()


def read_shards(root: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ``shards.arrow`` with the name, split and number of samples that follow from them."""
    rows = rows_of(root / "shards.arrow")
    ends = [*(row["first_sample"] for row in rows[1:]), manifest["num_samples"]]
    shards = []
    for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
        split, entry = next(
            (name, entry)
            for name, entry in manifest["splits"].items()
            if 0 <= number - entry["first_shard"] < entry["num_shards"]
        )
        stem = f"{split}-{number - entry['first_shard']:06d}"
        shards.append(
            {
                **row,
                "name": stem + (".tar.zst" if row["framed"] else ".tar"),
                "idx": f"{stem}.idx",
                "split": split,
                "num_samples": end - row["first_sample"],
            }
        )
    return shards


def check_files(root: Path, manifest: dict[str, Any]) -> None:
    """All digests: of shards, listings, other files, and blocks; and the table of keys."""
    for entry in manifest["files"]:
        data = (root / entry["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (
            entry["bytes"],
            entry["sha256"],
        )
    for shard in read_shards(root, manifest):
        data = (root / shard["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).digest()) == (
            shard["bytes"],
            shard["sha256"],
        )
        assert (root / shard["idx"]).exists() is bool(shard["idx_bytes"])
        if shard["idx_bytes"]:
            data = (root / shard["idx"]).read_bytes()
            assert (len(data), hashlib.sha256(data).digest()) == (
                shard["idx_bytes"],
                shard["idx_sha256"],
            )
    blocks = b""
    named = {entry["name"] for entry in manifest["files"]}
    for name in (
        "shards.arrow",
        "index.arrow",
        "keys.arrow",
        "attributes.parquet",
    ):
        data = (root / name).read_bytes() if name in named else b""
        blocks += b"".join(
            hashlib.sha256(data[offset : offset + 2**20]).digest()
            for offset in range(0, len(data), 2**20)
        )
    assert (root / "blocks.sha256").read_bytes() == blocks
    entries = sorted(
        (
            xxhash.xxh3_64_intdigest(row["key"].encode()),
            number,
            row["offset"],
            row["length"],
            row["shard"],
        )
        for number, row in enumerate(rows_of(root / "index.arrow"))
    )
    assert [row["entry"] for row in rows_of(root / "keys.arrow")] == [
        struct.pack("<QQQII", *key_entry) for key_entry in entries
    ]
