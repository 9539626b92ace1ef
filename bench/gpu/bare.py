"""GPU checks of the bare decoder: its first runs in a process of their own, its best rate, and our share of it.

``python -m fuelrail.bench.gpu.bare GRAPH DEVICE`` runs one graph and prints its facts as JSON. The check starts it as
a process, because a fault of the decoder's may end the process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fuelrail.bench.gpu.base import Bench, CheckFailed, jpeg_engines, require_dali
from fuelrail.bench.gpu.images import cameras, jpeg
from fuelrail.bench.measure.nvml import NvmlWatch
from fuelrail.bench.studies.loader.stages import LoaderChoice, measure_stages, record_stages
from fuelrail.loaders import Transforms
from fuelrail.pipeline.format.dataset import open_dataset

if TYPE_CHECKING:
    from collections.abc import Sequence

GRAPHS = {"image": "whole images, resized as the loader does", "image_slice": "regions, which the loader avoids"}
_LOADS = (0.0, 0.12, 0.3, 0.65, 1.0)
_BATCHES = (64, 126, 252, 504)
_NUM_PICTURES = 8
_MIN_SHARE = 0.95
_TIMEOUT_S = 120.0


def first_runs(bench: Bench, facts: dict[str, Any]) -> None:
    """Each graph runs for the first time in a process of its own; the one that the loader uses must live."""
    require_dali()
    for graph in GRAPHS:
        command = [sys.executable, "-m", "fuelrail.bench.gpu.bare", graph, str(bench.device)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            facts[graph] = {"ended": f"did not end in {_TIMEOUT_S:.0f} s"}
            continue
        if done.returncode == 0:
            facts[graph] = json.loads(done.stdout.splitlines()[-1])
        else:
            how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
            facts[graph] = {"ended": f"{how}: {done.stderr.strip()[-500:]}"}
    problem = facts["image"].get("ended")
    if problem:
        raise CheckFailed(f"the graph that the loader uses ended in {problem}")
    if bench.on_gpu and not facts["image"]["jpeg_engines_busy"]:
        raise CheckFailed(f"the JPEG engines were idle in it ({facts['image']['nvml']}): CUDA cores or CPUs decoded")


def share_of_the_bare_decoder(bench: Bench, facts: dict[str, Any]) -> None:
    """The loader's decode stage reaches 95 % of the decoder alone where all goes to the engines; the best for both.

    Bare is nvImageCodec's decoder inside DALI with nothing behind it, whole images, over share and batch size. Share 1
    costs about no CPU; other shares use the node's CPUs as well.
    """
    require_dali()
    seconds = bench.pick(1.0, 0.05)
    loads, batches = bench.pick((_LOADS, _BATCHES), ((1.0,), (8,)))
    plain = [jpeg("plain", number) for number in range(bench.pick(_NUM_PICTURES, 2))]
    bare: dict[str, dict[str, float]] = {}
    facts["bare_images_per_s"] = bare
    with jpeg_engines(bench, "dali", facts, "jpeg_engines_busy_bare"):
        for load in sorted(loads, reverse=True):
            for batch in batches:
                bare.setdefault(f"share {load:g}", {})[str(batch)] = _bare(plain, bench.device, load, batch, seconds)
    for kind in ("restart", "4:2:2", "gray"):
        name = f"{kind}, share 1"
        with jpeg_engines(bench, "turbo", facts, f"jpeg_engines_busy_{kind}"):
            bare[name] = {str(batches[-1]): _bare([jpeg(kind)], bench.device, 1.0, batches[-1], seconds)}
    with jpeg_engines(bench, "dali", facts, "jpeg_engines_busy_ours"):
        ours = {kind: _stage_rate(bench, kind, 3 * seconds) for kind in ("plain", "restart")}
    engines, best = max(bare["share 1"].values()), max(max(rates.values()) for rates in bare.values())
    share = ours["plain"] / engines
    facts |= {
        "decode_stage_images_per_s": {kind: round(rate, 1) for kind, rate in ours.items()},
        "share_of_bare_engines": round(share, 3),
        "share_of_best": round(ours["plain"] / best, 3),
    }
    if bench.on_gpu and share < _MIN_SHARE:
        raise CheckFailed(f"the decode stage reaches {share:.0%} of the decoder alone at the same share, not 95 %")


def _stage_rate(bench: Bench, kind: str, seconds: float) -> float:
    """Images per second of a loader's decode stage alone, on its own threads."""
    dataset = open_dataset(cameras(bench, kind))
    batch_size = bench.pick(16, 2)
    choice = LoaderChoice(
        split="train", batch_size=batch_size, num_workers=2, decoder="dali", verify=True, points=False, seed=0
    )
    device = str(bench.device) if bench.on_gpu else None
    recorded = record_stages(dataset, Transforms().image, choice, num_batches=2, device=device)
    stages = [entry for entry in recorded if entry.stage.name == "decode"]
    (rate,) = measure_stages(stages, batch_size, seconds)
    return rate.samples_per_s * len(dataset.manifest.cameras)


