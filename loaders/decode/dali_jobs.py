"""What to feed the DALI graph for a batch of images, computed on the host; what is done to its
output; thread state.

Header check, splicing and geometry of an image take some 15 us: the rows of all images are spliced
by one native call without the GIL, and a run is fed one array for all images where DALI takes it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import simplejpeg
import torch

from fuelrail.loaders.decode.protocol import check_source, wait_on_host
from fuelrail.loaders.decode.resample import two_steps
from fuelrail.loaders.decode.splice import RowsWanted, splice_batch
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.native import Scratch
from fuelrail.pipeline.sample.image_header import (
    check_jpeg_end,
    probe,
    unpack_png,
)

if TYPE_CHECKING:
    import weakref

    from fuelrail.pipeline.native import CameraJpeg
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo
    from fuelrail.pipeline.transforms.image_map import ImageMap

_REACH_PX = 3.0
"""Output pixels about the region of a transform: more than the filters read."""


class Job(NamedTuple):
    """One image of a run: its place in the caller's batch, and the graph's parameters.

    ``window`` is the region to decode: top, left, bottom, right. ``box`` is what is seen, within
    the window, in the same order, and the size to resize it to: height, width. ``matrix`` is the
    transform after that, row by row. ``other`` is the same image under another map, which comes
    from the same decode.
    """

    place: int
    encoded: Buffer
    window: tuple[int, int, int, int]
    box: tuple[float, ...]
    matrix: tuple[float, ...]
    is_aligned: bool
    second: Job | None = None

    @property
    def views(self) -> tuple[Job, ...]:
        """The jobs of the decoded image: one picture, or two."""
        if self.second is None:
            return (self,)
        return self, self.second


class Key(NamedTuple):
    """What a pipeline is built for."""

    interpolation: str
    is_aligned: bool
    width: int
    height: int
    num_views: int = 1

    @classmethod
    def from_jobs(
        cls,
        jobs: Sequence[Job],
        out: torch.Tensor,
        interpolation: str,
    ) -> Key:
        """Return that of jobs, which must be alike, and an output [B, 3, height, width]."""
        return cls(
            interpolation=interpolation,
            is_aligned=jobs[0].is_aligned,
            width=int(out.shape[3]),
            height=int(out.shape[2]),
            num_views=len(jobs[0].views),
        )


class Prepared(NamedTuple):
    """A batch's images, by what becomes of them; numbers are places in the batch."""

    jobs: list[Job]
    black: list[int]
    """Missing, or nothing of them is seen."""
    by_turbo: list[int]
    copies: list[tuple[int, int]]
    """Each with the earlier place of the same image under the same map."""
    errors: dict[int, ImageError]


def prepare(
    encoded: Sequence[Buffer | None],
    image_maps: Sequence[ImageMap],
    scratch: Scratch,
    native: CameraJpeg | None,
) -> Prepared:
    """Check the images of a batch and compute their jobs; ``native`` is the library that splices,
    if there is one.

    Of JPEGs with restart markers at their rows only the rows that are needed are kept; these lie in
    ``scratch`` until its thread's next call.
    """
    prepared = Prepared(
        jobs=[],
        black=[],
        by_turbo=[],
        copies=[],
        errors={},
    )
    first_use: dict[tuple[int, int], int] = {}
    decodes: dict[tuple[int, bool], int] = {}
    cuttable: dict[int, ImageInfo] = {}
    for index, (data, image_map) in enumerate(zip(encoded, image_maps, strict=True)):
        if data is None:
            prepared.black.append(index)
            continue
        image = id(data)
        earlier = first_use.setdefault((image, id(image_map)), index)
        if earlier != index:
            prepared.copies.append((index, earlier))
            continue
        try:
            info = probe(data)
            check_source(info, image_map)
            # DALI's remap exists on the GPU only, and takes maps, not lenses; of CMYK's colours it
            # has another idea.
            if image_map.lens is not None or info.is_cmyk:
                prepared.by_turbo.append(index)
                continue
            if info.format == "png":
                data = unpack_png(data)
            else:
                check_jpeg_end(data)
        except ImageError as error:
            prepared.errors[index] = error
            continue
        job = _make_job(index, data, image_map)
        if job is None:
            prepared.black.append(index)
            continue
        partner = decodes.pop((image, job.is_aligned), None)
        if partner is not None:
            prepared.jobs[partner] = prepared.jobs[partner]._replace(second=job)
            continue
        decodes[image, job.is_aligned] = len(prepared.jobs)
        if info.restart_interval:
            cuttable[len(prepared.jobs)] = info
        prepared.jobs.append(job)
    rows_wanted = []
    for number, info in cuttable.items():
        windows = [view.window for view in prepared.jobs[number].views]
        rows = (
            min(window[0] for window in windows),
            max(window[2] for window in windows),
        )
        rows_wanted.append(RowsWanted(prepared.jobs[number].encoded, info, *rows))
    for number, spliced in zip(cuttable, splice_batch(rows_wanted, scratch, native), strict=True):
        if spliced is None:
            continue
        views = []
        for view in prepared.jobs[number].views:
            top, left, bottom, right = view.window
            window = (top - spliced.top, left, bottom - spliced.top, right)
            views.append(view._replace(encoded=spliced.encoded, window=window))
        first, *more_views = views
        prepared.jobs[number] = first._replace(second=more_views[0] if more_views else None)
    return prepared


