from __future__ import annotations

import pytest
import torch.distributed as dist

from fuelrail.bench.micro.checkpoint_stall import measure


@pytest.mark.slow
def test_loops_with_and_without_a_save_are_compared(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stall, megabytes = measure(tmp_path, 12, 1, "sleep")
    finally:
        dist.destroy_process_group()
    # One layer of 1024 x 1024, thrice: parameters and two moments.
    assert megabytes == pytest.approx(3 * 4 * 1024**2 / 1e6, rel=0.02)
    assert 0 < stall.call_s < stall.save_s
    assert stall.without_s >= stall.num_steps * 0.02
    assert stall.ratio == stall.background_stall_s / stall.waited_stall_s
    assert [path.name[:13] for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
