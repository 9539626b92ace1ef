"""The tasks of a comparison: each peer's data written, its images checked, its runs timed; a
process for each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.bench.measure.processes import package_environment
from fuelrail.bench.peers.peer import OURS, PEERS, Contestant, Work
from fuelrail.bench.peers.process import (
    Action,
    Answer,
    Check,
    Failure,
    Task,
    Written,
)
from fuelrail.bench.studies.compare.group import process_group
from fuelrail.bench.studies.compare.laps import LapProcess, Timed, read_through
from fuelrail.bench.studies.compare.report import REFERENCE
from fuelrail.pipeline.errors import ConfigError, FuelrailError

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset

RESTART = "restart"
_NUM_LAPS = 4
_DONE = "compare.json"
_PREPARE_LIMIT_S = 1800.0
_START_LIMIT_S = 120.0


class Measured(NamedTuple):
    """A contestant's run in a round, and the reference's laps between its own; or why there is
    none.
    """

    contestant: Contestant
    timed: Timed | None
    beside: Timed | None = None
    failure: str | None = None


class _Files(NamedTuple):
    """A task's files, in a folder that goes away with it."""

    task: Path
    result: Path
    arrivals: Path
    log: Path


class _Runner(NamedTuple):
    """A contestant that is being timed."""

    process: LapProcess
    files: _Files


class _Done(msgspec.Struct, frozen=True):
    """Inputs of a peer's finished folder."""

    fingerprint: str
    work: Work


