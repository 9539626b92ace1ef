"""What a change would bring, tried between two steps of a training that is watched.

A trial of a loader runs in a process forked from the trainer's, whose state it cannot change: it
iterates a loader like the trainer's own but for the change, and in place of a step it computes and
sleeps as long as a step of the trainer does without its wait for data. A model's memory format is
tried on a copy of the model.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import itertools
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset

from fuelrail.bench.measure.hooks import ModuleHook
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.measure.records import rank_path, read_rank
from fuelrail.bench.studies.watch.judge import total_details
from fuelrail.bench.studies.watch.report import Remedy, remedies_path
from fuelrail.pipeline.runtime.host import default_num_workers

if TYPE_CHECKING:
    from fuelrail.bench.measure.recorder import Recorder
    from fuelrail.bench.measure.records import StepRecord

SECONDS: Final = 4.0
"""Time of a trial, once its loader runs."""
NUM_STEPS: Final = 40
"""Steps before remedies are tried."""
_WARM_UP: Final = 10
_MAX_STEPS: Final = 200
_EPOCH_TRIALS: Final = 2.0
"""Epochs of up to this many trials are tried whole, with the start of their workers."""
_MIN_STEPS: Final = 8
_MAX_WORKERS: Final = 32
_MAX_SAMPLES: Final = 1000
_LONGEST_S: Final = 180.0
_NOTABLE: Final = 0.02
"""Where less of the time is lost, no change of what loses it is tried."""
_BLOCK: Final = bytes(1 << 16)
_MAX_RANKS: Final = 16
_NUM_COMPARED: Final = 6
_COPIED_BYTES: Final = 1 << 24
_JOIN_S: Final = 5.0
_OPTIONS: Final = (
    *("num_workers", "prefetch_factor", "persistent_workers", "collate_fn", "timeout"),
    *("worker_init_fn", "multiprocessing_context"),
)
"""Options of a loader that one with a change has too, but for the change."""
_OVER_RANKS: Final = {"DTensor", "FullyShardedDataParallel", "SyncBatchNorm"}
"""Parts of models whose copies would communicate."""


_Inputs: TypeAlias = list[tuple[torch.Size, torch.dtype, torch.device]]


class Pace(NamedTuple):
    """A step without its wait for data: batches, threads that compute, the CPU time of each, and
    the time in which none computes [ns].
    """

    num_batches: int
    num_threads: int
    cpu_ns: float
    idle_ns: float

    @classmethod
    def of_steps(cls, steps: Sequence[StepRecord], num_batches: int) -> Pace:
        """Return the pace of the mean step."""
        total = total_details(steps)
        wall_ns = fmean(step.wall_ns for step in steps)
        work_ns = wall_ns - fmean(step.data_wait_ns for step in steps)
        cpu_ns = fmean(step.cpu_ns for step in steps)
        queued_ns = fmean(step.queued_ns for step in steps)
        if total.cpu_wall_ns:
            scale = wall_ns / total.cpu_wall_ns
            in_data_ns = total.data_cpu_ns / len(steps)
            cpu_ns = max(cpu_ns, scale * total.process_cpu_ns - in_data_ns)
            queued_ns = scale * total.trainer_queued_ns - total.data_queued_ns / len(steps)
        # What it stands in the queue for a CPU now, it will in a trial.
        work_ns = max(1.0, work_ns - max(0.0, queued_ns))
        num_threads = max(1, round(cpu_ns / work_ns))
        thread_ns = min(cpu_ns / num_threads, work_ns)
        return cls(num_batches, num_threads, thread_ns, work_ns - thread_ns)


class _Trial(NamedTuple):
    """A change, the line to change, and what makes the loader with it, given the number of batches
    to leave out at first; None where the change is none for this loader.
    """

    name: str
    line: str
    make: Callable[[int], Iterable[Any] | None]


class Trials:
    """Tries remedies at the first border of two steps at which the trainer's pace is known.

    Args:
        recorder: of the training.
        seconds: time of a trial.
    """

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        self._recorder = recorder
        self._seconds = seconds
        self._loader: Any = None  # the one that was asked last
        self._num_borders = 0
        self._inputs: dict[nn.Module, _Inputs] | None = None

    def advance(self, loader: Any, modules: Sequence[nn.Module]) -> bool:
        """Try remedies once it is time; return whether that is over.

        The loop is about to ask ``loader`` for a batch.

        ``modules``: those whose calls are forward passes.
        """
        recorder = self._recorder
        if not recorder.is_idle:
            return not recorder.is_recording
        is_training = self._loader is loader  # which gave the batch of the step that is over
        self._loader = loader
        self._num_borders += is_training and recorder.is_at_border
        if not is_training or not recorder.is_at_border or self._num_borders < NUM_STEPS:
            return False  # the number is the same on all ranks
        try:
            if self._inputs is None:  # noted in the step that follows
                self._inputs = {}
                for module in modules:
                    _note_inputs(module, self._inputs, recorder)
                return False
            with recorder.pause():
                self._try(loader, self._inputs)
        except Exception as error:  # noqa: BLE001 - the training goes on
            warnings.warn(f"no remedies were tried: {error}", RuntimeWarning, stacklevel=2)
        return True

    def _try(self, loader: Any, inputs: dict[nn.Module, _Inputs]) -> None:
        recorder = self._recorder
        assert recorder.folder is not None
        is_first = recorder.rank == 0
        if is_first:
            sys.stderr.write("fuelrail: the training pauses, remedies are tried\n")
        ranks = {*range(min(recorder.world, _MAX_RANKS)), recorder.rank}
        logs = {rank: read_rank(rank_path(recorder.folder, rank)).steps for rank in ranks}
        steps = with_waits(logs.pop(recorder.rank), list(logs.values()))[_WARM_UP:]
        steps = [step for step in steps if step.details.num_steps == 1][-_MAX_STEPS:]
        trials = [
            functools.partial(try_loader, loader, steps, seconds=self._seconds),
            functools.partial(try_pinning, loader, steps),
        ]
        for module, shapes in inputs.items():
            trials.append(functools.partial(try_channels_last, module, shapes, steps))
        remedies: list[Remedy] = []
        for trial in trials:
            try:
                remedies += trial()
            except Exception as error:  # noqa: BLE001 - of the caller's own code, in another use
                sys.stderr.write(f"fuelrail: {trial.func.__name__}: {error}\n")
        remedies.sort(key=lambda remedy: -remedy.gain)
        path = remedies_path(recorder.folder, recorder.rank)
        path.write_bytes(msgspec.json.encode(remedies))
        if is_first:
            for line in [remedy.as_text() for remedy in remedies] or ["none applies"]:
                sys.stderr.write(f"fuelrail: {line}\n")


def with_waits(
    steps: Sequence[StepRecord], peers: Sequence[Sequence[StepRecord]]
) -> list[StepRecord]:
    """Return the steps of a rank whose waits for late ranks count as waits for data: these are
    late by their loaders, or gain less by a remedy, which then counts.
    """
    counted = []
    for number, step in enumerate(steps):
        waits_ns = [peer[number].all_reduce_ns for peer in peers if len(peer) > number]
        late_ns = max(0, step.all_reduce_ns - min(waits_ns, default=step.all_reduce_ns))
        changes = {
            "data_wait_ns": step.data_wait_ns + late_ns,
            "all_reduce_ns": step.all_reduce_ns - late_ns,
        }
        counted.append(msgspec.structs.replace(step, **changes))
    return counted


def _note_inputs(module: nn.Module, inputs: dict[nn.Module, _Inputs], recorder: Recorder) -> None:
    """Note the shapes of what the next call of a module is given, if that is tensors alone."""
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    if hasattr(inner, "_orig_mod") or inner._compiled_call_impl is not None:  # noqa: SLF001
        return

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        handle.remove()
        if args and all(isinstance(value, torch.Tensor) for value in args):
            inputs[inner] = [(value.shape, value.dtype, value.device) for value in args]

    handle = module.register_forward_pre_hook(ModuleHook(recorder, note))


def try_loader(
    loader: Any, steps: Sequence[StepRecord], *, seconds: float = SECONDS
) -> list[Remedy]:
    """Return what changes of a loader would bring to a training of these steps.

    Only torch's DataLoader, or what is built on it, has remedies, where the steps wait for it.
    """
    steps_ns = np.array([step.wall_ns for step in steps], np.float64)
    waited_ns = sum(step.data_wait_ns for step in steps)
    if not isinstance(loader, DataLoader) or waited_ns < _NOTABLE * steps_ns.sum():
        return []
    num_samples = np.median([step.num_samples for step in steps])
    num_batches = max(1, round(num_samples / (loader.batch_size or math.inf)))
    pace = Pace.of_steps(steps, num_batches)
    epoch_steps = None
    if not isinstance(loader.dataset, IterableDataset):
        epoch_steps = math.ceil(len(loader) / num_batches)
        if epoch_steps * steps_ns.mean() > _EPOCH_TRIALS * seconds * 1e9:
            epoch_steps = None
    times: dict[_Trial, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fuelrail-remedies-") as folder:
        first, *changes = _trials(loader, epoch_steps, Path(folder))
        for number, trial in enumerate((first, *changes, first)):
            run = functools.partial(
                _run_trial, trial, pace, number=number, seconds=seconds, epoch_steps=epoch_steps
            )
            times[trial] = [*times.get(trial, ()), *_in_fork(run, trial.name)]
            if not times[first]:
                return []
    now = bootstrap_means(steps_ns, seed=0)
    # What the trial of the loader as it is misses of a real step, the others miss too.
    missed = now.mean() / bootstrap_means(np.array(times.pop(first)), seed=1)
    return [
        _remedy(trial.name, trial.line, bootstrap_means(np.array(spent), seed=2) * missed, now)
        for trial, spent in times.items()
        if spent
    ]


def _remedy(name: str, line: str, means: NDArray[np.float64], now: NDArray[np.float64]) -> Remedy:
    """Compare resampled means of a step's time with a change, and as it is [ns]."""
    low, high = np.quantile(1 - means / now, (0.025, 0.975)).tolist()
    return Remedy(
        name=name,
        line=line,
        step_ms=float(means.mean()) / 1e6,
        gain=1 - float(means.mean() / now.mean()),
        low=low,
        high=high,
    )


