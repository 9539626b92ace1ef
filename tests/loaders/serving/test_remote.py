"""Batches made by Ray actors: those of this process, whatever dies, each in its turn and once."""

from __future__ import annotations

from itertools import islice

import pytest

from fuelrail.loaders import ImageAugment, OrderSpec
from fuelrail.pipeline.errors import ConfigError, SchemaError, StageError
from support.batches import TINY, copied, load, unlike
from support.ray_cluster import ray_cluster
from support.transforms import failing

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fuelrail[ray]'")
from fuelrail.loaders import RemoteWorkers  # noqa: E402

TRAIN = ImageAugment(height=32, width=48, train=True, resize_range=(0.6, 0.9), flip_prob=0.5)
pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as made:
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
        ray.shutdown()


def away(*args, num_workers=3, **options):
    return load(*args, where=RemoteWorkers(num_workers=num_workers), **options)


CASES = {
    "shuffled": {"image": TRAIN, "points": True},
    "windows, two views": {"image": TRAIN, "frames": [-1, 0], "two_views": True},
    "lanes": {"order": OrderSpec(kind="lanes"), "image": TINY},
    "static, not dropped": {"static": True, "image": TINY, "drop_last": False},
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_threads_for_three_epochs_and_after_a_resume(tiny, cluster, name):
    options = CASES[name]
    with load(tiny, **options) as loader:
        expected = [copied(batch) for _ in range(3) for batch in loader]
        num_batches = len(loader)
    with away(tiny, **options) as loader:
        found = [copied(batch) for batch in islice(loader, 2)]
        state = loader.state_dict()
    with away(tiny, **options) as loader:
        loader.load_state_dict(state)
        found += [copied(batch) for _ in range(3) for batch in loader]
        assert loader.stats().storage.spans > 0
    assert unlike(expected, found[: 3 * num_batches]) == []


def test_actors_and_nodes_that_die_cost_no_batch(tiny, cluster):
    with load(tiny, 1, image=TINY) as loader:
        expected = [copied(batch) for _ in range(3) for batch in loader]
    found, num_killed = [], 0
    with away(tiny, 1, image=TINY) as loader:
        for epoch in range(3):
            for at, batch in enumerate(loader):
                found.append(batch)
                if at % 4 == 1 and loader._away._actors:
                    ray.kill(loader._away._actors[0].handle)
                    num_killed += 1
                if (epoch, at) == (1, 2):
                    cluster.tell("kill")
                if (epoch, at) == (2, 2):
                    cluster.tell("add")
    assert num_killed > 10
    assert unlike(expected, found) == []


def test_an_error_is_that_of_the_actor(tiny, cluster):
    options = {"order": OrderSpec(kind="sequential"), "image": TINY, "transform": failing}
    with away(tiny, 1, **options) as loader, pytest.raises((StageError, SchemaError, ConfigError)) as caught:
        list(loader)
    assert caught.value.__cause__ is not None


def test_more_actors_are_started_while_the_trainer_waits(tiny, cluster):
    options = {"image": TINY, "where": RemoteWorkers(num_workers=3, min_workers=1)}
    with load(tiny, 1, **options) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        assert 2 <= len(loader._away._actors) <= 3
