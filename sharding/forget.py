"""Delete samples from a dataset: only the shards that hold some are written again; layers and
caches follow.

All that is new is made in ``.fuelrail/`` of each folder first, its manifest last: unchanged shards
that get another number are hard links there. Then ``dataset.json`` is removed, the new files take
their places, the old ones go, and the new ``dataset.json`` comes last. A run that was killed leaves
the dataset as it was, or without ``dataset.json``; the same command continues, to the same bytes.

What is done follows from the arguments and from the dataset as it was, whose manifest and tables
are kept in ``.fuelrail/before`` meanwhile: a working folder may have come with the dataset, and
nothing that is written there decides what is deleted or where.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.cli import PrintOptions, counted
from fuelrail.pipeline.errors import ConfigError, DatasetError
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
from fuelrail.pipeline.format.index.tables import (
    file_entry,
    open_shards,
    open_tables,
)
from fuelrail.pipeline.format.layers import (
    EITHER,
    INDEXED,
    LAYERS,
    NO_ROW,
    BaseEntry,
    Layer,
    LayerManifest,
    check_base,
    read_rows,
)
from fuelrail.pipeline.format.manifest import (
    BRING_BACK,
    DATASETS,
    MANIFEST_FILE,
    WORK_FOLDER,
    Kinds,
    Lineage,
    load_manifest,
)
from fuelrail.pipeline.format.zstd_frames import is_framed
from fuelrail.pipeline.order.keys import listed_names, named_rows, unknown_names
from fuelrail.pipeline.sample.schema import I64, META, decode_meta, encode_meta
from fuelrail.pipeline.settings import flag
from fuelrail.pipeline.storage.files import open_file, read_file, sync_folder
from fuelrail.pipeline.storage.filesystem import (
    default_cache_folder,
    is_url,
    shown_url,
)
from fuelrail.pipeline.text import Printed, escaped
from fuelrail.sharding.append import bring_shard, take_attributes
from fuelrail.sharding.output.folder import (
    FolderOutput,
    check_work,
    file_is,
    link_or_copy,
    read_json,
)
from fuelrail.sharding.output.resume import check_same_recipe
from fuelrail.sharding.output.workspace import RunState, Workspace
from fuelrail.sharding.planning.recipe import Recipe
from fuelrail.sharding.traces import (
    DeletedTimes,
    cut_member,
    deleted_times,
    holders,
    is_cut,
)
from fuelrail.sharding.verify.statistics import STATISTICS_FILE
from fuelrail.sharding.write.layers.finish import publish_rows
from fuelrail.sharding.write.packer import (
    Packed,
    RawMember,
    ShardPacker,
)
from fuelrail.sharding.write.publish import (
    publish_tables,
    write_attributes,
    write_index,
)
from fuelrail.sharding.write.read_buffer import ReadBuffer
from fuelrail.sharding.write.records import publish_listing

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.arrays import Buffer

    Rows = I64

_BEFORE: Final = "before"
"""In a working folder: manifest and tables as they were."""
_NEXT: Final = "next"
"""In a working folder: the next version, in the making or on its way to its place."""
_NOTED: Final = f"{WORK_FOLDER}/noted.json"
MAX_RECEIPT_BYTES: Final = 1 << 30


class ForgetOptions(PrintOptions, frozen=True, kw_only=True):
    """Flags of ``fuelrail forget``."""

    clips: Annotated[
        str,
        flag(
            "file of the clips, and keys of samples, to delete: one a line",
            metavar="FILE",
        ),
    ]
    layer: Annotated[
        tuple[str, ...],
        flag(
            "folder of a layer, which follows; repeatable",
            repeat=True,
            metavar="LAYER",
        ),
    ] = ()
    cache: Annotated[
        tuple[str, ...],
        flag(
            "cache_dir of loaders, to be purged; repeatable",
            repeat=True,
            metavar="FOLDER",
        ),
    ] = ()
    receipt: Annotated[
        str | None,
        flag(
            "JSON file for the receipt (default: DATASET-forgot-DIGEST.json)",
            metavar="FILE",
        ),
    ] = None


class DeletedSample(msgspec.Struct, frozen=True):
    """A sample that is gone, and the digests (xxh3, hex) of its span and its members."""

    key: str
    clip_id: str
    xxh3: str
    members: dict[str, str]


class OrderInputs(msgspec.Struct, frozen=True):
    """What orders over the dataset as it was need of the deleted samples, in the order of
    ``samples``.

    ``splits`` has the number of samples of each shard, split by split; ``rows`` are those of the
    old index, ``attributes`` the columns of ``attributes.parquet``.
    """

    splits: dict[str, list[int]]
    rows: list[int]
    frames: list[int]
    timestamps_ns: list[int]
    attributes: dict[str, list[Any]]


class DeletedFrom(msgspec.Struct, frozen=True):
    """A folder that samples were deleted from, the dataset or a layer: fingerprints before and
    after.

    ``shards`` are those that are gone, with their SHA-256; ``linked`` those of them that have other
    names, such as in another version of the dataset, where the bytes still are. Of a layer
    ``order`` is what the receipt has of the dataset under that name, for the rows of ``keys``.
    """

    folder: str
    before: str
    after: str
    num_samples: int
    shards: dict[str, str]
    linked: list[str]
    num_cut: int = 0
    """Samples that are left, and held sweeps, measurements or steps of trajectories of deleted
    ones: these went.
    """
    keys: list[str] = []
    order: OrderInputs | None = None


class ForgetReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a deletion.

    ``names`` are the keys and clips that were asked for, ``caches`` the folders of caches that were
    removed. ``order`` is what `fuelrail runs` needs to ask older runs about other samples.
    ``keeps_dictionary``: the dataset's zstd dictionary stays, which was trained on the metadata of
    some samples.
    """

    names: list[str]
    samples: list[DeletedSample]
    folders: list[DeletedFrom]
    caches: list[str]
    keeps_dictionary: bool
    order: OrderInputs | None = None

    def as_text(self) -> str:
        """Return the report for people."""
        clips = {entry.clip_id for entry in self.samples}
        lines = [f"deleted {counted(len(self.samples), 'sample')} of {counted(len(clips), 'clip')}"]
        for entry in self.folders:
            lines.append(
                f"{escaped(entry.folder)}: {counted(entry.num_samples, 'sample')} in "
                f"{counted(len(entry.shards), 'shard')}, fingerprint {entry.before[:16]} is "
                f"now {entry.after[:16]}"
            )
            if entry.num_cut:
                lines.append(
                    f"  {counted(entry.num_cut, 'other sample')} held sweeps, measurements or "
                    "steps of trajectories of them, which went too"
                )
            lines += [
                f"  {name} has other names, which still hold the samples" for name in entry.linked
            ]
        lines += [f"removed the cache {escaped(entry)}" for entry in self.caches]
        if self.keeps_dictionary:
            lines.append(
                "zstd.dict stays, which may hold parts of metadata: `fuelrail reshard` "
                "trains another one"
            )
        return "\n".join(lines) + "\n"


