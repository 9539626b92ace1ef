"""What a decode backend is: encoded bytes and an `ImageMap` in, planes of a batch out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    get_args,
    runtime_checkable,
)

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.settings import CheckedSettings, must_be

if TYPE_CHECKING:
    import torch

    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo
    from fuelrail.pipeline.transforms.image_map import ImageMap

Interpolation: TypeAlias = Literal["bilinear", "bicubic"]

INTERPOLATIONS: tuple[str, ...] = get_args(Interpolation)

MIN_LANES = 3
MAX_LANES = 4
"""Threads that decode batches for one GPU at the same time.

Each waits on the host for its own run, so that one parses headers and one takes results while a
third one's images are decoded.
"""


@runtime_checkable
class ImageDecoder(Protocol):
    """A decode backend. One instance serves all threads; scratch memory is per thread.

    Every backend samples the same place of the source for each output pixel (half-pixel centres,
    exact affine map), paints black where the map sees nothing, and never applies EXIF orientation:
    calibrations speak of pixels as stored.
    """

    name: str

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: U8,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode ``encoded`` and write its image under ``image_map`` into ``out``.

        Args:
            encoded: a whole JPEG or PNG file.
            image_map: source to output; its ``source_wh`` must be the encoded image's size. Its
                ``lens`` is undone.
            out: uint8 (3, height, width) RGB planes to fill, of size ``image_map.out_wh``; each row
                contiguous.
            interpolation: one of `INTERPOLATIONS`.

        Raises:
            ImageError: bytes that are not a decodable image of the promised size. ``out`` is
                untouched then.
            ConfigError: ``out`` or ``interpolation`` is not as described.

        """
        ...


@runtime_checkable
class ImagesDecoder(Protocol):
    """A decode backend that decodes several images in one call; in addition to `ImageDecoder`."""

    def decode_images(
        self,
        encoded: Sequence[Buffer],
        image_maps: Sequence[ImageMap],
        outs: Sequence[U8],
        interpolation: Interpolation = "bilinear",
    ) -> list[ImageError | None]:
        """Do what `ImageDecoder.decode_into` does to each image.

        Returns for each None, or the ImageError that says why its ``out`` is untouched. The others
        are decoded. Raises ConfigError.
        """
        ...


