"""The steps of a run as its ledger has them: which places, with which settings; two runs
compared.
"""

from __future__ import annotations

import bisect
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fuelrail.loaders.schedule.ledger import identity_of
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.ledger import (
    BatchDigest,
    PlaceReached,
    SampleReplaced,
    SegmentStart,
    Stretch,
    read_ledger,
    seen_by_weights,
)
from fuelrail.pipeline.limits import LEDGER
from fuelrail.pipeline.order.batching import Batching, Cursor, Walk, World
from fuelrail.pipeline.text import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.loaders.schedule.state import Identity
    from fuelrail.pipeline.format.ledger import Record

    Place = tuple[int, int]


class StretchReport(msgspec.Struct, frozen=True):
    """A part of a run that the weights have seen; a place is an epoch and the samples of it that
    were consumed.
    """

    first_step: int
    num_steps: int
    start: tuple[int, int]
    end: tuple[int, int]
    global_batch: int
    ranks: int
    time: str
    steps_again: int
    """Steps behind its end that are known to have been trained, and were thrown away."""
    skipped: bool
    """Positions before it were not shown, or nothing is known of them."""


class RunReport(msgspec.Struct, frozen=True):
    """What a ledger says of its run."""

    ledger: str
    head: str
    num_records: int
    num_steps: int
    num_states: int
    num_replaced: int
    lost_segments: int
    """Segments of which the weights have kept nothing."""
    stretches: list[StretchReport]
    setup: dict[str, Any]
    """The newest setup: identity, settings of the loader, decoder, versions."""

    def as_text(self) -> str:
        """Return the report as text."""
        identity = self.setup["identity"]
        lines = [
            f"{self.ledger}: {self.num_records} records, head {self.head}",
            (
                f"dataset {identity['dataset']}, split {identity['split']}, decoder "
                f"{self.setup['decoder']}"
            ),
            (
                f"{self.num_steps} steps, {self.num_states} states, {self.num_replaced} "
                "replaced samples"
            ),
            f"{self.lost_segments} segments of which nothing was kept",
        ]
        for stretch in self.stretches:
            ranks = "rank" if stretch.ranks == 1 else "ranks"
            first_epoch, first_sample = stretch.start
            end_epoch, end_sample = stretch.end
            line = (
                f"  {stretch.num_steps} steps from step {stretch.first_step} on: epoch "
                f"{first_epoch} sample {first_sample} to epoch {end_epoch} sample {end_sample}, "
                f"global batch {stretch.global_batch}, {stretch.ranks} {ranks}, started "
                f"{stretch.time}"
            )
            if stretch.skipped:
                line += ", behind positions that were skipped or are not known"
            if stretch.steps_again:
                line += f"; {stretch.steps_again} steps behind it were thrown away"
            lines.append(line)
        return text_of(lines)


class Part(NamedTuple):
    """A stretch as steps: the first one's number in the run, and how many there are."""

    stretch: Stretch
    identity: Identity
    walk: Walk
    first: int
    length: int


class _Lengths:
    """The lengths of the epochs that ended in a segment; of an epoch that is not over, no number
    is too large.
    """

    def __init__(self, records: Sequence[Record], start: int) -> None:
        self._known: dict[int, int] = {}
        for record in itertools.islice(records, start + 1, None):
            if isinstance(record, SegmentStart):
                break
            if isinstance(record, PlaceReached) and record.epoch_length is not None:
                epoch, _ = record.place
                self._known[epoch - 1] = record.epoch_length

    def __call__(self, epoch: int) -> int:
        return self._known.get(epoch, 2**62)


