"""Decoding: what the turbo backend makes of camera images a second, beside the usual ways to do the same work.

``python -m fuelrail.bench.micro.decode [--images FOLDER] [--out FILE]``. The work is a JPEG file of 1600x900
pixels to uint8 planes of 704x256: resized by 0.44, the bottom kept. Without ``--images`` the file is noise of about the
size of real camera files. The *bare limit* is libjpeg-turbo's half-scale decode and
one bilinear resize into buffers made once, without looking at the file or at a map. *Restart rows* are the same images,
losslessly rewritten with a restart marker at each row of MCUs (needs the program jpegtran).
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import msgspec
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.source import noise_jpeg
from fuelrail.bench.micro.timing import QUICK, Effort, TimedContest, TimingReport, compare, render
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders.decode import make_decoder
from fuelrail.pipeline.transforms.image import ImageAugment

if TYPE_CHECKING:
    from fuelrail.pipeline.transforms.image_map import ImageMap

    Decode = Callable[[bytes, NDArray[np.uint8]], object]

SOURCE_WH = (1600, 900)
OUT_WH = (704, 256)
RESIZED_WH = (704, 396)
NUM_THREADS = 2
TURBO = "fuelrail turbo"
_TOP = RESIZED_WH[1] - OUT_WH[1]
_local = threading.local()


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one image each, the same as rates, and what was decoded."""

    benchmark: str
    machine: MachineFacts
    source: str
    num_images: int
    mean_bytes: float
    images_per_s: dict[str, dict[str, float]]
    comparisons: list[TimedContest]


def with_restart_rows(encoded: bytes) -> bytes | None:
    """Return the same coefficients with a restart marker at each row of MCUs; None without the program jpegtran."""
    program = shutil.which("jpegtran")
    if program is None:
        return None
    return subprocess.run([program, "-restart", "1"], input=encoded, check=True, capture_output=True).stdout


def load_images(folder: Path) -> list[bytes]:
    """Read the JPEG files of that size below the folder."""
    images = []
    for path in sorted(folder.rglob("*.jpg")):
        encoded = path.read_bytes()
        if simplejpeg.decode_jpeg_header(encoded)[:2] == (SOURCE_WH[1], SOURCE_WH[0]):
            images.append(encoded)
    if not images:
        raise SystemExit(f"no JPEG files of {SOURCE_WH[0]}x{SOURCE_WH[1]} pixels below '{folder}'")
    return images


def decoders(image_map: ImageMap) -> dict[str, Decode]:
    """Return ways to do the work, the reference first. All write (3, 256, 704) uint8 planes."""
    turbo, pillow = make_decoder("turbo"), make_decoder("pillow")
    return {
        "bare limit: half scale, reused buffers": bare,
        TURBO: lambda encoded, out: turbo.decode_into(encoded, image_map, out),
        "fuelrail pillow (full decode, antialiased)": lambda encoded, out: pillow.decode_into(encoded, image_map, out),
        "cv2.imdecode reduced by 2, linear": partial(_opencv, cv2.IMREAD_REDUCED_COLOR_2, cv2.INTER_LINEAR),
        "cv2.imdecode, linear": partial(_opencv, cv2.IMREAD_COLOR, cv2.INTER_LINEAR),
        "cv2.imdecode, area": partial(_opencv, cv2.IMREAD_COLOR, cv2.INTER_AREA),
        "Pillow with draft mode": partial(_pillow, draft=True),
        "Pillow, full decode": partial(_pillow, draft=False),
        "Pillow, full decode, resize(box=...)": pillow_box,
        "simplejpeg at full size, linear": _simplejpeg_full,
    }


def bare(encoded: bytes, out: NDArray[np.uint8]) -> None:
    """Decode at half scale and 0.88 of that, of the rows that are kept; buffers belong to the thread."""
    buffers = getattr(_local, "bare", None)
    if buffers is None:
        buffers = _local.bare = (np.empty((450, 800, 3), np.uint8), np.empty((*OUT_WH[::-1], 3), np.uint8))
    half = simplejpeg.decode_jpeg(encoded, "RGB", min_height=450, min_width=800, buffer=buffers[0])
    top = round(_TOP / 0.88)
    cv2.split(cv2.resize(half[top:], OUT_WH, buffers[1], interpolation=cv2.INTER_LINEAR), list(out))


