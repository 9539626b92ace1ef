"""Series: measurements at a sensor's own rate, as a channel that is read by time.

FORMAT.md has the rules, section 2.1.

A series is a ``ragged`` channel of law ``fixed`` with the arrays ``timestamp_ns`` and ``values``. A
sample has those measurements of its clip that were made since the sample before, so the samples of
a clip have them all. It also has the last one before these, and up to the first one at or after its
own time, so a reader of any time between two samples needs the later sample alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from fuelrail.pipeline.channels.table import ArraySpec, Channel, Law

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from fuelrail.pipeline.dtypes import I64

TIMES: Final = "timestamp_ns"
VALUES: Final = "values"


def series_channel(
    name: str,
    dtype: str,
    shape: tuple[int, ...] = (),
    *,
    unit: str = "",
    description: str = "",
) -> Channel:
    """Return the entry of a series; ``shape`` is that of one measurement."""
    arrays = (
        ArraySpec(TIMES, "int64", shape=(), unit="ns"),
        ArraySpec(VALUES, dtype, shape=shape, unit=unit),
    )
    return Channel(
        name=name,
        kind="ragged",
        field=f"{name}.safetensors",
        law=Law("fixed"),
        arrays=arrays,
        allows_nan=np.dtype(dtype).kind == "f",
        optional=True,
        description=description,
    )


def one_of_series(channel: Channel) -> Channel | None:
    """Return the entry of one measurement, of kind ``array``; None for a channel that is not
    one.
    """
    names = [array.name for array in channel.arrays]
    if channel.kind != "ragged" or names != [TIMES, VALUES]:
        return None
    times, values = channel.arrays
    if (times.dtype, times.shape, channel.law.name) != ("int64", (), "fixed"):
        return None
    axes = tuple(f"axis{number}" for number in range(len(values.shape)))
    return msgspec.structs.replace(
        channel,
        kind="array",
        field=f"{channel.name}.npy",
        arrays=(),
        dtype=values.dtype,
        axes=axes,
        shape=values.shape,
    )


def parts_of_series(
    times_ns: I64,
    values: ArrayLike,
    sample_times_ns: I64,
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield what each sample of a clip has of a series; both times ascend, ``values`` are (M,
    ...).
    """
    array = np.asarray(values)
    num_measurements = len(times_ns)
    borders_ns = sample_times_ns[:-1]
    last_before = np.searchsorted(times_ns, borders_ns, side="right") - 1
    first_after = np.searchsorted(times_ns, borders_ns, side="left")
    starts = [0, *np.maximum(last_before, 0).tolist()]
    ends = [*np.minimum(first_after + 1, num_measurements).tolist(), num_measurements]
    for start, end in zip(starts, ends, strict=True):
        yield {
            TIMES: times_ns[start:end],
            VALUES: array[start:end],
        }
