"""A hundred thousand random histories of jobs on 1 to 64 ranks, of twelve orders: exact by ORDER.md and the witness."""

from __future__ import annotations

import os
from random import Random

import pytest

from support.elastic_histories import KINDS, run_history

pytestmark = [pytest.mark.long, pytest.mark.timeout(0)]

NUM_HISTORIES = int(os.environ.get("ELASTIC_HISTORIES", "100000"))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_die_join_lag_and_repeat_have_the_rows_of_the_order(kind):
    num_steps = 0
    for number in range(-(-NUM_HISTORIES // len(KINDS))):
        num_steps += run_history(Random(f"{kind} {number}"), kind)
    print(f"{num_steps} steps")
