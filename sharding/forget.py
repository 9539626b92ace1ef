"""Delete samples from a dataset: only the shards that hold some are written again; layers and caches follow.

All that is new is made in ``.fuelrail/`` of each folder first, its manifest last: unchanged shards that get another
number are hard links there. Then ``dataset.json`` is removed, the new files take their places, the old ones go, and the
new ``dataset.json`` comes last. A run that was killed leaves the dataset as it was, or without ``dataset.json``; the
same command continues from ``.fuelrail/forget.json``, which says what is deleted, to the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.cli import PrintOptions, counted
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.format.codecs import DEFAULT_ZSTD_LEVEL, DICTIONARY_FILE
from fuelrail.pipeline.format.dataset import (
    Dataset,
    check_span,
    open_dataset,
    open_kind,
    read_members,
)
from fuelrail.pipeline.format.index.shards import ShardEntry, shard_name
from fuelrail.pipeline.format.index.tables import file_entry, open_shards
from fuelrail.pipeline.format.layers import (
    EITHER,
    NO_ROW,
    BaseEntry,
    LayerManifest,
    open_layer,
    read_rows,
)
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, WORK_FOLDER, Lineage, load_manifest
from fuelrail.pipeline.format.zstd_frames import is_framed
from fuelrail.pipeline.order.keys import listed_names, named_rows, unknown_names
from fuelrail.pipeline.sample.schema import META, decode_meta, encode_meta
from fuelrail.pipeline.settings import flag
from fuelrail.pipeline.storage.files import open_file, sync_folder
from fuelrail.pipeline.storage.filesystem import default_cache_folder, is_url, shown_url
from fuelrail.pipeline.text import Printed, escaped
from fuelrail.sharding.append import bring_shard, take_attributes
from fuelrail.sharding.output.folder import FolderOutput
from fuelrail.sharding.output.resume import check_same_recipe
from fuelrail.sharding.output.workspace import RunState, Workspace
from fuelrail.sharding.planning.recipe import Recipe
from fuelrail.sharding.write.layers.finish import publish_rows
from fuelrail.sharding.write.packer import FramedPacker, Packed, RawMember, ShardPacker
from fuelrail.sharding.write.publish import publish_tables, write_attributes, write_index
from fuelrail.sharding.write.read_buffer import ReadBuffer
from fuelrail.sharding.write.records import publish_listing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.arrays import Buffer

    Rows = NDArray[np.int64]

_PLAN: Final = f"{WORK_FOLDER}/forget.json"


class ForgetOptions(PrintOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail forget``."""

    clips: Annotated[
        str, flag("file of the clips, and keys of samples, to delete: one a line", metavar="FILE")
    ]
    layer: Annotated[
        tuple[str, ...],
        flag("folder of a layer, which follows; repeatable", repeat=True, metavar="LAYER"),
    ] = ()
    cache: Annotated[
        tuple[str, ...],
        flag("cache_dir of loaders, to be purged; repeatable", repeat=True, metavar="FOLDER"),
    ] = ()
    receipt: Annotated[
        str | None,
        flag("JSON file for the receipt (default: DATASET-forgot-DIGEST.json)", metavar="FILE"),
    ] = None


class DeletedSample(msgspec.Struct, frozen=True):
    """A sample that is gone, and the digests (xxh3, hex) of its span and its members."""

    key: str
    clip_id: str
    xxh3: str
    members: dict[str, str]


class DeletedFrom(msgspec.Struct, frozen=True):
    """A folder that samples were deleted from, the dataset or a layer: fingerprints before and after.

    ``shards`` are those that are gone, with their SHA-256; ``linked`` those of them that have other names, such as in
    another version of the dataset, where the bytes still are.
    """

    folder: str
    before: str
    after: str
    num_samples: int
    shards: dict[str, str]
    linked: list[str]


class ForgetReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a deletion.

    ``names`` are the keys and clips that were asked for, ``caches`` the folders of caches that were removed.
    ``keeps_dictionary``: the dataset's zstd dictionary stays, which was trained on the metadata of some samples.
    """

    names: list[str]
    samples: list[DeletedSample]
    folders: list[DeletedFrom]
    caches: list[str]
    keeps_dictionary: bool

    def as_text(self) -> str:
        """Return the report for people."""
        clips = {one.clip_id for one in self.samples}
        lines = [f"deleted {counted(len(self.samples), 'sample')} of {counted(len(clips), 'clip')}"]
        for one in self.folders:
            lines.append(
                f"{escaped(one.folder)}: {counted(one.num_samples, 'sample')} in {counted(len(one.shards), 'shard')}, "
                f"fingerprint {one.before[:16]} is now {one.after[:16]}"
            )
            lines += [
                f"  {name} has other names, which still hold the samples" for name in one.linked
            ]
        lines += [f"removed the cache {escaped(one)}" for one in self.caches]
        if self.keeps_dictionary:
            lines.append(
                "zstd.dict stays, which may hold parts of metadata: `fuelrail reshard` trains another one"
            )
        return "\n".join(lines) + "\n"


class _Part(msgspec.Struct, frozen=True):
    """What is to be done in a folder: rows to delete, files that it has."""

    found: DeletedFrom
    rows: list[int]
    keys: list[str]
    files: list[str]
    stage: str
    """The folder in its working folder where its next version is made."""


class _Plan(msgspec.Struct, frozen=True):
    report: ForgetReport
    parts: list[_Part]


def forget(
    dataset: str | os.PathLike[str],
    names: str | os.PathLike[str] | Sequence[str],
    *,
    layers: Sequence[str | os.PathLike[str]] = (),
    caches: Sequence[str | os.PathLike[str]] = (),
    receipt: str | os.PathLike[str] | None = None,
) -> ForgetReport:
    """Delete samples from a dataset in a folder, in place; a call that was interrupted is continued by the same one.

    Args:
        dataset: folder of the dataset. Nothing may read it meanwhile.
        names: keys of samples and clips, or a file that lists them, as the ``subset`` of an order.
        layers: folders of its layers; their rows of these samples are deleted, and they belong to the new version.
        caches: ``cache_dir`` of loaders, where what they keep of the dataset and layers is removed; also in the user's.
        receipt: JSON file for the report; None: ``DATASET-forgot-DIGEST.json`` beside the folder.

    The new dataset has another fingerprint, and the old one in its lineage. Raises ConfigError for URLs and where
    nothing would be left, OrderError for unknown names, ManifestError for layers of other datasets, ChecksumError for
    damaged samples, DatasetExistsError where another run is unfinished, DatasetError where a folder cannot be written.
    """
    for place in (dataset, *layers):
        if is_url(place):
            raise ConfigError(
                f"'{shown_url(str(place))}' is at a URL: samples are deleted in folders of this machine"
            )
    wanted = (
        listed_names(os.fspath(names)).to_pylist()
        if isinstance(names, str | os.PathLike)
        else names
    )
    wanted = sorted(set(wanted))
    digest = _digest(wanted)
    out = FolderOutput(os.fspath(dataset).removeprefix("file://"))
    file = Path(receipt or out.root.with_name(f"{out.root.name}-forgot-{digest[:16]}.json"))
    data = out.read(_PLAN)
    plan = (
        _plan(out, wanted, layers, caches, file)
        if data is None
        else msgspec.json.decode(data, type=_Plan)
    )
    recipe = Recipe(source="forget", source_options={"names": digest})
    with out.writing("finished steps"), Workspace(out) as work:
        started = work.state()
        check_same_recipe(out.shown, started.recipe if started else None, recipe)
        if isinstance(plan, ForgetReport):
            work.remove()
            return plan
        work.start(RunState(recipe=recipe))
        with out.publish(_PLAN) as target:
            target.write(msgspec.json.encode(plan))
        folders = [_delete(part, plan.parts[0]) for part in plan.parts]
        for cache in plan.report.caches:
            shutil.rmtree(cache, ignore_errors=True)
        report = msgspec.structs.replace(plan.report, folders=folders)
        part = file.with_name(
            f".{file.name}.part"
        )  # one name, so that a killed run leaves no other
        with part.open("wb") as target:
            target.write(report.as_json().encode())
            target.flush()
            os.fsync(target.fileno())
        part.replace(file)
        for one in plan.parts[1:]:
            FolderOutput(one.found.folder).remove_work()
        work.remove()
    return report


def _plan(
    out: FolderOutput, names: list[str], layers: Sequence[Any], caches: Sequence[Any], receipt: Path
) -> _Plan | ForgetReport:
    """Return what is to be done; the report where all of it is done."""
    base = open_dataset(out.root)
    rows, unknown = named_rows(
        names, pa.table({name: base.index.texts(name) for name in ("key", "clip_id")})
    )
    if unknown:
        if not rows.size and receipt.is_file():
            done = msgspec.json.decode(receipt.read_bytes(), type=ForgetReport)
            if done.names == names:
                return done
        raise unknown_names(unknown)
    stage = f"forget-{_digest(names)[:16]}"
    keys = base.index.texts("key").take(rows).to_pylist()
    parts = [_part(base, rows, stage, _neighbours(base, rows))]
    for place in layers:
        layer = open_layer("layer", place, base).data
        of_layer, _ = named_rows(keys, pa.table({"key": layer.index.texts("key")}))
        parts.append(_part(layer, of_layer, stage))
    folders = []
    for cache in (default_cache_folder(), *map(Path, caches)):
        for part in parts:
            sha256 = file_entry(Path(part.found.folder) / MANIFEST_FILE).sha256
            folders += [cache / "spans" / part.found.before, cache / "datasets" / sha256]
    report = ForgetReport(
        names=names,
        samples=[
            DeletedSample(
                one.key,
                one.clip_id,
                f"{one.xxh3:016x}",
                {part.name: f"{part.xxh3:016x}" for part in one.members},
            )
            for one in map(base.index.row, rows.tolist())
        ],
        folders=[],
        caches=[str(folder) for folder in dict.fromkeys(folders) if folder.is_dir()],
        keeps_dictionary=base.dictionary is not None,
    )
    return _Plan(report, parts)


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _neighbours(base: Dataset, rows: Rows) -> Rows:
    """Return the samples before and behind deleted ones in their clips: their metadata name these."""
    table = ClipTable.build(base.index.clip_numbers(), base.index.column("frame"))
    gone, clips = np.isin(table.samples, rows), table.clip_numbers()
    near, same = np.zeros(len(base), bool), clips[1:] == clips[:-1]
    near[1:] |= gone[:-1] & same
    near[:-1] |= gone[1:] & same
    return table.samples[near].astype(np.int64)


def _part(source: Dataset, rows: Rows, stage: str, neighbours: Sequence[int] | Rows = ()) -> _Part:
    """Return what is to be done in a folder."""
    if len(rows) == len(source):
        raise ConfigError(f"nothing would be left of '{source.location}': remove the folder")
    shards = list(source.shards)
    touched = np.union1d(rows, np.asarray(neighbours, np.int64))
    hit = [one for one in shards if _inside(touched, one).size]
    linked = [one.name for one in hit if (source.root / one.name).stat().st_nlink > 1]
    files = [name for one in shards for name in (one.name, one.idx_name)]
    gone = {one.name: one.sha256 for one in hit}
    found = DeletedFrom(str(source.root), source.manifest.fingerprint, "", len(rows), gone, linked)
    keys = source.index.texts("key").take(rows).to_pylist()
    return _Part(
        found, rows.tolist(), keys, [*files, *(one.name for one in source.manifest.files)], stage
    )


def _inside(rows: Rows, shard: ShardEntry) -> Rows:
    first, end = np.searchsorted(rows, (shard.first_sample, shard.first_sample + shard.num_samples))
    return rows[first:end]


def _delete(part: _Part, base: _Part) -> DeletedFrom:
    """Delete what is to be deleted in a folder, unless that was done."""
    out = FolderOutput(part.found.folder)
    next_version = FolderOutput(str(out.work / part.stage))
    is_made = MANIFEST_FILE in next_version.names()
    if not is_made and load_manifest(out.root, EITHER).fingerprint == part.found.before:
        next_version.temporary.mkdir(parents=True, exist_ok=True)
        _write(open_kind(out.root, EITHER), part, base, next_version)
        is_made = True
    if is_made:
        _take_place(out, next_version, part.files)
    return msgspec.structs.replace(part.found, after=load_manifest(out.root, EITHER).fingerprint)


def _take_place(out: FolderOutput, next_version: FolderOutput, files: Sequence[str]) -> None:
    """Put the files of the next version in the place of the old ones."""
    out.remove(MANIFEST_FILE)
    sync_folder(out.root)
    for name in next_version.names():
        if name not in (MANIFEST_FILE, WORK_FOLDER):
            (next_version.root / name).replace(out.root / name)
    manifest = load_manifest(next_version.root, EITHER)
    wanted = {one.name for one in manifest.files}
    for shard in open_shards(out.root, manifest):
        wanted |= {shard.name, shard.idx_name}
    for name in files:
        if name not in wanted:
            out.remove(name)
    sync_folder(out.root)
    (next_version.root / MANIFEST_FILE).replace(out.root / MANIFEST_FILE)
    sync_folder(out.root)


def _write(source: Dataset, part: _Part, base: _Part, out: FolderOutput) -> None:
    """Make the next version of the dataset or of a layer in ``out``."""
    manifest, rows = source.manifest, np.array(part.rows, np.int64)
    kept = np.delete(np.arange(len(source)), rows)
    clips, entries = source.index.clip_numbers(), list[ShardEntry]()
    write_index(
        out.temporary,
        source.index.names,
        source.index.codecs,
        _write_shards(source, part, kept, out, entries),
    )
    if source.attributes_file().exists:
        write_attributes(out.temporary, take_attributes(out.temporary, [source], [(0, kept)]))
    changed: dict[str, Any]
    if isinstance(manifest, LayerManifest):
        of_position = read_rows(source)
        left = np.delete(
            np.arange(len(source)) if of_position is None else np.asarray(of_position), base.rows
        )
        files = publish_rows(
            out, out.temporary, np.where(left == NO_ROW, NO_ROW, left - np.searchsorted(rows, left))
        )
        changed = {"base": BaseEntry.of(open_dataset(base.found.folder))}
    else:  # of the old recipe nothing: it may name what is deleted
        recipe = Recipe(source="forget", source_options={"fingerprint": manifest.fingerprint})
        known = {"poses": manifest.has_poses, "calibration": manifest.has_calibration}
        facts = {
            "forgotten": {"samples": len(rows)},
            **{name: "none" for name, is_known in known.items() if not is_known},
        }
        changed = {"provenance": {"recipe": msgspec.to_builtins(recipe), "facts": facts}}
        files = [one for one in manifest.files if one.name == DICTIONARY_FILE]
    make = partial(msgspec.structs.replace, manifest, lineage=Lineage.of([manifest]), **changed)
    num_clips = {}
    for split in source.splits:
        of_split = [
            clips[kept[one.first_sample :][: one.num_samples]]
            for one in entries
            if one.split == split
        ]
        if of_split:
            num_clips[split] = len(np.unique(np.concatenate(of_split)))
    publish_tables(out, out.temporary, entries, num_clips, make, files)


def _write_shards(
    source: Dataset, part: _Part, kept: Rows, out: FolderOutput, entries: list[ShardEntry]
) -> Iterator[IndexRow]:
    """Yield the rows of the samples that are kept; write, or link, their shards before, and add their entries."""
    first, numbers = 0, Counter[str]()
    for old in source.shards:
        here = _inside(kept, old)
        if not len(here):
            continue
        name = shard_name(old.split, numbers[old.split], framed=is_framed(old.name))
        numbers[old.split] += 1
        new = old._replace(name=name, first_sample=first, num_samples=len(here))
        rows = [source.index.row(at) for at in here.tolist()]
        if old.name in part.found.shards:
            packed = _pack(source, old.name, name, len(entries), rows, part, out)
            new = publish_listing(
                out, new._replace(bytes=packed.num_bytes, sha256=packed.sha256), packed.listing
            )
            rows = packed.rows
        elif name != old.name:
            bring_shard(source, old, out, new, again=False)
        yield from (row._replace(shard=len(entries)) for row in rows)
        entries.append(new)
        first += len(here)
        source.index.release()


def _pack(
    source: Dataset,
    old: str,
    new: str,
    number: int,
    rows: Sequence[IndexRow],
    part: _Part,
    out: FolderOutput,
) -> Packed:
    """Write some samples of a shard as another one; what their metadata says of deleted neighbours is left out."""
    level, buffer, gone = (
        source.manifest.compression.get("level", DEFAULT_ZSTD_LEVEL),
        ReadBuffer(),
        {*part.keys},
    )
    with open_file(source.root / old) as shard, out.publish(new) as target:
        if is_framed(new):
            packer: ShardPacker = FramedPacker(target, number, level, buffer)
        else:
            packer = ShardPacker(target, number, level, source.dictionary, buffer)
        for row in rows:
            shard.seek(row.offset)
            span = shard.read(row.length)
            check_span(row, span, old)
            raw: dict[str, Buffer] = {**read_members(row, span, old, dictionary=source.dictionary)}
            if META in raw:
                meta = decode_meta(raw[META])
                named = {
                    name: None for name in ("prev_key", "next_key") if getattr(meta, name) in gone
                }
                raw[META] = (
                    encode_meta(msgspec.structs.replace(meta, **named)) if named else raw[META]
                )
            members = [RawMember(one.name, one.codec, raw[one.name]) for one in row.members]
            buffer.clear()
            packer.add(row.key, row.clip_id, row.frame, row.timestamp_ns, members)
        return packer.close()
