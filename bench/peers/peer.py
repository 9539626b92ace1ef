"""The interface of a peer: it writes a folder in its own format, and yields batches of images
from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import cv2
import msgspec
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fuelrail.loaders.decode.arrays import decode_jpeg
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

Count = Annotated[int, msgspec.Meta(gt=0)]

_SAMPLES_PER_SHARD = 100

_NUMBER = struct.Struct("<q")


class Work(Settings, frozen=True):
    """The work of every loader: uint8 RGB planes [batch_size, cameras, 3, height, width] of every
    sample.

    Each picture is shrunk so that it fills ``width`` (or ``height``, if that needs less shrinking),
    centred across and cut at the top, as BEVDet and its family evaluate. ``num_workers`` is the
    number of CPUs to keep busy: worker processes or decoding threads, whichever the loader has.
    ``num_samples``, ``cameras`` and ``source_wh``, the size of all images, are the data's.
    """

    height: Count
    width: Count
    batch_size: Count
    num_workers: Count
    seed: int
    num_samples: Count
    source_wh: tuple[int, int]
    cameras: tuple[str, ...]

    @property
    def sample_shape(self) -> tuple[int, int, int, int]:
        """Cameras, colours, height, width."""
        return len(self.cameras), 3, self.height, self.width

    @property
    def samples_per_shard(self) -> int:
        """Samples of a shard, in formats that have shards; few, so that each worker has several
        of a small dataset.
        """
        num_shards = 2 * self.num_workers
        samples_per_shard = min(_SAMPLES_PER_SHARD, self.num_samples // num_shards)
        return max(1, samples_per_shard)


class Sample(NamedTuple):
    """A sample as all formats store it: its number in the dataset, which stands for its key, and
    its encoded images.
    """

    number: int
    images: tuple[bytes, ...]


class Batch(NamedTuple):
    """The numbers of some samples and their images [B, N, 3, H, W], uint8; valid until the next
    batch is taken.
    """

    numbers: list[int]
    images: NDArray[np.uint8]


class Peer(Protocol):
    """One loader. ``recipe`` names one of its ways to decode; the registry lists them."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write the samples in the loader's own format; the folder is there and empty."""

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Return batches of one shuffled epoch after another, without end."""


def pack_number(number: int) -> bytes:
    """Return a sample's number as the member of a format that stores bytes: 8 bytes,
    little-endian.
    """
    return _NUMBER.pack(number)


def unpack_number(data: bytes) -> int:
    """Return the number of :func:`pack_number`."""
    number: int
    (number,) = _NUMBER.unpack(data)
    return number


OURS = "fuelrail"


class Entry(NamedTuple):
    """One peer: its module, what must be importable, how to get it, distributions to tell versions
    of, and recipes.

    ``data``: what its folder is written by, if that is not the peer itself.
    """

    module: str
    needs: tuple[str, ...]
    install: str
    packages: tuple[str, ...]
    recipes: tuple[str, ...]
    data: str | None = None


PEERS: dict[str, Entry] = {
    OURS: Entry(
        module="fuelrail",
        needs=(),
        install="",
        packages=(),
        recipes=("pillow", "restart", "turbo"),
    ),
    "loose": Entry(
        module="loose",
        needs=("PIL",),
        install="pip install pillow",
        packages=("torch",),
        recipes=("pil", "cv2", "cv2fast", "native", "sjfast"),
    ),
    "wds": Entry(
        module="wds",
        needs=("webdataset",),
        install="pip install webdataset",
        packages=("webdataset",),
        recipes=("pil", "cv2", "cv2fast", "native", "sjfast"),
    ),
    "mds": Entry(
        module="mds",
        needs=("streaming",),
        install="pip install mosaicml-streaming",
        packages=("mosaicml-streaming",),
        recipes=("cv2", "cv2fast", "native", "sjfast"),
    ),
    "spdl": Entry(
        module="spdl",
        needs=("spdl.pipeline",),
        install="pip install spdl-core",
        packages=("spdl-core",),
        recipes=("cv2", "cv2fast", "native", "sjfast"),
        data="wds",
    ),
    "spdl-io": Entry(
        module="spdl",
        needs=("spdl.pipeline", "spdl.io"),
        install="pip install spdl spdl-io, and FFmpeg's shared libraries",
        packages=("spdl-io",),
        recipes=("ffmpeg",),
        data="wds",
    ),
    "grain": Entry(
        module="grain",
        needs=("grain", "array_record"),
        install="pip install grain array-record",
        packages=("grain", "array-record"),
        recipes=("thr-cv2", "thr-cv2fast", "thr-native", "thr-sjfast"),
    ),
}


class Contestant(NamedTuple):
    """A peer with one of its recipes."""

    peer: str
    recipe: str

    @property
    def name(self) -> str:
        """The name in reports and on the command line."""
        return f"{self.peer}:{self.recipe}"


def contestants(only: tuple[str, ...] = ()) -> list[Contestant]:
    """Return all contestants, or those named by peer or as ``PEER:RECIPE``, and ours.

    Raise ConfigError.
    """
    every = [Contestant(peer, recipe) for peer, entry in PEERS.items() for recipe in entry.recipes]
    if not only:
        return every
    choices = {*PEERS, *(contestant.name for contestant in every)}
    for name in only:
        if name not in choices:
            recipes = "; ".join(
                f"{peer}: {', '.join(entry.recipes)}" for peer, entry in PEERS.items()
            )
            raise ConfigError(
                f"--only {name!r} is neither a loader nor a LOADER:RECIPE; there are {recipes}"
            )
    names = set(only)
    if not any(name.partition(":")[0] == OURS for name in only):
        names.add(OURS)
    return [
        contestant for contestant in every if contestant.peer in names or contestant.name in names
    ]


def is_there(name: str) -> str | None:
    """Return why a peer is not available, without large imports; None if it seems to be
    installed.
    """
    entry = PEERS[name]
    for module in entry.needs:
        # Submodules would import their parents; the process that runs the peer finds out about
        # those.
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"'{module}' is not installed: {entry.install}"
    return None


def load_peer(name: str) -> Peer:
    """Import a peer; raises ConfigError, saying what to install, where it is not there."""
    entry = PEERS[name]
    for module in entry.needs:
        try:
            is_installed = importlib.util.find_spec(module) is not None
            if is_installed:
                importlib.import_module(module)
        # A library without its shared libraries fails in its own way, and not always with
        # ImportError.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"{name}: '{module}' cannot be imported ({reason}): {entry.install}"
            ) from error
        if not is_installed:
            raise ConfigError(f"{name}: '{module}' is not installed: {entry.install}")
    peer: Peer = importlib.import_module(f"fuelrail.bench.peers.{entry.module}").PEER
    return peer


_REDUCED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}

_SCRATCH = threading.local()


def decode_sample(
    images: Sequence[Buffer],
    recipe: str,
    out: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """Decode a sample's images into ``out``, uint8 [N, 3, H, W], and return it."""
    decode = RECIPES[recipe]
    for encoded, planes in zip(images, out, strict=True):
        decode(encoded, planes)
    return out


