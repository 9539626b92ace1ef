"""``fuelrail inspect``: a dataset in a page, or one sample with all its members."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.attributes import TEXTS
from fuelrail.pipeline.format.dataset import Dataset, open_kind
from fuelrail.pipeline.format.layers import EITHER, LayerManifest
from fuelrail.pipeline.format.rules import Rig, check_sample
from fuelrail.pipeline.format.zstd_frames import is_framed, span_bytes
from fuelrail.pipeline.storage.filesystem import is_url, shown_url
from fuelrail.pipeline.text import json_text, shortened
from fuelrail.sharding.verify.statistics import dataset_statistics

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import Sample

_NS_PER_MS = 1_000_000
_MAX_VALUES = 1000
_SHOWN_VALUES = 4
"""Different texts of an attribute that are counted, and that are shown."""
_SHOWN_STATISTICS = ("mean", "std", "q01", "q50", "q99")
_MAX_WIDTH = 80
"""Characters of a line; only a long word makes it longer."""
_MAX_CELL = 2000
"""Characters of one cell of a table: it may list a few hundred classes."""


_RECIPE = ("teacher", "temperature", "positions")
"""What of a layer's recipe is shown."""


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The titles of columns, and the cells of each row."""


class Description(NamedTuple):
    """The result of `inspect`: ``facts`` are plain values for programs, ``text`` is for people."""

    facts: dict[str, Any]
    text: str

    def as_json(self) -> str:
        """Return the facts as one JSON document."""
        return json_text(self.facts)

    def as_text(self) -> str:
        """Return the text."""
        return self.text

    def __str__(self) -> str:
        return self.text


def describe_dataset(root: str | os.PathLike[str], *, statistics: bool = False) -> Description:
    """Describe counts, splits, channels, members and origin; raises DatasetError where there is no
    dataset.

    ``statistics`` are computed and stored, too: `dataset_statistics`.
    """
    dataset = open_kind(root, EITHER)
    numbers = dataset_statistics(dataset) if statistics else {}
    manifest = dataset.manifest
    members = _count_members(dataset)
    recipe = manifest.provenance.get("recipe", {})
    head = [
        (
            "dataset",
            f"{manifest.name} ({shown_url(str(root)) if is_url(root) else dataset.root})",
        ),
        (
            "samples",
            f"{manifest.num_samples:,} of {counted(manifest.num_clips, 'clip')}",
        ),
        (
            "shards",
            f"{manifest.num_shards:,}, {manifest.num_bytes / 1e6:,.1f} MB",
        ),
        ("layout", _describe_layout(dataset)),
        ("order", f"{manifest.order_unit}, seed {manifest.seed}"),
        (
            "source",
            f"{recipe.get('source', 'unknown')}, by {recipe.get('tool', 'another tool')}",
        ),
        ("license", manifest.license or "not stated"),
        ("classes", ", ".join(manifest.classes) or "none"),
        ("fingerprint", manifest.fingerprint),
        *(_list_layer_facts(manifest) if isinstance(manifest, LayerManifest) else ()),
    ]
    splits = [
        (
            name,
            f"{entry.num_samples:,}",
            f"{entry.num_clips:,}",
            f"{entry.num_shards:,}",
        )
        for name, entry in manifest.splits.items()
    ]
    channels = [
        (
            camera.channel,
            camera.source_name,
            ", ".join(f"{w} x {h}" for w, h in camera.sizes) or "no image",
        )
        for camera in manifest.cameras
    ] + [(lidar.channel, lidar.source_name, ", ".join(lidar.columns)) for lidar in manifest.lidars]
    extra = [
        (
            channel.name,
            channel.kind,
            "; ".join(
                filter(
                    None,
                    (
                        _describe_values(channel),
                        channel.frame,
                        f"law {channel.law.name}",
                        channel.description,
                    ),
                )
            ),
        )
        for channel in manifest.extra_channels
    ]
    fields = [
        (
            m["name"],
            m["codec"],
            f"{m['count']:,}",
            f"{m['stored_bytes'] / 1e6:,.2f}",
            f"{m['raw_bytes'] / 1e6:,.2f}",
        )
        for m in members
    ]
    attributes = _describe_attributes(dataset)
    text = _format_page(
        ((), head),
        (("split", "samples", "clips", "shards"), splits),
        (("channel", "source name", "pixels or columns"), channels),
        (("channel", "kind", "values; frame; law; description"), extra),
        (("attribute", "type", "values and samples"), attributes),
        (("member", "codec", "samples", "stored MB", "raw MB"), fields),
        (
            ("split", "first numbers", "; ".join(_SHOWN_STATISTICS)),
            _format_statistics(numbers),
        ),
    )
    named = [dict(zip(("name", "type", "values"), channel, strict=True)) for channel in attributes]
    facts = {
        "manifest": msgspec.to_builtins(manifest),
        "members": members,
        "attributes": named,
    }
    return Description({**facts, "statistics": numbers} if statistics else facts, text)


def _format_statistics(
    numbers: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> list[tuple[str, str, str]]:
    rows = []
    for split, split_numbers in numbers.items():
        for name, channel_numbers in split_numbers.items():
            # None is NaN.
            arrays = {
                statistic: np.ravel(np.array(channel_numbers[statistic], np.float64))
                for statistic in _SHOWN_STATISTICS
            }
            values_shown = (
                " ".join(f"{value:.4g}" for value in values[:_SHOWN_VALUES])
                for values in arrays.values()
            )
            rows.append((split, name, "; ".join(values_shown)))
    return rows


def describe_sample(root: str | os.PathLike[str], key: str) -> Description:
    """Describe one sample's address, members, metadata and geometry.

    Raises ConfigError for a key that does not exist, SchemaError for a sample that breaks a rule.
    """
    dataset = open_kind(root, EITHER)
    row_number = dataset.find(key)
    if row_number is None:
        raise ConfigError(
            f"dataset '{dataset.location}' has no sample '{key}'; the first of its "
            f"{len(dataset.index)} is '{dataset.index.row(0).key}'"
        )
    row = dataset.index.row(row_number)
    shard = dataset.shards.name(row.shard)
    framed = is_framed(shard)
    facts: dict[str, Any] = {
        "position": row_number,
        "shard": shard,
        "offset": row.offset,
        "length": row.length,
        "xxh3": f"{row.xxh3:016x}",
        "frame_bytes": span_bytes(row) if framed else None,
        "members": [member._asdict() for member in row.members],
    }
    address = [
        (
            "address",
            f"{shard}, bytes {row.offset} to {row.offset + row.length - 1}, xxh3 {row.xxh3:016x}",
        )
    ]
    if framed:
        address.append(
            (
                "frame",
                f"{row.length:,} bytes of {span_bytes(row):,}; members lie at offsets in it",
            )
        )
    base = 0 if framed else row.offset
    members = [
        (
            m.name,
            m.codec,
            str(base + m.offset),
            f"{m.stored_bytes:,}",
            f"{m.raw_bytes:,}",
        )
        for m in row.members
    ]
    if isinstance(dataset.manifest, LayerManifest):
        values = dataset.read(row_number)
        names = [channel.name for channel in dataset.manifest.channels]
        facts["values"] = {
            name: _shorten_value(values[name]) if name in values else "none" for name in names
        }
        place = f"row {row_number} of {len(dataset.index):,} of layer {dataset.manifest.name}"
        head = [
            ("row", f"{row.key} ({place})"),
            *address,
            (
                "clip",
                f"{row.clip_id}, frame {row.frame}, {row.timestamp_ns} ns",
            ),
        ]
        tables: list[Table] = [(("channel", "value"), [*facts["values"].items()])]
    else:
        sample = dataset[row_number]
        check_sample(
            sample,
            [member.name for member in row.members],
            Rig.from_manifest(dataset.manifest),
        )
        facts["meta"] = msgspec.to_builtins(sample.meta)
        place = f"position {row_number} of {len(dataset.index):,}, split {sample.meta.split}"
        head = [
            ("sample", f"{row.key} ({place})"),
            *address,
            *_list_sample_facts(dataset, sample),
        ]
        tables = _make_sensor_tables(dataset, sample)
    return Description(
        facts,
        _format_page(
            ((), head),
            (("member", "codec", "at", "stored", "raw"), members),
            *tables,
        ),
    )


def _list_layer_facts(manifest: LayerManifest) -> list[tuple[str, str]]:
    base = manifest.base
    view = manifest.view
    lacking = base.num_samples - manifest.num_samples
    epoch = "" if view.kind == "fixed" else f", epoch {view.epoch}"
    return [
        (
            "layer of",
            f"{base.name}, {base.num_samples:,} samples, fingerprint {base.fingerprint}",
        ),
        (
            "rows",
            "complete"
            if not lacking
            else f"partial: {counted(lacking, 'sample')} of the base have none",
        ),
        ("view", f"{view.kind}{epoch}"),
        *((name, str(manifest.recipe[name])) for name in _RECIPE if name in manifest.recipe),
    ]


def _shorten_value(value: object) -> str:
    """Describe a value in a few words: shape and extremes of an array, a text itself."""
    if isinstance(value, np.ndarray):
        if value.size == 1:
            return str(value.item())
        span = (
            f", {value.min()} to {value.max()}" if value.size and value.dtype.kind in "biuf" else ""
        )
        return f"{value.dtype}{list(value.shape)}{span}"
    value = value.parts if isinstance(value, Logits) else value
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shorten_value(item)}" for name, item in value.items())
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)


def _list_sample_facts(dataset: Dataset, sample: Sample) -> list[tuple[str, str]]:
    meta = sample.meta
    boxes = "not annotated"
    if sample.boxes is not None:
        classes = dataset.manifest.classes
        labels = sample.boxes.label.tolist()
        counts = Counter(classes[label] if label >= 0 else "other" for label in labels)
        listed = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        boxes = f"{len(labels)} ({listed})" if labels else "0"
    return [
        (
            "clip",
            (
                f"{meta.clip_name}, frame {meta.frame_idx + 1} of {meta.num_frames}, vehicle "
                f"{meta.vehicle}"
            ),
        ),
        ("neighbours", f"{meta.prev_key or 'none'}, {meta.next_key or 'none'}"),
        ("time", f"{meta.timestamp_ns} ns ({dataset.manifest.time_base})"),
        ("source token", meta.sample_token),
        (
            "tags",
            ", ".join(f"{name}={value}" for name, value in meta.tags.items()) or "none",
        ),
        ("ego", _format_metres(sample.geometry.ego2global[:3, 3])),
        ("boxes", boxes),
    ]


def _make_sensor_tables(dataset: Dataset, sample: Sample) -> list[Table]:
    meta = sample.meta
    geometry = sample.geometry
    cameras = []
    for number, camera in enumerate(dataset.manifest.cameras):
        k = geometry.intrinsics[number]
        late_ms = (int(geometry.cam_timestamp_ns[number]) - meta.timestamp_ns) / _NS_PER_MS
        cameras.append(
            (
                camera.channel,
                "yes" if geometry.cam_valid[number] else "no",
                " x ".join(map(str, geometry.img_wh[number].tolist())),
                f"{late_ms:+.1f} ms",
                f"{k[0, 0]:.1f} {k[1, 1]:.1f}",
                f"{k[0, 2]:.1f} {k[1, 2]:.1f}",
                _format_metres(geometry.cam2ego[number, :3, 3]),
            )
        )
    points = [
        (channel, f"{len(array):,} points", f"{array.shape[1]} columns")
        for channel, array in sample.points.items()
    ]
    return [
        (
            (
                "camera",
                "valid",
                "pixels",
                "exposed",
                "fx fy",
                "cx cy",
                "in ego",
            ),
            cameras,
        ),
        ((), points),
    ]


def _describe_values(channel: Channel) -> str:
    """Describe dtype and shape of a channel's values, or its arrays, or what else it holds."""
    if channel.arrays:
        return ", ".join(
            f"{spec.name} {spec.dtype}[{', '.join(map(str, ('M', *spec.shape)))}]"
            for spec in channel.arrays
        )
    if not channel.dtype and not channel.shape:
        return channel.extension
    shape = ", ".join("any" if side is None else str(side) for side in channel.shape)
    if channel.vocabulary is not None:
        return f"{channel.dtype}[{shape}] of {channel.vocabulary.size} in {channel.vocabulary.name}"
    return f"{channel.dtype}[{shape}]" + (
        f" {' '.join(channel.columns)}" if channel.columns else ""
    )


