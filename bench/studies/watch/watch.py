"""What holds this trainer up? A watch over any training loop.

::

    watched = fr.watch(loader, model=model, optimizer=optimizer, out="runs/a")
    for epoch in range(24):
        for batch in watched:  # the loop as it was
            ...

At the end the first rank prints what holds the accelerators up, on which rank, for what share.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fuelrail.bench.measure.hooks import Batches, Hooks
from fuelrail.bench.measure.recorder import Recorder
from fuelrail.bench.measure.records import rank_path, read_rank
from fuelrail.bench.studies.watch.command import FOLDER_VARIABLE, TRY_VARIABLE
from fuelrail.bench.studies.watch.export import log_to_wandb
from fuelrail.bench.studies.watch.packages import watch_packages
from fuelrail.bench.studies.watch.remedies import SECONDS, Trials
from fuelrail.bench.studies.watch.report import RECORDS, WatchReport, conclude
from fuelrail.bench.studies.watch.startup._fuelrail_after_import import AfterImport
from fuelrail.pipeline.errors import ConfigError


class Session:
    """The recording of this process, of which there is one."""

    current: Session | None = None

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        *,
        is_printed: bool,
        **hooks: Any,  # arguments of Hooks
    ) -> None:
        rank = os.environ.get("RANK", "0")
        world = os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={world} in the environment must be integers, the "
                "rank from 0 and below the size"
            )
        self.is_temporary = out is None
        self.folder = Path(tempfile.mkdtemp(prefix="fuelrail-watch-") if out is None else out)
        self._is_printed = is_printed
        self._process = os.getpid()
        self.recorder = Recorder(self.folder / RECORDS, rank=int(rank), world=int(world))
        self._hooks = Hooks(self.recorder, on_ask=self.before_batch, **hooks)
        has_loaders = bool(hooks.get("has_loaders"))
        self._waiting = watch_packages(self._hooks, has_loaders=has_loaders)
        self._waiting.append(AfterImport("wandb.sdk.wandb_run", self._watch_wandb))
        self._logged_run: Any = None
        self._trials: Trials | None = None
        atexit.register(self.close)
        Session.current = self

    def close(self) -> None:
        """End the recording, and print the verdict where this process is the one to do so."""
        atexit.unregister(self.close)
        if Session.current is not self or os.getpid() != self._process:
            return
        Session.current = None
        for package in self._waiting:
            package.remove()
        self._hooks.remove()
        if self._trials is not None and self.recorder.num_steps and self.recorder.rank == 0:
            sys.stderr.write("fuelrail: no remedies were tried: the training made too few steps\n")
        self.recorder.close()
        self._log_to_wandb()
        try:
            if self._is_printed and (self.is_temporary or self.recorder.rank == 0):
                report = self.report(is_last=True)
                if report is not None:
                    sys.stderr.write(f"{report.as_text()}\n")
        except Exception as error:  # noqa: BLE001 - the training was the point, and is over
            sys.stderr.write(f"fuelrail: the watch has no verdict: {error}\n")
        if self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def try_remedies(self, seconds: float) -> None:
        """Try remedies as soon as there are steps enough to know the trainer's pace."""
        self._trials = Trials(self.recorder, seconds)

    def before_batch(self, loader: Any) -> None:
        """Note that the loop is about to ask a loader for a batch."""
        if self._trials is not None and self._trials.advance(loader, self._hooks.modules):
            self._trials = None

    def report(self, *, is_last: bool = False) -> WatchReport | None:
        """Judge what all ranks have written so far; None before the first step."""
        return conclude(
            self.folder,
            first_rank=self.recorder.rank if self.is_temporary else 0,
            is_written=not self.is_temporary,
            is_last=is_last,
        )

    def _watch_wandb(self, module: Any) -> None:
        """Log to a run of W&B before it ends: when it is finished, or else when the process ends.

        W&B ends a run at exit, but after what was registered since the run began.
        """
        self._hooks.call_before(module.Run, "finish", self._log_to_wandb)
        register = functools.cache(lambda: atexit.register(self._log_to_wandb))
        self._hooks.call_before(module.Run, "log", register)

    def _log_to_wandb(self) -> None:
        """Log this rank's steps to the run of W&B that is active, where there is one."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None or run is self._logged_run or os.getpid() != self._process:
            return
        self._logged_run = run
        try:
            log_to_wandb(read_rank(rank_path(self.folder / RECORDS, self.recorder.rank)), run)
        except Exception as error:  # noqa: BLE001 - the training was the point
            sys.stderr.write(f"fuelrail: the watch is not logged to W&B: {error}\n")


class Watch:
    """Iterates as a loader does, and records each step of the loop: ``fr.watch(loader)``.

    It takes any loader: torch's, webdataset's, Hugging Face's, Grain's, Fuelrail's. Batches, random
    numbers and losses stay as they are. The time of forward, backward and optimiser is known by
    torch's hooks, on CUDA by events that nothing waits for. What fails in a watch ends it with a
    warning, and the training goes on. Attributes of the loader, such as ``dataset``, are the
    watch's too.

    A process has one recording: further watches, such as one of a loader for evaluation, join it.

    Args:
        loader: an iterable of batches.
        model: a module, or several, whose calls are forward passes. None: the outermost modules
            that the loop calls are found in its first steps.
        optimizer: the one whose steps count; None: every optimiser's.
        out: folder for records and report, the same on all ranks. None: the verdict is of this rank
            alone, and nothing is kept.

    Raises ConfigError where the process records to another folder.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        model: Any = None,
        optimizer: Any = None,
        out: str | os.PathLike[str] | None = None,
    ) -> None:
        self.loader = loader
        session = Session.current
        if session is None:
            models = [] if model is None else [model]
            if isinstance(model, list | tuple):
                models = list(model)
            session = Session(out, is_printed=True, models=models, optimizer=optimizer)
        elif out is not None and Path(out).absolute() != session.folder.absolute():
            raise ConfigError(
                f"out='{out}': this process records to '{session.folder}' already; leave out= away"
            )
        self._session = session
        self._recorder = session.recorder
        self._recorder.note_workers(loader)

    def __iter__(self) -> Iterator[Any]:
        def on_ask() -> None:
            self._session.before_batch(self.loader)

        return Batches(lambda: iter(self.loader), self._recorder, on_ask)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def report(self) -> WatchReport | None:
        """Judge the steps so far, of all ranks that write to the folder; None before the first."""
        return self._session.report()

    def try_remedies(self, *, seconds: float = SECONDS) -> None:
        """Find out what other settings of the loader would bring, and print it.

        After 40 steps the loop pauses between two steps; each trial takes some ``seconds``. A trial
        is made with this loader, on this machine, at the pace of this training: of other numbers of
        workers and of batches that they fetch ahead, workers that stay, one thread of OpenCV and
        BLAS in each, our decoder, our shards, pinned memory and ``channels_last``. Nothing of the
        training is changed by it. Loaders are tried that are torch's, or built on it.
        """
        self._session.try_remedies(seconds)

    def finish(self) -> None:
        """End the recording, as the end of the process does, and print the verdict."""
        self._session.close()


watch = Watch


def start_by_environment() -> None:
    """Record this process, as ``fuelrail watch`` asks for, which prints the verdict itself."""
    if Session.current is None:
        session = Session(os.environ[FOLDER_VARIABLE], is_printed=False, has_loaders=True)
        if os.environ.get(TRY_VARIABLE):
            session.try_remedies(SECONDS)
