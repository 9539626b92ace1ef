"""A record of each step of anybody's training loop, from what its hooks say.

The hooks (:mod:`fuelrail.bench.measure.hooks`) call :meth:`Recorder.enter` and
:meth:`Recorder.leave` around phases. Each call is a mark: a reading of the clocks, and on CUDA an
event on the compute stream. The time between two marks belongs to one phase, so a step's phases
add up to it. Events are read when the device has passed them, a step late or more: nothing waits
for the device, and a wait that the device's queue hides takes no time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import resource
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import get_ident, get_native_id
from typing import Any, Final, NamedTuple

from fuelrail.bench.measure.clock import NS_PER_MS, NS_PER_S, ThreadTimes, thread_times
from fuelrail.bench.measure.machine import all_cpu_s
from fuelrail.bench.measure.nvml import NvmlWatch
from fuelrail.bench.measure.records import (
    BUSY,
    NAMED,
    PHASES,
    RankGpu,
    RankHeader,
    RankWriter,
    Record,
    StepRecord,
    rank_path,
)
from fuelrail.pipeline.runtime.host import ranks_on_host, usable_cpus

# Gaps between two phases that belong to one: the loss is computed before backward, gradients are
# clipped after it, and a model that is compiled with its hooks shows no forward pass. All other
# gaps are "other".
_GAPS: Final = {
    ("data_wait", "backward"): "forward",
    ("forward", "backward"): "forward",
    ("backward", "optimiser"): "optimiser",
    ("all_reduce", "optimiser"): "optimiser",
}

_MAX_MARKS: Final = 1024
_MAX_PENDING: Final = 64
_NUM_RECORDS: Final = 1 << 16
"""Records before each one sums up twice as many steps."""
_CPU_EVERY_NS: Final = NS_PER_S
_NAP_S: Final = 50e-6
"""A sleep, after which the trainer's thread needs Python's lock."""
_STEPS_ARE_BATCHES: Final = 64
"""Batches without any optimiser's step after which each batch counts as a step."""


