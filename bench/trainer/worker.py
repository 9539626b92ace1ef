"""One rank: process group, loader, model, loop, and its file of records. Run by torchrun with the settings' file.

The file holds a list of runs. They are run one after the other by the same processes, each with a loader and a model
of its own, so that runs that are to be compared share the machine's state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from fuelrail.bench.measure.accelerator import Accelerator, EmulatedAccelerator, without_costs
from fuelrail.bench.measure.clock import MonotonicClock
from fuelrail.bench.measure.collectives import link_of
from fuelrail.bench.measure.cuda import CudaAccelerator, peak_tflops
from fuelrail.bench.measure.machine import peak_memory_bytes
from fuelrail.bench.measure.processes import storage_bytes_read
from fuelrail.bench.measure.records import RankEnd, RankFailure, RankHeader, RankWriter, rank_path, snapshot
from fuelrail.bench.trainer.checkpoints.run import RunCheckpoints
from fuelrail.bench.trainer.checkpoints.state import parameters_digest
from fuelrail.bench.trainer.distill.student import distilled
from fuelrail.bench.trainer.elastic import end_with, join_world
from fuelrail.bench.trainer.experiment import batches, from_memory, make_loader, noting_input, transforms_of
from fuelrail.bench.trainer.injection import StallingAccelerator, late_batches, slow_reads
from fuelrail.bench.trainer.loop import take, train
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.settings import TrainSettings
from fuelrail.bench.trainer.strategies.fits import check_memory
from fuelrail.bench.trainer.strategies.optimiser import scaled_rate
from fuelrail.bench.trainer.strategies.parallel import build, make_mesh, parallelise
from fuelrail.bench.trainer.strategies.settings import Degrees, check_fits, degrees_of
from fuelrail.bench.trainer.tracing import RankTrace, TracedAccelerator
from fuelrail.loaders.config import available_memory_bytes, ranks_on_host
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.trainer.models.staged import StagedModel
    from fuelrail.bench.trainer.strategies.parallel import Parallel
    from fuelrail.loaders import DataLoader
    from fuelrail.pipeline.runtime.stages import StageClock


# Between the first rank that gives up waiting and the last one.
_SAY_SO_S = 3.0


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
        accelerator = TracedAccelerator(accelerator, trace)

    # The seed makes every rank start from the same weights, and runs repeatable.
    model = build(MODELS[settings.model_name], accelerator.torch_device, settings.seed)
    writer.write(_header(settings, model))
    student, teacher = model, None
    if settings.distill is not None:
        assert loader is not None, "a teacher's layer comes with the loader"
        tp = 1 if mesh is None or "tp" not in (mesh.mesh_dim_names or ()) else mesh["tp"].size()
        student, teacher = distilled(model, settings.distill, loader, accelerator.torch_device, tp=tp)
    parallel = _divide(student, settings, mesh, accelerator)
    parallel.teacher = teacher
    checkpoints = RunCheckpoints(settings, parallel, loader, writer)
    num_steps = 0
    read_before = storage_bytes_read()
    noted = noting_input(batches, writer, None if settings.profile is not None else MODELS[settings.model_name])
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
            peak_rss_bytes=peak_memory_bytes(),
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
                    acts = settings.profile is not None and settings.model_name in ("light", "stand-in")
                    join_world(_device(settings), settings.timeout_s, acts=acts)
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


def _mesh(settings: TrainSettings) -> DeviceMesh | None:
    """Make the mesh, once nothing speaks against it. Raises ConfigError."""
    name, size = settings.model_name, MODELS[settings.model_name]
    degrees, image = degrees_of(settings.parallel, dist.get_world_size()), transforms_of(settings).image
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
