"""Do all ranks mean the same? A check at an iteration's start, for `DataLoader(check_ranks=True)`.

Ranks whose settings differ train on wrong data without any error: the same samples twice, others never. Ranks of one
model-parallel group whose batches differ compute nonsense. Each rank sends four numbers around; only where they do not
fit, the settings themselves follow, so that the error can show both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

from fuelrail.pipeline.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuelrail.pipeline.world import World


class _Claim(msgspec.Struct, frozen=True):
    """What one process says of itself: data-parallel rank and size, digests of its settings and of its first batch."""

    rank: int
    size: int
    settings: int
    batch: int


def check_ranks_agree(settings: Mapping[str, Any], world: World, batch: object) -> None:
    """Compare settings and first batch over all processes of the default process group; every one must call this.

    ``settings`` are plain JSON types that must be equal on all ranks; ``batch`` must be equal on those with the same
    data-parallel rank. Does nothing without a process group. Raises WorldError, on all ranks alike, showing what
    differs and where.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    encoded = msgspec.json.encode(settings, order="sorted")
    claims = _gather(_Claim(world.rank, world.size, _signed(xxhash.xxh3_64_intdigest(encoded)), batch_digest(batch)))
    # Every process holds the same claims, so all of them take the same way from here on.
    if len({(claim.settings, claim.size) for claim in claims}) > 1:
        told: list[dict[str, Any]] = [{}] * len(claims)
        dist.all_gather_object(told, {"world size": world.size, **settings})
        raise WorldError(f"ranks have different loader settings; {_differences(told)}")
    first: dict[int, int] = {}
    for process, claim in enumerate(claims):
        other = first.setdefault(claim.rank, process)
        if claims[other].batch != claim.batch:
            raise WorldError(
                f"processes {other} and {process} are both data-parallel rank {claim.rank} but got different batches; "
                "a transform or collate_fn must depend on the sample alone (its `seed` included), not on the process"
            )
    missing = sorted(set(range(world.size)) - set(first))
    if missing:
        raise WorldError(
            f"no process is data-parallel rank {missing[0]} of {world.size}: {len(claims)} processes claim the ranks "
            f"{sorted(first)}; hand every one its World, or the device mesh that tells it"
        )


def batch_digest(batch: object) -> int:
    """A signed 64-bit digest of a batch's content: of tensors, arrays, numbers, strings, in dicts, lists and tuples."""
    digest = xxhash.xxh3_64()
    _feed(digest, batch)
    return _signed(digest.intdigest())


def _feed(digest: xxhash.xxh3_64, value: object) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # Numpy hands over arrays of one entry with a stride of 0, which a view as bytes would refuse.
        dense = value.as_strided((value.numel(),), (1,))
        digest.update(dense.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, dict):
        for name, entry in value.items():
            digest.update(str(name).encode())
            _feed(digest, entry)
    elif isinstance(value, (list, tuple)):
        digest.update(str(len(value)).encode())
        for entry in value:
            _feed(digest, entry)
    elif isinstance(value, (str, int, float, bool, bytes, type(None))):
        digest.update(repr(value).encode())
    # Anything else is the user's own; its repr may hold an address, so it cannot be compared.


def _gather(mine: _Claim) -> list[_Claim]:
    on_host = "cpu:" in str(dist.get_backend_config())
    device = torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
    numbers = torch.tensor([mine.rank, mine.size, mine.settings, mine.batch], device=device)
    everyone = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, numbers)
    return [_Claim(*claim.tolist()) for claim in everyone]


def _differences(told: list[dict[str, Any]]) -> str:
    lines = []
    for name in told[0]:
        values: dict[str, list[int]] = {}
        for process, settings in enumerate(told):
            values.setdefault(repr(settings.get(name)), []).append(process)
        if len(values) > 1:
            sides = [f"{value} on {_processes(processes)}" for value, processes in values.items()]
            lines.append(f"{name}: {', '.join(sides)}")
    return "; ".join(lines)


def _processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return f"rank {shown}" if len(numbers) <= 4 else f"rank {shown} and {len(numbers) - 4} more"


def _signed(digest: int) -> int:
    return digest - (1 << 63)