class _Mark(NamedTuple):
    """The end of an interval that belongs to ``phase``; ``event`` is one on the compute stream."""

    phase: str
    ns: int
    thread: ThreadTimes
    event: Any


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that does nothing in other threads than the trainer's, and that ends the
    recording, never the training, when it fails.
    """

    @functools.wraps(method)
    def run(self: Recorder, *args: Any, **kwargs: Any) -> None:
        if self.is_recording and get_ident() == self.thread:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - an error of a measurement is no reason to end a run
                self.fail(error)

    return run


def record_event() -> Any:
    """Return a ``torch.cuda.Event`` that the compute stream passes here."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Recorder:
    """Records one rank: ``folder/rank-00000.jsonl``, which is made with the first step.

    Args:
        folder: of the ranks' files; None: the loop takes each step's record (``take_step``).
        rank: of this process.
        world: number of ranks.

    It records the thread that makes it.
    """

    def __init__(self, folder: Path | None, *, rank: int = 0, world: int = 1) -> None:
        self.folder = folder
        self.rank = rank
        self.world = world
        self.thread = get_ident()
        self.is_recording = True
        self.num_steps = 0
        self.num_workers = 0
        self.num_parameters = 0
        self.gaps = _GAPS if folder is not None else {}
        self.device: Any = None
        """A torch.device of CUDA, by whose events phases are timed."""
        self.has_forward = False
        """Whether the step had a forward pass so far: if none has, no module is known to be the
        model.
        """
        self._gpu: NvmlWatch | None = None
        self._writer: RankWriter | None = None
        self._marks: list[_Mark] = []
        self._stack: list[str] = []
        self._last = ""
        self._num_ignored = 0
        self._num_asking = 0
        self._batch_at = 0
        self._batch_use = ""  # "evaluated", or with a backward pass "trained"
        self._epoch = 0
        self._num_batches = 0
        self._record = _new_record()
        self._is_evaluating = False
        self._updated_at: int | None = None  # the mark at the step's last update
        self._was_updated = False
        self._is_after_pause = False
        self._collecting_since_ns = 0
        self._lock_ns = 0
        self._pending = deque[tuple[StepRecord, list[_Mark]]](maxlen=_MAX_PENDING)
        self._device_ns = 0
        self._sum: StepRecord | None = None
        self._files = contextlib.ExitStack()
        self._record_event: Callable[[], Any] = lambda: None
        self._totals = self._read_totals()
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Record no more."""
        self.is_recording = False

    def fail(self, error: Exception) -> None:
        """Record no more, and warn of the reason."""
        self.stop()
        text = f"the watch ended, the training goes on: {type(error).__name__}: {error}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # where warnings are errors
            sys.stderr.write(f"fuelrail: {text}\n")

    def use_device(self, device: Any) -> None:
        """Time phases by events of a CUDA device (``torch.device``) from the next step on."""
        self.device = device
        self._record_event = record_event
        self._marks.clear()
        if self.folder is not None:  # else the loop watches its GPUs itself
            self.gaps = self.gaps | {("data_wait", "forward"): "host_to_device"}
            self._gpu = self._files.enter_context(NvmlWatch(1, first=device.index))

    @_guarded
    def ask(self, batches: Any = None) -> None:
        """Note that the loop asks an iterator for a batch. A step ends with the last update before
        that.
        """
        self._num_asking += 1
        if self._num_asking > 1:  # a loader inside a loader
            return
        queue = getattr(batches, "_data_queue", None)  # of torch's iterator with workers
        if queue is not None:
            self._record.details.num_counted += 1
            self._record.details.num_idle += queue.qsize() >= batches._tasks_outstanding  # noqa: SLF001
        # What an exception has left open.
        self._stack.clear()
        self._num_ignored = 0
        if not self._marks:
            self._mark("")
        elif self._batch_use == "evaluated" and not self._is_evaluating:
            # The batch was only evaluated, so its wait was part of that.
            del self._marks[self._batch_at + 1 :]
            self._end_evaluation()
        elif self._is_evaluating:
            self._end_evaluation()
        else:
            self._mark("other")
        is_trained = self._batch_use == "trained"
        is_batch = not self._was_updated and self._num_batches >= _STEPS_ARE_BATCHES
        is_over = len(self._marks) >= _MAX_MARKS or (is_batch and is_trained)
        if self.folder is not None and (is_over or self._updated_at is not None):
            self._close(self._updated_at)
        self._write_passed()
        self._batch_at = len(self._marks) - 1
        self._batch_use = ""
        self._stack.append("data_wait")

    @_guarded
    def got(self, batch: Any) -> None:
        """Note that a batch came; None: the epoch is over."""
        self._num_asking = max(0, self._num_asking - 1)
        if self._num_asking or self._stack != ["data_wait"]:
            return
        self.leave()
        if batch is None:
            self._epoch += 1
        else:
            self._num_batches += 1
            self._record.num_samples += num_rows(batch)

    @_guarded
    def begin_forward(self, is_training: bool) -> None:
        """Note that an outermost module is called.

        ``is_training``: with gradients and in training mode. Other forward passes are evaluation
        if their batch sees no backward pass, or has had it.
        """
        is_closure = is_training and self._stack == ["optimiser"]  # the step of an optimiser calls
        is_part = bool(self._stack) and not is_closure
        if not is_part and not is_training:
            self._is_evaluating |= self._batch_use == "trained"
        if is_part or (self._is_evaluating and not is_training):
            self._num_ignored += 1
            return
        if not is_training:
            self._batch_use = "evaluated"
        self.has_forward = True
        self.enter("forward")

    @_guarded
    def end_forward(self) -> None:
        """Note that the outermost module returned."""
        if self._num_ignored:
            self._num_ignored -= 1
        else:
            self.leave()

    @_guarded
    def enter(self, phase: str) -> None:
        """Begin a phase; one inside another interrupts it."""
        if not self._marks:
            self._mark("")
        elif self._stack in ([], ["optimiser"]) and not self._is_evaluating:
            outer = self._stack[0] if self._stack else "other"
            self._mark(self.gaps.get((self._last, phase), outer))
        elif self._stack:
            self._mark(self._stack[-1])
        elif phase == "all_reduce":  # of a metric
            phase = "evaluation"
        else:
            self._end_evaluation()
        self._stack.append(phase)
        if phase == "backward":
            self._batch_use = "trained"

    @_guarded
    def leave(self) -> None:
        """End the phase that began last."""
        if not self._stack:
            return
        phase = self._stack.pop()
        if phase != "evaluation":
            self._last = self._last if phase == "logging" else phase
            self._mark(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround a phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def gradients_done(self) -> None:
        """Note, of any thread, that the last local gradient is computed; the rest of backward is
        spent in collectives.
        """
        if not self.is_recording or self._stack[-1:] != ["backward"]:
            return
        if self.device is None and get_ident() != self.thread:
            return  # another thread has times of its own
        try:
            self._mark("backward")
            self._stack[-1] = "all_reduce"
        except Exception as error:  # noqa: BLE001 - see _guarded
            self.fail(error)

    @_guarded
    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a hook of which an error must not end the training."""
        function(*args)

    @_guarded
    def updated(self) -> None:
        """Note that an optimiser made its step."""
        self._was_updated = True
        self._updated_at = len(self._marks) - 1

    def synced(self, host_ns: int) -> None:
        """Note that the host has waited for a value of the device."""
        self._record.details.sync_ns += host_ns

    def collected(self, phase: str, _: Any) -> None:
        """Count garbage collection; an entry of ``gc.callbacks``."""
        now_ns = time.monotonic_ns()
        if phase == "start":
            self._collecting_since_ns = now_ns
        elif self._collecting_since_ns:
            self._record.details.collector_ns += now_ns - self._collecting_since_ns

    @property
    def is_idle(self) -> bool:
        """Whether the loop is in none of the phases that have begun, or in an optimiser's closure."""
        is_outside = self._stack in ([], ["optimiser"]) and not self._num_ignored
        return self.is_recording and is_outside and get_ident() == self.thread

    def take_step(self) -> StepRecord:
        """End the step here, wait for the device, and return the record."""
        self._mark("other")
        self._close(None)
        record, marks = self._pending.pop()
        if marks[-1].event is not None:
            marks[-1].event.synchronize()
        return self._timed(record, marks)

    @property
    def is_at_border(self) -> bool:
        """Whether the loop has made a step's update, and nothing of the next step."""
        return self.is_idle and self._updated_at is not None and not self._is_evaluating

    def write(self, record: Record) -> None:
        """Append a record to the rank's file, once it is open."""
        if self._writer is not None:
            self._writer.write(record)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out of all records what is done inside, at a step's border, and the next step, in
        which ranks may wait for each other's end of it.
        """
        self._close(self._updated_at)
        self._write_passed()
        self.is_recording = False
        try:
            yield
        finally:
            self._marks.clear()
            self._totals = self._read_totals()
            self._is_after_pause = True
            self.is_recording = True

    def close(self) -> None:
        """Write what is left, and record no more."""
        try:
            if self.is_recording and self._updated_at is not None and self._marks:
                self._close(self._updated_at)
            self._write_passed()
            if self._sum is not None:
                self.write(self._sum)
            if self._gpu is not None:
                self._gpu.__exit__()
                for use in self._gpu.use() or ():
                    self.write(RankGpu(use=use))
        except Exception as error:  # noqa: BLE001 - see _guarded
            self.fail(error)
        self.stop()
        self._sum = self._gpu = self._writer = None
        self._files.close()

    def _mark(self, phase: str) -> None:
        mark = _Mark(phase, time.monotonic_ns(), thread_times(), self._record_event())
        self._marks.append(mark)

    def _end_evaluation(self) -> None:
        self._is_evaluating = False
        if self._marks[-1].phase == "evaluation":  # one mark for all its batches
            del self._marks[-1]
        self._mark("evaluation")

    def _close(self, end: int | None) -> None:
        """End the step at a mark, with which the next one begins; None: at the last one."""
        end = len(self._marks) - 1 if end is None else end
        if self._marks[-1].ns - self._totals["cpu_wall_ns"] >= _CPU_EVERY_NS:
            before = self._totals
            self._totals = self._read_totals()
            for name, total in self._totals.items():
                is_level = name.endswith("_bytes")
                growth = total if is_level else max(0, total - before[name])
                setattr(self._record.details, name, growth)
        self._record.epoch = self._epoch
        self._record.start_ns = self._marks[0].ns
        if not self._is_after_pause:
            self._pending.append((self._record, self._marks[: end + 1]))
        self._record = _new_record()
        self._marks = self._marks[end:]
        self._updated_at = None
        self._is_after_pause = False
        self.has_forward = False

    def _write_passed(self) -> None:
        """Write the steps whose marks the device has passed."""
        while self._pending:
            record, marks = self._pending[0]
            if marks[-1].event is not None and not marks[-1].event.query():
                return
            self._pending.popleft()
            if self._writer is None:
                self._writer = self._open_file()
            self._timed(record, marks)
            if self._sum is not None:
                _add_earlier(self._sum, record)
                _add_earlier(self._sum.details, record.details)
                record.start_ns = self._sum.start_ns
                record.end_ns = self._device_ns
            self._sum = record
            stride = 1 << (record.step // _NUM_RECORDS).bit_length()
            if (record.step + 1) % stride == 0:
                self.write(record)
                self._sum = None

    def _open_file(self) -> RankWriter:
        import torch
        import torch.distributed as dist

        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = self._files.enter_context(RankWriter(rank_path(self.folder, self.rank)))
        device = f"CPU, {torch.get_num_threads()} threads"
        if self.device is not None:
            device = torch.cuda.get_device_name(self.device)
        has_backend = dist.is_available() and dist.is_initialized()
        writer.write(
            RankHeader(
                device=device,
                backend=dist.get_backend() if has_backend else None,
                num_parameters=self.num_parameters,
                world=self.world,
                ranks_on_host=ranks_on_host(),
                num_workers=self.num_workers,
            )
        )
        return writer

    def _timed(self, record: StepRecord, marks: list[_Mark]) -> StepRecord:
        """Return a record with what its marks say, of which the device has passed the last one."""
        durations = Counter[str]()
        cpu_ns = Counter[str]()
        queued_ns = Counter[str]()
        for before, after in itertools.pairwise(marks):
            duration_ns = after.ns - before.ns
            if before.event is not None and after.event is not None:
                record.launch_ns += duration_ns if after.phase in BUSY else 0
                duration_ns = round(before.event.elapsed_time(after.event) * NS_PER_MS)
            durations[after.phase] += duration_ns
            cpu_ns[after.phase] += after.thread.cpu_ns - before.thread.cpu_ns
            queued_ns[after.phase] += after.thread.queued_ns - before.thread.queued_ns
        record.details.data_cpu_ns = cpu_ns["data_wait"]
        record.details.data_queued_ns = queued_ns["data_wait"]
        for part in NAMED:
            setattr(record.details, f"{part}_ns", durations[part])
            durations["other"] += durations[part]
        for phase in PHASES:
            setattr(record, f"{phase}_ns", durations[phase])
        busy_ns = sum(durations[phase] for phase in BUSY)
        if self.device is None:
            record.cpu_ns = min(busy_ns, sum(cpu_ns[phase] for phase in BUSY))
            waited_ns = sum(queued_ns[phase] for phase in BUSY)
            record.queued_ns = min(busy_ns - record.cpu_ns, waited_ns)
        elif self._device_ns:
            record.start_ns = self._device_ns  # the device runs behind the host by a step or more
        self._device_ns = record.start_ns + sum(durations[phase] for phase in PHASES)
        record.device_busy_ns = busy_ns
        record.end_ns = self._device_ns
        record.step = self.num_steps
        self.num_steps += 1
        return record

    def _read_totals(self) -> dict[str, int]:
        """Return the totals so far whose growth is in `StepDetails`, and the memory that is held."""
        # What the thread waits for Python's lock, which it needs after a sleep.
        queued_ns = thread_times().queued_ns
        asked_ns = time.monotonic_ns()
        time.sleep(_NAP_S)
        waited_ns = time.monotonic_ns() - asked_ns - round(_NAP_S * NS_PER_S)
        self._lock_ns += max(0, waited_ns - (thread_times().queued_ns - queued_ns))
        workers_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # that ended
        workers_queued_ns = 0
        threads_queued_ns = 0
        num_pages = 0
        with contextlib.suppress(OSError):  # one that has just ended, or another system
            process = Path("/proc/self")
            for task in (process / "task").iterdir():
                threads_queued_ns += int(_fields(task / "schedstat")[1])
            num_pages += int(_fields(process / "statm")[1])
            for child in _fields(process / f"task/{get_native_id()}/children"):
                worker = Path("/proc", child)
                num_pages += int(_fields(worker / "statm")[1])
                workers_s += sum(map(int, _fields(worker / "stat")[11:15])) / os.sysconf(
                    "SC_CLK_TCK"
                )
                workers_queued_ns += int(_fields(worker / "schedstat")[1])
        device_bytes = 0
        if self.device is not None:
            import torch

            device_bytes = torch.cuda.memory_allocated(self.device)
        thread = thread_times()
        is_whole_host = usable_cpus() == os.cpu_count()
        host_s = (all_cpu_s() or 0.0) if is_whole_host else 0.0
        return {
            "process_cpu_ns": time.process_time_ns(),
            "trainer_cpu_ns": thread.cpu_ns,
            "workers_cpu_ns": round(workers_s * NS_PER_S),
            "host_cpu_ns": round(host_s * NS_PER_S),
            "trainer_queued_ns": thread.queued_ns,
            "threads_queued_ns": threads_queued_ns,
            "workers_queued_ns": workers_queued_ns,
            "cpu_wall_ns": time.monotonic_ns(),
            "lock_ns": self._lock_ns,
            "memory_bytes": num_pages * os.sysconf("SC_PAGE_SIZE"),
            "device_bytes": device_bytes,
        }


def _new_record() -> StepRecord:
    return StepRecord(step=0, epoch=0, num_samples=0, start_ns=0)


def _fields(path: Path) -> list[str]:
    """Return the fields of a file in /proc, without the name of a process."""
    return path.read_text().rpartition(")")[2].split()


def _add_earlier(earlier: Any, later: Any) -> None:
    """Add what a record, or its details, says of the steps before to that of the steps after."""
    for name in later.__struct_fields__:
        before = getattr(earlier, name)
        now = getattr(later, name)
        if name.endswith("_bytes"):
            setattr(later, name, now or before)
        elif name.endswith("_ns") or name.startswith("num_"):
            setattr(later, name, before + now)


def num_rows(batch: Any) -> int:
    """Return the number of samples of a batch: the length of the first tensor or array in it; 0
    where there is none.
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    for part in batch if isinstance(batch, tuple | list) else (batch,):
        shape = getattr(part, "shape", None)
        if isinstance(shape, tuple) and shape:
            return int(shape[0])
    return 0
