"""GPU checks of training: the occupancy of the GPU, and waits for the device within a step.

On the CPU the same code runs as its twin: emulated accelerator, decoding on the CPU, and the bare libjpeg-turbo as what
decoding is compared with; there it shows that the check works, and says nothing of a GPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import simplejpeg
import torch

from fuelrail.bench.gpu.rates import CheckFailed, train
from fuelrail.bench.micro.decode import SOURCE_WH
from fuelrail.bench.micro.loader_data import write_cameras
from fuelrail.bench.studies.loader.stages import LoaderChoice, measure_stages, record_stages
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.loaders import DataLoader, Transforms
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.decode.protocol import BatchDecoder
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.format.dataset import open_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fuelrail.bench.gpu.rates import Bench
    from fuelrail.bench.studies.train.report import Report

MIN_OCCUPANCY = 0.98
_NUM_SYNC_STEPS = 6
_BARE_BATCH = 64
# More than one run of DALI's takes.
_NUM_COMPARED, _MIN_PSNR_DB = 96, 35.0
_ONE_CAMERA = ("cam_front",)


def decoder_of(bench: Bench) -> str:
    """DALI on a GPU; where it isn't installed, and on the CPU, libjpeg-turbo."""
    return "dali" if bench.on_gpu and importlib.util.find_spec("nvidia.dali") is not None else "turbo"


def no_wait_in_a_step(bench: Bench) -> dict[str, Any]:
    """Between getting a batch and the optimiser's end nothing makes the host wait for the device.

    On a GPU torch raises at the first operation that would; on the CPU the steps merely run.
    """
    model = build_model(MODELS["base" if bench.on_gpu else "light"]).to(bench.device)
    optimiser = torch.optim.AdamW(model.parameters())
    device = bench.device if bench.on_gpu else None
    # Torch watches all threads, and the loader's own must wait for their copies: no loader runs beside the steps.
    with DataLoader(bench.dataset, 2, device=device, transforms=Transforms(decoder=decoder_of(bench))) as loader:
        batches = list(itertools.islice(loader, _NUM_SYNC_STEPS))
    for number, batch in enumerate(batches):
        # The first steps may: kernels are chosen, memory is reserved.
        strict = bench.on_gpu and number >= 2
        if strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            inputs = tuple(tensor.to(bench.device, non_blocking=True) for tensor in model.inputs(batch))
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.on_gpu):
                loss = model(*inputs)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        except RuntimeError as error:
            raise CheckFailed(f"a step waits for the device: {error}") from error
        finally:
            if strict:
                torch.cuda.set_sync_debug_mode("default")
    return {"steps": len(batches), "watched": bench.on_gpu}