class _Noted(msgspec.Struct, frozen=True):
    """What an interrupted call saw before it changed a folder, for the receipt alone: nothing is
    done by it.
    """

    linked: list[str] = []
    caches: list[str] = []
    num_cut: int = 0


class _Part(NamedTuple):
    """A folder that samples are deleted from: the dataset or a layer as it was, and the rows to
    delete.

    ``source`` is read from the folder itself until something changes there, then from its copy in
    ``_BEFORE``.
    """

    out: FolderOutput
    source: Dataset
    rows: Rows
    clips: Mapping[str, DeletedTimes]

    @property
    def fingerprint(self) -> str:
        """That of the folder as it was."""
        return self.source.manifest.fingerprint


def forget(
    dataset: str | os.PathLike[str],
    names: str | os.PathLike[str] | Sequence[str],
    *,
    layers: Sequence[str | os.PathLike[str]] = (),
    caches: Sequence[str | os.PathLike[str]] = (),
    receipt: str | os.PathLike[str] | None = None,
) -> ForgetReport:
    """Delete samples from a dataset in a folder, in place; a call that was interrupted is continued
    by the same one.

    Args:
        dataset: folder of the dataset. Nothing may read it meanwhile.
        names: keys of samples and clips, or a file that lists them, as the ``subset`` of an order.
        layers: folders of its layers; their rows of these samples are deleted, and they belong to
            the new version.
        caches: ``cache_dir`` of loaders, where what they keep of the dataset and layers is removed;
            also in the user's.
        receipt: JSON file for the report; None: ``DATASET-forgot-DIGEST.json`` beside the folder.

    The new dataset has another fingerprint, and the old one in its lineage. Raises ConfigError for
    URLs and where nothing would be left, OrderError for unknown names, ManifestError for layers of
    other datasets, ChecksumError for damaged samples, DatasetExistsError where another run is
    unfinished, DatasetError where a folder cannot be written or a working folder holds what no run
    makes.
    """
    for place in (dataset, *layers):
        if is_url(place):
            raise ConfigError(
                f"'{shown_url(str(place))}' is at a URL: samples are deleted in folders of "
                "this machine"
            )
    listed = (
        listed_names(os.fspath(names)).to_pylist()
        if isinstance(names, str | os.PathLike)
        else names
    )
    listed = sorted(set(listed))
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()
    places = [os.fspath(place).removeprefix("file://") for place in (dataset, *layers)]
    outs = [FolderOutput(place) for place in places]
    out = outs[0]
    file = Path(receipt or out.root.with_name(f"{out.root.name}-forgot-{digest[:16]}.json"))
    for place_out in outs:
        check_work(place_out)
    if not _has_snapshot(out):
        load_manifest(out.root)  # before anything is made in a folder that is no dataset
    with out.writing("finished steps"), Workspace(out) as work:
        started = work.state()
        recipe = Recipe(source="forget", source_options={"names": digest})
        if started is not None and started.recipe.source != "forget":
            check_same_recipe(out.shown, started.recipe, recipe)
        report = _load_finished_report(
            file,
            names=listed,
            outs=outs,
            is_started=started is not None,
        )
        if report is None or (
            started is None and _find_rows(open_dataset(out.root), listed)[0].size
        ):
            parts = _find_parts(outs, listed, is_started=started is not None)
            options = {
                "names": digest,
                "layers": sorted(part.fingerprint for part in parts[1:]),
            }
            recipe = msgspec.structs.replace(recipe, source_options=options)
            if started is not None:
                check_same_recipe(out.shown, started.recipe, recipe)
            folders = _find_cache_folders(parts, caches)
            if started is None:
                for place_out in outs:
                    # What is there is not of a call that has begun.
                    for path in (
                        place_out.work / _BEFORE,
                        place_out.work / _NEXT,
                        place_out.root / _NOTED,
                    ):
                        if path.is_dir():
                            shutil.rmtree(path)
                        else:
                            path.unlink(missing_ok=True)
            work.start(RunState(recipe=recipe))
            report = _delete_all(parts, listed, folders)
            # Whole, by way of one name, so that a killed run leaves no other.
            part = file.with_name(f".{file.name}.part")
            part.unlink(missing_ok=True)  # a link there would lead elsewhere
            with part.open("xb") as target:
                target.write(report.as_json().encode())
                target.flush()
                os.fsync(target.fileno())
            part.replace(file)
        for place_out in outs[1:]:
            place_out.remove_work()
        work.remove()
    return report


