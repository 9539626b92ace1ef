"""The loaders for torchtitan: every degree, finite data, packs, and its own trainer, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict

import numpy as np
import pytest
import torch

import fuelrail as fr
from support.pages import ROOT, follow
from support.ranks import environment

titan = pytest.importorskip(
    "torchtitan.trainer", reason="torchtitan is not installed", exc_type=ImportError
)

from fuelrail.loaders.integrations.torchtitan import (  # noqa: E402 - after the skip
    FuelrailDataLoader,
    OrderedDataLoader,
)

NUM_ROWS = 103
SEQ_LEN = 32
LENGTHS = np.clip(np.random.default_rng(0).lognormal(2, 1, 400), 2, SEQ_LEN).astype(int)


class Numbers(torch.utils.data.Dataset):
    """Each token of a row is the row's number."""

    def __init__(self, _, seq_len):
        self.seq_len = seq_len

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, row):
        tokens = torch.full((self.seq_len,), row)
        return {"input": tokens}, tokens


def documents(_, __):
    return [[row] * int(length) for row, length in enumerate(LENGTHS)]


def lengths(rows):
    return {"num_tokens": [len(row) for row in rows]}


ROWS = OrderedDataLoader.Config(rows=Numbers, order=fr.OrderSpec(seed=7))
PACKS = OrderedDataLoader.Config(
    rows=documents,
    columns=lengths,
    order=fr.OrderSpec(seed=7, pack=fr.Pack(budget=SEQ_LEN, cost="num_tokens", window=128)),
)


def build(config, *, degree, local_batch, state=None):
    loaders = []
    for rank in range(degree):
        loader = config.build(
            dp_world_size=degree,
            dp_rank=rank,
            tokenizer=None,
            seq_len=SEQ_LEN,
            local_batch_size=local_batch,
            snapshot_every_n_steps=1,
        )
        loader.load_state_dict(state or {})
        loaders.append(loader)
    return loaders


def global_batches(config, *, degree, local_batch, steps, state=None):
    """The rows of the inputs of each global batch, rank after rank; the state after them."""
    loaders = build(config, degree=degree, local_batch=local_batch, state=state)
    iterators = [iter(loader) for loader in loaders]
    batches = [
        torch.cat([next(iterator)[0]["input"] for iterator in iterators]).tolist()
        for _ in range(steps)
    ]
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return batches, json.loads(json.dumps(states[0]))


@pytest.mark.parametrize("config", [ROWS, PACKS], ids=["rows", "packs"])
def test_any_degree_continues_a_run(config):
    unbroken, _ = global_batches(config, degree=1, local_batch=12, steps=40)
    for seed in range(100):
        choice = random.Random(seed)
        state = None
        resumed = []
        while len(resumed) < len(unbroken):
            degree = choice.choice([1, 2, 3, 4, 6, 12])
            steps = min(choice.randint(0, 20), len(unbroken) - len(resumed))
            batches, state = global_batches(
                config, degree=degree, local_batch=12 // degree, steps=steps, state=state
            )
            resumed += batches
        assert resumed == unbroken


