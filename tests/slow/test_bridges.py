"""Each bridge of `fr.order` to another framework stops 500 times, on other ranks each time, and misses no row."""

from __future__ import annotations

import pytest

from support.bridges import BRIDGES, stop_and_continue

pytestmark = [
    pytest.mark.long, pytest.mark.process, pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::Warning"),  # of the libraries
]  # fmt: skip


@pytest.mark.parametrize("name", BRIDGES)
def test_five_hundred_stops(name, tmp_path):
    package, run = BRIDGES[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert stop_and_continue(run, 500, tmp_path, seed=len(name)) > 2000
