"""What samples hold of their neighbours in time, and how it is cut out where such a neighbour is
deleted.

A sample k of a clip owns the measurements of T_(k-1) < t <= T_k, as FORMAT.md has it for series;
the first sample of a clip also owns all earlier ones, the last one all later ones. Of a lidar or
radar, T are the times of the samples' newest sweeps of it. Where sample k is deleted, these go from
the members of other samples that hold some of them:

=================================  ============================================================
``{lidar}_sweeps.safetensors``     sweeps of that time; the member goes where none is left
points of a radar with ``dt_s``    points of that time
series                             measurements of that time
``ego_trajectory``,                the step of that sample: NaN and not valid, as at a clip's end
``agent_trajectories``
=================================  ============================================================

What was computed of several samples stays: velocities of boxes, values of channels and layers of
other kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.series import TIMES, one_of_series
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.format.dataset import check_span, read_members
from fuelrail.pipeline.sample.schema import (
    F32,
    GEOMETRY,
    I64,
    SWEEPS_FIELD,
    Geometry,
    Mask,
    Sweeps,
    decode_arrays,
    decode_sweeps,
    encode_arrays,
)
from fuelrail.pipeline.storage.files import open_file
from fuelrail.sharding.sources.adapter.trajectories import EGO, PAST, STEPS

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.arrays import Buffer

    Rows = I64
    Spans = I64

_BEGIN: Final = np.iinfo(np.int64).min
_END: Final = np.iinfo(np.int64).max
_AGENTS: Final = "agent_trajectories.safetensors"
_DT: Final = "dt_s"
_TIME_S: Final = EGO.columns.index("time_s")
_SAME_NS: Final = 1_000_000
"""Times that are stored as seconds in float32 are equal within this."""
_OF_STEPS: Final = ("position", "yaw", "valid")


class DeletedTimes(NamedTuple):
    """What is deleted of a clip: frames (D,), times of samples (D,) [ns], and what these samples
    own.

    ``spans_ns`` are spans of time (D, 2), from after the first to the second [ns];
    ``sensor_spans_ns`` those between the sweeps of each lidar and radar, by channel.
    """

    frames: I64
    times_ns: I64
    spans_ns: Spans
    sensor_spans_ns: Mapping[str, Spans]


def deleted_times(
    base: Dataset,
    rows: Rows,
    *,
    has_shards: bool,
) -> dict[str, DeletedTimes]:
    """Return by clip what these rows own, for clips of which others are left.

    With ``has_shards`` the geometry of such clips is read, for the times of lidars.
    """
    numbers = base.index.clip_numbers()
    table = ClipTable.build(numbers, base.index.column("frame"))
    times_ns = base.index.column("timestamp_ns")
    frames = base.index.column("frame").astype(np.int64)
    lidars = [lidar.channel for lidar in base.manifest.lidars]
    has_sweeps = has_shards and any(name.endswith(SWEEPS_FIELD) for name in base.index.names)
    radars = [
        channel for channel in base.manifest.extra_channels if has_shards and _is_radar(channel)
    ]
    clips: dict[str, DeletedTimes] = {}
    by_rank = table.clip_numbers()
    samples_by_clip = []
    for clip in np.unique(numbers[rows]).tolist():
        first, end = np.searchsorted(by_rank, (clip, clip + 1))
        samples_by_clip.append(table.samples[first:end].astype(np.int64))
    for samples in samples_by_clip:
        is_deleted = np.isin(samples, rows)
        if is_deleted.all():
            continue
        # A span reaches from the sample before to a deleted one: the times of others stay unread.
        is_needed = is_deleted.copy()
        is_needed[:-1] |= is_deleted[1:]
        positions = np.flatnonzero(is_needed).tolist()
        sensor_times: dict[str, I64] = {}
        if has_sweeps:
            by_lidar = np.zeros((len(samples), len(lidars)), np.int64)
            for number in positions:
                raw = _read_raw(base, int(samples[number]), [GEOMETRY])
                by_lidar[number] = decode_arrays(raw[GEOMETRY], Geometry).lidar_timestamp_ns
            sensor_times = dict(zip(lidars, by_lidar.T, strict=True))
        for radar in radars:
            # The times of the newest points; without points those of the samples.
            newest_ns = times_ns[samples]
            for number in positions:
                members = _read_raw(base, int(samples[number]), [radar.field])
                data = members.get(radar.field)
                if data is None:
                    continue
                points = KINDS[radar.kind].decode(data, radar)
                if len(points):
                    measured_ns = _compute_measured_ns(points, radar, int(newest_ns[number]))
                    newest_ns[number] = measured_ns.max() + _SAME_NS
            sensor_times[radar.name] = newest_ns
        spans = {name: _find_spans(times, is_deleted) for name, times in sensor_times.items()}
        deleted = samples[is_deleted]
        first_sample = int(samples[0])
        (clip_id,) = base.index.strings("clip_id", first_sample, first_sample + 1)
        clips[clip_id] = DeletedTimes(
            frames[deleted],
            times_ns[deleted],
            _find_spans(times_ns[samples], is_deleted),
            spans,
        )
    return clips


def holders(source: Dataset, clips: Mapping[str, DeletedTimes], deleted: Rows) -> I64:
    """Return the rows of a dataset or layer that are left and hold something of the deleted ones,
    ascending.

    Reads the members in question of all samples of these clips.
    """
    fields = [name for name in source.index.names if is_cut(name, source.manifest.extra_channels)]
    if not clips or not fields:
        return np.zeros(0, np.int64)
    ids = source.index.texts("clip_id")
    clip_ids = pa.array(clips, pa.string())
    is_near = pc.is_in(ids, value_set=clip_ids).to_numpy()
    near = np.setdiff1d(np.flatnonzero(is_near), deleted)
    held: list[int] = []
    for number in near.tolist():
        row = source.index.row(number)
        times = clips[row.clip_id]
        for name, data in _read_raw(source, number, fields).items():
            cut = cut_member(
                name,
                data=data,
                row=row,
                times=times,
                channels=source.manifest.extra_channels,
            )
            if cut is not data:
                held.append(number)
                break
    return np.array(held, np.int64)


def is_cut(name: str, channels: tuple[Channel, ...]) -> bool:
    """Return whether members of this field name can hold something of other samples that is cut
    out.
    """
    if name.endswith(SWEEPS_FIELD) or name in (EGO.field, _AGENTS):
        return True
    return any(
        channel.field == name and (one_of_series(channel) is not None or _is_radar(channel))
        for channel in channels
    )


def cut_member(
    name: str,
    data: Buffer,
    row: IndexRow,
    times: DeletedTimes,
    channels: tuple[Channel, ...],
) -> Buffer | None:
    """Return a member without what it holds of deleted samples; itself where that is nothing, None:
    it goes.

    ``row`` is that of its sample.
    """
    if name.endswith(SWEEPS_FIELD):
        spans_ns = times.sensor_spans_ns.get(name.removesuffix(SWEEPS_FIELD))
        if spans_ns is None:
            return data
        sweeps = decode_sweeps(data)
        keep = ~_is_inside(sweeps.timestamp_ns, spans_ns)
        if keep.all():
            return data
        if not keep.any():
            return None
        remaining = Sweeps(
            num_points=sweeps.num_points[keep],
            timestamp_ns=sweeps.timestamp_ns[keep],
            lidar2global=sweeps.lidar2global[keep],
            points=sweeps.points[np.repeat(keep, sweeps.num_points)],
        )
        return encode_arrays(remaining)
    channel = next((entry for entry in channels if entry.field == name), None)
    if channel is None:
        return data
    kind = KINDS[channel.kind]
    if one_of_series(channel) is not None:
        series = kind.decode(data, channel)
        keep = ~_is_inside(series[TIMES], times.spans_ns)
        if keep.all():
            return data
        remaining_series = {part: values[keep] for part, values in series.items()}
        return kind.encode(remaining_series, channel)
    if _is_radar(channel):
        spans_ns = times.sensor_spans_ns.get(channel.name)
        points = kind.decode(data, channel)
        measured_ns = _compute_measured_ns(points, channel, row.timestamp_ns)
        keep = ~_is_inside(
            measured_ns,
            np.zeros((0, 2), np.int64) if spans_ns is None else spans_ns,
        )
        if keep.all():
            return data
        return kind.encode(points[keep], channel)
    if name == EGO.field and channel.columns == EGO.columns:
        value = np.array(kind.decode(data, channel))
        after_ns = value[:, _TIME_S].astype(np.float64) * 1e9
        offset_ns = row.timestamp_ns - times.times_ns[:, None]
        away_ns = np.abs(offset_ns + after_ns)
        is_deleted = np.nan_to_num(away_ns, nan=np.inf) < _SAME_NS
        is_step = is_deleted.any(0)
        value[is_step, :-1] = np.nan
        value[is_step, -1] = 0
        if is_step.any():
            return kind.encode(value, channel)
        return data
    if name == _AGENTS and tuple(array.name for array in channel.arrays) == _OF_STEPS:
        steps = times.frames - row.frame + PAST
        steps = steps[(steps >= 0) & (steps < STEPS)]
        stored = kind.decode(data, channel)
        arrays = {part: np.array(values) for part, values in stored.items()}
        if not arrays["valid"][:, steps].any():
            return data
        arrays["position"][:, steps] = np.nan
        arrays["yaw"][:, steps] = np.nan
        arrays["valid"][:, steps] = 0
        return kind.encode(arrays, channel)
    return data


def _is_radar(channel: Channel) -> bool:
    return channel.sensor == "radar" and channel.kind == "points" and _DT in channel.columns


def _compute_measured_ns(points: F32, channel: Channel, timestamp_ns: int) -> I64:
    """Return when the points of a radar were measured [ns], to the precision of a float32 of
    seconds.
    """
    dt_s = points[:, channel.columns.index(_DT)]
    age_s = dt_s.astype(np.float64)
    return timestamp_ns - np.round(age_s * 1e9).astype(np.int64)


def _read_raw(
    source: Dataset,
    number: int,
    names: Sequence[str],
) -> dict[str, memoryview]:
    """Return the raw bytes of some members of a sample in a folder, by field name, checked."""
    row = source.index.row(number)
    path = source.shard_path(row)
    with open_file(path) as shard:
        shard.seek(row.offset)
        span = shard.read(row.length)
    check_span(row, span, path.name)
    return read_members(
        row,
        span=span,
        shard=path.name,
        fields_wanted=names,
        dictionary=source.dictionary,
    )


def _find_spans(times_ns: I64, is_deleted: Mask) -> Spans:
    """Return what deleted samples of a clip own: (D, 2), from after the first to the second."""
    begins = np.concatenate([[_BEGIN], times_ns[:-1]])
    ends = np.concatenate([times_ns[:-1], [_END]])
    return np.stack([begins, ends], 1)[is_deleted]


def _is_inside(times_ns: I64, spans_ns: Spans) -> Mask:
    inside: Mask = np.zeros(len(times_ns), bool)
    for begin, end in spans_ns.tolist():
        inside |= (times_ns > begin) & (times_ns <= end)
    return inside
