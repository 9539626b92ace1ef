"""Nodes under torchrun: one dies, others join, the workers start again on other ranks; the steps stay the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from itertools import chain, islice, repeat

import pytest

from fuelrail import DataLoader, ImageAugment, World
from support.ranks import TESTS, environment

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(900)]

TRAINERS = TESTS.parent / "configs" / "trainers"
GLOBAL_BATCH = 6
NUM_STEPS_OF_NODE_1 = 3
ENDS_S = 800


def start_node(number, port, num_own_steps, arguments, folder):
    """A torchrun with one worker, as a node has it."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job"),
        "--rdzv-conf=keep_alive_interval=3,keep_alive_max_attempt=4,last_call_timeout=5",
        *("--max-restarts=99", "--monitor-interval=0.2", "--local-addr=localhost"),
        *(TESTS / "support" / "torchelastic_worker.py", TRAINERS, folder, number, num_own_steps),
        *arguments,
    ]
    with (folder / f"{number}.out").open("w") as output:
        return subprocess.Popen(
            [*map(str, command)],
            env={**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def read_steps(folder):
    """Number, generation of workers, number of ranks, rank and keys of each step, as nodes wrote them down."""
    texts = [file.read_text() for file in folder.glob("*.jsonl")]
    lines = chain.from_iterable(text[: text.rfind("\n") + 1].splitlines() for text in texts)
    return [json.loads(line) for line in lines]


def wait_for(condition, nodes, folder):
    ends_s = time.monotonic() + ENDS_S
    while not condition():
        outputs = {file.name: file.read_text()[-3000:] for file in folder.glob("*.out")}
        assert time.monotonic() < ends_s, outputs
        assert nodes[0].poll() is None, outputs
        time.sleep(0.2)


def test_nodes_that_die_and_join_leave_the_steps_as_they_were(tiny_dataset, tmp_path):
    root = tiny_dataset({"train": (15, 12)}).root
    arguments = [root, "--steps=100000", "--every=2", f"--checkpoint={tmp_path / 'saved'}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def has_ranks(num_ranks, num_lines=1):
        sizes = [size for _, _, size, *_ in read_steps(tmp_path)]
        return sizes.count(num_ranks) >= num_lines

    nodes = []

    def start(num_own_steps=0):
        nodes.append(start_node(len(nodes), port, num_own_steps, arguments, tmp_path))

    try:
        start()  # the one that keeps the rendezvous
        wait_for(lambda: has_ranks(1), nodes, tmp_path)
        start(NUM_STEPS_OF_NODE_1)
        start()
        wait_for(lambda: nodes[1].poll() == -signal.SIGKILL, nodes, tmp_path)
        wait_for(lambda: has_ranks(2), nodes, tmp_path)
        start()
        start()
        wait_for(lambda: has_ranks(4, num_lines=20), nodes, tmp_path)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    with DataLoader(
        root,
        GLOBAL_BATCH,
        shuffle=True,
        drop_last=True,
        transforms={"image": ImageAugment(height=64, width=176)},
        seed=7,
        world=World(),
    ) as alone:
        epochs = chain.from_iterable(repeat(alone))
        lines = read_steps(tmp_path)
        num_steps = max(step for step, *_ in lines)  # the last one may be in part
        expected = [batch["sample_key"] for batch in islice(epochs, num_steps + 1)]
    shares = defaultdict(dict)
    for step, generation, size, rank, keys in lines:
        shares[step, generation, size][rank] = keys
    whole = set()
    for (step, _, size), keys in shares.items():
        if len(keys) == size:  # else a worker died before it wrote the step down
            whole.add(step)
            assert [key for rank in range(size) for key in keys[rank]] == expected[step], (
                step,
                size,
            )
    assert whole >= {*range(num_steps)}
    assert {1, 2, 4} <= {size for *_, size in shares}
