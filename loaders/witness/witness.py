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

import itertools
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from fuelrail.loaders.witness.judge import Content, Rules, Tail, WitnessReport, expect, judge
from fuelrail.loaders.witness.record import (
    Epoch,
    add_tables,
    decode_record,
    encode_record,
    find_kind,
    merge_epochs,
    step_of,
)
from fuelrail.loaders.witness.rows import Key, read_rows
from fuelrail.loaders.witness.sketch import LARGE, Table
from fuelrail.pipeline.errors import ConfigError, LedgerError, WitnessError
from fuelrail.pipeline.limits import WITNESS
from fuelrail.pipeline.runtime.host import stated_rank
from fuelrail.pipeline.storage.files import published, read_regular

OnFault: TypeAlias = Literal["warn", "raise", "ignore"]

_MAX_REPORTS: Final = 64
_WHOLE_SAMPLERS: Final = (
    "SequentialSampler",
    "RandomSampler",
    "SeedableRandomSampler",
    "DistributedSampler",
)
"""Samplers that draw each row of a dataset."""


class WitnessWarning(UserWarning):
    """A fault that a witness found."""


class Witness:
    """Iterates as a loader does, and checks which rows it gives: ``fr.witness(loader)``.

    It takes any loader: torch's, webdataset's, Hugging Face's, Grain's, Fuelrail's. The batches are
    not changed. At an epoch's end all ranks of torch.distributed compare what they saw, in a
    process group of their own on gloo; so every rank makes its witness, and iterates to the end.
    Memory is constant, below 4 MB. Attributes of the loader, such as ``dataset`` or ``sampler``,
    are the witness's too.

    Args:
        loader: an iterable of batches.
        key: gives the ids of the rows of a batch: integers, texts or bytes. None: the batch's entry
            ``sample_key``, ``__key__``, ``index``, ``idx``, ``id`` or the like, else a digest of
            each row's content.
        expected: the rows of an epoch: their number, a list of their ids, a map-style dataset, or
            the record of an epoch. A number stands for 0, 1, ... where ids are integers. None: the
            length of the loader's dataset, where torch's or Accelerate's samplers draw each of
            its rows.
        groups: ranks that should see the same rows: a device mesh, whose tensor, pipeline and
            context axes are such groups, or lists of ranks. None: all ranks differ.
        content: what else to compare, for up to 1,024 rows: "equal" where a row's content must not
            change, "random" where it must differ whenever it comes, and between rows. None:
            contents are not read.
        tail: "exact": each row once; "pad": the last batch may be filled up; "drop": rows that do
            not fill it may be left out; "repeat": rows may come again and be left out anywhere, as
            weights have it. None: as the loader and its sampler say (``drop_last``,
            ``replacement``), and several ranks may pad.
        folder: write a record for each epoch and rank to this folder, for jobs without a process
            group, and for `fuelrail witness`.
        on_fault: warn, raise WitnessError on all ranks, or ignore; reports are in ``reports``.
        timeout_s: seconds that a rank waits for the others at an epoch's end.

    Raises ConfigError for arguments that are not allowed, and for ids that cannot be compared.
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
        timeout_s: float = 1800,
    ) -> None:
        for name, value, allowed in (
            ("content", content, (None, *get_args(Content))),
            ("tail", tail, (None, *get_args(Tail))),
            ("on_fault", on_fault, get_args(OnFault)),
        ):
            if value not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ConfigError(f"{name}={value!r} must be one of {choices}")
        self.loader = loader
        self.reports: list[WitnessReport] = []
        """Reports of the epochs that ended, the newest last, at most 64."""
        self._key = key
        self._expected: Any
        self._expected, rules = _read_loader(loader)
        if expected is not None:
            is_list = isinstance(expected, Epoch | int | list | tuple | range)
            is_list |= hasattr(expected, "dtype") or not hasattr(expected, "__getitem__")
            self._expected = expected if is_list else len(expected)
        self._folder = None if folder is None else Path(folder)
        self._on_fault = on_fault
        # A gloo group of all ranks of its own, so that no collective of the training can be
        # mistaken for one of the witness's.
        self._group: Any = None
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
            self._world = dist.get_world_size()
            if self._world > 1:
                timeout = timedelta(seconds=timeout_s)
                self._group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            self._rank, self._world = stated_rank()
        if hasattr(groups, "mesh_dim_names"):
            from fuelrail.loaders.distributed import DATA_AXES

            names = groups.mesh_dim_names or ("dp",)
            data_axes = [axis for axis, name in enumerate(names) if name in DATA_AXES]
            model_axes = [axis for axis, name in enumerate(names) if name not in DATA_AXES]
            size = math.prod(groups.mesh.shape[axis] for axis in model_axes)
            mesh = groups.mesh.permute(*data_axes, *model_axes)
            groups = mesh.reshape(-1, size).tolist()
        if groups is not None:
            groups = [[int(rank) for rank in group] for group in groups]
            ranks = sorted(itertools.chain(*groups))
            if ranks != list(range(self._world)):
                raise ConfigError(f"groups={groups} must hold each of the {self._world} ranks once")
        self._rules = rules._replace(
            tail=tail or rules.tail,
            content=content,
            groups=groups,
        )
        self._kind: str | None = None  # of ids, to which `_rules.expected` belongs
        self._previous: list[Epoch] = []
        self._is_resumed = False
        self._epoch = self._make_epoch(0)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed:
            self._epoch = self._make_epoch(self._epoch.epoch)
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
        if epoch != self._epoch.epoch:
            self._epoch = self._make_epoch(epoch)
            self._is_resumed = False
        for target in (self.loader, getattr(self.loader, "sampler", None)):
            set_epoch = getattr(target, "set_epoch", None)
            if set_epoch is not None and not _is_order(target):
                set_epoch(epoch)
                return

    def note(self, batch: Any) -> None:
        """Count a batch that came by another way than iterating this object."""
        rows = read_rows(batch, self._key)
        self._epoch.add(batch, rows, has_contents=self._rules.content is not None)

    def end_epoch(self) -> WitnessReport:
        """Compare what all ranks saw of the epoch that ends, and begin the next one.

        Every rank calls this, as iterating to the end does. Raises WitnessError for a fault under
        ``on_fault="raise"``.
        """
        record = self._epoch
        record.is_complete = True
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"epoch{record.epoch:05d}.rank{self._rank:05d}.json"
            with published(path, sync=False) as file:
                file.write(msgspec.json.encode(encode_record(record)))
        self._epoch = self._make_epoch(record.epoch + 1)
        records = self._gather(record)
        report = self._judge(records)
        self._previous = records
        self.reports = [*self.reports, report][-_MAX_REPORTS:]
        if report.faults and self._on_fault != "ignore":
            faults = "; ".join(fault.text for fault in report.faults)
            text = f"the witness of epoch {report.epoch}: {faults}"
            if self._on_fault == "raise":
                raise WitnessError(text)
            if self._rank == 0:
                warnings.warn(text, WitnessWarning, stacklevel=3)
        return report

    def check(self) -> WitnessReport:
        """Return what all ranks saw of the epoch so far; every rank calls this.

        Before an epoch's end nothing is said about rows that have not come.
        """
        return self._judge(self._gather(self._epoch))

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return what this rank saw of the epoch so far, in a few kB of plain values.

        ``gather=True`` returns what all ranks saw, the same on each; every rank must then call
        this. Without it each rank's own state must be saved, or the part of the others is not
        known after a resume.
        """
        state = self._epoch.state()
        if gather:
            states = self._gather(state)
            state = self._merge(states).state()
        return encode_record(state)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on with the epoch of a state: the next iteration is its rest.

        ``state``: this rank's own, one of all ranks (``gather=True``), or a list of all ranks'
        states. The number of ranks may have changed. Raises LedgerError for what is not a state.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise LedgerError("a list of a witness's states is empty")
        records = [decode_record(item, "a witness's state") for item in states]
        merged = self._merge(records).state()
        is_own = merged.ranks == [self._rank] and merged.world == self._world
        is_of_all = len(set(merged.ranks)) == merged.world
        # A batch over all ranks has as many rows as before.
        global_batch = merged.largest_batch * merged.world
        largest_batch = -(-global_batch // self._world)
        # The part before is counted by one rank: the one that saw it, or the first.
        first = 0
        if self._rules.groups is not None:
            first = self._rules.groups[0][0]
        is_counter = is_own or (is_of_all and self._rank == first)
        record = merged if is_counter else self._make_epoch(merged.epoch)
        record.ranks = [self._rank]
        record.world = self._world
        record.batches = [max(merged.batches)]
        record.own_rows = 0
        record.largest_batch = largest_batch
        record.is_known = merged.is_known and (is_own or is_of_all)
        record.sequence = f"resumed from {merged.sequence}" if is_own or merged.rows else ""
        expected = expect(self._expected, None).record
        is_over = is_of_all and expected is not None and merged.rows >= expected.rows
        self._epoch = self._make_epoch(merged.epoch + 1) if is_over else record
        self._is_resumed = True

    def _merge(self, records: Sequence[Epoch]) -> Epoch:
        """Return one record of several ranks; of those that see the same rows the first counts."""
        records = sorted(records, key=lambda record: record.ranks)
        counted = records
        groups = self._rules.groups
        if groups is not None and len(records) == self._world:
            counted = [records[group[0]] for group in groups]
        merged = merge_epochs(counted)
        merged.ranks = [rank for record in records for rank in record.ranks]
        merged.batches = [count for record in records for count in record.batches]
        return merged

    def _make_epoch(self, epoch: int) -> Epoch:
        """Return this rank's record of an epoch of which no batch was seen."""
        return Epoch(
            epoch=epoch,
            ranks=[self._rank],
            world=self._world,
            batches=[0],
        )

    def _judge(self, records: Sequence[Epoch]) -> WitnessReport:
        kind = find_kind(records)
        if self._rules.expected.record is None or kind != self._kind:
            # Of ranks that write to a folder only, each sees its own part.
            expected = self._expected if len(records) == self._world else None
            self._rules = self._rules._replace(expected=expect(expected, kind))
            self._kind = kind
        return judge(records, self._rules, self._previous)

    def _gather(self, record: Epoch) -> list[Epoch]:
        """Return the records of all ranks, in order; the first has the table of all that count."""
        if self._group is None:
            return [record]
        import torch
        import torch.distributed as dist

        without_table = msgspec.structs.replace(record, table=None)
        message = msgspec.json.encode(encode_record(without_table))
        encoded: list[Any] = [None] * self._world
        try:
            dist.all_gather_object(encoded, message, group=self._group)
            records = [decode_record(item, "another rank's record") for item in encoded]
            kinds = {item.kind for item in records if item.kind is not None}
            if len(kinds) == 1:
                table = Table(LARGE, has_names=kinds == {"text"})
                groups = self._rules.groups
                # Of ranks that see the same rows, the first one's count.
                if groups is None or any(self._rank == group[0] for group in groups):
                    add_tables(table, record.table)
                dist.all_reduce(torch.from_numpy(table.cells), group=self._group)
                records[0].table = table
        except RuntimeError as error:
            raise WitnessError(
                f"the witness of epoch {record.epoch}: another rank did not come to the epoch's "
                f"end ({' '.join(str(error).split())})"
            ) from error
        return records


witness = Witness


def check_records(
    folder: str | os.PathLike[str],
    *,
    expected: Any = None,
    tail: Tail | None = None,
) -> list[WitnessReport]:
    """Return a report of each epoch that witnesses of all ranks wrote to a folder.

    Raises LedgerError for files that are not such records.
    """
    reports = []
    previous: list[Epoch] = []
    for records in read_records(folder):
        rules = Rules(expected=expect(expected, find_kind(records)), tail=tail)
        reports.append(judge(records, rules, previous))
        previous = records
    return reports


def read_records(folder: str | os.PathLike[str]) -> list[list[Epoch]]:
    """Return the records in a folder, by epoch and then by rank; raise LedgerError."""
    by_epoch: dict[int, list[Epoch]] = {}
    paths = sorted(Path(folder).glob("epoch*.rank*.json"))
    if not paths:
        raise LedgerError(f"'{folder}' holds no records of a witness (epoch*.rank*.json)")
    for path in paths:
        try:
            data = read_regular(path, WITNESS)
        except OSError as error:
            raise LedgerError(f"cannot read '{path}': {error.strerror or error}") from error
        record = decode_record(data, f"'{path}'")
        by_epoch.setdefault(record.epoch, []).append(record)
    for epoch, records in by_epoch.items():
        records.sort(key=lambda record: record.ranks)
        ranks = [rank for record in records for rank in record.ranks]
        world = records[0].world
        is_whole = len(ranks) == world and ranks == list(range(len(records)))
        if not is_whole:
            raise LedgerError(
                f"'{folder}' has records of ranks {ranks[:64]} of {world} for epoch "
                f"{epoch}; one of each rank is needed"
            )
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def compare_records(
    folder: str | os.PathLike[str],
    other: str | os.PathLike[str],
) -> list[str]:
    """Return a sentence for each epoch in which two runs differ: other rows, or at other steps.

    The number of ranks may differ, where it divides the global batch. Raises LedgerError.
    """
    lines = []
    runs = {record.epoch: record for record in map(merge_epochs, read_records(folder))}
    references = {record.epoch: record for record in map(merge_epochs, read_records(other))}
    for epoch in sorted({*runs, *references}):
        run = runs.get(epoch)
        reference = references.get(epoch)
        if run is None or reference is None:
            lines.append(f"epoch {epoch}: only in '{other if run is None else folder}'")
            continue
        sides = itertools.zip_longest(run.steps, reference.steps, fillvalue=0)
        places = [place for place, (first, second) in enumerate(sides) if first != second]
        if not places and run.rows == reference.rows:
            continue
        rows = "the same rows" if run.sums == reference.sums else "other rows"
        step = step_of(places[0]) if places else 0
        where = f"after {step:,} equal steps or more" if step else "from the start"
        sizes = f"{run.rows:,} rows, and {reference.rows:,}"
        lines.append(f"epoch {epoch}: {rows}, in another order {where} ({sizes})")
    return lines


def _is_order(part: object) -> bool:
    """Whether it is a sampler of `fuelrail.order`, which has its epoch, and says so to trainers."""
    return type(part).__module__ == "fuelrail.loaders.integrations.sampler"


def _read_loader(loader: Any) -> tuple[int | None, Rules]:
    """Return the length of a loader's dataset where its sampler draws each row once, and what is
    allowed by what the loader and its sampler say.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None)
    parts = (loader, sampler, batches)
    is_ours = any(type(part).__module__.startswith("fuelrail.") for part in parts)
    drops = int(is_ours)
    others = [part for part in parts if not _is_order(part)]
    if any(getattr(part, "drop_last", False) is True for part in others):
        drops = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None) or 1
        if batches is None:  # each worker drops its own
            drops *= max(getattr(loader, "num_workers", 0), 1)
    is_random = type(sampler).__name__ == "RandomSampler"
    rules = Rules(
        tail="repeat" if getattr(sampler, "replacement", False) is True else None,
        drops=drops,
        pads=is_ours,
        shuffles=is_random or getattr(sampler, "shuffle", False) is True,
    )
    # Accelerate's samplers of batches are around the one that draws for all ranks.
    source: Any = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    if type(source).__name__ not in _WHOLE_SAMPLERS or rules.tail == "repeat":
        return None, rules
    size = len(loader.dataset)
    ranks = getattr(source, "num_replicas", 1)
    is_whole = abs(len(source) * ranks - size) < ranks
    return size if is_whole else None, rules