def _describe_layout(dataset: Dataset) -> str:
    """Describe how shards store samples, by their names: the manifest's text on it is for
    people.
    """
    compression = dataset.manifest.compression
    framed = dataset.shards.num_framed
    words = [str(compression.get("layout", "not stated"))]
    if framed:
        words.append(
            "one zstd frame a sample"
            if framed == len(dataset.shards)
            else f"{framed} shards framed"
        )
    if "level" in compression and compression.get("layout") != "none":
        words.append(f"zstd level {compression['level']}")
    if dataset.dictionary is not None:
        words.append(
            f"dictionary {dataset.dictionary.id} of {len(dataset.dictionary.data):,} bytes"
        )
    return ", ".join(words)


def _count_members(dataset: Dataset) -> list[dict[str, Any]]:
    """Count, stored and raw bytes of each field name and codec, from the index's columns alone."""
    names = dataset.index.names
    codecs = dataset.index.codecs
    totals = dataset.index.member_totals()
    statistics = []
    for n, name in enumerate(names):
        for c, codec in enumerate(codecs):
            totals_of_codec = totals[:, n, c].tolist()
            count, stored_bytes, raw_bytes = map(int, totals_of_codec)
            if count:
                statistics.append(
                    {
                        "name": name,
                        "codec": codec,
                        "count": count,
                        "stored_bytes": stored_bytes,
                        "raw_bytes": raw_bytes,
                    }
                )
    return statistics