def _trials(loader: DataLoader[Any], epoch_steps: int | None, folder: Path) -> list[_Trial]:
    options = {name: getattr(loader, name) for name in _OPTIONS}

    def make_loader(num_left_out: int, **changes: Any) -> DataLoader[Any]:
        batches: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if not isinstance(loader.dataset, IterableDataset):
            rows: Any = loader.batch_sampler or loader.sampler
            if epoch_steps is None:  # one epoch without an end
                epochs = itertools.chain.from_iterable(itertools.repeat(rows))
                rows = itertools.islice(epochs, num_left_out, None)
            batches = {"batch_sampler": rows}
            if loader.batch_sampler is None:
                batches = {"batch_size": None, "sampler": rows}
        return DataLoader(loader.dataset, **batches, **(options | changes))

    trials = [_Trial("as it is", "", make_loader)]

    def add_trial(name: str, line: str | None = None, **changes: Any) -> None:
        make = functools.partial(make_loader, **changes)
        trials.append(_Trial(name, line or f"DataLoader(..., {name})", make))

    num_workers = loader.num_workers
    counts = {default_num_workers(), 2 * max(1, num_workers), 4 * max(1, num_workers)}
    for count in sorted(counts - {num_workers}):
        if count <= _MAX_WORKERS:
            add_trial(f"num_workers={count}", num_workers=count)
    if num_workers:
        factor = 2 * (loader.prefetch_factor or 2)
        add_trial(f"prefetch_factor={factor}", prefetch_factor=factor)
        if epoch_steps and not loader.persistent_workers:
            add_trial("persistent_workers=True", persistent_workers=True)
        calls = ["cv2.setNumThreads(0)"] if "cv2" in sys.modules else []
        if find_spec("threadpoolctl") is not None:
            calls.append("threadpoolctl.threadpool_limits(1)")
        if calls:
            line = f"DataLoader(..., worker_init_fn=lambda _: ({', '.join(calls)}))"
            add_trial("one thread", line, worker_init_fn=OneThread(loader.worker_init_fn))
    line = (
        "fr.decode_jpeg(Path(path).read_bytes()) in place of PIL.Image.open(path) or "
        "cv2.imread(path)"
    )
    make = functools.partial(_with_own_decoder, loader, make_loader)
    trials.append(_Trial("fr.decode_jpeg", line, make))
    files = _files_of(loader.dataset)
    if files:
        line = (
            "fuelrail shard, then fr.DataLoader(DATASET, ...), which resizes the images in place "
            "of the dataset's own transforms"
        )
        make = functools.partial(_shards_of, loader, files[:_MAX_SAMPLES], folder)
        trials.append(_Trial("Fuelrail shards", line, make))
    return trials