@runtime_checkable
class ViewsDecoder(Protocol):
    """A decode backend that decodes an image once for several maps; in addition to
    `ImageDecoder`.
    """

    def decode_views(
        self,
        encoded: Buffer,
        image_maps: Sequence[ImageMap],
        outs: Sequence[U8],
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Write the image under each map into the ``out`` beside it; see
        `ImageDecoder.decode_into`.

        Where the maps ask for different resolutions, the image is decoded at the higher one, and
        averaged for the lower: pixels then differ by a few grey levels from those of
        `ImageDecoder.decode_into`. All maps have a lens, or none has.
        """
        ...


@runtime_checkable
class BatchDecoder(Protocol):
    """A decode backend that takes batches, because its device wants many images at once.

    Thread-safe as the other.
    """

    name: str
    device: torch.device

    def new_output(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uninitialised uint8 memory on the backend's device, safe to decode into at once.

        Where it is used on another CUDA stream than the backend's own, that stream must be recorded
        on it.
        """
        ...

    def decode_batch(
        self,
        encoded: Sequence[Buffer | None],
        image_maps: Sequence[ImageMap],
        out: torch.Tensor,
        interpolation: Interpolation = "bilinear",
    ) -> list[ImageError | None]:
        """Decode B images and write each under its map into ``out[i]``.

        Args:
            encoded: B whole JPEG or PNG files. None for a missing one: its ``out[i]`` is all zeros.
            image_maps: B maps; all of them to the size of ``out``.
            out: uint8 [B, 3, height, width] RGB on the backend's device. Finished, not just queued,
                on return.
            interpolation: one of `INTERPOLATIONS`.

        Returns:
            For each image None, or the ImageError that says why ``out[i]`` is untouched. The others
            are decoded.

        Raises:
            ConfigError: ``out`` or ``interpolation`` is not as described.

        """
        ...

    def close(self) -> None:
        """Release what the backend holds for all threads.

        None may be decoding; it can be used again.
        """
        ...


def black_out_unseen(image_map: ImageMap, out: U8) -> None:
    """Set the pixels of ``out`` (3, height, width) black that the map lets see nothing."""
    columns = image_map.visible_columns()
    if columns is None:
        return
    # 16-bit compares of a whole plane are quicker than slicing 256 rows; images are below 32768
    # pixels wide.
    x = np.arange(out.shape[2], dtype=np.int16)
    is_seen = (x >= columns[0][:, None].astype(np.int16)) & (
        x < columns[1][:, None].astype(np.int16)
    )
    out *= is_seen


def check_output(image_map: ImageMap, out: U8, interpolation: str) -> None:
    """Refuse an output array or a filter that the protocol does not allow; raises ConfigError."""
    width, height = image_map.out_wh
    if (
        out.shape != (3, height, width)
        or out.dtype != "uint8"
        or out.strides[2] != 1
        or not out.flags.writeable
    ):
        raise ConfigError(
            f"out must be a writable uint8 array of shape (3, {height}, {width}) with "
            f"contiguous rows, got {out.dtype} {out.shape} with strides {out.strides}"
        )
    if interpolation not in INTERPOLATIONS:
        raise ConfigError(
            f"interpolation={interpolation!r} must be one of {', '.join(INTERPOLATIONS)}"
        )


def check_source(info: ImageInfo, image_map: ImageMap) -> None:
    """Refuse an image of another size than the map was made for; raises ImageError."""
    if (info.width, info.height) != image_map.source_wh:
        raise ImageError(
            f"image is {info.width}x{info.height} pixels, but its sample's geometry says "
            f"{image_map.source_wh[0]}x{image_map.source_wh[1]}: intrinsics would not fit"
        )


class ImageFacts(NamedTuple):
    """Facts of a dataset's images.

    Attributes:
        largest_wh: width and height in pixels that no stored image exceeds.
        baseline_share: part of the images that is baseline JPEG, which is all that hardware
            decoders take; 0 to 1.
        batch_images: most images that are decoded in one call, for which memory is taken; 0:
            unknown.
    """

    largest_wh: tuple[int, int]
    baseline_share: float
    batch_images: int = 0


UNKNOWN = ImageFacts((0, 0), 1.0)


class DaliOptions(CheckedSettings, frozen=True):
    """How decoder="dali" works on a GPU; on the CPU nothing of it applies.

    Attributes:
        hardware_share: part of a batch that the hardware decoder takes, 0 to 1. With 1 it takes
            every image that it can, with 0 none: pixels are reproducible then. In between, an
            image's place among its neighbours decides whether the hardware or the CUDA cores decode
            it, and where the two differ by a grey level, pixels depend on batch size, number of
            ranks and timing.
        check_every: one image in this number, the first one included, is decoded again on the CPU
            and compared, for decoders of GPUs are known to report black images as decoded; 0: none.

    Raises ConfigError for values out of range.
    """

    hardware_share: Annotated[float, Meta(ge=0.0, le=1.0), must_be("a number from 0 to 1")] = 1.0
    check_every: Annotated[int, Meta(ge=0), must_be("an integer >= 0")] = 1000


class Place(NamedTuple):
    """Where a loader decodes: what the function that makes a backend gets.

    Attributes:
        device: ``cpu``, or a device of torch such as ``cuda:1``.
        num_threads: number of the loader's decoding threads, for a backend with threads of its own.
        facts: returns facts of the dataset's images; None where there is no dataset.
        dali: options of "dali"; None for its defaults.
    """

    device: str = "cpu"
    num_threads: int = 2
    facts: Callable[[], ImageFacts] | None = None
    dali: DaliOptions | None = None


def wait_on_host(stream: torch.cuda.Stream) -> None:
    """Wait until the work queued on a stream is done; the CPU sleeps meanwhile, where
    `Stream.synchronize` spins.
    """
    import torch

    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(stream)
    done.synchronize()
