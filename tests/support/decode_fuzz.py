"""Damaged and lying image files, which decode backends must refuse or decode, and nothing else may happen.

Files are flipped, cut, spliced, repeated, overwritten and made to lie about their size. A backend either fills the
output or raises ImageError and leaves it untouched. ``python -m support.decode_fuzz LIBRARY COUNT FILE...`` decodes
mutations of small camera JPEGs made of the files with and without a build of the native decoder, and adds restart
markers to as many, in a process of its own: with sanitizers it needs libraries that are loaded first.
"""

from __future__ import annotations

import io
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import msgspec
import numpy as np
import simplejpeg
from PIL import Image

from fuelrail.loaders.decode.jpeg import decode_jpeg
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.native import CameraJpeg, Scratch, open_library
from fuelrail.pipeline.native.build import FOLDER, build
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.transforms.image_map import ImageMap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fuelrail.loaders.decode.protocol import ImageDecoder

_OUT_WH = (704, 256)
_SANITIZERS = (
    "-march=x86-64-v3",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
_UNTOUCHED = 7


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How many files were decoded and refused, and how far memory grew [MiB]."""

    decoded: int
    refused_by_header: int
    refused_by_decoder: int
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
        marker = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        if marker >= 0:
            data[marker + 5 : marker + 9] = rng.randbytes(4)
    return bytes(data)


class NativeAgainstTurbo:
    """Decodes with and without the native decoder, and raises AssertionError where that makes a difference.

    Attributes:
        name: of the backend.
        native: the native decoder.
        num_compared: pictures that both decoded, and that are equal.
    """

    name = "native"

    def __init__(self, library: Path) -> None:
        native = open_library(library)
        assert isinstance(native, CameraJpeg), f"no native decoder: {native}"
        self.native = native
        self._with = TurboDecoder(native=native)
        self._without = TurboDecoder(native=False)
        self.num_compared = 0

    def decode_into(self, encoded, image_map, out, interpolation="bilinear") -> None:
        """Decode into ``out`` with the native decoder; see the protocol."""
        info = probe(encoded)
        # This copy and fresh scratch memory end where they should, so that a sanitizer sees what goes beyond them.
        encoded = np.frombuffer(encoded, np.uint8).copy().data
        for factor in (2, 4):
            got = (
                None
                if not self.native.takes(info, factor)
                else self.native.picture(encoded, info, factor, (0, info.height), Scratch())
            )
            if got is not None:
                expected = decode_jpeg(encoded, info, factor, Scratch())
                assert np.array_equal(got[..., :3], expected[..., :3]), (
                    f"pictures at 1/{factor} differ"
                )
                self.num_compared += 1
        try:
            self._without.decode_into(encoded, image_map, np.empty_like(out), interpolation)
            refused = None
        except ImageError as error:
            refused = error
        try:
            self._with.decode_into(encoded, image_map, out, interpolation)
        except ImageError as error:
            assert refused is not None, f"only the native decoder refuses: {error}"
            raise
        assert refused is None, f"only libjpeg-turbo refuses: {refused}"


def fuzz(
    decoder: ImageDecoder,
    originals: Sequence[bytes],
    numbers: Iterable[int],
    seed: int,
) -> Tally:
    """Give the decoder the mutations of these numbers, under maps with and without rotation.

    Raises AssertionError where a refused image's output was touched, and whatever the decoder raises that is no
    ImageError.
    """
    out = np.empty((3, _OUT_WH[1], _OUT_WH[0]), np.uint8)
    decoded = by_header = by_decoder = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        encoded = mutate(rng.choice(originals), rng)
        try:
            info = probe(encoded)
        except ImageError:
            by_header += 1
            continue
        width, height = (
            max(1, size * (22 if number % 5 == 0 else 44) // 100)
            for size in (info.width, info.height)
        )
        image_map = ImageMap.identity((info.width, info.height)).resize(width, height)
        image_map = image_map.crop(0, height * 35 // 100, *_OUT_WH)
        out[:] = _UNTOUCHED
        try:
            decoder.decode_into(
                encoded,
                image_map.rotate(4.0) if number % 3 == 0 else image_map,
                out,
            )
            decoded += 1
        except ImageError:
            by_decoder += 1
            if not (out == _UNTOUCHED).all():
                raise AssertionError(
                    f"mutation {number} of seed {seed} was refused, its output is touched"
                ) from None
        except AssertionError as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error}") from error
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Tally(
        decoded=decoded,
        refused_by_header=by_header,
        refused_by_decoder=by_decoder,
        grown_mib=grown_mib,
    )


class RestartTally(msgspec.Struct, kw_only=True):
    """How many files got restart markers, were left and refused, and of how many the pixels were compared."""

    rewritten: int = 0
    left: int = 0
    refused: int = 0
    same_pixels: int = 0


def fuzz_restarts(
    native: CameraJpeg, originals: Sequence[bytes], numbers: Iterable[int], seed: int
) -> RestartTally:
    """Add restart markers to the mutations of these numbers; raise AssertionError where that changes a pixel."""
    tally = RestartTally()
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        encoded = mutate(rng.choice(originals), rng)
        try:
            # Memory of its own, so that a sanitizer sees what goes beyond it.
            rewritten = native.add_restarts(np.frombuffer(encoded, np.uint8).copy().data, Scratch())
        except ImageError:
            tally.refused += 1
            continue
        if rewritten is None:
            tally.left += 1
            continue
        tally.rewritten += 1
        colours = "CMYK" if probe(encoded).is_cmyk else "RGB"
        try:
            expected = simplejpeg.decode_jpeg(encoded, colours)
        except ValueError:  # what an edited header says has no name in libjpeg-turbo's own API
            continue
        got = simplejpeg.decode_jpeg(rewritten, colours)
        assert np.array_equal(got, expected), f"pixels of mutation {number} of seed {seed} change"
        tally.same_pixels += 1
    return tally


def unlike_cameras(originals: Sequence[bytes]) -> list[bytes]:
    """Small JPEGs of other kinds: other sampling, gray, four inks, own tables, several scans, other markers."""
    kinds: list[dict[str, Any]] = [
        {"subsampling": "4:4:4", "optimize": True},
        {"subsampling": "4:2:2", "restart_marker_blocks": 3},
        {"subsampling": "4:2:0", "quality": 100, "restart_marker_rows": 2},
        {"progressive": True},
    ]
    files = []
    for encoded in originals:
        with Image.open(io.BytesIO(encoded)) as image:
            part = image.convert("RGB").crop((0, 0, 120, 90))
        parts = [(part, kind) for kind in kinds] + [(part.convert(m), {}) for m in ("L", "CMYK")]
        for picture, kind in parts:
            with io.BytesIO() as file:
                picture.save(file, "jpeg", **kind)
                files.append(file.getvalue())
    return files


def small_files(originals: Sequence[bytes]) -> list[bytes]:
    """Camera JPEGs of some 300 pixels, made of parts of larger files; every second one has restart markers."""
    files = []
    for number, encoded in enumerate(originals):
        picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_REDUCED_COLOR_2)
        assert picture is not None
        for width, height in ((320, 192), (160, 96), (333, 215)):
            part = np.ascontiguousarray(picture[-height:, :width])
            for interval in (0, -(-part.shape[1] // 16)):
                options = [
                    cv2.IMWRITE_JPEG_QUALITY,
                    (60, 80, 92)[number % 3],
                    cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
                    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
                    cv2.IMWRITE_JPEG_RST_INTERVAL,
                    interval,
                ]
                files.append(cv2.imencode(".jpg", part, options)[1].tobytes())
    return files


def sanitized_library(folder: Path) -> dict[str, str]:
    """Build the native decoder with sanitizers into ``folder``; return the environment that a process needs for it."""
    for file in FOLDER.glob("*.[ch]"):
        shutil.copy(file, folder)
    build(folder, _SANITIZERS)
    libraries = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }


if __name__ == "__main__":
    decoder = NativeAgainstTurbo(Path(sys.argv[1]))
    given = [Path(file).read_bytes() for file in sys.argv[3:]]
    originals = small_files(given)
    numbers = range(int(sys.argv[2]))
    outcome = msgspec.to_builtins(fuzz(decoder, originals, numbers, 1))
    restarts = fuzz_restarts(decoder.native, [*originals, *unlike_cameras(given)], numbers, 1)
    report = {**outcome, "compared": decoder.num_compared, "restarts": restarts}
    print(msgspec.json.encode(report).decode())
