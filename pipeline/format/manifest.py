"""``dataset.json``: what a dataset is.

Written last; without it a folder is not a dataset. FORMAT.md has the rules.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from fuelrail.pipeline.channels.selection import check_table
from fuelrail.pipeline.channels.sensors import (
    BOXES_CHANNEL,
    CAMERA,
    LIDAR,
    RESERVED,
    CameraEntry,
    LidarEntry,
    camera_channel,
    lidar_channel,
)
from fuelrail.pipeline.channels.table import MAX_CHANNELS, Channel
from fuelrail.pipeline.errors import DatasetNotReadyError, ManifestError
from fuelrail.pipeline.sample.schema import BOXES, IMAGE_EXTENSIONS
from fuelrail.pipeline.settings import Settings, explain, must_be
from fuelrail.pipeline.storage.files import read_file
from fuelrail.pipeline.text import repeated_key, shortened

MANIFEST_FILE: Final = "dataset.json"
FORMAT: Final = "fuelrail-dataset"
FORMAT_VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 16 << 20
"""The largest ``dataset.json``, which has some kilobytes for any number of shards."""

_MAX_FREE_BYTES: Final = 4 << 20
"""The largest size of the two objects with free keys: as Python objects they may take twenty
times as much.
"""
_MAX_FILE_NAME_BYTES: Final = 255
_MAX_CAMERAS: Final = 256
_MAX_LIDARS: Final = 64
_MAX_SPLITS: Final = 1 << 10
MAX_ANCESTORS: Final = 128
"""The longest ``lineage``: the nearest ancestors are kept."""
_MAX_NAMES: Final = 1 << 15
"""The most classes, and the most attributes: their numbers are 16 bits wide."""
Text = Annotated[str, Meta(max_length=4096)]
Fingerprint = Annotated[
    str,
    Meta(pattern=r"\A[0-9a-f]{64}\Z"),
    must_be("64 hexadecimal digits, 0-9 and a-f"),
]
_Names = Annotated[tuple[Text, ...], Meta(max_length=_MAX_NAMES)]
BRING_BACK: Final = "bring it back from a copy, or make it again in another folder"
_WHAT_IT_IS: Final = {
    b'"fuelrail-layer"': (
        "; it is a layer: open its base, and give the layer as layers={NAME: PATH}"
    ),
    b'"fuelrail-dataset"': "; it is a dataset, and a layer is needed here",
}
WORK_FOLDER: Final = ".fuelrail"

Kinds: TypeAlias = "Mapping[str, type[Manifest]]"
"""Formats that a reader takes, with the types of their manifests."""

_NOT_IN_FINGERPRINT: Final = frozenset(
    {
        "name",
        "fingerprint",
        "seed",
        "order_unit",
        "license",
        "compression",
        "lineage",
        "provenance",
        "digest",
    }
)
"""How a dataset was made, and its name.

