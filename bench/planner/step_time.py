"""Step time from counted work, a cluster and four efficiencies.

A micro-batch computes matrix products, attention and convolutions, each at a share of the device's
peak, moves its activations through the device's memory a number of times, and waits for the
messages of its layers, each of which takes the link's latency and its bytes; these times add up. No
pass takes less than the host needs to launch its operators. A pipeline lasts for m + (p - 1) / v
micro-batches. Collectives of gradients and weights hide behind the computing of their own pass, as
far as that does not wait for them; the rest is exposed. The optimiser moves its state through
memory once.

The efficiencies belong to a generation of devices, and in 8 bits to a software: they are fits to
published steps, and `fit` moves them to steps that a user measured. How far a step may be from its
prediction belongs to a family of models on a generation: it is known where steps of that family
were published by more than one source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings, ComputeType

Software = Literal["torch", "nvidia"]


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the peak in matrix products, attention and convolutions; ``passes``: how often an
    activation moves.

    ``unfused`` is the share in attention whose scores pass through memory, as before FlashAttention
    (arXiv 2205.14135). ``launch_us`` are the microseconds in which the host launches an operator.
    ``spread`` is the standard deviation of log(predicted / measured) of steps that others
    published, of which none of the same publication was fitted.
    """

    products: float = 0.65
    attention: float = 0.2
    convolution: float = 0.25
    passes: float = 9.0
    unfused: float = 0.1
    launch_us: float = 4.0
    spread: float = 0.3


DECODER = "dense decoder"
CONVOLUTION = "convolution"
MIXTURE = "mixture of experts"
EIGHT_BITS = "H100, 8 bits"
TORCH_8_BITS = f"{EIGHT_BITS}, torch"
NVIDIA_8_BITS = f"{EIGHT_BITS}, nvidia"
WITHOUT_TENSOR_CORES = "fp32, without tensor cores"
# Fits to published steps of dense decoders and ResNet-50 (tests/slow/test_reference_figures.py).
EFFICIENCIES: dict[str, Efficiency] = {
    "A100": Efficiency(
        products=0.704,
        attention=0.65,
        convolution=0.268,
        passes=8.4,
        unfused=0.142,
        spread=0.16,
    ),
    "H100": Efficiency(
        products=0.529,
        attention=0.374,
        convolution=0.134,
        passes=7.24,
        unfused=0.15,
        spread=0.19,
    ),
    EIGHT_BITS: Efficiency(
        products=0.642,
        attention=0.563,
        convolution=0.3,
        passes=14.5,
        unfused=0.15,
        spread=0.24,
    ),
    TORCH_8_BITS: Efficiency(
        products=0.356,
        attention=0.569,
        convolution=0.3,
        passes=3.2,
        unfused=0.15,
        spread=0.24,
    ),
    NVIDIA_8_BITS: Efficiency(
        products=0.675,
        attention=0.933,
        convolution=0.3,
        passes=17.5,
        unfused=0.15,
        spread=0.14,
    ),
    # No share of a tensor core's peak: fp32 arithmetic reaches far more of its own. Its
    # convolutions are a fit to ResNet-50 on V100; no step of anything else was published.
    WITHOUT_TENSOR_CORES: Efficiency(
        products=0.7,
        attention=0.4,
        convolution=0.637,
        passes=3.3,
        unfused=0.2,
        spread=0.3,
    ),
}
# Spreads by row and family of models, where two sources or more published steps: they are of a
# source that was left out. A plan of anything else has no range: it is a bound.
SPREADS: dict[tuple[str, str], float] = {
    (row, DECODER): EFFICIENCIES[row].spread
    for row in ("A100", "H100", EIGHT_BITS, TORCH_8_BITS, NVIDIA_8_BITS)
}
SPREADS["A100", CONVOLUTION] = 0.25  # of two sources, each fitted without the other
# What the best tuned software reaches, at the least: ResNet-50 of a benchmark trains twice as fast
# as those above.
_BEST = Efficiency(products=0.8, attention=0.8, convolution=0.5, passes=3.0, unfused=0.3)


def row_of(
    device: str,
    kind: ComputeType,
    software: Software | None = None,
) -> str | None:
    """Return the row of `EFFICIENCIES` for a device by its name; None: nothing was published of it.

    In 8 bits without a software it is that of all software.
    """
    if kind == "fp32":
        return WITHOUT_TENSOR_CORES
    if "A100" in device:
        return "A100"
    # The arithmetic of an H200 is that of an H100.
    if "H100" not in device and "H200" not in device:
        return None
    if kind != "fp8":
        return "H100"
    if software == "torch":
        return TORCH_8_BITS
    if software == "nvidia":
        return NVIDIA_8_BITS
    return EIGHT_BITS


