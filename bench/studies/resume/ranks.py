"""Runs an act: each rank in a process of its own, killed where the act says so."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

import fuelrail as fr
from fuelrail.bench.peers.stacks.stack import EPOCHS, Job, NotRun, Stack
from fuelrail.bench.ranks.elastic import end_with

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from fuelrail.bench.studies.resume.histories import Act

TIMEOUT_S: Final = 240.0
_REFUSALS: Final = (AssertionError, NotImplementedError, ValueError)


class RankPart(msgspec.Struct, kw_only=True):
    """What a rank left of an act.

    Attributes:
        log: epoch and row numbers of each batch.
        steps: steps of the run, those of earlier acts too.
        epoch: the epoch that the checkpoint is in.
        step: steps of that epoch that were done.
        state: what the stack saved, pickled.
        witness: state of the rank's witness; None at an epoch's start.
        error: what was raised, in a line; None if nothing was.
        outcome: "refuses", "crashes" or "not run", where something was raised.
    """

    log: list[tuple[int, list[int]]] = []
    steps: int = 0
    epoch: int = 0
    step: int = 0
    state: bytes = b""
    witness: Any = None
    error: str | None = None
    outcome: str | None = None


def run_act(
    kind: type[Stack],
    act: Act,
    *,
    before: tuple[Act, list[RankPart]] | None,
    data: Path,
    records: Path,
    folder: Path,
) -> list[RankPart]:
    """Run an act on all ranks, and return what each of them left.

    Args:
        kind: the stack.
        act: what to do.
        before: the act before, and what its ranks left; None at the start.
        data: folder of the dataset, and of checkpoints that trainers write themselves.
        records: folder that the ranks' witnesses write to.
        folder: an empty one for what passes between the ranks and this process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = act.setup.ranks

    def rank_main(rank: int) -> NoReturn:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        _run_rank(
            kind,
            act,
            rank=rank,
            before=before,
            data=data,
            records=records,
            folder=folder,
        )

    processes = [start(rank_main, rank) for rank in range(ranks)]
    deadline = time.monotonic() + TIMEOUT_S
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
        is_failed = any(file.exists() and _read(file).outcome for file in files)
        is_silent = any(
            not process.is_alive() and not file.exists()
            for process, file in zip(processes, files, strict=True)
        )
        # The others may wait for the rank that has failed, or that ended without a word.
        if is_failed or is_silent:
            deadline = min(deadline, time.monotonic() + 5)
    for process in processes:
        end_group(process)
    said = "it was still running after the time limit, or ended without a word"
    silent = RankPart(error=said, outcome="crashes")
    return [_read(file) if file.exists() else silent for file in files]


def start(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Run a function in a fork that leads a process group and ends with this process."""
    parent = os.getpid()

    def run() -> None:
        end_with(parent, signal.SIGKILL)
        os.setsid()
        function(*arguments)

    process = get_context("fork").Process(target=run)
    process.start()
    return process


def end_group(process: BaseProcess) -> None:
    """Kill a process of `start` with its workers."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _read(file: Path) -> RankPart:
    return msgspec.json.decode(file.read_bytes(), type=RankPart)


def _run_rank(
    kind: type[Stack],
    act: Act,
    *,
    rank: int,
    before: tuple[Act, list[RankPart]] | None,
    data: Path,
    records: Path,
    folder: Path,
) -> NoReturn:
    """Train as one rank. This process ends by SIGKILL once its checkpoint is saved."""
    part = RankPart()
    setup_before = None
    old: list[RankPart] = []
    if before is not None:
        act_before, old = before
        setup_before = act_before.setup
    # No process group is there yet, so each rank's witness writes a record of its own.
    watched = fr.witness((), key=lambda rows: rows, folder=records, on_fault="ignore")
    if old and old[0].witness is not None:
        watched.load_state_dict([item.witness for item in old])
    place = old[rank % len(old)] if old else part
    if place.witness is None:
        watched.set_epoch(place.epoch)
    done = place.steps
    epochs = [place.epoch]
    interval = act.setup.evaluation

    def leave() -> NoReturn:
        """Write what is known, wait for the other ranks, and be killed."""
        file = folder / f"{rank}.json"
        unfinished = file.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(part))
        unfinished.rename(file)
        names = [folder / f"{number}.json" for number in range(act.setup.ranks)]
        while part.outcome is None and not all(name.exists() for name in names):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def see(epoch: int, rows: Iterable[Any]) -> None:
        while epochs[0] < epoch:
            watched.end_epoch()
            epochs[0] += 1
            job.step = 0
        numbers = list(rows)
        watched.note(numbers)
        part.log.append((epoch, numbers))
        job.step += 1
        part.steps = done + len(part.log)
        job.is_saving = part.steps == act.steps
        job.is_evaluating = bool(interval) and part.steps % interval == 0

    def save(epoch: int, step: int, state: Any) -> NoReturn:
        while epochs[0] < epoch:
            watched.end_epoch()
            epochs[0] += 1
        part.epoch = epoch
        part.step = step
        part.state = pickle.dumps(state)
        part.witness = watched.state_dict() if step else None
        leave()

    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    job = Job(
        setup=act.setup,
        rank=rank,
        folder=data,
        states=[pickle.loads(item.state) for item in old],
        before=setup_before,
        epoch=place.epoch,
        step=place.step,
        see=see,
        save=save,
        steps=None if act.steps is None else act.steps - done,
        leaves_loop=act.leaves_loop,
        is_border=act.is_border,
    )
    try:
        kind(job).train()
        while epochs[0] < EPOCHS:
            watched.end_epoch()
            epochs[0] += 1
    except BaseException as error:  # noqa: BLE001 - whatever a stack raises is its answer
        traceback.print_exc()
        words = str(error).split()
        part.error = f"{type(error).__name__}: {' '.join(words)}"[:300]
        # Another setup may be refused, before its first batch; the same one may not.
        is_other = setup_before not in (None, act.setup)
        is_refusal = isinstance(error, _REFUSALS) and is_other and not part.log
        part.outcome = "refuses" if is_refusal else "crashes"
        if isinstance(error, NotRun):
            part.outcome = "not run"
            part.error = str(error)
    sys.stdout.flush()
    leave()
