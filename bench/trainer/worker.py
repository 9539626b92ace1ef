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
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor

from fuelrail.bench.measure.accelerator import Accelerator, EmulatedAccelerator, without_costs
from fuelrail.bench.measure.clock import MonotonicClock
from fuelrail.bench.measure.collectives import link_of
from fuelrail.bench.measure.cuda import CudaAccelerator, count_training_flop, peak_tflops
from fuelrail.bench.measure.processes import storage_bytes_read
from fuelrail.bench.measure.records import InputFacts, RankEnd, RankFailure, RankHeader, RankWriter, rank_path, snapshot
from fuelrail.bench.trainer.checkpoints.run import RunCheckpoints
from fuelrail.bench.trainer.elastic import end_with
from fuelrail.bench.trainer.experiment import make_loader
from fuelrail.bench.trainer.injection import StallingAccelerator, late_batches, slow_reads
from fuelrail.bench.trainer.loop import take, train
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.settings import TrainSettings
from fuelrail.bench.trainer.strategies.fits import check_memory
from fuelrail.bench.trainer.strategies.optimiser import scaled_rate
from fuelrail.bench.trainer.strategies.parallel import build, make_mesh, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, check_fits, degrees_of
from fuelrail.bench.trainer.tracing import RankTrace
from fuelrail.loaders import Transforms
from fuelrail.loaders.config import available_memory_bytes, ranks_on_host
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.trainer.models.settings import ModelSettings
    from fuelrail.bench.trainer.models.staged import StagedModel
    from fuelrail.bench.trainer.strategies.parallel import Parallel
    from fuelrail.loaders import DataLoader
    from fuelrail.pipeline.runtime.stages import StageClock


# Between the first rank that gives up waiting and the last one.
_SAY_SO_S = 3.0
# Enough that the model doesn't see one batch alone, few enough to lie in memory.
_NUM_BATCHES_KEPT = 4


