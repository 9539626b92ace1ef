"""The training loop: one function, from top to bottom, with a clock reading between any two of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuelrail.bench.measure.records import StepRecord

if TYPE_CHECKING:
    from fuelrail.bench.measure.clock import Clock
    from fuelrail.bench.trainer.strategies.parallel import Parallel


def train(
    parallel: Parallel,
    batches: Iterable[Mapping[str, Any]],
    clock: Clock,
    *,
    num_steps: int | None = None,
    accumulation: int = 1,
    first_step: int = 0,
) -> Iterator[StepRecord]:
    """Train on ``batches`` and yield a record after each optimiser step.

    ``parallel`` is a model on its accelerator's device, divided over the ranks. ``batches`` is any iterable of the
    loader's batches, over as many epochs as there shall be; the run ends with it, or after ``num_steps`` optimiser
    steps, of which ``first_step`` were done before. Micro-batches that no longer fill a step are left out. Images that
    count are those of real rows (``valid``) and present cameras (``cam_valid``), on one rank of those that share them.
    Raises FuelrailError when fp16 keeps overflowing.
    """
    source, accelerator, step = iter(batches), parallel.accelerator, first_step
    assert accelerator is not None, "parallelise() has it"
    start_ns = clock.now_ns()
    while num_steps is None or step < num_steps:
        data_wait_ns = epoch = 0
        losses, presences = [], []
        for micro in range(accumulation):
            asked_ns = clock.now_ns()
            batch = next(source, None)
            if batch is None:
                return
            data_wait_ns += clock.now_ns() - asked_ns
            epoch = int(batch["epoch"])

            inputs = parallel.inputs(batch)
            with accelerator.host_to_device(sum(tensor.nbytes for tensor in inputs)):
                inputs = tuple(tensor.to(accelerator.torch_device, non_blocking=True) for tensor in inputs)

            # Gradients are reduced once a step, in the backward pass of its last micro-batch.
            samples, cameras = batch["img"].shape[:2]
            size, last = (samples, samples * cameras), micro == accumulation - 1
            loss = parallel.forward_backward(inputs, size, accumulation=accumulation, last=last)
            losses.append(loss)
            presences.append((batch["valid"], batch["cam_valid"]))
            # While we wait for the next batch the loader may use this one's buffer for another: no new memory.
            del batch, inputs, loss

        with accelerator.optimiser():
            parallel.update()

        device = accelerator.finish_step()
        # From here on nothing is queued on the device, so reading its tensors waits for no work.
        total_loss = float(parallel.own_loss(torch.stack(losses).sum()))
        rows = [real_rows(*presence) for presence in presences] if parallel.counts else []
        end_ns = clock.now_ns()
        yield StepRecord.of(
            device,
            start_ns=start_ns,
            end_ns=end_ns,
            data_wait_ns=data_wait_ns,
            loss=total_loss,
            step=step,
            epoch=epoch,
            num_samples=sum(samples for samples, _ in rows),
            num_images=sum(images for _, images in rows),
        )
        # What the caller did with the record belongs to the next step: no gap in the wall time.
        start_ns = end_ns
        step += 1


def real_rows(valid: Tensor, cam_valid: Tensor) -> tuple[int, int]:
    """Count samples [B] without padding, and their images [B, N] without missing cameras."""
    return int(valid.sum()), int((cam_valid != 0)[valid].sum())
