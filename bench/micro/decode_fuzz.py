"""Fuzzing the decode backends: damaged and lying image files must be refused or decoded, and nothing else may happen.

``python -m fuelrail.bench.micro.decode_fuzz --images FOLDER... [--backend turbo pillow] [--out FILE]``.
Real files are flipped, cut, spliced, repeated, overwritten and made to lie about their size. For each the backend
either fills the output or raises ImageError and leaves it untouched; a crash, another exception, a file that takes
seconds or memory that grows ends the run with an error that names the mutation. With the program jpegtran, progressive
files and such with restart markers take part too.

``--backend native`` compares the native decoder with libjpeg-turbo instead: both refuse a mutation, or both decode it,
to the same picture at 1/2 and 1/4. ``--small`` takes small camera JPEGs made of the files, half of them with restart
markers. ``--sanitize`` builds the native decoder with GCC's address and undefined-behaviour sanitizers::

    python -m fuelrail.bench.micro.decode_fuzz --images FOLDER --backend native --small --count 100000 [--sanitize]

The mutations are decoded in slices, each in a process of its own: a crash or a hang costs one slice, and what a library
does not give back of one is not counted against the next. Mutation ``n`` of a seed is the same whatever the slices.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders.decode import make_decoder, probe
from fuelrail.loaders.decode.jpeg import Scratch, decode_jpeg
from fuelrail.loaders.decode.native import CameraJpeg, open_library
from fuelrail.loaders.decode.native.build import FOLDER, LIBRARY_NAME, build
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.transforms.image_map import ImageMap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from fuelrail.loaders.decode import ImageDecoder, Interpolation
    from fuelrail.pipeline.sample.arrays import Buffer

OUT_WH = (704, 256)
_SANITIZERS = ("-march=x86-64-v3", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_UNTOUCHED = 7
_MAX_FILES = 24


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the files, the longest that one took [CPU seconds], and how far memory grew in a slice [MiB].

    ``compared`` counts pictures of the native decoder that are those of libjpeg-turbo.
    """

    compared: int = 0
    decoded: int = 0
    refused_by_header: int = 0
    refused_by_decoder: int = 0
    slowest_s: float = 0.0
    grown_mib: float = 0.0

    @property
    def count(self) -> int:
        """Files in all."""
        return self.decoded + self.refused_by_header + self.refused_by_decoder

    def __add__(self, other: Tally) -> Tally:
        """Both of them together."""
        return Tally(
            compared=self.compared + other.compared,
            decoded=self.decoded + other.decoded,
            refused_by_header=self.refused_by_header + other.refused_by_header,
            refused_by_decoder=self.refused_by_decoder + other.refused_by_decoder,
            slowest_s=max(self.slowest_s, other.slowest_s),
            grown_mib=max(self.grown_mib, other.grown_mib),
        )


class FuzzReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the mutations, by backend."""

    benchmark: str
    machine: MachineFacts
    num_files: int
    num_mutations: int
    slice_size: int
    seed: int
    tallies: dict[str, Tally]


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


class NativeAgainstTurbo:
    """Decodes with and without the native decoder, and raises AssertionError where that makes a difference.

    Attributes:
        name: of the backend.
        num_compared: pictures that both decoded, and that are equal.
    """

    name = "native"

    def __init__(self, library: Path = FOLDER / LIBRARY_NAME) -> None:
        native = open_library(library)
        if not isinstance(native, CameraJpeg):
            raise SystemExit(f"no native decoder: {native}")
        self._native = native
        self._with, self._without = TurboDecoder(native=native), TurboDecoder(native=False)
        self.num_compared = 0

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: NDArray[np.uint8],
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode into ``out`` with the native decoder; see the protocol."""
        info = probe(encoded)
        # This copy and fresh scratch memory end where they should, so that a sanitizer sees what goes beyond them.
        encoded = np.frombuffer(encoded, np.uint8).copy().data
        for factor in (2, 4):
            got = (
                None
                if not self._native.takes(info, factor)
                else self._native.picture(encoded, info, factor, (0, info.height), Scratch())
            )
            if got is not None:
                expected = decode_jpeg(encoded, info, factor, Scratch())
                assert np.array_equal(got[..., :3], expected[..., :3]), f"pictures at 1/{factor} differ"
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


