"""What sharding cannot take less time than: the files read and written, and their digests taken, by nothing but that.

Each thread has a part of the frames. It reads their files into memory that is used again, with room for tar headers
that nobody fills in, and writes them to a file; no tables, no index, no images looked at.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from fuelrail.bench.micro.sharding_source import SWEEP_CODEC
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.tar import BLOCK_BYTES
from fuelrail.sharding.write.blocks import BlockWriter

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from fuelrail.bench.micro.sharding_source import Files

_BUFFER_BYTES = 16 << 20


def copy_part(files: Files, out: Path, digests: Collection[str]) -> None:
    """Write the files of these frames to ``out``; ``digests``: ``sha256`` of all, ``xxh3`` of each frame, or both."""
    memory = memoryview(bytearray(_BUFFER_BYTES))
    whole = hashlib.sha256()
    with out.open("wb") as file:
        writer = BlockWriter(file)
        for _, paths in files:
            end = 0
            for path in paths:
                handle = os.open(path, os.O_RDONLY)
                have = os.readv(handle, [memory[end + BLOCK_BYTES :]])
                os.close(handle)
                start = end + BLOCK_BYTES
                if path.suffix == ".bin":
                    stored = codecs.encode(SWEEP_CODEC, memory[start : start + have])
                    have = len(stored)
                    memory[start : start + have] = stored
                end = start + have + -have % BLOCK_BYTES
            span = memory[:end]
            if "xxh3" in digests:
                xxhash.xxh3_64_intdigest(span)
            if "sha256" in digests:
                whole.update(span)
            writer.write([span])
        writer.flush()
    whole.hexdigest()


def copy_files(files: Files, num_threads: int, digests: Collection[str], folder: Path) -> None:
    """All frames, in this number of threads."""
    with ThreadPoolExecutor(num_threads) as pool:
        parts = [
            files[len(files) * number // num_threads : len(files) * (number + 1) // num_threads]
            for number in range(num_threads)
        ]
        outs = [folder / f"{number}.bin" for number in range(num_threads)]
        list(pool.map(copy_part, parts, outs, [digests] * num_threads))
