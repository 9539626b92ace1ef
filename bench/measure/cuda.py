"""A CUDA GPU as an accelerator: phases timed by events on the compute stream.

The step ends with one wait for the device (``finish_step``), so host and device phases lie on one
timeline and add up. That costs the run-ahead of the host over the step's end, well under a
millisecond, and can only lower occupancy. Between two events the device may idle on a slow launch;
that counts as busy here, as it does in MLPerf's published times: the kernel-level view is NVML's
and the profiler's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fuelrail.bench.measure.clock import NS_PER_MS
from fuelrail.bench.measure.records import DeviceTimes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.cuda import Event

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


class CudaAccelerator:
    """One CUDA device of this process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = f"cuda:{index}"
        torch.cuda.set_device(index)
        self._spans: dict[str, list[tuple[Event, Event]]] = {}
        self._launches: list[Event] = []
        self._arrivals: list[Event] = []
        self._gradients_at: Event | None = None
        self._launch_ns = 0

    @contextmanager
    def host_to_device(self) -> Iterator[None]:
        """Time the copies queued inside on the compute stream, which then may use the batch."""
        with self._span("host_to_device"):
            yield

    @contextmanager
    def forward(self, num_samples: float, num_images: float) -> Iterator[None]:  # noqa: ARG002 (the device measures it)
        """Time the kernels queued inside."""
        with self._span("forward"), self._launching():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Time backward up to the last local gradient, and from there the exposed all-reduce."""
        self._gradients_at = None
        start = self._mark()
        with self._launching():
            yield
        end = self._mark()
        gradients_at = self._gradients_at or end
        self._spans.setdefault("backward", []).append((start, gradients_at))
        self._spans.setdefault("all_reduce", []).append((gradients_at, end))

    @contextmanager
    def optimiser(self) -> Iterator[None]:
        """Time the kernels queued inside."""
        with self._span("optimiser"), self._launching():
            yield

    def gradients_ready(self, share: float) -> None:
        """Mark the compute stream where the last local gradient is computed."""
        if share >= 1.0:
            self._gradients_at = self._mark()

    def all_reduce_started(self) -> None:
        """Mark the compute stream, after whose work so far NCCL may start."""
        self._launches.append(self._mark())

    def all_reduce_finished(self) -> None:
        """Mark the stream of the future's callback, which PyTorch has made to follow NCCL's."""
        self._arrivals.append(self._mark())

    def finish_step(self) -> DeviceTimes:
        """Wait for the device and read the events."""
        torch.cuda.synchronize(self.index)
        # The length of the union of the all-reduce intervals; buckets are reduced in launch order.
        all_reduce_total_ns = 0
        covered_to_ns = 0
        for launch, arrival in zip(self._launches, self._arrivals, strict=True):
            start_ns = _elapsed_ns(self._launches[0], launch)
            end_ns = _elapsed_ns(self._launches[0], arrival)
            all_reduce_total_ns += max(0, end_ns - max(start_ns, covered_to_ns))
            covered_to_ns = max(covered_to_ns, end_ns)
        times = DeviceTimes(
            host_to_device_ns=self._total("host_to_device"),
            forward_ns=self._total("forward"),
            backward_ns=self._total("backward"),
            all_reduce_ns=self._total("all_reduce"),
            optimiser_ns=self._total("optimiser"),
            all_reduce_total_ns=all_reduce_total_ns,
            launch_ns=self._launch_ns,
        )
        times.device_busy_ns = times.forward_ns + times.backward_ns + times.optimiser_ns
        self._spans = {}
        self._launches = []
        self._arrivals = []
        self._launch_ns = 0
        return times

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Count what the host takes to queue a phase's kernels: a host that takes as long as the
        device bounds it.
        """
        started_ns = time.monotonic_ns()
        yield
        self._launch_ns += time.monotonic_ns() - started_ns

    @contextmanager
    def _span(self, phase: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.setdefault(phase, []).append((start, self._mark()))

    def _mark(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _total(self, phase: str) -> int:
        return sum(_elapsed_ns(start, end) for start, end in self._spans.get(phase, ()))


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