def efficiency_of(
    device: str,
    kind: ComputeType,
    software: Software | None = None,
    family: str = DECODER,
) -> Efficiency:
    """Return the efficiencies of a device's generation, by its name; of an unknown one a mean with
    a wide spread.

    The spread is that of the family, where it is known.
    """
    row = row_of(device, kind, software)
    if row is None:
        return Efficiency()
    used = EFFICIENCIES[row]
    spread = SPREADS.get((row, family), used.spread)
    return msgspec.structs.replace(used, spread=spread)


def has_range(
    device: str,
    kind: ComputeType,
    family: str,
    software: Software | None = None,
) -> bool:
    """Return whether published steps say how far a plan of such a model may be from its step.

    They are of 16 and of 8 bits: of TF32, which has tensor cores too, none was published.
    """
    if kind == "tf32":
        return False
    row = row_of(device, kind, software)
    return (row, family) in SPREADS


_DEVIATIONS = 1.28  # of a normal distribution: 4 of 5 are nearer to its mean, 9 of 10 are not below


def spread_factor(deviation: float) -> float:
    """Return the factor within which 4 of 5 steps are of their prediction, and 9 of 10 are not
    faster.
    """
    return math.exp(_DEVIATIONS * deviation)


def best_of(used: Efficiency) -> Efficiency:
    """Return efficiencies that no software is known to exceed, for the least time of a model of
    another kind.

    They are those that 9 of 10 published steps do not exceed, or the best known ones where these
    are better.
    """
    factor = spread_factor(used.spread)
    numbers = {"passes": min(used.passes / factor, _BEST.passes)}
    for name in ("products", "attention", "convolution", "unfused"):
        share = max(factor * getattr(used, name), getattr(_BEST, name))
        numbers[name] = min(1.0, share)
    return msgspec.structs.replace(used, **numbers)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives of gradients or weights, ``times`` a step: the bytes that are sent each time, in
    ``count`` of them.

    The group lies in ``reach`` successive ranks, every ``stride``-th of them. It hides behind a
    share of the computing of a micro-batch, ``hidden``, but for the share ``last`` of itself: no
    computing is left that does not need it.
    """

    bytes: float
    count: float = 0.0
    reach: int = 1
    stride: int = 1
    times: int = 1
    hidden: float = 0.0
    last: float = 0.0


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the busiest rank does: per micro-batch unless ``step_`` says per step; bytes are those
    that it sends.

    ``tensor_count`` and ``pipeline_count``: number of messages of that kind; ``*_reach``: number of
    successive ranks in which their group lies. ``flop`` has those of attention and convolutions in
    it. ``device_s``: measured seconds of all computing of a micro-batch, instead of what FLOP and
    bytes would take. ``operators``: number of them that the host launches. ``is_fused``: attention
    is one kernel.
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
    operators: float = 0.0
    is_fused: bool = True


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a step in seconds; ``total`` is their sum.

    ``launch``: for which the device waits for the host.
    """

    compute: float
    memory: float
    tensor: float
    pipeline: float
    bubble: float
    data_exposed: float
    data_total: float
    optimiser: float
    launch: float = 0.0

    @property
    def total(self) -> float:
        """Step time."""
        inside = (
            self.compute,
            self.memory,
            self.launch,
            self.tensor,
            self.pipeline,
            self.bubble,
        )
        return sum((*inside, self.data_exposed, self.optimiser))


def step_time(
    work: StepWork,
    cluster: ClusterSettings,
    kind: ComputeType,
    efficiency: Efficiency,
) -> StepTime:
    """Predict a step. Attention computes in 16 bits where products compute in 8."""
    memory_rate = cluster.device.memory_gb_per_s.value * 1e9
    count = work.micro_batches
    products = work.flop - work.attention_flop - work.convolution_flop
    pass_s = products / efficiency.products + work.convolution_flop / efficiency.convolution
    pass_s /= cluster.peak_flops(kind)
    if work.attention_flop:
        share = efficiency.attention if work.is_fused else efficiency.unfused
        peak_flops = cluster.peak_flops("bf16" if kind == "fp8" else kind)
        pass_s += work.attention_flop / share / peak_flops
    compute = count * (pass_s if work.device_s is None else work.device_s)
    memory = launch = 0.0
    if work.device_s is None:
        memory = count * efficiency.passes * work.activation_bytes / memory_rate
        launches = count * work.operators * efficiency.launch_us / 1e6
        launch = max(0.0, launches - compute - memory)

    def seconds(size: float, messages: float, reach: int, stride: int = 1) -> float:
        latency_s = cluster.link(reach).latency_us.value / 1e6
        return size / cluster.bytes_per_s(reach, stride) + messages * latency_s

    tensor = count * seconds(work.tensor_bytes, work.tensor_count, work.tensor_reach)
    reach = work.pipeline_reach
    pipeline = count * seconds(work.pipeline_bytes, work.pipeline_count, reach, reach)
    data = exposed = 0.0
    for flow in work.traffic:
        flow_s = seconds(flow.bytes, flow.count, flow.reach, flow.stride)
        behind = flow.hidden * (compute + memory + launch) / count
        last_s = flow_s * flow.last
        exposed_s = flow_s - behind * (1 - flow.last)
        data += flow.times * flow_s
        exposed += flow.times * max(last_s, exposed_s)
    return StepTime(
        compute=compute,
        memory=memory,
        tensor=tensor,
        pipeline=pipeline,
        bubble=work.bubble * (compute + memory + launch + tensor + pipeline),
        data_exposed=exposed,
        data_total=data,
        optimiser=work.step_state_bytes / memory_rate,
        launch=launch,
    )


