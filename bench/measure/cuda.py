"""A CUDA GPU as an accelerator: phases timed by events on the compute stream.

The step ends with one wait for the device (``finish_step``). That costs the run-ahead of the host
over the step's end, well under a millisecond, and can only lower occupancy. Between two events the
device may idle on a slow launch; that counts as busy here, as it does in MLPerf's published times:
the kernel-level view is NVML's and the profiler's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fuelrail.bench.measure.accelerator import Accelerator
from fuelrail.bench.measure.clock import NS_PER_MS, record_event

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.cuda import Event

    from fuelrail.bench.measure.records import StepRecord

# Dense bf16 tensor-core peaks in TFLOPS, by the data sheets (SXM where there are several).
_PEAKS_BF16 = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}

# In fp32 convolutions run on TF32 tensor cores, torch's default, at half of that.
_TF32_SHARE = 0.5


class CudaAccelerator(Accelerator):
    """One CUDA device of this process."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.torch_device = f"cuda:{index}"
        torch.cuda.set_device(index)
        self.recorder.use_device(torch.device(self.torch_device))
        self._launches: list[Event] = []
        self._arrivals: list[Event] = []

    def all_reduce_started(self) -> None:
        """Mark the compute stream, after whose work so far NCCL may start."""
        self._launches.append(record_event())

    def all_reduce_finished(self) -> None:
        """Mark the stream of the future's callback, which PyTorch has made to follow NCCL's."""
        self._arrivals.append(record_event())

    def finish_step(self) -> StepRecord:
        """Wait for the device and read the events."""
        record = super().finish_step()
        # The length of the union of the all-reduce intervals; buckets are reduced in launch order.
        covered_to_ns = 0
        for launch, arrival in zip(self._launches, self._arrivals, strict=True):
            arrival.synchronize()
            start_ns = _elapsed_ns(self._launches[0], launch)
            end_ns = _elapsed_ns(self._launches[0], arrival)
            record.all_reduce_total_ns += max(0, end_ns - max(start_ns, covered_to_ns))
            covered_to_ns = max(covered_to_ns, end_ns)
        self._launches = []
        self._arrivals = []
        return record


def pinned_copy(num_bytes: int) -> Callable[[int], None] | None:
    """Return a function that copies pinned bytes to the GPU and waits for it; None without a
    GPU.
    """
    if not torch.cuda.is_available():
        return None
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(_: int) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    return copy


def _elapsed_ns(start: Event, end: Event) -> int:
    elapsed_ms: float = start.elapsed_time(end)
    return round(elapsed_ms * NS_PER_MS)


def peak_tflops(device: str, precision: str) -> float | None:
    """Return a device's peak by its name; None for one that isn't known."""
    for name, peak in _PEAKS_BF16.items():
        if all(word in device for word in name.split()):
            return peak if precision == "bf16" else peak * _TF32_SHARE
    return None


def count_training_flop(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Count the operations of one forward and backward pass of these inputs, by their shapes alone.

    Attention is counted as its two products: torch's counter does not know the kernel that CPUs use
    for it.
    """
    # Shapes must not depend on values, which fake tensors do not have; a copy, so that the model's
    # gradients stay.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        copies = {
            name: fake.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in (
                *model.named_parameters(),
                *model.named_buffers(),
            )
        }
        shapes = tuple(fake.from_tensor(tensor) for tensor in inputs)
        with (
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH),
        ):
            functional_call(model, copies, shapes).backward()
    return int(counter.get_total_flops())