def _find_parts(
    outs: Sequence[FolderOutput],
    names: list[str],
    *,
    is_started: bool,
) -> list[_Part]:
    """Return what is to be deleted where, the dataset first."""
    base = _open_source(outs[0], DATASETS, is_started=is_started)
    rows, unknown = _find_rows(base, names)
    if unknown:
        raise unknown_names(unknown)
    if len(rows) == len(base):
        raise _make_empty_error(outs[0])
    keys = base.index.texts("key").take(rows).to_pylist()
    # Layers have no sweeps, and the dataset's own shards are whole, or done with.
    is_of_dataset = base.root == outs[0].root
    clips = deleted_times(base, rows, has_shards=is_of_dataset)
    parts = [_Part(outs[0], base, rows, clips)]
    for out in outs[1:]:
        layer = _open_source(out, LAYERS, is_started=is_started)
        check_base(Layer("layer", layer, read_rows(layer)), base)
        table = pa.table({"key": layer.index.texts("key")})
        rows_of_layer, _ = named_rows(keys, table)
        if len(rows_of_layer) == len(layer):
            raise _make_empty_error(out)
        parts.append(_Part(out, layer, rows_of_layer, clips))
    return parts


def _find_rows(base: Dataset, names: list[str]) -> tuple[Rows, set[str]]:
    table = pa.table({name: base.index.texts(name) for name in ("key", "clip_id")})
    return named_rows(names, table)


def _make_empty_error(out: FolderOutput) -> ConfigError:
    return ConfigError(f"nothing would be left of '{out.shown}': remove the folder")


