"""One task of one peer in a process of its own: write its data, check its images, or time it."""

from __future__ import annotations

import array
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import cv2
import msgspec
import numpy as np

from fuelrail.bench.peers.interface import UnavailableError, Work
from fuelrail.bench.peers.recipes import prepare_worker
from fuelrail.bench.peers.registry import load_peer
from fuelrail.bench.peers.samples import read_samples
from fuelrail.bench.trainer.elastic import end_with
from fuelrail.pipeline.dataset import open_dataset
from fuelrail.pipeline.errors import FuelrailError
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.bench.peers.interface import Peer

_NUM_BATCHES_CHECKED = 6
_NUM_IMAGES_CHECKED = 36
# What may be missing from an epoch: what is in flight of each worker, and what a shuffle buffer that goes on over the
# epoch's end holds back.
_MAX_MISSING_BATCHES = 2
_MAX_MISSING_SHARE = 0.25


Action = Literal["write", "check", "time"]


class Task(Settings, frozen=True):
    """What to do: for ``peer`` with ``recipe`` in ``folder``.

    ``dataset`` is the Fuelrail dataset that the samples are from; ``cpus`` are those that the process and its children
    may use. ``whole_epoch``: a check counts the samples of an epoch, not only those of some batches. "time" takes
    batches until it is killed, and writes to the file ``arrivals`` when it asked for the first and when each came.
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
    """Why it could not be done, in one sentence; ``missing``: because something is not installed."""

    message: str
    missing: bool


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """The data was written in so many seconds."""

    seconds: float


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """What a loader hands out, over some batches or over as many as an epoch has.

    ``psnr_db`` holds its images against the definition (decode at full size, shrink by area, crop): the lowest and the
    mean of some samples' images. ``num_missing`` samples did not come, ``num_repeated`` came twice; ``fault`` says what
    is wrong with the rest, None if nothing is.
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
        started_s = time.perf_counter()
        peer.write(read_samples(open_dataset(task.dataset)), Path(task.folder), task.work)
        return Written(seconds=time.perf_counter() - started_s)
    return _check(peer, task) if task.action == "check" else _time(peer, task)


def _check(peer: Peer, task: Task) -> Check:
    prepare_worker()  # before any reference is made: a peer may fork its workers from this process
    work, dataset = task.work, open_dataset(task.dataset)
    seen: dict[int, int] = {}
    errors: list[float] = []
    batches = peer.batches(Path(task.folder), work, _decoding(task))
    num_batches = work.num_samples // work.batch_size if task.whole_epoch else _NUM_BATCHES_CHECKED
    for _ in range(num_batches):
        numbers, images = next(batches)
        expected = (work.batch_size, *work.sample_shape)
        if images.shape != expected or images.dtype != np.uint8 or len(numbers) != work.batch_size:
            return _faulty(f"batches are {images.dtype} {images.shape} with {len(numbers)} keys, not uint8 {expected}")
        unknown = [number for number in numbers if not 0 <= number < work.num_samples]
        if unknown:
            return _faulty(f"it hands out samples that there are not: {unknown[:3]}")
        if len(errors) < _NUM_IMAGES_CHECKED:
            (sample,) = read_samples(dataset, numbers[:1])
            wanted = np.stack([reference(image, work) for image in sample.images])
            errors += np.square(images[0].astype(np.float32) - wanted).mean(axis=(1, 2, 3)).tolist()
        for number in numbers:
            seen[number] = seen.get(number, 0) + 1
    missing = work.num_samples - len(seen) if task.whole_epoch else 0
    fault = None
    if missing > _MAX_MISSING_BATCHES * work.num_workers * work.batch_size + _MAX_MISSING_SHARE * work.num_samples:
        fault = f"{missing} of {work.num_samples} samples did not come in an epoch"
    psnr = [_psnr_db(error) for error in errors]
    return Check(
        num_images=len(errors),
        lowest_psnr_db=min(psnr),
        mean_psnr_db=float(np.mean(psnr)),
        num_missing=missing,
        num_repeated=sum(count - 1 for count in seen.values()),
        fault=fault,
    )


def _faulty(fault: str) -> Check:
    return Check(num_images=0, lowest_psnr_db=0.0, mean_psnr_db=0.0, num_missing=0, num_repeated=0, fault=fault)


def _psnr_db(mean_square_error: float) -> float:
    # Equal pictures: as far as a single differing bit of the set could be told.
    return float(10 * np.log10(255**2 / max(mean_square_error, 1e-9)))


def reference(encoded: bytes, work: Work) -> NDArray[np.float32]:
    """An image by the definition: decoded at full size, all of it shrunk by area, cropped; [3, H, W]."""
    picture: Any = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    height, width = picture.shape[:2]
    scale = max(work.width / width, work.height / height)
    resized_wh = int(width * scale), int(height * scale)
    small = cv2.resize(picture, resized_wh, interpolation=cv2.INTER_AREA)
    left, upper = (resized_wh[0] - work.width) // 2, resized_wh[1] - work.height
    planes: NDArray[np.float32] = small[upper:, left : left + work.width].transpose(2, 0, 1).astype(np.float32)
    return planes


def _time(peer: Peer, task: Task) -> NoReturn:
    with Path(task.arrivals).open("wb", buffering=0) as out:
        times = array.array("d", [time.monotonic()])
        batches = peer.batches(Path(task.folder), task.work, _decoding(task))
        while True:
            out.write(times)
            next(batches)
            times[0] = time.monotonic()


def _decoding(task: Task) -> str:
    return task.recipe.partition("+")[0]


def main(path: str) -> None:
    """Do the task and leave at once: worker processes and threads end with this one, in whatever they are doing."""
    end_with(os.getppid(), signal.SIGKILL)  # however the comparison ends, nothing of it goes on
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cpus)
    answer: Answer
    try:
        answer = perform(task)
    except UnavailableError as error:
        answer = Failure(message=str(error), missing=True)
    except FuelrailError as error:
        answer = Failure(message=str(error), missing=False)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        first_line = str(error).partition("\n")[0]
        answer = Failure(message=f"{type(error).__name__}: {first_line}", missing=False)
    result = Path(task.result)
    temporary = result.with_suffix(".part")
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(result)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