def _run_trial(
    trial: _Trial, pace: Pace, *, number: int, seconds: float, epoch_steps: int | None
) -> list[float]:
    """Return the times of the steps of a trial [s]; it is run in a process of its own."""
    warnings.simplefilter("ignore")  # torch advises against more workers than CPUs
    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    num_left_out = number * (_MIN_STEPS + int(seconds * 100)) * pace.num_batches
    loader = trial.make(num_left_out)
    if loader is None:
        return []
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    num_warm_up = epoch_steps or max(4, 2 * getattr(loader, "num_workers", 0))
    unit = epoch_steps or 1
    times: list[float] = []
    ends_s = math.inf

    def compute(_: int) -> None:  # without Python's lock
        end_ns = time.thread_time_ns() + pace.cpu_ns
        while time.thread_time_ns() < end_ns:
            hashlib.blake2b(_BLOCK)

    with ThreadPoolExecutor(pace.num_threads) as threads:
        while time.monotonic() < ends_s or len(times) < _MIN_STEPS or len(times) % unit:
            start_s = time.monotonic()
            for _ in range(pace.num_batches):
                next(batches)
            list(threads.map(compute, range(pace.num_threads)))
            time.sleep(pace.idle_ns / 1e9)
            times.append(time.monotonic() - start_s)
            if ends_s == math.inf and len(times) == num_warm_up:
                ends_s = time.monotonic() + seconds
                times.clear()
    return times


