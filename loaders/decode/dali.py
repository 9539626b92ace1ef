"""NVIDIA DALI: whole batches of images of any sizes through one graph, on the CPU or on a GPU.

Decode, resize the exact (fractional) box that is seen with antialiasing, apply one affine transform where the map turns
rows or leaves the image, write planes. Every parameter is per image and comes from the `ImageMap`, so the graph draws
nothing. On a GPU the JPEG decoding is DALI's ``mixed`` one, with the hardware decoder where there is one, and decodes
whole images: nvJPEG before 13.2 refuses a region of a subsampled image, which DALI then decodes on the CPU, and
nvImageCodec 0.9 is reported to crash on regions. On the CPU only the region is decoded, in full resolution, which is
slower than the turbo backend.

An error inside a DALI pipeline names no image and costs the run. So headers are checked first, and if a run fails all
the same, the batch is halved until the culprits stand alone. Those go to the turbo backend, which decodes them or says
what is wrong. So what becomes of an image never depends on its neighbours.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fuelrail.loaders.decode.dali_install import installed_dali
from fuelrail.loaders.decode.dali_jobs import Job, make_job
from fuelrail.loaders.decode.protocol import (
    INTERPOLATIONS,
    UNKNOWN,
    ImageFacts,
    Interpolation,
    check_output,
    check_source,
)
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.sample.image_header import probe

try:
    from nvidia.dali import Pipeline, fn, types
except ImportError as error:
    found = installed_dali()
    if found is not None:
        missing = ", ".join(found.missing) or "a package that it imports"
        raise ConfigError(
            f"decoder='dali': {found.package} is installed without {missing} ({error}); {found.advice}"
        ) from error
    raise ConfigError(
        "decoder='dali' needs NVIDIA DALI: pip install 'fuelrail[dali]' (CUDA 12) or 'fuelrail[dali-cu13]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.image_map import ImageMap

_LOG = logging.getLogger(__name__)

MAX_BATCH = 64
"""Images of one run; larger batches are several runs."""


HARDWARE_SHARE = 1.0
"""Part of a batch that goes to the hardware decoder.