def _bare(images: Sequence[bytes], device: torch.device, load: float, batch: int, seconds: float) -> float:
    pipeline = _pipeline(images, device, load=load, batch=batch, graph=None)
    for _ in range(2):
        pipeline.run()
    started_s, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - started_s < seconds:
        pipeline.run()
        runs += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return round(runs * batch / (time.perf_counter() - started_s), 1)


def _pipeline(images: Sequence[bytes], device: torch.device, *, load: float, batch: int, graph: str | None) -> Any:  # noqa: ANN401 - DALI's
    """Return a built pipeline over the images: decoding alone, or one of `GRAPHS`."""
    from nvidia.dali import Pipeline, fn, types

    arrays = [np.frombuffer(images[number % len(images)], np.uint8) for number in range(batch)]
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = {"output_type": types.RGB, "jpeg_fancy_upsampling": True, "adjust_orientation": False}
    if on_gpu:
        hints = {"preallocate_width_hint": 1600, "preallocate_height_hint": 900, "affine": False}
        options |= {"device": "mixed", "hw_decoder_load": load, **hints}
    pipeline = Pipeline(batch, 4, (device.index or 0) if on_gpu else None, prefetch_queue_depth=2)
    with pipeline:
        encoded = fn.external_source(source=lambda: arrays, dtype=types.UINT8, ndim=1)
        if graph == "image_slice":
            pictures = fn.decoders.image_slice(encoded, start=[300, 0], end=[900, 1600], axis_names="HW", **options)
        else:
            pictures = fn.decoders.image(encoded, **options)
        if graph == "image":
            pictures = fn.resize(pictures, roi_start=[311, 0], roi_end=[900, 1600], size=[256, 704], antialias=True)
        pipeline.set_outputs(pictures)
    pipeline.build()
    return pipeline


def _first_run(graph: str, device: torch.device) -> dict[str, Any]:
    bench = Bench(device, *(3 * [None]))  # type: ignore[arg-type]  # it reads and writes no files
    batch, seconds = bench.pick((126, 3.0), (4, 0.1))
    pipeline = _pipeline([jpeg("plain")], device, load=1.0, batch=batch, graph=graph)
    started_s, runs = time.perf_counter(), 0
    with NvmlWatch(1 if bench.on_gpu else 0) as watch:
        while runs == 0 or time.perf_counter() - started_s < seconds:
            (pictures,) = pipeline.run()
            runs += 1
    first = np.asarray(pictures.as_cpu()[0])
    use = watch.use()
    return {
        "images_per_s": round(runs * batch / (time.perf_counter() - started_s), 1),
        "mean_level": round(float(first.mean()), 1),
        "jpeg_engines_busy": None if use is None else use[0].jpeg,
        "nvml": watch.reason,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_first_run(sys.argv[1], torch.device(sys.argv[2]))) + "\n")
