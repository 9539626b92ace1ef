"""Episodes in our order: LeRobot's interface, resumes on any ranks, and its own trainer, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import fuelrail as fr
from fuelrail.loaders.integrations.lerobot import EpisodeLoader, EpisodeSampler, keep_order
from support.lerobot_kills import ORDERS, run_kills
from support.pages import ROOT, follow
from support.ranks import environment

LENGTHS = (20, 3, 25, 14, 9, 30)


STATE = {"dtype": "float32", "shape": (2,), "names": ["episode", "frame"]}
IMAGE = {"dtype": "image", "shape": (48, 64, 3), "names": ["height", "width", "channels"]}


def write_episodes(root, features):
    """A dataset in LeRobot's own format: the values and pixels of a frame say which one it is."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create("me/episodes", 10, features, root=root, use_videos=False)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            item = {"task": f"task {episode % 2}"}
            for name, feature in features.items():
                item[name] = np.array([episode, frame], np.float32)
                if feature is IMAGE:
                    item[name] = np.full(IMAGE["shape"], 32 * episode + frame, np.uint8)
            dataset.add_frame(item)
        dataset.save_episode()
    dataset.finalize()
    return root


@pytest.fixture(scope="session")
def episodes(tmp_path_factory):
    pytest.importorskip("lerobot", reason="lerobot is not installed")
    names = ("observation.state", "observation.environment_state", "action")
    root = tmp_path_factory.mktemp("lerobot") / "episodes"
    return write_episodes(root, dict.fromkeys(names, STATE))


BOUNDS = ([0, 20, 23, 48], [20, 23, 48, 62])


def test_frames_of_episodes_in_stored_order():
    sampler = EpisodeSampler(*BOUNDS, [3, 0], drop_n_first_frames=2, drop_n_last_frames=11)
    assert sampler.indices == list(sampler) == [*range(2, 9), 50]
    assert len(sampler) == 8
    items = {frame: frame - 23 for frame in range(23, 48)}  # of a dataset of episode 2 alone
    assert list(EpisodeSampler(*BOUNDS, [2], absolute_to_relative_idx=items)) == list(range(25))


def test_too_short_episodes_are_left_out_and_named(caplog):
    sampler = EpisodeSampler(*BOUNDS, drop_n_last_frames=3)
    assert sampler.indices == [*range(17), *range(23, 45), *range(48, 59)]
    assert "Episode 1 has no frame left" in caplog.text
    with pytest.raises(fr.errors.ConfigError, match=r"No valid frames remain of 4 episodes"):
        EpisodeSampler(*BOUNDS, drop_n_last_frames=30)
    with pytest.raises(fr.errors.ConfigError, match=r"drop_n_first_frames must be >= 0, got -1"):
        EpisodeSampler(*BOUNDS, drop_n_first_frames=-1)


def test_epochs_count_from_that_of_the_state():
    sampler = EpisodeSampler(*BOUNDS, shuffle=True, seed=7)
    epochs = [list(sampler) for _ in range(4)]
    sampler.load_state_dict({"epoch": 2, "start_index": 40})  # as LeRobot computes it
    sampler.set_epoch(0)  # as Accelerate counts after a resume
    assert list(sampler) == epochs[2][40:]
    sampler.set_epoch(1)
    assert list(sampler) == epochs[3]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[2]


def test_ranks_share_the_frames_of_a_batch():
    options = {"shuffle": True, "seed": 7, "global_batch": 10}
    alone = EpisodeSampler(*BOUNDS, **options, world=fr.World())
    ranks = [EpisodeSampler(*BOUNDS, **options, world=fr.World(rank, 3)) for rank in range(3)]
    for step in range(9):
        assert [frame for rank in ranks for frame in rank[step]] == alone[step]
    frames = [frame for batch in zip(*[iter(list(alone))] * 10, strict=True) for frame in batch]
    assert sorted(frames[:62]) == list(range(62))
    assert frames[62:] == frames[:8]


