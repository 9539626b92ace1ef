"""FFCV over its own file, whose images it encodes again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from fuelrail.bench.peers.peer import Batch, Sample, Work, seen_box

_FILE = "train.beton"
_QUALITY = 80  # about the bytes of the original


class Ffcv:
    """JPEG mode; its decoder cuts out what the crop shows and shrinks by area."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """One field an image."""
        fields = import_module("ffcv.fields")
        images = {camera: fields.RGBImageField(write_mode="jpg", jpeg_quality=_QUALITY) for camera in work.cameras}
        writer = import_module("ffcv.writer").DatasetWriter(
            str(folder / _FILE), {"number": fields.IntField(), **images}, num_workers=1
        )
        writer.from_indexed_dataset(_Decoded(list(samples)))

    def batches(self, folder: Path, work: Work, _recipe: str, /) -> Iterator[Batch]:
        """Its loader with as many threads as there are CPUs, the file in the page cache."""
        loader_module, transforms = import_module("ffcv.loader"), import_module("ffcv.transforms")
        to_number = [import_module("ffcv.fields.basics").IntDecoder(), transforms.ToTensor(), transforms.Squeeze()]
        decoders = {camera: [_decoder(work), transforms.ToTensor()] for camera in work.cameras}
        loader = loader_module.Loader(
            str(folder / _FILE),
            batch_size=work.batch_size,
            num_workers=work.num_workers,
            order=loader_module.OrderOption.RANDOM,
            seed=work.seed,
            os_cache=True,
            drop_last=True,
            pipelines={"number": to_number, **decoders},
        )
        shape = (work.batch_size, *work.sample_shape)
        images = torch.empty(shape, dtype=torch.uint8)
        while True:
            for numbers, *pictures in loader:
                for camera, picture in enumerate(pictures):
                    images[:, camera].copy_(picture.permute(0, 3, 1, 2))
                yield Batch(numbers.tolist(), images.numpy())


class _Decoded:
    """The samples as FFCV's writer wants them: pictures."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        sample = self._samples[at]
        return (sample.number, *(_decode(image) for image in sample.images))


def _decode(encoded: bytes) -> NDArray[np.uint8]:
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    return np.ascontiguousarray(picture)


def _decoder(work: Work) -> Any:  # noqa: ANN401 - a class whose base is imported here
    base = import_module("ffcv.fields.rgb_image").ResizedCropRGBImageDecoder
    left, upper, right, lower = (round(edge) for edge in seen_box(work.source_wh, (work.width, work.height)))
    height, width = lower - upper, right - left

    def crop(_height: int, _width: int, _scale: Any, _ratio: Any) -> tuple[int, int, int, int]:  # noqa: ANN401
        return upper, left, height, width

    class Seen(base):  # type: ignore[misc, valid-type]
        scale = None
        ratio = 1.0

        @property
        def get_crop_generator(self) -> Any:  # noqa: ANN401 - FFCV's name; compiled by numba
            return crop

    return Seen((work.height, work.width))


PEER = Ffcv()
