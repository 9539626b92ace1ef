"""Save a run's state while it trains on, and restore it on any mesh."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from fuelrail.bench.measure.records import CheckpointRestore, CheckpointSave
from fuelrail.bench.trainer.checkpoints.state import (
    model_tensors,
    progress_of,
    put_back,
    targets_of,
    tensors_of,
)
from fuelrail.bench.trainer.checkpoints.store import (
    DamagedError,
    Manifest,
    Store,
)
from fuelrail.pipeline.errors import FuelrailError, StateMismatchError
from fuelrail.pipeline.storage.filesystem import DISK_FULL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from fuelrail.bench.trainer.strategies.step import Parallel


class Checkpoints:
    """The checkpoints of a run at a folder or URL; made by all ranks together, after
    :func:`fuelrail.bench.parallelise`.

    One holds the model, the optimiser, averages, random generators, schedule, loss scale and the
    loader's position, and is visible once it is whole. It restores under any other strategy, mesh
    and number of ranks. The newest ``keep`` stay. ``identity`` is what a checkpoint must share with
    this run to be restored, by name. A rank that does not answer for ``timeout_s`` seconds, dead or
    at slow storage, is an error of the others. All methods are called by all ranks alike. Load
    checkpoints that you trust only: torch's metadata in them is a pickle.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        keep: int = 3,
        identity: Mapping[str, str] | None = None,
        timeout_s: float = 600,
    ) -> None:
        self._store = Store(os.fspath(place))
        self._keep = keep
        self._identity = dict(identity or {})
        self._timeout_s = timeout_s
        self._is_alone = not dist.is_initialized()
        if self._is_alone:  # a world of one, for what torch saves with
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        # The background thread's collectives must not meet the training's.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._share = slice(self._rank, None, self._world_size)  # of a checkpoint's files in order
        self._token = self._on_first(partial(secrets.token_hex, 4))
        self._stager = _KeptStager(cache_staged_state_dict=True)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[CheckpointSave] | None = None

    def save(
        self,
        step: int,
        parallel: Parallel,
        loader_state: Mapping[str, Any],
    ) -> CheckpointSave | None:
        """Start to save the state after ``step`` steps, and return the save before, if it was not
        returned yet.

        The state is copied before this returns; the training may change it. Waits for the save
        before. Raises FuelrailError where that failed.
        """
        start_ns = time.monotonic_ns()
        done = self.wait()
        folder = self._store.folder(step, self._token)
        writer: Any = self._store.writer(folder)
        # Where torch 2.8 looks for a stager; newer versions do too if they are given no other.
        writer.stage = self._stager.stage
        progress = progress_of(parallel, loader_state)
        manifest = Manifest(
            step=step,
            world_size=self._world_size,
            identity=self._identity,
            progress=progress,
            files={},
        )
        written = async_save(
            tensors_of(parallel, self._rank),
            storage_writer=writer,
            process_group=self._group,
        )
        assert isinstance(written, Future), "a blocking stager has finished"
        stall_ns = time.monotonic_ns() - start_ns
        self._pending = self._thread.submit(
            self._finish,
            folder,
            written,
            manifest,
            start_ns=start_ns,
            stall_ns=stall_ns,
        )
        return done

    def wait(self) -> CheckpointSave | None:
        """Wait until no save is under way, and return the last one; None if it was returned
        already.
        """
        pending = self._pending
        self._pending = None
        return None if pending is None else pending.result()

    def close(self) -> CheckpointSave | None:
        """Wait for the last save, and leave the ranks' group."""
        done = self.wait()
        self._thread.shutdown()
        dist.destroy_process_group(None if self._is_alone else self._group)
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else other ranks may be gone, and a collective would wait for them
            self.close()

    def restore(self, parallel: Parallel, loader: Stateful) -> CheckpointRestore | None:
        """Continue from the newest complete checkpoint; None where there is none, also of a killed
        first save.

        One whose bytes changed is set aside, and the one before is taken. Raises
        StateMismatchError, with both sides, for a checkpoint of another model, dataset or version,
        and FuelrailError where all are damaged.
        """

        def shapes_here() -> dict[str, list[int]]:
            return {name: list(tensor.shape) for name, tensor in model_tensors(parallel).items()}

        skipped: list[str] = []
        self._on_first(self._store.clean)
        for folder in self._on_first(self._store.complete):
            read = partial(self._store.read, folder, self._share)
            try:
                manifest, *_ = self._on_all(read)
            except DamagedError as error:
                self._on_first(partial(self._store.hide, folder))
                skipped.append(f"{folder}: {error}")
                continue
            reader = self._store.reader(folder)
            metadata = reader.read_metadata().state_dict_metadata
            shapes = {}
            for name, entry in metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    shapes[name] = list(entry.size)
            of_model = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
            saved = manifest.identity | of_model
            present = self._identity | self._merged(shapes_here)
            for name in sorted(present.keys() | saved.keys()):
                if present.get(name) != saved.get(name):
                    raise StateMismatchError(
                        f"checkpoint '{self._store.shown}/{folder}' is of another run; {name}: "
                        f"checkpoint has {saved.get(name)}, this run has {present.get(name)}; use "
                        "another --checkpoint"
                    )
            # Checks dataset, split, order and settings, and says both sides itself.
            loader.load_state_dict(manifest.progress.loader)
            tensors = targets_of(parallel, shapes.keys(), self._rank, manifest.world_size)
            load(tensors, storage_reader=reader, process_group=self._group)
            put_back(parallel, tensors, manifest.progress)
            return CheckpointRestore(
                step=manifest.step,
                folder=folder,
                world_size=manifest.world_size,
                skipped=skipped,
            )
        if skipped:
            raise FuelrailError(
                f"no checkpoint in '{self._store.shown}' is whole ({'; '.join(skipped)}): "
                "restore the files, or use another --checkpoint to start again"
            )
        return None

    def _finish(
        self,
        folder: str,
        written: Future[Metadata],
        manifest: Manifest,
        start_ns: int,
        stall_ns: int,
    ) -> CheckpointSave:
        """Wait for all ranks' files in the background, make them visible, remove old
        checkpoints.
        """
        try:
            written.result()
            files = self._merged(partial(self._store.digests, folder, self._share))
            whole = msgspec.structs.replace(manifest, files=files)
            self._on_first(partial(self._store.publish, folder, whole))
            self._on_first(partial(self._store.prune, self._keep))
        except (Exception, CheckpointException) as error:  # torch's is not an Exception
            reason: BaseException = error
            if isinstance(error, CheckpointException):
                reason, _ = next(iter(error.failures.values()))
            advice = ""
            if isinstance(reason, OSError) and reason.errno in DISK_FULL:
                advice = "; make room there"
            # Torch has no class for it.
            elif isinstance(reason, RuntimeError) and "timed out" in str(reason).lower():
                advice = (
                    f"; a rank did not answer for {self._timeout_s:g} s (timeout_s): it is dead, "
                    "or its storage slow"
                )
            raise FuelrailError(
                f"the checkpoint of step {manifest.step} could not be written to "
                f"'{self._store.shown}': {reason}; checkpoints of earlier steps are "
                f"whole{advice}"
            ) from error
        size = sum(size for size, _ in files.values())
        total_ns = time.monotonic_ns() - start_ns
        return CheckpointSave(
            step=manifest.step,
            stall_ns=stall_ns,
            total_ns=total_ns,
            num_bytes=size,
        )

    def _on_all(self, function: Callable[[], Any]) -> list[Any]:
        """Call a function on all ranks; return all results, or raise the first error, on all."""
        outcomes: list[Any] = [None] * self._world_size
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            result = error
        dist.all_gather_object(outcomes, result, group=self._group)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def _on_first(self, function: Callable[[], Any]) -> Any:
        """Call a function on the first rank; return its result, or raise its error, on all."""
        results = self._on_all(lambda: function() if self._rank == 0 else None)
        return results[0]

    def _merged(self, function: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Call a function on all ranks; return the entries of all results."""
        entries: dict[str, Any] = {}
        for part in self._on_all(function):
            entries |= part
        return entries


class _KeptStager(BlockingAsyncStager):
    """Copies the state into memory that stays from save to save: new memory takes longer to get
    than to fill.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.state_dict_cache is not None and self.state_dict_cache.keys() != state_dict.keys():
            self.state_dict_cache = None
        if self.state_dict_cache is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Torch's own would be pinned, which is for copies from a GPU.
            self.state_dict_cache = BlockingAsyncStager().stage(state_dict)
            return self.state_dict_cache
        return super().stage(state_dict)
