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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset

import fuelrail as fr
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.measure.records import RankRemedies, Remedy, rank_path, read_rank, step_table
from fuelrail.pipeline.runtime.host import default_num_workers

if TYPE_CHECKING:
    from fuelrail.bench.measure.hooks import Hooks, Inputs
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
_OPTIONS: Final = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "collate_fn",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
)
"""Options of a loader that one with a change has too, but for the change."""
_NOT_COPIED: Final = {
    "DistributedDataParallel",
    "DTensor",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "SyncBatchNorm",
}
"""Parts of models whose copies would communicate, or be compiled."""

Steps: TypeAlias = NDArray[np.void]
"""A table of the steps of a rank."""


class Pace(NamedTuple):
    """A step without its wait for data: threads that compute, the CPU time of each, and the time in
    which none computes [ns].
    """

    num_threads: int
    cpu_ns: float
    idle_ns: float

    @classmethod
    def of_steps(cls, steps: Steps) -> Pace:
        """Return the pace of the mean step."""
        mean = {name: float(steps[name].mean()) for name in steps.dtype.names or ()}
        # What is counted each second is of all threads; a short run may have none of it.
        scale = mean["wall_ns"] / max(1.0, mean["cpu_wall_ns"])
        cpu_ns = max(mean["cpu_ns"], scale * mean["process_cpu_ns"] - mean["data_cpu_ns"])
        queued_ns = scale * mean["trainer_queued_ns"] - mean["data_queued_ns"]
        # What it stands in the queue for a CPU now, it will in a trial.
        queued_ns = max(mean["queued_ns"], queued_ns)
        work_ns = max(1.0, mean["wall_ns"] - mean["data_wait_ns"] - queued_ns)
        num_threads = max(1, round(cpu_ns / work_ns))
        thread_ns = min(cpu_ns / num_threads, work_ns)
        return cls(num_threads, thread_ns, work_ns - thread_ns)

    def compute(self, _: int) -> None:
        """Compute as long as one of the threads, without Python's lock."""
        end_ns = time.thread_time_ns() + self.cpu_ns
        while time.thread_time_ns() < end_ns:
            hashlib.blake2b(_BLOCK)


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
        hooks: of the training.
        seconds: time of a trial.
    """

    def __init__(self, hooks: Hooks, seconds: float) -> None:
        self._hooks = hooks
        self._seconds = seconds
        self._loader: Any = None  # the one that was asked last
        self._num_borders = 0

    def advance(self, loader: Any) -> None:
        """Try remedies once it is time. The loop is about to ask ``loader`` for a batch."""
        recorder = self._hooks.recorder
        if not recorder.is_idle:
            return
        is_training = self._loader is loader  # which gave the batch of the step that is over
        self._loader = loader
        self._num_borders += is_training and recorder.is_at_border
        if self._num_borders >= NUM_STEPS:  # the number is the same on all ranks
            self._hooks.on_ask = None
            recorder.call(self._try, loader)

    def _try(self, loader: Any) -> None:
        recorder = self._hooks.recorder
        assert recorder.folder is not None
        with recorder.pause():
            if recorder.rank == 0:
                sys.stderr.write("fuelrail: the training pauses, remedies are tried\n")
            paths = [rank_path(recorder.folder, rank) for rank in range(recorder.world)]
            own_steps = read_rank(paths.pop(recorder.rank)).steps
            peers = [read_rank(path).steps for path in paths[:_MAX_RANKS]]
            steps = with_waits(own_steps, peers)
            steps = steps[_WARM_UP:][steps["num_steps"][_WARM_UP:] == 1][-_MAX_STEPS:]
            trials = [
                functools.partial(try_loader, loader, steps, seconds=self._seconds),
                functools.partial(try_pinning, loader, steps),
            ]
            for model, inputs in self._hooks.inputs.items():
                trials.append(functools.partial(try_channels_last, model, inputs, steps))
            remedies: list[Remedy] = []
            for trial in trials:
                try:
                    remedies += trial()
                except Exception as error:  # noqa: BLE001 - of the caller's own code, in another use
                    sys.stderr.write(f"fuelrail: {trial.func.__name__}: {error}\n")
            remedies.sort(key=lambda remedy: -remedy.gain)
        recorder.write(RankRemedies(remedies=remedies))
        lines = [remedy.as_text() for remedy in remedies] or ["none applies"]
        if recorder.rank == 0:
            sys.stderr.writelines(f"fuelrail: {line}\n" for line in lines)


def with_waits(steps: Sequence[StepRecord], peers: Sequence[Sequence[StepRecord]]) -> Steps:
    """Return a table of the steps of a rank whose waits for late ranks count as waits for data:
    these are late by their loaders, or gain less by a remedy, which then counts.
    """
    ranks = [steps, *filter(None, peers)]
    count = min(map(len, ranks))
    table = step_table([rank[:count] for rank in ranks])
    own_steps: Steps = table[0]
    late_ns = own_steps["all_reduce_ns"] - table["all_reduce_ns"].min(axis=0)
    own_steps["data_wait_ns"] += late_ns
    own_steps["all_reduce_ns"] -= late_ns
    return own_steps


def try_loader(loader: Any, steps: Steps, *, seconds: float = SECONDS) -> list[Remedy]:
    """Return what changes of a loader would bring to a training of these steps.

    Only torch's DataLoader, or what is built on it, has remedies, where the steps wait for it.
    """
    step_ns = steps["wall_ns"].mean()
    if not isinstance(loader, DataLoader) or steps["data_wait_ns"].mean() < _NOTABLE * step_ns:
        return []
    pace = Pace.of_steps(steps)
    num_samples = np.median(steps["num_samples"])
    num_batches = max(1, round(num_samples / (loader.batch_size or math.inf)))
    epoch_steps = None
    if not isinstance(loader.dataset, IterableDataset):
        epoch_steps = math.ceil(len(loader) / num_batches)
        if epoch_steps * step_ns > _EPOCH_TRIALS * seconds * 1e9:
            epoch_steps = None

    def run_trial(trial: _Trial, number: int, file: Path) -> None:
        """Store the times of the steps of a trial [s]; it is run in a process of its own."""
        warnings.simplefilter("ignore")  # torch advises against more workers than CPUs
        torch.set_num_threads(1)  # the threads of the process that was forked are not here
        num_left_out = number * (_MIN_STEPS + int(seconds * 100)) * num_batches
        changed = trial.make(num_left_out)
        if changed is None:
            np.save(file, [])
            return
        batches = itertools.chain.from_iterable(itertools.repeat(changed))
        num_warm_up = epoch_steps or max(4, 2 * getattr(changed, "num_workers", 0))
        unit = epoch_steps or 1
        times: list[float] = []
        ends_s = math.inf
        with ThreadPoolExecutor(pace.num_threads) as threads:
            while time.monotonic() < ends_s or len(times) < _MIN_STEPS or len(times) % unit:
                start_s = time.monotonic()
                for _ in range(num_batches):
                    next(batches)
                list(threads.map(pace.compute, range(pace.num_threads)))
                time.sleep(pace.idle_ns / 1e9)
                times.append(time.monotonic() - start_s)
                if ends_s == math.inf and len(times) == num_warm_up:
                    ends_s = time.monotonic() + seconds
                    times.clear()
        np.save(file, times)

    all_times = defaultdict[_Trial, list[float]](list)
    with tempfile.TemporaryDirectory(prefix="fuelrail-remedies-") as folder:
        first, *changes = _trials(loader, epoch_steps, Path(folder))
        for number, trial in enumerate((first, *changes, first)):
            file = Path(folder, f"times-{number}.npy")
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=run_trial, args=(trial, number, file))
            process.start()
            process.join(_LONGEST_S)
            process.kill()
            process.join()
            if process.exitcode == 0:
                all_times[trial] += np.load(file).tolist()
            else:
                sys.stderr.write(f"fuelrail: {trial.name} was not tried\n")
            if not all_times[first]:
                return []
    # What the trial of the loader as it is misses of a real step, the others miss too.
    missed = step_ns / bootstrap_means(np.array(all_times.pop(first)), seed=1)
    return [
        _remedy(trial.name, trial.line, bootstrap_means(np.array(spent), seed=2) * missed, steps)
        for trial, spent in all_times.items()
        if spent
    ]


def _remedy(name: str, line: str, means: NDArray[np.float64], steps: Steps) -> Remedy:
    """Compare resampled means of a step's time with a change with the steps as they are [ns]."""
    now = bootstrap_means(steps["wall_ns"], seed=0)
    low, high = np.quantile(1 - means / now, (0.025, 0.975)).tolist()
    return Remedy(
        name=name,
        line=line,
        step_ms=float(means.mean()) / 1e6,
        gain=1 - float(means.mean() / now.mean()),
        low=low,
        high=high,
    )


