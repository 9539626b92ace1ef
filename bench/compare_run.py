"""The tasks of a comparison: each peer's data written, its images checked, its runs timed; a process for each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

import fuelrail
from fuelrail.bench.peers.interface import Work  # noqa: TC001 (msgspec resolves the field's type)
from fuelrail.bench.peers.process import Action, Answer, Check, Failure, Task, Written
from fuelrail.bench.peers.registry import OURS, PEERS
from fuelrail.bench.process_tree import tree_memory_bytes
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from fuelrail.bench.peers.registry import Contestant
    from fuelrail.pipeline.dataset import Dataset

RESTART = "restart"
_DONE = "compare.json"
_POLL_S = 0.25
_MEMORY_EVERY_S = 1.0  # adding up a process's pages takes milliseconds, of the CPUs that are measured
_PREPARE_LIMIT_S = 1800.0
_START_LIMIT_S = 120.0


class Measured(NamedTuple):
    """A task's answer, and the memory that its process and its children were seen to take at most."""

    answer: Answer
    peak_memory_bytes: int


class _Done(msgspec.Struct, frozen=True):
    """What a peer's finished folder was made from."""

    fingerprint: str
    work: Work


class Workshop:
    """Where the peers' data lies, and how their processes are run. ``cpus`` are those that each may use."""

    def __init__(self, data: Path, dataset: Dataset, work: Work, cpus: tuple[int, ...], seconds: float) -> None:
        self._data, self._dataset, self._work = data, dataset, work
        self._cpus, self._seconds = cpus, seconds

    def folder(self, contestant: Contestant) -> Path:
        """The data that a contestant reads."""
        if contestant.peer == OURS and contestant.decoding != RESTART:
            return self._dataset.root
        if contestant.peer == OURS:
            return self._data / f"{OURS}-{RESTART}"
        return self._data / (PEERS[contestant.peer].data or contestant.peer)

    def prepare(self, contestant: Contestant) -> str | None:
        """Write the contestant's data unless it is there; the reason why it can't be, or None."""
        folder = self.folder(contestant)
        if contestant.peer == OURS and contestant.decoding != RESTART:
            return None
        done = _Done(self._dataset.manifest.fingerprint, self._format_work())
        if _read_done(folder) == done:
            return None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if contestant.peer == OURS:
            reason = self._restart_copy(folder)
        else:
            answer = self._run(contestant, "write", _PREPARE_LIMIT_S).answer
            reason = answer.message if isinstance(answer, Failure) else None
            assert reason is not None or isinstance(answer, Written)
        if reason is None:
            # Beside the folder, whose content is the peer's.
            _done_path(folder).write_bytes(msgspec.json.encode(done))
        return reason

    def check(
        self, contestant: Contestant, least_psnr_db: float, *, whole_epoch: bool
    ) -> tuple[Check | None, str | None]:
        """Hold the contestant's images against the definition; the check, and why it must not be timed.

        ``whole_epoch``: count an epoch's samples as well, which does not depend on the recipe.
        """
        answer = self._run(contestant, "check", _PREPARE_LIMIT_S, whole_epoch=whole_epoch).answer
        if not isinstance(answer, Check):
            return None, _why_not(answer)
        if answer.fault is not None:
            return answer, answer.fault
        if answer.lowest_psnr_db < least_psnr_db:
            return answer, (
                f"its images differ from the definition: {answer.lowest_psnr_db:.1f} dB at worst, {least_psnr_db:g} dB "
                "are demanded"
            )
        return answer, None

    def time(self, contestant: Contestant) -> Measured:
        """Run a contestant for the given seconds behind its first batch."""
        return self._run(contestant, "time", _START_LIMIT_S + self._seconds)

    def _format_work(self) -> Work:
        """The part of the work that the data on disk depends on: not size of images, batches or seed."""
        return msgspec.structs.replace(self._work, height=1, width=1, batch_size=1, seed=0)

    def _restart_copy(self, folder: Path) -> str | None:
        from fuelrail.sharding.progress import Quiet
        from fuelrail.sharding.recipe import make_recipe
        from fuelrail.sharding.run import shard
        from fuelrail.sharding.source import parse_source

        try:
            folder.rmdir()
            (split,) = self._dataset.manifest.splits
            recipe = make_recipe(jpeg=RESTART, splits={split: 1.0}, name=self._dataset.manifest.name)
            shard(parse_source(f"fuelrail:{self._dataset.root}", {}), folder, recipe, len(self._cpus), Quiet())
        except FuelrailError as error:
            return str(error)
        return None

    def _run(self, contestant: Contestant, action: Action, limit_s: float, *, whole_epoch: bool = False) -> Measured:
        scratch = self._data / f".task-{os.getpid()}"
        scratch.mkdir(parents=True, exist_ok=True)
        task_path, result = scratch / "task.json", scratch / "result.json"
        task = Task(
            action=action,
            peer=contestant.peer,
            recipe=contestant.recipe,
            folder=str(self.folder(contestant)),
            dataset=str(self._dataset.root),
            work=self._work,
            seconds=self._seconds,
            whole_epoch=whole_epoch,
            cpus=self._cpus,
            result=str(result),
        )
        task_path.write_bytes(msgspec.json.encode(task))
        result.unlink(missing_ok=True)
        try:
            with (scratch / "output.log").open("wb") as log:
                peak = _supervise(task_path, contestant.environment, log.fileno(), limit_s, action == "time")
            if not result.exists():
                tail = (scratch / "output.log").read_text(errors="replace").strip().splitlines()[-1:]
                last = f"; its last words: {tail[0][:200]}" if tail else ""
                return Measured(Failure(message=f"its process gave no answer{last}", missing=False), peak)
            return Measured(msgspec.json.decode(result.read_bytes(), type=Answer), peak)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _supervise(task: Path, environment: dict[str, str], log: int, limit_s: float, watch_memory: bool) -> int:
    """Run a task's process to its end; the peak of its memory with its children's."""
    package_root = str(Path(fuelrail.__file__).parents[1])
    paths = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "fuelrail.bench.peers.process", str(task)],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        env={**os.environ, **environment, "PYTHONPATH": paths},
    )  # fmt: skip
    deadline_s, peak, looked_s = time.monotonic() + limit_s, 0, 0.0
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            if watch_memory and time.monotonic() - looked_s >= _MEMORY_EVERY_S:
                looked_s = time.monotonic()
                peak = max(peak, tree_memory_bytes(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        # Its workers as well, whatever they are at.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return peak


def _read_done(folder: Path) -> _Done | None:
    try:
        return msgspec.json.decode(_done_path(folder).read_bytes(), type=_Done)
    except (OSError, msgspec.DecodeError):
        return None


def _done_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{_DONE}")


def _why_not(answer: Answer) -> str:
    return answer.message if isinstance(answer, Failure) else f"its process answered with {type(answer).__name__}"


def affinity(text: str | None) -> tuple[int, ...]:
    """CPUs from a list such as "0,1" or "0-3"; None: all that this process may use. Raises ConfigError."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if text is None:
        return tuple(sorted(usable))
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ConfigError(f"--cpus {text!r} must be a list such as 0,1 or 0-3")
        chosen |= set(range(int(first), int(last or first) + 1))
    if not chosen or not chosen <= usable:
        raise ConfigError(f"--cpus {text}: this process may use {', '.join(map(str, sorted(usable)))}")
    return tuple(sorted(chosen))
