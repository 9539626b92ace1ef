"""NVIDIA DALI: whole batches of images of any sizes through one graph, on the CPU or on a GPU.

Decode, resize the exact (fractional) box that is seen with antialiasing, apply one affine transform
where the map turns rows or leaves the image, write planes. Every parameter is per image and comes
from the `ImageMap`, so the graph draws nothing. On a GPU the JPEG decoding is DALI's ``mixed`` one,
with the hardware decoder where there is one, and decodes whole images: nvJPEG before 13.2 refuses a
region of a subsampled image, which DALI then decodes on the CPU, and nvImageCodec 0.9 is reported
to crash on regions. On the CPU only the region is decoded, in full resolution, which is slower than
the turbo backend.

A bad image makes the whole run fail. So headers are checked first, and if a run fails because of an
image all the same, the batch is halved until the bad images are alone. Those go to the turbo
backend, which decodes them or says what is wrong: what becomes of an image never depends on its
neighbours. Any other failure of a run is raised, as is one on an image that is known to be good.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fuelrail.loaders.decode import dali_install
from fuelrail.loaders.decode.dali_jobs import (
    Job,
    Key,
    PerThread,
    ThreadState,
    black_out_unseen,
    inputs,
    known_good_job,
    lens_views,
    prepare,
    psnr_of_means,
    stretches,
)
from fuelrail.loaders.decode.pillow import PillowDecoder
from fuelrail.loaders.decode.protocol import (
    INTERPOLATIONS,
    MIN_LANES,
    UNKNOWN,
    DaliOptions,
    ImageFacts,
    Interpolation,
    check_output,
)
from fuelrail.loaders.decode.turbo import TurboDecoder
from fuelrail.pipeline.errors import ConfigError, DecoderError, ImageError
from fuelrail.pipeline.native import load as load_native

try:
    from nvidia.dali import Pipeline, backend, fn, types
except ImportError as error:
    installed = dali_install.installed_dali()
    if installed is None:
        raise ConfigError(
            f"decoder='dali' needs NVIDIA DALI; {dali_install.what_to_install()}"
        ) from error
    problem = (
        installed.problem or f"{installed.package} is installed without a package that it imports"
    )
    raise ConfigError(f"decoder='dali': {problem} ({error}); {installed.advice}") from error

from collections.abc import Sequence

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.transforms.image_map import ImageMap

_LOG = logging.getLogger(__name__)

MAX_BATCH = 140
"""Images of one run; larger batches are several runs.

A multiple of 4, 5 and 7, the numbers of JPEG engines or engine cores of L4, A100 and H100: the last
round of a run then leaves none of them idle.
"""

_GPU_THREADS = 4
"""Threads of a pipeline whose images the hardware decodes: they only copy encoded images."""
MIN_PSNR_DB = 30.0
"""Least agreement of a compared image, over means of 4 x 4 pixels.

