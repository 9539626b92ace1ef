"""One rank: process group, loader, model, loop, and its file of records.

Run by torchrun with the settings' file.

The file holds a list of runs. They are run one after the other by the same processes, each with a
loader and a model of its own, so that runs that are to be compared share the machine's state.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

import fuelrail
from fuelrail.bench.measure.accelerator import (
    Accelerator,
    EmulatedAccelerator,
)
from fuelrail.bench.measure.cuda import CudaAccelerator, peak_tflops
from fuelrail.bench.measure.machine import peak_memory_bytes
from fuelrail.bench.measure.processes import storage_bytes_read
from fuelrail.bench.measure.records import (
    RankEnd,
    RankFailure,
    RankHeader,
    RankWriter,
    StageSnapshot,
    rank_path,
)
from fuelrail.bench.planner.state import check_memory, num_parameters
from fuelrail.bench.ranks.elastic import end_with
from fuelrail.bench.ranks.tracing import RankTrace, TracedAccelerator
from fuelrail.bench.studies.train.experiment import (
    TimedTransform,
    from_memory,
    make_loader,
    noting_input,
    summing,
    transforms_of,
)
from fuelrail.bench.studies.train.settings import TrainSettings
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.checkpoints.state import tensors_of
from fuelrail.bench.trainer.distill.settings import DISTILL
from fuelrail.bench.trainer.distill.student import distilled
from fuelrail.bench.trainer.loop import batches, train
from fuelrail.bench.trainer.models.build import maker
from fuelrail.bench.trainer.models.settings import MODELS, import_function
from fuelrail.bench.trainer.strategies.parallel import make_mesh, parallelise
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    check_fits,
    degrees_of,
)
from fuelrail.bench.trainer.strategies.step import local, named_parameters
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.host import (
    available_memory_bytes,
    default_num_workers,
    ranks_on_host,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fuelrail.bench.trainer.strategies.step import Parallel
    from fuelrail.loaders.loader import DataLoader

# In a checkout the package's parts are links to folders beside it.
_PARTS_OF_OURS = tuple(
    (Path(fuelrail.__file__).parent / name).resolve()
    for name in ("pipeline", "sharding", "loaders", "bench")
)

# Between the first rank that gives up waiting and the last one.
_SAY_SO_S = 3.0


def run_rank(
    settings: TrainSettings,
    loader: DataLoader,
    writer: RankWriter,
    trace: RankTrace | None = None,
    mesh: DeviceMesh | None = None,
    transform: TimedTransform | None = None,
) -> None:
    """Train this rank on a loader's batches and write its records; with several ranks the process
    group is initialised.

    ``mesh`` is that of a composed strategy, None otherwise; ``transform`` the loader's, where it
    has one.
    """
    accelerator: Accelerator
    if settings.accelerator == "cuda":
        accelerator = CudaAccelerator(int(os.environ.get("LOCAL_RANK", "0")))
        device = torch.cuda.get_device_name()
    elif settings.profile is not None:
        accelerator = EmulatedAccelerator(settings.profile)
        device = settings.profile.device
    else:
        accelerator = Accelerator()
        device = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    if trace is not None:
        accelerator = cast("Accelerator", TracedAccelerator(accelerator, trace))

    writer.write(
        RankHeader(
            device=device,
            backend=dist.get_backend() if dist.is_initialized() else None,
            num_parameters=num_parameters(MODELS.get(settings.model, settings.model))[0],
            peak_tflops=peak_tflops(device, settings.precision)
            if settings.accelerator == "cuda"
            else None,
        )
    )
    parallel = _divided(settings, mesh, accelerator, loader)
    checkpoints = _RunCheckpoints(settings, parallel, loader, writer)
    read_before = storage_bytes_read()
    source = batches(loader, settings.epochs)
    if "loading" in settings.leave_out:
        source = from_memory(
            source,
            None if settings.epochs is None else settings.epochs * len(loader),
        )
        loader.close()
    noted, sums = summing(source, settings)
    noted = noting_input(
        noted,
        writer,
        MODELS.get(settings.model) if settings.accelerator == "cuda" else None,
    )
    first = checkpoints.first_step
    accumulation = settings.accumulation
    steps = train(
        parallel,
        noted,
        num_steps=settings.steps,
        accumulation=accumulation,
        first_step=first,
    )
    num_steps = 0
    for num_steps, record in enumerate(steps if trace is None else trace.of_steps(steps), start=1):
        record.sums = sums()
        writer.write(record)
        checkpoints.after(first + num_steps)
        if num_steps == settings.warmup:
            writer.write(StageSnapshot(stages=list(loader.stats().stages)))
    writer.write(StageSnapshot(stages=list(loader.stats().stages)))
    checkpoints.after(first + num_steps, last=True)
    read_after = storage_bytes_read()
    writer.write(
        RankEnd(
            parameters_xxh3=parameters_digest(parallel),
            peak_rss_bytes=peak_memory_bytes(),
            peak_device_bytes=torch.cuda.max_memory_allocated()
            if settings.accelerator == "cuda"
            else None,
            read_bytes=None
            if read_before is None or read_after is None
            else read_after - read_before,
            state_bytes=state_bytes(parallel),
            transform=None if transform is None else transform.use(),
        )
    )


def parameters_digest(parallel: Parallel) -> str:
    """Return xxh3 (hex) over the bytes of all parameters, in order; equal on ranks that agree.

    All ranks must call this.
    """
    digest = xxhash.xxh3_64()
    for model in parallel.models:
        for parameter in model.parameters():
            full_parameter = (
                parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            )
            digest.update(full_parameter.detach().cpu().contiguous().numpy().tobytes())
    if parallel.pipeline is None:
        return digest.hexdigest()
    group = parallel.pipeline.group
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest.hexdigest(), group=group)
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def state_bytes(parallel: Parallel) -> dict[str, int]:
    """Return the bytes of this rank's part of the model, the gradients and the optimiser's
    state.
    """
    sizes = dict.fromkeys(("model", "gradients", "optimiser"), 0)
    for name, value in tensors_of(parallel, 0).items():
        kind = name.partition(".")[0]
        if kind in sizes:
            sizes[kind] += local(value).nbytes
    learnt = (
        parameter for _, parameter in named_parameters(parallel.models) if parameter.requires_grad
    )
    return sizes | {"gradients": sum(local(parameter.detach()).nbytes for parameter in learnt)}


def _divided(
    settings: TrainSettings,
    mesh: DeviceMesh | None,
    accelerator: Accelerator,
    loader: DataLoader,
) -> Parallel:
    """Make the model, with its teacher, divided over the ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    degrees = Degrees() if "all-reduce" in settings.leave_out else degrees_of(settings, world)
    make: Any = maker(settings.model)
    wrap = None
    teacher = None
    if settings.teacher is not None or settings.teacher_layer is not None:
        wrap, teacher = distilled(
            MODELS[settings.model],
            loader,
            accelerator.torch_device,
            teacher=settings.teacher,
            layer=settings.teacher_layer,
            weights=settings.distill or DISTILL,
            temperature=settings.temperature,
            tp=degrees.tp,
        )
    parallel = parallelise(
        make if wrap is None else lambda: wrap(make()),
        msgspec.structs.replace(
            settings,
            alone="all-reduce" in settings.leave_out,
            micro_batches=settings.micro_batches or settings.batch_size,
        ),
        mesh=mesh,
        accelerator=accelerator,
    )
    parallel.teacher = teacher
    return parallel


