"""Step time from counted work, a cluster and two efficiencies.

All wait for the slowest device. A micro-batch computes its matrix products at a share of the device's peak, moves its
activations through the device's memory a number of times, and waits for the messages of its layers, each of which takes
the link's latency and its bytes; these times add up. A pipeline lasts for m + (p - 1) / v micro-batches. Collectives of
gradients and weights hide behind the computing of their own pass, as far as that does not wait for them; the rest is
exposed. The optimiser moves its state through memory once. Both efficiencies are fitted on measured steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings, ComputeType

# Shares of the peak to all of it, and passes from none to far more than any kernel makes: an end is not a fit.
_SHARES = [0.01 * step for step in range(1, 101)]
_PASSES = [*(0.5 * step for step in range(33)), *(round(16 * 1.1**step) for step in range(1, 45))]


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """``compute``: share of the peak in matrix products; ``passes``: how often each activation byte moves."""

    compute: float = 0.7
    passes: float = 4.0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of gradients or weights, ``times`` a step: the bytes that are sent each time, in ``count`` of them.

    The group lies in ``reach`` successive ranks, every ``stride``-th of them. It hides behind a share of the computing
    of a micro-batch, ``hidden``, but for the share ``last`` of itself: no computing is left that does not need it.
    """

    bytes: float
    count: float = 0.0
    reach: int = 1
    stride: int = 1
    times: int = 1
    hidden: float = 0.0
    last: float = 0.0


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the busiest rank does: per micro-batch unless ``step_`` says per step; bytes are those that it sends.

    ``tensor_count`` and ``pipeline_count``: number of messages of that kind; ``*_reach``: number of successive ranks
    in which their group lies.
    """

    flop: float
    attention_flop: float = 0.0
    activation_bytes: float
    tensor_bytes: float = 0.0
    tensor_count: float = 0.0
    tensor_reach: int = 1
    pipeline_bytes: float = 0.0
    pipeline_count: int = 0
    pipeline_reach: int = 1
    micro_batches: int = 1
    bubble: float = 0.0
    traffic: tuple[Traffic, ...] = ()
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


def step_time(work: StepWork, cluster: ClusterSettings, kind: ComputeType, efficiency: Efficiency) -> StepTime:
    """Predict a step. Attention computes in 16 bits where products compute in 8."""
    memory_rate = cluster.device.memory_gb_per_s.value * 1e9

    kind_of_attention: ComputeType = "bf16" if kind == "fp8" else kind
    products = work.flop / cluster.peak_flops(kind) + work.attention_flop / cluster.peak_flops(kind_of_attention)
    count = work.micro_batches
    compute = count * products / efficiency.compute
    memory = count * efficiency.passes * work.activation_bytes / memory_rate
    seconds = partial(_seconds, cluster)
    tensor = count * seconds(work.tensor_bytes, work.tensor_count, work.tensor_reach)
    reach = work.pipeline_reach
    pipeline = count * seconds(work.pipeline_bytes, work.pipeline_count, reach, reach)
    data = exposed = 0.0
    for one in work.traffic:
        taken = seconds(one.bytes, one.count, one.reach, one.stride)
        behind = one.hidden * (compute + memory) / count
        data += one.times * taken
        exposed += one.times * max(taken * one.last, taken - behind * (1 - one.last))
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


def _seconds(cluster: ClusterSettings, size: float, count: float, reach: int, stride: int = 1) -> float:
    return size / cluster.bytes_per_s(reach, stride) + count * cluster.link(reach).latency_us.value / 1e6


def fit(
    cases: Sequence[tuple[StepWork, ClusterSettings, ComputeType, float]], start: Efficiency | None = None
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


def limits_of(efficiency: Efficiency) -> list[str]:
    """Say which efficiencies are an end of what is tried: a fit that ends there does not describe its steps."""
    found = []
    if efficiency.compute in (_SHARES[0], _SHARES[-1]):
        found.append(f"{efficiency.compute:.0%} of the peak")
    if efficiency.passes in (_PASSES[0], _PASSES[-1]):
        found.append(f"activations moved {efficiency.passes:g} times")
    return found
