"""Train a model of the caller's own: a loop with checkpoints, evaluation, averages and logs; one
function each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fuelrail.bench.trainer import loop
from fuelrail.bench.trainer.strategies.step import to_device
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Positive, Settings, make_options

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepRecord
    from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
    from fuelrail.bench.trainer.strategies.step import Parallel
    from fuelrail.loaders.loader import DataLoader

Scores = Mapping[str, Tensor | Sequence[Any]]


class Log(Protocol):
    """Takes values by name: the method ``log`` of a W&B run, or ``mlflow.log_metrics``, as they
    are.
    """

    def __call__(self, values: dict[str, Any], /, step: int) -> object:
        """Note the values after a number of steps."""


class LoopOptions(Settings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.train`.

    ``steps`` are optimiser steps in all, those before a resume included; each takes
    ``accumulation`` batches. Checkpoints are saved every ``save_every`` steps and after the last
    one, an evaluation is made every ``evaluate_every`` steps and after the last one. ``average`` is
    the decay of an exponential moving average of the parameters, such as 0.999, which is then what
    is evaluated.
    """

    steps: Positive
    accumulation: Positive = 1
    save_every: Positive = 100
    evaluate_every: Positive | None = None
    average: float | None = None


def train(
    parallel: Parallel,
    loader: DataLoader,
    options: LoopOptions | None = None,
    *,
    checkpoints: Checkpoints | None = None,
    evaluate: Callable[[], Scores] | None = None,
    log: Log | Sequence[Log] = (),
    on_step: Callable[[StepRecord, dict[str, float]], object] | None = None,
    on_evaluate: Callable[[int, Scores], object] | None = None,
    **changes: Any,  # fields of LoopOptions
) -> None:
    """Train from the newest checkpoint to a number of steps: ``fr.bench.train(parallel, loader,
    steps=1000)``.

    ``on_step`` gets the record of each step on this rank, and its losses by name, the means over
    all ranks; ``on_evaluate`` the number of steps and what ``evaluate`` returned, mostly
    :func:`evaluate`. The first rank calls ``log``, a function or several, with the losses and
    learning rate of a step, and with the means of what is evaluated to one number a sample. All
    ranks must call this. Raises ConfigError, and what :meth:`Checkpoints.restore` raises.
    """
    options = make_options(LoopOptions, options, changes)
    logs: Sequence[Log] = [log] if callable(log) else log
    for number, function in enumerate(logs):
        if not callable(function):
            raise ConfigError(
                f"log={log!r} must be a function of values and step, such as wandb.init().log, or "
                f"a list of them; entry {number} is {type(function).__name__}"
            )
    parallel.decay = options.average
    parallel.start_average()
    restored = None if checkpoints is None else checkpoints.restore(parallel, loader)
    first = restored.step if restored else 0
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    num_steps = options.steps
    accumulation = options.accumulation
    source = loop.batches(loader, None)
    steps = loop.train(
        parallel,
        source,
        num_steps=num_steps,
        accumulation=accumulation,
        first_step=first,
    )
    for done, record in enumerate(steps, start=first + 1):
        losses_here = {"loss": record.loss or 0.0}
        for name, value in sorted(parallel.losses.items()):
            losses_here[name] = float(value)
        losses = parallel.over_ranks(losses_here)
        values = {
            **losses,
            "learning_rate": parallel.optimiser.param_groups[0]["lr"],
        }
        if on_step is not None:
            on_step(record, losses)
        if evaluate is not None and _due(done, options.evaluate_every, num_steps):
            scores = evaluate()
            for name, mean in means(scores).items():
                values[f"evaluation/{name}"] = mean
            if on_evaluate is not None:
                on_evaluate(done, scores)
        for function in logs if is_first else ():
            function(values, step=done)
        if checkpoints is not None and _due(done, options.save_every, num_steps):
            checkpoints.save(done, parallel, loader.state_dict())
    if checkpoints is not None:
        checkpoints.wait()


def _due(done: int, every: int | None, last: int) -> bool:
    return done == last or (every is not None and done % every == 0)


def evaluate(
    parallel: Parallel,
    loader: DataLoader,
    score: Callable[[Any, Mapping[str, Any]], Scores],
) -> dict[str, Any]:
    """Return the scores of each sample of a split, each sample once, in the loader's order; the
    same on all ranks.

    The model is called in evaluation mode with each batch of ``loader``, which has neither
    ``shuffle`` nor ``drop_last``; ``score(outputs, batch)`` returns by name a tensor [B, ...] or a
    list of B entries. Repeated samples (``valid``) are left out. The result has the samples of all
    ranks along the first axis, and their ``sample_key``. All ranks must call this. Raises
    ConfigError for a pipeline.
    """
    scores_here: list[dict[str, Any]] = []
    with parallel.evaluating() as model:
        for batch_loaded in loader:
            batch = to_device(batch_loaded, parallel.device)
            scores = {
                "sample_key": batch["sample_key"],
                **score(model(batch), batch),
            }
            is_real = batch["valid"].tolist()
            rows = [row for row, real in enumerate(is_real) if real]
            real_scores: dict[str, Any] = {}
            for name, values in scores.items():
                if isinstance(values, Tensor):
                    real_scores[name] = values.detach().cpu()[rows]
                else:
                    entries = [values[row] for row in rows]
                    real_scores[name] = to_device(entries, torch.device("cpu"))
            scores_here.append(real_scores)
    scores_by_rank: list[list[dict[str, Any]]] = [scores_here]
    if parallel.world > 1:
        scores_by_rank = [[] for _ in range(parallel.world)]
        dist.all_gather_object(scores_by_rank, scores_here if parallel.counts else [])
    ranks_that_count = filter(None, scores_by_rank)
    steps = zip(*ranks_that_count, strict=True)
    batches = list(itertools.chain.from_iterable(steps))
    if not batches:
        return {}
    joined: dict[str, Any] = {}
    for name, first in batches[0].items():
        parts = [batch[name] for batch in batches]
        if isinstance(first, Tensor):
            joined[name] = torch.cat(parts)
        else:
            joined[name] = list(itertools.chain.from_iterable(parts))
    return joined


def means(scores: Scores) -> dict[str, float]:
    """Return the means of those scores that are one number a sample."""
    mean_scores = {}
    for name, values in scores.items():
        if isinstance(values, Tensor) and values.dim() == 1:
            mean_scores[name] = float(values.double().mean())
    return mean_scores