class _RunCheckpoints:
    """The checkpoints that a run's settings ask for: restores the newest when made, then saves
    every N steps.

    Without a place for checkpoints it does nothing. ``first_step`` is the number of steps that were
    done before. Raises what :meth:`Checkpoints.restore` raises, and ConfigError where no step is
    left to do.
    """

    def __init__(
        self,
        settings: TrainSettings,
        parallel: Parallel,
        loader: DataLoader,
        writer: RankWriter,
    ) -> None:
        self.first_step = self._saved_step = 0
        self._every = settings.every
        self._parallel = parallel
        self._writer = writer
        self._loader = loader
        self._saver = None
        if settings.checkpoint is None:
            return
        identity = {"model": settings.model, "optimiser": settings.optimiser}
        saver = Checkpoints(
            settings.checkpoint,
            keep=settings.keep,
            identity=identity,
            timeout_s=settings.timeout_s,
        )
        self._saver = saver
        restored = saver.restore(parallel, loader)
        if restored is None:
            return
        self.first_step = self._saved_step = restored.step
        writer.write(restored)
        if settings.epochs is None:
            unit = "step"
            done = restored.step
            target = settings.steps or 0
        else:
            unit = "epoch"
            done = int(loader.state_dict()["epoch"])
            target = settings.epochs
        if done >= target:
            saver.close()
            raise ConfigError(
                f"the run is complete: checkpoint {restored.folder} is at {unit} {done} of "
                f"{target}; use more {unit}s, or another --checkpoint to start again"
            )

    def after(self, num_steps: int, *, last: bool = False) -> None:
        """Note that this number of steps is done, those before the run included; wait for the
        ``last`` save.
        """
        if self._saver is None:
            return
        events = []
        if num_steps - self._saved_step >= (1 if last else self._every):
            events.append(self._saver.save(num_steps, self._parallel, self._loader.state_dict()))
            self._saved_step = num_steps
        if last:
            events.append(self._saver.close())
        for done in filter(None, events):
            self._writer.write(done)


def main(arguments: Sequence[str]) -> int:
    """Run the rank that the environment (RANK, WORLD_SIZE, ...) says this process is: ``SETTINGS
    LAUNCHER_PID``.
    """
    path, launcher = arguments
    end_with(int(launcher), signal.SIGKILL)
    try:
        run_all(msgspec.json.decode(Path(path).read_bytes(), type=list[TrainSettings]))
    except FuelrailError:
        return 2
    _leave()
    return 0


