"""Whether ranks saw what they should in an epoch: each row once, as many batches, equal groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fuelrail.loaders.witness.record import Epoch, add_sums, unpack_sample, unpack_table
from fuelrail.loaders.witness.rows import Hashes, Rows, integer_rows, row_names, text_rows
from fuelrail.loaders.witness.sketch import LARGE, SAMPLE_ROWS, SMALL, Sample, Surplus, Table
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.text import shortened

Tail: TypeAlias = Literal["exact", "pad", "drop"]
Content: TypeAlias = Literal["equal", "random"]

MAX_NAMED: Final = 1000
_CHUNK: Final = 1 << 18
_SHOWN: Final = 5


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


class WitnessReport(msgspec.Struct, frozen=True):
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
        of = "" if self.expected is None else f" of {self.expected:,}"
        lines = [f"epoch {self.epoch}{state}: {self.rows:,}{of} rows on {self.ranks} ranks"]
        lines += [f"FAULT {fault.text}" for fault in self.faults]
        lines += [f"note: {note}" for note in self.notes]
        if not self.faults:
            is_each_once = self.is_complete and self.expected is not None and not self.notes
            lines.append("ok: each row came once" if is_each_once else "ok: no fault was seen")
        return "\n".join(lines)


class Expected(NamedTuple):
    """The rows that an epoch should have.

    Attributes:
        size: number of rows.
        sums: sum of their hashes.
        table: large table of them; None where only their number is known.
        small: small table of them.
        hashes: their hashes, where they were listed; None for the integers below `size`.
        ids: the list of them.
    """

    size: int
    kind: str | None = None
    sums: tuple[int, int] = (0, 0)
    table: Table | None = None
    small: Table | None = None
    hashes: Hashes | None = None
    ids: Sequence[Any] = ()


def expect(value: Any, kind: str | None) -> Expected | None:
    """Return what an epoch should have: from a number of rows, a list of ids, or an epoch's record.

    A number stands for the integers below it where ids are integers, else for a count alone.
    Raises ConfigError.
    """
    if value is None:
        return None
    if isinstance(value, Epoch):
        return Expected(
            size=value.rows,
            kind=value.kind,
            sums=value.sums,
            table=unpack_table(value) if value.is_from_start else None,
            small=_small(value),
        )
    if isinstance(value, int | np.integer):
        count = int(value)
        if count < 0:
            raise ConfigError(f"expected={count} rows must be 0 or more")
        if kind != "integer":
            return Expected(size=count)
        parts = (
            integer_rows(np.arange(start, min(start + _CHUNK, count)))
            for start in range(0, count, _CHUNK)
        )
        return _tabulate(parts, count, "integer", is_range=True)
    ids = list(value)
    if all(isinstance(identity, int | np.integer) for identity in ids):
        rows = integer_rows(np.array([int(identity) for identity in ids], np.int64))
    elif all(isinstance(identity, str | bytes) for identity in ids):
        rows = text_rows(ids)
    else:
        raise ConfigError(
            "expected= must be a number of rows, a list of integers, texts or bytes, or the "
            f"record of an epoch; it begins with {shortened(repr(ids[:3]))}"
        )
    return _tabulate([rows], len(ids), rows.kind, is_range=False)._replace(ids=ids)


def _tabulate(parts: Iterable[Rows], count: int, kind: str, *, is_range: bool) -> Expected:
    table = Table(LARGE, has_names=kind != "integer")
    small = Table(SMALL)
    sums = (0, 0)
    hashes = []
    for rows in parts:
        table.add(rows)
        small.add(rows)
        total = rows.hashes.sum(axis=0, dtype=np.uint64)
        sums = add_sums(sums, (int(total[0]), int(total[1])))
        if not is_range:
            hashes.append(rows.hashes[:, 0])
    return Expected(
        size=count,
        kind=kind,
        sums=sums,
        table=table,
        small=small,
        hashes=None if is_range else np.concatenate([np.empty(0, np.uint64), *hashes]),
    )


class Rules(NamedTuple):
    """What is allowed in an epoch.

    Attributes:
        expected: the rows it should have.
        tail: "exact": each row once; "pad": the last batch may be filled up with rows that came
            already; "drop": rows that do not fill the last batch may be left out; None: as the
            loader and the number of ranks imply.
        drops: whether the loader says that it leaves such rows out.
        shuffles: whether the loader says that it shuffles.
        content: "equal": a row's content is the same whenever it comes; "random": it never is;
            None: contents are not compared.
        groups: lists of ranks that should see the same rows; None: all ranks differ.
    """

    expected: Expected | None = None
    tail: Tail | None = None
    drops: bool = False
    shuffles: bool = False
    content: Content | None = None
    groups: Sequence[Sequence[int]] | None = None


def judge(records: Sequence[Epoch], rules: Rules, previous: Sequence[Epoch] = ()) -> WitnessReport:
    """Return what the records of all ranks say about an epoch.

    Args:
        records: one of each rank, with tables and samples.
        rules: what is allowed.
        previous: those of the epoch before; may be empty.
    """
    faults: list[Fault] = []
    notes: list[str] = []
    kinds = {record.kind for record in records if record.kind is not None}
    is_complete = all(record.is_complete for record in records)
    counted = _counted(records, rules, faults)
    if len(kinds) > 1:
        faults.append(Fault("keys", f"ids are of several kinds: {', '.join(sorted(kinds))}"))
    elif counted:
        if is_complete:
            _check_batches(counted, faults)
        _check_equal_ranks(counted, faults)
        _check_rows(counted, rules, is_complete, faults, notes)
        _check_order(records, previous, rules, faults, notes)
        if rules.content is not None:
            _check_contents(records, previous, rules.content, faults)
    return WitnessReport(
        epoch=records[0].epoch,
        rows=sum(record.rows for record in counted),
        expected=None if rules.expected is None else rules.expected.size,
        ranks=len(records),
        batches=[sum(record.batches) for record in records],
        is_complete=is_complete,
        faults=faults,
        notes=notes,
    )


def _counted(records: Sequence[Epoch], rules: Rules, faults: list[Fault]) -> list[Epoch]:
    """Return one record of each group, after a look whether the group agrees."""
    if rules.groups is None:
        return list(records)
    by_rank = {rank: record for record in records for rank in record.ranks}
    counted = []
    for group in rules.groups:
        members = [by_rank[rank] for rank in group if rank in by_rank]
        if not members:
            continue
        counted.append(members[0])
        sequences = Counter(record.sequence for record in members)
        if len(sequences) > 1:
            usual = sequences.most_common(1)[0][0]
            others = sorted(
                rank for record in members if record.sequence != usual for rank in record.ranks
            )
            text = (
                f"ranks {list(group)} should see the same rows in the same order, and "
                f"{_ranks_text(others)} saw others"
            )
            faults.append(Fault("different_rows", text, count=len(others), ranks=others))
    return counted


def _check_batches(counted: Sequence[Epoch], faults: list[Fault]) -> None:
    batches = {
        rank: count
        for item in counted
        for rank, count in zip(item.ranks, item.batches, strict=True)
    }
    if len(set(batches.values())) <= 1:
        return
    usual = Counter(batches.values()).most_common(1)[0][0]
    others = {rank: count for rank, count in batches.items() if count != usual}
    shown = ", ".join(f"{count} on rank {rank}" for rank, count in sorted(others.items())[:_SHOWN])
    text = f"ranks have another number of batches: {usual} on most, {shown}"
    faults.append(Fault("uneven", text, count=len(others), ranks=sorted(others)))


def _check_equal_ranks(counted: Sequence[Epoch], faults: list[Fault]) -> None:
    by_sums = defaultdict(list)
    for record in counted:
        if record.rows and len(record.ranks) == 1 and record.is_from_start:
            by_sums[record.sums].append(record)
    for records in by_sums.values():
        ranks = sorted(rank for record in records for rank in record.ranks)
        if len(ranks) > 1:
            rows = unpack_sample(records[0])
            named = row_names(records[0].kind or "text", rows.hashes, rows.names)
            text = (
                f"{_ranks_text(ranks)} saw the same {records[0].rows:,} rows, and should share "
                "them out: the sampler or the shards do not depend on the rank"
            )
            faults.append(
                Fault("same_rows", text, count=records[0].rows, rows=named[:MAX_NAMED], ranks=ranks)
            )


def _check_rows(
    counted: Sequence[Epoch],
    rules: Rules,
    is_complete: bool,
    faults: list[Fault],
    notes: list[str],
) -> None:
    """Find rows that came twice or never."""
    expected = rules.expected
    total = sum(record.rows for record in counted)
    sums = (0, 0)
    for record in counted:
        sums = add_sums(sums, record.sums)
    kind = next((record.kind for record in counted if record.kind is not None), None)
    if not all(record.is_known for record in counted):
        notes.append("only one rank's part of the epoch is known from before the resume")
        return
    if expected is not None and expected.table is not None and kind not in (None, expected.kind):
        faults.append(
            Fault("keys", f"ids are {kind}s, and expected= has {expected.kind}s: give key=")
        )
        return
    if expected is None or (expected.table is None and expected.small is None):
        _check_repeats(counted, rules, is_complete, total, faults, notes)
        return
    if not is_complete:
        _check_repeats(counted, rules, is_complete, total, faults, notes, bound=expected)
        return
    if total == expected.size and sums == expected.sums:
        return
    surplus = _surplus(counted, expected, kind)
    _say_surplus(counted, rules, total, surplus, faults, notes)


def _surplus(counted: Sequence[Epoch], expected: Expected, kind: str | None) -> Surplus:
    """Return what the ranks saw more or fewer times than expected."""
    is_whole = all(record.is_from_start for record in counted) and expected.table is not None
    difference = Table(LARGE if is_whole else SMALL, has_names=is_whole and kind != "integer")
    base = expected.table if is_whole else expected.small
    assert base is not None
    if base.cells.shape == difference.cells.shape:
        difference.cells -= base.cells
    else:  # no row came, so that names are not known to be needed
        difference.cells = -base.cells
    for record in counted:
        if is_whole and record.table is None:
            continue  # the first record has the table of all ranks
        table = unpack_table(record) if is_whole else _small(record)
        if table is not None and table.cells.shape == difference.cells.shape:
            difference.cells += table.cells
    return difference.surplus()


def _say_surplus(
    counted: Sequence[Epoch],
    rules: Rules,
    total: int,
    surplus: Surplus,
    faults: list[Fault],
    notes: list[str],
) -> None:
    expected = rules.expected
    assert expected is not None
    kind = next((record.kind for record in counted if record.kind is not None), expected.kind)
    net = total - expected.size
    if not surplus.is_whole:
        repeated = max((surplus.estimate + net) // 2, net, 0)
        missing = repeated - net
        for name, count in (("repeated", repeated), ("missing", missing)):
            if count:
                exactly = "" if count == abs(net) else "about "
                said = "came again" if name == "repeated" else "never came"
                text = f"{exactly}{count:,} rows {said}; they are too many to name"
                faults.append(Fault(name, text, count=count))
        return
    names = row_names(kind or "text", surplus.hashes, surplus.names)
    sample = _merged_sample(counted)
    if kind == "text":
        names = _find_texts(names, surplus.hashes, expected, sample)
    is_expected = _is_expected(surplus.hashes, names, expected)
    is_more = surplus.times > 0
    missing_count = -int(surplus.times[~is_more].sum())
    repeated = is_more & is_expected
    unexpected = is_more & ~is_expected
    repeated_count = int(surplus.times[repeated].sum())
    ranks = len({rank for record in counted for rank in record.ranks})
    batch = max((record.largest_batch for record in counted), default=0)
    is_repeated_only = not missing_count and not unexpected.any()
    if is_repeated_only and _is_padding(counted, rules, total, repeated_count, ranks, batch):
        padding = [names[place] for place in np.flatnonzero(repeated)]
        notes.append(f"{_rows_text(padding, repeated_count)} came again to fill the last batch")
        return
    if not repeated_count and not unexpected.any() and rules.tail in (None, "drop"):
        is_drop = rules.drops or rules.tail == "drop"
        if is_drop and missing_count < ranks * max(batch, 1) + ranks:
            rest = [names[place] for place in np.flatnonzero(~is_more)]
            notes.append(
                f"{_rows_text(rest, missing_count)} did not fill a batch and were left out"
            )
            return
    for fault, mask, count, said in (
        ("missing", ~is_more, missing_count, "never came"),
        ("repeated", repeated, repeated_count, "came again"),
        ("unexpected", unexpected, int(surplus.times[unexpected].sum()), "should not be there"),
    ):
        if not count:
            continue
        named = [names[place] for place in np.flatnonzero(mask)]
        holders = _ranks_with(counted, surplus.hashes[mask]) if fault != "missing" else []
        where = f", on {_ranks_text(holders)}" if holders else ""
        faults.append(
            Fault(
                fault,
                f"{_rows_text(named, count)} {said}{where}",
                count=count,
                rows=named[:MAX_NAMED],
                ranks=holders,
            )
        )


def _is_padding(
    counted: Sequence[Epoch],
    rules: Rules,
    total: int,
    repeated: int,
    ranks: int,
    batch: int,
) -> bool:
    """Return whether rows that came again are those that make ranks or batches equally long.

    torch's DistributedSampler fills up to a multiple of the ranks, others to a whole global batch;
    all ranks then have as many rows.
    """
    if rules.tail not in (None, "pad"):
        return False
    if rules.tail is None and ranks == 1:
        return False
    is_even = len({record.own_rows for record in counted}) == 1
    expected = rules.expected
    assert expected is not None
    count = expected.size
    to_ranks = -count % ranks
    to_batches = -count % max(ranks * batch, 1)
    return is_even and total - count == repeated and repeated in (to_ranks, to_batches)


def _check_repeats(
    counted: Sequence[Epoch],
    rules: Rules,
    is_complete: bool,
    total: int,
    faults: list[Fault],
    notes: list[str],
    bound: Expected | None = None,
) -> None:
    """Find rows that came again by the samples of all ranks, where no list of rows is known."""
    expected = rules.expected
    sample = _merged_sample(counted)
    is_all = len(sample.hashes) < SAMPLE_ROWS
    again = sample.counts > 1
    repeated = int((sample.counts - 1)[again].sum())
    if not is_all and len(sample.hashes):
        share = repeated / int(sample.counts.sum())
        repeated = round(share * total)
    ranks = len({rank for record in counted for rank in record.ranks})
    batch = max((record.largest_batch for record in counted), default=0)
    if again.any():
        kind = next(record.kind for record in counted if record.kind is not None)
        names = row_names(kind, sample.hashes[again], sample.names[again])
        limit = max(ranks, ranks * batch)
        may_be_padding = (
            is_complete
            and rules.tail in (None, "pad")
            and (ranks > 1 or rules.tail == "pad")
            and is_all
            and repeated < limit
            and len({record.own_rows for record in counted}) == 1
            and total % ranks == 0
            and (expected is None or total - expected.size == repeated)
        )
        if may_be_padding:
            notes.append(f"{_rows_text(names, repeated)} came again to fill the last batch")
        else:
            about = "" if is_all else "about "
            holders = _ranks_with(counted, sample.hashes[again])
            text = f"{about}{_rows_text(names, repeated)} came again, on {_ranks_text(holders)}"
            faults.append(Fault("repeated", text, repeated, names[:MAX_NAMED], holders))
    if expected is None or not is_complete or bound is not None:
        return
    missing = expected.size - (total - repeated)
    if missing > 0 and is_all | (repeated == 0):
        if (rules.drops or rules.tail == "drop") and missing < ranks * max(batch, 1) + ranks:
            notes.append(f"{missing} rows did not fill a batch and were left out")
        else:
            faults.append(Fault("missing", f"{missing:,} rows never came", count=missing))
    elif missing < 0 and is_all:
        faults.append(Fault("unexpected", f"{-missing:,} rows should not be there", count=-missing))


def _check_order(
    records: Sequence[Epoch],
    previous: Sequence[Epoch],
    rules: Rules,
    faults: list[Fault],
    notes: list[str],
) -> None:
    before = {tuple(record.ranks): record for record in previous}
    ranks = []
    for record in records:
        earlier = before.get(tuple(record.ranks))
        if earlier is None or not record.sequence or record.rows < 2:
            continue
        if record.is_complete and earlier.sequence == record.sequence:
            ranks += record.ranks
    if not ranks:
        return
    text = f"{_ranks_text(ranks)} saw the rows in the same order as in epoch {previous[0].epoch}"
    if rules.shuffles:
        advice = f"{text}: call set_epoch(epoch) on the sampler before each epoch"
        faults.append(Fault("same_order", advice, count=len(ranks), ranks=sorted(ranks)))
    else:
        notes.append(text)


def _check_contents(
    records: Sequence[Epoch], previous: Sequence[Epoch], content: Content, faults: list[Fault]
) -> None:
    """Compare contents of the rows in the samples, within the epoch and with the one before."""
    sample = _merged_sample(records)
    kind = next((record.kind for record in records if record.kind is not None), "text")
    earlier = _merged_sample(previous) if previous else Sample()
    _, here, there = np.intersect1d(sample.hashes, earlier.hashes, return_indices=True)
    is_alike = sample.digests[here] == earlier.digests[there]
    is_again = sample.counts > 1
    if content == "equal":
        changed = np.zeros(len(sample.hashes), bool)
        changed[here[~is_alike]] = True
        changed |= is_again & (sample.alike < sample.counts - 1)
        if changed.any():
            names = row_names(kind, sample.hashes[changed], sample.names[changed])
            text = f"the content of {_rows_text(names, len(names))} changed under the same id"
            faults.append(Fault("content", text, len(names), names[:MAX_NAMED]))
        return
    same = np.zeros(len(sample.hashes), bool)
    same[here[is_alike]] = True
    same |= is_again & (sample.alike > 0)
    if same.any():
        names = row_names(kind, sample.hashes[same], sample.names[same])
        text = (
            f"the random content of {_rows_text(names, len(names))} is the same as before: "
            "augmentation repeats"
        )
        faults.append(Fault("same_content", text, len(names), names[:MAX_NAMED]))
    _check_noise(records, kind, sample, faults)


def _check_noise(records: Sequence[Epoch], kind: str, sample: Sample, faults: list[Fault]) -> None:
    by_entry: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        for name, data in record.noise.items():
            for identity, digest in np.frombuffer(data, np.uint64).reshape(-1, 2).tolist():
                by_entry[name][digest].add(identity)
    for name, rows_of_digest in by_entry.items():
        shared = [rows for rows in rows_of_digest.values() if len(rows) > 1]
        rows = np.array(sorted(set().union(*shared)), np.uint64)
        if len(rows) < 2:
            continue
        place = np.searchsorted(sample.hashes, rows)
        place = place[(place < len(sample.hashes))]
        names = row_names(kind, sample.hashes[place], sample.names[place])
        text = (
            f"{_rows_text(names, len(rows))} have the same random numbers in entry '{name}' as "
            "other rows: each worker and rank needs a seed of its own"
        )
        faults.append(Fault("shared_noise", text, len(rows), names[:MAX_NAMED]))


def _merged_sample(records: Sequence[Epoch]) -> Sample:
    merged = Sample()
    for record in records:
        merged.merge(unpack_sample(record))
    return merged


def _find_texts(
    names: list[int | str], hashes: Hashes, expected: Expected, sample: Sample
) -> list[int | str]:
    """Return names, those that a small table does not hold from the list of ids or the sample."""
    texts: dict[int, int | str] = {}
    if expected.hashes is not None:
        for place in np.flatnonzero(np.isin(expected.hashes, hashes)).tolist():
            identity = expected.ids[place]
            is_text = isinstance(identity, str)
            texts[int(expected.hashes[place])] = identity if is_text else repr(identity)
    named = np.isin(sample.hashes, hashes) if sample.names.size else np.zeros(0, bool)
    for place in np.flatnonzero(named).tolist():
        row = slice(place, place + 1)
        shown = row_names("text", sample.hashes[row], sample.names[row])[0]
        texts.setdefault(int(sample.hashes[place]), shown)
    return [texts.get(int(digest), name) for name, digest in zip(names, hashes, strict=True)]


def _is_expected(hashes: Hashes, names: list[int | str], expected: Expected) -> Any:
    if expected.hashes is not None:
        return np.isin(hashes, expected.hashes)
    if expected.kind == "integer" and expected.table is not None:
        return np.array(
            [isinstance(name, int) and 0 <= name < expected.size for name in names], bool
        )
    return np.ones(len(hashes), bool)


def _ranks_with(counted: Sequence[Epoch], hashes: Hashes) -> list[int]:
    """Return the ranks whose samples hold some of these rows."""
    return sorted(
        rank
        for record in counted
        for rank in record.ranks
        if len(record.ranks) == 1 and np.isin(unpack_sample(record).hashes, hashes).any()
    )


def _small(record: Epoch) -> Table | None:
    if record.small is None:
        return None
    table = Table(SMALL)
    table.cells = np.frombuffer(record.small, np.int64).reshape(table.cells.shape)
    return table


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}{' and more' if len(ranks) > _SHOWN else ''}"


def _rows_text(names: Sequence[int | str], count: int) -> str:
    shown = ", ".join(map(str, names[:_SHOWN]))
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{count:,} row{'s' if count != 1 else ''} ({shown}{more})"
