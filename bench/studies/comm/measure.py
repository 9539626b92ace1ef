"""One rank of ``fuelrail bench comm``: groups of the mesh, and each collective timed at each
size.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from fuelrail.bench.measure.machine import (
    CpuUse,
    CpuWatch,
    combine_host_uses,
    machine_facts,
)
from fuelrail.bench.report.files import created_now
from fuelrail.bench.studies.comm.report import (
    KINDS,
    SCHEMA,
    VERSION,
    CommOptions,
    CommReport,
    Kind,
    timed,
)
from fuelrail.bench.trainer.strategies.parallel import make_mesh
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    degrees_of,
)

_STEP = 8  # from one size to the next


def measure(options: CommOptions) -> CommReport:
    """Measure as one of the ranks that the environment names; all of them return the same report.

    Raises ConfigError for a mesh of another number of ranks.
    """
    cuda = torch.cuda.is_available()
    backend = options.backend
    if backend == "auto":
        backend = "nccl" if cuda else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        world = dist.get_world_size()
        dist.barrier()
        watch = CpuWatch()
        sizes = []
        size = options.smallest
        while size < options.largest:
            sizes.append(size)
            size *= _STEP
        sizes.append(options.largest)
        everyone = dist.group.WORLD
        assert everyone is not None, "the process group is initialised"
        mesh = None
        if options.mesh is not None:
            degrees = degrees_of(ParallelSettings(mesh=options.mesh), world)
            mesh = make_mesh(degrees, device.type)
        if mesh is not None:
            axes = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
            groups = {axis: group for axis, group in axes.items() if group.size() > 1}
        elif options.mesh is not None:  # copies of whole models
            groups = {"dp_replicate": everyone}
        else:
            groups = {"all": everyone}
        collectives = []
        for axis, group in groups.items():
            for kind, size in itertools.product(KINDS, sizes):
                ranks = group.size()
                elements = max(1, size // 4 // ranks) * ranks
                tensor = torch.ones(elements, device=device)
                collective = _collective(kind, group, tensor)
                times = []
                for number in range(options.warmup + options.repeats):
                    dist.barrier(group)
                    _wait(device)
                    started_s = time.perf_counter()
                    collective()
                    _wait(device)
                    if number >= options.warmup:
                        times.append(time.perf_counter() - started_s)
                median_s = statistics.median(times)
                slowest = torch.tensor(median_s, device=device, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                timed_collective = timed(
                    kind,
                    axis=axis,
                    ranks=ranks,
                    num_bytes=elements * 4,
                    seconds=float(slowest),
                )
                collectives.append(timed_collective)
        uses_by_rank: list[tuple[str, CpuUse]] = [("", watch.use())] * world
        dist.all_gather_object(uses_by_rank, (os.uname().nodename, watch.use()))
        uses_by_host: dict[str, list[CpuUse]] = {}
        for host, use in uses_by_rank:
            uses_by_host.setdefault(host, []).append(use)
        uses = [combine_host_uses(uses_of_host) for uses_of_host in uses_by_host.values()]
        disturbances = [use.disturbed for use in uses if use.disturbed is not None]
        warnings = []
        if cuda and backend == "gloo":
            warnings.append(
                "The collectives ran on gloo, over the hosts' memory and network, though "
                "this machine has GPUs: training with nccl is far faster. Use --backend nccl."
            )
        return CommReport(
            schema=SCHEMA,
            version=VERSION,
            created=created_now(),
            machine=machine_facts(),
            backend=backend,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            nodes=len(uses),
            ranks=world,
            options=options,
            timed=collectives,
            warnings=warnings,
            disturbed=disturbances[0] if disturbances else None,
        )
    finally:
        dist.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collective(
    kind: Kind,
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
) -> Callable[[], object]:
    """Return the function that reduces, gathers or scatters the tensor, or sends it to the next
    rank.
    """
    ranks = group.size()
    rank = dist.get_rank(group)
    part = tensor.new_empty(tensor.numel() // ranks)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(tensor, group=group)
    if kind == "all_gather":
        # Torch 2.13 has other names for both, and warns of these.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(tensor, part, group=group)
    if kind == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter(part, tensor, group=group)
    received = torch.empty_like(tensor)
    to = dist.get_global_rank(group, (rank + 1) % ranks)
    source = dist.get_global_rank(group, (rank - 1) % ranks)

    def send() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, to, group),
                dist.P2POp(dist.irecv, received, source, group),
            ]
        )
        for work in works:
            work.wait()

    return send


def main(arguments: Sequence[str]) -> int:
    """Run ``OPTIONS OUT PARENT``: one rank of this host; rank 0 writes the report."""
    options = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=CommOptions)
    rank = int(os.environ["RANK"])
    report = measure(options)
    if rank == 0:
        Path(arguments[1]).write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
