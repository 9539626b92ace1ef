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
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from fuelrail.bench.measure.hooks import Batches, Hooks
from fuelrail.bench.measure.recorder import Recorder
from fuelrail.bench.measure.records import rank_path, read_rank
from fuelrail.bench.studies.watch.command import FOLDER_VARIABLE, TRY_VARIABLE
from fuelrail.bench.studies.watch.remedies import SECONDS, Trials
from fuelrail.bench.studies.watch.report import RECORDS, WatchReport, conclude, log_to_wandb
from fuelrail.bench.studies.watch.startup._fuelrail_after_import import AfterImport
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import stated_rank

_TORCHDATA: Final = "torchdata.stateful_dataloader.stateful_dataloader"
_CALLS: Final = [
    (_TORCHDATA, "StatefulDataLoader.__iter__", "iterator"),
    (_TORCHDATA, "_StatefulBaseDataLoaderIter.__next__", "batch"),
    ("fuelrail.loaders.loader", "DataLoader.__iter__", "batches"),
    ("webdataset.compat", "WebLoader.__iter__", "batches"),
    ("grain._src.python.data_loader", "DataLoaderIterator.__next__", "batch"),
    ("datasets.iterable_dataset", "IterableDataset.__iter__", "batches"),
    ("torch.distributed.checkpoint", "save", "checkpoint"),
    ("safetensors.torch", "save_file", "checkpoint"),
    ("transformers.trainer", "Trainer._save_checkpoint", "checkpoint"),
    ("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint", "checkpoint"),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint", "checkpoint"),
    ("accelerate.accelerator", "Accelerator.save_state", "checkpoint"),
    ("mmengine.runner.runner", "Runner.save_checkpoint", "checkpoint"),
    ("torch.utils.tensorboard.writer", "SummaryWriter.add_scalar", "logging"),
    ("tensorboardX.writer", "SummaryWriter.add_scalar", "logging"),
    ("wandb.sdk.wandb_run", "Run.log", "logging"),
]
"""Modules, functions or methods of them, and their role; see `Hooks.listen`."""


class Session(Hooks):
    """The recording of this process, of which there is one; ``watched`` are arguments of Hooks."""

    current: Session | None = None

    def __init__(self, out: str | os.PathLike[str] | None, **watched: Any) -> None:
        rank, world = stated_rank()
        self.folder = Path("watch" if out is None else out)
        super().__init__(Recorder(self.folder / RECORDS, rank=rank, world=world), **watched)
        self._process = os.getpid()
        self._logged_run: Any = None
        watch_packages(self)
        self.removals.callback(AfterImport("wandb.sdk.wandb_run", self._watch_wandb).remove)
        atexit.register(self.close)
        Session.current = self

    def close(self) -> None:
        """End the recording, and print the verdict where this process is the one to do so."""
        atexit.unregister(self.close)
        if Session.current is not self or os.getpid() != self._process:
            return
        Session.current = None
        self.remove()
        is_first = self.recorder.rank == 0
        if is_first and self.on_ask is not None and self.recorder.num_steps:
            sys.stderr.write("fuelrail: no remedies were tried: the training made too few steps\n")
        self.recorder.close()
        try:
            self._log_to_wandb()
            if is_first and FOLDER_VARIABLE not in os.environ:  # else the command does so
                report = conclude(self.folder)
                if report is not None:
                    sys.stderr.write(f"{report.as_text()}\n")
        except Exception as error:  # noqa: BLE001 - the training was the point, and is over
            sys.stderr.write(f"fuelrail: the watch has no verdict: {error}\n")

    def _watch_wandb(self, module: Any) -> None:
        """Log to a run of W&B before it ends: when it is finished, or else when the process ends.

        W&B ends a run at exit, but after what was registered since the run began.
        """
        register = functools.cache(lambda: atexit.register(self.recorder.call, self._log_to_wandb))

        def call_both(call: Any, original: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.recorder.call(call)
            return original(*args, **kwargs)

        self.replace(module.Run, "log", functools.partial(call_both, register))
        self.replace(module.Run, "finish", functools.partial(call_both, self._log_to_wandb))

    def _log_to_wandb(self) -> None:
        """Log this rank's steps to the run of W&B that is active, where there is one."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None or run is self._logged_run or os.getpid() != self._process:
            return
        self._logged_run = run
        log_to_wandb(read_rank(rank_path(self.folder / RECORDS, self.recorder.rank)), run)


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
        out: folder for records and report, the same on all ranks (default: `watch`, or that of the
            process's recording).

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
            models = model if isinstance(model, list | tuple) else [model]
            models = [part for part in models if part is not None]
            session = Session(out, models=models, optimizer=optimizer)
        elif out is not None and Path(out).absolute() != session.folder.absolute():
            raise ConfigError(
                f"out='{out}': this process records to '{session.folder}' already; leave out= away"
            )
        self._session = session

    def __iter__(self) -> Iterator[Any]:
        return Batches(self._session, iter, self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("loader"), name)

    def report(self) -> WatchReport | None:
        """Judge the steps so far, of all ranks that write to the folder; None before the first."""
        return conclude(self._session.folder, is_written=False)

    def try_remedies(self, *, seconds: float = SECONDS) -> None:
        """Find out what other settings of the loader would bring, and print it.

        After 40 steps the loop pauses between two steps; each trial takes some ``seconds``. A trial
        is made with this loader, on this machine, at the pace of this training: of other numbers of
        workers and of batches that they fetch ahead, workers that stay, one thread of OpenCV and
        BLAS in each, our decoder, our shards, pinned memory and ``channels_last``. Nothing of the
        training is changed by it. Loaders are tried that are torch's, or built on it.
        """
        self._session.on_ask = Trials(self._session, seconds).advance

    def finish(self) -> None:
        """End the recording, as the end of the process does, and print the verdict."""
        self._session.close()


watch = Watch


def start_by_environment() -> None:
    """Record this process, as ``fuelrail watch`` asks for, which prints the verdict itself."""
    session = Session(os.environ[FOLDER_VARIABLE])
    if os.environ.get(TRY_VARIABLE):
        session.on_ask = Trials(session, SECONDS).advance


def watch_packages(hooks: Hooks) -> None:
    """Have these functions watched, of each package once it is imported."""
    for module_name, path, role in _CALLS:

        def listen(module: Any, path: str = path, role: str = role) -> None:
            kind, _, name = path.rpartition(".")
            hooks.listen(getattr(module, kind) if kind else module, name, role)

        hooks.removals.callback(AfterImport(module_name, listen).remove)
