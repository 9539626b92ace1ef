"""Small datasets made straight from the format's own parts, without any source or sharding engine."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import simplejpeg
import xxhash

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.sensors import (
    CameraEntry,
    LidarEntry,
    channel_table,
)
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.codecs import DICTIONARY_FILE, Dictionary
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import INDEX_FILE, write_index
from fuelrail.pipeline.format.index.shards import ShardEntry
from fuelrail.pipeline.format.index.tables import file_entry, write_tables
from fuelrail.pipeline.format.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    FileEntry,
    Lineage,
    Manifest,
    SplitEntry,
    encode_manifest,
)
from fuelrail.pipeline.format.tar import (
    END_OF_ARCHIVE,
    StoredMember,
    pack_sample,
)
from fuelrail.pipeline.format.zstd_frames import (
    FRAMED_SUFFIX,
    SHARD_SUFFIX,
    encode_frame,
    encode_seek_table,
)
from fuelrail.pipeline.rigid import rigid
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    META,
    SCHEMA,
    Boxes,
    CameraMeta,
    Geometry,
    Meta,
    encode_arrays,
    encode_meta,
    encode_points,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fuelrail.pipeline.channels.table import Channel

CAMERAS = ("cam_front", "cam_back")
LIDAR = "lidar_top"
CLASSES = ("car", "pedestrian")


def textured(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A smooth random picture, uint8 (height, width, 3): what a natural image is to a JPEG codec."""
    coarse = rng.random((height // 8 + 2, width // 8 + 2, 3))
    fine = np.kron(coarse, np.ones((8, 8, 1)))[:height, :width]
    return (fine * 200 + rng.random((height, width, 1)) * 20).astype(np.uint8)


def make_geometry(
    rng: np.random.Generator,
    width: int,
    height: int,
    timestamp_ns: int,
    valid: tuple[int, ...],
) -> Geometry:
    """A plausible rig: a camera looking ahead, one behind, a lidar above, an ego that has driven some metres."""
    count = len(CAMERAS)
    ahead = [0.5, -0.5, 0.5, -0.5]
    behind = [0.5, -0.5, -0.5, 0.5]
    position = rng.random(3) * 1000
    step = np.array([0.3, 0.0, 0.0])
    level = np.array([1.0, 0.0, 0.0, 0.0])
    intrinsics = np.array(
        [
            [width * 0.8, 0, width / 2 - 0.5],
            [0, width * 0.8, height / 2 - 0.5],
            [0, 0, 1],
        ]
    )
    nan = np.full(3, np.nan)
    return Geometry(
        cam_valid=np.array(valid, np.uint8),
        cam_timestamp_ns=timestamp_ns + np.arange(count, dtype=np.int64) * 7_000_000,
        img_wh=np.tile(np.array([width, height], np.int32), (count, 1)),
        intrinsics=np.tile(intrinsics, (count, 1, 1)),
        dist=np.full((count, 14), np.nan),
        cam2ego=rigid(np.array([ahead, behind]), np.array([[1.5, 0, 1.5], [-0.5, 0, 1.5]])),
        cam_ego2global=rigid(
            np.tile(level, (count, 1)),
            position + step * np.arange(count)[:, None],
        ),
        ego2global=rigid(level, position),
        lidar2ego=rigid(level, np.array([0.9, 0.0, 1.8]))[None],
        lidar_ego2global=rigid(level, position)[None],
        lidar_timestamp_ns=np.array([timestamp_ns]),
        ego_velocity=np.array([6.0, 0.0, 0.0]),
        ego_accel=nan,
        ego_rates=nan,
    )


def make_boxes(rng: np.random.Generator, count: int) -> Boxes:
    """Boxes on the road around the ego."""
    yaw = rng.uniform(-3, 3, count)
    boxes3d = np.column_stack(
        [
            rng.uniform(-30, 30, (count, 2)),
            np.full(count, 0.8),
            np.tile([4, 2, 1.6], (count, 1)),
            yaw,
        ]
    )
    quaternion = np.column_stack([np.cos(yaw / 2), np.zeros((count, 2)), np.sin(yaw / 2)])
    return Boxes(
        boxes3d=boxes3d.astype(np.float32),
        rotation_wxyz=quaternion.astype(np.float32),
        velocity=np.full((count, 3), np.nan, np.float32),
        label=(np.arange(count) % len(CLASSES)).astype(np.int16),
        instance_id=np.arange(count, dtype=np.int64),
        num_lidar_pts=np.full(count, 5, np.int32),
        num_radar_pts=np.full(count, -1, np.int32),
        visibility=np.full(count, 4, np.int8),
        attribute=np.full(count, -1, np.int16),
        valid=np.ones(count, np.uint8),
    )


def build_dataset(
    root: Path,
    splits: dict[str, tuple[int, ...]],
    *,
    size: tuple[int, int] = (96, 64),
    back_size: tuple[int, int] | None = None,
    missing: frozenset[tuple[int, str]] = frozenset(),
    labelled: bool = True,
    seed: int = 0,
    layout: str = "member",
    dictionary: Dictionary | None = None,
    lens: tuple[str, list[float]] = ("none", []),
    rewrite: Callable[[int, str, bytes], bytes] | None = None,
    extra: Sequence[tuple[Channel, Callable[[int], Any]]] = (),
    time_of: Callable[[int], int] = lambda row: row * 500_000_000,
) -> dict[str, dict[str, bytes]]:
    """Write a whole dataset; ``splits`` gives each split's shard lengths in samples, clips are of four frames.

    ``back_size`` is the second camera's, where not ``size`` too.
    ``missing`` names (row, channel) of camera images to leave out. ``dictionary`` compresses the small members.
    ``lens`` is the first camera's ``dist_model`` and its coefficients. ``rewrite`` makes the stored file of an image of
    (row, channel, JPEG). ``extra`` are further channels and what makes their value for a row, None for none.
    ``time_of`` gives a row's time [ns] in the index. Returns the raw members of every sample by key.
    """
    small = "zstd" if dictionary is None else codecs.ZSTD_DICT
    framed = layout == "frame"
    root.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    names = [
        META,
        GEOMETRY,
        *([BOXES] if labelled else []),
        *(f"{c}.jpg" for c in CAMERAS),
        f"{LIDAR}.npy",
    ]
    names += [channel.field for channel, _ in extra]
    rows: list[IndexRow] = []
    shards: list[ShardEntry] = []
    split_entries: dict[str, SplitEntry] = {}
    raw: dict[str, dict[str, bytes]] = {}
    for split, lengths in splits.items():
        first_shard = len(shards)
        first = len(rows)
        for number, length in enumerate(lengths):
            first_row = len(rows)
            data = bytearray()
            frames = []
            for _ in range(length):
                row = len(rows)
                key = f"clip-{row // 4:04d}-{row % 4:06d}"
                members = _sample(
                    rng,
                    row=row,
                    key=key,
                    split=split,
                    size=size,
                    missing=missing,
                    labelled=labelled,
                    lens=lens,
                    back_size=back_size,
                )
                for channel in CAMERAS if rewrite is not None else ():
                    if (row, channel) not in missing:
                        members[f"{channel}.jpg"] = rewrite(row, channel, members[f"{channel}.jpg"])
                for entry, make in extra:
                    if (value := make(row)) is not None:
                        members[entry.field] = KINDS[entry.kind].encode(value, entry)
                raw[key] = members
                by_kind = (
                    {"npy": "zstd-p20", "jpg": "raw", "png": "raw"} if layout == "member" else None
                )
                codec = {
                    n: "raw" if by_kind is None else by_kind.get(n.rsplit(".")[-1], small)
                    for n in members
                }
                stored = [
                    StoredMember(
                        n + codecs.suffix(codec[n]),
                        codecs.encode(codec[n], m, dictionary=dictionary),
                    )
                    for n, m in members.items()
                ]
                span = pack_sample(key, stored)
                entries = tuple(
                    MemberEntry(
                        name=n,
                        offset=offset,
                        stored_bytes=len(s.data),
                        raw_bytes=len(members[n]),
                        codec=codec[n],
                        xxh3=xxhash.xxh3_64_intdigest(s.data),
                    )
                    for n, offset, s in zip(members, span.offsets, stored, strict=True)
                )
                joined = b"".join(span.pieces)
                if framed:
                    joined = encode_frame(joined, 3)
                    frames.append((len(joined), span.length))
                digest = xxhash.xxh3_64_intdigest(joined)
                place = len(shards), len(data), len(joined)
                rows.append(
                    IndexRow(
                        key,
                        key[:9],
                        row % 4,
                        time_of(row),
                        *place,
                        digest,
                        entries,
                    )
                )
                data += joined
            if framed:
                end = encode_frame(END_OF_ARCHIVE, 3)
                data += end + encode_seek_table([*frames, (len(end), len(END_OF_ARCHIVE))])
            else:
                data += END_OF_ARCHIVE
            name = f"{split}-{number:06d}" + (FRAMED_SUFFIX if framed else SHARD_SUFFIX)
            (root / name).write_bytes(data)
            sha256 = hashlib.sha256(data).hexdigest()
            shards.append(
                ShardEntry(
                    name=name,
                    split=split,
                    first_sample=first_row,
                    num_samples=length,
                    bytes=len(data),
                    sha256=sha256,
                )
            )
        split_entries[split] = SplitEntry(
            first_sample=first,
            num_samples=len(rows) - first,
            first_shard=first_shard,
            num_shards=len(shards) - first_shard,
            num_clips=-(-(len(rows) - first) // 4),
        )
    kinds = sorted({member.codec for row in rows for member in row.members} | {"raw"})
    write_index(root / INDEX_FILE, rows, names, kinds)
    files = write_tables(root, shards)
    if dictionary is not None:
        (root / DICTIONARY_FILE).write_bytes(dictionary.data)
        files.append(file_entry(root / DICTIONARY_FILE))
    manifest = dataset_manifest(
        split_entries,
        files,
        sum(shard.bytes for shard in shards),
        seed=seed,
        name="tiny",
        channels=channel_table(
            [
                CameraEntry(channel=c, source_name=c.upper(), sizes=(wh,))
                for c, wh in zip(CAMERAS, (size, back_size or size), strict=True)
            ],
            [
                LidarEntry(
                    channel=LIDAR,
                    source_name="LIDAR_TOP",
                    columns=("x", "y", "z", "intensity", "ring"),
                )
            ],
            [channel for channel, _ in extra],
            fields={BOXES: ""} if labelled else {},
        ),
        classes=CLASSES,
        compression={"layout": layout, "level": 3},
        provenance={"source": "tests"},
    )
    (root / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return raw


def dataset_manifest(
    splits: Mapping[str, SplitEntry],
    files: Sequence[FileEntry],
    num_bytes: int,
    **values: Any,
) -> Manifest:
    """Return the manifest of a dataset with these splits and files, without channels; ``values`` are further fields."""
    manifest = Manifest(
        format=FORMAT,
        version=FORMAT_VERSION,
        name="synthetic",
        fingerprint="",
        num_samples=sum(split.num_samples for split in splits.values()),
        num_clips=sum(split.num_clips for split in splits.values()),
        num_bytes=num_bytes,
        seed=0,
        order_unit="frame",
        channels=(),
        classes=(),
        attributes=(),
        time_base="unix",
        ego_origin="rear_axle_ground",
        license=None,
        compression={},
        provenance={},
        lineage=Lineage(),
        files=tuple(files),
        splits=dict(splits),
    )
    return msgspec.structs.replace(manifest, **values)


class TinyDataset(NamedTuple):
    """A dataset that `build_dataset` made, and its raw members by key and field."""

    root: Path
    raw: dict[str, dict[str, bytes]]


class DatasetMaker:
    """Datasets made once by their arguments, which are those of `build_dataset`; no test may write into them.

    A test that writes takes a copy: ``tiny_dataset(splits, copy_to=tmp_path / "d")``.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[str, tuple[TinyDataset, object, object]] = {}

    def __call__(
        self,
        splits: dict[str, tuple[int, ...]],
        *,
        copy_to: Path | None = None,
        **options: Any,
    ) -> TinyDataset:
        arguments = repr(
            (splits, sorted(options.items()))
        )  # a function's is its address: `options` keeps it alive
        if arguments not in self._made:
            root = self._folder / str(len(self._made))
            dataset = TinyDataset(root, build_dataset(root, splits, **options))
            self._made[arguments] = dataset, options, _state(root)
        dataset, _, state = self._made[arguments]
        assert _state(dataset.root) == state, f"a test changed the shared dataset of {arguments}"
        if copy_to is None:
            return dataset
        return TinyDataset(Path(shutil.copytree(dataset.root, copy_to)), dataset.raw)

    def check(self) -> None:
        """Fail where a test changed a dataset."""
        changed = [
            arguments
            for arguments, (dataset, _, state) in self._made.items()
            if _state(dataset.root) != state
        ]
        assert not changed, f"a test changed the shared datasets of {changed}"


def _state(root: Path) -> dict[Path, tuple[int, int, int]]:
    stats = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _sample(
    rng: np.random.Generator,
    row: int,
    key: str,
    split: str,
    size: tuple[int, int],
    missing: frozenset[tuple[int, str]],
    labelled: bool,
    lens: tuple[str, list[float]],
    back_size: tuple[int, int] | None,
) -> dict[str, bytes]:
    width, height = size
    sizes = dict(zip(CAMERAS, (size, back_size or size), strict=True))
    timestamp_ns = row * 500_000_000
    present = [c for c in CAMERAS if (row, c) not in missing]
    meta = Meta(
        schema=SCHEMA,
        dataset="tiny",
        key=key,
        sample_token=f"{row:032x}",
        clip_id=key[:9],
        clip_token="",
        clip_name=key[:9],
        log_id="log",
        vehicle="car",
        frame_idx=row % 4,
        num_frames=4,
        prev_key=None,
        next_key=None,
        timestamp_ns=timestamp_ns,
        is_key_frame=True,
        split=split,
        cameras={
            c: CameraMeta(
                token="",
                timestamp_ns=timestamp_ns,
                width=sizes[c][0],
                height=sizes[c][1],
                dist_model=lens[0] if c == CAMERAS[0] else "none",
            )
            for c in present
        },
    )
    geometry = make_geometry(
        rng,
        width=width,
        height=height,
        timestamp_ns=timestamp_ns,
        valid=tuple(int(c in present) for c in CAMERAS),
    )
    geometry.dist[0, : len(lens[1])] = lens[1]
    geometry.img_wh[:] = list(sizes.values())
    members = {META: encode_meta(meta), GEOMETRY: encode_arrays(geometry)}
    if labelled:
        members[BOXES] = encode_arrays(make_boxes(rng, row % 5))
    for channel in present:
        members[f"{channel}.jpg"] = simplejpeg.encode_jpeg(
            textured(rng, *sizes[channel]), 90, "RGB", "420"
        )
    members[f"{LIDAR}.npy"] = encode_points(rng.random((50 + row, 5)).astype(np.float32))
    return members