With 1 every image that it takes is decoded by it. With less, an image's place among its neighbours decides whether the
hardware or the CUDA cores decode it; where the two differ by a grey level, pixels are not reproducible.
"""

_MIXED = "mixed"
_DECODING = {
    "adjust_orientation": False,  # calibrations speak of pixels as stored
    "jpeg_fancy_upsampling": True,  # as libjpeg does by default
}


class DaliDecoder:
    """Decodes with DALI on the CPU or a GPU; see `BatchDecoder` and `ImageDecoder` in the protocol.

    Each calling thread has its own pipelines, so that two threads overlap one's host work with the other's decoding.

    Args:
        device: ``"cpu"``, or the CUDA device that batches are decoded on and for.
        num_threads: of each pipeline, for what is decoded on the host.
        facts: of the images to come, where that is a GPU: memory for the largest is allocated once, and there is a
            hardware decoder if any image is baseline JPEG.
        hardware_share: see `HARDWARE_SHARE`. Pixels are reproducible with 1 and with 0 only.

    """

    name = "dali"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        num_threads: int = 2,
        facts: ImageFacts = UNKNOWN,
        hardware_share: float = HARDWARE_SHARE,
    ) -> None:
        self.device = torch.device(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._on_gpu = self.device.type == "cuda"
        self._num_threads, self._facts = num_threads, facts
        self._hardware_share = hardware_share if facts.baseline_share > 0.0 else 0.0
        self._local = _Pipelines()
        self._turbo = TurboDecoder()
        self.num_refused = 0
        """Images that DALI failed on and libjpeg-turbo then decoded."""
        self._reason = ""

    def new_output(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uninitialised uint8 memory on the device; see the protocol."""
        with torch.cuda.stream(self._local.stream(self.device)):
            return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: NDArray[np.uint8],
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode one image into ``out`` in host memory; see the protocol. Batches are what DALI is made for."""
        check_output(image_map, out, interpolation)
        batch = torch.from_numpy(out)[None]
        on_device = batch if self.device.type == "cpu" else self.new_output(tuple(batch.shape))
        (error,) = self.decode_batch([encoded], [image_map], on_device, interpolation)
        if error is not None:
            raise error
        if on_device is not batch:
            batch.copy_(on_device)

    def decode_batch(
        self,
        encoded: Sequence[Buffer | None],
        image_maps: Sequence[ImageMap],
        out: torch.Tensor,
        interpolation: Interpolation = "bilinear",
    ) -> list[ImageError | None]:
        """Decode a batch; see the protocol."""
        self._check(image_maps, out, interpolation)
        stream = self._local.stream(self.device)
        with torch.cuda.stream(stream):
            errors = self._decode_batch(encoded, image_maps, out, interpolation)
        if stream is not None:
            stream.synchronize()
        return errors

    def _decode_batch(
        self,
        encoded: Sequence[Buffer | None],
        image_maps: Sequence[ImageMap],
        out: torch.Tensor,
        interpolation: Interpolation,
    ) -> list[ImageError | None]:
        errors: list[ImageError | None] = [None] * len(encoded)
        jobs: list[Job] = []
        by_turbo: list[int] = []
        for at, (data, image_map) in enumerate(zip(encoded, image_maps, strict=True)):
            if data is None:
                out[at] = 0
                continue
            try:
                info = probe(data)
                check_source(info, image_map)
                if image_map.lens is not None:  # DALI's remap exists on the GPU only, and takes maps, not lenses
                    by_turbo.append(at)
                    continue
                job = make_job(at, data, info, image_map)
            except ImageError as error:
                errors[at] = error
                continue
            if job is None:
                out[at] = 0
            elif info.is_cmyk:  # of whose colours DALI has another idea
                by_turbo.append(at)
            else:
                jobs.append(job)
        refused: list[int] = []
        for is_aligned in (True, False):
            group = [job for job in jobs if job.is_aligned is is_aligned]
            for first in range(0, len(group), MAX_BATCH):
                refused += self._run_or_split(group[first : first + MAX_BATCH], image_maps, out, interpolation)
        for at in by_turbo + refused:
            picture, data = np.empty(tuple(out.shape[1:]), np.uint8), encoded[at]
            assert data is not None
            try:
                self._turbo.decode_into(data, image_maps[at], picture, interpolation)
            except ImageError as error:
                errors[at] = error
                continue
            out[at] = torch.from_numpy(picture).to(out.device)
        self._note_refused([at for at in refused if errors[at] is None])
        return errors

    def _note_refused(self, places: Sequence[int]) -> None:
        """Count images that only libjpeg-turbo could decode: if they are many, the GPU decodes nothing. Said once."""
        if places and self.num_refused == 0:
            _LOG.warning("DALI fails on images that libjpeg-turbo decodes; those are left to it: %s", self._reason)
        self.num_refused += len(places)

    def _check(self, image_maps: Sequence[ImageMap], out: torch.Tensor, interpolation: str) -> None:
        if interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation={interpolation!r} must be one of {', '.join(INTERPOLATIONS)}")
        sizes = {(3, *image_map.out_wh[::-1]) for image_map in image_maps}
        if out.dtype != torch.uint8 or out.device != self.device or sizes - {tuple(out.shape[1:])} or out.ndim != 4:
            raise ConfigError(
                f"out must be a uint8 tensor on {self.device} of shape [{len(image_maps)}, 3, height, width] "
                f"with the maps' output sizes {sorted(sizes)}, got {out.dtype} on {out.device} {tuple(out.shape)}"
            )

    def _run_or_split(
        self, jobs: Sequence[Job], image_maps: Sequence[ImageMap], out: torch.Tensor, interpolation: str
    ) -> list[int]:
        """Decode the jobs; return the places of those that DALI cannot decode. Each is judged alone in the end."""
        if self._run(jobs, out, interpolation):
            if not jobs[0].is_aligned:
                _black_out_unseen([job.at for job in jobs], image_maps, out)
            return []
        if len(jobs) == 1:
            return [jobs[0].at]
        half = len(jobs) // 2
        return [
            place
            for some in (jobs[:half], jobs[half:])
            for place in self._run_or_split(some, image_maps, out, interpolation)
        ]

    def _run(self, jobs: Sequence[Job], out: torch.Tensor, interpolation: str) -> bool:
        """Decode the jobs by one run of a pipeline. False, and nothing written, if it failed."""
        key = (interpolation, jobs[0].is_aligned, int(out.shape[3]), int(out.shape[2]))
        pipeline = self._local.pipelines.get(key)
        if pipeline is None:
            try:
                pipeline = self._local.pipelines[key] = self._build(*key)
            except RuntimeError as error:
                raise _no_pipeline(error) from error
        try:
            for name in ("encoded", "window", "roi", "size", *(() if jobs[0].is_aligned else ("matrix",))):
                pipeline.feed_input(name, [getattr(job, name) for job in jobs])
            # Complete when it returns, since it is given no stream: until then it reads the encoded images in place.
            (pictures,) = pipeline.run()
        except RuntimeError as error:
            self._reason = str(error)
            if "operator" not in self._reason:  # not an operator's complaint about its input, but the pipeline's own
                del self._local.pipelines[key]
            return False
        # The pipeline's own memory, valid until its next run.
        out[_places(jobs)] = torch.utils.dlpack.from_dlpack(pictures.as_tensor())
        if out.device.type == "cuda":
            torch.cuda.current_stream(out.device).synchronize()
        return True

    def _build(self, interpolation: str, is_aligned: bool, out_width: int, out_height: int) -> Pipeline:
        """Return a built pipeline: inputs as in `Job`, output uint8 (3, height, width) on the device."""
        kind = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}[interpolation]
        # DALI's default executor: after a failed run the next one works, and the memory of the failed one comes back.
        pipeline = Pipeline(
            batch_size=MAX_BATCH,
            num_threads=self._num_threads,
            device_id=self.device.index if self.device.type == "cuda" else None,
            prefetch_queue_depth=1,  # a run is of what was fed last
        )
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, no_copy=True)
            window = fn.external_source(name="window", dtype=types.INT32, ndim=1)
            roi = fn.external_source(name="roi", dtype=types.FLOAT, ndim=1)
            size = fn.external_source(name="size", dtype=types.FLOAT, ndim=1)
            start, end = roi[0:2], roi[2:4]
            if self._on_gpu:
                pictures = fn.decoders.image(encoded, **_DECODING, **self._gpu_options())
                start, end = start + window[0:2], end + window[0:2]
            else:
                pictures = fn.decoders.image_slice(
                    encoded, start=window[0:2], end=window[2:4], axis_names="HW", **_DECODING
                )
            pictures = fn.resize(pictures, roi_start=start, roi_end=end, size=size, interp_type=kind, antialias=True)
            if not is_aligned:
                matrix = fn.external_source(name="matrix", dtype=types.FLOAT, ndim=2)
                pictures = fn.warp_affine(
                    pictures, matrix=matrix, size=(out_height, out_width), interp_type=types.INTERP_LINEAR
                )
            pipeline.set_outputs(fn.transpose(pictures, perm=[2, 0, 1]))
        pipeline.build()
        return pipeline

    def _gpu_options(self) -> dict[str, Any]:
        return {
            "device": _MIXED,
            "affine": False,  # several pipelines and ranks would tie their threads to the same cores
            "hw_decoder_load": self._hardware_share,
            "preallocate_width_hint": self._facts.largest_wh[0],
            "preallocate_height_hint": self._facts.largest_wh[1],
        }


def _no_pipeline(error: RuntimeError) -> ConfigError:
    """Say why DALI cannot build a pipeline, and what to do."""
    found = installed_dali()
    if found is not None and found.missing:
        missing = ", ".join(found.missing)
        return ConfigError(f"decoder='dali': {found.package} is installed without {missing}; {found.advice}")
    reason = " ".join(str(error).split())[:500]
    return ConfigError(f"decoder='dali' cannot be used on this machine, take decoder='turbo'; DALI says: {reason}")


class _Pipelines(threading.local):
    """The calling thread's pipelines by (interpolation, aligned, output width, output height), and its CUDA stream."""

    def __init__(self) -> None:
        self.pipelines: dict[tuple[str, bool, int, int], Pipeline] = {}
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream to decode on; None on the CPU."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream


def _places(jobs: Sequence[Job]) -> slice | list[int]:
    """Where the jobs stand in the caller's batch; consecutive ones as a slice, which needs no index on the device."""
    first, last = jobs[0].at, jobs[-1].at
    return slice(first, last + 1) if last - first == len(jobs) - 1 else [job.at for job in jobs]


def _black_out_unseen(places: Sequence[int], image_maps: Sequence[ImageMap], out: torch.Tensor) -> None:
    """Set the pixels black that the maps let see nothing: one small copy to the device for all images."""
    limited = [(at, np.stack(pair)) for at in places if (pair := image_maps[at].visible_columns()) is not None]
    if not limited:
        return
    columns = torch.from_numpy(np.stack([pair for _, pair in limited])).to(out.device)  # [n, 2, height]
    x = torch.arange(out.shape[3], device=out.device)
    seen = (x >= columns[:, 0, :, None]) & (x < columns[:, 1, :, None])
    at = [place for place, _ in limited]
    out[at] = out[at] * seen[:, None]
