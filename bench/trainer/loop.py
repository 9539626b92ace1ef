"""The training loop: one function, from top to bottom, whose parts a recorder tells apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuelrail.bench.measure.recorder import Recorder
from fuelrail.bench.trainer.strategies.step import naming_keys, to_device

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import StepRecord
    from fuelrail.bench.trainer.strategies.step import Parallel
    from fuelrail.loaders.loader import DataLoader


def train(
    parallel: Parallel,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_steps: int | None = None,
    accumulation: int = 1,
    first_step: int = 0,
) -> Iterator[StepRecord]:
    """Train on ``batches`` and yield a record after each optimiser step.

    ``parallel`` is a model, divided over the ranks; without an accelerator no phase but the wait
    for data is timed. ``batches`` is any iterable of the loader's batches, over as many epochs as
    there shall be; the run ends with it, or after ``num_steps`` optimiser steps, of which
    ``first_step`` were done before. Micro-batches that no longer fill a step are left out. Images
    that count are those of real rows (``valid``) and present cameras (``cam_valid``), on one rank
    of those that share them. Raises FuelrailError when fp16 keeps overflowing.
    """
    source = iter(batches)
    accelerator = parallel.accelerator
    recorder = Recorder(None) if accelerator is None else accelerator.recorder
    step = first_step
    while num_steps is None or step < num_steps:
        epoch = 0
        losses = []
        presences = []
        for micro in range(accumulation):
            recorder.ask()
            batch = next(source, None)
            recorder.got(batch)
            if batch is None:
                return
            epoch = int(batch.get("epoch", 0))

            with naming_keys(batch):
                inputs = parallel.inputs(batch)
            with accelerator.host_to_device() if accelerator else nullcontext():
                inputs = to_device(inputs, parallel.device)

            # Gradients are reduced once a step, in the backward pass of its last micro-batch.
            size = rows_of(batch)
            last = micro == accumulation - 1
            loss = parallel.forward_backward(inputs, size, accumulation=accumulation, last=last)
            losses.append(loss)
            presence = batch.get("valid"), batch.get("cam_valid")
            presences.append(presence)
            # While we wait for the next batch the loader may use this one's buffer for another: no
            # new memory.
            del batch, inputs, loss

        with accelerator.optimiser() if accelerator else nullcontext():
            parallel.update()

        total_loss = float(parallel.own_loss(torch.stack(losses).sum()))
        rows = [real_rows(*presence) for presence in presences] if parallel.counts else []
        # What the caller does with the record belongs to the next step: no gap in the wall time.
        record = accelerator.finish_step() if accelerator else recorder.take_step()
        record.step = step
        record.epoch = epoch
        record.num_samples = sum(samples for samples, _ in rows)
        record.num_images = sum(images for _, images in rows)
        record.loss = total_loss if math.isfinite(total_loss) else None
        record.padding = None if parallel.padding is None else float(parallel.padding)
        yield record
        step += 1


def batches(loader: DataLoader, num_epochs: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield a loader's batches over epoch after epoch from where it is, without end if
    ``num_epochs`` is None.
    """
    first = int(loader.state_dict()["epoch"])
    epochs: Iterable[int] = itertools.count(first)
    if num_epochs is not None:
        epochs = range(first, num_epochs)
    for epoch in epochs:
        loader.set_epoch(epoch)
        yield from loader


def rows_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of samples, or packs, and images of a batch, padding included; 0 where
    it does not say.
    """
    img = batch.get("img")
    num_images = 0
    num_samples = len(batch.get("sample_key", ()))
    if isinstance(img, Tensor):
        num_images = math.prod(img.shape[:-3])
        num_samples = len(img)
    if "pack_offsets" in batch:
        num_samples = len(batch["pack_offsets"]) - 1
    return num_samples, num_images


def real_rows(valid: Tensor | None, cam_valid: Tensor | None) -> tuple[int, int]:
    """Count samples [B] without padding, and their images [B, ...] without missing cameras; 0
    where nothing says.
    """
    if valid is None:
        return 0, 0
    num_samples = int(valid.sum())
    if cam_valid is None:
        return num_samples, 0
    is_present = cam_valid != 0
    return num_samples, int(is_present[valid].sum())