def _delete_all(
    parts: Sequence[_Part],
    names: list[str],
    caches: Sequence[Path],
) -> ForgetReport:
    """Delete from all folders and caches; return the report."""
    base = parts[0].source
    order = _read_order_inputs(base, parts[0].rows)
    samples = []
    for row in map(base.index.row, parts[0].rows.tolist()):
        members = {entry.name: f"{entry.xxh3:016x}" for entry in row.members}
        samples.append(
            DeletedSample(
                key=row.key,
                clip_id=row.clip_id,
                xxh3=f"{row.xxh3:016x}",
                members=members,
            )
        )
    noted = _read_note(parts[0].out)
    removed = [str(folder) for folder in caches if folder.is_dir() or str(folder) in noted.caches]
    _write_note(parts[0].out, msgspec.structs.replace(noted, caches=removed))
    keys = frozenset(sample.key for sample in samples)
    folders: list[DeletedFrom] = []
    for part in parts:
        source = part.source
        # Read before anything changes there; the dataset's own are in the report already.
        layer_keys: list[str] = []
        inputs: OrderInputs | None = None
        if part is not parts[0]:
            texts = source.index.texts("key")
            layer_keys = texts.take(part.rows).to_pylist()
            inputs = _read_order_inputs(source, part.rows)
        if source.root == part.out.root:
            _make_next(part, parts[0], keys)
        if source.root == part.out.root or part.out.size(MANIFEST_FILE) is None:
            _take_place(part)
        manifest = load_manifest(part.out.root, EITHER)
        digests = {shard.sha256 for shard in open_shards(part.out.root, manifest)}
        shards = {
            shard.name: shard.sha256 for shard in source.shards if shard.sha256 not in digests
        }
        noted = _read_note(part.out)
        folders.append(
            DeletedFrom(
                folder=str(part.out.root),
                before=part.fingerprint,
                after=manifest.fingerprint,
                num_samples=len(part.rows),
                shards=shards,
                linked=[name for name in noted.linked if name in shards],
                num_cut=noted.num_cut,
                keys=layer_keys,
                order=inputs,
            )
        )
    for folder in caches:
        shutil.rmtree(folder, ignore_errors=True)
    return ForgetReport(
        names=names,
        samples=samples,
        folders=folders,
        caches=removed,
        keeps_dictionary=base.dictionary is not None,
        order=order,
    )


def _read_order_inputs(base: Dataset, rows: Rows) -> OrderInputs:
    """Return what orders over a dataset need of some samples of it."""
    splits: dict[str, list[int]] = {}
    for shard in base.shards:
        splits.setdefault(shard.split, []).append(shard.num_samples)
    attributes: dict[str, list[Any]] = {}
    file = base.attributes_file()
    if file.exists:
        schema = file.schema(len(base))
        names = [name for name in schema.names if name not in INDEXED]
        fields = pa.schema([schema.field(name) for name in names])
        table = pa.Table.from_batches(file.batches(names), fields) if names else None
        attributes = {} if table is None else table.take(pa.array(rows)).to_pydict()
    return OrderInputs(
        splits=splits,
        rows=rows.tolist(),
        frames=base.index.column("frame")[rows].tolist(),
        timestamps_ns=base.index.column("timestamp_ns")[rows].tolist(),
        attributes=attributes,
    )


def order_digest(names: Sequence[tuple[str, str]], inputs: OrderInputs | None) -> str:
    """Return the SHA-256 by which a manifest names the receipt of what was deleted: keys, clips
    and what orders need of them.
    """
    content = msgspec.json.encode((names, inputs))
    return hashlib.sha256(content).hexdigest()


def _state_deletion(source: Dataset, rows: Rows) -> dict[str, Any]:
    """Return the fact of a manifest that says what was deleted, by its number and digest."""
    keys = source.index.texts("key").take(rows).to_pylist()
    clips = source.index.texts("clip_id").take(rows).to_pylist()
    names = [*zip(keys, clips, strict=True)]
    digest = order_digest(names, _read_order_inputs(source, rows))
    return {"forgotten": {"samples": len(rows), "order_sha256": digest}}