Whatever these decide about the samples is in the other entries.
"""
_READ_BY_LOADERS: Final = (
    "shards.arrow",
    "index.arrow",
    "rows.npy",
    "zstd.dict",
)


class FileEntry(Settings, frozen=True):
    """A file of the dataset other than a shard and its listing for DALI: size and SHA-256 (hex)."""

    name: str
    bytes: int
    sha256: str


class SplitEntry(Settings, frozen=True):
    """One split: a run of rows of the index and of shards, and how many clips it has."""

    first_sample: int
    num_samples: int
    first_shard: int
    num_shards: int
    num_clips: int


class Ancestor(Settings, frozen=True):
    """A dataset that this one was made of, itself or by way of others: ``parents`` are the
    fingerprints of its own.
    """

    fingerprint: Fingerprint
    name: Text
    num_samples: int
    made_by: Text
    """The kind of the source that it was sharded from, or ``append``."""
    parents: tuple[Fingerprint, ...]


class Lineage(Settings, frozen=True):
    """The datasets that a dataset was made of: fingerprints of its parents, and all ancestors,
    the nearest first.
    """

    parents: Annotated[tuple[Fingerprint, ...], Meta(max_length=_MAX_NAMES)] = ()
    ancestors: Annotated[tuple[Ancestor, ...], Meta(max_length=MAX_ANCESTORS)] = ()

    @classmethod
    def from_parents(cls, parents: Sequence[Manifest]) -> Lineage:
        """Make the lineage of a dataset that is made of these."""
        ancestors: dict[str, Ancestor] = {}
        for parent in parents:
            made_by = str(parent.provenance.get("recipe", {}).get("source", "unknown"))
            ancestors[parent.fingerprint] = Ancestor(
                fingerprint=parent.fingerprint,
                name=parent.name,
                num_samples=parent.num_samples,
                made_by=made_by,
                parents=parent.lineage.parents,
            )
        generations = [parent.lineage.ancestors for parent in parents]
        for ancestor in (
            candidate
            for row in itertools.zip_longest(*generations)
            for candidate in row
            if candidate is not None
        ):
            ancestors.setdefault(ancestor.fingerprint, ancestor)
        fingerprints = tuple(dict.fromkeys(parent.fingerprint for parent in parents))
        return cls(
            parents=fingerprints,
            ancestors=tuple(ancestors.values())[:MAX_ANCESTORS],
        )


class _Head(msgspec.Struct):
    """What is looked at before Python objects are made of the rest."""

    format: msgspec.Raw = msgspec.Raw()
    version: msgspec.Raw = msgspec.Raw()
    compression: msgspec.Raw = msgspec.Raw()
    provenance: msgspec.Raw = msgspec.Raw()


class Manifest(Settings, frozen=True):
    """The whole manifest.

    ``fingerprint`` names what a training run depends on (:func:`fingerprint`), ``digest`` is that
    of the whole file.
    """

    format: str
    version: int
    name: Text
    fingerprint: str
    num_samples: int
    num_clips: int
    num_bytes: int
    """Bytes of all shards."""
    seed: int
    order_unit: Text
    channels: Annotated[tuple[Channel, ...], Meta(max_length=MAX_CHANNELS)]
    classes: _Names
    attributes: _Names
    time_base: Text
    ego_origin: Text
    license: Text | None
    compression: dict[str, Any]
    splits: Annotated[dict[str, SplitEntry], Meta(max_length=_MAX_SPLITS)]
    files: Annotated[tuple[FileEntry, ...], Meta(max_length=_MAX_SPLITS)]
    lineage: Lineage
    provenance: dict[str, Any]
    digest: str = ""

    @property
    def num_shards(self) -> int:
        """The number of shards of all splits."""
        return sum(split.num_shards for split in self.splits.values())

    def file(self, name: str) -> FileEntry | None:
        """Return the entry of a file, None where the manifest does not name it."""
        return next((entry for entry in self.files if entry.name == name), None)

    @property
    def has_poses(self) -> bool:
        """Whether the source knew ego poses; else all are the identity, also of a part of a
        merged dataset.
        """
        return not _lacks("poses", self.provenance)

    @property
    def has_calibration(self) -> bool:
        """Whether the source knew where any camera is; else batches have no matrices of cameras."""
        return not _lacks("calibration", self.provenance)

    def check_channels(self, where: str) -> None:
        """Raise ManifestError for a table that is broken."""
        check_table(self.channels, where, ManifestError, known_only=True)
        check_parts(self.channels, where)

    @property
    def cameras(self) -> tuple[CameraEntry, ...]:
        """The cameras among the channels, in rig order."""
        return tuple(
            CameraEntry(
                channel=channel.name,
                source_name=channel.source_name,
                sizes=channel.sizes,
            )
            for channel in self.channels
            if channel.sensor == CAMERA
        )

    @property
    def lidars(self) -> tuple[LidarEntry, ...]:
        """The lidars among the channels, in rig order."""
        return tuple(
            LidarEntry(
                channel=channel.name,
                source_name=channel.source_name,
                columns=channel.columns,
            )
            for channel in self.channels
            if channel.sensor == LIDAR
        )

    @property
    def known_channels(self) -> tuple[Channel, ...]:
        """The table, and what its laws may name beside it."""
        return self.channels

    @property
    def extra_channels(self) -> tuple[Channel, ...]:
        """The channels other than cameras, lidars and boxes."""
        return tuple(
            channel
            for channel in self.channels
            if channel.sensor not in (CAMERA, LIDAR) and channel.field != BOXES
        )


def _lacks(fact: str, provenance: object) -> bool:
    facts = provenance.get("facts") if isinstance(provenance, dict) else None
    if not isinstance(facts, dict):
        return False
    parts = []
    for name in ("merged", "appended"):
        parts += [part for part in facts.get(name) or () if isinstance(part, dict)]
    inner = [
        facts.get("provenance"),
        *(part.get("provenance") for part in parts),
    ]
    return facts.get(fact) == "none" or any(_lacks(fact, origin) for origin in inner)


def fingerprint(manifest: Manifest) -> str:
    """Return SHA-256 (hex) of the canonical JSON of what a training run depends on: rows, bytes,
    rig, classes, splits.

    Two datasets with one fingerprint have the same shards, index and dictionary, byte by byte. The
    version of the tool, the name and the options are not covered, so that a later release can make
    the same dataset again. Nor is ``attributes.parquet``, whose bytes depend on Arrow's version:
    the order's identity says what was selected by it.
    """
    entries = msgspec.structs.asdict(manifest)
    covered = {name: value for name, value in entries.items() if name not in _NOT_IN_FINGERPRINT}
    covered["files"] = [file for file in manifest.files if file.name in _READ_BY_LOADERS]
    return _sha256(covered)


def _sha256(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def _digest(manifest: Manifest) -> str:
    return _sha256(msgspec.structs.replace(manifest, digest=""))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``dataset.json``: indented JSON, fingerprint and digest filled in,
    closing newline.
    """
    named = msgspec.structs.replace(manifest, fingerprint=fingerprint(manifest))
    full = msgspec.structs.replace(named, digest=_digest(named))
    return msgspec.json.format(msgspec.json.encode(full), indent=2) + b"\n"