def test_an_order_finds_episodes_and_columns():
    tasks = [frame % 3 for frame in range(62)]
    order = fr.OrderSpec(kind="sequential", filter="task == 1 and frame < 4")
    sampler = EpisodeSampler(*BOUNDS, order=order, columns={"task": tasks}, drop_n_first_frames=1)
    assert list(sampler) == [1, 4, 22, 25, 49, 52]
    lanes = fr.OrderSpec(kind="lanes", seed=7)
    sampler = EpisodeSampler(*BOUNDS, order=lanes, global_batch=2, world=fr.World())
    assert sampler[1] == [frame + 1 for frame in sampler[0]]


def test_a_script_of_another_version_is_refused():
    with pytest.raises(fr.errors.ConfigError, match="no 'make_train_eval_datasets'"):
        keep_order(ModuleType("lerobot_train"))


def test_streamed_datasets_are_refused():
    config = SimpleNamespace(dataset=SimpleNamespace(streaming=True))
    with pytest.raises(fr.errors.ConfigError, match="streaming=true has no rows by number"):
        EpisodeLoader(None, config)


@pytest.mark.process
def test_a_checkpoint_without_a_position_is_refused(episodes, tmp_path):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    loader = torch.utils.data.DataLoader(LeRobotDataset("me/episodes", root=episodes))
    loader.device = None
    config = SimpleNamespace(
        dataset=SimpleNamespace(streaming=False),
        policy=SimpleNamespace(drop_n_last_frames=5),
        seed=None,
        batch_size=4,
        resume=True,
        checkpoint_path=tmp_path,
    )
    with pytest.raises(fr.errors.ConfigError, match="of a training without keep_order"):
        EpisodeLoader(loader, config)


@pytest.mark.process
@pytest.mark.parametrize("order", ORDERS)
def test_killed_ranks_continue_as_any_number_of_ranks(order, tmp_path):
    assert run_kills(tmp_path, 4, seed=1, order=order) > 8


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


@pytest.mark.process
def test_the_page_loads_frames_with_whole_chunks(episodes, tmp_path, monkeypatch):
    (tmp_path / "episodes").symlink_to(episodes)
    monkeypatch.chdir(tmp_path)
    names = follow(ROOT / "docs" / "guides" / "lerobot.md", "In a loop of your own")
    batches = names["batches"]
    frames = torch.cat([batch["index"] for batch in batches]).tolist()
    kept = sum(max(length - 7, 0) for length in LENGTHS)
    assert len(set(frames[:kept])) == kept
    assert not any(batch["action_is_pad"].any() for batch in batches)


@pytest.mark.process
def test_a_policy_learns_from_a_fuelrail_dataset_of_episodes(tmp_path, monkeypatch):
    pytest.importorskip("lerobot", reason="lerobot is not installed")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.factory import make_policy, make_pre_post_processors

    monkeypatch.chdir(tmp_path)
    features = {"observation.images.top": IMAGE, "observation.state": STATE, "action": STATE}
    write_episodes(tmp_path / "episodes", features)
    names = follow(ROOT / "docs" / "guides" / "lerobot.md", "From a Fuelrail dataset")
    chunk = {"action": [frame / 10 for frame in range(8)]}
    episodes = LeRobotDataset("me/episodes", root="episodes", delta_timestamps=chunk)
    meta = episodes.meta
    batch = next(iter(names["loader"]))
    for place, key in enumerate(batch["sample_key"]):
        _, episode, frame = key.split("-")
        item = episodes[sum(LENGTHS[: int(episode)]) + int(frame)]
        item["action"][item["action_is_pad"]] = 0  # where LeRobot repeats the last one
        for name, values in names["to_policy"](batch).items():
            torch.testing.assert_close(values[place], item[name], atol=0.01, rtol=0)
    policy_options = POLICY | {"push_to_hub": False, "use_vae": False}
    del policy_options["type"]
    config = ACTConfig(**policy_options, pretrained_backbone_weights=None)
    torch.manual_seed(0)
    policy = make_policy(config, ds_meta=meta)
    before, _ = make_pre_post_processors(config, dataset_stats=meta.stats)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    losses = []
    for batch in names["loader"]:
        loss, _ = policy(before(names["to_policy"](batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 25
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