def _find_cache_folders(parts: Sequence[_Part], caches: Sequence[Any]) -> list[Path]:
    """Return the folders that loaders keep of these folders in caches; raise ConfigError for a link
    there.
    """
    folders: dict[Path, None] = {}
    for cache in (default_cache_folder(), *map(Path, caches)):
        for part in parts:
            sha256 = file_entry(part.source.root / MANIFEST_FILE).sha256
            folders[cache / "spans" / part.fingerprint] = None
            folders[cache / "datasets" / sha256] = None
    for folder in folders:
        for path in (folder.parent, folder):
            if path.is_symlink():
                raise ConfigError(
                    f"cache '{path}' is a link, and nothing is deleted through one: remove it, or "
                    "name the folder that it leads to"
                )
    return list(folders)


def _open_source(out: FolderOutput, kinds: Kinds, *, is_started: bool) -> Dataset:
    """Open a folder as it was before the call that is continued, where one was started."""
    if not is_started or not _has_snapshot(out):
        return open_kind(out.root, kinds)
    before = out.work / _BEFORE
    manifest = load_manifest(before, kinds)
    if out.size(MANIFEST_FILE) is None:
        # The rewrite was interrupted, and only the snapshot is whole.
        for entry in manifest.files:
            if not file_is(before / entry.name, entry.bytes, entry.sha256):
                raise _make_edited_error(out)
        return open_kind(before, kinds)
    current = load_manifest(out.root, EITHER)
    if current.digest == manifest.digest:
        return open_kind(out.root, kinds)  # nothing has changed there
    if current.lineage.parents != (manifest.fingerprint,):
        raise _make_edited_error(out)
    return open_kind(before, kinds)  # the new version is there already


def _make_edited_error(out: FolderOutput) -> DatasetError:
    return DatasetError(
        f"'{out.work}' is not what an interrupted `fuelrail forget` has left: it was edited or "
        f"belongs to another dataset. Where '{out.root}' has its {MANIFEST_FILE}, remove "
        f"'{out.work}'; else {BRING_BACK}"
    )


def _has_snapshot(out: FolderOutput) -> bool:
    return out.size(f"{WORK_FOLDER}/{_BEFORE}/{MANIFEST_FILE}") is not None


def _read_note(out: FolderOutput) -> _Noted:
    return read_json(out, _NOTED, _Noted, "remove it and run the same command again") or _Noted()


def _write_note(out: FolderOutput, noted: _Noted) -> None:
    with out.publish(_NOTED) as file:
        file.write(msgspec.json.encode(noted))


def _load_finished_report(
    file: Path,
    names: list[str],
    outs: Sequence[FolderOutput],
    *,
    is_started: bool,
) -> ForgetReport | None:
    """Return the receipt of a call that has done all of this; None where something is to be done.

    It counts where it is of these names and each folder is, or was made from, what it says.
    """
    manifests = []
    for out in outs:
        if out.size(MANIFEST_FILE) is None:
            return None
        manifests.append(load_manifest(out.root, EITHER))
    try:
        report = msgspec.json.decode(read_file(file, MAX_RECEIPT_BYTES), type=ForgetReport)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if report.names != names:
        return None
    fingerprints = {folder.after for folder in report.folders}
    for manifest in manifests:
        versions = {manifest.fingerprint}
        if not is_started:
            versions |= {ancestor.fingerprint for ancestor in manifest.lineage.ancestors}
        if not versions & fingerprints:
            return None
    return report


def _select_inside(rows: Rows, shard: ShardEntry) -> Rows:
    end_sample = shard.first_sample + shard.num_samples
    first, end = np.searchsorted(rows, (shard.first_sample, end_sample))
    return rows[first:end]


def _make_next(part: _Part, base: _Part, keys: frozenset[str]) -> None:
    """Make the next version of a folder in its working folder."""
    out = part.out
    source = part.source
    next_version = FolderOutput(str(out.work / _NEXT))
    shutil.rmtree(next_version.root, ignore_errors=True)
    next_version.temporary.mkdir(parents=True)
    # Keep manifest and tables, so that a call can be continued.
    target = FolderOutput(str(out.work / _BEFORE))
    shutil.rmtree(target.root, ignore_errors=True)
    target.temporary.mkdir(parents=True)
    for name in [
        *(entry.name for entry in source.manifest.files),
        MANIFEST_FILE,
    ]:
        link_or_copy(out.root, target, name)
    sync_folder(target.root)
    held = holders(source, part.clips, part.rows)
    touched = np.union1d(part.rows, held)
    if part is base:
        # The metadata of samples before and behind deleted ones name these.
        table = ClipTable.build(source.index.clip_numbers(), source.index.column("frame"))
        gone = np.isin(table.samples, part.rows)
        clips = table.clip_numbers()
        near = np.zeros(len(source), bool)
        same = clips[1:] == clips[:-1]
        near[1:] |= gone[:-1] & same
        near[:-1] |= gone[1:] & same
        neighbours = table.samples[near].astype(np.int64)
        touched = np.union1d(touched, neighbours)
    hit = {shard.name for shard in source.shards if _select_inside(touched, shard).size}
    linked = [name for name in sorted(hit) if (source.root / name).stat().st_nlink > 1]
    note = msgspec.structs.replace(_read_note(out), linked=linked, num_cut=len(held))
    _write_note(out, note)
    _write_version(
        part,
        base=base,
        hit=hit,
        keys=keys,
        out=next_version,
    )


