"""Replicas under torchft on gloo are killed, paused and joined: the steps stay those of a run that nobody disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import chain, islice, repeat
from pathlib import Path

import msgspec
import pytest

from fuelrail import DataLoader, ImageAugment, World
from support.ranks import environment
from support.torchft_chaos import Report

coordination = pytest.importorskip(
    "torchft.coordination", reason="pip install torchft runs the example of its trainer"
)

pytestmark = pytest.mark.long

NUM_EVENTS = int(os.environ.get("TORCHFT_EVENTS", "40"))
"""Kills, pauses and joins: a thousand take an hour."""
TESTS = Path(__file__).parents[1]
TRAINERS = TESTS.parent / "configs" / "trainers"
NUM_STEPS = 36
GLOBAL_BATCH = 6


@pytest.mark.process
def test_a_killed_replica_takes_no_row_with_it(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (15, 12)}).root
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50
    )
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    replicas = []
    for number in range(3):
        command = [
            *(sys.executable, TESTS / "support" / "torchft_replica.py", TRAINERS),
            str(4 if number == 1 else 0),
            *(root, "--steps", str(NUM_STEPS), "--checkpoint", tmp_path / str(number)),
        ]
        replicas.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [replica.communicate(timeout=240)[0] for replica in replicas]
    lighthouse.shutdown()
    assert [replica.returncode for replica in replicas].count(0) == 2
    rows = defaultdict(list)
    last = {}
    for number, output in enumerate(outputs):
        for step, keys in re.findall(
            r"^rank \d+ step (\d+) .* samples (.*)$", output, re.MULTILINE
        ):
            last[int(step), number] = keys.split()  # a repeated step counts as it came last
    for (step, _), keys in last.items():
        rows[step] += keys
    image = ImageAugment(height=64, width=176)
    with DataLoader(
        root,
        GLOBAL_BATCH,
        shuffle=True,
        drop_last=True,
        transforms={"image": image},
        seed=7,
        world=World(),
    ) as alone:
        epochs = chain.from_iterable(repeat(alone))
        expected = [batch["sample_key"] for batch in islice(epochs, NUM_STEPS)]
    assert [sorted(rows[step]) for step in range(NUM_STEPS)] == [*map(sorted, expected)]


@pytest.mark.process
@pytest.mark.timeout(60 + 6 * NUM_EVENTS)
def test_kills_pauses_and_joins_leave_rows_and_weights_as_they_were(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (20, 20)}, size=(64, 48)).root
    command = [*(sys.executable, "-W", "ignore", "-m", "support.torchft_chaos"), root, tmp_path]
    output = subprocess.run(
        [*map(str, command), str(NUM_EVENTS), "1"],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    report = msgspec.json.decode(output, type=Report)
    assert report.wrong_steps == []
    assert sum(report.events.values()) == NUM_EVENTS
    ended = report.crashed  # by torchft's time limits, as a replica that is killed
    assert report.num_repeated <= report.events["kill"] + report.events.get("pause", 0) + ended
    assert report.worst_float32 < 1e-6
    assert report.worst_float64 < 1e-12
    assert len(report.sizes) > 1
    assert report.sampler_lost > 0, "torchft's own sampler loses the rows of repeated steps"