def fuzz(decoder: ImageDecoder, originals: Sequence[bytes], numbers: Iterable[int], seed: int) -> Tally:
    """Give the decoder the mutations of these numbers, under maps with and without rotation.

    Raises AssertionError where a refused image's output was touched, and whatever the decoder raises that is no
    ImageError.
    """
    out = np.empty((3, OUT_WH[1], OUT_WH[0]), np.uint8)
    decoded = by_header = by_decoder = 0
    slowest_s = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        encoded = mutate(rng.choice(originals), rng)
        start_s = time.process_time()
        try:
            info = probe(encoded)
        except ImageError:
            by_header += 1
            continue
        width, height = (max(1, size * (22 if number % 5 == 0 else 44) // 100) for size in (info.width, info.height))
        image_map = ImageMap.identity((info.width, info.height)).resize(width, height)
        image_map = image_map.crop(0, height * 35 // 100, *OUT_WH)
        out[:] = _UNTOUCHED
        try:
            decoder.decode_into(encoded, image_map.rotate(4.0) if number % 3 == 0 else image_map, out)
            decoded += 1
        except ImageError:
            by_decoder += 1
            if not (out == _UNTOUCHED).all():
                raise AssertionError(f"mutation {number} of seed {seed} was refused, its output is touched") from None
        except AssertionError as error:
            raise AssertionError(f"mutation {number} of seed {seed}: {error}") from error
        slowest_s = max(slowest_s, time.process_time() - start_s)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Tally(
        decoded=decoded,
        refused_by_header=by_header,
        refused_by_decoder=by_decoder,
        slowest_s=slowest_s,
        grown_mib=grown_mib,
    )


def load_files(folders: Sequence[Path]) -> list[bytes]:
    """Some JPEG and PNG files below the folders, and rewritten ones of the first."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".jpg", ".png")]
    if not paths:
        raise SystemExit(f"no .jpg or .png files below {', '.join(map(str, folders))}")
    originals = [path.read_bytes() for path in paths[:: max(1, len(paths) // _MAX_FILES)]][:_MAX_FILES]
    first = next((data for data in originals if data.startswith(b"\xff\xd8")), None)
    program = shutil.which("jpegtran")
    if first is not None and program is not None:
        for option in (("-progressive",), ("-restart", "1")):
            done = subprocess.run([program, *option], input=first, check=True, capture_output=True)
            originals.append(done.stdout)
    return originals


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
                    cv2.IMWRITE_JPEG_QUALITY, (60, 80, 92)[number % 3],
                    cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
                    cv2.IMWRITE_JPEG_RST_INTERVAL, interval,
                ]  # fmt: skip
                files.append(cv2.imencode(".jpg", part, options)[1].tobytes())
    return files


def sanitized_library(folder: Path) -> dict[str, str]:
    """Build the native decoder with sanitizers into ``folder``; return the environment that a process needs for it."""
    for file in FOLDER.glob("*.[ch]"):
        shutil.copy(file, folder)
    build(folder, _SANITIZERS)
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}


def fuzz_slice(options: argparse.Namespace) -> None:
    """What a slice's process does: it prints each mutation's number before decoding it, and the tally at the end."""

    def announced() -> Iterable[int]:
        for number in range(*options.only):
            print(number, flush=True)  # noqa: T201
            yield number

    (backend,) = options.backend
    decoder = NativeAgainstTurbo(options.library) if backend == "native" else make_decoder(backend)
    originals = load_files(options.images)
    tally = fuzz(decoder, small_files(originals) if options.small else originals, announced(), options.seed)
    if isinstance(decoder, NativeAgainstTurbo):
        tally = msgspec.structs.replace(tally, compared=decoder.num_compared)
    print(msgspec.json.encode(tally).decode())  # noqa: T201


def fuzz_in_slices(backend: str, options: argparse.Namespace) -> Tally:
    """Give the backend all mutations, a fresh process for each slice; exits, naming the mutation, where one fails."""
    tally = Tally()
    for first in range(0, options.count, options.slice):
        last = min(options.count, first + options.slice)
        command = [
            sys.executable, "-m", "fuelrail.bench.micro.decode_fuzz", "--backend", backend,
            "--images", *map(str, options.images), "--seed", str(options.seed), "--only", str(first), str(last),
            "--library", str(options.library), *(["--small"] if options.small else []),
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **options.environment}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=options.timeout
            )
        except subprocess.TimeoutExpired as error:
            at = [str(first), *(error.stdout or b"").decode().split()][-1]
            raise SystemExit(f"{backend} hangs at mutation {at} of seed {options.seed}") from error
        lines = done.stdout.splitlines()
        if done.returncode:
            at = [str(first), *lines][-1]
            raise SystemExit(
                f"{done.stderr[-2000:]}\n{backend} ended with {done.returncode} at mutation {at} of seed {options.seed}"
            )
        tally += msgspec.json.decode(lines[-1], type=Tally)
        if options.verbose:
            print(f"{backend} {last}: {tally}", flush=True)  # noqa: T201
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tallies and, with ``--out``, write them; 1 where a file took too long or memory grew too far."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.decode_fuzz")
    parser.add_argument("--images", type=Path, nargs="+", required=True, metavar="FOLDER", help="real image files")
    parser.add_argument("--backend", nargs="+", default=["turbo"], help="decode backends (default %(default)s)")
    parser.add_argument("--count", type=int, default=10_000, help="mutations (default %(default)s)")
    parser.add_argument("--slice", type=int, default=500, help="mutations for each process (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="time that a slice may take")
    parser.add_argument("--max-seconds", type=float, default=5.0, help="CPU time that a file may take")
    parser.add_argument("--max-mib", type=float, default=1024.0, help="memory that a slice may take over its start")
    parser.add_argument("--small", action="store_true", help="take small camera JPEGs made of parts of the files")
    parser.add_argument("--sanitize", action="store_true", help="build the native decoder with GCC's sanitizers")
    parser.add_argument("--library", type=Path, default=FOLDER / LIBRARY_NAME, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tallies as JSON")
    parser.add_argument("--verbose", action="store_true", help="print the tally after each slice")
    parser.add_argument("--only", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.only is not None:
        fuzz_slice(options)
        return 0
    options.environment = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.sanitize:
            options.library, options.environment = Path(folder, LIBRARY_NAME), sanitized_library(Path(folder))
        report = FuzzReport(
            benchmark="decode_fuzz",
            machine=machine_facts(),
            num_files=len(load_files(options.images)),
            num_mutations=options.count,
            slice_size=options.slice,
            seed=options.seed,
            tallies={backend: fuzz_in_slices(backend, options) for backend in options.backend},
        )
    for backend, tally in report.tallies.items():
        print(f"{backend}, {options.count} mutations of {report.num_files} files: {tally}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    bad = [t for t in report.tallies.values() if t.slowest_s > options.max_seconds or t.grown_mib > options.max_mib]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
