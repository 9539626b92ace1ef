"""SPDL's pipeline of threads over tar shards, with decoding by hand, or (`spdl-io`) with its own
by FFmpeg.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

import cv2
import numpy as np

from fuelrail.bench.peers import wds
from fuelrail.bench.peers.peer import (
    Batch,
    Sample,
    Work,
    decode_sample,
    prepare_worker,
    unpack_number,
)

_SHUFFLE_BUFFER = 100

RawSample = tuple[bytes, list[memoryview]]
"""Packed number, encoded images."""


class Spdl:
    """SPDL: its tar iterator on mapped files, its pipeline; one task makes one batch.

    With the recipe ``ffmpeg`` FFmpeg decodes at full size, scales bilinearly (antialiased) and
    crops.
    """

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write as the webdataset library does."""
        wds.PEER.write(samples, folder, work)

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Yield batches from as many decoding threads as there are CPUs."""
        prepare_worker()

        def decode(samples: list[RawSample]) -> Batch:
            images = np.empty((len(samples), *work.sample_shape), np.uint8)
            for (_, encoded), planes in zip(samples, images, strict=True):
                if recipe == "ffmpeg":
                    io = import_module("spdl.io")
                    source_width, source_height = work.source_wh
                    scale = max(work.width / source_width, work.height / source_height)
                    width = int(source_width * scale)
                    height = int(source_height * scale)
                    left_edge = (width - work.width) // 2
                    upper = height - work.height
                    description = (
                        f"scale={width}:{height}:flags=bilinear,"
                        f"crop={work.width}:{work.height}:{left_edge}:{upper},"
                        "format=pix_fmts=rgb24"
                    )
                    for image, (red, green, blue) in zip(encoded, planes, strict=True):
                        frame = io.load_image(bytes(image), filter_desc=description)
                        pixels = io.to_numpy(frame)
                        cv2.split(pixels, [red, green, blue])
                else:
                    decode_sample(encoded, recipe, planes)
            numbers = [unpack_number(number) for number, _ in samples]
            return Batch(numbers, images)

        builder = import_module("spdl.pipeline").PipelineBuilder()
        pipeline = (
            builder.add_source(_shuffled_batches(folder, work))
            .pipe(decode, concurrency=work.num_workers)
            .add_sink(2)
            .build(num_threads=work.num_workers)
        )
        with pipeline.auto_stop():
            yield from pipeline


def _shuffled_batches(folder: Path, work: Work) -> Iterator[list[RawSample]]:
    """Yield full batches of samples without end: shards in a new order each epoch, samples
    through a shuffle buffer.
    """
    rng = random.Random(work.seed)
    shards = sorted(folder.glob("*.tar"))
    while True:
        rng.shuffle(shards)
        samples = chain.from_iterable(_samples(shard, work) for shard in shards)
        batch: list[RawSample] = []
        for sample in _buffered(samples, rng):
            batch.append(sample)
            if len(batch) == work.batch_size:
                yield batch
                batch = []


def _buffered(samples: Iterable[RawSample], rng: random.Random) -> Iterator[RawSample]:
    waiting: list[RawSample] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) > _SHUFFLE_BUFFER:
            index = rng.randrange(len(waiting))
            sample = waiting[index]
            waiting[index] = waiting[-1]
            waiting.pop()
            yield sample
    rng.shuffle(waiting)
    yield from waiting


def _samples(shard: Path, work: Work) -> Iterator[RawSample]:
    with shard.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    members: dict[str, memoryview] = {}
    for name, content in import_module("spdl.io").iter_tarfile(mapped):
        _, _, member = name.partition(".")
        members[member] = content
        if len(members) == len(work.cameras) + 1:
            number = bytes(members[wds.NUMBER])
            images = [members[f"{camera}.jpg"] for camera in work.cameras]
            yield number, images
            members = {}


PEER = Spdl()