def _trials(loader: DataLoader[Any], epoch_steps: int | None, folder: Path) -> Iterator[_Trial]:
    def make_loader(num_left_out: int, **changes: Any) -> DataLoader[Any]:
        options = {name: getattr(loader, name) for name in _OPTIONS} | changes
        if isinstance(loader.dataset, IterableDataset):
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            return DataLoader(loader.dataset, **options)
        rows: Any = loader.batch_sampler or loader.sampler
        if epoch_steps is None:  # one epoch without an end
            epochs = itertools.chain.from_iterable(itertools.repeat(rows))
            rows = itertools.islice(epochs, num_left_out, None)
        if loader.batch_sampler is None:
            return DataLoader(loader.dataset, batch_size=None, sampler=rows, **options)
        return DataLoader(loader.dataset, batch_sampler=rows, **options)

    num_workers = loader.num_workers
    counts = {default_num_workers(), 2 * max(1, num_workers), 4 * max(1, num_workers)}
    changes = [("num_workers", count) for count in sorted(counts) if count <= _MAX_WORKERS]
    if num_workers:
        changes.append(("prefetch_factor", 2 * (loader.prefetch_factor or 2)))
    if num_workers and epoch_steps:
        changes.append(("persistent_workers", True))
    yield _Trial("as it is", "", make_loader)
    for option, value in changes:
        if value != getattr(loader, option):
            change = f"{option}={value}"
            make = functools.partial(make_loader, **{option: value})
            yield _Trial(change, f"DataLoader(..., {change})", make)
    calls = ["cv2.setNumThreads(0)"] if "cv2" in sys.modules else []
    if find_spec("threadpoolctl") is not None:
        calls.append("threadpoolctl.threadpool_limits(1)")
    if num_workers and calls:
        line = f"DataLoader(..., worker_init_fn=lambda _: ({', '.join(calls)}))"
        init = functools.partial(start_one_thread, loader.worker_init_fn)
        yield _Trial("one thread", line, functools.partial(make_loader, worker_init_fn=init))
    line = "fr.decode_jpeg(Path(path).read_bytes()) in place of Image.open(path) or cv2.imread"
    yield _Trial("fr.decode_jpeg", line, functools.partial(_with_own_decoder, loader, make_loader))
    files = _files_of(loader.dataset)[:_MAX_SAMPLES]
    if files:
        line = (
            "fuelrail shard, then fr.DataLoader(DATASET, ...), which resizes the images in place "
            "of the dataset's own transforms"
        )
        yield _Trial("Fuelrail shards", line, functools.partial(_shards_of, loader, files, folder))


