"""What datasets are made of and how two of them differ, from manifests and tables alone; and their
tags.

A tag is a name for people, in ``tags.json`` beside the dataset. It is not part of the dataset: no
digest covers it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, DatasetError
from fuelrail.pipeline.format.dataset import Dataset, open_kind
from fuelrail.pipeline.format.layers import EITHER, LayerManifest
from fuelrail.pipeline.format.manifest import Ancestor
from fuelrail.pipeline.settings import Settings, explain, flag
from fuelrail.pipeline.storage.files import published, read_file
from fuelrail.pipeline.storage.filesystem import filesystem, is_url, shown_url
from fuelrail.pipeline.storage.retry import fault_of
from fuelrail.pipeline.text import Printed, escaped

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64

TAGS_FILE: Final = "tags.json"

_MAX_TAGS_BYTES: Final = 1 << 16
_TAG: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_MAX_SHOWN: Final = 10
_OF_MANIFEST: Final = (
    "name",
    "order_unit",
    "seed",
    "classes",
    "attributes",
    "time_base",
    "ego_origin",
    "license",
)


class TagOptions(Settings, frozen=True):
    """What `fuelrail tag` changes."""

    add: Annotated[tuple[str, ...], flag("tags to add", metavar="TAG")] = ()
    remove: Annotated[tuple[str, ...], flag("tags to remove", metavar="TAG")] = ()


class DatasetLog(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What a dataset is and what it was made of; ``ancestors`` are all that its manifest names,
    the nearest first.
    """

    dataset: str
    name: str
    fingerprint: str
    num_samples: int
    num_clips: int
    num_shards: int
    num_bytes: int
    made_by: str
    tags: tuple[str, ...]
    parents: tuple[str, ...]
    ancestors: tuple[Ancestor, ...]
    base: str | None
    """The fingerprint of the dataset that a layer belongs to; None for a dataset."""

    def as_text(self) -> str:
        """Return the report for people: a paragraph for the dataset, and a line for each
        ancestor.
        """
        tags = f" [{', '.join(self.tags)}]" if self.tags else ""
        sizes = f"{counted(self.num_shards, 'shard')}, {self.num_bytes / 1e6:,.1f} MB"
        lines = [
            f"{escaped(self.name)}{tags}",
            f"  fingerprint  {self.fingerprint}",
            f"  made by      {escaped(self.made_by)}",
            (
                f"  holds        {counted(self.num_samples, 'sample')} of "
                f"{counted(self.num_clips, 'clip')} in {sizes}"
            ),
        ]
        if self.base is not None:
            lines.append(f"  layer of     {self.base}")
        for ancestor in self.ancestors:
            kin = "parent" if ancestor.fingerprint in self.parents else "before"
            lines.append(
                f"  {kin}       {escaped(ancestor.fingerprint[:16])}  {escaped(ancestor.name)}, "
                f"{counted(ancestor.num_samples, 'sample')}, made by {escaped(ancestor.made_by)}"
            )
        return "\n".join(lines) + "\n"


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """A number of keys or ids, and the first of them."""

    count: int
    first: tuple[str, ...]


