"""What the codecs, the dictionary and the layouts take and cost on the samples of a dataset.

    python -m fuelrail.bench.micro.compression DATASET [--out FILE]

Lidar is compared with plain zstd, small members with a dictionary against those without (it is trained on one half of
the clips and measured on the other), and whole samples in each layout against each other. Sizes are exact; rates are
medians of single-threaded calls that took turns.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.timing import QUICK, Effort, compare
from fuelrail.bench.report.files import publish_json
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.codecs import train_dictionary
from fuelrail.pipeline.format.dataset import Dataset, open_dataset, read_members
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.tar import StoredMember, pack_sample
from fuelrail.pipeline.format.zstd_frames import encode_frame
from fuelrail.pipeline.sample.schema import BOXES, GEOMETRY, META, decode_points

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fuelrail.pipeline.sample.arrays import Buffer

Ways: TypeAlias = "dict[str, tuple[Callable[..., Buffer], Callable[..., Buffer]]]"
"""Name to encoder (raw) and decoder (stored, raw size)."""

LEVELS: Final = (1, 3, 9)
DICTIONARY_BYTES: Final = (16 << 10, 64 << 10)
_SMALL: Final = (META, GEOMETRY, BOXES)
_MAX_SAMPLES: Final = 400
_FEW: Final = 12
"""Samples, sweeps or members that a rate is taken over: more would not fit the processor's caches any better."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to store the same raw bytes: what is stored of them, and how fast [MB/s of raw bytes] it goes."""

    name: str
    stored_share: float
    encode_mb_s: float
    decode_mb_s: float


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Ways to store the same ``raw_bytes`` bytes of ``count`` things."""

    title: str
    count: int
    raw_bytes: int
    ways: list[Way]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All tables, and the machine and dataset they were taken on."""

    benchmark: str
    machine: MachineFacts
    dataset: str
    tables: list[Table]


def measure(dataset: Dataset, effort: Effort) -> list[Table]:
    """All tables that the dataset has members for."""
    samples = _read(dataset)
    sweeps = [data for _, members in samples for name, data in members.items() if name.endswith(".npy")]
    tables = [_lidar(sweeps[:_FEW], effort)] if sweeps else []
    clips = sorted({row.clip_id for row, _ in samples})
    if len(clips) > 1:
        known = set(clips[::2])
        halves = [[members for row, members in samples if (row.clip_id in known) is side] for side in (True, False)]
        tables.append(_small(*(_small_members(half) for half in halves), effort=effort))
    return [*tables, _layouts(samples[:_FEW], effort)]


def _read(dataset: Dataset) -> list[tuple[IndexRow, dict[str, bytes]]]:
    found = []
    for at in range(min(len(dataset.index), _MAX_SAMPLES)):
        row = dataset.index.row(at)
        path = dataset.shard_path(row)
        with path.open("rb") as file:
            file.seek(row.offset)
            members = read_members(row, file.read(row.length), path.name, dictionary=dataset.dictionary)
        found.append((row, {name: bytes(data) for name, data in members.items()}))
    return found


def _small_members(samples: Sequence[dict[str, bytes]]) -> list[bytes]:
    return [members[name] for members in samples for name in _SMALL if name in members]


def _lidar(sweeps: Sequence[bytes], effort: Effort) -> Table:
    row_bytes = decode_points(sweeps[0]).shape[1] * 4
    ways: Ways = {}
    for codec in (codecs.ZSTD, codecs.planes(row_bytes)):
        for level in LEVELS:
            ways[f"{codec}, level {level}"] = (
                partial(codecs.encode, codec, level=level),
                partial(codecs.decode, codec),
            )
    return _table("lidar sweeps", sweeps, ways, effort)


def _small(train: Sequence[bytes], test: Sequence[bytes], *, effort: Effort) -> Table:
    ways: Ways = {"zstd, level 3": (partial(codecs.encode, codecs.ZSTD), partial(codecs.decode, codecs.ZSTD))}
    for num_bytes in DICTIONARY_BYTES:
        try:
            trained = train_dictionary(train, num_bytes, codecs.DEFAULT_ZSTD_LEVEL)
        except ConfigError:  # too few samples for it
            continue
        ways[f"zstd-dict, {num_bytes >> 10} KiB"] = (
            partial(codecs.encode, codecs.ZSTD_DICT, dictionary=trained),
            partial(codecs.decode, codecs.ZSTD_DICT, dictionary=trained),
        )
    return _table("small members (meta, geometry, boxes) of other clips than the dictionary knows", test, ways, effort)


def _table(
    title: str,
    things: Sequence[bytes],
    ways: Ways,
    effort: Effort,
) -> Table:
    stored = {name: [encode(thing) for thing in things] for name, (encode, _) in ways.items()}
    total = sum(map(len, things))
    few = things[: 4 * _FEW]
    raw_bytes = sum(map(len, few))
    for name, (_, decode) in ways.items():
        assert all(bytes(decode(s, len(t))) == t for s, t in zip(stored[name], things, strict=True))
    sizes = list(map(len, few))
    encoding = _rates({name: partial(_all, encode, few) for name, (encode, _) in ways.items()}, raw_bytes, effort)
    decoding = _rates(
        {name: partial(_all, decode, stored[name], sizes) for name, (_, decode) in ways.items()}, raw_bytes, effort
    )
    rows = [
        Way(
            name=name,
            stored_share=sum(memoryview(s).nbytes for s in stored[name]) / total,
            encode_mb_s=encoding[name],
            decode_mb_s=decoding[name],
        )
        for name in ways
    ]
    return Table(title=title, count=len(things), raw_bytes=total, ways=rows)


def _layouts(samples: Sequence[tuple[IndexRow, dict[str, bytes]]], effort: Effort) -> Table:
    """Whole samples: packing without writing, and span to raw members."""

    def codec_of(name: str, data: bytes, layout: str) -> str:
        if layout != "member" or name.endswith((".jpg", ".png")):
            return codecs.RAW
        return codecs.planes(decode_points(data).shape[1] * 4) if name.endswith(".npy") else codecs.ZSTD

    def pack(layout: str) -> list[tuple[IndexRow, bytes]]:
        packed = []
        for row, members in samples:
            kinds = {name: codec_of(name, data, layout) for name, data in members.items()}
            stored = [
                StoredMember(codecs.stored_name(n, kinds[n]), codecs.encode(kinds[n], d)) for n, d in members.items()
            ]
            span = pack_sample(row.key, stored)
            joined = b"".join(span.pieces)
            if layout == "frame":
                joined = encode_frame(joined, codecs.DEFAULT_ZSTD_LEVEL)
            entries = tuple(
                MemberEntry(name, at, memoryview(s.data).nbytes, len(members[name]), kinds[name], 0)
                for name, at, s in zip(members, span.offsets, stored, strict=True)
            )
            packed.append((row._replace(offset=0, length=len(joined), members=entries), joined))
        return packed

    spans = {layout: pack(layout) for layout in ("none", "member", "frame")}
    total = sum(len(data) for _, members in samples for data in members.values())
    shard = {"none": "a.tar", "member": "a.tar", "frame": "a.tar.zst"}

    def unpack(layout: str) -> None:
        for row, data in spans[layout]:
            read_members(row, data, shard[layout])

    encoding = _rates({layout: partial(pack, layout) for layout in spans}, total, effort)
    decoding = _rates({layout: partial(unpack, layout) for layout in spans}, total, effort)
    ways = [
        Way(
            name=f"layout {layout}",
            stored_share=sum(len(data) for _, data in packed) / total,
            encode_mb_s=encoding[layout],
            decode_mb_s=decoding[layout],
        )
        for layout, packed in spans.items()
    ]
    return Table(title="whole samples", count=len(samples), raw_bytes=total, ways=ways)


def _all(function: Callable[..., object], *columns: Iterable[object]) -> None:
    for values in zip(*columns, strict=False):
        function(*values)


def _rates(calls: dict[str, Callable[[], object]], num_bytes: int, effort: Effort) -> dict[str, float]:
    return {
        entry.name: round(num_bytes / 1e6 / entry.seconds_per_call, 1) for entry in compare("", calls, effort).entries
    }


def render(report: Report) -> str:
    """The report as text."""
    lines = [f"fuelrail {report.benchmark} on {report.machine.cpu}, dataset {report.dataset}"]
    for table in report.tables:
        lines += ["", f"{table.title}: {table.count}, {table.raw_bytes / table.count:,.0f} bytes each"]
        width = max(len(way.name) for way in table.ways)
        lines += [
            f"  {way.name:<{width}}  {way.stored_share:6.3f} of the size  {way.encode_mb_s:10,.0f} MB/s in"
            f"  {way.decode_mb_s:10,.0f} MB/s out"
            for way in table.ways
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and, with ``--out``, write the report as JSON."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.compression")
    parser.add_argument("dataset", type=Path, help="folder of a Fuelrail dataset")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--quick", action="store_true", help="call everything a few times, to see that it runs")
    options = parser.parse_args(argv)
    dataset = open_dataset(options.dataset)
    tables = measure(dataset, QUICK if options.quick else Effort(num_rounds=7))
    name = f"{dataset.manifest.name} ({dataset.manifest.num_samples} samples)"
    report = Report(benchmark="compression", machine=machine_facts(), dataset=name, tables=tables)
    print(render(report))  # noqa: T201
    if options.out is not None:
        publish_json(options.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
