"""What torch's CPU allocator held at most, of which the operating system's count of pages says little."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable


def peak_of(run: Callable[[], object]) -> int:
    """Return the peak of the CPU allocator in bytes while ``run`` runs, beyond what it held before."""
    gc.collect()  # what earlier tests left would be freed in the run, and be taken off its peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
