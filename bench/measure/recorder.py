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
import math
import os
import resource
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import get_ident
from typing import Any, Final, NamedTuple

from fuelrail.bench.measure.clock import NS_PER_S, ThreadTimes, record_event, thread_times
from fuelrail.bench.measure.machine import host_cpu_s
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
from fuelrail.pipeline.runtime.host import ranks_on_host

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
"""Marks without an update, after which a record ends."""
_NUM_RECORDS: Final = 1 << 16
"""Steps with a record of their own; when their number has doubled, a record is of two steps, and so
on.
"""
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
        self.gaps = _GAPS if folder is not None else {}
        self.device: Any = None
        """A torch.device of CUDA, by whose events phases are timed."""
        self.has_forward = False
        """Whether the record has a forward pass so far: if none has, no module is known to be the
        model.
        """
        self._gpu: NvmlWatch | None = None
        self._writer: RankWriter | None = None
        self._marks: list[_Mark] = []
        self._stack: list[str] = []
        self._last = ""
        self._num_asking = 0
        self._batch_at = 0
        self._batch_use = ""  # "evaluated", or with a backward pass "trained"
        self._num_without_update = 0.0  # batches; less than none where there is an optimiser
        self._is_evaluating = False
        self._updated_at: int | None = None  # the mark at the record's last update
        self._is_updated = False  # since the loop asked for the batch
        self._num_updated = 0  # steps of the record
        self._is_after_pause = False
        self._collecting_since_ns = 0
        self._pending = deque[tuple[StepRecord, list[_Mark]]]()  # few: a device's queue is short
        self._device_ns = 0
        self._files = contextlib.ExitStack()
        self._totals = Counter[str]()
        self._record = StepRecord()
        self._sample()  # what the process took before is of no step
        self._record = StepRecord()
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Record no more."""
        self.is_recording = False

    def fail(self, error: Exception) -> None:
        """Record no more, and warn of the reason."""
        self.stop()
        text = f"the watch ended, the training goes on: {type(error).__name__}: {error}"
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # also where warnings are errors
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def use_device(self, device: Any) -> None:
        """Time phases by events of a CUDA device (``torch.device``) from the next step on."""
        self.device = device
        self._marks.clear()
        if self.folder is not None:  # else the loop watches its GPUs itself
            self.gaps = self.gaps | {("data_wait", "forward"): "host_to_device"}
            self._gpu = self._files.enter_context(NvmlWatch(1, first=device.index))

    @_guarded
    def ask(self, batches: Any = None) -> None:
        """Note that the loop asks an iterator for a batch. A step ends with the last update before
        that, and a record with the last one of its steps.
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
        is_batch = self._num_without_update >= _STEPS_ARE_BATCHES and self._batch_use == "trained"
        is_over = is_batch or len(self._marks) - (self._updated_at or 0) >= _MAX_MARKS
        # The same on all ranks, whose records are compared.
        num_wanted = 1 << (self.num_steps // _NUM_RECORDS).bit_length()
        if self.folder is not None and (is_over or self._num_updated >= num_wanted):
            self._end_record()
        self._is_updated = False
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
        self._record.epoch += batch is None
        self._record.num_samples += num_rows(batch)
        self._num_without_update += 1

    @_guarded
    def begin_forward(self, is_training: bool) -> None:
        """Note that an outermost module is called.

        ``is_training``: with gradients and in training mode. Other forward passes are evaluation
        if their batch sees no backward pass, or has had it.
        """
        is_closure = is_training and self._stack == ["optimiser"]  # the step of an optimiser calls
        if self._stack and not is_closure:
            self._stack.append(self._stack[-1])  # a part of that
            return
        self._is_evaluating |= not is_training and self._batch_use == "trained"
        if self._is_evaluating and not is_training:
            self._stack.append("evaluation")
            return
        if not is_training:
            self._batch_use = "evaluated"
        self.has_forward = True
        self.enter("forward")

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
        self._num_updated += not self._is_updated
        self._is_updated = True
        self._num_without_update = -math.inf
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
        is_outside = self._stack in ([], ["optimiser"])
        return self.is_recording and is_outside and get_ident() == self.thread

    def take_step(self) -> StepRecord:
        """End the step here, wait for the device, and return the record."""
        self._mark("other")
        self._end_record()
        record, marks = self._pending.pop()
        if marks[-1].event is not None:
            marks[-1].event.synchronize()
        return self._timed(record, marks)

    @property
    def is_at_border(self) -> bool:
        """Whether the loop has made a step's update, and nothing of the next step."""
        return self.is_idle and self._is_updated and not self._is_evaluating

    def write(self, record: Record) -> None:
        """Append a record to the rank's file, which the first one opens."""
        if self._writer is None:
            assert self.folder is not None
            self.folder.mkdir(parents=True, exist_ok=True)
            self._writer = self._files.enter_context(RankWriter(rank_path(self.folder, self.rank)))
            header = RankHeader(
                world=self.world, ranks_on_host=ranks_on_host(), num_workers=self.num_workers
            )
            self._writer.write(header)
        self._writer.write(record)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out of all records what is done inside, at a step's border, and the next step, in
        which ranks may wait for each other's end of it. What fails inside ends the recording.
        """
        self._end_record()
        self._write_passed()
        self.is_recording = False
        yield
        self._marks.clear()
        self._sample()
        self._is_after_pause = True
        self.is_recording = True

    def close(self) -> None:
        """Write what is left, and record no more."""
        try:
            if self.is_recording and self._updated_at is not None and self._marks:
                self._end_record()
            self._write_passed()
            if self._gpu is not None and self.num_steps:
                self._gpu.__exit__()
                for use in self._gpu.use() or ():
                    self.write(RankGpu(use=use))
        except Exception as error:  # noqa: BLE001 - see _guarded
            self.fail(error)
        self.stop()
        self._files.close()

    def _mark(self, phase: str) -> None:
        event = None if self.device is None else record_event()
        self._marks.append(_Mark(phase, time.monotonic_ns(), thread_times(), event))

    def _end_evaluation(self) -> None:
        self._is_evaluating = False
        if self._marks[-1].phase == "evaluation":  # one mark for all its batches
            del self._marks[-1]
        self._mark("evaluation")

    def _end_record(self) -> None:
        """End the record at its last update, or without one at the last mark, with which the next
        one begins.
        """
        end = len(self._marks) - 1 if self._updated_at is None else self._updated_at
        if self._marks[-1].ns - self._totals["cpu_wall_ns"] >= _CPU_EVERY_NS:
            self._sample()
        if not self._is_after_pause:
            self._record.details.num_steps = max(1, self._num_updated)
            self.num_steps += self._record.details.num_steps
            self._record.step = self.num_steps - 1
            self._pending.append((self._record, self._marks[: end + 1]))
        self._record = StepRecord(epoch=self._record.epoch)
        self._marks = self._marks[end:]
        self._updated_at = None
        self._num_updated = 0
        self._is_after_pause = False
        self.has_forward = False

    def _write_passed(self) -> None:
        """Write the records whose marks the device has passed."""
        while self._pending:
            record, marks = self._pending[0]
            if marks[-1].event is not None and not marks[-1].event.query():
                return
            self._pending.popleft()
            self.write(self._timed(record, marks))

    def _timed(self, record: StepRecord, marks: list[_Mark]) -> StepRecord:
        """Return a record with what its marks say, of which the device has passed the last one."""
        durations = Counter[str]()
        for before, after in itertools.pairwise(marks):
            duration_ns = after.ns - before.ns
            cpu_ns = after.thread.cpu_ns - before.thread.cpu_ns
            queued_ns = after.thread.queued_ns - before.thread.queued_ns
            if after.phase == "data_wait":
                record.details.data_cpu_ns += cpu_ns
                record.details.data_queued_ns += queued_ns
            elif after.phase in BUSY and self.device is None:
                record.cpu_ns += cpu_ns
                record.queued_ns += queued_ns
            elif after.phase in BUSY:
                record.launch_ns += duration_ns
            if before.event is not None:
                duration_ns = round(before.event.elapsed_time(after.event) * 1e6)
            durations[after.phase] += duration_ns
        for part in NAMED:
            setattr(record.details, f"{part}_ns", durations[part])
            durations["other"] += durations[part]
        for phase in PHASES:
            setattr(record, f"{phase}_ns", durations[phase])
        record.device_busy_ns = sum(durations[phase] for phase in BUSY)
        record.cpu_ns = min(record.cpu_ns, record.device_busy_ns)
        record.queued_ns = min(record.queued_ns, record.device_busy_ns - record.cpu_ns)
        # A device runs behind the host by a step or more.
        record.start_ns = self._device_ns or marks[0].ns
        record.end_ns = record.start_ns + sum(durations[phase] for phase in PHASES)
        self._device_ns = 0 if self.device is None else record.end_ns
        return record

    def _sample(self) -> None:
        """Note in the record what the process and its workers took since the last time, what they
        hold, and how long the thread waits for Python's lock, which it needs after a sleep.
        """
        details = self._record.details
        thread = thread_times()
        asked_ns = time.monotonic_ns()
        time.sleep(_NAP_S)
        waited_ns = time.monotonic_ns() - asked_ns - round(_NAP_S * NS_PER_S)
        details.lock_ns = max(0, waited_ns - (thread_times().queued_ns - thread.queued_ns))
        totals = Counter(
            process_cpu_ns=time.process_time_ns(),
            trainer_cpu_ns=thread.cpu_ns,
            trainer_queued_ns=thread.queued_ns,
            cpu_wall_ns=time.monotonic_ns(),
            host_cpu_ns=round((host_cpu_s() or 0.0) * NS_PER_S),
        )
        workers_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # that ended
        with contextlib.suppress(OSError):  # one that has just ended, or another system
            num_pages = int(_fields(Path("/proc/self/statm"))[1])
            for task in Path("/proc/self/task").iterdir():
                totals["threads_queued_ns"] += int(_fields(task / "schedstat")[1])
            for child in _fields(Path("/proc/thread-self/children")):
                worker = Path("/proc", child)
                num_pages += int(_fields(worker / "statm")[1])
                ticks = sum(map(int, _fields(worker / "stat")[11:15]))
                workers_s += ticks / os.sysconf("SC_CLK_TCK")
                totals["workers_queued_ns"] += int(_fields(worker / "schedstat")[1])
            details.memory_bytes = num_pages * resource.getpagesize()
        totals["workers_cpu_ns"] = round(workers_s * NS_PER_S)
        for name, growth in (totals - self._totals).items():
            setattr(details, name, growth)
        self._totals = totals
        if self.device is not None:
            import torch

            details.device_bytes = torch.cuda.memory_allocated(self.device)


def _fields(path: Path) -> list[str]:
    """Return the fields of a file in /proc, without the name of a process."""
    return path.read_text().rpartition(")")[2].split()


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
