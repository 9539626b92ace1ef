"""Weights of a divided model from and to safetensors, one tensor at a time: no rank's memory
holds them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from fuelrail.bench.trainer.checkpoints.state import model_tensors
from fuelrail.bench.trainer.models.build import copy_share
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings
from fuelrail.pipeline.storage.files import published

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.step import Parallel

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_OF_MODEL = "model."


class WeightsReport(Settings, frozen=True, kw_only=True):
    """The names of a model on this rank that a source has filled, and what did not fit.

    ``missing``: the source does not have them, and the model keeps its own; ``unexpected``: the
    model, or this stage of it, does not have them; ``other_shape``: they were left out, with both
    shapes.
    """

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    other_shape: dict[str, str]


def load_weights(
    parallel: Parallel,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    rename: Callable[[str], str | None] = lambda name: name,
) -> WeightsReport:
    """Copy weights into a divided model, as far as names and shapes fit, and say what did not.

    ``source`` is a safetensors file, a folder of them, or a state dict. ``rename`` returns the
    model's name of a name in it, None to leave it out. Averages start again. All ranks must call
    this. Raises ConfigError for a place without weights.
    """
    tensors = model_tensors(parallel)
    targets = {name.removeprefix(_OF_MODEL): value for name, value in tensors.items()}
    loaded = list[str]()
    unexpected = list[str]()
    other_shape = dict[str, str]()
    for theirs, read in _tensors(source):
        name = rename(theirs)
        if name is None:
            continue
        if name not in targets:
            unexpected.append(name)
            continue
        value = read()
        target = targets[name]
        if value.shape != target.shape:
            other_shape[name] = f"{list(value.shape)} there, {list(target.shape)} here"
            continue
        copy_share(value, target)
        loaded.append(name)
    parallel.start_average()
    missing = sorted(targets.keys() - {*loaded, *other_shape})
    return WeightsReport(
        loaded=loaded,
        missing=missing,
        unexpected=unexpected,
        other_shape=other_shape,
    )


def _tensors(
    source: str | os.PathLike[str] | Mapping[str, Tensor],
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    if isinstance(source, Mapping):
        for name, value in source.items():
            yield name, value.detach
        return
    place = Path(source)
    paths = sorted(place.glob("*.safetensors")) or [place]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ConfigError(
            f"weights '{place}' are neither a safetensors file nor a folder of some; give one"
        )
    for file in files:
        try:
            opened: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            problem = (
                f"weights '{file}' cannot be read: {error}; take the file from where it is whole"
            )
            raise ConfigError(problem) from error
        with opened:
            for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                yield name, partial(opened.get_tensor, name)


def save_weights(
    parallel: Parallel,
    place: str | os.PathLike[str],
    *,
    average: bool = False,
) -> None:
    """Write the whole model as one safetensors file, by the names of the undivided model.

    ``average``: with the average in place of each parameter that has one. The first rank writes;
    the file appears once it is whole. All ranks must call this. Raises ConfigError for a dtype that
    the format lacks.
    """
    tensors = model_tensors(parallel)
    rank_tensors = {name.removeprefix(_OF_MODEL): value for name, value in tensors.items()}
    if average:
        rank_tensors |= parallel.average
    facts = [{name: (value.dtype, tuple(value.shape)) for name, value in rank_tensors.items()}]
    rank = dist.get_rank() if parallel.world > 1 else 0
    if parallel.world > 1:
        facts = facts * parallel.world
        dist.all_gather_object(facts, facts[rank])
    # Of each tensor the first rank that has it, or has a part of it, sends it.
    holders: dict[str, int] = {}
    for number, facts_of_rank in enumerate(facts):
        for name in facts_of_rank:
            holders.setdefault(name, number)
    header = dict[str, Any]()
    end = 0
    for name in sorted(holders):
        dtype, shape = facts[holders[name]][name]
        if dtype not in _DTYPES:
            raise ConfigError(
                f"'{name}' is of {dtype}, which safetensors cannot hold; leave it out of the state"
            )
        start = end
        end = end + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with published(Path(place)) if rank == 0 else nullcontext() as file:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for name, holder in sorted(holders.items()):
            value = rank_tensors.get(name)
            full_value = value.full_tensor() if isinstance(value, DTensor) else value
            if holder != 0 and rank in (0, holder):
                dtype, shape = facts[holder][name]
                if rank == 0:
                    full_value = torch.empty(shape, dtype=dtype, device=parallel.device)
                    dist.recv(full_value, holder)
                elif full_value is not None:
                    dist.send(full_value.contiguous(), 0)
            if file is not None and full_value is not None:
                values = full_value.detach().cpu().contiguous().reshape(-1)
                file.write(values.view(torch.uint8).numpy().tobytes())
    if parallel.world > 1:
        dist.barrier()  # the caller may read the file on any rank
