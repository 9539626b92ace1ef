"""A model from outside the trainer, divided in every way that takes one, trains and evaluates as one process does."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time

import psutil
import pytest

from support import limited_rank, own_model
from support.datasets import build_dataset
from support.limited_rank import LIMIT
from support.own_model import STRATEGIES
from support.ranks import TESTS, environment, run_ranks

GUIDE = TESTS.parent / "docs" / "guides" / "own-model.md"
pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    place = tmp_path_factory.mktemp("own-model") / "data"
    build_dataset(place, {"train": (16, 16, 16), "val": (7, 6)})
    return place


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (2e-6, ()),
        (2e-6, ("vla", "float32")),
        (2e-6, ("detector", "float32", "frozen")),
        # With statistics of few samples a rounding error of fp32 grows in one process too (docs/training.md).
        (1e-12, ("detector", "float64", "local")),
    ],
    ids=lambda value: "-".join(value) or "own" if isinstance(value, tuple) else None,
)
def test_ranks_train_and_evaluate_as_one_process(limit, words, world, dataset, tmp_path):
    run_ranks(
        world,
        own_model.__file__,
        dataset,
        tmp_path / "out.json",
        20,
        *words,
        timeout_s=3000,
    )
    differences = json.loads((tmp_path / "out.json").read_text())
    assert {name: differences[name] for name in STRATEGIES if differences[name] > limit} == {}
    assert all(
        abs(differences[f"{name} moved"]) > 1e-3 and differences[f"{name} evaluated"]
        for name in STRATEGIES
    )


def test_a_model_larger_than_what_a_rank_may_have_trains_in_parts(dataset, tmp_path):
    with pytest.raises(AssertionError, match=r"t allocate memory"):
        run_ranks(
            4,
            limited_rank.__file__,
            dataset,
            "ddp",
            tmp_path / "ddp",
            timeout_s=600,
        )
    said = run_ranks(
        4,
        limited_rank.__file__,
        dataset,
        "fsdp2",
        tmp_path / "fsdp2",
        timeout_s=600,
    )
    rank_bytes = [int(size) for size in re.findall(r"rank \d had (\d+) bytes", said)]
    assert len(rank_bytes) == 4 and max(rank_bytes) < LIMIT


def test_the_guide_trains_on_two_nodes_and_continues_on_one_when_a_node_was_killed(
    dataset, tmp_path
):
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "dataset").symlink_to(dataset)
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "again.py").write_text(code.replace('strategy="fsdp2"', 'strategy="ddp"'))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = [
            "--nnodes",
            "2",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free.getsockname()[1]),
        ]

    def start(*words):
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        return subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE)

    nodes = [
        start(*place, "--node-rank", node, "--nproc-per-node", "1", "train.py") for node in "01"
    ]
    try:
        ends_s = time.monotonic() + 300
        while not any(tmp_path.glob("checkpoints/step-*/checkpoint.json")):
            assert time.monotonic() < ends_s and all(node.poll() is None for node in nodes)
            time.sleep(0.05)
    finally:
        for node in nodes:
            for process in (
                *psutil.Process(node.pid).children(recursive=True),
                node,
            ):
                process.kill()
            node.communicate()
    said, _ = start("--standalone", "--nproc-per-node", "2", "again.py").communicate(timeout=300)
    steps = [int(line.split()[0]) for line in said.decode().splitlines()]
    assert steps == list(range(steps[0], 21)) and 6 <= steps[0] <= 21
