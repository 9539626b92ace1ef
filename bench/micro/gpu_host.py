"""Host work of GPU decoding: headers, splicing and geometry of a batch, and feeding it to DALI, a number an image.

``python -m fuelrail.bench.micro.gpu_host [--images FOLDER] [--out FILE]``. A batch is 16 samples of 6 cameras, as one
thread of a GPU's lanes gets it; a GPU is not needed. The run that takes what was fed decodes nothing and
is not timed. Without ``--images`` a picture with a photograph's statistics is encoded. *Restart rows* are the same
images with a restart marker at each row of MCUs (needs the program jpegtran). Needs NVIDIA DALI.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.decode import OUT_WH, load_images, with_restart_rows
from fuelrail.bench.report.files import publish_json
from fuelrail.loaders.decode.dali_jobs import inputs, prepare
from fuelrail.loaders.decode.jpeg import Scratch
from fuelrail.loaders.decode.native import load as load_native
from fuelrail.pipeline.transforms.image import ImageAugment
from support.cameras import SOURCE_WH, made_image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fuelrail.pipeline.transforms.image_map import ImageMap

NUM_IMAGES = 96
_EVALUATION = ImageAugment(height=OUT_WH[1], width=OUT_WH[0])
_TRAINING = ImageAugment(
    height=OUT_WH[1], width=OUT_WH[0], train=True, resize_range=(0.386, 0.55), rotate_deg=(-5.4, 5.4), flip_prob=0.5
)


class Times(msgspec.Struct, frozen=True):
    """Microseconds an image: by the clock and of the thread's CPU, medians over the rounds, and the best round.

    Other programs take memory bandwidth and cache from all rounds but the best.
    """

    clock_us: float
    cpu_us: float
    best_us: float


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was fed, and how long it took."""

    benchmark: str
    machine: MachineFacts
    source: str
    num_images: int
    mean_bytes: float
    has_native: bool
    num_rounds: int
    per_image: dict[str, Times]


def empty_graph(*, is_aligned: bool) -> Any:  # noqa: ANN401 - DALI's pipeline
    """Return a built pipeline that takes a run's inputs, and hands out the sizes of the images and the rest."""
    from nvidia.dali import Pipeline, fn, types

    kinds: dict[str, Any] = {"encoded": types.UINT8, "window": types.INT32, "box0": types.FLOAT}
    if not is_aligned:
        kinds["matrix0"] = types.FLOAT
    pipeline = Pipeline(batch_size=NUM_IMAGES, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        fed = {
            name: fn.external_source(
                name=name, dtype=kind, ndim=2 if name == "matrix0" else 1, no_copy=name == "encoded"
            )
            for name, kind in kinds.items()
        }
        pipeline.set_outputs(fed.pop("encoded").shape(), *fed.values())
    pipeline.build()
    return pipeline


def host_work(images: Sequence[bytes], maps: Sequence[ImageMap]) -> Callable[[], tuple[float, float]]:
    """Return the work of one batch, which returns its seconds by the clock and of its thread's CPU.

    Maps must be alike, so that it is one run.
    """
    native = load_native()
    scratch, library = Scratch(), None if isinstance(native, str) else native
    (is_aligned,) = {job.is_aligned for job in prepare(images, maps, scratch, library).jobs}
    pipeline = empty_graph(is_aligned=is_aligned)

    def work() -> tuple[float, float]:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        for name, values in inputs(prepare(images, maps, scratch, library).jobs, is_whole=True).items():
            pipeline.feed_input(name, values)
        took = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
        pipeline.run()
        return took

    return work


def measure(images: Sequence[bytes], num_rounds: int) -> dict[str, Times]:
    """Return times by kind of file and of map, in turns."""
    kinds = {"plain": [bytes(bytearray(images[at % len(images)])) for at in range(NUM_IMAGES)]}
    prepared = [spliceable for spliceable in map(with_restart_rows, images) if spliceable is not None]
    if prepared:
        kinds["restart rows"] = [bytes(bytearray(prepared[at % len(prepared)])) for at in range(NUM_IMAGES)]
    works = {}
    for name, augment in (("evaluation", _EVALUATION), ("training", _TRAINING)):
        maps = [augment.draw([SOURCE_WH], seed=0, epoch=0, sample=sample)[0] for sample in range(NUM_IMAGES)]
        works.update({f"{kind}, {name} maps": host_work(files, maps) for kind, files in kinds.items()})
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(num_rounds):
        for name, work in works.items():
            took[name].append(work())
    found = {}
    for name, values in took.items():
        clock_us, cpu_us = 1e6 / NUM_IMAGES * np.array(values).T
        found[name] = Times(float(np.median(clock_us)), float(np.median(cpu_us)), float(clock_us.min()))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times and, with ``--out``, write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.gpu_host")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="real 1600x900 JPEG files instead of a made one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="call everything a few times, to see that it runs")
    options = parser.parse_args(argv)
    images = load_images(options.images) if options.images else [made_image()]
    num_rounds = 3 if options.quick else 101
    report = HostReport(
        benchmark="gpu_host",
        machine=machine_facts(),
        source="real camera images" if options.images else "a made image",
        num_images=len(images),
        mean_bytes=float(np.mean([len(encoded) for encoded in images])),
        has_native=not isinstance(load_native(), str),
        num_rounds=num_rounds,
        per_image=measure(images, num_rounds),
    )
    for name, times in report.per_image.items():
        print(f"{times.clock_us:6.1f} us an image, {times.cpu_us:.1f} of CPU, {times.best_us:.1f} at best  {name}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
