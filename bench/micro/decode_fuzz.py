"""Fuzzing the decode backends: damaged and lying image files must be refused or decoded, and nothing else may happen.

``python -m fuelrail.bench.micro.decode_fuzz --images FOLDER [--backend turbo] [--count 10000] [--seed 1]``. Real files
are flipped, cut, spliced, repeated, overwritten and made to lie about their size. For each the backend either fills the
output or raises ImageError and leaves it untouched; a crash, another exception, a file that takes seconds or memory
that grows ends the run with an error. With the program jpegtran, progressive files and such with restart markers take
part too.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fuelrail.loaders.decode import make_decoder, probe
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.geometry import ImageMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.loaders.decode import ImageDecoder

OUT_WH = (704, 256)
_UNTOUCHED = 7
_MAX_FILES = 24


class Tally(NamedTuple):
    """What became of the files, the longest that one took [CPU seconds], and how far memory grew [MiB]."""

    decoded: int
    refused_by_header: int
    refused_by_decoder: int
    slowest_s: float
    grown_mib: float


def mutate(encoded: bytes, rng: random.Random) -> bytes:
    """Flip, cut, splice, repeat, overwrite or lie about the size; what disks, networks and fuzzers do to files."""
    data = bytearray(encoded)
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.choice((1, 1, 4, 40))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
        del data[a : min(b, a + 5000)]
    elif kind == 3:
        a = rng.randrange(len(data))
        data[a:a] = data[a : a + rng.randrange(1, 3000)]
    elif kind == 4:
        a = rng.randrange(len(data))
        length = min(len(data) - a, rng.randrange(1, 600))
        data[a : a + length] = rng.randbytes(length)
    else:
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        if at >= 0:
            data[at + 5 : at + 9] = rng.randbytes(4)
    return bytes(data)


def fuzz(decoder: ImageDecoder, originals: Sequence[bytes], count: int, seed: int) -> Tally:
    """Give the decoder ``count`` mutations, under maps with and without rotation.

    Raises AssertionError where a refused image's output was touched, and whatever the decoder raises that is no
    ImageError.
    """
    rng = random.Random(seed)
    out = np.empty((3, OUT_WH[1], OUT_WH[0]), np.uint8)
    decoded = by_header = by_decoder = 0
    slowest_s = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        encoded = mutate(rng.choice(originals), rng)
        begun_s = time.process_time()
        try:
            info = probe(encoded)
        except ImageError:
            by_header += 1
            continue
        image_map = ImageMap.identity((info.width, info.height)).resize(704, 396).crop(0, 140, *OUT_WH)
        out[:] = _UNTOUCHED
        try:
            decoder.decode_into(encoded, image_map.rotate(4.0) if number % 3 == 0 else image_map, out)
            decoded += 1
        except ImageError:
            by_decoder += 1
            if not (out == _UNTOUCHED).all():
                raise AssertionError(f"mutation {number} of seed {seed} was refused, its output is touched") from None
        slowest_s = max(slowest_s, time.process_time() - begun_s)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Tally(decoded, by_header, by_decoder, slowest_s, grown_mib)


def load_files(folder: Path) -> list[bytes]:
    """Some JPEG and PNG files below the folder, and rewritten ones of the first."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".jpg", ".png"))
    if not paths:
        raise SystemExit(f"no .jpg or .png files below '{folder}'")
    originals = [path.read_bytes() for path in paths[:: max(1, len(paths) // _MAX_FILES)]][:_MAX_FILES]
    first = next((data for data in originals if data.startswith(b"\xff\xd8")), None)
    program = shutil.which("jpegtran")
    if first is not None and program is not None:
        for option in (("-progressive",), ("-restart", "1")):
            done = subprocess.run([program, *option], input=first, check=True, capture_output=True)
            originals.append(done.stdout)
    return originals


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tally; 1 where a file took too long or memory grew too far."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.decode_fuzz")
    parser.add_argument("--images", type=Path, required=True, metavar="FOLDER", help="real image files")
    parser.add_argument("--backend", default="turbo", help="decode backend (default %(default)s)")
    parser.add_argument("--count", type=int, default=10_000, help="mutations (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-seconds", type=float, default=5.0, help="CPU time that a file may take")
    parser.add_argument("--max-mib", type=float, default=1024.0, help="memory that may be taken over that at the start")
    options = parser.parse_args(argv)
    originals = load_files(options.images)
    tally = fuzz(make_decoder(options.backend), originals, options.count, options.seed)
    print(f"{options.backend}, {options.count} mutations of {len(originals)} files: {tally}")  # noqa: T201
    return int(tally.slowest_s > options.max_seconds or tally.grown_mib > options.max_mib)


if __name__ == "__main__":
    sys.exit(main())
