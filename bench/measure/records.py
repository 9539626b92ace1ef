"""Records of one rank: a file of JSON lines, readable up to the moment at which a run was cut off.

A file holds one :class:`RankHeader`, an :class:`InputFacts` at the first batch, a
:class:`StepRecord` after each step with a :class:`StageSnapshot` when the measured window opens and
one at the end, and last a :class:`RankEnd`, or a :class:`RankFailure`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.display import display
from fuelrail.bench.measure.nvml import GpuUse
from fuelrail.pipeline.runtime.stages import StageClock

# In the order in which they follow each other in a step. `all_reduce` is the exposed part only.
PHASES = (
    "data_wait",
    "host_to_device",
    "forward",
    "backward",
    "all_reduce",
    "optimiser",
    "other",
)
BUSY: Final = ("forward", "backward", "optimiser")
NAMED: Final = ("evaluation", "checkpoint", "logging")
"""Parts of a step's other time."""

_ENCODER = msgspec.json.Encoder()


class DeviceTimes(msgspec.Struct, kw_only=True):
    """One step's times on the device, in nanoseconds.

    - ``host_to_device_ns``: from getting the batch until it is on the device;
    - ``forward_ns``, ``backward_ns``, ``optimiser_ns``: the device's phases; backward ends when the
      last local gradient is computed;
    - ``all_reduce_ns``: the exposed all-reduce, from the last local gradient to the last reduced
      one;
    - ``all_reduce_total_ns``: the time in which at least one all-reduce was under way, hidden or
      exposed;
    - ``device_busy_ns``: what occupancy counts: on a GPU forward + backward + optimiser by device
      events, on a CPU by the host's clock; on the emulated accelerator the profile's time, never
      more, whatever the host took;
    - ``overrun_ns``: by how much the stand-in's real work outlasted the emulated phases,
      ``overshoot_ns``: how late waits woke, ``stand_in_ns``: the host time of the stand-in's real
      work; all three 0 on a GPU;
    - ``launch_ns``: what the host took to queue the device's work; 0 on other accelerators than a
      GPU;
    - ``cpu_ns``: CPU time of the trainer's thread in the phases that count as busy, where the CPU
      is the accelerator, and ``queued_ns``: its time in the queue for a CPU. What is missing to
      ``device_busy_ns`` it waited for other things. 0 on other accelerators.
    """

    host_to_device_ns: int = 0
    forward_ns: int = 0
    backward_ns: int = 0
    all_reduce_ns: int = 0
    optimiser_ns: int = 0
    all_reduce_total_ns: int = 0
    device_busy_ns: int = 0
    overrun_ns: int = 0
    overshoot_ns: int = 0
    stand_in_ns: int = 0
    launch_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0


class StepDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a watched trainer's step shows besides its phases; times in nanoseconds.

    - ``num_steps``: a record of a long run sums up several steps;
    - ``evaluation_ns``, ``checkpoint_ns``, ``logging_ns``: parts of ``other_ns``;
    - ``collector_ns``: Python's garbage collection, in whichever phase;
    - ``data_cpu_ns``, ``data_queued_ns``: CPU time of the trainer's thread while it waited for
      data, and its time in the queue for a CPU;
    - ``sync_ns``: what the host waited for values of the device, such as in ``.item()``;
    - ``num_counted``, ``num_idle``: batches that torch's loader with workers was asked for, and of
      these those before which all its workers had done their work;
    - ``process_cpu_ns``, ``workers_cpu_ns``, ``host_cpu_ns``: CPU time of the process, of its
      children, and of everything on the host, since the last record that has them (about a
      second), which lasted ``cpu_wall_ns``; ``trainer_queued_ns``, ``workers_queued_ns``: what the
      trainer's thread and its children stood in the queue for a CPU in that time;
    - ``trainer_cpu_ns``, ``threads_queued_ns``: also since then, CPU time of the trainer's thread,
      and what all threads of the process stood in the queue for a CPU;
    - ``lock_ns``: what the trainer's thread then waited for Python's lock, after a short sleep;
    - ``memory_bytes``, ``device_bytes``: what the process and its children hold at the end of that
      time, and what torch has allocated on the device.
    """

    num_steps: int = 1
    evaluation_ns: int = 0
    checkpoint_ns: int = 0
    logging_ns: int = 0
    collector_ns: int = 0
    data_cpu_ns: int = 0
    data_queued_ns: int = 0
    sync_ns: int = 0
    num_counted: int = 0
    num_idle: int = 0
    process_cpu_ns: int = 0
    workers_cpu_ns: int = 0
    host_cpu_ns: int = 0
    trainer_queued_ns: int = 0
    workers_queued_ns: int = 0
    cpu_wall_ns: int = 0
    trainer_cpu_ns: int = 0
    threads_queued_ns: int = 0
    lock_ns: int = 0
    memory_bytes: int = 0
    device_bytes: int = 0


class StepRecord(DeviceTimes, kw_only=True, tag="step"):
    """One optimiser step of one rank; times in nanoseconds of the host's monotonic clock.

    A step lasts from the end of the one before (for the first: from the start of the loop) to its
    own end, so steps leave no gaps, and the seven phases add up to ``end_ns - start_ns``.
    ``data_wait_ns`` is from asking the loader for the next batch to getting it. ``other_ns`` is the
    rest of the wall time: the trainer's own book-keeping, launch gaps, and on the emulated
    accelerator ``overrun_ns`` and the late wake-ups that lengthen the step. ``loss`` is None where
    it was not finite. ``padding``: share of the model's predictions that counted for nothing, where
    it says so. ``sums`` has of columns that samples' costs depend on: number of samples, their sum,
    their sum of squares.

    What only a watched trainer has is in :class:`StepDetails`.
    """

    step: int = 0
    epoch: int = 0
    num_samples: int = 0
    num_images: int = 0
    loss: float | None = None
    start_ns: int = 0
    end_ns: int = 0
    data_wait_ns: int = 0
    other_ns: int = 0
    padding: float | None = None
    sums: dict[str, tuple[int, float, float]] = {}
    details: StepDetails = msgspec.field(default_factory=StepDetails)

    @property
    def wall_ns(self) -> int:
        """Wall time of the step."""
        return self.end_ns - self.start_ns

    def phase_ns(self, phase: str) -> int:
        """Time of one of ``PHASES``."""
        value: int = getattr(self, f"{phase}_ns")
        return value


_COLUMNS: Final = tuple(
    name
    for name in (*StepRecord.__struct_fields__, "wall_ns")
    if name.endswith("_ns") or name in ("step", "epoch", "num_samples")
)


def step_table(ranks: Iterable[Sequence[StepRecord]]) -> NDArray[np.void]:
    """Return the numbers of ranks' steps, as many of each rank: (ranks, steps), a column of
    float64 for each field of a record and of its details, and ``wall_ns``.
    """
    rows = [
        [
            (*(getattr(step, name) for name in _COLUMNS), *msgspec.structs.astuple(step.details))
            for step in steps
        ]
        for steps in ranks
    ]
    names = (*_COLUMNS, *StepDetails.__struct_fields__)
    return np.array(rows, [(name, np.float64) for name in names])


class StageSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="stages"):
    """The loader's stage clocks, at a moment between two steps."""

    stages: list[StageClock]


class RankHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """Facts on a rank before its first step.

    ``peak_tflops``: of its GPU, in the run's precision, where known. ``world``: number of ranks,
    where a watched trainer says so, ``ranks_on_host``: of those on its host; ``num_workers``: of
    its loader.
    """

    device: str = "unknown"
    backend: str | None = None
    num_parameters: int = 0
    peak_tflops: float | None = None
    world: int = 1
    ranks_on_host: int = 1
    num_workers: int = 0


class InputFacts(msgspec.Struct, frozen=True, kw_only=True, tag="input"):
    """Facts on the first batch.

    ``train_flop``: operations of one sample's forward and backward, on a GPU.
    """

    num_cameras: int
    height: int
    width: int
    train_flop: int | None = None