class RunHistory:
    """The steps that the weights of a run have seen, counted from 0 over all of its segments.

    Raises LedgerError for a ledger that is not whole, ConfigError for one without a start.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.ledger = read_ledger(path, open_end=True)
        stretches, self.lost = seen_by_weights(self.ledger.records)
        self.parts: list[Part] = []
        self.num_steps = 0
        identities: dict[int, Identity] = {}
        for stretch in stretches:
            setup = stretch.setup
            start = stretch.start
            if id(setup) not in identities:
                identities[id(setup)] = identity_of(setup, path)
            identity = identities[id(setup)]
            varying = {"has_pack", "without"} & identity.order.keys()
            lengths = _Lengths(self.ledger.records, stretch.record) if varying else None
            world = World(0, start.ranks)
            batching = Batching(
                setup.epoch_length,
                start.global_batch,
                world,
                identity.drop_last,
                lengths=lengths,
            )
            walk = Walk(Cursor(*start.place), batching)
            part = Part(
                stretch=stretch,
                identity=identity,
                walk=walk,
                first=self.num_steps,
                length=steps_between(walk, stretch.end),
            )
            self.parts.append(part)
            self.num_steps += part.length
        if not self.parts:
            raise ConfigError(f"ledger '{path}' has no start of a run")

    def step(self, number: int) -> tuple[Part, Cursor]:
        """Return the part of a step, and the place before it; raise ConfigError for one that the
        run does not have.
        """
        if not 0 <= number < self.num_steps:
            raise ConfigError(
                f"step {number} is not in ledger '{self.path}': it has the steps 0 to "
                f"{self.num_steps - 1}"
            )
        # The last part that begins at the step or before it: parts of no steps begin with others.
        place = bisect.bisect_right(self.parts, number, key=lambda part: part.first) - 1
        part = self.parts[place]
        epoch, batch_number = part.walk.place(number - part.first)
        batches = part.walk.batches(epoch)
        position = batches.start + batch_number * batches.global_batch
        return part, Cursor(epoch, position)

    def replaced(self) -> dict[Place, SampleReplaced]:
        """Return what replaced bad samples in the steps of the run, of all ranks, by epoch and
        position.
        """
        path = Path(self.path)
        files = path.parent.iterdir()
        rank_files = sorted(file for file in files if file.name.startswith(f"{path.name}.rank"))
        # A link that leads nowhere is refused when it is read.
        sizes = [file.stat().st_size for file in rank_files if file.exists()]
        num_bytes = self.ledger.size + sum(sizes)
        text = LEDGER.broken(num_bytes)
        if text is not None:
            raise ConfigError(
                f"ledger '{self.path}' with its {len(rank_files)} files of ranks {text}"
            )
        records = list(self.ledger.records)
        for file in rank_files:
            records += read_ledger(file, open_end=True).records
        ends = {part.stretch.start.place: part.stretch.end for part in self.parts}
        replacements = {}
        for record in records:
            if isinstance(record, SampleReplaced):
                place = record.epoch, record.position
                if place < ends.get(record.since, (0, 0)):
                    replacements[place] = record
        return replacements

    def digests(self) -> dict[tuple[int, int, int], str]:
        """Return the digests of the steps of the run, by step, rank and number of ranks."""
        digests_by_step: dict[tuple[int, int, int], str] = {}
        part_by_record = {part.stretch.record: part for part in self.parts}
        newest: Part | None = None
        for number, record in enumerate(self.ledger.records):
            if isinstance(record, SegmentStart):
                newest = part_by_record.get(number)
            if newest is None or not isinstance(record, BatchDigest):
                continue
            if record.place < newest.stretch.end:
                step = newest.first + steps_between(newest.walk, record.place)
                digests_by_step[step, record.rank, record.ranks] = record.xxh3
        return digests_by_step

    def report(self) -> RunReport:
        """Return what the ledger says."""
        stretches = []
        for part in self.parts:
            start = part.stretch.start
            num_trained = steps_between(part.walk, part.stretch.trained)
            stretch = StretchReport(
                first_step=part.first,
                num_steps=part.length,
                start=start.place,
                end=part.stretch.end,
                global_batch=start.global_batch,
                ranks=start.ranks,
                time=start.time,
                steps_again=num_trained - part.length,
                skipped=part.stretch.skipped,
            )
            stretches.append(stretch)
        records = self.ledger.records
        num_states = sum(
            isinstance(record, PlaceReached) and record.why == "state" for record in records
        )
        return RunReport(
            ledger=self.path,
            head=self.ledger.head,
            num_records=len(records),
            num_steps=self.num_steps,
            num_states=num_states,
            num_replaced=len(self.replaced()),
            lost_segments=len(self.lost),
            stretches=stretches,
            setup=msgspec.to_builtins(self.parts[-1].stretch.setup),
        )


def steps_between(walk: Walk, place: Place) -> int:
    """Return the number of steps of a walk that begin before a place."""
    epoch, consumed = place
    if epoch < walk.start.epoch:
        return 0
    batches = walk.batches(epoch)
    num_samples = max(0, consumed - batches.start)
    num_batches = -(-num_samples // batches.global_batch)
    return walk.steps_before(epoch) + min(num_batches, batches.num_steps)


def run_history(ledger: str | os.PathLike[str]) -> RunReport:
    """Return what a ledger says of its run. Raises LedgerError and ConfigError."""
    return RunHistory(ledger).report()


class RunDifference(msgspec.Struct, frozen=True):
    """How two runs differ, as far as their ledgers say."""

    first_step: int | None
    """The first step with another place, global batch, order or dataset, or that one run lacks;
    None: there is none.
    """
    first_digest: int | None
    """The first step that has a digest of the same rank in both, and another one; None: there is
    none.
    """
    compared_digests: int
    settings: list[str]
    """Settings that differ at the end of the runs, with both sides."""

    def as_text(self) -> str:
        """Return the differences as text."""
        lines = []
        if self.first_step is not None:
            lines.append(f"step {self.first_step} is the first that differs in its samples")
        if self.first_digest is not None:
            lines.append(f"step {self.first_digest} is the first with another digest of its batch")
        lines += self.settings
        return text_of(lines) or f"the runs are equal; {self.compared_digests} digests compared"


def run_diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> RunDifference:
    """Compare two runs by their ledgers: places, orders, settings, digests.

    Raises LedgerError and ConfigError.
    """
    left_run = RunHistory(first)
    right_run = RunHistory(second)
    common = min(left_run.num_steps, right_run.num_steps)
    # Between two starts of parts, of either run, the steps follow from the first of them.
    starts = {part.first for part in (*left_run.parts, *right_run.parts)}
    first_step = None
    if left_run.num_steps != right_run.num_steps:
        first_step = common
    for step in sorted(start for start in starts if start < common):
        if _samples(*left_run.step(step)) != _samples(*right_run.step(step)):
            first_step = step
            break
    left_digests = left_run.digests()
    right_digests = right_run.digests()
    shared = sorted(left_digests.keys() & right_digests.keys())
    changed = [key for key in shared if left_digests[key] != right_digests[key]]
    first_digest = None
    if changed:
        first_digest, _, _ = changed[0]
    left_settings = _flat(msgspec.to_builtins(left_run.parts[-1].stretch.setup))
    right_settings = _flat(msgspec.to_builtins(right_run.parts[-1].stretch.setup))
    lines = []
    for name in {**left_settings, **right_settings}:
        left = left_settings.get(name)
        right = right_settings.get(name)
        if left != right and not name.startswith("loader."):
            lines.append(f"{name}: {left} | {right}")
    return RunDifference(
        first_step=first_step,
        first_digest=first_digest,
        compared_digests=len(shared),
        settings=lines,
    )


def _samples(part: Part, place: Cursor) -> tuple[object, ...]:
    """Return what decides the samples of a step, and of those behind it in its part."""
    identity = msgspec.structs.replace(part.identity, settings=None)
    return (
        identity,
        place,
        part.stretch.start.global_batch,
        part.stretch.setup.epoch_length,
    )


def _flat(value: dict[str, Any], name: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            values |= _flat(item, f"{name}{key}.")
        else:
            values[f"{name}{key}"] = item
    return values
