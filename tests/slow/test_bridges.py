"""Each bridge of `fr.order` to another framework stops 500 times, on other ranks each time, and misses no row.

Grain with workers stops 50 times: it starts an interpreter for each worker.
"""

from __future__ import annotations

import pytest

from support.bridges import BRIDGES, stop_and_continue

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::Warning"),  # of the libraries
]


@pytest.mark.parametrize("name", BRIDGES)
def test_five_hundred_stops(name, tmp_path):
    package, run = BRIDGES[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    num_stops = 50 if name == "Grain, 2 workers" else 500
    assert stop_and_continue(run, num_stops, tmp_path, seed=len(name)) > 4 * num_stops