class CheckpointSave(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint that became visible: what it took from the training, and how long it took in
    the background.
    """

    step: int
    stall_ns: int
    total_ns: int
    num_bytes: int


class CheckpointRestore(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """A run that continues after ``step`` steps.

    ``skipped``: newer checkpoints that were damaged, and how.
    """

    step: int
    folder: str
    world_size: int
    skipped: list[str]


class TransformUse(msgspec.Struct, frozen=True, kw_only=True):
    """Time in a caller's transform, summed over a loader's threads, first call to last.

    Within ``wall_ns`` threads had ``cpu_ns`` of CPU time and were ``queued_ns`` in the queue for a
    CPU; ``span_ns`` is by the clock on the wall.
    """

    num_calls: int
    wall_ns: int
    cpu_ns: int
    queued_ns: int
    span_ns: int


class RankEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """A rank that did all its steps.

    ``parameters_xxh3`` must agree on all ranks: same gradients, same updates.

    ``peak_device_bytes`` is what torch allocated on the GPU at most; None without one.
    ``read_bytes``: what storage read for this process during the run; None where the kernel does
    not say. ``state_bytes``: what this rank holds at all times, or at the end of each backward
    pass: ``model`` (parameters and buffers), ``gradients``, ``optimiser``. ``transform``: what the
    caller's transform took, where there is one.
    """

    parameters_xxh3: str
    peak_rss_bytes: int
    peak_device_bytes: int | None
    read_bytes: int | None = None
    state_bytes: dict[str, int] = {}
    transform: TransformUse | None = None


class RankGpu(msgspec.Struct, frozen=True, kw_only=True, tag="gpu"):
    """What NVML says of a watched rank's GPU, once the watch has ended."""

    use: GpuUse


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was tried, the line to change, the step's time with it, and the share of the
    step that it saves with the ends of its 95 % interval.
    """

    name: Annotated[str, display("remedy")]
    line: Annotated[str, display("line to change")]
    step_ms: Annotated[float, display("step", unit="ms")]
    gain: Annotated[float, display("saves of the step", digits=".1%")]
    low: Annotated[float, display("at least", digits=".1%")]
    high: Annotated[float, display("at most", digits=".1%")]

    def as_text(self) -> str:
        """Return the remedy in a line."""
        ends = f"{self.low:.1%} to {self.high:.1%}"
        if self.low <= 0 <= self.high:
            return f"saves nothing certain ({ends}): {self.line}"
        return f"saves {self.gain:.1%} of the step ({ends}): {self.line}"


class RankRemedies(msgspec.Struct, frozen=True, kw_only=True, tag="remedies"):
    """What was tried on a watched rank; best first."""

    remedies: list[Remedy]


class RankFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """Reason why a rank ended early, in one sentence, and the time on the host's monotonic clock.

    ``refused``: an error of Fuelrail's own, which says itself what to do; ``crashed``: any other
    exception. The ranks that a dead one leaves behind crash too, a moment later, in their
    all-reduce. ``timed out``: a collective waited for a rank that did not answer.
    """

    kind: Literal["refused", "crashed", "timed out"]
    message: str
    at_ns: int


Record = (
    RankHeader
    | InputFacts
    | StepRecord
    | StageSnapshot
    | CheckpointSave
    | CheckpointRestore
    | RankEnd
    | RankGpu
    | RankRemedies
    | RankFailure
)
_DECODER = msgspec.json.Decoder(Record)
_FIELDS: dict[type[Record], str] = {
    RankHeader: "header",
    InputFacts: "input",
    CheckpointRestore: "restored",
    RankEnd: "end",
    RankFailure: "failure",
}


class RankWriter:
    """Appends records to a rank's file; each is handed to the operating system at once, so a
    killed rank loses none.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(_ENCODER.encode(record) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class RankLog(msgspec.Struct, kw_only=True):
    """One rank's file, read back."""

    header: RankHeader | None = None
    input: InputFacts | None = None
    steps: list[StepRecord] = []
    snapshots: list[StageSnapshot] = []
    saves: list[CheckpointSave] = []
    restored: CheckpointRestore | None = None
    end: RankEnd | None = None
    gpu: GpuUse | None = None
    remedies: list[Remedy] | None = None
    failure: RankFailure | None = None


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's records."""
    return folder / f"rank-{rank:05d}.jsonl"


def read_rank(path: Path) -> RankLog:
    """Read a rank's file; a missing file is an empty log, and a last line that was cut off is
    left out.
    """
    log = RankLog()
    if not path.exists():
        return log
    for line in path.read_bytes().split(b"\n")[:-1]:
        record = _DECODER.decode(line)
        match record:
            case StepRecord():
                log.steps.append(record)
            case StageSnapshot():
                log.snapshots.append(record)
            case CheckpointSave():
                log.saves.append(record)
            case RankGpu():
                log.gpu = record.use
            case RankRemedies():
                log.remedies = record.remedies
            case _:
                setattr(log, _FIELDS[type(record)], record)
    return log
