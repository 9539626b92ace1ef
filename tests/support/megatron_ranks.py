"""Two modules of other data-parallel degrees under Megatron-Core read one global batch; run as ranks on gloo.

The modules share the ranks: the parallel state of each divides them by its own tensor parallelism. Or each has ranks
of its own, in a grid of Megatron's.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid

import fuelrail as fr

GLOBAL_BATCH = 12


def batches_of(world):
    """The first batches of a rank; world None: as Megatron has it."""
    sampler = fr.order.BatchSampler(
        120, fr.OrderSpec(seed=7), global_batch=GLOBAL_BATCH, world=world
    )
    return sampler.world, [sampler[step] for step in range(20)]


def joined(gathered):
    """The global batches of a module: the rows of one rank of each data-parallel degree, one after the other."""
    by_rank = {}
    for world, batches in gathered:
        assert by_rank.setdefault(world.rank, batches) == batches, "tensor ranks have the same rows"
    steps = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
    return len(by_rank), [[row for rows in parts for row in rows] for parts in steps]


def share_ranks(tensor_parallel):
    """Read as a module with this tensor parallelism on all ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, batches_of(None))
    parallel_state.destroy_model_parallel()
    return joined(gathered)


def split_ranks(encoder, decoder):
    """Read as the module that has this rank: degree and tensor parallelism of the first, and of the second."""
    shapes = {0: encoder, encoder[0] * encoder[1]: decoder}
    for offset, (degree, tensor_parallel) in shapes.items():
        grid = HyperCommGrid(
            [tensor_parallel, degree], ["tp", "dp"], rank_offset=offset, backend="gloo"
        )
        group = grid.create_pg("dp")
        if offset <= dist.get_rank() < offset + degree * tensor_parallel:
            world = fr.World(rank=group.rank(), size=group.size())
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, batches_of(world))
    middle = encoder[0] * encoder[1]
    return joined(gathered[:middle]), joined(gathered[middle:])


def main():
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    alone = batches_of(fr.World())[1]
    assert share_ranks(1) == (size, alone)
    assert share_ranks(3) == (size // 3, alone)
    if size == 6:
        assert split_ranks((3, 1), (1, 3)) == ((3, alone), (1, alone))
        assert split_ranks((4, 1), (1, 2)) == ((4, alone), (1, alone))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
