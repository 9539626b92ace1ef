"""GPU checks of training: the occupancy of the GPU, waits for the device within a step, ranks.

On the CPU the same code runs as its twin, with the emulated accelerator; there it shows that the check works, and says
nothing of a GPU.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.gpu.base import Bench, CheckFailed, endless, make_loader, require_dali, train
from fuelrail.bench.gpu.images import cameras
from fuelrail.bench.gpu.training_modes import measure_modes
from fuelrail.bench.studies.annotate.run import annotate
from fuelrail.bench.trainer.distill.teacher import Teacher
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.bench.studies.train.report import Report

MIN_OCCUPANCY = 0.98
_NUM_SYNC_STEPS = 6
_TIMEOUT_S = 300.0
_SAME_LOSS = 0.02


def resnet_is_fed(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """ResNet-50 on one camera, in bf16, from shards on local disk: the GPU computes at least 98 % of the time."""
    model, batch_size = bench.pick(("resnet50", 256), ("light", 1))
    _fed(bench, facts, cameras(bench, one_camera=True), model, decoder, batch_size)


def cameras_are_fed(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """The multi-camera model, in bf16: the GPU computes at least 98 % of the time."""
    model, batch_size = bench.pick(("base", 16), ("light", 1))
    _fed(bench, facts, cameras(bench), model, decoder, batch_size)


def _fed(bench: Bench, facts: dict[str, Any], dataset: Path, model: str, decoder: str, batch_size: int) -> None:
    require_dali(decoder)
    out = bench.work / f"fed-{dataset.name}-{decoder}"
    steps, warmup = bench.pick((80, 20), (10, 2))
    accelerator = bench.pick("cuda", "emulated:bevdet-r50-704x256-h100")
    options: dict[str, object] = {} if bench.on_gpu else {"workers": 1}
    report = train(
        dataset, out, steps=steps, warmup=warmup, batch_size=batch_size, model=model, decoder=decoder,
        accelerator=accelerator, **options,
    )  # fmt: skip
    facts |= dict(_facts(report))
    if not bench.on_gpu:  # an emulated device says nothing of a real one
        return
    if decoder == "dali" and not facts.get("nvml_gpu_0", {}).get("jpeg"):
        raise CheckFailed(f"the JPEG engines were idle, or NVML did not say: {facts.get('nvml')}")
    if facts["occupancy"] < MIN_OCCUPANCY:
        raise CheckFailed(f"the GPU computed {facts['occupancy']:.1%} of the time, not {MIN_OCCUPANCY:.0%}")


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


def training_runs(bench: Bench, facts: dict[str, Any]) -> None:
    """``fuelrail bench train`` on all GPUs (one emulated rank on the CPU): it ends, it learns, the ranks agree."""
    num_ranks = torch.cuda.device_count() if bench.on_gpu else 1
    steps, warmup = bench.pick((60, 10), (12, 2))
    accelerator = bench.pick("cuda", "emulated:resnet50-224-h100")
    out = bench.work / "bench-train"
    report = train(
        bench.dataset, out, steps=steps, warmup=warmup, ranks=num_ranks, batch_size=2, accelerator=accelerator
    )
    assert report.figures is not None, "a run of enough steps has figures"
    facts |= {
        "ranks": num_ranks,
        "all_reduce_by": report.ranks[0].backend,
        "occupancy": round(report.figures.occupancy.mean, 4),
        "images_per_s": round(report.figures.throughput.images_per_s, 2),
        "phases_mean_ms": {phase.phase: round(phase.time.mean_ms, 3) for phase in report.figures.phases},
        "peak_device_bytes": report.ranks[0].peak_device_bytes,
        "warnings": report.warnings,
    }
    losses = [math.inf if loss is None else loss for loss in report.series[0].loss]
    if not sum(losses[-5:]) < sum(losses[:5]):
        raise CheckFailed(f"the loss did not fall: first {losses[:5]}, last {losses[-5:]}")
    if report.ranks_disagree:
        raise CheckFailed("the ranks ended with different weights")


def ways_to_compute(bench: Bench, facts: dict[str, Any]) -> None:
    """ViT and GPT in every precision, compiled, recomputed and offloaded: each runs, is timed, and computes the same.

    The facts have the time of a step, the MFU and the peak memory of each way.
    """
    for mode in measure_modes(str(bench.device), bench.pick(None, {"gpt-tiny": 1})):
        facts[f"{mode.model}, {mode.name}"] = msgspec.to_builtins(mode)
    losses: dict[str, list[float]] = {}
    for mode in facts.values():
        losses.setdefault(mode["model"], []).append(mode["loss"])
    for model, found in losses.items():
        if not all(abs(loss / found[0] - 1) < _SAME_LOSS for loss in found):
            raise CheckFailed(f"{model}: the ways to compute a step end with different losses: {found}")


def distillation(bench: Bench, facts: dict[str, Any]) -> None:
    """A student learns from a ViT beside it, and from a layer of its predictions, as fast as the facts say.

    The teacher's own run saves while it trains: the facts have what a save took, and how long the training waited.
    """
    teacher, student = bench.pick(("vit-large", "base"), ("vit-tiny", "bev-tiny"))
    steps, warmup = bench.pick((40, 10), (12, 2))
    accelerator = bench.pick("cuda", "emulated:resnet50-224-h100")
    place, layer = bench.work / "teacher", bench.work / "teacher-layer"
    common = {"batch_size": 2, "accelerator": accelerator, "steps": steps, "warmup": warmup}
    saved = train(
        bench.dataset, bench.work / "teacher-run", model=teacher, checkpoint=str(place), every=steps // 2, **common
    )
    facts["saves"] = msgspec.to_builtins(saved.checkpoints)
    learnt = Teacher(str(place), str(bench.device))
    started_s = time.perf_counter()
    annotate(
        bench.dataset, layer, lambda batch: {"logits": learnt.outputs(batch)["logits"]},
        device=str(bench.device), store="float16",
    )  # fmt: skip
    facts["annotate_s"] = round(time.perf_counter() - started_s, 2)
    for name, how in (("online", {"teacher": str(place)}), ("offline", {"teacher_layer": str(layer)})):
        report = train(bench.dataset, bench.work / f"student-{name}", model=student, **common, **how)
        assert report.figures is not None, "a run of enough steps has figures"
        losses = report.series[0].loss
        facts[name] = {
            "images_per_s": round(report.figures.throughput.images_per_s, 1),
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
        if not all(loss is not None and math.isfinite(loss) for loss in losses):
            raise CheckFailed(f"{name}: a loss is not finite: {losses}")


def no_wait_in_a_step(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """From the hand-over of a batch to the optimiser's end the trainer's thread never waits for the device.

    The loader works beside the steps; torch warns of each wait of any thread, and those of the loader's own threads,
    which must wait for their copies, are counted only.
    """
    model = build_model(MODELS[bench.pick("base", "light")]).to(bench.device)
    optimiser = torch.optim.AdamW(model.parameters())
    waits: dict[str, int] = {}
    places: list[str] = []

    def note(
        message: Warning | str,
        category: type[Warning],  # noqa: ARG001 - as warnings calls it, like the next ones
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG001
        line: str | None = None,  # noqa: ARG001
    ) -> None:
        if "synchroniz" in str(message):
            name = "trainer" if threading.current_thread() is threading.main_thread() else "loader"
            waits[name] = waits.get(name, 0) + 1
            if name == "trainer":
                places.append(f"{filename}:{lineno}")

    with make_loader(bench, bench.dataset, 2, decoder) as loader, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        for number, batch in enumerate(itertools.islice(loader, _NUM_SYNC_STEPS)):
            # The first steps may: kernels are chosen, memory is reserved.
            if bench.on_gpu and number == 2:
                torch.cuda.set_sync_debug_mode("warn")
            inputs = tuple(tensor.to(bench.device, non_blocking=True) for tensor in model.inputs(batch))
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.on_gpu):
                loss = model(*inputs)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        if bench.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    facts |= {"steps": _NUM_SYNC_STEPS, "watched": bench.on_gpu, "waits": waits}
    if places:
        raise CheckFailed(f"a step waits for the device at {sorted(set(places))}")


def trace_of_steps(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """Keep torch's trace of some steps beside the result file: loader, copies and kernels on one time line."""
    model = build_model(MODELS[bench.pick("base", "light")]).to(bench.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with make_loader(bench, bench.dataset, 2, decoder) as loader:
        batches = endless(loader)

        def step() -> None:
            inputs = (tensor.to(bench.device, non_blocking=True) for tensor in model.inputs(next(batches)))
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.on_gpu):
                loss = model(*inputs)
            loss.backward()

        for _ in range(3):
            step()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(bench.pick(10, 2)):
                step()
    path = bench.keep / f"gpu-check-trace-{decoder}.json.gz"
    profile.export_chrome_trace(str(path))
    facts |= {"file": path.name, "bytes": path.stat().st_size, "events": len(profile.events())}
    if bench.on_gpu and not any(event.device_type == torch.profiler.DeviceType.CUDA for event in profile.events()):
        raise CheckFailed("the profiler saw no kernel on the GPU: CUPTI is missing, or another profiler holds it")


