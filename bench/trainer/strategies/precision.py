"""Low precision: autocast, and loss scaling for fp16 that all ranks agree on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from fuelrail.bench.trainer.strategies.settings import Precision

# A sixteenth of torch's: most models then skip none of their first steps, and it grows.
_FIRST_SCALE = 2.0**12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Compute in the precision what torch's autocast says can be; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


class SharedGradScaler(torch.amp.GradScaler):
    """Torch's GradScaler for gradients that are divided over ranks, as tensors and DTensors of several meshes.

    A step is skipped on all ranks if one of them has a gradient that is not finite. After ``max_skipped`` skipped steps
    in a row :meth:`step` raises FuelrailError, which shows the scaler's state.
    """

    def __init__(self, device: str, max_skipped: int) -> None:
        super().__init__(device, init_scale=_FIRST_SCALE)
        self._max_skipped = max_skipped
        self._num_skipped = 0
        self._found: Tensor | None = None

    @property
    def skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self._num_skipped > 0

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: ARG002 - torch's
    ) -> dict[torch.device, Tensor]:
        gradients = local_gradients(p for group in optimizer.param_groups for p in group["params"])
        for gradient in gradients:
            gradient.mul_(inv_scale.to(gradient.device))
        norm = get_total_norm(gradients).to(found_inf.device)
        found = torch.logical_not(torch.isfinite(norm)).to(found_inf.dtype)
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        self._found = found
        return {found.device: found}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:  # noqa: ANN401 - torch's
        """Step, or skip the step. Raises FuelrailError after too many skipped ones."""
        result = super().step(optimizer, *args, **kwargs)
        assert self._found is not None, "gradients are unscaled before a step"
        self._num_skipped = self._num_skipped + 1 if bool(self._found) else 0
        if self._num_skipped >= self._max_skipped:
            raise FuelrailError(
                f"{self._num_skipped} steps in a row had gradients that are not finite, and were skipped; the loss "
                f"scale is {self.get_scale():g} by now; lower the learning rate, clip gradients, or use bf16"
            )
        return result


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of all gradients, summed over the ranks where that is still to be done."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            found.append(gradient.to_local())
        elif gradient is not None:
            found.append(gradient)
    return found