class Workshop:
    """Prepares the peers' data and runs their processes. ``cpus`` are those that each may use."""

    def __init__(
        self,
        data: Path,
        dataset: Dataset,
        work: Work,
        cpus: tuple[int, ...],
        seconds: float,
    ) -> None:
        self._data = data
        self._dataset = dataset
        self._work = work
        self._cpus = cpus
        self._seconds = seconds

    def folder(self, contestant: Contestant) -> Path:
        """Return the data that a contestant reads."""
        if contestant.peer == OURS and contestant.recipe != RESTART:
            return self._dataset.root
        if contestant.peer == OURS:
            return self._data / f"{OURS}-{RESTART}"
        return self._data / (PEERS[contestant.peer].data or contestant.peer)

    def prepare(self, contestant: Contestant) -> str | None:
        """Write the contestant's data unless it exists; return the reason why that fails, or
        None.
        """
        folder = self.folder(contestant)
        if contestant.peer == OURS and contestant.recipe != RESTART:
            return None
        # The data on disk does not depend on the size of images, batches or the seed.
        work = msgspec.structs.replace(self._work, height=1, width=1, batch_size=1, seed=0)
        done = _Done(self._dataset.manifest.fingerprint, work)
        try:
            written_data = msgspec.json.decode(_done_path(folder).read_bytes(), type=_Done)
        except (OSError, msgspec.DecodeError):
            written_data = None
        if written_data == done:
            return None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if contestant.peer == OURS:
            from fuelrail.sharding.planning.recipe import make_recipe
            from fuelrail.sharding.progress import Quiet
            from fuelrail.sharding.run import shard
            from fuelrail.sharding.sources.registry import parse_source

            reason = None
            try:
                folder.rmdir()
                (split,) = self._dataset.manifest.splits
                recipe = make_recipe(
                    jpeg=RESTART,
                    splits={split: 1.0},
                    name=self._dataset.manifest.name,
                )
                shard(
                    parse_source(f"fuelrail:{self._dataset.root}", {}),
                    out=folder,
                    recipe=recipe,
                    num_workers=len(self._cpus),
                    progress=Quiet(),
                )
            except FuelrailError as error:
                reason = str(error)
        else:
            answer = self._run(contestant, "write")
            reason = answer.message if isinstance(answer, Failure) else None
            assert reason is not None or isinstance(answer, Written)
        if reason is None:
            # Beside the folder, whose content is the peer's.
            _done_path(folder).write_bytes(msgspec.json.encode(done))
        return reason

    def check(
        self,
        contestant: Contestant,
        least_psnr_db: float,
        *,
        whole_epoch: bool,
    ) -> tuple[Check | None, str | None]:
        """Hold the contestant's images against the definition; the check, and why it must not be
        timed.

        ``whole_epoch``: count an epoch's samples as well, which does not depend on the recipe.
        """
        answer = self._run(contestant, "check", whole_epoch=whole_epoch)
        if not isinstance(answer, Check):
            return None, _why_not(answer)
        if answer.fault is not None:
            return answer, answer.fault
        if answer.lowest_psnr_db < least_psnr_db:
            width, height = self._work.source_wh
            hint = "a lower --psnr lets them in"
            if self._work.height > height or self._work.width > width:
                hint = (
                    f"images of {width} x {height} are enlarged, which loaders do in several ways: "
                    f"use --height {height} --width {width} or less"
                )
            return answer, (
                f"images differ from the definition: {answer.lowest_psnr_db:.1f} dB at worst, "
                f"{least_psnr_db:g} dB are required; {hint}"
            )
        return answer, None

    def round(self, turns: Sequence[Contestant]) -> Iterator[Measured]:
        """Run each once. The reference runs all along, in laps between those of each other one; its
        run comes last.

        Who is first changes from lap to lap, so that a machine that becomes faster or slower
        favours neither.
        """
        reference = None
        rivals = []
        for contestant in turns:
            if contestant.name == REFERENCE:
                reference = contestant
            else:
                rivals.append(contestant)
        with contextlib.ExitStack() as stack:
            pacer = None
            if reference is not None:
                pacer = stack.enter_context(self._started(reference))
                if not self._begin(pacer):
                    yield Measured(reference, None, failure=_failure(pacer.files))
                    reference = pacer = None
            for contestant in rivals:
                if pacer is not None:
                    # It was idle while the one before started and ran.
                    read_through(self._dataset.root)
                yield self._race(contestant, pacer)
            if reference is not None and pacer is not None:
                if not rivals:
                    for _ in range(_NUM_LAPS):
                        pacer.process.lap(self._lap_s)
                if pacer.process.is_alive():
                    yield Measured(reference, pacer.process.timed(), pacer.process.timed())
                else:
                    yield Measured(reference, None, failure=_failure(pacer.files))

    def _race(self, contestant: Contestant, pacer: _Runner | None) -> Measured:
        with self._started(contestant) as runner:
            if not self._begin(runner):
                return Measured(contestant, None, failure=_failure(runner.files))
            runners = [runner]
            first = 0
            if pacer is not None:
                runners.append(pacer)
                first = pacer.process.num_laps
            for _ in range(_NUM_LAPS):
                for racer in runners:
                    racer.process.lap(self._lap_s)
                runners.reverse()
            if not runner.process.is_alive():
                return Measured(contestant, None, failure=_failure(runner.files))
            beside = None
            if pacer is not None and pacer.process.is_alive():
                beside = pacer.process.timed(first)
            return Measured(contestant, runner.process.timed(), beside)

    @property
    def _lap_s(self) -> float:
        return self._seconds / _NUM_LAPS

    @contextlib.contextmanager
    def _started(self, contestant: Contestant) -> Iterator[_Runner]:
        read_through(self.folder(contestant))
        with (
            self._files(contestant, "time") as files,
            process_group(_command(files.task), package_environment(), files.log) as process,
        ):
            yield _Runner(LapProcess(process, files.arrivals), files)

    def _begin(self, runner: _Runner) -> bool:
        """Run a lap that does not count behind the first batch: queues fill, memory is taken."""
        return runner.process.begin(self._lap_s, _START_LIMIT_S)

    def _run(
        self,
        contestant: Contestant,
        action: Action,
        *,
        whole_epoch: bool = False,
    ) -> Answer:
        with self._files(contestant, action, whole_epoch=whole_epoch) as files:
            with (
                process_group(_command(files.task), package_environment(), files.log) as process,
                contextlib.suppress(subprocess.TimeoutExpired),
            ):
                process.wait(_PREPARE_LIMIT_S)
            return _answer(files)

    @contextlib.contextmanager
    def _files(
        self,
        contestant: Contestant,
        action: Action,
        *,
        whole_epoch: bool = False,
    ) -> Iterator[_Files]:
        self._data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".task-", dir=self._data) as folder:
            place = Path(folder)
            files = _Files(
                task=place / "task.json",
                result=place / "result.json",
                arrivals=place / "arrivals",
                log=place / "output.log",
            )
            task = Task(
                action=action,
                peer=contestant.peer,
                recipe=contestant.recipe,
                folder=str(self.folder(contestant)),
                dataset=str(self._dataset.root),
                work=self._work,
                whole_epoch=whole_epoch,
                cpus=self._cpus,
                result=str(files.result),
                arrivals=str(files.arrivals),
            )
            files.task.write_bytes(msgspec.json.encode(task))
            yield files


def _command(task: Path) -> list[str]:
    return [sys.executable, "-m", "fuelrail.bench.peers.process", str(task)]


def _answer(files: _Files) -> Answer:
    if files.result.exists():
        answer: Answer = msgspec.json.decode(files.result.read_bytes(), type=Answer)
        return answer
    tail = files.log.read_text(errors="replace").strip().splitlines()[-1:]
    last = f"; its last words: {tail[0][:200]}" if tail else ""
    return Failure(message=f"its process gave no answer{last}")


def _failure(files: _Files) -> str:
    return _why_not(_answer(files))


def _done_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{_DONE}")


def _why_not(answer: Answer) -> str:
    return (
        answer.message
        if isinstance(answer, Failure)
        else f"its process answered with {type(answer).__name__}"
    )


def affinity(text: str | None) -> tuple[int, ...]:
    """Return the CPUs of a list such as "0,1" or "0-3"; None: all that this process may use.

    Raise ConfigError.
    """
    usable = (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )
    if text is None:
        return tuple(sorted(usable))
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ConfigError(f"--cpus {text!r} must be a list such as 0,1 or 0-3")
        chosen |= set(range(int(first), int(last or first) + 1))
    if not chosen or not chosen <= usable:
        raise ConfigError(
            f"--cpus {text}: this process may use {', '.join(map(str, sorted(usable)))}"
        )
    return tuple(sorted(chosen))