def run_rank(
    settings: TrainSettings,
    batches: Iterable[Mapping[str, Any]],
    writer: RankWriter,
    stage_clocks: Callable[[], Sequence[StageClock]],
    trace: RankTrace | None = None,
    mesh: DeviceMesh | None = None,
    loader: DataLoader | None = None,
) -> None:
    """Train this rank on ``batches`` and write its records; with several ranks the process group is initialised.

    ``mesh`` is that of a composed strategy, None otherwise. ``loader`` gives the batches; with checkpoints its position
    is saved and restored.
    """
    clock = MonotonicClock()
    accelerator: Accelerator
    link: AbstractContextManager[Any] = nullcontext()
    if settings.profile is None:
        accelerator = CudaAccelerator(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        emulated = EmulatedAccelerator(without_costs(settings.profile, settings.leave_out), clock)
        accelerator, link = emulated, link_of(emulated)
    inject = settings.inject
    if inject.rank in (None, dist.get_rank() if dist.is_initialized() else 0):
        accelerator = StallingAccelerator(accelerator, inject, clock)
        if inject.data_wait:
            batches = late_batches(batches, inject.data_wait, clock)
    if trace is not None:
        accelerator = trace.of_phases(accelerator)

    # The seed makes every rank start from the same weights, and runs repeatable.
    model = build(MODELS[settings.model_name], accelerator.torch_device, settings.seed)
    writer.write(_header(settings, model))
    parallel = _divide(model, settings, mesh, accelerator)
    checkpoints = RunCheckpoints(settings, parallel, loader, writer)
    num_steps = 0
    read_before = storage_bytes_read()
    count = None if settings.profile is not None else partial(_flop_a_sample, MODELS[settings.model_name])
    noted = _noting_input(batches, writer, count)
    if "training" in settings.leave_out:
        steps = take(noted, clock, num_steps=settings.num_steps)
    else:
        steps = train(
            parallel,
            noted,
            accelerator,
            clock,
            num_steps=settings.num_steps,
            accumulation=settings.accumulation,
            first_step=checkpoints.first_step,
        )
        if settings.memory:
            from fuelrail.bench.measure.memory import following_memory  # parts of torch that nothing else needs

            steps = following_memory(steps, parallel.models, parallel.optimiser, writer)
    with link:
        for record in steps if trace is None else trace.of_steps(steps):
            writer.write(record)
            num_steps += 1
            checkpoints.after(checkpoints.first_step + num_steps)
            if num_steps == settings.num_warmup_steps:
                writer.write(snapshot(num_steps, stage_clocks()))
    writer.write(snapshot(num_steps, stage_clocks()))
    checkpoints.close(checkpoints.first_step + num_steps)
    read_after = storage_bytes_read()
    writer.write(
        RankEnd(
            num_steps=num_steps,
            parameters_xxh3=parameters_digest(parallel),
            peak_rss_bytes=_peak_rss_bytes(),
            peak_device_bytes=torch.cuda.max_memory_allocated() if settings.profile is None else None,
            read_bytes=None if read_before is None or read_after is None else read_after - read_before,
        )
    )


def _header(settings: TrainSettings, model: nn.Module) -> RankHeader:
    distributed = dist.is_initialized()
    device = torch.cuda.get_device_name() if settings.profile is None else settings.profile.device
    return RankHeader(
        rank=dist.get_rank() if distributed else 0,
        world_size=dist.get_world_size() if distributed else 1,
        device=device,
        backend=dist.get_backend() if distributed else None,
        model=settings.model_name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        peak_tflops=None if settings.profile is not None else peak_tflops(device, settings.precision),
    )


def _divide(model: StagedModel, settings: TrainSettings, mesh: DeviceMesh | None, accelerator: Accelerator) -> Parallel:
    world = dist.get_world_size() if dist.is_initialized() else 1
    alone = "all-reduce" in settings.leave_out
    degrees = Degrees() if alone else degrees_of(settings.parallel, world)
    global_batch = degrees.data * settings.batch_size * settings.accumulation
    return parallelise(
        model,
        settings.parallel,
        degrees,
        mesh,
        batch_size=settings.batch_size,
        learning_rate=scaled_rate(settings.learning_rate, settings.parallel, global_batch),
        precision=settings.precision,
        accelerator=accelerator,
    )


def parameters_digest(parallel: Parallel) -> str:
    """xxh3 (hex) over the bytes of all parameters, in order; equal on ranks that agree. All ranks must call this."""
    digest = xxhash.xxh3_64()
    for model in parallel.models:
        for parameter in model.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    digests = [digest.hexdigest()]
    if parallel.mesh is not None and "pp" in (parallel.mesh.mesh_dim_names or ()):
        group = parallel.mesh["pp"].get_group()
        digests *= dist.get_world_size(group)
        dist.all_gather_object(digests, digest.hexdigest(), group=group)
    return digests[0] if len(digests) == 1 else xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _flop_a_sample(settings: ModelSettings, batch: Mapping[str, Any]) -> int:
    # Of one sample, in full precision, on no device: a rank may hold a part of the model only.
    with torch.device("meta"):
        model = build_model(settings)
    return count_training_flop(model, [tensor[:1].to("meta") for tensor in model.inputs(batch)])


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
    """A loader's batches over epoch after epoch from where it is, without end if ``num_epochs`` is None."""
    first = int(loader.state_dict()["epoch"])
    for epoch in range(first, num_epochs) if num_epochs is not None else itertools.count(first):
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
                waited = "timed out" in str(error).lower()
                kind: Literal["crashed", "timed out"] = "timed out" if waited else "crashed"
                writer.write(RankFailure(kind=kind, message=message, at_ns=time.monotonic_ns()))
                if waited:
                    # The others that wait must leave their record too, before the first end ends them all: who leaves
                    # none is the one that did not answer.
                    time.sleep(_SAY_SO_S)
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
        timeout=timedelta(seconds=settings.timeout_s),
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


def _mesh(settings: TrainSettings) -> DeviceMesh | None:
    """Make the mesh, once nothing speaks against it. Raises ConfigError."""
    name, size = settings.model_name, MODELS[settings.model_name]
    degrees, image = degrees_of(settings.parallel, dist.get_world_size()), Transforms().image
    check_fits(settings.parallel, degrees, size, settings.batch_size, (image.height, image.width))
    on_gpu = settings.profile is None
    free = torch.cuda.mem_get_info()[0] if on_gpu else available_memory_bytes() // ranks_on_host()
    check_memory(name, settings.parallel, degrees, free, alone=on_gpu)
    return make_mesh(degrees, "cuda" if on_gpu else "cpu")


def _run(settings: TrainSettings, writer: RankWriter) -> None:
    dist.barrier()  # a rank that is still at the run before must not have its neighbours' loaders run beside it
    trace = None if settings.trace is None else RankTrace(Path(settings.trace), dist.get_rank())
    recorder = None if trace is None else trace.recorder
    mesh = _mesh(settings)
    if settings.parallel.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    with slow_reads(settings.inject), make_loader(settings, _device(settings), recorder, mesh) as loader:
        source = batches(loader, settings.num_epochs)
        if "loading" in settings.leave_out:
            source = from_memory(source, None if settings.num_epochs is None else settings.num_epochs * len(loader))
            loader.close()
        run_rank(settings, source, writer, lambda: loader.stats().stages, trace, mesh, loader)
    if trace is not None:
        trace.write()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