def run_in_world(settings: TrainSettings) -> None:
    """Run this rank of a world that torchrun started, and bring all records into the folder of
    the first rank.
    """
    run_all([settings])
    rank_lines = rank_path(Path(settings.records), dist.get_rank()).read_bytes()
    dist.barrier()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (time.monotonic_ns(), rank_lines))
    for rank, (now_ns, lines) in enumerate(gathered) if dist.get_rank() == 0 else ():
        # Clocks of other hosts count from another moment.
        late_ns = 0 if rank == 0 else gathered[0][0] - now_ns

        def shifted(match: re.Match[bytes], late_ns: int = late_ns) -> bytes:
            return b"%s%d" % (match[1], int(match[2]) + late_ns)

        lines = re.sub(rb'("(?:start|end)_ns":)(\d+)', shifted, lines)
        rank_path(Path(settings.records), rank).write_bytes(lines)
    _leave()


def _leave() -> None:
    # Not after a failure: leaving the group waits for ranks that may be gone. Gloo may abort a rank
    # that others left.
    dist.barrier()
    dist.destroy_process_group()


def run_all(runs: Sequence[TrainSettings]) -> None:
    """Run this rank of some runs, one after the other, and write its records; raise what one
    raises.
    """
    kind = runs[0].accelerator
    if kind != "cuda":
        # Emulated: the host's cores belong to the loader, and the stand-in is small.
        torch.set_num_threads(1 if kind == "emulated" else default_num_workers())
    for number, settings in enumerate(runs):
        device = f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else None
        with RankWriter(rank_path(Path(settings.records), int(os.environ["RANK"]))) as writer:
            try:
                if number == 0:
                    if device is not None:
                        torch.cuda.set_device(device)
                    dist.init_process_group(
                        "gloo" if device is None else "nccl",
                        timeout=timedelta(seconds=settings.timeout_s),
                        device_id=None if device is None else torch.device(device),
                    )
                _run(settings, device, writer)
            except FuelrailError as error:
                writer.write(
                    RankFailure(
                        kind="refused",
                        message=str(error),
                        at_ns=time.monotonic_ns(),
                    )
                )
                raise
            except Exception as error:
                message = describe_error(error)
                waited = "timed out" in str(error).lower()
                writer.write(
                    RankFailure(
                        kind="timed out" if waited else "crashed",
                        message=message,
                        at_ns=time.monotonic_ns(),
                    )
                )
                if waited:
                    # The others that wait must leave their record too, before the first end ends
                    # them all: who leaves none is the one that did not answer.
                    time.sleep(_SAY_SO_S)
                raise


def describe_error(error: BaseException) -> str:
    """Return an error as one line, with the last place in the caller's code, if it was there.

    The caller's is what is neither of this package, nor of Python or an installed package.
    """
    message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    ours = Path(fuelrail.__file__).resolve().parent
    installed = [
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")
    ]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_file = path.is_absolute() and path.exists()
        parents = {path, *path.parents, *path.resolve().parents}
        if not is_file or not parents.isdisjoint((ours, *_PARTS_OF_OURS, *installed)):
            continue
        place = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name
        message += f" at {place}:{frame.lineno} in {frame.name}"
        if frame.line:
            message += f": {frame.line}"
        break
    return "; ".join((message, *getattr(error, "__notes__", ())))


def _run(settings: TrainSettings, device: str | None, writer: RankWriter) -> None:
    # a rank that is still at the run before must not have its neighbours' loaders run beside it
    dist.barrier()
    trace = RankTrace(settings.traces, dist.get_rank()) if settings.trace else None
    degrees = degrees_of(settings, dist.get_world_size())
    image = transforms_of(settings).image
    if settings.model in MODELS and image is not None:
        check_fits(
            settings,
            degrees=degrees,
            model=MODELS[settings.model],
            batch_size=settings.batch_size,
            image=(image.height, image.width),
        )
    on_gpu = settings.accelerator == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else available_memory_bytes() // ranks_on_host()
    check_memory(
        settings.model,
        settings=settings,
        degrees=degrees,
        precision=settings.precision,
        available=free,
        alone=on_gpu,
    )
    mesh = make_mesh(degrees, "cuda" if on_gpu else "cpu")
    for group in () if mesh is None else mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=settings.timeout_s), group)  # else torch's 30 minutes
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    recorder = None if trace is None else trace.recorder
    transform = None
    if settings.transform is not None:
        transform = TimedTransform(import_function(settings.transform, "transform"))
    with make_loader(
        settings, device=device, trace=recorder, mesh=mesh, transform=transform
    ) as loader:
        run_rank(
            settings,
            loader=loader,
            writer=writer,
            trace=trace,
            mesh=mesh,
            transform=transform,
        )
    if trace is not None:
        trace.write()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