def _describe_attributes(dataset: Dataset) -> list[tuple[str, str, str]]:
    """Name, type and values of each attribute that filters and weights may name, from
    ``attributes.parquet``.
    """
    file = dataset.attributes_file()
    if not file.exists:
        return []
    schema = file.schema(len(dataset.index))
    names = [name for name in schema.names if name not in TEXTS]
    counts: dict[str, Counter[Any]] = {name: Counter() for name in names}
    for batch in file.batches(names):
        for name, array in zip(names, batch.columns, strict=True):
            is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
            if is_number:
                counts[name].update(pc.min_max(array).as_py().values())
            elif len(counts[name]) <= _MAX_VALUES:
                for item in pc.value_counts(array).to_pylist():
                    counts[name][item["values"]] += item["counts"]
    return [(name, str(schema.field(name).type), _summarise_values(counts[name])) for name in names]


def _summarise_values(counts: Counter[Any]) -> str:
    values = [value for value in counts if value is not None]
    if not values:
        return "unknown"
    if all(isinstance(value, bool) for value in values):
        text = [
            f"{'true' if value else 'false'} ({counts[value]:,})"
            for value in sorted(values, reverse=True)
        ]
        return ", ".join([*text, *([f"unknown ({counts[None]:,})"] if counts[None] else [])])
    if all(isinstance(value, int | float) for value in values):
        low = min(values)
        high = max(values)
        return str(low) if low == high else f"{low} to {high}"
    examples = ", ".join(
        f"{value!s:.40} ({count:,})" for value, count in counts.most_common(_SHOWN_VALUES)
    )
    count_text = f"more than {_MAX_VALUES:,}" if len(counts) > _MAX_VALUES else str(len(counts))
    if len(counts) <= _SHOWN_VALUES:
        return examples
    return f"{count_text} values, such as {examples}"


def _format_metres(values: np.ndarray[Any, Any]) -> str:
    return " ".join([*(f"{value:.2f}" for value in values), "m"])


def _format_page(*tables: Table) -> str:
    """Return the tables one below the other, without those that have no rows.

    Columns are aligned to the left, two spaces apart; the last one has several lines where it is
    long.
    """
    texts = []
    for titles, rows in tables:
        if not rows:
            continue
        every = [
            [shortened(cell, _MAX_CELL) for cell in row]
            for row in ([titles, *rows] if titles else rows)
        ]
        columns = list(zip(*every, strict=True))[:-1]
        widths = [max(map(len, column)) for column in columns]
        indent = sum(widths) + 2 * len(widths)
        lines = []
        for *cells, last in every:
            first, *more = textwrap.wrap(
                last,
                max(_MAX_WIDTH - indent, 40),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
            row = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(f"{row}  {first}".rstrip())
            lines += [" " * indent + text for text in more]
        texts.append("\n".join(lines))
    return "\n\n".join(texts) + "\n"
