"""Cuts the rows that a crop needs out of a JPEG, without decoding anything.

A JPEG with one restart marker per row of MCUs (``fuelrail shard --jpeg restart`` writes it,
losslessly) can be cut between rows: decoding starts again at each marker. Header and wanted rows
are a smaller, valid JPEG, which any decoder takes, with the same pixels in the rows kept. A BEV
crop that drops the top third saves a third of the entropy decoding, which no decoder's own region
of interest does.

ITU-T T.81: restart markers D0 to D7 count modulo 8 from D0 (B.2.1, E.1.4); sizes of MCUs A.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from fuelrail.pipeline.native import CameraJpeg, Scratch
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo

_MCU_WH = {
    "gray": (8, 8),
    "4:4:4": (8, 8),
    "4:2:2": (16, 8),
    "4:2:0": (16, 16),
    "4:4:0": (8, 16),
    "4:1:1": (32, 8),
    "4:1:0": (32, 16),
}
_END_OF_IMAGE = (0xFF, 0xD9)


class SplicedRows(NamedTuple):
    """A JPEG of some rows of another: pixel rows ``top`` up to ``top + height`` of it, all
    columns.
    """

    encoded: Buffer
    top: int
    height: int


class _Cut(NamedTuple):
    """Rows of MCUs [first, last) of ``num_rows``, and the pixel rows that these are."""

    first: int
    last: int
    num_rows: int
    top: int
    height: int


def _choose_rows(
    info: ImageInfo,
    top: int,
    bottom: int,
    factor: int = 1,
) -> _Cut | None:
    """Return what to keep for pixel rows [top, bottom); None where the header says no, or all
    rows are needed.
    """
    if not info.restart_interval or info.progressive or info.num_components == 4:
        return None
    mcu_wh = _MCU_WH.get(info.subsampling)
    if mcu_wh is None:
        return None
    mcu_width, mcu_height = mcu_wh
    if info.restart_interval != -(-info.width // mcu_width):
        return None
    num_rows = -(-info.height // mcu_height)
    # Smooth upsampling of colour planes of half height looks into the neighbouring row. Scaled
    # decoding of 4:2:0 does without: it makes the colour planes as large as the other at once
    # (jdmaster.c).
    is_smooth = factor == 1 or info.subsampling != "4:2:0"
    context = int(mcu_height == 16 and is_smooth)
    first = max(0, top // mcu_height - context)
    last = min(num_rows, -(-bottom // mcu_height) + context)
    if last - first in (0, num_rows) or last < first:
        return None
    top = first * mcu_height
    bottom = min(info.height, last * mcu_height)
    return _Cut(
        first=first,
        last=last,
        num_rows=num_rows,
        top=top,
        height=bottom - top,
    )


def splice_rows(
    encoded: Buffer,
    info: ImageInfo,
    top: int,
    bottom: int,
    factor: int = 1,
    scratch: Scratch | None = None,
) -> SplicedRows | None:
    """Return the pixel rows [top, bottom) of a JPEG, and up to two rows of MCUs more on each side.

    ``factor`` is the divisor of the DCT-scaled decoding that is to follow. With ``scratch`` the
    result lies there, and is valid until its thread's next call.

    None where the file cannot be cut (no restart marker at each row, progressive, several scans,
    markers missing) or where all rows are needed. Damage in rows that are left out is not seen.
    """
    cut = _choose_rows(info, top, bottom, factor)
    if cut is None:
        return None
    source = np.frombuffer(encoded, np.uint8)
    scan = source[info.scan_at :]
    places = np.flatnonzero(scan[:-1] == 0xFF)
    kinds = scan[places + 1]
    is_restart = (kinds & 0xF8) == 0xD0
    kinds = kinds[is_restart]
    markers = places[is_restart] + info.scan_at
    # They count D0, D1, ... D7, D0, ...
    numbers = np.arange(len(kinds))
    are_counted = np.array_equal(kinds & 7, numbers & 7)
    if len(markers) != cut.num_rows - 1 or not are_counted:
        return None
    if encoded[info.scan_at - 2 * info.num_components - 4] != info.num_components:
        return None
    if bytes(_END_OF_IMAGE) not in bytes(encoded[-16:]):
        return None  # cut, or something follows: the decoder shall see all of it
    start = info.scan_at
    if cut.first:
        start = int(markers[cut.first - 1]) + 2
    end = len(encoded)
    if cut.last < cut.num_rows:
        end = int(markers[cut.last - 1])
    num_bytes = info.scan_at + end - start
    if scratch is None:
        spliced = np.empty(num_bytes + 2, np.uint8)
    else:
        spliced = scratch.take("spliced", 1, num_bytes + 2, 1).ravel()
    spliced[: info.scan_at] = source[: info.scan_at]
    spliced[info.scan_at : num_bytes] = source[start:end]
    if cut.last < cut.num_rows:
        spliced[num_bytes:] = _END_OF_IMAGE
        num_bytes += 2
    spliced[info.frame_at + 5 : info.frame_at + 7] = divmod(cut.height, 256)
    if cut.first % 8:
        moved_by = info.scan_at - start
        kinds_at = markers[cut.first : cut.last - 1] + (moved_by + 1)
        numbers = np.arange(len(kinds_at))
        spliced[kinds_at] = 0xD0 + (numbers & 7)
    return SplicedRows(spliced[:num_bytes].data, cut.top, cut.height)


class SplicedViews(NamedTuple):
    """A JPEG of all rows that several views need; ``parts`` are rows [first, last) of it, those
    of each view.
    """

    encoded: Buffer
    top: int
    height: int
    parts: tuple[tuple[int, int], ...]


def splice_views(
    encoded: Buffer,
    info: ImageInfo,
    rows: Sequence[tuple[int, int]],
    factor: int,
    scratch: Scratch,
) -> SplicedViews:
    """Return the pixel rows of several views as one JPEG, or all of them; and the part that each
    alone would be cut to.

    Arguments as in `splice_rows`. A part is sampled as the view's own JPEG is, to the bit, for any
    neighbour.
    """
    spliced = splice_rows(
        encoded,
        info=info,
        top=min(top for top, _ in rows),
        bottom=max(bottom for _, bottom in rows),
        factor=factor,
        scratch=scratch,
    )
    cuts = [_choose_rows(info, *view_rows, factor) for view_rows in rows]
    if spliced is None:
        spliced = SplicedRows(encoded, 0, info.height)
        if all(splice_rows(encoded, info, *view_rows, factor) is None for view_rows in rows):
            cuts = [None for _ in rows]
    parts = []
    for cut in cuts:
        top = 0 if cut is None else cut.top
        height = info.height if cut is None else cut.height
        first = top - spliced.top
        parts.append((first, first + height))
    return SplicedViews(*spliced, tuple(parts))


class RowsWanted(NamedTuple):
    """Pixel rows [top, bottom) of one JPEG."""

    encoded: Buffer
    info: ImageInfo
    top: int
    bottom: int


def splice_batch(
    requests: Sequence[RowsWanted],
    scratch: Scratch,
    native: CameraJpeg | None,
) -> list[SplicedRows | None]:
    """Return what `splice_rows` returns for each file; with the native library by one call without
    the GIL.

    The results lie in ``scratch`` and are valid until its thread's next call.
    """
    if native is None:
        return [splice_rows(*rows) for rows in requests]
    results: list[SplicedRows | None] = [None] * len(requests)
    cuts = [
        (index, rows, cut)
        for index, rows in enumerate(requests)
        if (cut := _choose_rows(*rows[1:])) is not None
    ]
    if not cuts:
        return results
    sizes = [len(rows.encoded) + 2 for _, rows, _ in cuts]
    starts = np.cumsum([0, *sizes])
    num_bytes_of_all = int(starts[-1])
    room = scratch.take("spliced batch", 1, num_bytes_of_all, 1).ravel()
    arrays = [np.frombuffer(rows.encoded, np.uint8) for _, rows, _ in cuts]
    table = np.array(
        [
            (
                array.__array_interface__["data"][0],
                array.size,
                0,
                info.frame_at,
                info.scan_at,
                info.num_components,
                cut.num_rows,
                cut.first,
                cut.last,
                cut.height,
                0,
            )
            for array, (_, (_, info, _, _), cut) in zip(arrays, cuts, strict=True)
        ],
        np.int64,
    )
    table[:, 2] = room.ctypes.data + starts[:-1]
    native.cut_rows(table)
    for (index, _, cut), start, num_bytes in zip(
        cuts,
        starts.tolist(),
        table[:, -1].tolist(),
        strict=False,
    ):
        if num_bytes:
            spliced = room[start : start + num_bytes]
            results[index] = SplicedRows(spliced.data, cut.top, cut.height)
    return results