def _take_place(part: _Part) -> None:
    """Put the files of the next version in the place of the old ones."""
    out = part.out
    source = part.source
    next_version = FolderOutput(str(out.work / _NEXT))
    if next_version.size(MANIFEST_FILE) is None:
        raise _make_edited_error(out)
    manifest = load_manifest(next_version.root, EITHER)
    num_left = len(source) - len(part.rows)
    parents = manifest.lineage.parents
    is_next = parents == (part.fingerprint,)
    if not is_next or manifest.num_samples != num_left:
        raise _make_edited_error(out)
    out.remove(MANIFEST_FILE)
    sync_folder(out.root)
    names = [entry.name for entry in manifest.files]
    _move_files(next_version, out, names)
    for shard in open_shards(out.root, manifest):
        _move_files(next_version, out, [shard.name, shard.idx_name])
        names += [shard.name, shard.idx_name]
    keys = open_tables(out.root, manifest).samples.texts("key")
    is_left = np.ones(len(source), bool)
    is_left[part.rows] = False
    keys_left = source.index.texts("key").filter(pa.array(is_left))
    if not keys.equals(keys_left):
        raise _make_edited_error(out)
    old_names = [entry.name for entry in source.manifest.files]
    for shard in source.shards:
        old_names += [shard.name, shard.idx_name]
    for name in {*old_names, STATISTICS_FILE} - {*names}:  # statistics are of what is deleted too
        out.remove(name)
    sync_folder(out.root)
    (next_version.root / MANIFEST_FILE).replace(out.root / MANIFEST_FILE)
    sync_folder(out.root)