def start_one_thread(start: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker in which OpenCV and BLAS compute in one thread."""
    if start is not None:
        start(worker)
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
    _first_item(loader)  # which may import what decodes
    num_decoded = itertools.count()

    def decode(data: bytes, order: Any = "rgb") -> Any:
        next(num_decoded)
        return fr.decode_jpeg(data, order=order)

    pillow: Any = sys.modules.get("PIL.Image")
    if pillow is not None:
        opened = pillow.open

        def open_image(*args: Any, **kwargs: Any) -> Any:
            image = opened(*args, **kwargs)
            if image.format != "JPEG" or image.mode != "RGB":
                return image
            image.fp.seek(0)
            picture = pillow.fromarray(decode(image.fp.read()))
            # convert("RGB") copies; with our decoder there is nothing to convert.
            picture.copy = lambda: picture
            return picture

        pillow.open = open_image
    opencv: Any = sys.modules.get("cv2")
    if opencv is not None:
        decoded = opencv.imdecode

        def decode_image(data: Any, flags: int) -> Any:
            data = bytes(data)
            if flags != opencv.IMREAD_COLOR or not data.startswith(b"\xff\xd8"):
                return decoded(np.frombuffer(data, np.uint8), flags)
            return decode(data, "bgr")

        opencv.imdecode = decode_image
        opencv.imread = lambda path, flags=1: decode_image(Path(path).read_bytes(), flags)
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
    from fuelrail.sharding.sources.shared.files import LINKED

    leaves = tree_leaves(_first_item(loader))
    shapes: list[tuple[int, ...]] = [getattr(leaf, "shape", ()) for leaf in leaves]
    sizes = [shape for shape in shapes if len(shape) == 3 and 3 in (shape[0], shape[-1])]
    if not sizes:
        return None
    height, width = sizes[0][1:] if sizes[0][0] == 3 else sizes[0][:2]
    images = folder / "images" / "images"
    images.mkdir(parents=True)
    for number, file in enumerate(files):
        (images / f"{number:06}{file.suffix.lower()}").symlink_to(file.absolute())
    os.environ[LINKED] = os.path.commonpath([file.absolute().parent for file in files])
    fr.shard(f"imagefolder:{images.parent}", folder / "dataset", workers=1, engine="threads")
    resized = fr.Transforms(image=fr.ImageAugment(height=height, width=width, resize="stretch"))
    size = loader.batch_size or 1
    return fr.DataLoader(folder / "dataset", size, shuffle=True, drop_last=True, transforms=resized)


def try_pinning(loader: Any, steps: Steps) -> list[Remedy]:
    """Return what pinned memory would bring: copies to the device take as much less of the step as
    copies of pinned memory are faster here.
    """
    from fuelrail.bench.measure.cuda import pinned_copy

    is_small = steps["host_to_device_ns"].sum() < _NOTABLE * steps["wall_ns"].sum()
    copy_pinned = None if is_small else pinned_copy(_COPIED_BYTES)
    if copy_pinned is None or getattr(loader, "pin_memory", True):
        return []
    pageable = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    ways = (pageable.cuda, functools.partial(copy_pinned, 0))
    line = "DataLoader(..., pin_memory=True), and batch.to(device, non_blocking=True)"
    return [_compare("pin_memory=True", line, ways, steps, "host_to_device")]


def try_channels_last(model: nn.Module, inputs: Inputs, steps: Steps) -> list[Remedy]:
    """Return what another memory format would bring to a model, of which a copy is tried with
    random inputs of these shapes.
    """
    parts = list(model.modules())
    weights = [part.weight for part in parts if isinstance(part, nn.Conv2d)]
    is_other = any(weight.is_contiguous() and weight[0].numel() > 1 for weight in weights)
    kinds = {type(part).__name__ for part in (*parts, *model.parameters())}
    is_compiled = any(part._compiled_call_impl is not None for part in parts)  # noqa: SLF001
    if not (inputs and is_other) or kinds & _NOT_COPIED or is_compiled:
        return []
    states = random.getstate(), np.random.get_state()
    devices = {place.index or 0 for _, _, place in inputs if place.type == "cuda"}
    with torch.random.fork_rng(devices), torch.enable_grad():
        tensors = [torch.rand(shape, device=place).to(kind) for shape, kind, place in inputs]

        def pass_through(form: torch.memory_format, twin: nn.Module) -> None:
            images = [part.to(memory_format=form) if part.dim() == 4 else part for part in tensors]
            leaves = [leaf for leaf in tree_leaves(twin(*images)) if isinstance(leaf, torch.Tensor)]
            torch.stack([leaf.sum() for leaf in leaves if leaf.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]

        ways = []
        for form in (torch.contiguous_format, torch.channels_last):
            twin: Any = copy.deepcopy(model)
            ways.append(functools.partial(pass_through, form, twin.to(memory_format=form)))
        line = "model.to(memory_format=torch.channels_last), and its images too"
        remedy = _compare("channels_last", line, ways, steps, "forward", "backward")
    random.setstate(states[0])
    np.random.set_state(states[1])
    return [remedy]


def _compare(
    name: str, line: str, ways: Sequence[Callable[[], object]], steps: Steps, *phases: str
) -> Remedy:
    """Time two ways in turns; the remedy is the second one, in these phases of a step."""
    times = np.empty((1 + _NUM_COMPARED, len(ways)))
    for turn, way in np.ndindex(*times.shape):
        start_s = time.monotonic()
        ways[way]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[turn, way] = time.monotonic() - start_s
    before, after = (bootstrap_means(spent, seed=1) for spent in times[1:].T)
    share_ns = sum(steps[f"{phase}_ns"].mean() for phase in phases)
    means = bootstrap_means(steps["wall_ns"], seed=0) - (1 - after / before) * share_ns
    return _remedy(name, line, means, steps)
