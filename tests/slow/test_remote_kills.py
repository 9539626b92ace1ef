"""Training on batches of Ray actors through 50 deaths of actors and nodes: each batch in its turn, and once."""

from __future__ import annotations

import pytest

from support.batches import TINY, copied, load, unlike
from support.ray_cluster import ray_cluster
from support.remote_kills import batches_through_kills

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
from fuelrail import ImageAugment, RemoteWorkers  # noqa: E402
from support.datasets import build_dataset  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.process,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
]
CASES = {
    "shuffled": {
        "shuffle": True,
        "image": ImageAugment(height=32, width=48, train=True, flip_prob=0.5),
    },
    "windows": {
        "shuffle": True,
        "image": TINY,
        "frames": [-1, 0],
        "drop_last": False,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_fifty_kills(name, tmp_path):
    build_dataset(tmp_path / "data", {"train": (9, 12, 10)})
    with ray_cluster(3) as cluster:
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            with load(
                tmp_path / "data",
                2,
                where=RemoteWorkers(num_workers=3),
                **CASES[name],
            ) as loader:
                batches, killed = batches_through_kills(loader, cluster, 50, seed=len(name))
        finally:
            ray.shutdown()
    assert killed["actor"] > 40
    assert killed["node"] >= 5
    with load(tmp_path / "data", 2, **CASES[name]) as loader:
        for epoch in range(len(batches) // len(loader)):
            expected = [copied(batch) for batch in loader]
            assert (
                unlike(
                    expected,
                    batches[epoch * len(loader) : (epoch + 1) * len(loader)],
                )
                == []
            )
    assert len(batches) % len(expected) == 0
