"""GPU checks of training: the occupancy of the GPU, waits for the device within a step, ways to compute, ranks.

On the CPU the same code runs as its twin, with the emulated accelerator; there it shows that the check works, and says
nothing of a GPU.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fuelrail.bench.annotation.run import annotate
from fuelrail.bench.measure.cuda import count_training_flop, peak_tflops
from fuelrail.bench.trainer.distill.teacher import Teacher
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS, GptSettings
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from support.gpu_bench import (
    cameras,
    check,
    each_decoder,
    endless,
    make_loader,
    train,
)

MIN_OCCUPANCY = 0.98
_NUM_SYNC_STEPS = 6
_TIMEOUT_S = 300.0
_NUM_WARMUP = 2
_NUM_STEPS = 8
_EMULATED = "emulated:resnet50-224-h100"


@pytest.fixture
def group(bench):
    """A process group of one rank; returns its backend."""
    backend = "nccl" if bench.on_gpu else "gloo"
    options: dict[str, Any] = {"device_id": bench.device} if bench.on_gpu else {}
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    yield backend
    dist.destroy_process_group()


@check(90, lane=pytest.mark.process)
@each_decoder
def test_six_cameras_are_fed(bench, facts, decoder):
    """The multi-camera model, in bf16: the GPU computes at least 98 % of the time."""
    model, batch_size = bench.pick(("base", 16), ("light", 1))
    _fed(
        bench,
        facts=facts,
        dataset=cameras(bench),
        model=model,
        decoder=decoder,
        batch_size=batch_size,
    )


@check(120, lane=pytest.mark.process)
@each_decoder
def test_resnet50_is_fed(bench, facts, decoder):
    """ResNet-50 on one camera, in bf16, from shards on local disk: the GPU computes at least 98 % of the time."""
    model, batch_size = bench.pick(("resnet50", 256), ("light", 1))
    _fed(
        bench,
        facts=facts,
        dataset=cameras(bench, one_camera=True),
        model=model,
        decoder=decoder,
        batch_size=batch_size,
    )


def _fed(bench, facts, dataset, model, decoder, batch_size):
    out = bench.work / f"fed-{dataset.name}-{decoder}"
    steps, warmup = bench.pick((80, 20), (10, 2))
    accelerator = bench.pick("cuda", "emulated:bevdet-r50-704x256-h100")
    options = {} if bench.on_gpu else {"workers": 1}
    report = train(
        dataset,
        out,
        steps=steps,
        warmup=warmup,
        batch_size=batch_size,
        model=model,
        decoder=decoder,
        accelerator=accelerator,
        **options,
    )
    facts |= _figures(report)
    if not bench.on_gpu:  # an emulated device says nothing of a real one
        return
    assert decoder != "dali" or facts.get("nvml_gpu_0", {}).get("jpeg"), (
        "the JPEG engines were idle, or NVML did not say"
    )
    assert facts["occupancy"] >= MIN_OCCUPANCY, (
        f"the GPU computed {facts['occupancy']:.1%} of the time"
    )


def _figures(report):
    figures = report.figures
    phases = {phase.phase: phase.time for phase in figures.phases}
    stages = {stage.name: round(stage.busy, 4) for stage in figures.stages}

    def p50_p99(times):
        return [round(times.p50_ms, 3), round(times.p99_ms, 3)]

    return {
        "occupancy": round(figures.occupancy.mean, 4),
        "images_per_s": round(figures.throughput.images_per_s, 1),
        "samples_per_s": round(figures.throughput.samples_per_s, 1),
        "mfu": None if figures.mfu is None else round(figures.mfu, 4),
        "launch_share": round(figures.launch_share, 4),
        "host_to_device_ms_p50_p99": p50_p99(phases["host_to_device"]),
        "data_wait_ms_p50_p99": p50_p99(phases["data_wait"]),
        "decode_stage_busy": stages.get("decode"),
        "transfer_stage_busy": stages.get("transfer"),
        "step_ms_p50_p99": p50_p99(figures.step_time),
        **{
            f"nvml_gpu_{gpu.index}": {
                "kernels": gpu.kernels,
                "jpeg": gpu.jpeg,
                "memory_bytes": gpu.peak_memory_bytes,
            }
            for gpu in report.gpus or []
        },
        "warnings": report.warnings,
    }


@check(20)
@each_decoder
def test_no_wait_in_a_step(bench, facts, decoder):
    """From the hand-over of a batch to the optimiser's end the trainer's thread never waits for the device.

    The loader works beside the steps; torch warns of each wait of any thread, and those of the loader's own threads,
    which must wait for their copies, are counted only.
    """
    model = build_model(MODELS[bench.pick("base", "light")]).to(bench.device)
    optimiser = torch.optim.AdamW(model.parameters())
    waits = {}
    places = set()

    def note(message, category, filename, lineno, file=None, line=None):
        if "synchroniz" in str(message):
            name = "trainer" if threading.current_thread() is threading.main_thread() else "loader"
            waits[name] = waits.get(name, 0) + 1
            if name == "trainer":
                places.add(f"{filename}:{lineno}")

    with (
        make_loader(bench, bench.dataset, 2, decoder) as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            for number, batch in enumerate(itertools.islice(loader, _NUM_SYNC_STEPS)):
                # The first steps may: kernels are chosen, memory is reserved.
                if bench.on_gpu and number == 2:
                    torch.cuda.set_sync_debug_mode("warn")
                _loss(bench, model, batch).backward()
                optimiser.step()
                optimiser.zero_grad()
        finally:
            if bench.on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    facts |= {"steps": _NUM_SYNC_STEPS, "watched": bench.on_gpu, "waits": waits}
    assert not places, f"a step waits for the device at {sorted(places)}"


def _loss(bench, model, batch):
    inputs = [tensor.to(bench.device, non_blocking=True) for tensor in model.inputs(batch)]
    with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.on_gpu):
        return model(*inputs)


def _modes(on_gpu):
    """All ways to compute by name. Offload shards over the one rank that there is."""
    yield "fp32", ParallelSettings(), "fp32"
    yield "bf16", ParallelSettings(), "bf16"
    yield "fp16", ParallelSettings(), "fp16"
    yield (
        "bf16, compiled",
        ParallelSettings(compile="inductor" if on_gpu else "aot_eager"),
        "bf16",
    )
    yield (
        "bf16, selective recomputation",
        ParallelSettings(recompute="selective"),
        "bf16",
    )
    yield "bf16, full recomputation", ParallelSettings(recompute="full"), "bf16"
    yield (
        "bf16, offloaded",
        ParallelSettings(mesh="dp_shard=1", offload=True),
        "bf16",
    )


# torch.compile looks at the gradients of all tensors in a frame, and torch warns of those that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@check(150)
def test_ways_to_compute_a_step(bench, facts, group):
    """ViT and GPT in every precision, compiled, recomputed and offloaded: each runs, is timed, and computes the same.

    They train alone on made inputs, from the same weights. The facts have the median time of a step, the peak memory
    (on a GPU), the share of the device's arithmetic that the model's own operations take (MFU, where the device's peak
    is known) and the loss of each way.
    """
    for name, rows in bench.pick({"vit-large": 4, "gpt2": 16}, {"gpt-tiny": 1}).items():
        for mode, settings, precision in _modes(bench.on_gpu):
            facts[f"{name}, {mode}"] = {
                "model": name,
                "name": mode,
                **_measure(
                    name,
                    settings=settings,
                    precision=precision,
                    device=bench.device,
                    rows=rows,
                ),
            }
        losses = [made["loss"] for made in facts.values() if made["model"] == name]
        assert losses == pytest.approx([losses[0]] * 7, rel=bench.pick(0.02, 0.01)), name


def _made_inputs(size, rows):
    """Inputs of a model, of this number of samples, on the CPU; six cameras of 256x704."""
    random = torch.Generator().manual_seed(0)
    weight = torch.ones(rows)
    if isinstance(size, GptSettings):
        return torch.randint(0, size.vocabulary, (rows, size.context + 1), generator=random), weight
    images = torch.randint(0, 256, (rows, 6, 3, 256, 704), dtype=torch.uint8, generator=random)
    focal = torch.tensor([[500.0, 0, 352], [0, 500.0, 128], [0, 0, 1]]).expand(rows, 6, 3, 3)
    target = (torch.rand(rows, size.grid**2, generator=random) < 0.1).float()
    return (
        images,
        torch.ones(rows, 6, dtype=torch.bool),
        focal,
        torch.eye(4).expand(rows, 6, 4, 4),
        target,
        weight,
    )


def _measure(name, settings, precision, device, rows):
    size = MODELS[name]
    on_gpu = device.type == "cuda"
    # Offload is of shards: those of one rank.
    mesh = (
        init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
        if settings.offload
        else None
    )
    parallel = parallelise(
        partial(build_model, size),
        settings,
        mesh=mesh,
        alone=mesh is None,
        learning_rate=1e-4,
        precision=precision,
    )
    inputs = _made_inputs(size, rows)
    with torch.device("meta"):
        flop = count_training_flop(build_model(size), [tensor.to("meta") for tensor in inputs])
    inputs = tuple(tensor.to(device) for tensor in inputs)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(_NUM_WARMUP + _NUM_STEPS):
        started_s = time.perf_counter()
        loss = parallel.forward_backward(inputs)
        parallel.update()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    step_s = statistics.median(seconds[_NUM_WARMUP:])
    peak = (
        peak_tflops(
            torch.cuda.get_device_name(),
            "fp32" if precision == "fp32" else "bf16",
        )
        if on_gpu
        else None
    )
    return {
        "step_ms": 1e3 * step_s,
        "samples_per_s": rows / step_s,
        "mfu": None if peak is None else flop / step_s / (peak * 1e12),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "loss": float(loss),
    }


@check(150, lane=pytest.mark.process)
def test_distillation(bench, facts):
    """A student learns from a teacher beside it, and from a layer of its predictions, as fast as the facts say.

    On a GPU the teacher is a ViT. Its own run saves while it trains: the facts have what a save took, and how long the
    training waited.
    """
    # A CPU trains the smallest ViT for 20 seconds.
    teacher, student = bench.pick(("vit-large", "base"), ("bev-tiny", "light"))
    steps, warmup = bench.pick((40, 10), (9, 1))
    place = bench.work / "teacher"
    layer = bench.work / "teacher-layer"
    common = {
        "batch_size": 2,
        "accelerator": bench.pick("cuda", _EMULATED),
        "steps": steps,
        "warmup": warmup,
    }
    saved = train(
        bench.dataset,
        bench.work / "teacher-run",
        model=teacher,
        checkpoint=str(place),
        every=steps // 2,
        **common,
    )
    facts["saves"] = msgspec.to_builtins(saved.checkpoints)
    learnt = Teacher(str(place), str(bench.device))
    started_s = time.perf_counter()
    annotate(
        bench.dataset,
        layer,
        lambda batch: {"logits": learnt.outputs(batch)["logits"]},
        device=str(bench.device),
        store="float16",
    )
    facts["annotate_s"] = round(time.perf_counter() - started_s, 2)
    for name, how in (
        ("online", {"teacher": str(place)}),
        ("offline", {"teacher_layer": str(layer)}),
    ):
        report = train(
            bench.dataset,
            bench.work / f"student-{name}",
            model=student,
            **common,
            **how,
        )
        losses = report.series[0].loss
        facts[name] = {
            "images_per_s": round(report.figures.throughput.images_per_s, 1),
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
        assert all(loss is not None and math.isfinite(loss) for loss in losses), (
            f"{name}: a loss is not finite: {losses}"
        )


@check(20)
@each_decoder
def test_ranks_of_one(bench, facts, decoder, group):
    """NCCL with one rank: a group, an all-reduce, DistributedDataParallel."""
    ones = torch.ones(4, device=bench.device)
    dist.all_reduce(ones)
    network = build_model(MODELS["light"]).to(bench.device)
    model = DistributedDataParallel(network, device_ids=[bench.device] if bench.on_gpu else None)
    with make_loader(bench, bench.dataset, 2, decoder) as loader:
        for batch in itertools.islice(loader, 2):
            model(*(tensor.to(bench.device) for tensor in network.inputs(batch))).backward()
    facts |= {"backend": group, "all_reduce": ones.tolist()}


@check(30, lane=pytest.mark.process)
def test_the_example_trainer_under_torchrun(bench, facts):
    example = Path(__file__).resolve().parents[2] / "configs" / "trainers" / "ddp.py"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
    ]
    arguments = [
        str(bench.dataset),
        "--steps",
        "4",
        "--checkpoint",
        str(bench.work / "ddp"),
    ]
    done = subprocess.run(
        [*launch, str(example), *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    facts["torchrun"] = done.returncode
    assert done.returncode == 0, f"torchrun of {example.name}: {done.stderr.strip()[-1500:]}"


@check(15)
@each_decoder
def test_trace_of_steps(bench, facts, decoder):
    """Keep torch's trace of some steps beside the result file: loader, copies and kernels on one time line."""
    model = build_model(MODELS[bench.pick("base", "light")]).to(bench.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with make_loader(bench, bench.dataset, 2, decoder) as loader:
        batches = endless(loader)
        for _ in range(3):
            _loss(bench, model, next(batches)).backward()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(bench.pick(10, 2)):
                _loss(bench, model, next(batches)).backward()
    path = bench.keep / f"gpu-check-trace-{decoder}.json.gz"
    profile.export_chrome_trace(str(path))
    facts |= {
        "file": path.name,
        "bytes": path.stat().st_size,
        "events": len(profile.events()),
    }
    kinds = {event.device_type for event in profile.events()}
    assert not bench.on_gpu or torch.profiler.DeviceType.CUDA in kinds, (
        "the profiler saw no kernel on the GPU: CUPTI is missing, or another profiler holds it"
    )


@check(90, lane=pytest.mark.process)
def test_training_runs(bench, facts):
    """``fuelrail bench train`` on all GPUs (one emulated rank on the CPU): it ends, it learns, the ranks agree."""
    num_ranks = torch.cuda.device_count() if bench.on_gpu else 1
    steps, warmup = bench.pick((60, 10), (12, 2))
    report = train(
        bench.dataset,
        bench.work / "bench-train",
        steps=steps,
        warmup=warmup,
        ranks=num_ranks,
        batch_size=2,
        accelerator=bench.pick("cuda", _EMULATED),
    )
    facts |= {
        "ranks": num_ranks,
        "all_reduce_by": report.ranks[0].backend,
        "occupancy": round(report.figures.occupancy.mean, 4),
        "images_per_s": round(report.figures.throughput.images_per_s, 2),
        "phases_mean_ms": {
            phase.phase: round(phase.time.mean_ms, 3) for phase in report.figures.phases
        },
        "peak_device_bytes": report.ranks[0].peak_device_bytes,
        "warnings": report.warnings,
    }
    losses = [math.inf if loss is None else loss for loss in report.series[0].loss]
    assert sum(losses[-5:]) < sum(losses[:5]), (
        f"the loss did not fall: first {losses[:5]}, last {losses[-5:]}"
    )
    assert not report.ranks_disagree, "the ranks ended with different weights"
