"""What each way of computing a step costs on one device: precision, compilation, recomputation, offload, timed.

ViT and GPT train alone on made inputs; each mode starts from the same weights. Reported are the median time of a step,
the peak memory (on a GPU), the share of the device's arithmetic that the model's own operations take (MFU, where the
device's peak is known) and the loss. `make gpu-check` can call :func:`measure_modes` on a GPU; on a CPU the models are
tiny and the same code runs as its twin.

    python -m fuelrail.bench.gpu.training_modes
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from fuelrail.bench.measure.cuda import count_training_flop, peak_tflops
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS, GptSettings, ModelSettings
from fuelrail.bench.trainer.strategies.parallel import build, make_mesh, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings, Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


_IMAGE = (256, 704)
_NUM_WARMUP, _NUM_STEPS = 2, 8


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """A way of computing, and what it took. ``mfu`` is None where the device's peak is unknown."""

    model: str
    name: str
    step_ms: float
    samples_per_s: float
    mfu: float | None
    peak_bytes: int | None
    loss: float


def modes(*, on_gpu: bool) -> Iterator[tuple[str, ParallelSettings, Precision]]:
    """All modes by name. Offload shards over the one rank that there is."""
    yield "fp32", ParallelSettings(), "fp32"
    yield "bf16", ParallelSettings(), "bf16"
    yield "fp16", ParallelSettings(), "fp16"
    yield "bf16, compiled", ParallelSettings(compile="inductor" if on_gpu else "aot_eager"), "bf16"
    yield "bf16, selective recomputation", ParallelSettings(recompute="selective"), "bf16"
    yield "bf16, full recomputation", ParallelSettings(recompute="full"), "bf16"
    yield "bf16, offloaded", ParallelSettings(mesh="dp_shard=1", offload=True), "bf16"


def measure_modes(device: str, models: dict[str, int] | None = None) -> list[Mode]:
    """Time every mode of each model; ``models`` are names with numbers of samples (default: by the device).

    Needs no process group, and leaves none behind.
    """
    on_gpu = device.startswith("cuda")
    chosen = models or ({"vit-large": 4, "gpt2": 16} if on_gpu else {"vit-tiny": 1, "gpt-tiny": 4})
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        return [
            _measure(name, mode, settings, precision, device, rows)
            for name, rows in chosen.items()
            for mode, settings, precision in modes(on_gpu=on_gpu)
        ]
    finally:
        if alone:
            dist.destroy_process_group()


def made_inputs(size: ModelSettings, rows: int) -> tuple[Tensor, ...]:
    """Inputs of a model, of this number of samples, on the CPU; six cameras of 256x704."""
    random = torch.Generator().manual_seed(0)
    weight = torch.ones(rows)
    if isinstance(size, GptSettings):
        return torch.randint(0, size.vocabulary, (rows, size.context + 1), generator=random), weight
    images = torch.randint(0, 256, (rows, 6, 3, *_IMAGE), dtype=torch.uint8, generator=random)
    focal = torch.tensor([[500.0, 0, 352], [0, 500.0, 128], [0, 0, 1]]).expand(rows, 6, 3, 3)
    target = (torch.rand(rows, size.grid**2, generator=random) < 0.1).float()
    return images, torch.ones(rows, 6, dtype=torch.bool), focal, torch.eye(4).expand(rows, 6, 4, 4), target, weight


def _measure(name: str, mode: str, settings: ParallelSettings, precision: Precision, device: str, rows: int) -> Mode:
    size, on_gpu = MODELS[name], device.startswith("cuda")
    mesh = make_mesh(Degrees(), device.partition(":")[0], sharded=settings.offload)
    parallel = parallelise(
        build(size, device, 0), settings, Degrees(), mesh, batch_size=rows, learning_rate=1e-4, precision=precision
    )
    inputs = made_inputs(size, rows)
    with torch.device("meta"):
        flop = count_training_flop(build_model(size), [tensor.to("meta") for tensor in inputs])
    inputs = tuple(tensor.to(device) for tensor in inputs)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    loss = torch.zeros(())
    for _ in range(_NUM_WARMUP + _NUM_STEPS):
        started_s = time.perf_counter()
        loss = parallel.forward_backward(inputs)
        parallel.update()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    step_s = statistics.median(seconds[_NUM_WARMUP:])
    peak = peak_tflops(torch.cuda.get_device_name(), "fp32" if precision == "fp32" else "bf16") if on_gpu else None
    return Mode(
        model=name, name=mode, step_ms=1e3 * step_s, samples_per_s=rows / step_s,
        mfu=None if peak is None else flop / step_s / (peak * 1e12),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None, loss=float(loss),
    )  # fmt: skip


def main() -> int:
    """Measure on the GPU, or the CPU without one, and print."""
    for mode in measure_modes("cuda" if torch.cuda.is_available() else "cpu"):
        mfu = "" if mode.mfu is None else f", MFU {mode.mfu:.1%}"
        memory = "" if mode.peak_bytes is None else f", {mode.peak_bytes / 2**30:.1f} GiB"
        print(f"{mode.model:9} {mode.name:30} {mode.step_ms:8.1f} ms, loss {mode.loss:.4f}{mfu}{memory}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