def new_sample(images: Sequence[Buffer], recipe: str, work: Work) -> NDArray[np.uint8]:
    """Return a sample's images, decoded into fresh memory."""
    return decode_sample(images, recipe, np.empty(work.sample_shape, np.uint8))


def prepare_worker() -> None:
    """Let OpenCV start no threads of its own: the workers are the parallelism, and a fork would
    not take them along.
    """
    cv2.setNumThreads(0)


@cache
def seen_box(
    source_wh: tuple[int, int], out_wh: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the part of the source that the output shows: left, upper, right, lower, in source
    pixels.
    """
    width, height = source_wh
    out_width, out_height = out_wh
    scale = max(out_width / width, out_height / height)
    # The resized picture has whole pixels, and the crop begins at one.
    resized_width = int(width * scale)
    resized_height = int(height * scale)
    margin = (resized_width - out_width) // 2
    left_edge = margin / resized_width * width
    right = left_edge + out_width / resized_width * width
    upper = (resized_height - out_height) / resized_height * height
    return left_edge, upper, right, float(height)


def shrink_factor(source_wh: tuple[int, int], out_wh: tuple[int, int]) -> int:
    """Return the largest factor that libjpeg-turbo may shrink by without going below the final
    size.
    """
    left_edge, upper, right, lower = seen_box(source_wh, out_wh)
    out_width, out_height = out_wh
    scale_x = (right - left_edge) / out_width
    scale_y = (lower - upper) / out_height
    scale = min(scale_x, scale_y)
    return max(factor for factor in _REDUCED if factor == 1 or factor <= scale)


def decode_with_pil(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    """Decode, crop and shrink bilinearly with Pillow."""
    from PIL import Image

    _, out_height, out_width = planes.shape
    out_wh = out_width, out_height
    picture: Any = Image.open(io.BytesIO(encoded))
    box = seen_box(picture.size, out_wh)
    resized = picture.convert("RGB").resize(out_wh, Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(resized)
    np.copyto(planes, pixels.transpose(2, 0, 1))


def decode_with_cv2(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    """Decode at full size with OpenCV and shrink by area."""
    data = np.frombuffer(encoded, np.uint8)
    picture: Any = cv2.imdecode(data, cv2.IMREAD_COLOR)
    height, width = picture.shape[:2]
    _resize(picture, (width, height), planes, cv2.INTER_AREA, bgr=True)


def decode_with_reduced_cv2(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    """Decode with OpenCV at a reduced size and shrink bilinearly."""
    source_wh = _jpeg_size(encoded)
    _, out_height, out_width = planes.shape
    factor = shrink_factor(source_wh, (out_width, out_height))
    data = np.frombuffer(encoded, np.uint8)
    picture = cv2.imdecode(data, _REDUCED[factor])
    _resize(picture, source_wh, planes, cv2.INTER_LINEAR, bgr=True)


def decode_with_simplejpeg(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    """Decode with simplejpeg at a reduced size into the thread's buffer, shrink bilinearly."""
    source_wh = _jpeg_size(encoded)
    _, out_height, out_width = planes.shape
    factor = shrink_factor(source_wh, (out_width, out_height))
    width, height = (-(-side // factor) for side in source_wh)
    shape = height, width, 3
    buffer = getattr(_SCRATCH, "buffer", None)
    if buffer is None or buffer.shape != shape:
        buffer = np.empty(shape, np.uint8)
        _SCRATCH.buffer = buffer
    picture = simplejpeg.decode_jpeg(
        encoded,
        "RGB",
        min_height=height,
        min_width=width,
        buffer=buffer,
    )
    _resize(picture, source_wh, planes, cv2.INTER_LINEAR, bgr=False)


def decode_with_ours(encoded: Buffer, planes: NDArray[np.uint8]) -> None:
    """Decode, crop and shrink with ``fr.decode_jpeg``."""
    _, out_height, out_width = planes.shape
    box = seen_box(_jpeg_size(encoded), (out_width, out_height))
    left_edge, upper, right, lower = map(round, box)
    crop = left_edge, upper, right - left_edge, lower - upper
    decode_jpeg(encoded, out=planes, crop=crop)


def _resize(
    picture: Any,
    source_wh: tuple[int, int],
    planes: NDArray[np.uint8],
    method: int,
    *,
    bgr: bool,
) -> None:
    """Cut out what is seen, to whole pixels of the decoded picture; shrink; split into the
    planes.
    """
    height, width = picture.shape[:2]
    _, out_height, out_width = planes.shape
    out_wh = out_width, out_height
    left_edge, upper, right, lower = seen_box(source_wh, out_wh)
    scale_x = width / source_wh[0]
    scale_y = height / source_wh[1]
    rows = slice(round(upper * scale_y), round(lower * scale_y))
    columns = slice(round(left_edge * scale_x), round(right * scale_x))
    small = cv2.resize(picture[rows, columns], out_wh, interpolation=method)
    red, green, blue = planes
    cv2.split(small, [blue, green, red] if bgr else [red, green, blue])


def _jpeg_size(encoded: Buffer) -> tuple[int, int]:
    """Return the width and height of a JPEG."""
    height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
    return int(width), int(height)


RECIPES: dict[str, Callable[[Buffer, NDArray[np.uint8]], None]] = {
    "pil": decode_with_pil,
    "cv2": decode_with_cv2,
    "cv2fast": decode_with_reduced_cv2,
    "native": decode_with_ours,
    "sjfast": decode_with_simplejpeg,
}
