"""What a checkpoint holds: tensors by name, whole over all ranks, and plain values.

Names are those of the whole model on one process: no wrapper, stage or rank is in them. So a
checkpoint of one mesh restores on any other; each rank loads the tensors, or the parts of DTensors,
that it has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fuelrail.bench.trainer.checkpoints.store import RunState
from fuelrail.bench.trainer.strategies.step import named_parameters

if TYPE_CHECKING:
    from fuelrail.bench.trainer.strategies.step import Parallel

_OF_DDP = "module."  # its prefix of names


def tensors_of(parallel: Parallel, rank: int) -> dict[str, Tensor]:
    """Return the tensors of this rank by name, as they are: model, optimiser, and this rank's
    random generators.
    """
    state = _inner(parallel.optimiser).state
    moments = {
        f"optimiser.{name}.{key}": value
        for name, parameter in named_parameters(parallel.models)
        for key, value in state.get(parameter, {}).items()
        if value is not None  # the momentum of a parameter that has had no gradient
    }
    averages = {f"average.{name}": value for name, value in parallel.average.items()}
    # Those of Python and NumPy as float64.
    _, python_words, python_gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    _, numpy_words, *numpy_rest = numpy_state
    if python_gauss is None:
        python_gauss = math.nan
    generators = {
        f"rng.{rank}.cpu": torch.get_rng_state(),
        f"rng.{rank}.python": torch.tensor([*python_words, python_gauss], dtype=torch.float64),
        f"rng.{rank}.numpy": torch.tensor([*numpy_words, *numpy_rest], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return model_tensors(parallel) | moments | averages | generators


def model_tensors(parallel: Parallel) -> dict[str, Tensor]:
    """Return the parameters and buffers of this rank's part of the model."""
    states = (module.state_dict() for module in parallel.models)
    return {
        f"model.{name.removeprefix(_OF_DDP)}": value
        for state in states
        for name, value in state.items()
    }


def targets_of(
    parallel: Parallel,
    saved: Collection[str],
    rank: int,
    world_size: int,
) -> dict[str, Tensor]:
    """Return the tensors of this rank that were saved, to load into; those of the optimiser are
    made first.

    A rank that was not there when the state was saved takes the generators of rank ``rank %
    world_size``.
    """
    optimiser = _inner(parallel.optimiser)
    # A step without gradients makes its state.
    get_optimizer_state_dict(nn.ModuleList(parallel.models), optimiser)
    stepped = {name.rpartition(".")[0] for name in saved}
    for name, parameter in named_parameters(parallel.models):
        if f"optimiser.{name}" not in stepped:
            optimiser.state.pop(parameter, None)
    tensors = tensors_of(parallel, rank % world_size)
    return {name: value for name, value in tensors.items() if name in saved}


def progress_of(parallel: Parallel, loader_state: Mapping[str, Any]) -> RunState:
    """Return all state that is not a tensor."""
    schedule = parallel.schedule.last_epoch
    scaler = parallel.scaler.state_dict()
    return RunState(loader=dict(loader_state), schedule=schedule, scaler=scaler)


def put_back(
    parallel: Parallel,
    tensors: Mapping[str, Tensor],
    progress: RunState,
) -> None:
    """Give loaded values to generators, schedule and scaler; tensors of model and optimiser were
    loaded in place.

    The learning rate is that of this run's settings after as many steps.
    """
    for name, value in tensors.items():
        if name.startswith("rng."):
            generator = name.rpartition(".")[2]
            if generator == "python":
                *words, gauss = value.tolist()
                if math.isnan(gauss):
                    gauss = None
                random.setstate((3, tuple(map(int, words)), gauss))
            elif generator == "numpy":
                *words, place, has_gauss, gauss = value.tolist()
                numbers = np.array(words, np.uint32)
                state = ("MT19937", numbers, int(place), int(has_gauss), gauss)
                np.random.set_state(state)
            elif generator == "cpu":
                torch.set_rng_state(value)
            else:
                torch.cuda.set_rng_state(value)
    if not any(name.startswith("average.") for name in tensors):
        parallel.start_average()
    parallel.start_schedule(progress.schedule)
    if progress.scaler:  # that of a run without fp16 has no state
        parallel.scaler.load_state_dict(progress.scaler)


def _inner(optimiser: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser with the state: the one in ZeroRedundancyOptimizer, for this rank's
    share.
    """
    # Not by its class: the import of torch.distributed.optim takes long, and warns.
    inner: torch.optim.Optimizer = getattr(optimiser, "optim", optimiser)
    return inner
