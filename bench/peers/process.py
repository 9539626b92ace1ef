"""One task of one peer in a process of its own: write its data, check its images, or time it."""

from __future__ import annotations

import array
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import cv2
import msgspec
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fuelrail.bench.peers.peer import (
    Peer,
    Sample,
    Work,
    load_peer,
    prepare_worker,
)
from fuelrail.bench.ranks.elastic import end_with
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.storage.files import published

_NUM_BATCHES_CHECKED = 6

_NUM_IMAGES_CHECKED = 36

# What may be missing from an epoch: what is in flight of each worker, and what a shuffle buffer
# that continues over the epoch's end holds back.
_MAX_MISSING_BATCHES = 2

_MAX_MISSING_SHARE = 0.25

Action = Literal["write", "check", "time"]


class Task(Settings, frozen=True):
    """A task for ``peer`` with ``recipe`` in ``folder``.

    ``dataset`` is the Fuelrail dataset that the samples are from; ``cpus`` are those that the
    process and its children may use. ``whole_epoch``: a check counts the samples of an epoch, not
    only those of some batches. "time" takes batches until it is killed, and writes to the file
    ``arrivals`` when it asked for the first and when each came.
    """

    action: Action
    peer: str
    recipe: str
    folder: str
    dataset: str
    work: Work
    whole_epoch: bool
    cpus: tuple[int, ...]
    result: str
    arrivals: str


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """Reason why a task failed, in one sentence."""

    message: str


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """The data was written."""


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Check of the batches that a loader delivers, some or a whole epoch.

    ``psnr_db`` holds its images against the definition (decode at full size, shrink by area, crop):
    the lowest and the mean of some samples' images. ``num_missing`` samples did not come,
    ``num_repeated`` came twice; ``fault`` says what is wrong with the rest, None if nothing is.
    """

    num_images: int
    lowest_psnr_db: float
    mean_psnr_db: float
    num_missing: int
    num_repeated: int
    fault: str | None


Answer = Failure | Written | Check


def perform(task: Task) -> Answer:
    """Do a task in this process."""
    peer = load_peer(task.peer)
    if task.action == "write":
        samples = read_samples(open_dataset(task.dataset))
        peer.write(samples, Path(task.folder), task.work)
        return Written()
    if task.action == "check":
        return _check(peer, task)
    with Path(task.arrivals).open("wb", buffering=0) as out:
        times = array.array("d", [time.monotonic()])
        batches = peer.batches(Path(task.folder), task.work, task.recipe)
        while True:
            out.write(times)
            next(batches)
            times[0] = time.monotonic()


def _check(peer: Peer, task: Task) -> Check:
    prepare_worker()  # before any reference is made: a peer may fork its workers from this process
    work = task.work
    dataset = open_dataset(task.dataset)
    times_seen: dict[int, int] = {}
    errors: list[float] = []
    batches = peer.batches(Path(task.folder), work, task.recipe)
    num_batches = _NUM_BATCHES_CHECKED
    if task.whole_epoch:
        num_batches = work.num_samples // work.batch_size
    expected = (work.batch_size, *work.sample_shape)
    for _ in range(num_batches):
        numbers, images = next(batches)
        is_expected = images.shape == expected and images.dtype == np.uint8
        if not is_expected or len(numbers) != work.batch_size:
            return _faulty(
                f"batches are {images.dtype} {images.shape} with {len(numbers)} keys, not "
                f"uint8 {expected}"
            )
        unknown = [number for number in numbers if not 0 <= number < work.num_samples]
        if unknown:
            return _faulty(f"it hands out samples that there are not: {unknown[:3]}")
        if len(errors) < _NUM_IMAGES_CHECKED:
            (sample,) = read_samples(dataset, numbers[:1])
            expected_images = np.stack([reference(image, work) for image in sample.images])
            differences = images[0].astype(np.float32) - expected_images
            errors += np.square(differences).mean(axis=(1, 2, 3)).tolist()
        for number in numbers:
            times_seen[number] = times_seen.get(number, 0) + 1
    missing = work.num_samples - len(times_seen) if task.whole_epoch else 0
    in_flight = _MAX_MISSING_BATCHES * work.num_workers * work.batch_size
    fault = None
    if missing > in_flight + _MAX_MISSING_SHARE * work.num_samples:
        fault = f"{missing} of {work.num_samples} samples did not come in an epoch"
    psnr = []
    for error in errors:
        # Of equal pictures: as if a single bit of the set differed.
        ratio = 255**2 / max(error, 1e-9)
        psnr.append(float(10 * np.log10(ratio)))
    return Check(
        num_images=len(errors),
        lowest_psnr_db=min(psnr),
        mean_psnr_db=float(np.mean(psnr)),
        num_missing=missing,
        num_repeated=sum(count - 1 for count in times_seen.values()),
        fault=fault,
    )


def _faulty(fault: str) -> Check:
    return Check(
        num_images=0,
        lowest_psnr_db=0.0,
        mean_psnr_db=0.0,
        num_missing=0,
        num_repeated=0,
        fault=fault,
    )


def reference(encoded: bytes, work: Work) -> NDArray[np.float32]:
    """Decode an image by the definition: at full size, all of it shrunk by area, cropped; [3, H,
    W].
    """
    data = np.frombuffer(encoded, np.uint8)
    picture: Any = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB)
    height, width = picture.shape[:2]
    scale = max(work.width / width, work.height / height)
    resized_width = int(width * scale)
    resized_height = int(height * scale)
    small = cv2.resize(picture, (resized_width, resized_height), interpolation=cv2.INTER_AREA)
    left_edge = (resized_width - work.width) // 2
    upper = resized_height - work.height
    crop = small[upper:, left_edge : left_edge + work.width]
    planes: NDArray[np.float32] = crop.transpose(2, 0, 1).astype(np.float32)
    return planes


def main(path: str) -> None:
    """Do the task and leave at once: worker processes and threads end with this one, in whatever
    they are doing.
    """
    # However the comparison ends, nothing of it continues to run.
    end_with(os.getppid(), signal.SIGKILL)
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cpus)
    answer: Answer
    try:
        answer = perform(task)
    except FuelrailError as error:
        answer = Failure(message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        first_line = str(error).partition("\n")[0]
        answer = Failure(message=f"{type(error).__name__}: {first_line}")
    with published(Path(task.result)) as file:
        file.write(msgspec.json.encode(answer))
    sys.stdout.flush()
    os._exit(0)


def read_samples(dataset: Dataset, numbers: Iterable[int] | None = None) -> Iterator[Sample]:
    """Yield all samples by number, or those of some numbers.

    A sample's number is its place among the sorted keys.

    Raises ConfigError for a sample that lacks an image: the other loaders have no mask for it.
    """
    reader = SampleReader(dataset, extra=False)
    rows = range(len(dataset.index))
    keys = sorted((dataset.index.row(row).key, row) for row in rows)
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    if numbers is None:
        numbers = range(len(keys))
    for number in numbers:
        key, row = keys[number]
        images = reader.sample(row).images
        missing = [camera for camera in cameras if camera not in images]
        if missing:
            raise ConfigError(
                f"sample {key} has no image of {', '.join(missing)}: compare needs whole samples"
            )
        yield Sample(number, tuple(bytes(images[camera]) for camera in cameras))


def describe_work(
    dataset: Dataset,
    *,
    height: int,
    width: int,
    batch_size: int,
    num_workers: int,
    seed: int,
) -> Work:
    """Return the work that a dataset's samples make; raise ConfigError for one that cannot be
    compared.
    """
    num_samples = len(dataset.index)
    if len(dataset.manifest.splits) != 1:
        raise ConfigError(
            f"dataset '{dataset.location}' has the splits {', '.join(dataset.manifest.splits)}; "
            "compare needs one: choose it with --split"
        )
    if not dataset.manifest.cameras:
        raise ConfigError(
            f"dataset '{dataset.location}' has no cameras: there is nothing to decode"
        )
    fewest = 2 * num_workers * batch_size
    if num_samples < fewest:
        raise ConfigError(
            f"dataset '{dataset.location}' has {num_samples} samples, too few to warm up: "
            f"{num_workers} workers with batches of {batch_size} need {fewest}; use a "
            "smaller --batch-size or a larger dataset"
        )
    (first,) = read_samples(dataset, [0])
    try:
        height_px, width_px, _, _ = simplejpeg.decode_jpeg_header(first.images[0])
    except ValueError as error:
        raise ConfigError(
            f"the images of dataset '{dataset.location}' are no JPEGs: {error}"
        ) from error
    return Work(
        height=height,
        width=width,
        batch_size=batch_size,
        num_workers=num_workers,
        seed=seed,
        num_samples=num_samples,
        source_wh=(width_px, height_px),
        cameras=tuple(camera.channel for camera in dataset.manifest.cameras),
    )


if __name__ == "__main__":
    main(sys.argv[1])
