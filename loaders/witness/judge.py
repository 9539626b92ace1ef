"""Judge whether ranks saw what they should: each row once, as many batches, equal groups."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fuelrail.loaders.witness.record import Epoch, add_sums, add_tables, merge_epochs
from fuelrail.loaders.witness.rows import id_rows, row_names
from fuelrail.loaders.witness.sketch import ALL, LARGE, SAMPLE_ROWS, Surplus, Table
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.text import Printed, text_of

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import Mask


Tail: TypeAlias = Literal["exact", "pad", "drop", "repeat"]
Content: TypeAlias = Literal["equal", "random"]

MAX_NAMED: Final = 1000
_CHUNK: Final = 1 << 12
_NUM_LISTED: Final = 5


class Fault(msgspec.Struct, frozen=True):
    """Something that is wrong with the rows of an epoch.

    Attributes:
        kind: "missing" (rows that never came), "repeated" (that came again), "unexpected" (that
            should not be there), "uneven" (ranks with another number of batches), "same_rows"
            (ranks that should differ and saw the same), "different_rows" (ranks of one group that
            should agree), "same_order" (a shuffled order that repeats), "content" (rows whose
            content changed), "same_content" (augmentation that repeats), "shared_noise" (random
            numbers that several rows have in common), "keys" (ids of several kinds).
        text: a sentence.
        count: number of rows, or of ranks where it is about these.
        rows: ids of rows, at most a thousand.
        ranks: ranks that it is about; empty where a table can not tell.
    """

    kind: str
    text: str
    count: int = 0
    rows: list[int | str] = []
    ranks: list[int] = []


class WitnessReport(Printed, msgspec.Struct, frozen=True):
    """What all ranks saw of an epoch.

    Attributes:
        epoch: number of the epoch.
        rows: rows of all ranks; a group that works on the same rows counts once.
        expected: number of rows that were expected; None where it is not known.
        ranks: number of ranks that took part.
        batches: batches of each rank.
        is_complete: whether all ranks came to the epoch's end; else nothing is said about rows
            that did not come.
        faults: what is wrong.
        notes: what is not a fault: rows that fill the last batch, rows left out of it.
    """

    epoch: int
    rows: int
    expected: int | None
    ranks: int
    batches: list[int]
    is_complete: bool
    faults: list[Fault] = []
    notes: list[str] = []

    def as_text(self) -> str:
        """Return the report as lines of text."""
        state = "" if self.is_complete else ", not at its end"
        size = "" if self.expected is None else f" of {self.expected:,}"
        lines = [f"epoch {self.epoch}{state}: {self.rows:,}{size} rows on {self.ranks} ranks"]
        lines += [f"FAULT {fault.text}" for fault in self.faults]
        lines += [f"note: {note}" for note in self.notes]
        if not self.faults:
            is_each_once = self.is_complete and self.expected is not None and not self.notes
            lines.append("ok: each row came once" if is_each_once else "ok: no fault was seen")
        return text_of(lines)


class Expected(NamedTuple):
    """The rows that an epoch should have.

    Attributes:
        record: of an epoch with these rows; without a table where only their number is known; None
            where that is not known.
        ids: the rows' ids, where they were listed.
    """

    record: Epoch | None = None
    ids: Sequence[Any] | None = None


def expect(value: Any, kind: str | None) -> Expected:
    """Return what an epoch should have: from a number of rows, a list of ids, or an epoch's record.

    A number stands for the integers below it where ids are integers, else for a count alone.
    Raises ConfigError.
    """
    if value is None or isinstance(value, Epoch):
        return Expected(value)
    ids = value
    if isinstance(value, int | np.integer):
        if value < 0:
            raise ConfigError(f"expected={value} rows must be 0 or more")
        if kind != "integer":
            return Expected(Epoch(rows=int(value)))
        ids = range(int(value))
    record = Epoch(rows=len(ids))
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        if isinstance(part, range):
            part = np.asarray(part)
        rows = id_rows(part)
        if record.table is None:
            record.table = Table(LARGE, has_names=rows.kind == "text")
            record.kind = rows.kind  # type: ignore[assignment]
        if record.kind != rows.kind:
            raise ConfigError("expected= must be a list of integers, or of texts, not of both")
        record.table.add(rows.hashes[:, 0], rows.names)
        sums = rows.hashes.sum(axis=0, dtype=np.uint64)
        record.sums = add_sums(record.sums, sums.tolist())
    return Expected(record, ids)


class Rules(NamedTuple):
    """What is allowed in an epoch.

    Attributes:
        expected: the rows it should have.
        tail: "exact": each row once; "pad": the last batch may be filled up with rows that came
            already; "drop": rows that do not fill the last batch may be left out; "repeat": rows
            may come again and be left out anywhere; None: as the loader and the number of ranks
            imply.
        drops: how many rows each rank's loader says that it may leave out.
        pads: whether the loader is known to fill up the last batch, on one rank too.
        shuffles: whether the loader says that it shuffles.
        content: "equal": a row's content is the same whenever it comes; "random": it never is;
            None: contents are not compared.
        groups: lists of ranks that should see the same rows; None: all ranks differ.
    """

    expected: Expected = Expected()
    tail: Tail | None = None
    drops: int = 0
    pads: bool = False
    shuffles: bool = False
    content: Content | None = None
    groups: Sequence[Sequence[int]] | None = None


def judge(
    records: Sequence[Epoch],
    rules: Rules,
    previous: Sequence[Epoch] = (),
) -> WitnessReport:
    """Return what the records of all ranks say about an epoch.

    Args:
        records: one of each rank; the table may be in the first for all.
        rules: what is allowed.
        previous: those of the epoch before; may be empty.
    """
    counted = list(records)
    groups: list[list[int]] = []
    if rules.groups is not None:
        by_rank = {record.ranks[0]: record for record in records}
        groups = [[rank for rank in group if rank in by_rank] for group in rules.groups]
        groups = [group for group in groups if group]
        counted = [by_rank[group[0]] for group in groups]
    total = merge_epochs(counted)
    total.is_complete = all(record.is_complete for record in records)
    findings: list[Fault | str] = []
    kinds = sorted({record.kind for record in records if record.kind is not None})
    if len(kinds) > 1:
        findings.append(Fault("keys", f"ids are of several kinds: {', '.join(kinds)}"))
    else:
        findings += _compare_ranks(records, counted, groups)
        if rules.tail != "repeat":
            findings += _compare_rows(counted, total, rules)
        sequences = {(record.ranks[0], record.sequence) for record in previous}
        ranks = []
        for record in records:
            rank = record.ranks[0]
            has_order = record.is_complete and record.rows > 1
            if has_order and (rank, record.sequence) in sequences:
                ranks.append(rank)
        ranks.sort()
        if ranks:
            text = f"{_ranks_text(ranks)} saw the rows in the same order as in epoch "
            text += str(previous[0].epoch)
            if rules.shuffles:
                text += ": call set_epoch(epoch) on the sampler before each epoch"
                findings.append(
                    Fault(
                        "same_order",
                        text,
                        count=len(ranks),
                        ranks=ranks,
                    )
                )
            else:
                findings.append(text)
        if rules.content is not None:
            findings += _compare_contents(counted, total, previous, rules.content)
    expected = rules.expected.record
    return WitnessReport(
        epoch=total.epoch,
        rows=total.rows,
        expected=None if expected is None else expected.rows,
        ranks=len(records),
        batches=[record.batches[0] for record in records],
        is_complete=total.is_complete,
        faults=[finding for finding in findings if isinstance(finding, Fault)],
        notes=[finding for finding in findings if isinstance(finding, str)],
    )


def _compare_ranks(
    records: Sequence[Epoch],
    counted: Sequence[Epoch],
    groups: Sequence[Sequence[int]],
) -> Iterator[Fault]:
    """Find groups whose ranks differ, ranks of another number of batches, ranks that are equal."""
    sequences = {record.ranks[0]: record.sequence for record in records}
    for group in groups:
        counts = Counter(sequences[rank] for rank in group)
        ((usual, _),) = counts.most_common(1)
        ranks = sorted(rank for rank in group if sequences[rank] != usual)
        if ranks:
            text = (
                f"{_ranks_text(group)} should see the same rows in the same order, and "
                f"{_ranks_text(ranks)} saw others"
            )
            yield Fault(
                "different_rows",
                text,
                count=len(ranks),
                ranks=ranks,
            )
    if all(record.is_complete for record in records):
        batches = {record.ranks[0]: record.batches[0] for record in counted}
        ((usual_count, _),) = Counter(batches.values()).most_common(1)
        ranks = sorted(rank for rank in batches if batches[rank] != usual_count)
        if ranks:
            listed = [f"{batches[rank]:,} on rank {rank}" for rank in ranks[:_NUM_LISTED]]
            text = f"ranks have another number of batches: {usual_count:,} on most"
            text = ", ".join([text, *listed])
            yield Fault("uneven", text, count=len(ranks), ranks=ranks)
    by_sums = defaultdict(list)
    for record in counted:
        if record.own_rows == record.rows > 1:
            by_sums[record.sums].append(record)
    for equal in by_sums.values():
        if len(equal) == 1:
            continue
        ranks = sorted(record.ranks[0] for record in equal)
        first = equal[0]
        sample = first.sample.rows
        names = row_names(first.kind, sample["hash"], sample["name"])
        text = (
            f"{_ranks_text(ranks)} saw the same {first.rows:,} rows, and should share "
            "them out: the sampler or the shards do not depend on the rank"
        )
        yield Fault(
            "same_rows",
            text,
            count=first.rows,
            rows=names[:MAX_NAMED],
            ranks=ranks,
        )


def _compare_rows(
    counted: Sequence[Epoch],
    total: Epoch,
    rules: Rules,
) -> Iterator[Fault | str]:
    """Find rows that came twice or never."""
    if not total.is_known:
        yield "only one rank's part of the epoch is known from before the resume"
        return
    expected = rules.expected.record
    ids = rules.expected.ids
    listed_kind = None if expected is None else expected.kind
    if listed_kind is not None and total.kind not in (None, listed_kind):
        text = f"ids are of kind {total.kind}, and those of expected= of {listed_kind}: give key="
        yield Fault("keys", text)
        return
    surplus, repeated, missing = _find_surplus(total, expected)
    kind = total.kind or listed_kind
    names = row_names(kind, surplus.hashes, surplus.names)
    is_more = surplus.times > 0
    is_listed = np.ones(len(names), bool)
    if isinstance(ids, range):
        is_listed = np.array([name in ids for name in names], bool)
    elif ids is not None and len(names):
        hashes = id_rows(ids).hashes[:, 0]
        is_listed = np.isin(surplus.hashes, hashes)
        if kind == "text":  # of which the table has no more than their ends
            is_surplus = np.isin(hashes, surplus.hashes)
            texts = {}
            for place in np.flatnonzero(is_surplus).tolist():
                texts[int(hashes[place])] = str(ids[place])
            pairs = zip(surplus.hashes.tolist(), names, strict=True)
            names = [texts.get(digest, name) for digest, name in pairs]
    foreign = int(surplus.times[is_more & ~is_listed].sum())
    repeated -= foreign
    foreign += max(-missing, 0)
    missing = max(missing, 0)
    # torch's DistributedSampler fills up to a multiple of the ranks, others to a whole global
    # batch; all ranks then have as many rows.
    ranks = len(counted)
    batch = max(ranks * total.largest_batch, 1)
    may_pad = rules.tail == "pad"
    if rules.tail is None:
        may_pad = ranks > 1 or rules.pads
    is_even = len({record.own_rows for record in counted}) == 1
    padding = int(surplus.times[is_more].sum())
    if surplus.is_whole:
        size = total.rows - repeated + missing
        # A rank on its own has, after a resume, what all ranks saw before it.
        is_alone = ranks == 1 and total.rows > total.own_rows
        resumed_batch = max(total.world * total.largest_batch, 1) if is_alone else batch
        fits = padding in (-size % ranks, -size % batch, -size % resumed_batch)
    else:  # as many rows of a sample as a batch may have
        fits = padding <= 4 + 4 * batch * SAMPLE_ROWS / max(total.rows, 1)
    if may_pad and is_even and total.is_complete and padding and fits and not foreign:
        text = _rows_text(_named(names, is_more), repeated)
        yield f"{text} came again to fill the last batch"
        repeated = 0
    drops = 0
    if rules.tail == "drop" or (rules.drops and rules.tail is None):
        drops = max(rules.drops, total.largest_batch)
    if missing <= ranks * drops and missing > 0 == repeated == foreign:
        text = _rows_text(_named(names, surplus.times < 0), missing)
        yield f"{text} did not fill a batch and were left out"
        return
    for fault, text, count, mask in (
        ("missing", "never came", missing, surplus.times < 0),
        ("repeated", "came again", repeated, is_more & is_listed),
        ("unexpected", "should not be there", foreign, is_more & ~is_listed),
    ):
        if not count:
            continue
        rows = _named(names, mask)
        hashes = surplus.hashes[mask]
        seen_by = [
            record.ranks[0]
            for record in counted
            if np.isin(record.sample.rows["hash"], hashes).any()
        ]
        text = f"{_rows_text(rows, count)} {text}"
        if not surplus.is_whole:
            text = f"about {text}"
        if seen_by:
            text += f", on {_ranks_text(seen_by)}"
        if fault == "repeated" and count >= total.rows - total.own_rows > 0:
            text += "; as many came before the resume, so it may have started over"
        yield Fault(
            fault,
            text,
            count=count,
            rows=rows[:MAX_NAMED],
            ranks=seen_by,
        )


def _find_surplus(total: Epoch, expected: Epoch | None) -> tuple[Surplus, int, int]:
    """Return rows that came too often or never, and how many times in all they did.

    By the tables where the epoch is complete and the ids of its rows are known, else by the sample.
    """
    if expected is not None and expected.kind is not None and total.is_complete:
        table = total.table
        reference = expected.table
        if total.before or expected.before or reference is None:
            table = total.fold()
            reference = expected.fold()
        difference = copy.deepcopy(reference)
        difference.cells *= -1
        add_tables(difference, table)
        surplus = difference.surplus()
        net = total.rows - expected.rows
        num_cells = difference.cells[:, :, 0].size
        error = 2.5 * surplus.estimate * (2 / num_cells) ** 0.5
        repeated = max(net, 0)
        if surplus.is_whole:
            repeated = int(surplus.times[surplus.times > 0].sum())
        elif surplus.estimate - abs(net) > error:
            repeated = max((surplus.estimate + net) // 2, repeated)
        return surplus, repeated, repeated - net
    sample = total.sample.rows
    repeats = sample[sample["count"] > 1]
    repeated = int(repeats["count"].sum()) - len(repeats)
    is_whole = total.sample.limit == ALL
    if not is_whole:
        num_sampled = max(int(sample["count"].sum()), 1)
        repeated = round(repeated / num_sampled * total.rows)
    surplus = Surplus(
        hashes=repeats["hash"],
        names=repeats["name"],
        times=repeats["count"] - 1,
        is_whole=is_whole,
        estimate=repeated,
    )
    missing = 0
    if expected is not None and total.is_complete and (is_whole or not repeated):
        missing = expected.rows - total.rows + repeated
    return surplus, repeated, missing


def _compare_contents(
    counted: Sequence[Epoch],
    total: Epoch,
    previous: Sequence[Epoch],
    content: Content,
) -> Iterator[Fault]:
    """Compare contents of the rows in the samples, within the epoch and with the one before; find
    rows that have random numbers in common.
    """
    sample = total.sample.rows
    before = merge_epochs(previous).sample.rows if previous else sample[:0]
    _, rows, earlier = np.intersect1d(
        sample["hash"],
        before["hash"],
        return_indices=True,
    )
    is_alike = sample["digest"][rows] == before["digest"][earlier]
    if content == "equal":
        kind = "content"
        num_later = sample["count"] - 1
        is_wrong = (num_later > 0) & (sample["alike"] < num_later)
        is_wrong[rows[~is_alike]] = True
        text = "changed under the same id"
    else:
        kind = "same_content"
        is_wrong = sample["alike"] > 0
        is_wrong[rows[is_alike]] = True
        text = "should be random and is the same as before: augmentation repeats"
    if is_wrong.any():
        wrong = sample[is_wrong]
        names = row_names(total.kind, wrong["hash"], wrong["name"])
        text = f"the content of {_rows_text(names, len(names))} {text}"
        yield Fault(
            kind,
            text,
            count=len(names),
            rows=names[:MAX_NAMED],
        )
    if content == "equal":
        return
    by_entry: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for record in counted:
        for name, digests in record.noise.items():
            for identity, digest in digests.items():
                by_entry[name][digest].add(identity)
    for name, identities in by_entry.items():
        shared: set[int] = set()
        for group in identities.values():
            if len(group) > 1:
                shared |= group
        if not shared:
            continue
        is_shared = [identity in shared for identity in sample["hash"].tolist()]
        equals = sample[is_shared]
        names = row_names(total.kind, equals["hash"], equals["name"])
        text = (
            f"{_rows_text(names, len(shared))} have the same random numbers in entry '{name}' as "
            "other rows: each worker and rank needs a seed of its own"
        )
        yield Fault(
            "shared_noise",
            text,
            count=len(shared),
            rows=names[:MAX_NAMED],
        )


def _named(names: Sequence[int | str], mask: Mask) -> list[int | str]:
    return [names[place] for place in np.flatnonzero(mask).tolist()]


def _ranks_text(ranks: Sequence[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    text = ", ".join(map(str, ranks[:_NUM_LISTED]))
    if len(ranks) > _NUM_LISTED:
        text += " and more"
    return f"{noun} {text}"


def _rows_text(names: Sequence[int | str], count: int) -> str:
    noun = "row" if count == 1 else "rows"
    text = f"{count:,} {noun}"
    if not names:
        return text
    listed = ", ".join(map(str, names[:_NUM_LISTED]))
    if len(names) > _NUM_LISTED:
        listed += ", ..."
    return f"{text} ({listed})"