def decoders_agree(bench: Bench) -> dict[str, Any]:
    """The decoder in use delivers the pictures that another one does, and leaves none of them to libjpeg-turbo."""
    dataset = open_dataset(_cameras(bench, "cameras", None))
    decoder = make_decoder(decoder_of(bench), str(bench.device) if bench.on_gpu else None)
    reference = make_decoder("turbo" if decoder.name == "dali" else "pillow")
    images = [bytes(image) for image in SampleReader(dataset).sample(0).images.values()]
    count = len(images)
    images = list(itertools.islice(itertools.cycle(images), _NUM_COMPARED))
    maps = [
        image_map
        for sample in range(-(-_NUM_COMPARED // count))
        for image_map in Transforms().image.draw([SOURCE_WH] * count, seed=7, epoch=0, sample=sample)
    ][:_NUM_COMPARED]
    shape = (_NUM_COMPARED, 3, Transforms().image.height, Transforms().image.width)
    if isinstance(decoder, BatchDecoder):
        out = decoder.new_output(shape)
        errors = [error for error in decoder.decode_batch(images, maps, out) if error is not None]
        if errors:
            raise CheckFailed(f"{len(errors)} of {_NUM_COMPARED} images cannot be decoded: {errors[0]}")
        found = out.cpu().numpy()
    else:
        found = np.empty(shape, np.uint8)
        for image, image_map, picture in zip(images, maps, found, strict=True):
            decoder.decode_into(image, image_map, picture)
    psnr_db = math.inf
    expected = np.empty(shape[1:], np.uint8)
    for image, image_map, picture in zip(images, maps, found, strict=True):
        reference.decode_into(image, image_map, expected)
        error = float(np.mean((picture.astype(np.float32) - expected) ** 2))
        psnr_db = min(psnr_db, 10 * math.log10(255**2 / error) if error else math.inf)
    refused = getattr(decoder, "num_refused", 0)
    facts = {
        "decoder": decoder.name,
        "reference": reference.name,
        "images": _NUM_COMPARED,
        "lowest_psnr_db": round(psnr_db, 1),
        "left_to_turbo": refused,
    }
    if refused or psnr_db < _MIN_PSNR_DB:
        raise CheckFailed(f"the pictures are not as they must be (at least {_MIN_PSNR_DB:g} dB, none refused): {facts}")
    return facts


def decoding_rate(bench: Bench) -> dict[str, Any]:
    """The loader's decode stage against the bare decoder on the same images: images/s, and one's share of the other."""
    dataset = open_dataset(_cameras(bench, "cameras", None))
    decoder = decoder_of(bench)
    choice = LoaderChoice(
        split="train", batch_size=8, num_workers=2, decoder=decoder, verify=True, points=False, seed=0
    )
    device = str(bench.device) if bench.on_gpu else None
    recorded = record_stages(dataset, Transforms().image, choice, num_batches=2, device=device)
    seconds = 3.0 if bench.on_gpu else 0.1
    rate = next(
        rate.samples_per_s
        for rate in measure_stages([entry for entry in recorded if entry.stage.name == "decode"], 8, seconds)
    )
    ours = rate * len(dataset.manifest.cameras)
    reader = SampleReader(dataset)
    encoded = [bytes(image) for row in range(len(dataset.index)) for image in reader.sample(row).images.values()]
    images = list(itertools.islice(itertools.cycle(encoded), _BARE_BATCH))
    bare = _bare_dali(images, bench, seconds) if decoder == "dali" else _bare_turbo(images, seconds)
    return {
        "decoder": decoder,
        "images_per_s": round(ours, 1),
        "bare": "DALI, mixed, full size" if decoder == "dali" else "libjpeg-turbo, full size, 2 threads",
        "bare_images_per_s": round(bare, 1),
        "share_of_bare": round(ours / bare, 3),
    }


def _bare_turbo(images: list[bytes], seconds: float) -> float:
    started_s = time.perf_counter()
    numbers = itertools.count()

    def work() -> int:
        done = 0
        while done == 0 or time.perf_counter() - started_s < seconds:
            simplejpeg.decode_jpeg(images[next(numbers) % len(images)])
            done += 1
        return done

    with ThreadPoolExecutor(2) as pool:
        total = sum(future.result() for future in [pool.submit(work) for _ in range(2)])
    return total / (time.perf_counter() - started_s)


def _bare_dali(images: list[bytes], bench: Bench, seconds: float) -> float:
    """DALI's decoder with nothing behind it, as fast as it goes."""
    from nvidia.dali import Pipeline, fn, types

    arrays = [np.frombuffer(image, np.uint8) for image in images]
    pipeline = Pipeline(_BARE_BATCH, 4, bench.device.index or 0, prefetch_queue_depth=2)
    with pipeline:
        encoded = fn.external_source(source=lambda: arrays, dtype=types.UINT8, ndim=1)
        pipeline.set_outputs(fn.decoders.image(encoded, device="mixed", output_type=types.RGB))
    pipeline.build()
    for _ in range(3):
        pipeline.run()
    torch.cuda.synchronize(bench.device)
    started_s, runs = time.perf_counter(), 0
    while time.perf_counter() - started_s < seconds:
        pipeline.run()
        runs += 1
    torch.cuda.synchronize(bench.device)
    return runs * _BARE_BATCH / (time.perf_counter() - started_s)


def training_runs(bench: Bench) -> dict[str, Any]:
    """``fuelrail bench train`` on all GPUs (one emulated rank on the CPU): it ends, it learns, the ranks agree."""
    num_ranks = torch.cuda.device_count() if bench.on_gpu else 1
    steps, warmup = (60, 10) if bench.on_gpu else (12, 2)
    accelerator = "cuda" if bench.on_gpu else "emulated:resnet50-224-h100"
    out = bench.work / "bench-train"
    report = train(
        bench.dataset, out, steps=steps, warmup=warmup, ranks=num_ranks, batch_size=2, accelerator=accelerator
    )
    assert report.figures is not None, "a run of enough steps has figures"
    losses = [math.inf if loss is None else loss for loss in report.series[0].loss]
    if not sum(losses[-5:]) < sum(losses[:5]):
        raise CheckFailed(f"the loss did not fall: first {losses[:5]}, last {losses[-5:]}")
    if report.ranks_disagree:
        raise CheckFailed("the ranks ended with different weights")
    return {
        "ranks": num_ranks,
        "all_reduce_by": report.ranks[0].backend,
        "occupancy": round(report.figures.occupancy.mean, 4),
        "samples_per_s": round(report.figures.throughput.samples_per_s, 2),
        "images_per_s": round(report.figures.throughput.images_per_s, 2),
        "phases_mean_ms": {phase.phase: round(phase.time.mean_ms, 3) for phase in report.figures.phases},
        "peak_device_bytes": report.ranks[0].peak_device_bytes,
        "warnings": report.warnings,
    }


def resnet_is_fed(bench: Bench) -> dict[str, Any]:
    """ResNet-50 on one camera, in bf16, from shards on local disk: the GPU computes at least 98 % of the time."""
    model = "resnet50" if bench.on_gpu else "light"
    return _fed(bench, _cameras(bench, "one-camera", _ONE_CAMERA), model, batch_size=256 if bench.on_gpu else 1)


def cameras_are_fed(bench: Bench) -> dict[str, Any]:
    """The multi-camera model, in bf16: the GPU computes at least 98 % of the time."""
    model = "base" if bench.on_gpu else "light"
    return _fed(bench, _cameras(bench, "cameras", None), model, batch_size=16 if bench.on_gpu else 1)


def _fed(bench: Bench, dataset: Path, model: str, *, batch_size: int) -> dict[str, Any]:
    out = bench.work / f"fed-{dataset.name}"
    steps, warmup = (120, 20) if bench.on_gpu else (10, 2)
    accelerator = "cuda" if bench.on_gpu else "emulated:bevdet-r50-704x256-h100"
    options: dict[str, object] = {} if bench.on_gpu else {"workers": 1}
    report = train(
        dataset, out, steps=steps, warmup=warmup, batch_size=batch_size, model=model, decoder=decoder_of(bench),
        accelerator=accelerator, **options,
    )  # fmt: skip
    facts = dict(_facts(report))
    # An emulated device says nothing of a real one.
    if bench.on_gpu and facts["occupancy"] < MIN_OCCUPANCY:
        raise CheckFailed(f"the GPU computed {facts['occupancy']:.1%} of the time, not {MIN_OCCUPANCY:.0%}: {facts}")
    return facts


def _facts(report: Report) -> Iterator[tuple[str, Any]]:
    figures = report.figures
    assert figures is not None, "a run of enough steps has figures"
    phases = {phase.phase: phase for phase in figures.phases}
    copy = phases["host_to_device"].time
    yield "occupancy", round(figures.occupancy.mean, 4)
    yield "images_per_s", round(figures.throughput.images_per_s, 1)
    yield "samples_per_s", round(figures.throughput.samples_per_s, 1)
    yield "mfu", None if figures.mfu is None else round(figures.mfu, 4)
    yield "launch_share", round(figures.launch_share, 4)
    yield "host_to_device_ms_p50_p99", [round(copy.p50_ms, 3), round(copy.p99_ms, 3)]
    yield "data_wait_ms_p50_p99", [round(phases["data_wait"].time.p50_ms, 3), round(phases["data_wait"].time.p99_ms, 3)]
    yield "decode_stage_busy", next((round(stage.busy, 4) for stage in figures.stages if stage.name == "decode"), None)
    yield "transfer_stage_busy", next((round(s.busy, 4) for s in figures.stages if s.name == "transfer"), None)
    yield "step_ms_p50_p99", [round(figures.step_time.p50_ms, 3), round(figures.step_time.p99_ms, 3)]
    for gpu in report.gpus or []:
        yield f"nvml_gpu_{gpu.index}", {"kernels": gpu.kernels, "jpeg": gpu.jpeg, "memory_bytes": gpu.peak_memory_bytes}
    yield "warnings", report.warnings


def _cameras(bench: Bench, name: str, channels: tuple[str, ...] | None) -> Path:
    """Shards of 1600x900 images, made once."""
    folder = bench.work / name
    if not folder.exists():
        count = 512 if bench.on_gpu else 16
        if channels is None:
            write_cameras(folder, count)
        else:
            write_cameras(folder, count * 6, channels=channels)
    return folder
