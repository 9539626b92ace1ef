"""Batches made by Ray actors: those of this process, whatever dies, each in its turn and once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import chain, repeat

import pytest

from fuelrail import OrderSpec, World
from fuelrail.pipeline.errors import ConfigError, SchemaError, StageError
from support.batches import TINY, TRAIN, check_equal_elsewhere, copied, load, unlike
from support.ray_cluster import ray_cluster
from support.remote_kills import batches_through_kills
from support.transforms import failing

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
from fuelrail import RemoteWorkers  # noqa: E402

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its dependencies
]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(3) as local_cluster:
        ray.init(
            address=local_cluster.address,
            log_to_driver=False,
            configure_logging=False,
        )
        yield local_cluster
        ray.shutdown()


def load_remotely(*args, num_workers=3, **options):
    return load(*args, where=RemoteWorkers(num_workers=num_workers), **options)


CASES = {
    "shuffled": {"image": TRAIN, "points": True},
    "windows, two views": {
        "image": TRAIN,
        "frames": [-1, 0],
        "two_views": True,
    },
    "lanes": {"order": OrderSpec(kind="lanes"), "image": TINY},
    "static, not dropped": {"static": True, "image": TINY, "drop_last": False},
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_threads_for_three_epochs_and_after_a_resume(tiny, cluster, name):
    check_equal_elsewhere(tiny, load_remotely, CASES[name])


def test_actors_go_on_after_a_change_of_ranks(tiny, cluster):
    with load(tiny, 6, image=TINY) as loader:
        expected = [copied(batch)["sample_key"] for _ in range(2) for batch in loader]
    with load_remotely(tiny, 6, image=TINY) as loader:
        loader.commit()
        steps = chain.from_iterable(repeat(loader))
        for step, (rank, size) in enumerate([(0, 1), (1, 4), (2, 3), (0, 2), (3, 5)]):
            loader.reshape(World(rank, size))
            next(steps)
            loader.rollback()
            rows = slice(rank * 6 // size, (rank + 1) * 6 // size)
            assert next(steps)["sample_key"] == expected[step][rows]
            loader.commit()


def test_actors_and_nodes_that_die_cost_no_batch(tiny, cluster):
    with load_remotely(tiny, 1, image=TINY) as loader:
        received, killed = batches_through_kills(loader, cluster, 9, seed=3)
        num_batches = len(loader)
    with load(tiny, 1, image=TINY) as loader:
        expected = [copied(batch) for _ in range(len(received) // num_batches) for batch in loader]
    assert killed == {"actor": 8, "node": 1}
    assert unlike(expected, received) == []


def test_an_error_is_that_of_the_actor(tiny, cluster):
    options = {
        "order": OrderSpec(kind="sequential"),
        "image": TINY,
        "transform": failing,
    }
    with (
        load_remotely(tiny, 1, **options) as loader,
        pytest.raises((StageError, SchemaError, ConfigError)) as caught,
    ):
        list(loader)
    assert caught.value.__cause__ is not None


def test_the_number_of_actors_follows_the_trainers_wait_between_its_limits(tiny, cluster):
    options = {
        "image": TINY,
        "where": RemoteWorkers(num_workers=3, min_workers=2),
    }
    with load(tiny, 1, **options) as loader:
        num_actors = [loader._client.transport.num_wanted]
        while max(num_actors) < 3:
            num_actors += [loader._client.transport.num_wanted for _ in loader]
        while num_actors[-1] > 2:
            for _ in loader:
                num_actors.append(loader._client.transport.num_wanted)
                time.sleep(0.4)
        assert set(num_actors) == {2, 3}
        assert len(loader._client.transport.actors) == 2


def test_an_actor_that_no_node_has_a_cpu_for_does_not_hold_up_the_others(tiny, cluster):
    """Two of the five actors never start: what is asked of them is asked of others, and little is from then on."""
    with load(tiny, 1, image=TINY) as loader:
        expected = [copied(batch) for _ in range(3) for batch in loader]
    with load_remotely(tiny, 1, num_workers=5, image=TINY) as loader:
        received = [copied(batch) for _ in range(3) for batch in loader]
        stuck = sorted(actor.num_asked for actor in loader._client.transport.actors)[-2:]
    assert unlike(expected, received) == []
    assert all(0 < count < len(received) / 4 for count in stuck)


def test_a_cluster_is_started_where_there_is_none(tiny):
    """It must not end with the thread of the first iteration."""
    script = f"""
from fuelrail import RemoteWorkers
from support.batches import TINY, copied, load, unlike
with load({str(tiny)!r}, image=TINY) as loader:
    expected = [copied(batch) for _ in range(2) for batch in loader]
with load({str(tiny)!r}, image=TINY, where=RemoteWorkers(num_workers=1)) as loader:
    found = [copied(batch) for batch in loader]
    loader.close()
    found += [copied(batch) for batch in loader]
assert found
assert unlike(expected, found) == []
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
