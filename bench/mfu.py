"""Model FLOP utilisation: the arithmetic that the model needs, over what the device could do meanwhile.

MFU as in PaLM (arXiv 2204.02311, appendix B): the forward and backward passes of the model itself count, a multiply-add
as two, recomputation does not; the peak is the dense one of the precision in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

# Dense bf16 tensor-core peaks in TFLOPS, by the data sheets (SXM where there are several).
_PEAKS_BF16 = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "A100": 312.0, "L40S": 362.0, "B200": 2250.0}
# In fp32 convolutions run on TF32 tensor cores, torch's default, at half of that.
_TF32_SHARE = 0.5


def peak_tflops(device: str, precision: str) -> float | None:
    """A device's peak by its name; None for one that isn't known."""
    for name, peak in _PEAKS_BF16.items():
        if all(word in device for word in name.split()):
            return peak if precision == "bf16" else peak * _TF32_SHARE
    return None


def count_training_flop(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Operations of one forward and backward pass of these inputs; gradients are left as they were before."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs).backward()
    for parameter in model.parameters():
        parameter.grad = None
    return int(counter.get_total_flops())
