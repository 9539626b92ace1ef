"""Batches to their device: an own copy stream on CUDA, nothing on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def require_cuda(what: str) -> None:
    """Raise ConfigError unless torch finds a CUDA device; ``what`` is the argument that asks for one."""
    if torch.cuda.is_available():
        return
    built = torch.version.cuda
    reason = "this torch was built without CUDA" if built is None else f"torch (CUDA {built}) finds no usable GPU"
    raise ConfigError(f"{what} needs CUDA, but {reason}; leave it out to keep batches in host memory")


def make_transfer(
    device: torch.device | str | int | None, then: Callable[[Any], Any] | None = None
) -> CudaTransfer | None:
    """What brings batches to a device: nothing for None or the CPU. Raises ConfigError for any but CPU and CUDA.

    ``then`` is called with each batch on the device, on the copy's stream; its result is handed on.
    """
    try:
        target = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device that torch knows: use 'cpu', 'cuda' or 'cuda:N'") from error
    if target.type == "cpu":
        return None
    if target.type != "cuda":
        raise ConfigError(f"device={device!r} is not served: use 'cpu', 'cuda' or 'cuda:N', and move batches yourself")
    require_cuda(f"device={device!r}")
    if target.index is not None and target.index >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: torch finds {torch.cuda.device_count()} CUDA devices, numbered from 0")
    if str(target) == "cuda":  # now, not when a batch is handed over: that is in another thread, or on another device
        target = torch.device("cuda", torch.cuda.current_device())
    return CudaTransfer(target, then)


class CudaTransfer:
    """Copies a batch's tensors to a CUDA device on a stream of its own; one thread calls it, ahead of the trainer.

    The source tensors should be pinned. The call returns when the copy is complete, so a pinned buffer can go back to
    its pool, and the stage's busy time is the host-to-device time. :meth:`hand_over` must then be called on the
    consumer's thread: it ties the memory to the consumer's stream, so that the allocator does not give it away while
    kernels queued there still read it.
    """

    def __init__(self, device: torch.device, then: Callable[[Any], Any] | None = None) -> None:
        self._device, self._then = device, then
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Any:  # noqa: ANN401
        """Copy every tensor of the batch, those in dicts, lists and tuples included."""
        with torch.cuda.stream(self._stream):
            moved = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
            if self._then is not None:
                moved = self._then(moved)
        self._stream.synchronize()
        return moved

    def hand_over(self, batch: Any) -> None:  # noqa: ANN401
        """Record the consumer's current stream on every tensor.

        No wait is needed: the copy was complete before the batch left :meth:`__call__`.
        """
        current = torch.cuda.current_stream(self._device)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        map_tensors(batch, record)


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401
    """Apply ``change`` to each tensor of a batch, in dicts, lists and tuples to any depth; everything else stays."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch
