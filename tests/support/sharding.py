"""Sharding in this process and by the command, scans, and digests and members of what came out."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fuelrail.pipeline.format.dataset import (
    check_span,
    open_dataset,
    read_members,
)
from fuelrail.pipeline.format.rules import Rig
from fuelrail.pipeline.sample.schema import META, decode_meta
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import Outcome, shard
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared.scan_table import ScanTable, ScanWriter
from fuelrail.sharding.write.shard_writer import WriteJob

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.pipeline.format.manifest import Manifest
    from fuelrail.sharding.engines import Engine
    from fuelrail.sharding.sources.source import ScanInfo, Source


_OF_SOURCE = ("version", "missing_camera", "points", "sweeps", "cameras")


def environment() -> dict[str, str]:
    """The variables of this process as it is now, for commands in processes of their own."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def shard_nuscenes(
    root: Path,
    out: Path | str,
    *,
    num_workers: int = 1,
    progress: Quiet | None = None,
    engine: Engine | None = None,
    **values,
) -> Outcome:
    """Shard a nuScenes dataroot; ``values`` are those of the recipe, and of the source what `_OF_SOURCE` names."""
    options = {name: values.pop(name) for name in _OF_SOURCE if name in values}
    recipe = make_recipe(**{"seed": 7, **values})
    return shard(
        SourceSpec("nuscenes", str(root), options),
        out=out,
        recipe=recipe,
        num_workers=num_workers,
        progress=progress or Quiet(),
        engine=engine,
    )


def reshard(sources: Path | str | list, out: Path, num_workers: int = 1, **values) -> Manifest:
    """Shard datasets again, with these values of the recipe and ``options`` of the source."""
    places = sources if isinstance(sources, list) else [sources]
    spec = SourceSpec("fuelrail", "\n".join(map(str, places)), values.pop("options", {}))
    return shard(
        spec,
        out=out,
        recipe=make_recipe(**values),
        num_workers=num_workers,
        progress=Quiet(),
    ).manifest


def shard_command(location: str, out: Path | str, *more: str) -> list[str]:
    """The command that shards in a process of its own."""
    return [
        sys.executable,
        "-m",
        "fuelrail",
        "shard",
        location,
        str(out),
        *more,
    ]


def write_job(work: Path, out: str, source: str) -> WriteJob:
    """What workers are given, without shards; its files are in the new folder ``work``."""
    work.mkdir(parents=True)
    for name in ("scan.arrow", "plan.npy", "selection.npy"):
        (work / name).write_bytes(name.encode())
    return WriteJob(
        out=out,
        scan_table=work / "scan.arrow",
        plan_rows=work / "plan.npy",
        selection=work / "selection.npy",
        shards=(),
        stamps=(),
        source=SourceSpec("nuscenes", source, {}),
        recipe=make_recipe(),
        dataset="d",
        rig=Rig.make((), (), (), ()),
        license=None,
        lidars=(),
        clip_ids=(),
        dictionary=None,
    )


class Scanned(NamedTuple):
    """What a scan gives."""

    source: Source
    info: ScanInfo
    table: ScanTable


def scanned(kind: str, location: Path | str, folder: Path, **options) -> Scanned:
    """Scan a source into a table in ``folder``."""
    source = make_source(SourceSpec(kind, str(location), options))
    with ScanWriter(folder / "scan.arrow", source.attribute_types) as out:
        info = source.scan(out)
    return Scanned(source, info, ScanTable(folder / "scan.arrow"))


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, by relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def members_of(root: Path) -> dict[str, dict]:
    """The raw members of every sample by key; of the metadata, what does not depend on the dataset that it is in."""
    dataset = open_dataset(root)
    members_by_key = {}
    for index in range(len(dataset.index)):
        row = dataset.index.row(index)
        path = dataset.shard_path(row)
        span = path.read_bytes()[row.offset :][: row.length]
        check_span(row, span, path.name)
        members = read_members(row, span, path.name, dictionary=dataset.dictionary)
        meta = msgspec.structs.replace(
            decode_meta(members[META]), dataset="", split="", license=None
        )
        members_by_key[row.key] = {
            **{name: bytes(data) for name, data in members.items()},
            META: meta,
        }
    return members_by_key


def flip(path: Path, position: int | None = None, bits: int = 1) -> None:
    """Flip bits of one byte of a file, of the one in the middle if no other is named."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= bits
    path.write_bytes(data)


class Interrupt(Quiet):
    """Interrupts a run after this number of shards."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def shard_done(self, shard):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
