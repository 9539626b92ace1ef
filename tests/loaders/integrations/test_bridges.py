"""Each bridge of `fr.order` stops a few times here, and 500 times in tests/slow."""

from __future__ import annotations

import pytest

from support.bridged_orders import NUM_ORDERS
from support.bridges import BRIDGES, stop_and_continue

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::Warning"),
]  # of the libraries

STOPS_OF_BRIDGE = {
    "Trainer": 3,
    "Lightning": 3,
    "torch, 2 workers": NUM_ORDERS,
    "torchdata, 2 workers": NUM_ORDERS,
}


@pytest.mark.parametrize("name", [name for name in BRIDGES if name != "Grain, 2 workers"])
def test_a_bridge_that_stops_misses_no_row(name, tmp_path):
    package, run = BRIDGES[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert stop_and_continue(run, STOPS_OF_BRIDGE.get(name, 3 * NUM_ORDERS), tmp_path, seed=3) > 10