def test_all_ranks_have_as_many_batches_of_finite_data():
    config = OrderedDataLoader.Config(
        rows=Numbers, order=fr.OrderSpec(seed=7), infinite=False, num_workers=2
    )
    loaders = build(config, degree=4, local_batch=3)
    assert [len(list(loader)) for loader in loaders] == [NUM_ROWS // 12] * 4
    state = loaders[0].state_dict()
    assert [list(loader) for loader in build(config, degree=2, local_batch=6, state=state)] == [
        [],
        [],
    ]


def test_packs_hold_whole_documents_with_labels_of_their_own():
    inputs, labels = next(iter(build(PACKS, degree=1, local_batch=4)[0]))
    for row, positions, targets in zip(
        inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True
    ):
        begins = [place for place, position in enumerate(positions) if position == 0]
        for begin, end in zip(begins, [*begins[1:], SEQ_LEN], strict=True):
            if targets[begin] == -100:
                assert set(targets[begin:]) == {-100}
                assert set(row[begin:]) == {0}
                break
            assert set(row[begin:end]) == set(targets[begin:end]) == {row[begin]}
            assert positions[begin:end] == list(range(end - begin))
            assert end - begin == LENGTHS[row[begin]] - 1


def test_packs_longer_than_a_sequence_are_refused():
    config = OrderedDataLoader.Config(
        rows=documents,
        columns=lengths,
        order=fr.OrderSpec(pack=fr.Pack(budget=SEQ_LEN + 1, cost="num_tokens")),
    )
    with pytest.raises(fr.errors.ConfigError, match=r"budget of 33, .* is 32"):
        build(config, degree=1, local_batch=4)


def test_a_fuelrail_dataset_continues_on_another_degree(build_once):
    root = build_once({"train": (5, 7, 9)})[0]
    config = FuelrailDataLoader.Config(
        dataset=str(root),
        batch=lambda batch: ({"input": batch["img"]}, batch["sample_key"]),
        options={"seed": 7, "transforms": {"image": {"height": 16, "width": 32}}},
    )

    def keys(*, degree, steps, state=None):
        loaders = build(config, degree=degree, local_batch=4 // degree, state=state)
        iterators = [iter(loader) for loader in loaders]
        batches = [
            [key for iterator in iterators for key in next(iterator)[1]] for _ in range(steps)
        ]
        return batches, loaders[0].state_dict()

    unbroken, _ = keys(degree=1, steps=9)
    begun, state = keys(degree=2, steps=3)
    rest, _ = keys(degree=4, steps=6, state=state)
    assert begun + rest == unbroken


def test_the_page_loads_batches_of_torchtitan():
    names = follow(ROOT / "docs" / "torchtitan.md", "What you change", "Packs")

    class Tokenizer:
        def encode(self, text, **_):
            return list(text.encode())

    config = OrderedDataLoader.Config(rows=names["Documents"], order=fr.OrderSpec(seed=7))
    loader = config.build(
        dp_world_size=2, dp_rank=1, tokenizer=Tokenizer(), seq_len=16, local_batch_size=3
    )
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (3, 16)
    loader = names["packed"].build(
        dp_world_size=2, dp_rank=1, tokenizer=None, seq_len=2048, local_batch_size=3
    )
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == (3, 2048)
    assert (labels != -100).float().mean() > 0.8


def start(folder, *, degree, steps):
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    rank = ["-m", "support.titan_rank", folder, str(steps), str(12 // degree)]
    return subprocess.Popen(
        [*launcher, f"--nproc-per-node={degree}", *rank],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output.decode()[-4000:]


def steps_of(folder):
    """The rows and the summed loss of each step."""
    rows, losses = defaultdict(list), defaultdict(float)
    for path in folder.glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            batch = json.loads(line)
            rows[batch["step"]] += batch["rows"]
            losses[batch["step"]] += batch["loss"]
        path.unlink()
    return {step: (sorted(rows[step]), losses[step]) for step in rows}


@pytest.mark.process
def test_its_trainer_killed_and_resumed_on_another_degree_has_the_losses_of_an_unbroken_run(
    tmp_path,
):
    finish(start(tmp_path / "whole", degree=2, steps=8))
    unbroken = steps_of(tmp_path / "whole")
    process = start(tmp_path / "killed", degree=2, steps=8)
    checkpoint = tmp_path / "killed" / "checkpoint" / "step-4" / ".metadata"
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()[0].decode()[-4000:]
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for step in (6, 8):
        shutil.rmtree(tmp_path / "killed" / "checkpoint" / f"step-{step}", ignore_errors=True)
    begun = steps_of(tmp_path / "killed")
    finish(start(tmp_path / "killed", degree=3, steps=8))
    resumed = steps_of(tmp_path / "killed")

    assert sorted(resumed) == [5, 6, 7, 8]
    steps = {step: begun[step] for step in (1, 2, 3, 4)} | resumed
    for step, (rows, loss) in steps.items():
        assert rows == unbroken[step][0]
        assert loss == pytest.approx(unbroken[step][1], rel=1e-5)
