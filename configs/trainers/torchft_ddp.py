"""torchft: replicas that die and join while the others train on, ``torchrun --nproc-per-node=1
configs/trainers/torchft_ddp.py DATASET`` for each, beside one ``torchft_lighthouse``.

Each step begins with a quorum. `elastic_steps` reshapes the loader to the replicas in it, so the
global batch stays the same, and repeats a step that was not committed. A replica that joins is
healed from another one: weights, optimiser and the loader's position. The gradients are averaged
here, since torchft 0.2.0's DistributedDataParallel ends with an AssertionError where another replica
dies in the all-reduce. Needs ``pip install torchft``, and TORCHFT_LIGHTHOUSE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from example import TRANSFORMS, arguments, build_model, forever, inputs, report, targets
from torch.nn.functional import mse_loss
from torchft import Manager, ProcessGroupGloo

from fuelrail import DataLoader, World, rank_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GLOBAL_BATCH = 6


def elastic_steps(
    manager: Any, loader: DataLoader, optimiser: torch.optim.Optimizer, num_steps: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and this replica's batch of each step until so many are committed; the body
    of the loop is forward and backward, gradients are averaged and the optimiser's step is made
    here.
    """
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    loader.commit()  # from here on, states and repeated steps are those after the last commit
    batches = forever(loader)
    while (step := manager.current_step()) < num_steps:
        manager.start_quorum()  # which heals a replica that is behind
        world = World(manager.participating_rank(), manager.num_participants())
        if world != loader.world:
            loader.reshape(world)
        step = manager.current_step()
        optimiser.zero_grad()
        yield step, next(batches)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for work in [manager.allreduce(gradient) for gradient in gradients]:
            work.wait()  # an error is the manager's: the step is not committed
        if manager.should_commit():
            optimiser.step()
            loader.commit()
        else:
            loader.rollback()


def main(argv: Sequence[str] | None = None) -> None:
    """Train one replica."""
    options = arguments(argv)
    model = build_model()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(
        options.dataset,
        GLOBAL_BATCH,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        world=World(),  # as one rank: the quorum says which one it is
    )

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        loader.load_state_dict(state["loader"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=lambda: {
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "loader": loader.state_dict(),
        },
        min_replica_size=1,
        use_async_quorum=False,  # the step's rows depend on the quorum
    )
    for step, batch in elastic_steps(manager, loader, optimiser, options.steps):
        loss = mse_loss(model(inputs(batch)), targets(batch))
        (loss * rank_weight(batch)).backward()  # the average over replicas is that of the batch
        report(step, loss.item(), batch)
    loader.close()
    manager.shutdown()


if __name__ == "__main__":
    main()
