"""Episodes in our order: LeRobot's interface, resumes on any ranks, and its own trainer, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict

import numpy as np
import pytest

from support.ranks import environment

LENGTHS = (20, 3, 25, 14, 9, 30)


def write_episodes(root):
    """A dataset of LeRobot's without images: each frame's state says which one it is."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    names = {
        "observation.state": ["episode", "frame"],
        "observation.environment_state": ["episode", "frame"],
        "action": ["along", "across"],
    }
    features = {
        name: {"dtype": "float32", "shape": (2,), "names": axes} for name, axes in names.items()
    }
    dataset = LeRobotDataset.create("me/episodes", 10, features, root=root, use_videos=False)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            values = np.array([episode, frame], np.float32)
            dataset.add_frame(dict.fromkeys(names, values) | {"task": f"task {episode % 2}"})
        dataset.save_episode()
    dataset.finalize()
    return root


@pytest.fixture(scope="session")
def episodes(tmp_path_factory):
    pytest.importorskip("lerobot", reason="lerobot is not installed")
    return write_episodes(tmp_path_factory.mktemp("lerobot") / "episodes")


POLICY = {
    "type": "act",
    "device": "cpu",
    "push_to_hub": "false",
    "chunk_size": 8,
    "n_action_steps": 8,
    "dim_model": 32,
    "n_heads": 2,
    "dim_feedforward": 32,
    "n_encoder_layers": 1,
    "use_vae": "false",
    "dropout": 0,
    "optimizer_lr": 0.001,
}


def start(episodes, out, *, ranks, batch, steps, resume=False):
    out.parent.mkdir(exist_ok=True)
    arguments = {
        "output_dir": out,
        "steps": steps,
        "batch_size": batch,
        "save_freq": 4,
        "num_workers": 0,
        "log_freq": 0,
        "env_eval_freq": 0,
    }
    if resume:
        checkpoint = out / "checkpoints" / "last" / "pretrained_model"
        arguments |= {"resume": "true", "config_path": checkpoint / "train_config.json"}
    else:
        arguments |= {"dataset.repo_id": "me/episodes", "dataset.root": episodes}
        arguments |= {f"policy.{name}": value for name, value in POLICY.items()}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [
            *launcher,
            f"--nproc-per-node={ranks}",
            *("-m", "support.lerobot_rank", out.parent),
            *(f"--{name}={value}" for name, value in arguments.items()),
        ],
        env=environment() | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output.decode()[-4000:]


def steps_of(folder):
    """The frames of each step, and the mean of the ranks' losses."""
    rows, losses = defaultdict(list), defaultdict(list)
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            batch = json.loads(line)
            rows[batch["step"]] += batch["rows"]
            losses[batch["step"]].append(batch["loss"])
        path.unlink()
    return {step: (rows[step], np.mean(losses[step])) for step in rows}


@pytest.mark.process
def test_its_trainer_killed_and_resumed_on_other_ranks_has_the_frames_of_an_unbroken_run(
    episodes, tmp_path
):
    finish(start(episodes, tmp_path / "whole" / "out", ranks=2, batch=6, steps=24))
    unbroken = steps_of(tmp_path / "whole")
    out = tmp_path / "killed" / "out"
    process = start(episodes, out, ranks=2, batch=6, steps=24)
    last = out / "checkpoints" / "last"
    while not (last.is_symlink() and last.resolve().name == "000012"):
        assert process.poll() is None, process.communicate()[0].decode()[-4000:]
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    begun = steps_of(tmp_path / "killed")
    saved = int(last.resolve().name)
    finish(start(episodes, out, ranks=3, batch=4, steps=24, resume=True))
    resumed = steps_of(tmp_path / "killed")

    assert sorted(resumed) == list(range(saved + 1, 25))
    for step, (rows, loss) in unbroken.items():
        frames, own_loss = (begun if step <= saved else resumed)[step]
        assert frames == rows
        assert own_loss == pytest.approx(loss, rel=1e-4)
    first_epoch = [row for step in range(1, 10) for row in unbroken[step][0]]
    assert sorted(first_epoch[: sum(LENGTHS)]) == list(range(sum(LENGTHS)))
