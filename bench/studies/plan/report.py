"""The report of ``fuelrail plan``: memory, step time, needs of the data, cost, and where each
figure is from.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fuelrail.bench.planner.choice import (
    USABLE,
    Fit,
    efficiency,
    is_bound,
    named,
    peak,
    taught,
)
from fuelrail.bench.planner.formulas import (
    checkpoint_interval_s,
    kept_by_reshape,
    kept_by_restarts,
)
from fuelrail.bench.planner.hardware import GIB, ClusterSettings
from fuelrail.bench.planner.scaling import Curve, data_seconds
from fuelrail.bench.planner.scenario import Scenario, questions
from fuelrail.bench.planner.shape import Shape
from fuelrail.bench.planner.state import FP32, MOMENTS
from fuelrail.bench.planner.step_time import (
    Fitted,
    StepTime,
    slopes,
    spread_factor,
)
from fuelrail.bench.report.files import created_now
from fuelrail.bench.studies.plan.variants import Planned

SCHEMA = "fuelrail-plan"
VERSION = 6
Basis = Literal["range", "bound", "profile"]


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """Where a figure is from."""

    formula: str
    inputs: dict[str, float | str]
    source: str


class TeacherCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a teacher costs beside the student, and as a layer: bytes of a sample, and device-hours
    to make it once.

    ``flop_share`` is of all FLOP with the teacher beside the student. ``pays_after_epochs`` is the
    number of epochs, of all student runs together, after which making the layer and reading it
    where storage is what a step waits for costs no more than a teacher beside; None: never.
    """

    model: str
    parameters: int
    flop_share: float
    memory_gib: float
    layer_bytes: int
    bytes_per_token: float
    layer_device_hours_per_million: float
    pays_after_epochs: float | None


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report. Times in seconds; bytes and rates of the whole cluster unless a name says
    otherwise.

    ``step`` is the devices' time by parts; ``step_s`` that of the slowest of devices, decoding and
    storage; ``bubble`` is the pipeline's idle share. ``basis`` says what the times are. Of a range
    4 of 5 such steps are in ``step_range_s``. A bound is the least time, which has no upper end:
    times, cost and occupancy are at least what they say, rates and MFU at most. Of a profile the
    devices' time is what that says, and its error is not known. ``remedies`` are what to change
    first, with the samples/s of each. A figure is None where the scenario does not say what it
    needs; ``questions`` are what only the user can know.
    """

    schema: str
    version: int
    created: str
    options: dict[str, Any] = {}
    scenario: Scenario
    cluster: ClusterSettings
    strategy: str
    peak_gib: float
    usable_gib: float
    stages: list[Shape]
    step: StepTime
    basis: Basis
    step_s: float
    step_range_s: tuple[float, float | None] | None
    bubble: float
    bottleneck: str
    occupancy: float
    mfu: float
    samples_per_s: float
    images_per_node_s: float | None
    read_gb_per_s: float | None
    device_hours_per_million: float
    usd_per_million: float | None
    device_hours_per_epoch: float | None
    usd_per_epoch: float | None
    teacher: TeacherCost | None
    checkpoint_gb: float
    checkpoint_s: float
    checkpoint_interval_s: float | None
    kept_by_restarts: float | None
    kept_by_reshape: float | None
    """Shares of the time that failures leave."""
    tried: list[Planned] = []
    sweep: list[Planned] = []
    scaling: list[Curve] = []
    assumed: list[str]
    questions: list[str]
    explained: dict[str, Explained] = {}
    remedies: dict[str, float] = {}
    recipe: str | None = None


def build_report(
    scenario: Scenario,
    cluster: ClusterSettings,
    fit: Fit,
    fitted: Fitted | None = None,
) -> PlanReport:
    """Return the figures of a plan, whose efficiencies may be ``fitted`` to measured steps."""
    time = fit.time
    seconds = data_seconds(scenario, cluster)
    step_s = max(time.total, *seconds.values())
    rate = scenario.global_batch / step_s
    hours = 1e6 / rate / 3600 * cluster.num_devices
    price = None if cluster.usd_per_device_hour is None else cluster.usd_per_device_hour.value
    epoch = None if scenario.samples_per_epoch is None else hours * scenario.samples_per_epoch / 1e6
    saved_gb = checkpoint_gb(fit)
    saved_s = saved_gb / cluster.storage_gb_per_s.value
    interval = restarting = reshaping = None
    if (failures := scenario.failures_per_day) is not None:
        interval = checkpoint_interval_s(saved_s, failures)
        restarting = kept_by_restarts(interval, saved_s, failures)
        reshaping = kept_by_reshape(step_s, saved_s, failures)
    images = (
        rate * scenario.cameras / cluster.nodes
        if scenario.reads_images and scenario.cameras
        else None
    )
    basis, within = step_range(scenario, cluster, fit, fitted)
    return PlanReport(
        schema=SCHEMA,
        version=VERSION,
        created=created_now(),
        scenario=scenario,
        cluster=cluster,
        strategy=named(fit.settings),
        peak_gib=peak(fit.stages) / GIB,
        usable_gib=USABLE * cluster.device.memory_gib.value,
        stages=fit.stages,
        step=time,
        basis=basis,
        step_s=step_s,
        step_range_s=within,
        bubble=time.bubble / time.total,
        bottleneck=bottleneck(time, seconds),
        occupancy=time.total / step_s,
        mfu=fit.useful_flop / (step_s * cluster.peak_flops(scenario.precision)),
        samples_per_s=rate,
        images_per_node_s=images,
        read_gb_per_s=None if scenario.stored_bytes is None else rate * scenario.stored_bytes / 1e9,
        device_hours_per_million=hours,
        usd_per_million=None if price is None else hours * price,
        device_hours_per_epoch=epoch,
        usd_per_epoch=None if price is None or epoch is None else epoch * price,
        teacher=teacher_cost(scenario, cluster, fit),
        checkpoint_gb=saved_gb,
        checkpoint_s=saved_s,
        checkpoint_interval_s=interval,
        kept_by_restarts=restarting,
        kept_by_reshape=reshaping,
        assumed=assumptions(scenario, cluster, fit),
        questions=questions(scenario),
    )


def step_range(
    scenario: Scenario,
    cluster: ClusterSettings,
    fit: Fit,
    fitted: Fitted | None,
) -> tuple[Basis, tuple[float, float | None] | None]:
    """Return what a plan's times are, and the seconds within which 4 of 5 such steps are, where
    that is known.
    """
    total = fit.time.total
    seconds = data_seconds(scenario, cluster).values()
    if scenario.accelerator is not None:
        return "profile", None
    if is_bound(scenario, cluster, fit.settings):
        return "bound", (max(total, *seconds), None)
    # By the errors of the steps that the efficiencies rest on.
    used = efficiency(scenario, cluster, fit.settings)
    deviation = used.spread
    if fitted is not None:
        deviation = fitted.deviation(slopes(fit.work, cluster, scenario.precision, used))
    factor = spread_factor(deviation)
    shortest_s = max(total / factor, *seconds)
    longest_s = max(total * factor, *seconds)
    return "range", (shortest_s, longest_s)


def teacher_cost(
    scenario: Scenario,
    cluster: ClusterSettings,
    fit: Fit,
) -> TeacherCost | None:
    """Return the cost of the scenario's teacher, if it has one."""
    teacher = taught(scenario, fit.inputs, cluster.num_devices)
    if scenario.teacher is None or teacher is None:
        return None
    student_flop = sum(shape.flop for shape in fit.single_pass) / len(fit.single_pass)
    if scenario.teacher_from == "model":
        student_flop -= teacher.flop
    used = efficiency(scenario, cluster, fit.settings)
    flop_per_s = used.products * cluster.peak_flops(scenario.precision)
    memory_rate = cluster.device.memory_gb_per_s.value * 1e9
    storage_rate = cluster.storage_gb_per_s.value * 1e9
    seconds = teacher.flop / flop_per_s
    seconds += used.passes * teacher.moved_bytes / memory_rate
    sample_s = seconds / scenario.micro_batch  # of one device, a sample
    read_s = scenario.layer_bytes / storage_rate * cluster.num_devices
    pays_after_epochs = None
    if read_s < sample_s:
        pays_after_epochs = sample_s / (sample_s - read_s)
    return TeacherCost(
        model=scenario.teacher,
        parameters=teacher.parameters,
        flop_share=teacher.flop / (teacher.flop + student_flop),
        memory_gib=(teacher.weights_bytes + teacher.pass_bytes) / GIB,
        layer_bytes=scenario.layer_bytes,
        bytes_per_token=scenario.layer_bytes / scenario.layer_tokens,
        layer_device_hours_per_million=1e6 * sample_s / 3600,
        pays_after_epochs=pays_after_epochs,
    )


