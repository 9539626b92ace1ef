"""A rank dies by SIGKILL, the job continues with fewer ranks: both runs' samples are those of one that never died."""

from __future__ import annotations

import json

import pytest

from support.batches import load
from support.elastic_rank import CHECKPOINT_EVERY
from support.ranks import TESTS, run_ranks

pytestmark = pytest.mark.process

GLOBAL_BATCH = 12
NUM_STEPS = 11
KILL_STEP = 7
NUM_SAMPLES = 40  # three steps an epoch: the kill and the restart lie in the third epoch


def recorded(folder, size):
    """Keys of each step, over all ranks in order, as the ranks wrote them down; steps that all ranks made."""
    steps = {}
    for rank in range(size):
        for line in (folder / f"world{size}-rank{rank}.jsonl").read_text().splitlines():
            step, epoch, number, keys = json.loads(line)
            steps.setdefault(step, {})[rank] = (epoch, number, keys)
    return {
        step: (
            ranks[0][:2],
            [key for rank in range(size) for key in ranks[rank][2]],
        )
        for step, ranks in steps.items()
        if len(ranks) == size
    }


def test_a_job_of_three_that_lost_a_rank_continues_with_two(build_once, tmp_path):
    root = build_once({"train": (15, 25)})[0]
    out = tmp_path / "run"
    out.mkdir()
    script = TESTS / "support" / "elastic_rank.py"
    arguments = [script, root, out, GLOBAL_BATCH, NUM_STEPS]

    with pytest.raises(AssertionError, match=r"ranks ended with \[.*, -9\]"):
        run_ranks(3, *arguments, 2, KILL_STEP)
    before = recorded(out, 3)
    assert max(before) == KILL_STEP - 1

    run_ranks(2, *arguments, -1, -1)
    after = recorded(out, 2)
    resumed = KILL_STEP // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    assert list(after) == list(range(resumed, NUM_STEPS))

    expected = []
    with load(root, GLOBAL_BATCH, seed=5) as uninterrupted:
        while len(expected) < NUM_STEPS:
            expected += [
                ((batch["epoch"], batch["step"]), batch["sample_key"]) for batch in uninterrupted
            ]
    assert [(before | after)[step] for step in range(NUM_STEPS)] == expected[:NUM_STEPS]
    assert [before[step] for step in range(resumed, KILL_STEP)] == expected[
        resumed:KILL_STEP
    ]  # done again, the same
