"""Did every rank see what it should? A witness of any loader's rows.

::

    watched = fr.witness(loader)
    for epoch in range(24):
        watched.set_epoch(epoch)
        for batch in watched:  # the loop as it was
            ...

At each epoch's end the ranks compare what they saw. Rows that came twice or never are named.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from fuelrail.loaders.witness.judge import Content, Rules, Tail, WitnessReport, expect, judge
from fuelrail.loaders.witness.record import (
    VERSION,
    Epoch,
    EpochCounter,
    decode_record,
    merge_records,
)
from fuelrail.loaders.witness.rows import Key, read_rows
from fuelrail.loaders.witness.sketch import LARGE, Table
from fuelrail.pipeline.errors import ConfigError, LedgerError, WitnessError
from fuelrail.pipeline.limits import WITNESS
from fuelrail.pipeline.storage.files import published, read_regular

OnFault: TypeAlias = Literal["warn", "raise", "ignore"]

_MAX_SUMMARIES: Final = 64


class WitnessWarning(UserWarning):
    """A fault that a witness found."""


class Witness:
    """Iterates as a loader does, and counts the rows that it gives; see :func:`witness`.

    Attributes of the loader, such as ``dataset`` or ``sampler``, are the witness's too.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        key: Key | None = None,
        expected: Any = None,
        groups: Any = None,
        content: Content | None = None,
        tail: Tail | None = None,
        folder: str | os.PathLike[str] | None = None,
        on_fault: OnFault = "warn",
    ) -> None:
        for name, value, allowed in (
            ("content", content, (None, "equal", "random")),
            ("tail", tail, (None, "exact", "pad", "drop")),
            ("on_fault", on_fault, ("warn", "raise", "ignore")),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}"
                )
        self.loader = loader
        self.reports: list[WitnessReport] = []
        """Reports of the epochs that ended, the newest last, at most 64."""
        self._key = key
        self._expected = expected
        self._content: Content | None = content
        self._tail: Tail | None = tail
        self._folder = None if folder is None else Path(folder)
        self._on_fault = on_fault
        self._group, self._rank, self._world = _process_group()
        self._groups = _rank_groups(groups, self._world)
        self._epoch = 0
        self._counter: EpochCounter | None = None
        self._is_resumed = False
        self._previous: list[Epoch] = []
        self._summaries: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed:
            self._counter = None
        self._is_resumed = False
        for batch in self.loader:
            self.note(batch)
            yield batch
        self.end_epoch()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while this object is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, to the loader and its sampler too where they take it."""
        self._epoch = epoch
        if not self._is_resumed:
            self._counter = None
        for target in (self.loader, getattr(self.loader, "sampler", None)):
            set_epoch = getattr(target, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
                return

    def note(self, batch: Any) -> None:
        """Count a batch that came by another way than iterating this object."""
        if self._counter is None:
            self._counter = self._new_counter()
        self._counter.add(batch, read_rows(batch, self._key))

    def end_epoch(self) -> WitnessReport:
        """Compare what all ranks saw of the epoch that ends, and begin the next one.

        Every rank calls this, as iterating to the end does. Raises WitnessError for a fault under
        ``on_fault="raise"``.
        """
        counter = self._counter or self._new_counter()
        record = counter.record(is_complete=True)
        records = self._gather(record)
        report = self._judge(records)
        self._write(record)
        self._previous = records
        merged = merge_records(records)
        summary = {"epoch": merged.epoch, "rows": merged.rows, "steps": merged.steps}
        self._summaries = [*self._summaries, summary][-_MAX_SUMMARIES:]
        self._counter = None
        self._epoch = record.epoch + 1
        self.reports = [*self.reports, report][-_MAX_SUMMARIES:]
        self._say(report)
        return report

    def check(self) -> WitnessReport:
        """Return what all ranks saw of the epoch so far; every rank calls this.

        Before an epoch's end nothing is said about rows that have not come.
        """
        counter = self._counter or self._new_counter()
        return self._judge(self._gather(counter.record()))

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return what this rank saw of the epoch so far, in a few kB of plain values.

        ``gather=True`` returns what all ranks saw, the same on each; every rank must then call
        this. Without it each rank's own state must be saved, or the part of the others is not
        known after a resume.
        """
        counter = self._counter or self._new_counter()
        record = counter.record(with_table=False)
        records = self._gather(record) if gather else [record]
        merged = merge_records(records)
        return {
            "version": VERSION,
            "epoch": msgspec.to_builtins(merged),
            "past": list(self._summaries),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the epoch of a state: the next iteration is its rest.

        ``state``: this rank's own, one of all ranks (``gather=True``), or a list of all ranks'
        states. The number of ranks may have changed. Raises LedgerError for what is not a state.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        records = []
        for item in states:
            if item.get("version") != VERSION:
                raise LedgerError(
                    f"a witness's state has version {item.get('version')!r}; this program reads "
                    f"{VERSION}"
                )
            records.append(decode_record(item.get("epoch"), "a witness's state"))
        if not records:
            raise LedgerError("a list of witness's states is empty")
        merged = merge_records(records)
        is_of_all = len(merged.ranks) >= merged.world
        is_own = merged.ranks == [self._rank] and merged.world == self._world
        own = Epoch(epoch=merged.epoch, ranks=[self._rank], world=self._world, batches=[0])
        # The part before is counted by one rank: the one that saw it, or the first.
        if is_own or (is_of_all and self._rank == 0):
            own = msgspec.structs.replace(
                merged,
                ranks=[self._rank],
                world=self._world,
                own_rows=0,
                batches=[max(merged.batches, default=0)],
            )
        else:
            own.batches = [max(merged.batches, default=0)]
        own.is_known = is_own or is_of_all
        own.is_from_start = own.is_from_start and merged.rows == 0
        if len(merged.ranks) != 1 or not is_own:
            own.sequence = "" if merged.rows == 0 else f"resumed from {merged.sequence or 'ranks'}"
        self._epoch = merged.epoch
        self._counter = EpochCounter(own, self._content is not None)
        self._is_resumed = True
        past = states[0].get("past", [])
        self._summaries = list(past)[-_MAX_SUMMARIES:] if isinstance(past, Sequence) else []

    def _new_counter(self) -> EpochCounter:
        epoch = Epoch(epoch=self._epoch, ranks=[self._rank], world=self._world, batches=[0])
        return EpochCounter(epoch, self._content is not None)

    def _judge(self, records: Sequence[Epoch]) -> WitnessReport:
        kind = next((record.kind for record in records if record.kind is not None), None)
        expected = self._expected
        if expected is None:
            expected = _length_of(getattr(self.loader, "dataset", None))
        elif hasattr(expected, "__len__") and hasattr(expected, "__getitem__"):
            is_list = isinstance(expected, list | tuple | range) or hasattr(expected, "dtype")
            expected = expected if is_list else len(expected)
        rules = Rules(
            expected=expect(expected, kind),
            tail=self._tail,
            drops=_drops(self.loader),
            shuffles=_shuffles(self.loader),
            content=self._content,
            groups=self._groups,
        )
        return judge(records, rules, self._previous)

    def _gather(self, record: Epoch) -> list[Epoch]:
        """Return the records of all ranks, in order; the first one has the table of all."""
        if self._group is None:
            return [record]
        import torch
        import torch.distributed as dist

        table = record.table
        record = msgspec.structs.replace(record, table=None)
        encoded: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(encoded, msgspec.json.encode(record), group=self._group)
        records = [decode_record(item, "another rank's record") for item in encoded]
        kinds = {item.kind for item in records if item.kind is not None}
        if len(kinds) != 1 or not all(item.is_from_start and item.sample for item in records):
            return records
        # Of ranks that see the same rows, the first one's count.
        is_counted = self._groups is None or any(self._rank == group[0] for group in self._groups)
        cells = Table(LARGE, has_names=kinds != {"integer"}).cells
        if table is not None and is_counted:
            cells = np.frombuffer(table, np.int64).reshape(cells.shape).copy()
        dist.all_reduce(torch.from_numpy(cells), group=self._group)
        records[0].table = cells.tobytes()
        return records

    def _write(self, record: Epoch) -> None:
        """Write this rank's record of an epoch for jobs without a process group."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"epoch{record.epoch:05d}.rank{self._rank:05d}.json"
        with published(path, sync=False) as file:
            file.write(msgspec.json.encode(record))

    def _say(self, report: WitnessReport) -> None:
        if not report.faults or self._on_fault == "ignore":
            return
        text = f"the witness of epoch {report.epoch}: " + "; ".join(
            fault.text for fault in report.faults
        )
        if self._on_fault == "raise":
            raise WitnessError(text)
        if self._rank == 0:
            warnings.warn(text, WitnessWarning, stacklevel=4)


def witness(
    loader: Iterable[Any],
    *,
    key: Key | None = None,
    expected: Any = None,
    groups: Any = None,
    content: Content | None = None,
    tail: Tail | None = None,
    folder: str | os.PathLike[str] | None = None,
    on_fault: OnFault = "warn",
) -> Witness:
    """Return an iterable that gives a loader's batches and checks which rows they hold.

    It takes any loader: torch's, webdataset's, Hugging Face's, Grain's, Fuelrail's. The batches are
    not changed. At an epoch's end all ranks of torch.distributed compare what they saw, in a
    process group of their own on gloo; so every rank makes its witness, and iterates to the end.
    Memory is constant, below 4 MB.

    Args:
        loader: an iterable of batches.
        key: gives the ids of the rows of a batch: integers, texts or bytes. None: the batch's entry
            ``sample_key``, ``__key__``, ``index``, ``idx``, ``id`` or the like, else a digest of
            each row's tensors.
        expected: the rows of an epoch: their number, a list of their ids, a map-style dataset, or
            the record of an epoch. A number stands for 0, 1, ... where ids are integers. None: the
            length of the loader's dataset, where it has one.
        groups: ranks that should see the same rows: a device mesh, whose tensor, pipeline and
            context axes are such groups, or lists of ranks. None: all ranks differ.
        content: what else to compare, for up to 1,024 rows: "equal" where a row's content must not
            change, "random" where it must differ whenever it comes, and between rows. None:
            contents are not read.
        tail: "exact": each row once; "pad": the last batch may be filled up; "drop": rows that do
            not fill it may be left out. None: as the loader says (its ``drop_last``), and several
            ranks may pad.
        folder: write a record for each epoch and rank to this folder, for jobs without a process
            group, and for `fuelrail witness`.
        on_fault: warn, raise WitnessError on all ranks, or ignore; reports are in ``reports``.

    Raises ConfigError for arguments that are not allowed, and for ids that cannot be compared.
    """
    return Witness(
        loader,
        key=key,
        expected=expected,
        groups=groups,
        content=content,
        tail=tail,
        folder=folder,
        on_fault=on_fault,
    )


def check_records(
    folder: str | os.PathLike[str], *, expected: Any = None, tail: Tail | None = None
) -> list[WitnessReport]:
    """Return a report of each epoch that witnesses of all ranks wrote to a folder.

    Raises LedgerError for files that are not such records.
    """
    reports = []
    previous: list[Epoch] = []
    for records in read_records(folder):
        kind = next((record.kind for record in records if record.kind is not None), None)
        rules = Rules(expected=expect(expected, kind), tail=tail)
        reports.append(judge(records, rules, previous))
        previous = records
    return reports


def read_records(folder: str | os.PathLike[str]) -> list[list[Epoch]]:
    """Return the records in a folder, by epoch and then by rank; raise LedgerError."""
    by_epoch: dict[int, list[Epoch]] = {}
    paths = sorted(Path(folder).glob("epoch*.rank*.json"))
    if not paths:
        raise LedgerError(f"'{folder}' holds no witness's records (epoch*.rank*.json)")
    for path in paths:
        try:
            data = read_regular(path, WITNESS)
        except OSError as error:
            raise LedgerError(f"cannot read '{path}': {error.strerror or error}") from error
        record = decode_record(data, f"'{path}'")
        by_epoch.setdefault(record.epoch, []).append(record)
    for epoch, records in by_epoch.items():
        ranks = sorted(rank for record in records for rank in record.ranks)
        if ranks != list(range(records[0].world)):
            raise LedgerError(
                f"'{folder}' has records of ranks {ranks} of {records[0].world} for epoch {epoch}"
            )
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def compare_records(folder: str | os.PathLike[str], other: str | os.PathLike[str]) -> list[str]:
    """Return a sentence for each epoch of two runs: whether the same rows came at the same steps.

    The number of ranks may differ, where it divides the global batch. Raises LedgerError.
    """
    lines = []
    there = {records[0].epoch: merge_records(records) for records in read_records(other)}
    for records in read_records(folder):
        run = merge_records(records)
        reference = there.get(run.epoch)
        if reference is None:
            lines.append(f"epoch {run.epoch}: only in '{folder}'")
        elif run.steps == reference.steps and run.rows == reference.rows:
            lines.append(f"epoch {run.epoch}: the same {run.rows:,} rows at the same steps")
        else:
            marks = {step: (first, second) for step, first, second in reference.marks}
            equal = [step for step, *sums in run.marks if marks.get(step) == tuple(sums)]
            rows = "the same rows" if run.sums == reference.sums else "other rows"
            lines.append(
                f"epoch {run.epoch}: {rows}, equal up to step {max(equal, default=0)}, then "
                f"different ({run.rows:,} rows, and {reference.rows:,})"
            )
    return lines


def _process_group() -> tuple[Any, int, int]:
    """Return a gloo group of all ranks, or None without torch.distributed; rank; and their number.

    The group is the witness's own, so that no collective of the training can be mistaken for one
    of its.
    """
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        dist = torch.distributed
        group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        return group, dist.get_rank(), dist.get_world_size()
    try:
        return None, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE in the environment must be integers: {error}"
        ) from error


def _rank_groups(groups: Any, world: int) -> list[list[int]] | None:
    """Return lists of ranks that should see the same rows, from a device mesh or such lists."""
    if groups is None:
        return None
    if hasattr(groups, "mesh_dim_names"):
        from fuelrail.loaders.distributed import DATA_AXES

        names = groups.mesh_dim_names or ()
        mesh = groups.mesh
        data = [axis for axis, name in enumerate(names) if name in DATA_AXES]
        model = [axis for axis in range(mesh.ndim) if axis not in data]
        ranks = mesh.permute(*data, *model).reshape(-1, *(mesh.shape[axis] for axis in model))
        return [group.reshape(-1).tolist() for group in ranks]
    listed = [[int(rank) for rank in group] for group in groups]
    if sorted(rank for group in listed for rank in group) != list(range(world)):
        raise ConfigError(f"groups={listed} must hold each of the {world} ranks once")
    return listed


def _length_of(dataset: Any) -> int | None:
    if not hasattr(dataset, "__getitem__"):
        return None
    try:
        return len(dataset)
    except TypeError:
        return None


def _drops(loader: Any) -> bool:
    """Return whether a loader or its sampler leaves out rows that do not fill the last batch."""
    parts = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return any(getattr(part, "drop_last", False) is True for part in parts)


def _shuffles(loader: Any) -> bool:
    """Return whether a loader's sampler shuffles."""
    sampler = getattr(loader, "sampler", None)
    if getattr(sampler, "shuffle", None) is True:
        return True
    return type(sampler).__name__ == "RandomSampler"