class DatasetDiff(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """How dataset or layer ``b`` differs from ``a``.

    Samples are compared by key, bytes by the digest of their span.

    ``options`` maps what differs in recipe and manifest to both values, of layers also in base and
    view; ``channels`` maps the entries of the table, or what differs in them, likewise, with None
    where a dataset has no such channel.
    """

    a: str
    b: str
    is_same: bool
    samples_only_in_a: Keys
    samples_only_in_b: Keys
    samples_changed: Keys
    num_samples_equal: int
    clips_only_in_a: Keys
    clips_only_in_b: Keys
    channels: dict[str, tuple[Any, Any]]
    members: dict[str, tuple[Any, Any]]
    options: dict[str, tuple[Any, Any]]

    def as_text(self) -> str:
        """Return the report for people."""
        same = "have one fingerprint" if self.is_same else "have different fingerprints"
        lines = [
            f"a: {escaped(self.a)}",
            f"b: {escaped(self.b)}",
            f"They {same}.",
        ]
        for title, keys in (
            ("samples only in a", self.samples_only_in_a),
            ("samples only in b", self.samples_only_in_b),
            ("samples with other bytes", self.samples_changed),
            ("clips only in a", self.clips_only_in_a),
            ("clips only in b", self.clips_only_in_b),
        ):
            if keys.count:
                more = ", ..." if keys.count > len(keys.first) else ""
                lines.append(
                    f"{title}: {keys.count:,} ({', '.join(map(escaped, keys.first))}{more})"
                )
        lines.append(f"samples with the same bytes: {self.num_samples_equal:,}")
        for title, entries in (
            ("channel", self.channels),
            ("member", self.members),
            ("option", self.options),
        ):
            lines += [
                f"{title} {escaped(name)}: a {_format_value(first)}, b {_format_value(two)}"
                for name, (first, two) in entries.items()
            ]
        return "\n".join(lines) + "\n"


def _format_value(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return escaped(text if len(text) <= 160 else f"{text[:157]}...")


def dataset_log(dataset: str | os.PathLike[str]) -> DatasetLog:
    """Say what a dataset or layer, in a folder or at a URL, is and was made of; raises
    DatasetError without one.
    """
    opened = open_kind(dataset, EITHER)
    manifest = opened.manifest
    return DatasetLog(
        dataset=opened.location,
        name=manifest.name,
        fingerprint=manifest.fingerprint,
        num_samples=manifest.num_samples,
        num_clips=manifest.num_clips,
        num_shards=manifest.num_shards,
        num_bytes=manifest.num_bytes,
        made_by=str(manifest.provenance.get("recipe", {}).get("source", "unknown")),
        tags=read_tags(dataset),
        parents=manifest.lineage.parents,
        ancestors=manifest.lineage.ancestors,
        base=manifest.base.fingerprint if isinstance(manifest, LayerManifest) else None,
    )


def dataset_diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> DatasetDiff:
    """Compare two datasets or layers, in folders or at URLs, by manifests and tables; no shard is
    read.

    Takes 40 bytes of memory for each sample. Raises DatasetError where there is none,
    IndexFileError for damaged ones.
    """
    first = open_kind(a, EITHER)
    second = open_kind(b, EITHER)
    # The rows that one has alone, and those of the keys that both have.
    keys_a = first.keys.entries()
    keys_b = second.keys.entries()
    in_b = np.isin(keys_a["xxh3"], keys_b["xxh3"])
    in_a = np.isin(keys_b["xxh3"], keys_a["xxh3"])
    rows_only_a = np.sort(keys_a["row"][~in_b])
    rows_only_b = np.sort(keys_b["row"][~in_a])
    only_a = rows_only_a.astype(np.int64)
    only_b = rows_only_b.astype(np.int64)
    rows_a = keys_a["row"][in_b].astype(np.int64)
    rows_b = keys_b["row"][in_a].astype(np.int64)
    if len(rows_a) != len(rows_b):
        raise DatasetError(
            f"the keys of '{first.location}' or '{second.location}' are not unique: run "
            "`fuelrail verify`"
        )
    hashes_a = first.index.column("xxh3")[rows_a]
    hashes_b = second.index.column("xxh3")[rows_b]
    equal = hashes_a == hashes_b
    clips_a = set(first.index.clip_ids())
    clips_b = set(second.index.clip_ids())
    # The channels that one table alone has, and the differences of those in both.
    tables = [
        {entry.name: msgspec.to_builtins(entry) for entry in opened.manifest.channels}
        for opened in (first, second)
    ]
    channels = _compare_values(*tables)
    for name, (entry_a, entry_b) in channels.items():
        if entry_a is not None and entry_b is not None:
            fields = _compare_values(entry_a, entry_b)
            channels[name] = tuple(
                {field: sides[side] for field, sides in fields.items()} for side in (0, 1)
            )  # type: ignore[assignment]
    return DatasetDiff(
        a=first.location,
        b=second.location,
        is_same=first.manifest.fingerprint == second.manifest.fingerprint,
        samples_only_in_a=_list_keys(first, only_a),
        samples_only_in_b=_list_keys(second, only_b),
        samples_changed=_list_keys(first, np.sort(rows_a[~equal])),
        num_samples_equal=int(equal.sum()),
        clips_only_in_a=_list_ids(clips_a - clips_b),
        clips_only_in_b=_list_ids(clips_b - clips_a),
        channels=channels,
        members=_compare_values(
            dict.fromkeys(first.index.names, True),
            dict.fromkeys(second.index.names, True),
        ),
        options=_compare_values(_list_options(first), _list_options(second)),
    )


def _list_keys(dataset: Dataset, rows: I64) -> Keys:
    return Keys(
        count=len(rows),
        first=tuple(dataset.index.row(row).key for row in rows[:_MAX_SHOWN].tolist()),
    )


def _list_ids(ids: set[str]) -> Keys:
    names = sorted(ids)
    return Keys(count=len(names), first=tuple(names[:_MAX_SHOWN]))


def _list_options(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    stated_recipe = manifest.provenance.get("recipe", {})
    recipe = {f"recipe.{name}": value for name, value in stated_recipe.items()}
    names = ("format", *_OF_MANIFEST, "compression")
    values = {name: getattr(manifest, name) for name in names}
    if isinstance(manifest, LayerManifest):
        values |= {
            "base": manifest.base.fingerprint,
            "view": msgspec.to_builtins(manifest.view),
        }
    return {**values, **recipe}


def _compare_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys((*a, *b))
    changes = {}
    for name in names:
        values = (a.get(name), b.get(name))
        if values[0] != values[1]:
            changes[name] = values
    return changes


def read_tags(dataset: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the tags of a dataset in a folder or at a URL, sorted.

    Raises DatasetError for a damaged file, and where storage fails.
    """
    try:
        if is_url(dataset):
            store, folder = filesystem(str(dataset), None)
            try:
                data = store.cat_file(f"{folder}/{TAGS_FILE}", start=0, end=_MAX_TAGS_BYTES)
            except Exception as error:
                fault = fault_of(error)
                if fault.kind in ("missing", "refused"):
                    # A store may refuse what is not there.
                    return ()
                raise DatasetError(
                    f"'{shown_url(str(dataset))}/{TAGS_FILE}' cannot be read ({fault.text})"
                ) from error
        else:
            data = read_file(
                Path(str(dataset).removeprefix("file://")) / TAGS_FILE,
                _MAX_TAGS_BYTES,
            )
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DatasetError(
            f"'{dataset}/{TAGS_FILE}' cannot be read: {error.strerror or error}"
        ) from error
    try:
        tags = msgspec.json.decode(data, type=list[str])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = explain(error, data, list[str])
        raise DatasetError(
            f"'{dataset}/{TAGS_FILE}' is not a list of tags: {text}; remove it"
        ) from error
    valid = {tag for tag in tags if _TAG.fullmatch(tag)}
    return tuple(sorted(valid))


def tag(
    dataset: str | os.PathLike[str],
    *,
    add: tuple[str, ...] = (),
    remove: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Add and remove tags of a dataset in a folder; returns those it has then, sorted.

    Raises ConfigError for a tag that is not allowed, for one to remove that it does not have, for
    one to add and to remove, and for a URL; DatasetError where there is no dataset, or its folder
    cannot be written.
    """
    if is_url(dataset):
        raise ConfigError(
            f"tags are written in folders only, got a URL: put {TAGS_FILE} beside "
            "dataset.json there"
        )
    open_kind(dataset, EITHER)
    tags = set(read_tags(dataset))
    for name in add:
        if not _TAG.fullmatch(name):
            raise ConfigError(
                f"tag {name!r:.120} is not allowed: a-z, 0-9, '.', '_' and '-', at most 100 "
                "characters"
            )
    repeated = sorted(set(add) & set(remove))
    if repeated:
        raise ConfigError(
            f"tag {repeated[0]!r:.120} is to be added and to be removed: give it once"
        )
    unknown = sorted(set(remove) - tags)
    if unknown:
        listed = ", ".join(sorted(tags)) or "none"
        raise ConfigError(f"dataset '{dataset}' has no tag {unknown[0]!r:.120}; it has: {listed}")
    remaining = (tags | set(add)) - set(remove)
    new_tags = tuple(sorted(remaining))
    folder = Path(str(dataset).removeprefix("file://"))
    try:
        with published(folder / TAGS_FILE) as file:
            file.write(msgspec.json.encode(new_tags) + b"\n")
    except OSError as error:
        raise DatasetError(
            f"'{folder / TAGS_FILE}' cannot be written: {error.strerror or error}"
        ) from error
    return new_tags