def bottleneck(time: StepTime, seconds: dict[str, float]) -> str:
    """Name what a step waits for most: the data where it is slower than the devices, else the
    devices' largest part.
    """
    parts = {
        "computing": time.compute + time.memory + time.launch + time.optimiser,
        "communication": time.tensor + time.pipeline + time.data_exposed,
        "pipeline bubble": time.bubble,
    }
    waits = {name: value for name, value in seconds.items() if value > time.total}
    candidates = waits or parts
    return max(candidates, key=lambda name: candidates[name])


def checkpoint_gb(fit: Fit) -> float:
    """Return the GB of weights and moments; what no plan divides is on each rank of a
    tensor-parallel group.
    """
    parameters = sum(shape.parameters for shape in fit.stages)
    parameters *= fit.degrees.tp * fit.degrees.dp_shard
    num_moments = MOMENTS[fit.settings.optimiser]
    return parameters * FP32 * (1 + num_moments) / 1e9


def assumptions(scenario: Scenario, cluster: ClusterSettings, fit: Fit) -> list[str]:
    """Say what the figures rest on that nobody measured."""
    texts = [
        (
            f"{1 - USABLE:.0%} of a device's memory is left for the collective library, gaps "
            "and scratch memory"
        )
    ]
    used = efficiency(scenario, cluster, fit.settings)
    shares = (
        f"{used.products:.0%} of the peak in matrix products, {used.attention:.0%} in attention, "
        f"{used.convolution:.0%} in convolutions, activations moved {used.passes:.2g} times"
    )
    if is_bound(scenario, cluster, fit.settings):
        texts.append(
            f"a bound, no time: {why_bound(scenario, cluster, fit)}. It is the least with "
            f"{shares}, which no published software exceeds, and {used.launch_us:g} us for "
            "the launch of an operator. Published camera detectors take several times as "
            "long as their bound"
        )
    elif scenario.efficiency is None and scenario.accelerator is None:
        texts.append(
            f"efficiency: {shares}: a fit to published steps of such devices, not of this "
            "model; --measure fits it to yours"
        )
    if scenario.accelerator is not None:
        texts.append(
            f"computing takes what the profile '{scenario.accelerator}' says, whose sources "
            "it names"
        )
    if scenario.low:
        texts.append(
            "weights bf16: Fuelrail's own trainer has fp32 weights and whole gradients "
            "between micro-batches"
        )
    if cluster.usd_per_device_hour is None:
        texts.append(f"no price: cluster '{cluster.name}' has no usd_per_device_hour")
    if scenario.reads_images:
        source = f"{cluster.host.cpus.value:g} CPUs x {cluster.host.images_per_cpu_s.source}"
        texts.append(f"decoding: {cluster.images_per_node_s:,.0f} images/s of a node: {source}")
    storage = cluster.storage_gb_per_s
    texts.append(f"storage: {storage.value:g} GB/s: {storage.source}")
    numbers = {"inside.gb_per_s": cluster.inside.gb_per_s}
    if cluster.between is not None:
        numbers["between.gb_per_s"] = cluster.between.gb_per_s
    for name, number in numbers.items():
        if "assumed" in number.source:
            texts.append(f"{name} {number.value:g}: {number.source}")
    return texts


