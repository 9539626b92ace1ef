"""A real Ray cluster of several nodes on this machine: the same bytes, whatever dies."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time

import pytest

from fuelrail.pipeline.errors import ConfigError, FuelrailError, SourceError
from fuelrail.pipeline.format.manifest import WORK_FOLDER
from fuelrail.sharding.engines import ray
from fuelrail.sharding.engines.ray import RayEngine
from fuelrail.sharding.progress import Quiet
from support.ray_cluster import ray_cluster
from support.sharding import digests, environment, shard_command, shard_nuscenes

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

OPTIONS = {"shard_size_bytes": 30_000, "splits": {"train": 0.75, "val": 0.25}}
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
]


@pytest.fixture(scope="module")
def source(dataroot):
    return dataroot("a6 b6 c6 d6")


@pytest.fixture(scope="module")
def expected(source, sharded):
    return digests(sharded(source, **OPTIONS))


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as ray:
        yield ray


def test_three_nodes_give_the_same_bytes(source, expected, cluster, tmp_path):
    outcome = shard_nuscenes(
        source.root,
        tmp_path / "out",
        engine=RayEngine(cluster.address, 0),
        **OPTIONS,
    )
    assert digests(tmp_path / "out") == expected
    assert outcome.num_written == outcome.manifest.num_shards > 6


def test_nodes_that_die_in_the_middle_cost_time_only(
    source, expected, cluster, tmp_path, monkeypatch
):
    # More tasks are under way than the one node that is left asks for.
    monkeypatch.setattr(ray, "_LOOK_S", 0.0)

    class Killer(Quiet):
        num_killed = 0

        def shard_done(self, shard):
            if self.num_killed < 2:
                self.num_killed += 1
                cluster.tell("kill")

    killer = Killer()
    shard_nuscenes(
        source.root,
        tmp_path / "out",
        engine=RayEngine(cluster.address, 0),
        progress=killer,
        **OPTIONS,
    )
    for _ in range(killer.num_killed):
        cluster.tell("add")
    assert killer.num_killed == 2
    assert digests(tmp_path / "out") == expected


def test_a_cluster_without_a_node_for_the_tasks_is_not_waited_for_for_ever(
    source, cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray, "TASK_MEMORY_BYTES", 1 << 50)
    monkeypatch.setattr(ray, "NO_NODE_S", 0.5)
    monkeypatch.setattr(ray, "_LOOK_S", 0.1)
    with pytest.raises(
        FuelrailError,
        match=r"no node with 1 CPU and [\d,]+ memory for 0 s, which each task needs",
    ):
        shard_nuscenes(
            source.root,
            tmp_path / "out",
            engine=RayEngine(cluster.address, 0),
            **OPTIONS,
        )


def test_a_driver_that_is_killed_continues_with_the_same_command(
    source, expected, cluster, tmp_path
):
    out = tmp_path / "out"
    words = (
        "--seed",
        "7",
        "--shard-size",
        "30000",
        "--splits",
        "train=0.75,val=0.25",
        "--engine",
        "ray",
    )
    command = shard_command(
        f"nuscenes:{source.root}", out, *words, "--ray-address", cluster.address
    )
    variables = {**environment(), "RAY_USAGE_STATS_ENABLED": "0"}
    run = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 280
    while len(list(out.glob("*.tar"))) < 2 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    inodes = {path.name: path.stat().st_ino for path in out.glob("*.tar")}
    assert len(inodes) >= 2
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL)
    assert digests(out) == expected
    # Workers of the run that was killed may have finished a shard more; none that was there is another file now.
    assert all((out / name).stat().st_ino == inode for name, inode in inodes.items())


def test_what_is_wrong_with_the_source_is_said_once_and_with_the_node(source, cluster, tmp_path):
    root = tmp_path / "source"
    out = tmp_path / "out"
    shutil.copytree(source.root, root)
    victim = sorted((root / "samples" / "CAM_BACK").iterdir())[5]
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(
        SourceError,
        match=rf"{victim.name}.*truncated JPEG.*\(on node [0-9.]+\)",
    ):
        shard_nuscenes(root, out, engine=RayEngine(cluster.address, 0), **OPTIONS)
    assert not (out / "dataset.json").exists()
    assert list((out / WORK_FOLDER / "tmp").iterdir()) == []


def test_a_cluster_that_is_not_there(source, tmp_path):
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        shard_nuscenes(
            source.root,
            tmp_path / "out",
            engine=RayEngine("127.0.0.1:1", 0),
            **OPTIONS,
        )
