"""One rank: process group, loader, model, loop, and its file of records. Run by torchrun with the settings' file.

The file holds a list of runs. They are run one after the other by the same processes, each with a loader and a model
of its own, so that runs that are to be compared share the machine's state.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from fuelrail.bench.measure.accelerator import Accelerator, EmulatedAccelerator, without_costs
from fuelrail.bench.measure.clock import MonotonicClock
from fuelrail.bench.measure.cuda import CudaAccelerator, count_training_flop, peak_tflops
from fuelrail.bench.measure.processes import storage_bytes_read
from fuelrail.bench.measure.records import InputFacts, RankEnd, RankFailure, RankHeader, RankWriter, rank_path, snapshot
from fuelrail.bench.trainer.elastic import end_with
from fuelrail.bench.trainer.experiment import make_loader
from fuelrail.bench.trainer.gradients import data_parallel
from fuelrail.bench.trainer.injection import StallingAccelerator, late_batches, slow_reads
from fuelrail.bench.trainer.loop import take, train
from fuelrail.bench.trainer.model import BevOccupancy, model_inputs
from fuelrail.bench.trainer.resnet import ResNet50
from fuelrail.bench.trainer.settings import MODELS, TrainSettings
from fuelrail.bench.trainer.tracing import RankTrace
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from fuelrail.bench.trainer.settings import ModelSettings
    from fuelrail.loaders import DataLoader
    from fuelrail.pipeline.runtime.stages import StageClock


# A rank that is alive but stuck must not hold the others for ever.
_COLLECTIVE_TIMEOUT = timedelta(minutes=5)
# Enough that the model doesn't see one batch alone, few enough to lie in memory.
_NUM_BATCHES_KEPT = 4


def run_rank(
    settings: TrainSettings,
    batches: Iterable[Mapping[str, Any]],
    writer: RankWriter,
    stage_clocks: Callable[[], Sequence[StageClock]],
    trace: RankTrace | None = None,
) -> None:
    """Train this rank on ``batches`` and write its records; with several ranks the process group is initialised."""
    clock = MonotonicClock()
    accelerator: Accelerator
    if settings.profile is None:
        accelerator = CudaAccelerator(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        accelerator = EmulatedAccelerator(without_costs(settings.profile, settings.leave_out), clock)
    distributed = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    inject = settings.inject
    if inject.rank in (None, rank):
        accelerator = StallingAccelerator(accelerator, inject, clock)
        if inject.data_wait:
            batches = late_batches(batches, inject.data_wait, clock)
    if trace is not None:
        accelerator = trace.of_phases(accelerator)

    # Every rank starts from the same weights: DDP sends rank 0's around, and the seed makes runs repeatable.
    torch.manual_seed(settings.seed)
    model_settings = MODELS[settings.model_name]
    network = ResNet50() if settings.model_name == "resnet50" else BevOccupancy(model_settings)
    model: nn.Module = network.to(accelerator.torch_device)
    device_name = torch.cuda.get_device_name() if settings.profile is None else settings.profile.device
    writer.write(
        RankHeader(
            rank=rank,
            world_size=world_size,
            device=device_name,
            backend=dist.get_backend() if distributed else None,
            model=settings.model_name,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            peak_tflops=None if settings.profile is not None else peak_tflops(device_name, settings.precision),
        )
    )
    reduces = distributed and "all-reduce" not in settings.leave_out
    trained = data_parallel(model, accelerator) if reduces else model

    num_steps = 0
    read_before = storage_bytes_read()
    count = None if settings.profile is not None else partial(_flop_a_sample, model, model_settings)
    noted = _noting_input(batches, writer, count)
    if "training" in settings.leave_out:
        steps = take(noted, clock, num_steps=settings.num_steps)
    else:
        steps = train(
            trained,
            model_settings,
            noted,
            accelerator,
            clock,
            num_steps=settings.num_steps,
            accumulation=settings.accumulation,
            learning_rate=settings.learning_rate,
            bf16=settings.precision == "bf16",
        )
    for record in steps if trace is None else trace.of_steps(steps):
        writer.write(record)
        num_steps += 1
        if num_steps == settings.num_warmup_steps:
            writer.write(snapshot(num_steps, stage_clocks()))
    writer.write(snapshot(num_steps, stage_clocks()))
    read_after = storage_bytes_read()
    writer.write(
        RankEnd(
            num_steps=num_steps,
            parameters_xxh3=parameters_digest(model),
            peak_rss_bytes=_peak_rss_bytes(),
            peak_device_bytes=torch.cuda.max_memory_allocated() if settings.profile is None else None,
            read_bytes=None if read_before is None or read_after is None else read_after - read_before,
        )
    )


def parameters_digest(model: nn.Module) -> str:
    """xxh3 (hex) over the bytes of all parameters, in order."""
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _flop_a_sample(model: nn.Module, settings: ModelSettings, batch: Mapping[str, Any]) -> int:
    # Of one sample, in full precision: a whole batch's activations could take twice what the training does.
    return count_training_flop(model, [tensor[:1] for tensor in model_inputs(batch, settings)])


def _noting_input(
    batches: Iterable[Mapping[str, Any]], writer: RankWriter, count: Callable[[Mapping[str, Any]], int] | None
) -> Iterator[Mapping[str, Any]]:
    for number, batch in enumerate(batches):
        if number == 0:
            _, num_cameras, _, height, width = batch["img"].shape
            labelled = any(len(boxes) for boxes in batch.get("gt_boxes_3d", ()))
            flop = None if count is None else count(batch)
            writer.write(
                InputFacts(num_cameras=num_cameras, height=height, width=width, labelled=labelled, train_flop=flop)
            )
        yield batch
        del batch  # or its buffer would not be free while the next one is waited for


def _peak_rss_bytes() -> int:
    # A process begins with the peak of the one that forked it in getrusage's count; the kernel's own mark is exact.
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found.group(1)) * 1024
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def batches(loader: DataLoader, num_epochs: int | None) -> Iterator[Mapping[str, Any]]:
    """A loader's batches over epoch after epoch, without end if ``num_epochs`` is None."""
    for epoch in range(num_epochs) if num_epochs is not None else itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def from_memory(source: Iterator[Mapping[str, Any]], num_batches: int | None) -> Iterator[Mapping[str, Any]]:
    """The first batches in turns, taken now: ``num_batches`` in all, without end if that is None."""
    kept = list(itertools.islice(source, _NUM_BATCHES_KEPT))
    return itertools.islice(itertools.cycle(kept), num_batches)


