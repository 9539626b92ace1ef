"""Selected channels (``Transforms(select=...)``): from a sample's members to entries of the batch.

Each selected channel adds two entries: ``{name}``, collated as its kind is, and ``{name}_valid``
[B] bool, False where the sample lacks it. Values are moved by the channel's law with the same draw
as images, boxes and points. Dtypes are those of the table.

==================== ===================================== =====================================
kind                 shape of ``{name}``                   where ``{name}_valid`` is False
==================== ===================================== =====================================
``image``            [B, H, W] or [B, H, W, 3]             zeros
``array``            [B, ...], the shape of the table      zeros
``points``           list of [P, C]                        None
``ragged``           dict of array to list of [M, ...]     None in each list
``text``, ``bytes``  list of str or bytes                  None
``texts``            list of lists of str                  None
``tokens``           [B, T] where T is fixed, else         zeros, or no tokens
                     `Packed`: sample b has the tokens
                     ``values[offsets[b]:offsets[b + 1]]``
``logits_topk``,     `Logits` of [B, T, k] where T is      ``mask`` is False, or no positions
``logits_sampled``   fixed, else with ``offsets``
==================== ===================================== =====================================

An ``image`` of law ``image`` has the H x W of ``img``.

With temporal windows an axis of T frames follows B: stacks are [B, T, ...], lists hold a list of T
for each sample, ``{name}_valid`` is [B, T], and frame t of sample b is number b T + t in a
`Packed`. Frames that ``pad="mask"`` hides lack all channels. A channel with times of its own
(`TimeWindow`) has an axis of these in place of T, with windows of images or without: ``{name}`` [B,
K, ...] and ``{name}_valid`` [B, K]; of a series these are its values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from fuelrail.loaders.batch.temporal import make_tensors
from fuelrail.loaders.records import Batch
from fuelrail.loaders.schedule.datasets import Chosen
from fuelrail.loaders.schedule.selection import Selectable
from fuelrail.pipeline.channels.kinds import KINDS, Packed, Value
from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.logits import SAMPLED, TOPK, Logits
from fuelrail.pipeline.channels.selection import decode_values, select
from fuelrail.pipeline.channels.sensors import LIDAR, choose_cameras, lies_on
from fuelrail.pipeline.errors import ConfigError, MemberError
from fuelrail.pipeline.format.attributes import AttributeColumns
from fuelrail.pipeline.format.layers import JoinedAttributes

if TYPE_CHECKING:
    from fuelrail.loaders.batch.timed import TimedChannel
    from fuelrail.loaders.config import Transforms
    from fuelrail.loaders.records import Parsed
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer

OWN_NAMES: Final = frozenset(Batch.__annotations__) - {"gt_mask", "points_mask"}
"""Names that a batch, or a sample before ``transform``, has of its own."""
_SMALL_BYTES: Final = 256 << 10
_TOKEN_KINDS: Final = frozenset({"tokens", TOPK, SAMPLED})
_SMALL_KINDS: Final = frozenset(
    {"array", "points", "ragged", "text", "texts", "bytes", *_TOKEN_KINDS}
)
_SMALL_LAWS: Final = frozenset(
    {"fixed", "classes", "image_points", "ego_points", "ego_boxes", "ego_poses"}
)
"""Kinds and laws whose work is in proportion to the values, and no decoding or warping of
pixels.
"""


def choose(
    dataset: Dataset,
    name: str,
    split: str,
    options: Transforms,
    layers: Sequence[Layer],
    lidar: LidarEntry | None,
) -> Chosen:
    """Return what is loaded of a dataset, of a name in a mix: cameras, channels and attributes of
    ``options``.

    Raises ConfigError; ManifestError for a channel whose kind or law is unknown here.
    """
    selected = options.cameras
    batch_names = None
    if isinstance(selected, dict):
        batch_names = next(iter(selected.values()), ())
        if name not in selected or len(selected[name]) != len(batch_names):
            raise ConfigError(
                f"cameras={selected}: each dataset of the mix needs as many names as the "
                f"first, and '{name}' has {selected.get(name, 'none')}"
            )
        selected = selected[name]
    cameras = choose_cameras(
        [camera.channel for camera in dataset.manifest.cameras],
        selected,
        dataset.location,
    )
    cameras = cameras if batch_names is None else tuple(selected or ())  # in the batch's order
    selectable = Selectable(dataset, layers)
    names = selectable.default(cameras) if options.select is None else options.select
    channel_names, attribute_names = selectable.split(names)
    channels = choose_channels(
        dataset,
        names=channel_names,
        layers=layers,
        lidar=lidar,
        cameras=cameras,
    )
    attributes = choose_attributes(
        dataset,
        split=split,
        names=attribute_names,
        layers=layers,
        channels=channels,
    )
    return Chosen(cameras, channels, attributes, batch_names)


def choose_channels(
    dataset: Dataset,
    names: Sequence[str],
    layers: Sequence[Layer] = (),
    lidar: LidarEntry | None = None,
    cameras: Collection[str] | None = None,
) -> tuple[Channel, ...]:
    """Return the entries of the selected channels, in the order of the table and the layers.

    A layer's channels are called ``{layer}.{channel}``. ``cameras`` are loaded (None: all), and
    ``lidar`` is the one whose sweeps become ``points``.

    Raises ConfigError for a name that is not in the table, that is a camera, that lidar or the
    boxes, that lies on another camera, or whose entries would have the names of others;
    ManifestError for a channel whose kind or law is unknown here.
    """
    if not names:
        return ()
    manifest = dataset.manifest
    joined = [channel for layer in layers for channel in layer.channels]
    if cameras is None:
        cameras = [camera.channel for camera in manifest.cameras]
    chosen = select((*manifest.channels, *joined), names, dataset.location)
    names_in_use = set(OWN_NAMES)
    for channel in chosen:
        if (
            channel not in manifest.extra_channels
            and channel not in joined
            and channel.sensor != LIDAR
        ):
            raise ConfigError(
                f"select={list(names)}: '{channel.name}' is not selected by name; cameras "
                "and boxes are in every batch"
            )
        if not lies_on(channel, cameras):
            raise ConfigError(
                f"select={list(names)}: '{channel.name}' lies on the image of "
                f"'{channel.law.camera}', and the loader has the cameras "
                f"{', '.join(cameras)} only; leave it out, or select its camera"
            )
        if lidar is not None and channel.name == lidar.channel:
            raise ConfigError(
                f"select={list(names)}: '{channel.name}' is in the batch as `points` "
                "already: leave one of them out"
            )
        entries = {channel.name, f"{channel.name}_valid"}
        clash = sorted(entries & names_in_use)
        if clash:
            raise ConfigError(
                f"select={list(names)}: channel '{channel.name}' of '{dataset.location}' "
                f"needs the batch entry '{clash[0]}', which another entry has; leave it "
                "out, or rename it in the source"
            )
        names_in_use |= entries
    return chosen


def choose_attributes(
    dataset: Dataset,
    split: str,
    names: Sequence[str],
    layers: Sequence[Layer],
    channels: Sequence[Channel],
) -> AttributeColumns:
    """Return the attributes of these names, read; ``channels`` are the selected ones.

    Raises ConfigError for a name that a batch has for something else.
    """
    if not names:
        return AttributeColumns()
    names_in_use = OWN_NAMES.union(
        *({channel.name, f"{channel.name}_valid"} for channel in channels)
    )
    for name in names:
        clash = sorted({name, f"{name}_valid"} & names_in_use)
        if clash:
            raise ConfigError(
                f"select={list(names)}: a batch has another entry '{clash[0]}': leave {name!r} out"
            )
        names_in_use |= {name, f"{name}_valid"}
    table = JoinedAttributes(dataset, split, layers).read(names)
    return AttributeColumns.of_table(table, dataset.split(split).first_sample)


def moved_frames(parsed: Parsed, *, hides: bool) -> tuple[Parsed, tuple[int, Exception] | None]:
    """Decode and move the selected channels of all frames of a sample.

    Returns the sample with its values, or, with the number of the frame and the error, one without
    where a value is not as the table says. With ``hides``, frames that the clip does not have lack
    all channels.
    """
    source = parsed.task.source
    names = [channel.name for channel in (*source.reader.channels, *source.attributes.channels)]
    if not names:
        return parsed, None
    values_by_row: dict[int, Mapping[str, Value | None]] = {}
    extra: list[Mapping[str, Value | None]] = []
    for number, frame in enumerate(parsed.task.frames):
        if hides and not frame.present:
            extra.append(dict.fromkeys(names))
            continue
        if frame.row not in values_by_row:
            try:
                values_by_row[frame.row] = _decode_and_move(
                    parsed, number
                ) | source.attributes.values(frame.row)
            except Exception as error:  # noqa: BLE001 - any, of a shard that changes
                return parsed, (number, error)
        extra.append(values_by_row[frame.row])
    return parsed._replace(extra=tuple(extra)), None


def _decode_and_move(parsed: Parsed, number: int) -> dict[str, Value | None]:
    """Return the values of one frame by name, moved as the sample is; None where the frame lacks
    one.
    """
    sample = parsed.samples[number]
    reader = parsed.task.source.reader
    values = decode_values(sample.extra, reader.channels, sample.key)
    if not reader.moving:
        return values
    lidar2ego = {}
    for number_of_lidar, lidar in enumerate(reader.lidars):
        if any(channel.frame == f"sensor:{lidar}" for channel in reader.moving):
            matrix = sample.geometry.lidar2keyego(number_of_lidar)
            if np.isfinite(matrix).all():
                lidar2ego[lidar] = matrix
    motion = Motion(
        dict(zip(reader.cameras, parsed.maps[number], strict=True)),
        parsed.bev,
        lidar2ego,
    )
    for channel in reader.moving:
        value = values[channel.name]
        if value is None:
            continue
        try:
            values[channel.name] = LAWS[channel.law.name].move(value, channel, motion)
        except MemberError as error:
            raise type(error)(error.message, key=sample.key, member=channel.field) from error
    return values


class SelectedChannels(NamedTuple):
    """The selected channels, chosen attributes last, and the cameras of the rig, which some of
    them move with.
    """

    channels: tuple[Channel, ...] = ()
    cameras: tuple[str, ...] = ()
    max_tokens: int | None = None
    """Tokens of a sample that a pack takes, where it is asked to cut them."""
    timed: Mapping[str, TimedChannel] = {}
    """The channels at times of their own, by name."""

    @property
    def are_large(self) -> bool:
        """Whether more threads decode and move them faster, and not only take the interpreter's
        lock in turns.
        """
        num_bytes = sum(
            channel.numpy_dtype.itemsize * math.prod(side or 1 for side in channel.shape)
            for channel in self.channels
            if channel.dtype
        )
        return num_bytes > _SMALL_BYTES or any(
            channel.kind not in _SMALL_KINDS
            or channel.law.name not in _SMALL_LAWS
            or channel.sensor == LIDAR
            for channel in self.channels
        )

    def entries(self, decoded: Sequence[Parsed], frame_axes: tuple[int, ...]) -> dict[str, Any]:
        """Return the entries of a batch of these samples; see the module's tables.

        ``frame_axes`` are (B, T) with windows, and (B,) without. Raises SchemaError where values
        cannot be stacked.
        """
        batch: dict[str, Any] = {}
        for stored in self.channels:
            timed = self.timed.get(stored.name)
            channel = stored if timed is None else timed.channel
            if timed is None:
                axes = frame_axes
                values = [
                    frame_values[channel.name] for entry in decoded for frame_values in entry.extra
                ]
            else:
                axes = (len(decoded), len(timed.offsets_ns))
                values = [value for entry in decoded for value in entry.timed[channel.name]]
            present = [value is not None for value in values]
            has_any_length = channel.kind in _TOKEN_KINDS and channel.shape[0] is None
            if self.max_tokens is not None and has_any_length:
                for number, value in enumerate(values):
                    if isinstance(value, Logits):
                        values[number] = value.map(operator.itemgetter(slice(self.max_tokens)))
                    elif value is not None:
                        values[number] = value[: self.max_tokens]
            shape: tuple[int, ...] = ()
            if not any(present):
                # The shape of a value that no sample has; 0 where the table leaves a side open.
                sample = decoded[0]
                image_maps = sample.maps[sample.task.current]
                maps = zip(self.cameras, image_maps, strict=True)
                motion = Motion(dict(maps), sample.bev)
                sides = tuple(side or 0 for side in channel.shape)
                shape = LAWS[channel.law.name].shape(sides, channel, motion)
            collated = KINDS[channel.kind].collate(values, channel, shape)
            batch[channel.name] = make_tensors(collated, axes)
            batch[f"{channel.name}_valid"] = torch.from_numpy(np.reshape(present, axes))
        return batch


def split_sample(
    value: Any,
    *,
    has_windows: bool,
) -> tuple[Any, Callable[[list[Any]], Any]] | None:
    """Take the sample's part out of an entry of a batch of one; None for an entry that all samples
    share.

    Returns it with the function that joins such parts of several samples again; tensors and numbers
    are stacked.
    """
    if isinstance(value, list):
        return value[0], list
    if isinstance(value, Packed):
        parts = list(
            torch.tensor_split(
                torch.as_tensor(value.values),
                torch.as_tensor(value.offsets)[1:-1],
            )
        )
        if has_windows:
            return parts, _pack_windows
        return parts[0], _pack
    if isinstance(value, Logits):
        if value.offsets is None:
            return value.map(lambda part: part[0]), _stack_logits
        parts_of_rows = [
            value.map(operator.itemgetter(slice(*ends)))
            for ends in pairwise(value.offsets.tolist())
        ]
        if has_windows:
            return parts_of_rows, _pack_windows
        return parts_of_rows[0], _pack
    if isinstance(value, dict):
        return {name: column[0] for name, column in value.items()}, _join_dicts
    return None


def _join_dicts(values: list[Any]) -> Any:
    """Return dicts of the same names as a dict of lists; anything else, which a transform made,
    as the list it is.
    """
    if all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        return {name: [value[name] for value in values] for name in values[0]}
    return values


def _stack_logits(values: list[Any]) -> Any:
    if all(isinstance(value, Logits) for value in values):
        return _join_logits(values, torch.stack)
    return values


def _join_logits(
    values: list[Any], join: Callable[[tuple[torch.Tensor, ...]], torch.Tensor]
) -> Logits:
    fields = zip(*values, strict=True)
    return Logits(*(None if parts[0] is None else join(parts) for parts in fields))


def _pack(values: list[Any]) -> Any:
    if all(isinstance(value, Logits) for value in values):
        offsets = _pack([value.mask for value in values]).offsets
        return _join_logits(values, torch.cat)._replace(offsets=offsets)
    if not all(isinstance(value, torch.Tensor) and value.ndim == 1 for value in values):
        return values
    offsets = torch.zeros(len(values) + 1, dtype=torch.int64)
    lengths = torch.tensor([len(value) for value in values])
    torch.cumsum(lengths, 0, out=offsets[1:])
    # A batch has tensors in place of arrays.
    return Packed(torch.cat(values), offsets)  # type: ignore[arg-type]


def _pack_windows(values: list[Any]) -> Any:
    if not all(isinstance(value, list) for value in values):
        return values
    return _pack([frame for value in values for frame in value])
