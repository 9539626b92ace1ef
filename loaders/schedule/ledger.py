"""What a loader or a sampler writes into the ledger of its run: by one process, when batches are
handed out.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from fuelrail.loaders.schedule.state import Identity, decode_state, state_at
from fuelrail.pipeline.errors import (
    ConfigError,
    LedgerError,
    OrderError,
    StateMismatchError,
)
from fuelrail.pipeline.format.ledger import (
    LEDGER_VERSION,
    BatchDigest,
    LedgerFile,
    PlaceReached,
    RunSetup,
    SampleReplaced,
    SegmentStart,
)
from fuelrail.pipeline.order.batching import Batching, Cursor
from fuelrail.pipeline.settings import (
    CheckedSettings,
    PathText,
    as_settings,
    find_fault,
    must_be,
)

if TYPE_CHECKING:
    from typing import Literal

    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.order.spec import OrderSpec

_WRITING: Final = threading.RLock()  # bad samples are found by the threads that decode

RECORDED: Final = (
    "seed",
    "drop_last",
    "split",
    "mix",
    "window",
    "layers",
    "transforms",
    "transform_in",
    "bad_samples",
)
"""Arguments of a loader that a ledger keeps."""

_FUNCTIONS: Final = ("transform", "batch_transform", "collate_fn")

_PACKAGES: Final = (
    "fuelrail",
    "numpy",
    "torch",
    "simplejpeg",
    "opencv-python-headless",
    "opencv-python",
    "pillow",
    "pillow-simd",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda110",
)


class LedgerOptions(CheckedSettings, frozen=True):
    """The ledger of a run.

    Attributes:
        path: the file, of this run alone; a run that is continued appends to it.
        digest_every: also write a digest of this process's batch every N steps of an epoch; None:
            no digests.

    Raises ConfigError for values that are not allowed.
    """

    path: Annotated[PathText, must_be("a path")]
    digest_every: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        must_be("an integer >= 1, or None"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "://" in str(self.path):
            raise ConfigError(
                f"ledger path={str(self.path)!r} must be a local file, for a ledger is appended to"
            )


def ledger_options(value: object) -> LedgerOptions | None:
    """Return the options of a ledger that was given as them, a dict of their fields, or a path;
    raise ConfigError.
    """
    if value is None or isinstance(value, LedgerOptions):
        return value
    if isinstance(value, Mapping):
        return as_settings(value, LedgerOptions, "ledger")
    if isinstance(value, str | os.PathLike):
        return LedgerOptions(path=value)
    raise ConfigError(
        f"ledger={value!r} must be a path, a LedgerOptions, a dict of its fields, or None"
    )


class _Step(NamedTuple):
    """A step that was handed out."""

    start: Cursor
    following: Cursor
    """The start of the step that comes next, maybe of a later epoch."""
    xxh3: str | None
    """The digest of its batch, where one is due."""


class RunLedger:
    """The ledger of a loader's run; without ``options`` it does nothing.

    The file is that of the first process. Others write only what replaced their bad samples, to
    ``PATH.rankN``.
    """

    def __init__(
        self,
        options: LedgerOptions | None,
        identity: Identity,
        batching: Batching,
        decoder: str | None = None,
    ) -> None:
        """Read the file, where there is one.

        Raises LedgerError for a ledger that is not whole, StateMismatchError for one of another
        training sequence.
        """
        self.is_kept = options is not None
        self._since = self._following = Cursor()
        self._is_started = False
        self._restored: Cursor | None = None
        self._batching = batching
        self._uncommitted: list[_Step] | None = None
        """Steps that were handed out since the last commit; None: steps are final at once."""
        if options is None:
            return
        if "has_bucket" in identity.order:
            raise ConfigError("a ledger cannot record an order with bucket: leave out one of them")
        self._every = options.digest_every
        # This process's number among all of the job; 0 writes the ledger.
        number = os.environ.get("RANK", "")
        self._number = int(number) if number.isdecimal() else 0
        if "torch" in sys.modules:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                self._number = dist.get_rank()
        self._number = self._number or batching.world.rank
        self._path = options.path
        self._open()
        self._reached: Cursor | None = None
        """The place of the newest record, where it is of a state."""
        encoded = msgspec.json.encode(identity)
        plain: dict[str, Any] = msgspec.json.decode(encoded)
        self._setup = RunSetup(
            version=LEDGER_VERSION,
            identity=plain,
            epoch_length=batching.epoch_length,
            loader=None,
            decoder=decoder,
            versions=package_versions(),
        )
        starts = [record for record in self._file.records if isinstance(record, SegmentStart)]
        if self._last_setup is not None and starts:
            last = starts[-1]
            recorded = identity_of(self._last_setup, options.path)
            try:
                decode_state(
                    state_at(recorded, Cursor(*last.place), last.global_batch),
                    identity,
                    strict=False,
                )
            except StateMismatchError as error:
                whose = f"ledger '{options.path}' is of another run: give this one its own"
                raise StateMismatchError(f"{whose}; {error}") from error

    def _open(self) -> None:
        """Read the file of this process, by its number."""
        self._file = LedgerFile(
            f"{self._path}.rank{self._number:05d}" if self._number else self._path
        )
        setups = [record for record in self._file.records if isinstance(record, RunSetup)]
        self._last_setup = setups[-1] if setups else None
        self._is_open = True

    def records_loader(
        self,
        arguments: msgspec.Struct,
        datasets: Mapping[str, Dataset],
        order: OrderSpec,
    ) -> None:
        """Also record what a loader is made of, so that an equal one can be made.

        Functions are named, for there is no more to keep of them.
        """
        if not self.is_kept:
            return
        values = {name: getattr(arguments, name) for name in (*RECORDED, *_FUNCTIONS)}
        functions = {}
        for name in _FUNCTIONS:
            function = values.pop(name)
            if function is not None:
                kind = type(function).__name__
                qualified_name = getattr(function, "__qualname__", kind)
                functions[name] = f"{function.__module__}:{qualified_name}"
        places = {}
        for name, dataset in datasets.items():
            places[name] = dataset.url or str(Path(dataset.root).resolve())
        plain = {
            "datasets": places,
            "order": order,
            "functions": functions,
            **values,
        }
        encoded = msgspec.json.encode(plain, enc_hook=os.fspath)
        loader = msgspec.json.decode(encoded)
        self._setup = msgspec.structs.replace(self._setup, loader=loader)

    def refuse_share(self) -> None:
        """Raise ConfigError: several processes that take turns know no common place."""
        if self.is_kept:
            raise ConfigError(
                "a loader with a ledger is iterated in the trainer's process: set "
                "num_workers=0 around it"
            )

    def refuse_uncounted(self, how: str) -> None:
        """Raise OrderError: the caller does not know what the trainer received; ``how`` to count
        it.
        """
        if self.is_kept:
            raise OrderError(f"a sampler with a ledger must know what the trainer received; {how}")

    def restore(self, place: Cursor) -> None:
        """Note that the next iteration continues from the place of a saved state."""
        self.reached("end")
        self._restored = place
        self._is_started = False
        self._drop_uncommitted()

    def reshape(self, batching: Batching) -> None:
        """Note that the next segment has other ranks; the first of them writes it.

        Raises ConfigError for a process among several of one rank.
        """
        if self.is_kept and self._number != self._batching.world.rank:
            raise ConfigError(
                "a ledger cannot follow reshape where several processes are one data-parallel "
                "rank: leave ledger out"
            )
        self.reached("end")
        self._is_started = False
        self._batching = batching
        if self.is_kept and self._number != batching.world.rank:
            self._number = batching.world.rank
            self._is_open = False  # whoever writes that file now may still end its segment

    def commit(self) -> None:
        """Write the steps handed out since the last call; from the first one on, none is written
        before.
        """
        for step in self._uncommitted or ():
            self._write_step(step)
        self._uncommitted = []

    def _drop_uncommitted(self) -> None:
        self._uncommitted = None if self._uncommitted is None else []

    def enter(self, start: Cursor) -> None:
        """Note where an iteration starts; one that continues where the last one ended is part of
        its segment.
        """
        start = start.rolled(self._batching)
        if self._uncommitted and self._uncommitted[-1].following == start:
            return
        self._drop_uncommitted()
        if not self._is_started or start != self._following:
            self.reached("end")
            self._is_started = False
            self._since = start
        self._following = start

    def hand_out(
        self,
        start: Cursor,
        following: Cursor,
        digest: Callable[[], int] | None = None,
    ) -> None:
        """Note a step that is handed out: its start, and the start of the step that comes next,
        maybe of a later epoch.

        ``digest`` computes that of its batch, signed, where one is due.
        """
        if not self.is_kept or self._number:
            return
        xxh3: str | None = None
        if (
            self._every is not None
            and digest is not None
            and start.samples_consumed // self._batching.global_batch % self._every == 0
        ):
            xxh3 = f"{digest() % 2**64:016x}"
        if self._uncommitted is None:
            self._write_step(_Step(start, following, xxh3))
        else:
            self._uncommitted.append(_Step(start, following, xxh3))

    def _write_step(self, step: _Step) -> None:
        place = (step.start.epoch, step.start.samples_consumed)
        batching = self._batching
        if not self._is_open:
            self._open()
        if not self._is_started:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            state = self._restored
            restored = None if state is None else (state.epoch, state.samples_consumed)
            start = SegmentStart(
                place=place,
                global_batch=batching.global_batch,
                ranks=batching.world.size,
                restored=restored,
                time=now,
            )
            setup = () if self._setup == self._last_setup else (self._setup,)
            with _WRITING:
                self._file.append(*setup, start)
                self._last_setup = self._setup
                self._reached = None
            self._is_started = True
            self._restored = None
        if step.xxh3 is not None:
            with _WRITING:
                self._file.append(
                    BatchDigest(place, batching.world.rank, batching.world.size, step.xxh3),
                    sync=False,
                )
                self._reached = None
        # A reader needs the length of each epoch behind, also of those without a step, which are
        # passed over.
        for epoch in range(step.start.epoch + 1, step.following.epoch + 1):
            self._following = Cursor(epoch)
            self.reached("epoch")
        self._following = step.following

    def reached(self, why: Literal["state", "epoch", "end"]) -> None:
        """Note that all batches up to here were handed out: a state is saved, an epoch ends, or
        the iteration does.
        """
        if not self.is_kept or self._number or not self._is_started:
            return
        cursor = self._following
        place = (cursor.epoch, cursor.samples_consumed)
        with _WRITING:
            last = self._file.records[-1]
            if isinstance(last, PlaceReached) and last.place == place:
                return
            # Another loader may have taken over, before this one was closed.
            if why == "end" and not self._file.is_newest():
                return
            before = self._reached
            # States after steps in a row are asked for, and not all saved: the newest one is kept.
            is_dense = False
            if why == "state" and before is not None and before.epoch == cursor.epoch:
                num_since = cursor.samples_consumed - before.samples_consumed
                is_dense = num_since <= self._batching.global_batch
            lengths = self._batching.lengths
            length = None
            if why == "epoch" and lengths is not None:
                length = lengths(cursor.epoch - 1)
            # A mark is lost at worst with a crash of the machine; syncing it at every step would
            # cost more than the step.
            self._file.append(
                PlaceReached(place, why, length),
                in_place_of_last=is_dense,
                sync=not is_dense,
            )
            self._reached = cursor if why == "state" else None

    def replaced(
        self,
        epoch: int,
        position: int,
        key: str | None,
        replaced_by: str,
    ) -> None:
        """Note that a sample takes the place of a bad one; any thread may call this."""
        if self.is_kept:
            since = self._since.epoch, self._since.samples_consumed
            rank = self._batching.world.rank
            with _WRITING:
                if not self._is_open:
                    self._open()
                self._file.append(
                    SampleReplaced(
                        since=since,
                        rank=rank,
                        epoch=epoch,
                        position=position,
                        key=key,
                        replaced_by=replaced_by,
                    )
                )
                self._reached = None


def identity_of(setup: RunSetup, path: str | os.PathLike[str]) -> Identity:
    """Return what the positions of a run are positions of; raise LedgerError for what is not an
    identity.
    """
    try:
        return msgspec.convert(setup.identity, Identity)
    except msgspec.ValidationError as error:
        fault = find_fault(error, setup.identity, Identity)
        raise LedgerError(
            f"ledger '{path}': the identity of a setup is of no known form: {fault}"
        ) from error


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that decide the content of samples, and
    Python's.
    """
    # Slow to import, and most loaders have no ledger.
    from importlib.metadata import (
        PackageNotFoundError,
        version,
    )

    python = sys.version_info
    versions = {"python": f"{python.major}.{python.minor}.{python.micro}"}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
