"""Batches to their device: an own copy stream on CUDA, nothing on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class CudaTransfer:
    """Copies a batch's tensors to a CUDA device on a stream of its own; one thread calls it, ahead of the trainer.

    The source tensors should be pinned. The call returns when the copy is complete, so a pinned buffer can go back to
    its pool, and the stage's busy time is the host-to-device time. :meth:`hand_over` must then be called on the
    consumer's thread: it ties the memory to the consumer's stream, so that the allocator does not give it away while
    kernels queued there still read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Copy every tensor of the batch, lists of tensors included."""
        with torch.cuda.stream(self._stream):
            moved = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        self._stream.synchronize()
        return moved

    def hand_over(self, batch: dict[str, Any]) -> None:
        """Record the consumer's current stream on every tensor.

        No wait is needed: the copy was complete before the batch left :meth:`__call__`.
        """
        current = torch.cuda.current_stream(self._device)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        map_tensors(batch, record)


def map_tensors(batch: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Apply ``change`` to each tensor of a batch and of its lists; everything else stays."""

    def visit(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, list):
            return [visit(entry) for entry in value]
        return value

    return {name: visit(value) for name, value in batch.items()}
