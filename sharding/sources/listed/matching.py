"""Which measurement of each sensor belongs to which frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def nearest(frame_ns: NDArray[np.int64], sensor_ns: NDArray[np.int64], tolerance_ns: int) -> NDArray[np.intp]:
    """Match measurements to frames: (F,) their numbers, -1 for none.

    Both times ascend. A measurement and a frame belong together where each is the other's nearest, and no more than
    ``tolerance_ns`` apart: no measurement is in two frames. Of two that are as near, the earlier one is taken.
    """
    if not len(sensor_ns) or not len(frame_ns):
        return np.full(len(frame_ns), -1)
    found = _nearest(frame_ns, sensor_ns)
    is_mutual = _nearest(sensor_ns, frame_ns)[found] == np.arange(len(frame_ns))
    is_near = np.abs(sensor_ns[found] - frame_ns) <= tolerance_ns
    return np.where(is_mutual & is_near, found, -1)


def _nearest(wanted: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.intp]:
    after = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(wanted - times[before] <= times[after] - wanted, before, after)
