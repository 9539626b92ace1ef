"""Step time from counted work, a cluster and two efficiencies.

All wait for the slowest device. A micro-batch computes its matrix products at a share of the device's peak, moves its
activations through the device's memory a number of times, and waits for the collectives of its layers; these times add
up. A pipeline lasts for m + (p - 1) / v micro-batches. Collectives of gradients and weights hide behind a share of the
computing; the rest is exposed. The optimiser moves its state through memory once. Both efficiencies are fitted on
measured steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings, ComputeType

_SHARES = [0.2 + 0.01 * step for step in range(76)]
_PASSES = [0.5 * step for step in range(33)]


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """``compute``: share of the peak in matrix products; ``passes``: how often each activation byte moves."""

    compute: float = 0.7
    passes: float = 4.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the busiest rank does: per micro-batch unless ``step_`` says per step; bytes are those that it sends.

    ``*_reach``: number of successive ranks in which the group of such a collective lies, every ``*_stride``-th of them.
    ``step_hidden``: share of the step's computing behind which the step's collectives can hide. ``step_last``: share
    of what copies send that is ready with the last gradient, and so hides behind nothing.
    """

    flop: float
    attention_flop: float = 0.0
    activation_bytes: float
    tensor_bytes: float = 0.0
    tensor_reach: int = 1
    pipeline_bytes: float = 0.0
    pipeline_reach: int = 1
    micro_batches: int = 1
    bubble: float = 0.0
    step_data_bytes: float = 0.0
    step_collectives: int = 0
    step_data_reach: int = 1
    step_data_stride: int = 1
    step_hidden: float = 0.0
    step_last: float = 0.0
    step_state_bytes: float = 0.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a step in seconds; ``total`` is their sum. ``straggler``: what a slow device computes longer."""

    compute: float
    memory: float
    tensor: float
    pipeline: float
    bubble: float
    data_exposed: float
    data_total: float
    optimiser: float
    straggler: float = 0.0

    @property
    def total(self) -> float:
        """Step time."""
        inside = (self.compute, self.memory, self.tensor, self.pipeline, self.bubble)
        return sum((*inside, self.data_exposed, self.optimiser, self.straggler))


def step_time(work: Work, cluster: ClusterSettings, kind: ComputeType, efficiency: Efficiency) -> StepTime:
    """Predict a step. Attention computes in 16 bits where products compute in 8."""
    memory_rate = cluster.device.memory_gb_per_s.value * 1e9

    kind_of_attention: ComputeType = "bf16" if kind == "fp8" else kind
    products = work.flop / cluster.peak_flops(kind) + work.attention_flop / cluster.peak_flops(kind_of_attention)
    count = work.micro_batches
    compute = count * products / efficiency.compute
    memory = count * efficiency.passes * work.activation_bytes / memory_rate
    tensor = count * work.tensor_bytes / cluster.bytes_per_s(work.tensor_reach)
    pipeline = count * work.pipeline_bytes / cluster.bytes_per_s(work.pipeline_reach, work.pipeline_reach)
    latency = work.step_collectives * cluster.link(work.step_data_reach).latency_us.value / 1e6
    data = latency + work.step_data_bytes / cluster.bytes_per_s(work.step_data_reach, work.step_data_stride)
    hidden = work.step_hidden * (compute + memory)
    exposed = max(data * work.step_last, data - hidden * (1 - work.step_last))
    slowest = 1.0 if cluster.slowest_device is None else cluster.slowest_device.value
    return StepTime(
        compute=compute,
        memory=memory,
        tensor=tensor,
        pipeline=pipeline,
        bubble=work.bubble * (compute + memory + tensor + pipeline),
        data_exposed=exposed,
        data_total=data,
        optimiser=work.step_state_bytes / memory_rate,
        straggler=(1 / slowest - 1) * (compute + memory),
    )


def fit(
    cases: Sequence[tuple[Work, ClusterSettings, ComputeType, float]], start: Efficiency | None = None
) -> Efficiency:
    """Find the efficiencies with the least squares of log(predicted / measured); measured times in seconds.

    One measured step cannot say two numbers: ``passes`` then stays what ``start`` says. Needs a case.
    """
    start = start or Efficiency()
    passes = _PASSES if len(cases) > 1 else [start.passes]

    def error(pair: tuple[float, float]) -> float:
        efficiency = Efficiency(compute=pair[0], passes=pair[1])
        return sum(
            math.log(step_time(work, cluster, kind, efficiency).total / seconds) ** 2
            for work, cluster, kind, seconds in cases
        )

    compute, moved = min(itertools.product(_SHARES, passes), key=error)
    return Efficiency(compute=round(compute, 2), passes=moved)