def _opencv(flags: int, interpolation: int, encoded: bytes, out: NDArray[np.uint8]) -> None:
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    assert image is not None
    resized = cv2.resize(image, RESIZED_WH, interpolation=interpolation)
    out[:] = resized[_TOP:, :, ::-1].transpose(2, 0, 1)


def _pillow(encoded: bytes, out: NDArray[np.uint8], *, draft: bool) -> None:
    image: Image.Image = Image.open(io.BytesIO(encoded))
    if draft:
        image.draft("RGB", RESIZED_WH)
    image = image.convert("RGB").resize(RESIZED_WH, Image.Resampling.BILINEAR).crop((0, _TOP, *RESIZED_WH))
    out[:] = np.asarray(image).transpose(2, 0, 1)


def pillow_box(encoded: bytes, out: NDArray[np.uint8]) -> None:
    """Decode in full, with Pillow's antialiased filter, the part that is kept only."""
    box = (0.0, _TOP / RESIZED_WH[1] * SOURCE_WH[1], float(SOURCE_WH[0]), float(SOURCE_WH[1]))
    image = Image.open(io.BytesIO(encoded)).resize(OUT_WH, Image.Resampling.BILINEAR, box=box)
    out[:] = np.asarray(image).transpose(2, 0, 1)


def _simplejpeg_full(encoded: bytes, out: NDArray[np.uint8]) -> None:
    image = simplejpeg.decode_jpeg(encoded, "RGB")
    out[:] = cv2.resize(image, RESIZED_WH, interpolation=cv2.INTER_LINEAR)[_TOP:].transpose(2, 0, 1)


def measure(images: list[bytes], effort: Effort) -> list[TimedContest]:
    """Measure one thread and ``NUM_THREADS``, the same images in turns; a call decodes all of them."""
    image_map = ImageAugment(height=OUT_WH[1], width=OUT_WH[0]).draw([SOURCE_WH], seed=0, epoch=0, sample=0)[0]
    batch = np.empty((len(images), 3, *OUT_WH[::-1]), np.uint8)
    decodes = decoders(image_map)  # holds OpenCV's own threads at one, for all candidates, as long as it lives
    works = {name: (decode, images) for name, decode in decodes.items()}
    prepared = [spliceable for spliceable in map(with_restart_rows, images) if spliceable is not None]
    if prepared:
        works[f"{TURBO}, restart rows"] = (decodes[TURBO], prepared)

    def one_by_one(decode: Decode, encoded_images: list[bytes]) -> None:
        for encoded, out in zip(encoded_images, batch, strict=True):
            decode(encoded, out)

    with ThreadPoolExecutor(NUM_THREADS) as pool:

        def together(decode: Decode, encoded_images: list[bytes]) -> None:
            list(pool.map(decode, encoded_images, batch))

        return [
            compare(f"{len(images)} images, 1 thread", {n: partial(one_by_one, *w) for n, w in works.items()}, effort),
            compare(
                f"{len(images)} images, {NUM_THREADS} threads",
                {n: partial(together, *w) for n, w in works.items()},
                effort,
            ),
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.decode")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="real 1600x900 JPEG files instead of a made one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="call everything a few times, to see that it runs")
    options = parser.parse_args(argv)
    images = load_images(options.images) if options.images else [noise_jpeg(np.random.default_rng(0), SOURCE_WH)] * 12
    if options.quick:
        images = images[:2]
    comparisons = measure(images, QUICK if options.quick else Effort(num_rounds=11))
    report = DecodeReport(
        benchmark="decode",
        machine=machine_facts(),
        source="real camera images" if options.images else "made by this module",
        num_images=len(images),
        mean_bytes=float(np.mean([len(encoded) for encoded in images])),
        images_per_s={c.title: {e.name: len(images) / e.seconds_per_call for e in c.entries} for c in comparisons},
        comparisons=comparisons,
    )
    print(render(TimingReport(benchmark="decode", machine=report.machine, comparisons=comparisons)))  # noqa: T201
    for title, rates in report.images_per_s.items():
        print(f"\n{title} of {report.mean_bytes / 1e3:.0f} kB, {report.source}")  # noqa: T201
        for name, rate in rates.items():
            print(f"  {rate:7.0f} images/s  {name}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
