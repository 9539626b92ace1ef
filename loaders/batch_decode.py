"""The decode stage for decoders that take whole batches (DALI), on the CPU or on the GPU that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.loaders.decode import BatchDecoder
from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.loaders.work import fetch
from fuelrail.pipeline.errors import ConfigError, ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from fuelrail.loaders.assemble import DecodedSample
    from fuelrail.loaders.decode import ImageDecoder
    from fuelrail.loaders.quarantine import BadSamples
    from fuelrail.loaders.work import Fetched, Parsed
    from fuelrail.pipeline.pixel_augment import PixelAugment


def check_pixels(decoder: ImageDecoder, pixels: PixelAugment) -> None:
    """Raise ConfigError where pixel values are to be changed that never are in host memory."""
    if isinstance(decoder, BatchDecoder) and decoder.device.type != "cpu" and not pixels.changes_nothing:
        raise ConfigError(
            f"pixels can be changed in host memory only, and decoder={decoder.name!r} decodes on {decoder.device}: "
            "leave out pixels, or take decoder='turbo'"
        )


class BatchDecode:
    """The stage's work: decodes all images of a batch in one call, B x T x N of them, of any sizes.

    Into the slot's host buffer, or, with a decoder on a GPU, into memory of that device, which takes the buffer's place
    in the slot. A bad image makes its sample bad, as with other decoders; the rest of the batch is not decoded again.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        cameras: Sequence[str],
        fill: tuple[int, int, int],
        bad: BadSamples,
        parse_again: Callable[[Fetched], Parsed],
    ) -> None:
        self._decoder, self._cameras, self._fill = decoder, cameras, fill
        self._bad, self._parse_again = bad, parse_again

    def __call__(self, batch: Sequence[Parsed]) -> list[DecodedSample]:
        """Decode the parsed samples of one batch."""
        slot = batch[0].task.slot
        on_cpu = self._decoder.device.type == "cpu"
        if not on_cpu:
            slot = slot._replace(images=self._decoder.new_output((len(batch), *slot.images.shape[1:])))
        # [B, T, N, 3, H, W], T being 1 without windows
        images = slot.img() if slot.has_windows else slot.img()[:, None]
        samples = list(batch)
        for at, (frame, error) in self._decode(samples, images).items():
            is_bad: tuple[int, ImageError] | None = (frame, error)
            while is_bad is not None:
                samples[at] = self._parse_again(fetch(self._bad, self._bad.replace(samples[at].task, *is_bad)))
                is_bad = self._decode(samples[at : at + 1], images[at : at + 1]).get(0)
        if on_cpu:
            planes = images.numpy()
            for at, parsed in enumerate(samples):
                for frame, sample in enumerate(parsed.samples):
                    for camera, (channel, change) in enumerate(zip(self._cameras, parsed.changes, strict=True)):
                        if channel in sample.images:
                            change_pixels(planes[at, frame, camera], change, self._fill)
        return [parsed.decoded(slot) for parsed in samples]

    def _decode(self, samples: Sequence[Parsed], images: torch.Tensor) -> dict[int, tuple[int, ImageError]]:
        """Decode the samples' images into uint8 [B', T, N, 3, H, W]; return each sample's first error and its frame."""
        names = [
            (number, frame, channel)
            for number, parsed in enumerate(samples)
            for frame in range(len(parsed.samples))
            for channel in self._cameras
        ]
        encoded = [samples[number].samples[frame].images.get(channel) for number, frame, channel in names]
        maps = [image_map for parsed in samples for of_frame in parsed.maps for image_map in of_frame]
        errors: dict[int, tuple[int, ImageError]] = {}
        for (number, frame, channel), error in zip(
            names, self._decoder.decode_batch(encoded, maps, images.flatten(0, 2)), strict=True
        ):
            if error is not None and number not in errors:
                key = samples[number].samples[frame].key
                errors[number] = frame, ImageError(error.message, key=key, member=channel)
        return errors
