"""Trainers of Accelerate, transformers and Lightning, killed 200 times and resumed on other numbers of ranks."""

from __future__ import annotations

import pytest

from support.trainer_kills import TRAINERS, run_kills

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::Warning"),
]


@pytest.mark.parametrize("name", TRAINERS)
def test_two_hundred_kills_of_a_trainer_on_changing_ranks(name, tmp_path):
    assert run_kills(name, tmp_path, 200, seed=11) > 200
