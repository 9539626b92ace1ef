"""``python -m support.ray_failures EXAMPLES DATASET CHECKPOINTS HOW``: Ray Train, whose workers die.

HOW: "again" starts as many workers again; "more" begins with one, on a cluster of one CPU, and goes
on with two, after a node has joined.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray.cluster_utils import Cluster


def main(examples: str, dataset: str, checkpoints: str, how: str) -> None:
    sys.path.insert(0, examples)
    import ray_train

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=cluster.address)
    wish = Path(checkpoints, "wish-for-a-node")
    if how == "again":
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
    steps: list[int] = []

    def die(step: int) -> None:
        steps.append(step)
        if steps != [0, 1, 2, 3, 4]:  # a worker that was started again begins later
            return
        if how == "more":
            wish.touch()
            while ray.cluster_resources()["CPU"] < 2:
                time.sleep(0.1)
            time.sleep(25)  # until Ray Train looks at the cluster again
        raise RuntimeError("a worker dies, for the test's sake")

    arguments = [dataset, "--steps", "8", "--checkpoint", checkpoints]
    training = ThreadPoolExecutor(1).submit(ray_train.main, arguments, after_step=die)
    while not training.done():
        time.sleep(0.1)
        if wish.exists():
            wish.unlink()
            cluster.add_node(num_cpus=1)  # which only the main thread can
    training.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
