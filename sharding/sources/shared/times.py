"""Which of a sensor's times belongs to which other time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64


def nearest(times_ns: I64, wanted_ns: I64) -> NDArray[np.intp]:
    """Return for each wanted time the row of the nearest of the ascending ``times_ns`` (N,), N > 0.

    Of two that are as near, the earlier one is taken.
    """
    last = len(times_ns) - 1
    after = np.minimum(np.searchsorted(times_ns, wanted_ns), last)
    before = np.maximum(after - 1, 0)
    return np.where(
        wanted_ns - times_ns[before] <= times_ns[after] - wanted_ns,
        before,
        after,
    )