NUMBERS = ("products", "attention", "convolution", "passes", "launch_us")
# Deviations of the logarithms of the numbers between models on one device.
_PRIOR = {
    "products": 0.4,
    "attention": 0.5,
    "convolution": 0.5,
    "passes": 0.7,
    "unfused": 0.5,
    "launch_us": 0.7,
}
_NO_SHARES = ("passes", "launch_us")
_NOISE = 0.05  # of a step that was measured well, against a model that describes it


class Fitted(NamedTuple):
    """Efficiencies; which of them the steps determined; errors of the steps, and covariance of
    the logarithms.
    """

    efficiency: Efficiency
    determined: list[str]
    errors: list[float]
    covariance: NDArray[np.float64]

    def deviation(self, slopes: NDArray[np.float64]) -> float:
        """Return the standard deviation of a step's logarithm that changes so with those of the
        numbers.
        """
        variance = slopes @ self.covariance @ slopes
        return math.hypot(self.efficiency.spread, math.sqrt(variance))


Case = tuple[StepWork, "ClusterSettings", "ComputeType", float]


def slopes(
    work: StepWork,
    cluster: ClusterSettings,
    kind: ComputeType,
    efficiency: Efficiency,
    names: Sequence[str] = NUMBERS,
) -> NDArray[np.float64]:
    """Return the change of a step's logarithm with that of each of the numbers."""
    changes = []
    for name in names:
        lower = step_time(work, cluster, kind, _moved(efficiency, {name: -0.01}))
        higher = step_time(work, cluster, kind, _moved(efficiency, {name: 0.01}))
        ratio = higher.total / lower.total
        changes.append(math.log(ratio) / 0.02)
    return np.array(changes)


def fit(
    cases: Sequence[Case],
    start: Efficiency,
    names: Sequence[str] = NUMBERS,
) -> Fitted:
    """Fit these numbers to measured steps, in seconds: as near to them and as near to ``start`` as
    their spreads say.

    So a number that the steps do not determine stays what it was (maximum a posteriori of
    logarithms, by Gauss and Newton). Needs a case.
    """
    moved = np.zeros(len(names))
    efficiency = start
    prior = np.array([_PRIOR[name] for name in names])
    weights = np.diag(prior**-2)
    for _ in range(30):
        logs = []
        for work, cluster, kind, measured_s in cases:
            predicted = step_time(work, cluster, kind, efficiency)
            logs.append(math.log(predicted.total / measured_s))
        errors = np.array(logs)
        table = np.array([slopes(*case[:3], efficiency, names) for case in cases])
        normal = table.T @ table / _NOISE**2 + weights
        gradient = table.T @ errors / _NOISE**2 + weights @ moved
        step = np.linalg.solve(normal, gradient)
        moved = moved - np.clip(step, -0.5, 0.5)
        efficiency = _moved(start, dict(zip(names, moved, strict=True)))
    covariance = np.linalg.inv(normal)
    is_known = np.sqrt(np.diag(covariance)) < prior / 2
    # The cases' own spread, with two more of the spread before.
    squares = float(errors @ errors) + 2 * start.spread**2
    spread = math.sqrt(squares / (len(cases) + 2))
    determined = [name for name, yes in zip(names, is_known, strict=True) if yes]
    return Fitted(
        efficiency=msgspec.structs.replace(efficiency, spread=spread),
        determined=determined,
        errors=[math.exp(error) - 1 for error in errors],
        covariance=covariance,
    )


def _moved(start: Efficiency, steps: dict[str, float]) -> Efficiency:
    """Return efficiencies whose logarithms are moved by these steps; no share is above 1."""
    numbers = {}
    for name, step in steps.items():
        number = getattr(start, name) * math.exp(step)
        numbers[name] = number if name in _NO_SHARES else min(number, 1.0)
    return msgspec.structs.replace(start, **numbers)
