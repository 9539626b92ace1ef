"""``python -m support.ray_failures EXAMPLES DATASET CHECKPOINTS HOW``: Ray Train, whose workers die.

HOW: "again" starts as many workers again; "more" begins with one, as the cluster has no room for
two, and goes on with two.
"""

from __future__ import annotations

import sys

import ray


def main(examples: str, dataset: str, checkpoints: str, how: str) -> None:
    sys.path.insert(0, examples)
    import ray_train

    ray.init(num_cpus=2)
    if how == "more":

        @ray.remote(num_cpus=1)
        class Tenant:
            """Holds a CPU."""

            def ready(self) -> None:
                """Return once it has it."""

        tenant = Tenant.options(name="tenant", lifetime="detached").remote()
        ray.get(tenant.ready.remote())

    steps: list[int] = []

    def die(step: int) -> None:
        steps.append(step)
        if steps != [0, 1, 2, 3, 4]:  # a worker that was started again begins later
            return
        if how == "more":
            ray.kill(ray.get_actor("tenant"))
        raise RuntimeError("a worker dies, for the test's sake")

    ray_train.main([dataset, "--steps", "8", "--checkpoint", checkpoints], after_step=die)


if __name__ == "__main__":
    main(*sys.argv[1:])