def lens_views(
    places: Sequence[int],
    encoded: Sequence[Buffer | None],
    image_maps: Sequence[ImageMap],
) -> list[list[int]]:
    """Return places that libjpeg-turbo decodes, those of one image with a lens together: they
    come from one decode.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index in places:
        groups.setdefault(
            (
                id(encoded[index]),
                index if image_maps[index].lens is None else -1,
            ),
            [],
        ).append(index)
    return list(groups.values())


def _make_job(index: int, data: Buffer, image_map: ImageMap) -> Job | None:
    """Return the parameters of one image; None if its map sees nothing of it."""
    width, height = image_map.source_wh
    out_width, out_height = image_map.out_wh
    is_aligned = image_map.is_axis_aligned and image_map.covered_output() == (
        0,
        0,
        out_width,
        out_height,
    )
    if is_aligned:
        a, _, tx, _, d, ty = image_map.inverse_coefficients()
        x0 = tx
        x1 = a * out_width + tx
        y0 = ty
        y1 = d * out_height + ty
        # A map may end within half an output pixel outside of the image; a box of DALI's may not.
        is_aligned = (
            min(x0, x1, y0, y1) >= -1e-6
            and max(x0, x1) <= width + 1e-6
            and max(y0, y1) <= height + 1e-6
        )
    matrix: tuple[float, ...] = ()
    if is_aligned:
        reach = _REACH_PX / min(1.0, image_map.max_scale)
        left, top, right, bottom = image_map.source_roi(reach)
        size = (out_height, out_width)
    else:
        steps = two_steps(image_map, _REACH_PX)
        if steps is None:
            return None
        x0, y0, x1, y1 = steps.box
        left = int(x0)
        top = int(y0)
        right = min(width, math.ceil(x1))
        bottom = min(height, math.ceil(y1))
        size = steps.size_wh[::-1]
        matrix = steps.to_resized
    box = (
        y0 - top,
        x0 - left,
        y1 - top,
        x1 - left,
        *size,
    )
    return Job(
        place=index,
        encoded=data,
        window=(top, left, bottom, right),
        box=box,
        matrix=matrix,
        is_aligned=is_aligned,
    )


def inputs(jobs: Sequence[Job], *, is_whole: bool) -> dict[str, Any]:
    """Return what the graph's inputs are fed for a run: one array for all images, but for the
    images themselves.

    A graph with ``is_whole`` decodes whole images, so for two views it has no window to decode.
    """
    # DALI makes them of other kinds of arrays in twice the time.
    from nvidia.dali.tensors import (
        TensorCPU,
    )

    fed: dict[str, Any] = {"encoded": [TensorCPU(job.encoded) for job in jobs]}
    views = list(zip(*(job.views for job in jobs), strict=True))
    windows = []
    for jobs_of_view in views:
        rectangles = [job.window for job in jobs_of_view]
        windows.append(np.array(rectangles, np.int32))
    if len(views) == 1 or not is_whole:
        first = np.min(windows, axis=0)[:, :2]
        last = np.max(windows, axis=0)[:, 2:]
        fed["window"] = np.concatenate([first, last], axis=1)
    for number, jobs_of_view in enumerate(views):
        if len(views) > 1:
            fed[f"window{number}"] = windows[number]
        boxes = [job.box for job in jobs_of_view]
        fed[f"box{number}"] = np.array(boxes, np.float32)
        if not jobs[0].is_aligned:
            matrices = np.array([job.matrix for job in jobs_of_view], np.float32)
            fed[f"matrix{number}"] = matrices.reshape(-1, 2, 3)
    return fed


@functools.lru_cache(maxsize=8)
def known_good_job(largest_wh: tuple[int, int], key: Key) -> Job:
    """Return a baseline 4:2:0 JPEG of that size (of any if it is 0 x 0), resized to the output."""
    width, height = largest_wh if all(largest_wh) else (640, 384)
    black = np.zeros((height, width, 3), np.uint8)
    job = Job(
        place=0,
        encoded=simplejpeg.encode_jpeg(black, colorsubsampling="420"),
        window=(0, 0, height, width),
        box=(0.0, 0.0, height, width, key.height, key.width),
        matrix=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
        is_aligned=key.is_aligned,
    )
    if key.num_views == 1:
        return job
    return job._replace(second=job)


def psnr_of_means(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the PSNR in dB of two uint8 images (3, height, width), each averaged over 4 x 4
    pixels.
    """
    width = -(-first.shape[2] // 4)
    height = -(-first.shape[1] // 4)
    differences = []
    for planes in zip(first.numpy(), second.numpy(), strict=True):
        means = [
            cv2.resize(plane, (width, height), interpolation=cv2.INTER_AREA) for plane in planes
        ]
        differences.append(cv2.absdiff(*means))
    error = float(np.mean(np.square(differences, dtype=np.float64)))
    if error:
        return 10.0 * math.log10(255.0**2 / error)
    return math.inf


def stretches(jobs: Sequence[Job]) -> list[tuple[slice, slice]]:
    """Return the jobs' places as stretches of consecutive ones, each with its part of the jobs.

    Slices need no index on the device. A run of a whole batch is one stretch.
    """
    pairs: list[tuple[slice, slice]] = []
    first = 0
    for number in range(1, len(jobs) + 1):
        if number == len(jobs) or jobs[number].place != jobs[number - 1].place + 1:
            pairs.append(
                (
                    slice(jobs[first].place, jobs[number - 1].place + 1),
                    slice(first, number),
                )
            )
            first = number
    return pairs


def black_out_unseen(
    jobs: Sequence[Job],
    image_maps: Sequence[ImageMap],
    out: torch.Tensor,
) -> None:
    """Set the pixels black that the maps let see nothing: one small copy to the device for all
    images.
    """
    height = int(out.shape[2])
    width = int(out.shape[3])
    limited = [image_maps[job.place].visible_columns() for job in jobs]
    if all(columns is None for columns in limited):
        return
    everything = np.zeros(height, np.int64), np.full(height, width)
    limits = np.array([everything if columns is None else columns for columns in limited])
    columns = torch.from_numpy(limits).to(out.device)  # [n, 2, height]
    x = torch.arange(width, device=out.device)
    starts = columns[:, None, 0, :, None]
    stops = columns[:, None, 1, :, None]
    is_seen = (x >= starts) & (x < stops)
    for where, part in stretches(jobs):
        out[where] *= is_seen[part]


class ThreadState:
    """One thread's pipelines, its scratch memory, its CUDA stream, and DALI's outputs that the
    stream still reads.
    """

    def __init__(self) -> None:
        self.pipelines: dict[Key, Any] = {}
        self.scratch = Scratch()
        self._held: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream to decode on; None on the CPU.

        Its priority is CUDA's lowest, which is the default. So the trainer's kernels come first
        only where they run on a stream of higher priority.
        """
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        return self._stream

    def hold(self, output: torch.Tensor) -> None:
        """Keep an output of DALI's until `wait`: later, a run in another thread may be given its
        memory.
        """
        self._held.append(output)

    def wait(self) -> None:
        """Wait until the stream's work is done, without a busy CPU; outputs are let go of then."""
        if self._stream is not None:
            wait_on_host(self._stream)
        self._held.clear()


class PerThread(threading.local):
    """The calling thread's state, which ``states`` knows as long as the thread lives."""

    def __init__(self, states: weakref.WeakSet[ThreadState], lock: threading.Lock) -> None:
        self.state = ThreadState()
        with lock:
            states.add(self.state)
