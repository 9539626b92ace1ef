"""What holds for all tests."""

from __future__ import annotations

import gc
import signal
from typing import Final

import pytest
from hypothesis import settings

LANES: Final = ("unit", "process", "slow", "gpu", "real", "network")

# No test asserts times: on a busy machine an example may take as long as it likes.
settings.register_profile("fuelrail", deadline=None)
settings.load_profile("fuelrail")

# Shells start background jobs with Ctrl-C ignored, and children inherit that: tests interrupt some of theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test that names no lane into the lane ``unit``: `make test-fast` runs that one."""
    for item in items:
        if not any(item.get_closest_marker(lane) for lane in LANES):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish() -> None:
    """Take what is imported by now out of garbage collection: many tests call it, and walking torch takes 0.1 s."""
    gc.collect()
    gc.freeze()
