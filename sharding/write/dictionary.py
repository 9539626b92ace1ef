"""The zstd dictionary of a run: found in OUT, or trained on the small members of its samples.

It is trained once, by the process that plans, on samples spread evenly over the plan, and published
before the first shard is written; a resumed run loads it from there. So all shards are made with
one dictionary, and the same samples give the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import CodecError, DatasetExistsError
from fuelrail.pipeline.format.codecs import (
    DICTIONARY_FILE,
    Dictionary,
    train_dictionary,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.format.manifest import Manifest
    from fuelrail.pipeline.sample.schema import I64
    from fuelrail.sharding.output.folder import Output
    from fuelrail.sharding.planning.recipe import Recipe
    from fuelrail.sharding.sources.shared.scan_table import ScanTable

_TIMES_ITS_SIZE: Final = 100
"""Bytes of samples for each byte of the dictionary, as zstd's authors recommend."""


def train_or_load_dictionary(
    out: Output,
    recipe: Recipe,
    finished: Manifest | None,
    table: ScanTable,
    rows: I64,
) -> Dictionary | None:
    """Return the dictionary of this run's shards, loaded from OUT or trained; None where the recipe
    asks for none.

    ``finished`` is the manifest of a dataset that is complete but for files to be repaired. Raises
    ConfigError where the samples are too few to train on, DatasetExistsError where a finished
    dataset's cannot be made again.
    """
    if recipe.dictionary_bytes is None:
        return None
    stated = finished.file(DICTIONARY_FILE) if finished else None
    stored = None
    data = out.read(DICTIONARY_FILE)
    if data is not None:
        with contextlib.suppress(CodecError):
            stored = Dictionary(data)
    if stored is not None and (stated is None or _hash_dictionary(stored) == stated.sha256):
        return stored
    # Small members of rows spread evenly.
    first = table.row(int(rows[0]))
    small_members = (first.meta, first.geometry, first.boxes)
    sample_bytes = sum(len(data) for data in small_members if data is not None)
    count = min(
        len(rows),
        max(1, (recipe.dictionary_bytes * _TIMES_ITS_SIZE) // sample_bytes),
    )
    chosen = rows[np.arange(count) * len(rows) // count]
    samples: list[bytes] = []
    for number in chosen.tolist():
        row = table.row(number)
        small_members = (row.meta, row.geometry, row.boxes)
        samples += [bytes(data) for data in small_members if data is not None]
    trained = train_dictionary(samples, recipe.dictionary_bytes, recipe.compression_level)
    if stated is not None and _hash_dictionary(trained) != stated.sha256:
        raise DatasetExistsError(
            f"{DICTIONARY_FILE} of '{out.shown}' is damaged and cannot be made again from "
            "this source: bring it back from a copy, or shard into another folder"
        )
    with out.publish(DICTIONARY_FILE) as file:
        file.write(trained.data)
    return trained


def _hash_dictionary(dictionary: Dictionary) -> str:
    return hashlib.sha256(dictionary.data).hexdigest()