def main(arguments: Sequence[str]) -> int:
    """Run the rank that the environment (RANK, WORLD_SIZE, ...) says this process is: ``SETTINGS LAUNCHER_PID``."""
    path, launcher = arguments
    end_with(int(launcher), signal.SIGKILL)
    runs = msgspec.json.decode(Path(path).read_bytes(), type=list[TrainSettings])
    if runs[0].profile is not None:
        # One thread: the host's cores belong to the loader, and the stand-in is small.
        torch.set_num_threads(1)
    for number, settings in enumerate(runs):
        with RankWriter(rank_path(Path(settings.records), int(os.environ["RANK"]))) as writer:
            try:
                if number == 0:
                    _join_group(settings)
                _run(settings, writer)
            except FuelrailError as error:
                writer.write(RankFailure(kind="refused", message=str(error), at_ns=time.monotonic_ns()))
                return 2
            except Exception as error:
                first_line = str(error).partition("\n")[0]
                message = f"{type(error).__name__}: {first_line}"
                writer.write(RankFailure(kind="crashed", message=message, at_ns=time.monotonic_ns()))
                raise
    # Not after a failure: leaving the group waits for ranks that may be gone.
    dist.destroy_process_group()
    return 0


def _device(settings: TrainSettings) -> str | None:
    return None if settings.profile is not None else f"cuda:{os.environ['LOCAL_RANK']}"


def _join_group(settings: TrainSettings) -> None:
    device = _device(settings)
    acts = device is None and settings.model_name in ("light", "stand-in") and sys.platform == "linux"
    if acts:
        _act_as_device(os.SCHED_FIFO)
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=None if device is None else torch.device(device),
    )
    if acts:
        _act_as_device(os.SCHED_FIFO | os.SCHED_RESET_ON_FORK)


def _act_as_device(policy: int) -> None:
    """Let this thread, and with SCHED_FIFO those that it starts, run whenever they want to, where that is permitted.

    This thread and gloo's stand in for a device and its link, which would not wait for a CPU that is busy decoding.
    They take little of it, so the loader's threads, which are scheduled as ever, lose little.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, policy, os.sched_param(1))


def _run(settings: TrainSettings, writer: RankWriter) -> None:
    dist.barrier()  # a rank that is still at the run before must not have its neighbours' loaders run beside it
    trace = None if settings.trace is None else RankTrace(Path(settings.trace), dist.get_rank())
    recorder = None if trace is None else trace.recorder
    with slow_reads(settings.inject), make_loader(settings, _device(settings), recorder) as loader:
        source = batches(loader, settings.num_epochs)
        if "loading" in settings.leave_out:
            source = from_memory(source, None if settings.num_epochs is None else settings.num_epochs * len(loader))
            loader.close()
        run_rank(settings, source, writer, lambda: loader.stats().stages, trace)
    if trace is not None:
        trace.write()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