def ranks_of_one(bench: Bench, facts: dict[str, Any], decoder: str) -> None:
    """NCCL with one rank: a group, an all-reduce, DistributedDataParallel, and the example trainer under torchrun."""
    backend = bench.pick("nccl", "gloo")
    options: dict[str, Any] = {"device_id": bench.device} if bench.on_gpu else {}
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
    try:
        ones = torch.ones(4, device=bench.device)
        dist.all_reduce(ones)
        network = build_model(MODELS["light"]).to(bench.device)
        devices = [bench.device] if bench.on_gpu else None
        model = DistributedDataParallel(network, device_ids=devices)
        with make_loader(bench, bench.dataset, 2, decoder) as loader:
            for batch in itertools.islice(loader, 2):
                model(*(tensor.to(bench.device) for tensor in network.inputs(batch))).backward()
        facts |= {"backend": backend, "all_reduce": ones.tolist()}
    finally:
        dist.destroy_process_group()
    example = Path(__file__).resolve().parents[2] / "configs" / "trainers" / "ddp.py"
    if not example.is_file():  # a wheel has no examples
        facts["torchrun"] = "not here"
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    arguments = [str(bench.dataset), "--steps", "4", "--checkpoint", str(bench.work / "ddp")]
    done = subprocess.run(
        [*launch, str(example), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    facts["torchrun"] = done.returncode
    if done.returncode != 0:
        raise CheckFailed(f"torchrun of {example.name} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
