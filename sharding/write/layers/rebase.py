"""Bind a layer to another version of its base: keys say which row belongs to which position;
shards stay.
"""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError, DatasetError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import (
    NO_ROW,
    ROWS_FILE,
    BaseEntry,
    LayerManifest,
    check_layer_table,
    open_layer_data,
)
from fuelrail.pipeline.format.manifest import (
    BRING_BACK,
    MANIFEST_FILE,
    WORK_FOLDER,
    Lineage,
)
from fuelrail.pipeline.storage.files import empty_folder
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.pipeline.text import Printed, escaped
from fuelrail.sharding.output.folder import (
    FolderOutput,
    check_out,
    link_or_copy,
)
from fuelrail.sharding.write.layers.finish import publish_rows
from fuelrail.sharding.write.publish import publish_manifest

_LISTED_KEYS = 1000


class RebaseReport(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A layer bound to another version of its base, and what does not fit.

    ``num_without_value`` samples of the base have no row, and ``num_unused`` rows of the layer no
    sample; ``without_value`` are the first keys of the former, 1,000 at most.
    """

    layer: str
    fingerprint: str
    num_rows: int
    num_without_value: int
    num_unused: int
    without_value: list[str]

    def as_text(self) -> str:
        """Return the report for people."""
        first = (
            f"{escaped(self.layer)}: {counted(self.num_rows, 'row')}, fingerprint "
            f"{self.fingerprint}"
        )
        second = (
            f"{counted(self.num_without_value, 'sample')} of the base without a value, "
            f"{counted(self.num_unused, 'row')} of the layer without a sample"
        )
        return (
            "\n".join(
                [
                    first,
                    second,
                    *(f"  no value: {key}" for key in self.without_value),
                ]
            )
            + "\n"
        )


def rebase_layer(
    layer: str | os.PathLike[str],
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
) -> RebaseReport:
    """Make a layer of ``base`` from a layer of another version of it, such as the one before
    ``--append``.

    Rows are found by key. Shards and tables are hard links, or copies where the file system has
    none; only ``rows.npy`` and the manifest are new. An interrupted call is resumed. Raises
    ConfigError for a layer at a URL and where OUT has something else, DatasetError where no key of
    the layer is in the base, or channels lie on cameras or lidars that the base lacks or stores in
    other sizes, or where the layer lacks a file.
    """
    if is_url(os.fspath(out)):
        raise ConfigError(
            "the output of rebase must be a folder of this machine, got "
            f"'{shown_url(os.fspath(out))}'"
        )
    old = open_layer_data(layer)
    if old.url is not None:
        raise ConfigError(
            f"layer '{old.location}' is at a URL: copy it to a folder first, its files are linked"
        )
    new_base = open_dataset(base)
    manifest = old.manifest
    assert isinstance(manifest, LayerManifest)
    own_files = [file for file in manifest.files if file.name != ROWS_FILE]
    names = []
    for shard in old.shards:
        names.append(shard.name)
        if shard.idx_bytes:
            names.append(shard.idx_name)
    names += [file.name for file in own_files]
    for name in names:
        if not (old.root / name).is_file():
            raise DatasetError(f"layer '{old.location}' has no file {name}; {BRING_BACK}")
    target = FolderOutput(os.fspath(out))
    check_out(target)
    names_present = {*target.names()}
    is_partial = names_present <= {
        WORK_FOLDER,
        MANIFEST_FILE,
        ROWS_FILE,
        *names,
    } and target.names(WORK_FOLDER) in ([], ["tmp"])
    if names_present and not (WORK_FOLDER in names_present and is_partial):
        raise ConfigError(f"output folder '{target.shown}' is not empty: choose another one")
    entry = BaseEntry.from_dataset(new_base)
    _check_sensors(manifest, entry, new_base.location)
    keys: pa.ChunkedArray = old.index.texts("key")
    new_keys = new_base.index.texts("key")
    indices = pc.index_in(new_keys, value_set=keys.combine_chunks())
    rows = np.asarray(pc.fill_null(indices, NO_ROW).to_numpy(), np.int64)
    lacking = np.flatnonzero(rows == NO_ROW)
    if len(lacking) == len(rows):
        raise DatasetError(
            f"no sample of '{new_base.location}' has a key of layer '{old.location}': it is "
            f"not a version of its base, '{manifest.base.name}'"
        )
    with target.writing("files that were linked"):
        empty_folder(target.temporary)
        for name in (MANIFEST_FILE, ROWS_FILE):
            target.remove(name)
        for name in names:
            link_or_copy(old.root, target, name)
        row_files = publish_rows(target, target.temporary, rows)
        bound = publish_manifest(
            target,
            msgspec.structs.replace(
                manifest,
                base=entry,
                files=(*own_files, *row_files),
                digest="",
                lineage=Lineage.from_parents([manifest]),
            ),
        )
        target.remove_work()
    return RebaseReport(
        layer=target.shown,
        fingerprint=bound.fingerprint,
        num_rows=len(rows) - len(lacking),
        num_without_value=len(lacking),
        num_unused=len(old) - (len(rows) - len(lacking)),
        without_value=[new_base.index.row(int(row)).key for row in lacking[:_LISTED_KEYS]],
    )


def _check_sensors(manifest: LayerManifest, entry: BaseEntry, where: str) -> None:
    check_layer_table(manifest.channels, entry, where, DatasetError)
    old, new = (
        {sensor.name: set(sensor.sizes) for sensor in base.sensors}
        for base in (manifest.base, entry)
    )
    for channel in manifest.channels:
        camera = channel.law.camera
        if (
            camera in old
            and camera in new
            and not (old[camera] <= new[camera] or new[camera] <= old[camera])
        ):
            raise DatasetError(
                f"channel '{channel.name}' lies on images of '{camera}' of "
                f"{sorted(old[camera])} pixels, and '{where}' stores them in "
                f"{sorted(new[camera])}: make the layer again for it"
            )
