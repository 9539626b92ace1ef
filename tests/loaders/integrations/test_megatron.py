"""Modules with other data-parallel degrees, under Megatron-Core's parallel state and grids."""

from __future__ import annotations

import pytest

from support.ranks import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("einops", reason="grids of megatron-core need einops")


@pytest.mark.process
@pytest.mark.parametrize("num_ranks", [3, 6], ids=["degrees_3_and_1", "degrees_6_and_2"])
def test_modules_of_other_degrees_read_one_global_batch(num_ranks):
    run_ranks(num_ranks, "-m", "support.megatron_ranks")
