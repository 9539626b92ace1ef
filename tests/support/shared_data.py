"""Finds the optional folder of real sensor data beside the checkout; tests that want it skip where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Return the folder NAME of the real-data corpus, or skip the calling test with the reason."""
    folder = _ROOT / name
    if not folder.is_dir():
        pytest.skip(f"real data '{name}' is not beside this checkout")
    return folder
