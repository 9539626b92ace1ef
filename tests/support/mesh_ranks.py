"""One of four ranks; writes what its loaders do under several meshes, and what the rank check says, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fuelrail import DataLoader, World, mesh_world
from fuelrail.pipeline.errors import WorldError

MESHES = {
    "dp": ((4,), ("dp",)),
    "dp_tp": ((2, 2), ("dp", "tp")),
    "pp_dp": ((2, 2), ("pp", "dp")),
    "dp_cp": ((2, 2), ("dp", "cp")),
    "hsdp": ((2, 2), ("dp_replicate", "dp_shard")),
    "pp_hsdp_tp": ((1, 2, 1, 2), ("pp", "dp_replicate", "dp_shard", "tp")),
    "tp": ((4,), ("tp",)),
}
TRANSFORMS = {"image": {"height": 64, "width": 96, "resize": 1.0}}


def make(root: str, batch_size: int = 2, **options: object) -> DataLoader:
    return DataLoader(
        root,
        batch_size,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        num_workers=1,
        **options,
    )


def outcome(loader: DataLoader) -> object:
    try:
        with loader:
            return next(iter(loader))["sample_key"]
    except WorldError as error:
        return str(error)


def main(root: str, out: str) -> None:
    early = make(root, world=None)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    outcomes: dict[str, object] = {"early": [early.world.rank, early.world.size]}
    for name, (shape, names) in MESHES.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        loader = make(root, world=mesh, check_ranks=True)
        outcomes[name] = {
            "world": [loader.world.rank, loader.world.size],
            "keys": outcome(loader),
        }
    detected = make(root)
    outcomes["detected"] = [detected.world.rank, detected.world.size]
    expert = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    try:
        mesh_world(expert)
    except WorldError as error:
        outcomes["unclear"] = str(error)
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    worlds = {
        "stated": mesh_world(expert, ("ep",)),
        "submesh": mesh_world(pair["dp"]),
    }
    worlds["unnamed"] = mesh_world(init_device_mesh("cpu", (4,)))
    outcomes |= {name: [world.rank, world.size] for name, world in worlds.items()}

    # What goes wrong in real runs, each seen by every rank alike.
    outcomes["other seed"] = outcome(make(root, seed=7 if rank == 2 else 0, check_ranks=True))
    outcomes["other world"] = outcome(
        make(
            root,
            world=World(0, 1) if rank == 3 else World(rank, 4),
            check_ranks=True,
        )
    )
    outcomes["same rank"] = outcome(make(root, world=World(rank // 2, 4), check_ranks=True))
    resumed = make(root, check_ranks=True)
    if rank == 1:
        resumed.load_state_dict(resumed.state_dict() | {"samples_consumed": 8})
    outcomes["other position"] = outcome(resumed)

    def per_process(sample: dict[str, object]) -> dict[str, object]:
        return sample | {"noise": rank}

    outcomes["other batch"] = outcome(
        make(root, world=pair, transform=per_process, check_ranks=True)
    )
    Path(out, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