def why_bound(scenario: Scenario, cluster: ClusterSettings, fit: Fit) -> str:
    """Say why a plan is a bound, and what would make a time of it."""
    if fit.settings.offload:
        return "copies between device and host are not modelled"
    kind = "" if scenario.precision in ("bf16", "fp16", "tf32") else f" in {scenario.precision}"
    return (
        f"no step of {scenario.family}{kind} on {cluster.device.name} was published by two "
        "sources, or measured; give --measure FILE of a step of it"
    )


def explanations(
    scenario: Scenario,
    cluster: ClusterSettings,
    fit: Fit,
) -> dict[str, Explained]:
    """Return formula, inputs and source of each figure."""
    device = cluster.device
    work = fit.work
    degrees = fit.degrees
    used = efficiency(scenario, cluster, fit.settings)
    top = device.peak_tflops[scenario.precision]
    moved = device.memory_gb_per_s
    rate = cluster.bytes_per_s
    ring = "NVIDIA nccl-tests, doc/PERFORMANCE.md; "
    links = {cluster.link(flow.reach) for flow in work.traffic}
    sent = "; ".join(
        f"{flow.times} x {flow.bytes / 1e6:,.1f} MB in {flow.count:g} at "
        f"{rate(flow.reach, flow.stride) / 1e9:g} GB/s, behind {flow.hidden:.0%} of a "
        f"micro-batch but for {flow.last:.1%}"
        for flow in work.traffic
    )
    count = work.micro_batches
    price = cluster.usd_per_device_hour

    def line(formula: str, source: str, **inputs: float | str) -> Explained:
        return Explained(formula=formula, inputs=inputs, source=source)

    return {
        "peak_gib": line(
            "torch's memory tracker + moments + kept x (in_flight - 1), the largest of all stages",
            "the trainer's own strategy, run on fake tensors as one rank",
            in_flight=str([shape.in_flight for shape in fit.stages]),
            moments=MOMENTS[fit.settings.optimiser],
        ),
        "usable_gib": line(
            "0.9 x memory",
            device.memory_gib.source,
            memory_gib=device.memory_gib.value,
        ),
        "step.compute": line(
            "micro_batches x sum of FLOP / (share x peak), attention of fp8 at bf16's peak",
            top.source,
            micro_batches=count,
            flop=work.flop,
            attention=work.attention_flop,
            convolution=work.convolution_flop,
            peak_tflops=top.value,
            shares=f"{used.products:.2f}, {used.attention:.2f}, {used.convolution:.2f}",
        ),
        "step.memory": line(
            "micro_batches x passes x activations / rate",
            moved.source,
            micro_batches=count,
            passes=used.passes,
            activation_bytes=work.activation_bytes,
            gb_per_s=moved.value,
        ),
        "step.launch": line(
            "micro_batches x operators x seconds of a launch - compute - memory, at least 0",
            "assumed: PyTorch launches an operator from Python in no less",
            operators=work.operators,
            launch_us=used.launch_us,
        ),
        "step.tensor": line(
            "micro_batches x (bytes sent on axis tp / bus bandwidth + messages x latency)",
            ring + cluster.inside.gb_per_s.source,
            bytes=work.tensor_bytes,
            gb_per_s=rate(work.tensor_reach) / 1e9,
            messages=work.tensor_count,
        ),
        "step.pipeline": line(
            "micro_batches x (2 x hidden tensor / one port + messages x latency)",
            cluster.link(work.pipeline_reach).gb_per_s.source,
            bytes=work.pipeline_bytes,
            messages=work.pipeline_count,
        ),
        "step.bubble": line(
            "(p - 1) / (v m) x (compute + memory + launch + tensor + pipeline)",
            "arXiv 2104.04473, section 2.2",
            p=degrees.pp,
            m=count,
        ),
        "step.data_exposed": line(
            "bytes sent on axes dp_* / bus bandwidth + latency - what hides behind computing",
            ring + "; ".join(sorted(link.gb_per_s.source for link in links)),
            sent=sent,
        ),
        "step.optimiser": line(
            "7 x 4 bytes x own parameters / rate",
            moved.source,
            bytes=work.step_state_bytes,
        ),
        "step_s": line(
            "max(sum of step, decoding, storage)",
            "the slowest of three that run side by side",
            **data_seconds(scenario, cluster),
            devices=fit.time.total,
        ),
        "mfu": line(
            "FLOP without recomputation / (step_s x peak)",
            "arXiv 2205.05198, equation 7; " + top.source,
            flop=fit.useful_flop,
        ),
        "usd_per_million": line(
            "10^6 / samples_per_s / 3600 x devices x price",
            "no price is known" if price is None else price.source,
            price="none" if price is None else price.value,
        ),
        "teacher.flop_share": line(
            "a third of the FLOP of the teacher's own training / all FLOP",
            "a forward pass is one of three equal parts (arXiv 2205.05198, equation 7)",
            teacher=scenario.teacher or "none",
        ),
        "checkpoint_gb": line(
            "4 bytes x (1 + moments) x parameters",
            "weights and moments in fp32",
            parameters=sum(shape.parameters for shape in fit.stages),
        ),
        "checkpoint_s": line(
            "checkpoint_gb / storage",
            cluster.storage_gb_per_s.source,
            gb=checkpoint_gb(fit),
        ),
        "checkpoint_interval_s": line(
            "sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C",
            "J. T. Daly, Future Generation Computer Systems 22 (2006) 303-312, equation 37",
            C=checkpoint_gb(fit) / cluster.storage_gb_per_s.value,
            failures_per_day=scenario.failures_per_day or "not given",
        ),
        "kept_by_restarts": line(
            "interval / (M e^(C / M) (e^((interval + C) / M) - 1))",
            "J. T. Daly, Future Generation Computer Systems 22 (2006) 303-312, equation 20",
            C=checkpoint_gb(fit) / cluster.storage_gb_per_s.value,
        ),
        "kept_by_reshape": line(
            "M / (M + step_s + C)",
            "a failure costs the step that is repeated, and a copy of the state",
            C=checkpoint_gb(fit) / cluster.storage_gb_per_s.value,
        ),
    }