def _in_fork(function: Callable[[], list[float]], name: str) -> list[float]:
    """Call a function in a process forked from this one; nothing where it fails."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        times = []
        try:
            times = function()
        except Exception as error:  # noqa: BLE001 - of a caller's own code, under a change
            sys.stderr.write(f"fuelrail: {name} was not tried: {error}\n")
        sender.send(times)

    process = context.Process(target=answer)
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(_LONGEST_S) else []
    except EOFError:
        return []
    finally:
        process.join(_JOIN_S)
        process.kill()
        process.join()
        receiver.close()


class OneThread:
    """Starts a worker in which OpenCV and BLAS compute in one thread."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        if self._inner is not None:
            self._inner(worker)
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        if find_spec("threadpoolctl") is not None:
            importlib.import_module("threadpoolctl").threadpool_limits(1)


def _with_own_decoder(
    loader: DataLoader[Any], make: Callable[[int], Iterable[Any]], num_left_out: int
) -> Iterable[Any] | None:
    """Decode JPEGs that Pillow or OpenCV is given by our decoder, in this process and its workers;
    None where a sample has none.
    """
    from fuelrail.loaders.decode.arrays import decode_jpeg

    _first_item(loader)  # which may import what decodes
    num_decoded = itertools.count()

    def decode(data: bytes, order: Any = "rgb") -> Any:
        next(num_decoded)
        return decode_jpeg(data, order=order)

    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is not None:
        opened = pillow.open

        def open_image(file: Any, *args: Any, **kwargs: Any) -> Any:
            image = opened(file, *args, **kwargs)
            if image.format != "JPEG" or image.mode != "RGB":
                return image
            if not hasattr(file, "read"):
                return pillow.fromarray(decode(Path(file).read_bytes()))
            file.seek(0)
            return pillow.fromarray(decode(file.read()))

        pillow.open = open_image
    opencv: Any = sys.modules.get("cv2")
    if opencv is not None:
        decoded = opencv.imdecode

        def read_image(path: Any, flags: int = 1) -> Any:
            return decode_image(Path(path).read_bytes(), flags)

        def decode_image(data: Any, flags: int) -> Any:
            data = bytes(data)
            if flags != opencv.IMREAD_COLOR or not data.startswith(b"\xff\xd8"):
                return decoded(np.frombuffer(data, np.uint8), flags)
            return decode(data, "bgr")

        opencv.imread = read_image
        opencv.imdecode = decode_image
    _first_item(loader)
    return make(num_left_out) if next(num_decoded) else None


