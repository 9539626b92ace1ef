"""Step time from counted work, a cluster and four efficiencies.

A micro-batch computes matrix products, attention and convolutions, each at a share of
the device's peak, moves its activations through the device's memory a number of times, and waits for the messages of
its layers, each of which takes the link's latency and its bytes; these times add up. A pipeline lasts for
m + (p - 1) / v micro-batches. Collectives of gradients and weights hide behind the computing of their own pass, as far
as that does not wait for them; the rest is exposed. The optimiser moves its state through memory once.

The efficiencies belong to a generation of devices: `EFFICIENCIES` are fits to published steps, and `fit` moves them to
steps that a user measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings, ComputeType


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the peak in matrix products, attention and convolutions; ``passes``: how often an activation moves.

    ``spread`` is the standard deviation of log(predicted / measured) of steps that others published, of which none of
    the same publication was fitted.
    """

    products: float = 0.65
    attention: float = 0.2
    convolution: float = 0.25
    passes: float = 9.0
    spread: float = 0.3


# Fits to 28 and 16 published steps, those of 8 bits among them (tests/slow/test_reference_figures.py): numbers of their
# own for 8 bits were further from a publication that was left out.
EFFICIENCIES: dict[str, Efficiency] = {
    "A100": Efficiency(products=0.73, attention=0.14, convolution=0.22, passes=5.2, spread=0.15),
    "H100": Efficiency(products=0.57, attention=0.57, convolution=0.35, passes=16.4, spread=0.15),
}
_SPREAD_OF_8_BITS = 0.3


def efficiency_of(device: str, kind: ComputeType) -> Efficiency:
    """Return the efficiencies of a device's generation, by its name; of an unknown one a mean with a wide spread."""
    name = device.replace("H200", "H100")  # the same arithmetic
    found = next((one for part, one in EFFICIENCIES.items() if part in name), Efficiency())
    return (
        msgspec.structs.replace(found, spread=max(found.spread, _SPREAD_OF_8_BITS))
        if kind == "fp8"
        else found
    )


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
    in which their group lies. ``flop`` has those of attention and convolutions in it. ``device_s``: measured seconds of
    all computing of a micro-batch, instead of what FLOP and bytes would take.
    """

    flop: float
    attention_flop: float = 0.0
    convolution_flop: float = 0.0
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
    device_s: float | None = None


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a step in seconds; ``total`` is their sum."""

    compute: float
    memory: float
    tensor: float
    pipeline: float
    bubble: float
    data_exposed: float
    data_total: float
    optimiser: float

    @property
    def total(self) -> float:
        """Step time."""
        inside = (self.compute, self.memory, self.tensor, self.pipeline, self.bubble)
        return sum((*inside, self.data_exposed, self.optimiser))


def step_time(
    work: StepWork, cluster: ClusterSettings, kind: ComputeType, efficiency: Efficiency
) -> StepTime:
    """Predict a step. Attention computes in 16 bits where products compute in 8."""
    memory_rate = cluster.device.memory_gb_per_s.value * 1e9
    count = work.micro_batches
    products = work.flop - work.attention_flop - work.convolution_flop
    each = products / efficiency.products + work.convolution_flop / efficiency.convolution
    each /= cluster.peak_flops(kind)
    if work.attention_flop:
        each += (
            work.attention_flop
            / efficiency.attention
            / cluster.peak_flops("bf16" if kind == "fp8" else kind)
        )
    compute = count * (each if work.device_s is None else work.device_s)
    memory = 0.0
    if work.device_s is None:
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
    return StepTime(
        compute=compute,
        memory=memory,
        tensor=tensor,
        pipeline=pipeline,
        bubble=work.bubble * (compute + memory + tensor + pipeline),
        data_exposed=exposed,
        data_total=data,
        optimiser=work.step_state_bytes / memory_rate,
    )


def _seconds(
    cluster: ClusterSettings, size: float, count: float, reach: int, stride: int = 1
) -> float:
    return (
        size / cluster.bytes_per_s(reach, stride)
        + count * cluster.link(reach).latency_us.value / 1e6
    )


NUMBERS = ("products", "attention", "convolution", "passes")
_PRIOR = np.array(
    [0.4, 0.5, 0.5, 0.7]
)  # deviations of the logarithms of the numbers between models on one device
_NOISE = 0.05  # of a step that was measured well, against a model that describes it


class Fitted(NamedTuple):
    """Efficiencies; which of them the steps determined; errors of the steps, and covariance of the logarithms."""

    efficiency: Efficiency
    determined: list[str]
    errors: list[float]
    covariance: NDArray[np.float64]

    def deviation(self, slopes: NDArray[np.float64]) -> float:
        """Return the standard deviation of a step's logarithm that changes so with those of the numbers."""
        return math.hypot(self.efficiency.spread, math.sqrt(slopes @ self.covariance @ slopes))


Case = tuple[StepWork, "ClusterSettings", "ComputeType", float]


def slopes(
    work: StepWork, cluster: ClusterSettings, kind: ComputeType, at: Efficiency
) -> NDArray[np.float64]:
    """Return the change of a step's logarithm with that of each of `NUMBERS`."""
    found = []
    for name in NUMBERS:
        few, many = (_moved(at, {name: sign * 0.01}) for sign in (-1, 1))
        ratio = (
            step_time(work, cluster, kind, many).total / step_time(work, cluster, kind, few).total
        )
        found.append(math.log(ratio) / 0.02)
    return np.array(found)


def fit(cases: Sequence[Case], start: Efficiency) -> Fitted:
    """Fit all numbers to measured steps, in seconds: as near to them and as near to ``start`` as their spreads say.

    So a number that the steps do not determine stays what it was (maximum a posteriori of logarithms, by Gauss and
    Newton). Needs a case.
    """
    moved, at = np.zeros(len(NUMBERS)), start
    weights = np.diag(_PRIOR**-2)
    for _ in range(30):
        errors = np.array([math.log(step_time(*case[:3], at).total / case[3]) for case in cases])
        table = np.array([slopes(*case[:3], at) for case in cases])
        normal = table.T @ table / _NOISE**2 + weights
        step = np.linalg.solve(normal, table.T @ errors / _NOISE**2 + weights @ moved)
        moved = moved - np.clip(step, -0.5, 0.5)
        at = _moved(start, dict(zip(NUMBERS, moved, strict=True)))
    covariance = np.linalg.inv(normal)
    known = np.sqrt(np.diag(covariance)) < _PRIOR / 2
    # The cases' own spread, with two more of the spread before.
    spread = math.sqrt((float(errors @ errors) + 2 * start.spread**2) / (len(cases) + 2))
    at = msgspec.structs.replace(at, spread=spread)
    determined = [name for name, yes in zip(NUMBERS, known, strict=True) if yes]
    return Fitted(at, determined, [math.exp(one) - 1 for one in errors], covariance)


def _moved(start: Efficiency, by: dict[str, float]) -> Efficiency:
    changed = {name: getattr(start, name) * math.exp(step) for name, step in by.items()}
    return msgspec.structs.replace(
        start,
        **{name: value if name == "passes" else min(value, 1.0) for name, value in changed.items()},
    )