Means, because two right decoders filter noise differently: 18 dB on white noise, where the means
agree to 31 dB.
"""

DEFAULT_OPTIONS = DaliOptions()

_MIXED = "mixed"
_DECODING = {
    "adjust_orientation": False,  # calibrations speak of pixels as stored
    "jpeg_fancy_upsampling": True,  # as libjpeg does by default
}

_OPEN: weakref.WeakSet[DaliDecoder] = weakref.WeakSet()


class DaliDecoder:
    """Decodes with DALI on the CPU or a GPU; see `BatchDecoder` and `ImageDecoder` in the protocol.

    Each calling thread has its own pipelines, so that two threads overlap one's host work with the
    other's decoding.

    Args:
        device: ``"cpu"``, or the CUDA device that batches are decoded on and for.
        num_threads: of each pipeline, for what is decoded on the host.
        facts: of the images to come, where that is a GPU: memory for the largest is allocated once,
            and there is a hardware decoder if any image is baseline JPEG.
        options: see `DaliOptions`.

    """

    name = "dali"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        num_threads: int = 2,
        facts: ImageFacts = UNKNOWN,
        options: DaliOptions = DEFAULT_OPTIONS,
    ) -> None:
        dali_package = dali_install.installed_dali()
        if dali_package is not None and dali_package.problem:
            raise ConfigError(f"decoder='dali': {dali_package.problem}; {dali_package.advice}")
        self.device = torch.device(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._on_gpu = self.device.type == "cuda"
        self._facts = facts
        self._options = options
        self._max_run = min(MAX_BATCH, facts.batch_images or MAX_BATCH)
        self._hardware_share = options.hardware_share if facts.baseline_share > 0.0 else 0.0
        self._check_every = options.check_every if self._on_gpu else 0
        self._num_checkable = 0
        self._threads: weakref.WeakSet[ThreadState] = weakref.WeakSet()
        self._threads_lock = threading.Lock()
        self._local = PerThread(self._threads, self._threads_lock)
        self._turbo = TurboDecoder()
        self._exact = PillowDecoder()
        native = load_native()
        self._native = None if isinstance(native, str) else native
        self.num_refused = 0
        """Images that DALI failed on and libjpeg-turbo then decoded."""
        self._reason = ""  # DALI's, of the last image that it failed on
        self._has_warned_of_lens = False
        _OPEN.add(self)
        self._num_threads = num_threads  # of each pipeline
        if not self._on_gpu:
            return
        is_hardware = self._hardware_share > 0.0
        if torch.cuda.is_available():
            engine = dali_install.gpu_engine(self.device.index)
            if engine.name == "nothing":
                raise ConfigError(
                    f"decoder='dali' on {self.device}: {engine.reason}; {engine.advice}"
                )
            if engine.name != "hardware" and engine.advice:
                where = "CPU" if engine.name == "CPU" else "GPU's CUDA cores"
                _LOG.warning(
                    "decoder='dali' on %s decodes on the %s: %s; %s",
                    self.device,
                    where,
                    engine.reason,
                    engine.advice,
                )
            is_hardware &= engine.name == "hardware"
        if is_hardware:
            self._num_threads = min(num_threads, _GPU_THREADS)
        else:
            # Each thread decodes the Huffman code of images, so the lanes share all CPUs of the
            # rank.
            self._num_threads = max(1, num_threads // MIN_LANES)

    def close(self) -> None:
        """Drop the pipelines of all threads and give DALI's unused memory back; see the
        protocol.
        """
        with self._threads_lock:
            states = list(self._threads)
        if any(state.pipelines for state in states):
            for state in states:
                state.pipelines.clear()
            backend.ReleaseUnusedMemory()

    def new_output(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uninitialised uint8 memory on the device; see the protocol.

        Raises DecoderError if there is none.
        """
        try:
            with torch.cuda.stream(self._local.state.stream(self.device)):
                return torch.empty(shape, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise DecoderError(dali_install.explain_failure(str(error))) from error

    def decode_into(
        self,
        encoded: Buffer,
        image_map: ImageMap,
        out: U8,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        """Decode one image into ``out`` in host memory; see the protocol.

        Batches are what DALI is made for.
        """
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
        if interpolation not in INTERPOLATIONS:
            raise ConfigError(
                f"interpolation={interpolation!r} must be one of {', '.join(INTERPOLATIONS)}"
            )
        sizes = {(3, *image_map.out_wh[::-1]) for image_map in image_maps}
        is_bytes = out.dtype == torch.uint8 and out.device == self.device
        if not is_bytes or out.ndim != 4 or sizes - {tuple(out.shape[1:])}:
            raise ConfigError(
                f"out must be a uint8 tensor on {self.device} of shape [{len(image_maps)}, "
                f"3, height, width] with the maps' output sizes {sorted(sizes)}, got "
                f"{out.dtype} on {out.device} {tuple(out.shape)}"
            )
        stream = self._local.state.stream(self.device)
        with torch.cuda.stream(stream):
            try:
                return self._decode_batch(encoded, image_maps, out, interpolation)
            finally:
                self._local.state.wait()

    def _decode_batch(
        self,
        encoded: Sequence[Buffer | None],
        image_maps: Sequence[ImageMap],
        out: torch.Tensor,
        interpolation: Interpolation,
    ) -> list[ImageError | None]:
        prepared = prepare(encoded, image_maps, self._local.state.scratch, self._native)
        for index in prepared.black:
            out[index] = 0
        if prepared.by_turbo and self._on_gpu and not self._has_warned_of_lens:
            self._has_warned_of_lens = True
            _LOG.warning(
                (
                    "decoder='dali' on %s decodes images with a lens (undistort) or in CMYK on "
                    "the CPU, by libjpeg-turbo"
                ),
                self.device,
            )
        refused: list[int] = []
        for is_aligned, num_views in product((True, False), (1, 2)):
            group = [
                job
                for job in prepared.jobs
                if job.is_aligned is is_aligned and len(job.views) == num_views
            ]
            size = -(-self._max_run // num_views)
            for first in range(0, len(group), size):
                refused += self._run_or_split(
                    group[first : first + size], image_maps, out, interpolation
                )
        for places in lens_views(prepared.by_turbo + refused, encoded, image_maps):
            pictures = np.empty((len(places), *out.shape[1:]), np.uint8)
            data = encoded[places[0]]
            assert data is not None
            try:
                if len(places) == 1:
                    self._turbo.decode_into(data, image_maps[places[0]], pictures[0], interpolation)
                else:
                    self._turbo.decode_views(
                        data,
                        [image_maps[index] for index in places],
                        list(pictures),
                        interpolation,
                    )
            except ImageError as error:
                prepared.errors.update(dict.fromkeys(places, error))
                continue
            for index, picture in zip(places, pictures, strict=True):
                out[index] = torch.from_numpy(picture).to(out.device)
        for index, earlier in prepared.copies:
            if earlier in prepared.errors:
                prepared.errors[index] = prepared.errors[earlier]
            else:
                out[index] = out[earlier]
        # Only libjpeg-turbo could decode these: if they are many, the GPU decodes nothing.
        num_refused = sum(index not in prepared.errors for index in refused)
        if num_refused and self.num_refused == 0:  # said once
            _LOG.warning(
                "DALI fails on images that libjpeg-turbo decodes; those are left to it: %s",
                dali_install.short(self._reason),
            )
        self.num_refused += num_refused
        if self._check_every:
            self._local.state.wait()
            good = []
            for job in prepared.jobs:
                good += [view.place for view in job.views if view.place not in refused]
            self._compare_some(
                good,
                encoded=encoded,
                image_maps=image_maps,
                out=out,
                interpolation=interpolation,
            )
        return [prepared.errors.get(index) for index in range(len(encoded))]

    def _compare_some(
        self,
        places: Sequence[int],
        encoded: Sequence[Buffer | None],
        image_maps: Sequence[ImageMap],
        out: torch.Tensor,
        interpolation: Interpolation,
    ) -> None:
        """Compare one decoded image in `check_every` with a full decode; raises DecoderError below
        `MIN_PSNR_DB`.

        The reference decodes at full size as DALI does: libjpeg-turbo's at half size differs by
        more than that at the edges of hard-edged colour blocks.
        """
        first = -self._num_checkable % self._check_every
        # Two threads may count the same images: that changes which are compared.
        self._num_checkable += len(places)
        for index in places[first :: self._check_every]:
            expected = np.empty(tuple(out.shape[1:]), np.uint8)
            data = encoded[index]
            assert data is not None
            try:
                self._exact.decode_into(data, image_maps[index], expected, interpolation)
            except ImageError:
                # Damaged data, at which DALI does not stop: the shard's digests find that.
                continue
            psnr_db = psnr_of_means(out[index].cpu(), torch.from_numpy(expected))
            if psnr_db < MIN_PSNR_DB:
                raise DecoderError(
                    f"decoder='dali' on {self.device} returned wrong pixels without an "
                    f"error: image {index} of a batch of {len(encoded)} agrees with "
                    f"Pillow's to {psnr_db:.1f} dB, and at least {MIN_PSNR_DB:g} dB is "
                    "allowed; take decoder='turbo', or another version than "
                    f"{dali_install.installed_dali()}"
                )

    def _run_or_split(
        self,
        jobs: Sequence[Job],
        image_maps: Sequence[ImageMap],
        out: torch.Tensor,
        interpolation: str,
    ) -> list[int]:
        """Decode the jobs; return the places of the images that DALI cannot decode, each tried
        alone in the end.
        """
        if self._run(jobs, out, interpolation):
            if not jobs[0].is_aligned:
                black_out_unseen(
                    [view for job in jobs for view in job.views],
                    image_maps,
                    out,
                )
            return []
        if len(jobs) == 1:
            # After a CUDA error every image is reported as bad.
            self._run_known_good(Key.from_jobs(jobs, out, interpolation), 1)
            return [view.place for view in jobs[0].views]
        half = len(jobs) // 2
        first = self._run_or_split(jobs[:half], image_maps, out, interpolation)
        return first + self._run_or_split(jobs[half:], image_maps, out, interpolation)

    def _run(
        self,
        jobs: Sequence[Job],
        out: torch.Tensor,
        interpolation: str,
    ) -> bool:
        """Decode the jobs by one run of a pipeline. False, and nothing written, if it failed."""
        key = Key.from_jobs(jobs, out, interpolation)
        try:
            outputs = self._run_pipeline(key, jobs)
        except RuntimeError as error:
            self._reason = str(error)
            if not dali_install.is_about_an_image(self._reason):
                self._local.state.pipelines.pop(key, None)
                raise DecoderError(dali_install.explain_failure(self._reason)) from error
            return False
        # Copied, for a thousandth of the decoding's time: `record_stream`, ours as well as a
        # trainer's, skips memory that torch's allocator did not make. So nothing would keep it from
        # the next run while a kernel still reads it.
        for number, pictures in enumerate(outputs):
            decoded = torch.utils.dlpack.from_dlpack(pictures.as_tensor())
            for where, part in stretches([job.views[number] for job in jobs]):
                out[where] = decoded[part]
            self._local.state.hold(decoded)
        return True

    def _run_pipeline(self, key: Key, jobs: Sequence[Job]) -> Any:
        """Return one run's outputs, one for each view, complete, of this thread's pipeline; raises
        RuntimeError.

        Keep runs host-synchronous and one deep: nvJPEG's batched hardware decoding on H100 writes
        its output when it is called, ahead of the work already queued on its stream, and events on
        the device do not help (torchcodec PR 1634). With an asynchronous run, or a second one
        queued, it would overwrite pixels that are still read. So lanes decode at the same time,
        each in a thread and pipelines of its own, and outputs are held until they are copied.
        """
        pipelines = self._local.state.pipelines
        if key not in pipelines:
            try:
                pipelines[key] = self._build(*key)
            except RuntimeError as error:
                raise ConfigError(dali_install.explain_failure(str(error))) from error
            if self._on_gpu:
                # nvImageCodec computes from the first batch how many images of every later one go
                # to the hardware.
                try:
                    self._run_known_good(key, -(-self._max_run // key.num_views))
                except DecoderError:
                    pipelines.pop(key, None)
                    raise
        pipeline = pipelines[key]
        try:
            for name, values in inputs(jobs, is_whole=self._on_gpu).items():
                pipeline.feed_input(name, values)
            # Complete when it returns, since it is given no stream: until then it reads the encoded
            # images in place.
            outputs = pipeline.run()
        except RuntimeError as error:
            # Not an operator's complaint about its input, but the pipeline's own.
            if "operator" not in str(error):
                pipelines.pop(key, None)
            raise
        return outputs

    def _run_known_good(self, key: Key, count: int) -> None:
        """Decode ``count`` images that are known to be good; raises DecoderError if that fails."""
        job = known_good_job(self._facts.largest_wh, key)
        try:
            self._run_pipeline(key, [job] * count)
        except RuntimeError as error:
            raise DecoderError(dali_install.explain_failure(str(error))) from error

    def _build(
        self,
        interpolation: str,
        is_aligned: bool,
        width: int,
        height: int,
        num_views: int = 1,
    ) -> Pipeline:
        """Return a built pipeline: inputs as in `Job`, outputs uint8 (3, height, width) on the
        device, one a view.
        """
        kind = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}[interpolation]
        # DALI's default executor: after a failed run the next one works, and the memory of the
        # failed one comes back.
        pipeline = Pipeline(
            batch_size=self._max_run,
            num_threads=self._num_threads,
            device_id=self.device.index if self.device.type == "cuda" else None,
            prefetch_queue_depth=1,  # a run is of what was fed last
        )
        with pipeline:
            encoded = fn.external_source(
                name="encoded",
                dtype=types.UINT8,
                ndim=1,
                no_copy=True,
            )
            window = fn.external_source(
                name="window",
                dtype=types.INT32,
                ndim=1,
            )
            if self._on_gpu:
                decoded = fn.decoders.image(encoded, **_DECODING, **self._gpu_options())
            else:
                decoded = fn.decoders.image_slice(
                    encoded,
                    start=window[0:2],
                    end=window[2:4],
                    axis_names="HW",
                    **_DECODING,
                )
            outputs = []
            for number in range(num_views):
                box = fn.external_source(
                    name=f"box{number}",
                    dtype=types.FLOAT,
                    ndim=1,
                )
                start = box[0:2]
                end = box[2:4]
                size = box[4:6]
                image = decoded
                view_window = window
                if num_views > 1:
                    view_window = fn.external_source(
                        name=f"window{number}",
                        dtype=types.INT32,
                        ndim=1,
                    )
                if self._on_gpu:
                    start = start + view_window[0:2]
                    end = end + view_window[0:2]
                elif num_views > 1:
                    first = view_window[0:2] - window[0:2]
                    last = view_window[2:4] - window[0:2]
                    image = fn.slice(
                        image,
                        start=first,
                        end=last,
                        axis_names="HW",
                    )
                image = fn.resize(
                    image,
                    roi_start=start,
                    roi_end=end,
                    size=size,
                    interp_type=kind,
                    antialias=True,
                )
                if not is_aligned:
                    matrix = fn.external_source(
                        name=f"matrix{number}",
                        dtype=types.FLOAT,
                        ndim=2,
                    )
                    image = fn.warp_affine(
                        image,
                        matrix=matrix,
                        size=(height, width),
                        interp_type=types.INTERP_LINEAR,
                    )
                outputs.append(fn.transpose(image, perm=[2, 0, 1]))
            pipeline.set_outputs(*outputs)
        pipeline.build()
        return pipeline

    def _gpu_options(self) -> dict[str, Any]:
        width, height = self._facts.largest_wh
        options: dict[str, Any] = {
            "device": _MIXED,
            # several pipelines and ranks would tie their threads to the same cores
            "affine": False,
            "hw_decoder_load": self._hardware_share,
            "preallocate_width_hint": width,
            "preallocate_height_hint": height,
        }
        if width and height:
            # Each thread takes this of the device and twice of pinned memory: room for 3
            # coefficients of 2 bytes a pixel, in place of DALI's 16 and 8 MiB for an image of any
            # size.
            options |= dict.fromkeys(
                ("device_memory_padding", "host_memory_padding"),
                6 * width * height,
            )
        return options


@atexit.register
def _close_all() -> None:
    """Drop all pipelines while CUDA still works: in the interpreter's own clean-up DALI aborts
    (DALI issue 6166).
    """
    for decoder in list(_OPEN):
        decoder.close()