DATASETS: Final[Kinds] = {FORMAT: Manifest}


def decode_manifest(data: bytes, where: str, kinds: Kinds = DATASETS) -> Manifest:
    """Parse and check ``dataset.json``; ``where`` names it in errors, ``kinds`` has the type of
    each allowed format.

    Raises ManifestError.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"'{where}' has over {MAX_MANIFEST_BYTES} bytes, more than a manifest may have"
        )
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.ValidationError:
        head = _Head()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = explain(error, data, _Head)
        raise ManifestError(f"'{where}' is not JSON: {fault}; {BRING_BACK}") from error
    kind = next(
        (kind for name, kind in kinds.items() if bytes(head.format) == msgspec.json.encode(name)),
        None,
    )
    if kind is None:
        formats = " or ".join(map(repr, kinds))
        raise ManifestError(
            f"'{where}' is not a Fuelrail manifest: its format is not "
            f"{formats}{_WHAT_IT_IS.get(bytes(head.format), '')}"
        )
    if bytes(head.version) != msgspec.json.encode(FORMAT_VERSION):
        version = shortened(bytes(head.version).decode(errors="replace") or "none")
        raise ManifestError(
            f"'{where}' has format version {version}; this reads {FORMAT_VERSION}: use the "
            "Fuelrail that wrote it"
        )
    for name, part in (
        ("compression", head.compression),
        ("provenance", head.provenance),
    ):
        if len(bytes(part)) > _MAX_FREE_BYTES:
            raise ManifestError(
                f"'{where}': {name} has {len(bytes(part))} bytes, at most {_MAX_FREE_BYTES} "
                "are read"
            )
    try:
        manifest = msgspec.json.decode(data, type=kind)
        twice = repeated_key(data, manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"'{where}': {explain(error, data, kind)}; {BRING_BACK}") from error
    if twice is not None:
        raise ManifestError(
            f"'{where}': the key '{shortened(twice)}' occurs twice in an object; {BRING_BACK}"
        )
    if manifest.fingerprint != fingerprint(manifest) or manifest.digest != _digest(manifest):
        raise ManifestError(
            f"'{where}' was edited or damaged: its fingerprint or digest is not that of its "
            f"content; {BRING_BACK}"
        )
    for noun, sensors, limit in (
        ("cameras", manifest.cameras, _MAX_CAMERAS),
        ("lidars", manifest.lidars, _MAX_LIDARS),
    ):
        if len(sensors) > limit:
            raise ManifestError(f"'{where}': {len(sensors)} {noun}, at most {limit} are allowed")
    # Objects with free keys, of which readers use some.
    for name in ("recipe", "facts"):
        if not isinstance(manifest.provenance.get(name, {}), dict):
            raise ManifestError(f"'{where}': provenance.{name} is not an object; {BRING_BACK}")
    codecs = manifest.compression.get("codecs", {})
    if not isinstance(codecs, dict) or not all(isinstance(codec, str) for codec in codecs.values()):
        raise ManifestError(
            f"'{where}': compression.codecs does not map field names to codecs; {BRING_BACK}"
        )
    _check_names(manifest, where)
    manifest.check_channels(where)
    _check_runs(manifest, where)
    return manifest


def load_manifest(root: str | os.PathLike[str], kinds: Kinds = DATASETS) -> Manifest:
    """Read the manifest of a local dataset folder, of one of these formats.

    Raises DatasetNotReadyError where the folder or its ``dataset.json`` is missing, ManifestError
    where it is wrong.
    """
    file = Path(root) / MANIFEST_FILE
    try:
        data = read_file(file, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DatasetNotReadyError(f"'{root}' {_why_not_ready(Path(root), kinds)}") from error
    except OSError as error:
        raise ManifestError(f"'{file}' cannot be read: {error.strerror}") from error
    return decode_manifest(data, str(file), kinds)


def _why_not_ready(root: Path, kinds: Kinds) -> str:
    command = "fuelrail annotate DATASET {} --model MODULE:FUNCTION"
    if FORMAT in kinds:
        command = "fuelrail shard SOURCE {}"
    make = f"make it with `{command.format(root)}`"
    if not root.is_dir():
        if root.is_file():
            return "is a file, not a dataset's folder"
        return f"is not a folder; {make}"
    if any(root.glob("v1.0-*/sample.json")):
        return (
            "is a nuScenes root, not a Fuelrail dataset; convert it with `fuelrail shard "
            f"nuscenes:{root} OUT`"
        )
    if (root / WORK_FOLDER / "layer.json").is_file():
        return (
            "has no dataset.json: the layer is not finished; run the same `fuelrail "
            "annotate` again to resume, or call LayerWriter.finish"
        )
    if (root / WORK_FOLDER / "before" / MANIFEST_FILE).is_file():
        return (
            "has no dataset.json: clips are being deleted; run the same `fuelrail forget` again "
            "to finish"
        )
    if (root / WORK_FOLDER).is_dir():
        return (
            "has no dataset.json: sharding has not finished there; run the same `fuelrail "
            "shard` again to resume"
        )
    if any(root.glob("*.tar")) or any(root.glob("*.tar.zst")):
        return f"has shards, but its dataset.json is gone; {BRING_BACK}"
    if any(root.iterdir()):  # not ours: never propose to write into it
        return (
            "has no dataset.json, so no dataset; make one in a new folder: "
            f"`{command.format('OUT')}`"
        )
    return f"has no dataset.json, so no dataset; {make}"


def _check_names(manifest: Manifest, where: str) -> None:
    """Check names, which become paths, keys and member names: they must be plain, and none may
    occur twice.
    """
    files = [file.name for file in manifest.files]
    for name in files:
        is_plain = name.isprintable() and "/" not in name
        is_short = len(name.encode("utf-8", "surrogatepass")) <= _MAX_FILE_NAME_BYTES
        is_reserved = name in ("", ".", "..", MANIFEST_FILE)
        if is_reserved or not is_plain or not is_short:
            raise ManifestError(f"'{where}': '{shortened(name)}' is not a plain file name")
    channels = [channel.name for channel in manifest.channels]
    splits = list(manifest.splits)
    for kind, names, pattern in (
        ("file", files, None),
        ("channel", channels, "[a-z0-9_]{1,100}"),
        ("split", splits, "[a-z][a-z0-9_]{0,99}"),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                raise ManifestError(f"'{where}': {kind} '{shortened(name)}' occurs twice")
            if pattern is not None and not re.fullmatch(pattern, name):
                raise ManifestError(
                    f"'{where}': {kind} name '{shortened(name)}' does not match {pattern}"
                )


def check_parts(channels: Sequence[Channel], where: str) -> None:
    """Raise ManifestError unless cameras, lidars and boxes are what every reader takes them for."""
    parts = {
        *RESERVED,
        *(f"{channel.name}_sweeps" for channel in channels if channel.sensor == LIDAR),
    }
    for channel in channels:
        if channel.sensor == CAMERA:
            entry = CameraEntry(
                channel=channel.name,
                source_name=channel.source_name,
                sizes=channel.sizes,
            )
            expected = camera_channel(
                entry,
                channel.extension if channel.extension in IMAGE_EXTENSIONS else "jpg",
            )
        elif channel.sensor == LIDAR:
            entry_of_lidar = LidarEntry(
                channel=channel.name,
                source_name=channel.source_name,
                columns=channel.columns,
            )
            expected = lidar_channel(entry_of_lidar)
        elif channel.name == BOXES_CHANNEL.name:
            expected = BOXES_CHANNEL
        elif channel.name in parts:
            raise ManifestError(
                f"'{where}': channel '{channel.name}' has the name of another part of a "
                f"sample; {BRING_BACK}"
            )
        else:
            continue
        if channel != msgspec.structs.replace(expected, codec=channel.codec):
            stated = msgspec.structs.asdict(channel)
            right = msgspec.structs.asdict(expected)
            differs = ", ".join(
                name for name in stated if stated[name] != right[name] and name != "codec"
            )
            raise ManifestError(
                f"'{where}': channel '{channel.name}' is not as the format has "
                f"{channel.sensor or 'boxes'}: {differs} differ; {BRING_BACK}"
            )


def _check_runs(manifest: Manifest, where: str) -> None:
    """Check that splits tile the rows and the shards without gap or overlap."""
    row = 0
    shard = 0
    splits = sorted(
        manifest.splits.items(),
        key=lambda item: (item[1].first_shard, item[1].first_sample),
    )
    for name, split in splits:
        is_next = split.first_sample == row and split.first_shard == shard
        if not is_next or not 0 <= split.num_shards <= split.num_samples:
            raise ManifestError(
                f"'{where}': split '{name}' does not continue at sample {row} and shard {shard}"
            )
        if split.num_samples and not split.num_shards:
            raise ManifestError(
                f"'{where}': split '{name}' has {split.num_samples} samples and no shard"
            )
        row += split.num_samples
        shard += split.num_shards
    if row != manifest.num_samples:
        raise ManifestError(
            f"'{where}': the splits hold {row} samples, stated are {manifest.num_samples}"
        )
