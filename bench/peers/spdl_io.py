"""SPDL's pipeline of threads over tar shards, with its own decoding by FFmpeg."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import cv2
import numpy as np

from fuelrail.bench.peers import wds
from fuelrail.bench.peers.peer import Batch, prepare_worker, unpack_number
from fuelrail.bench.peers.spdl import run_pipeline
from fuelrail.bench.peers.tar_samples import RawSample, shuffled_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from fuelrail.bench.peers.peer import Sample, Work


class SpdlIo:
    """FFmpeg decodes at full size, scales bilinearly (antialiased) and crops."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """As the webdataset library does."""
        wds.PEER.write(samples, folder, work)

    def batches(self, folder: Path, work: Work, _recipe: str, /) -> Iterator[Batch]:
        """As many decoding threads as there are CPUs."""
        prepare_worker()
        parse = import_module("spdl.io").iter_tarfile
        return run_pipeline(shuffled_batches(folder, work, parse), partial(_decode, work), work)


def _decode(work: Work, samples: list[RawSample]) -> Batch:
    io = import_module("spdl.io")
    scale = max(work.width / work.source_wh[0], work.height / work.source_wh[1])
    width, height = int(work.source_wh[0] * scale), int(work.source_wh[1] * scale)
    crop = f"crop={work.width}:{work.height}:{(width - work.width) // 2}:{height - work.height}"
    description = f"scale={width}:{height}:flags=bilinear,{crop},format=pix_fmts=rgb24"
    images = np.empty((len(samples), *work.sample_shape), np.uint8)
    for (_, encoded), planes in zip(samples, images, strict=True):
        for image, (red, green, blue) in zip(encoded, planes, strict=True):
            picture = io.to_numpy(io.load_image(bytes(image), filter_desc=description))
            cv2.split(picture, [red, green, blue])
    return Batch([unpack_number(number) for number, _ in samples], images)


PEER = SpdlIo()