def _move_files(
    next_version: FolderOutput,
    out: FolderOutput,
    names: Sequence[str],
) -> None:
    """Move files of the next version that are not there yet."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (next_version.root / name).replace(out.root / name)


def _write_version(
    part: _Part,
    base: _Part,
    hit: Collection[str],
    keys: frozenset[str],
    out: FolderOutput,
) -> None:
    """Make the next version of the dataset or of a layer in ``out``; ``hit`` are the shards to
    write again.
    """
    source = part.source
    rows = part.rows
    manifest = source.manifest
    kept_rows = np.delete(np.arange(len(source)), rows)
    clips = source.index.clip_numbers()
    entries: list[ShardEntry] = []
    write_index(
        out.temporary,
        source.index.names,
        source.index.codecs,
        _write_shards(
            part,
            kept_rows=kept_rows,
            hit=hit,
            keys=keys,
            out=out,
            entries=entries,
        ),
    )
    if source.attributes_file().exists:
        write_attributes(
            out.temporary,
            take_attributes(out.temporary, [source], [(0, kept_rows)]),
        )
    changed: dict[str, Any]
    if isinstance(manifest, LayerManifest):
        rows_of_base = read_rows(source)
        if rows_of_base is None:
            rows_of_base = np.arange(len(source))
        rows_left = np.delete(
            np.asarray(rows_of_base),
            base.rows,
        )
        files = publish_rows(
            out,
            out.temporary,
            np.where(
                rows_left == NO_ROW,
                NO_ROW,
                rows_left - np.searchsorted(rows, rows_left),
            ),
        )
        facts = manifest.provenance.get("facts")
        facts = {**facts} if isinstance(facts, dict) else {}
        changed = {
            "base": BaseEntry.from_dataset(open_dataset(base.out.root)),
            "provenance": {
                **manifest.provenance,
                "facts": facts | _state_deletion(source, rows),
            },
        }
    else:  # of the old recipe nothing: it may name what is deleted
        recipe = Recipe(
            source="forget",
            source_options={"fingerprint": manifest.fingerprint},
        )
        facts_known = {
            "poses": manifest.has_poses,
            "calibration": manifest.has_calibration,
        }
        facts = {
            **_state_deletion(source, rows),
            **{name: "none" for name, is_known in facts_known.items() if not is_known},
        }
        changed = {
            "provenance": {
                "recipe": msgspec.to_builtins(recipe),
                "facts": facts,
            }
        }
        files = [entry for entry in manifest.files if entry.name == DICTIONARY_FILE]
    make = partial(
        msgspec.structs.replace,
        manifest,
        lineage=Lineage.from_parents([manifest]),
        **changed,
    )
    num_clips = {}
    for split in source.splits:
        clips_of_split = [
            clips[kept_rows[entry.first_sample :][: entry.num_samples]]
            for entry in entries
            if entry.split == split
        ]
        if clips_of_split:
            num_clips[split] = len(np.unique(np.concatenate(clips_of_split)))
    publish_tables(
        out,
        folder=out.temporary,
        shards=entries,
        clips_by_split=num_clips,
        make=make,
        published=files,
    )


def _write_shards(
    part: _Part,
    kept_rows: Rows,
    hit: Collection[str],
    keys: frozenset[str],
    out: FolderOutput,
    entries: list[ShardEntry],
) -> Iterator[IndexRow]:
    """Yield the rows of the samples that are kept; write, or link, their shards before, and add
    their entries.
    """
    source = part.source
    first = 0
    numbers = Counter[str]()
    for old in source.shards:
        shard_rows = _select_inside(kept_rows, old)
        if not len(shard_rows):
            continue
        name = shard_name(old.split, numbers[old.split], framed=is_framed(old.name))
        numbers[old.split] += 1
        new = old._replace(name=name, first_sample=first, num_samples=len(shard_rows))
        rows = [source.index.row(number) for number in shard_rows.tolist()]
        if old.name in hit:
            packed = _repack_shard(
                part,
                old=old.name,
                new=name,
                number=len(entries),
                rows=rows,
                keys=keys,
                out=out,
            )
            new = publish_listing(
                out,
                new._replace(bytes=packed.num_bytes, sha256=packed.sha256),
                packed.listing,
            )
            rows = packed.rows
        elif name != old.name:
            bring_shard(
                source,
                old=old,
                out=out,
                new=new,
                was_finished=False,
            )
        yield from (row._replace(shard=len(entries)) for row in rows)
        entries.append(new)
        first += len(shard_rows)
        source.index.release()


def _repack_shard(
    part: _Part,
    old: str,
    new: str,
    number: int,
    rows: Sequence[IndexRow],
    keys: frozenset[str],
    out: FolderOutput,
) -> Packed:
    """Write some samples of a shard as another one, without traces of deleted neighbours."""
    source = part.source
    level = source.manifest.compression.get("level", DEFAULT_ZSTD_LEVEL)
    channels = source.manifest.extra_channels
    buffer = ReadBuffer()
    with open_file(source.root / old) as shard, out.publish(new) as target:
        packer = ShardPacker(
            file=target,
            number=number,
            level=level,
            dictionary=source.dictionary,
            buffer=buffer,
            framed=is_framed(new),
        )
        for row in rows:
            shard.seek(row.offset)
            span = shard.read(row.length)
            check_span(row, span, old)
            raw: dict[str, Buffer] = {
                **read_members(
                    row,
                    span=span,
                    shard=old,
                    dictionary=source.dictionary,
                )
            }
            if META in raw:
                meta = decode_meta(raw[META])
                names = [name for name in ("prev_key", "next_key") if getattr(meta, name) in keys]
                if names:
                    meta = msgspec.structs.replace(meta, **dict.fromkeys(names))
                    raw[META] = encode_meta(meta)
            members = []
            for entry in row.members:
                data: Buffer | None = raw[entry.name]
                if row.clip_id in part.clips and is_cut(entry.name, channels):
                    times = part.clips[row.clip_id]
                    data = cut_member(
                        entry.name,
                        data=raw[entry.name],
                        row=row,
                        times=times,
                        channels=channels,
                    )
                if data is not None:
                    members.append(RawMember(entry.name, entry.codec, data))
            buffer.clear()
            packer.add(
                row.key,
                clip_id=row.clip_id,
                frame=row.frame,
                timestamp_ns=row.timestamp_ns,
                members=members,
            )
        return packer.close()
