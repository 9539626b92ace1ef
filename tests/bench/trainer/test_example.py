"""The example of a model of one's own is killed under FSDP and continues under DDP, with the same losses."""

from __future__ import annotations

import re

import pytest

from support import own_example
from support.ranks import run_ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]


def run(dataset, place, strategy, last=-1):
    words = [f"--strategy={strategy}", dataset, "--steps", 6, "--every", 2, "--checkpoint", place]
    return run_ranks(2, own_example.__file__, last, *words)


def losses(text):
    found = re.findall(r"^step (\d+) loss (\S+)", text, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_a_killed_run_continues_under_another_strategy(tiny_dataset, tmp_path):
    dataset = tiny_dataset({"train": (16, 16, 16), "val": (7, 6)}).root
    whole = run(dataset, tmp_path / "whole", "ddp")
    with pytest.raises(AssertionError, match="ranks ended with"):
        run(dataset, tmp_path / "cut", "fsdp2", last=3)
    rest = run(dataset, tmp_path / "cut", "ddp")
    expected, found = losses(whole), losses(rest)
    assert sorted(expected) == list(range(6)) and sorted(found) in ([2, 3, 4, 5], [4, 5])
    assert all(loss == pytest.approx(expected[step], rel=2e-6) for step, loss in found.items())

    assert "over 48 samples" in rest