def _first_item(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return next(iter(loader.dataset))
    return loader.dataset[next(iter(loader.sampler))]


def _files_of(dataset: Any) -> list[Path]:
    """Return the images of a dataset that has a list of them, each alone or with its label."""
    if isinstance(dataset, Subset):
        files = _files_of(dataset.dataset)
        return [files[row] for row in dataset.indices] if files else []
    for value in getattr(dataset, "__dict__", {}).values():
        if not isinstance(value, list | tuple) or not value or len(value) != len(dataset):
            continue
        entries = [entry[0] if isinstance(entry, tuple) else entry for entry in value]
        paths = [Path(entry) for entry in entries if isinstance(entry, str | Path)]
        is_images = all(path.suffix.lower() in (".jpg", ".jpeg", ".png") for path in paths)
        if len(paths) == len(dataset) and is_images and paths[0].is_file():
            return paths
    return []


def _shards_of(
    loader: DataLoader[Any], files: Sequence[Path], folder: Path, _: int
) -> Iterable[Any] | None:
    """Convert images to shards, and return a loader of these whose images have the size that the
    dataset gives them; None where it gives none.
    """
    from fuelrail.loaders.config import Transforms
    from fuelrail.loaders.loader import DataLoader as FuelrailLoader
    from fuelrail.pipeline.transforms.image import ImageAugment
    from fuelrail.sharding.api import shard
    from fuelrail.sharding.sources.shared.files import LINKED

    item = _first_item(loader)
    parts = list(item.values()) if isinstance(item, dict) else item
    parts = parts if isinstance(parts, tuple | list) else [item]
    shapes: list[Any] = [getattr(part, "shape", ()) for part in parts]
    sizes: list[tuple[int, ...]] = [
        tuple(shape) for shape in shapes if len(shape) == 3 and 3 in (shape[0], shape[-1])
    ]
    if not sizes:
        return None
    is_planes = sizes[0][0] == 3
    height = sizes[0][1 if is_planes else 0]
    width = sizes[0][2 if is_planes else 1]
    images = folder / "images" / "images"
    images.mkdir(parents=True)
    for number, file in enumerate(files):
        (images / f"{number:06}{file.suffix.lower()}").symlink_to(file.absolute())
    os.environ[LINKED] = os.path.commonpath([file.absolute().parent for file in files])
    shard(f"imagefolder:{images.parent}", folder / "dataset", workers=1, engine="threads")
    return FuelrailLoader(
        folder / "dataset",
        loader.batch_size or 1,
        shuffle=True,
        drop_last=True,
        transforms=Transforms(image=ImageAugment(height=height, width=width, resize="stretch")),
    )


def try_pinning(loader: Any, steps: Sequence[StepRecord]) -> list[Remedy]:
    """Return what pinned memory would bring: copies to the device take as much less of the step as
    copies of pinned memory are faster here.
    """
    from fuelrail.bench.measure.cuda import pinned_copy

    copies_ns = sum(step.host_to_device_ns for step in steps)
    is_small = copies_ns < _NOTABLE * sum(step.wall_ns for step in steps)
    copy_pinned = None if is_small else pinned_copy(_COPIED_BYTES)
    if copy_pinned is None or getattr(loader, "pin_memory", True):
        return []
    pageable = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    ways = (pageable.cuda, functools.partial(copy_pinned, 0))
    line = "DataLoader(..., pin_memory=True), and batch.to(device, non_blocking=True)"
    return [_compare("pin_memory=True", line, steps, phases=("host_to_device",), ways=ways)]


def try_channels_last(
    model: nn.Module, inputs: _Inputs, steps: Sequence[StepRecord]
) -> list[Remedy]:
    """Return what another memory format would bring to a model, of which a copy is tried with
    random inputs of these shapes.
    """
    weights = [part.weight for part in model.modules() if isinstance(part, nn.Conv2d)]
    kinds = {type(part).__name__ for part in (*model.modules(), *model.parameters())}
    if kinds & _OVER_RANKS or not any(
        weight.is_contiguous() and weight[0].numel() > 1 for weight in weights
    ):
        return []
    states = random.getstate(), np.random.get_state()
    devices = {place.index or 0 for _, _, place in inputs if place.type == "cuda"}
    with torch.random.fork_rng(devices), torch.enable_grad():
        tensors = [torch.rand(shape, device=place).to(kind) for shape, kind, place in inputs]

        def pass_through(form: torch.memory_format, twin: nn.Module) -> None:
            parts = [part.to(memory_format=form) if part.dim() == 4 else part for part in tensors]
            leaves = [leaf for leaf in tree_leaves(twin(*parts)) if isinstance(leaf, torch.Tensor)]
            torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]

        ways = []
        for form in (torch.contiguous_format, torch.channels_last):
            twin: Any = copy.deepcopy(model)
            ways.append(functools.partial(pass_through, form, twin.to(memory_format=form)))
        line = "model.to(memory_format=torch.channels_last), and its images too"
        remedy = _compare("channels_last", line, steps, phases=("forward", "backward"), ways=ways)
    random.setstate(states[0])
    np.random.set_state(states[1])
    return [remedy]


def _compare(
    name: str,
    line: str,
    steps: Sequence[StepRecord],
    *,
    phases: Sequence[str],
    ways: Sequence[Callable[[], object]],
) -> Remedy:
    """Time two ways in turns; the remedy is the second one, in these phases of a step."""
    times: list[list[float]] = [[], []]
    for _ in range(1 + _NUM_COMPARED):
        for way, spent in zip(ways, times, strict=True):
            start_s = time.monotonic()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent.append(time.monotonic() - start_s)
    before, after = (bootstrap_means(np.array(spent[1:]), seed=1) for spent in times)
    now = bootstrap_means(np.array([step.wall_ns for step in steps], np.float64), seed=0)
    share_ns = np.mean([sum(step.phase_ns(phase) for phase in phases) for step in steps])
    return _remedy(name, line, now - (1 - after / before) * share_ns, now)
