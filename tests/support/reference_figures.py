"""The planner's formulas and step times against published figures, of a file of cases with sources and tolerances.

``tests/slow/test_reference_figures.py`` predicts every case. Efficiencies are fitted on
the cases that a case's ``calibrate_on`` names. A case that names none is predicted with the named ones of its own
source, else of its device and precision. Cases on which others are fitted are listed apart: they are no test of the
model. What the model does not cover is listed with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.formulas import bubble, sent_bytes, zero_state_bytes
from fuelrail.bench.planner.hardware import GIB, load_cluster
from fuelrail.bench.planner.step_time import Efficiency, StepWork, Traffic, fit, step_time
from support.published_formulas import (
    Transformer,
    first_stage_layers,
    hardware_flop,
    layer_activation_bytes,
    model_flop,
    parameters,
    training_days,
    utilisation,
)

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings, ComputeType

_ADAM_BYTES = 28  # moved per parameter: weight, gradient and two moments read, three of them written, in fp32
_MPT_VOCABULARY = 50368  # llm-foundry's, padded
_GPT_VOCABULARY = 51200  # Megatron's, padded
_RESNET_GFLOP = 24.54  # to train on one image: configs/accelerators/resnet50-224-a100.yaml

NOT_MODELLED = {
    "titan-8B-n8-mem": "which activations torchtitan's selective recomputation kept is not in the case",
    "titan-8B-n8-compile-mem": "what the compiler fuses is not modelled",
    "titan-8B-n128-compile-mem": "what the compiler fuses is not modelled",
    "bevformer-base-gpu-hours": "the accelerator profile of this network is derived from the same report",
    "sparse4dv2-samples": "the network is none of the trainer's, and its FLOP are not in the case",
    "nanotron-8-pp8-rate": "the model's shape is not in the case",
    "nanotron-8-d2t2p2-rate": "the model's shape is not in the case",
    "h100-ring-busbw": "the cluster files have their NVLink rate from this very source",
}
EXPLAINED = {
    "mlperf-rn50-64-over-8": "time to accuracy: the larger batch needs more epochs, which is not modelled",
    "rn50-a100-amp-8-over-1": "the published pipeline is held up by its host's decoding, which the case does not give",
    "rn50-v100-amp-8-over-1": "as with A100: host decoding, which the case does not give",
    "rn50-v100-32-amp-8-over-1": "as with A100: host decoding, which the case does not give",
}


class Expected(msgspec.Struct):
    """What was published."""

    quantity: str
    value: float
    unit: str
    tolerance: dict[str, float]


class Case(msgspec.Struct):
    """One published figure."""

    id: str
    kind: str
    source: str
    given: dict[str, Any]
    expect: Expected
    calibrate_on: list[str] = []
    note: str = ""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """One case with what was predicted; ``role`` is formula, measured, or calibration."""

    id: str
    role: str
    predicted: float
    published: float
    error: float
    within: bool
    fitted_on: list[str] = []
    efficiency: Efficiency | None = None
    explanation: str = ""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The result file; errors are of measured cases, calibration not among them, as shares."""

    benchmark: str
    num_cases: int
    formula_cases: int
    formula_within: int
    measured_cases: int
    mean_error: float
    median_error: float
    worst_error: float
    measured_within_own_tolerance: int
    cases: list[Predicted]
    not_modelled: dict[str, str]


def formula(case: Case) -> float:
    """Predict a case that follows from a closed formula, in its unit."""
    given, quantity = case.given, case.expect.quantity
    if quantity == "model_state_bytes_per_gpu" and "data_parallel" in given:
        sizes = (given["param_bytes"], given["grad_bytes"], given["optimiser_bytes"])
        return zero_state_bytes(given["parameters"], given["data_parallel"], given["zero_stage"], *sizes) / 1e9
    if quantity == "model_state_bytes_per_gpu":
        each = given["param_bytes"] + given["grad_bytes"] + given["optimiser_bytes"]
        return float(12 * given["layers"] * given["hidden"] ** 2 * each / given["tp"] / given["pp"] / GIB)
    if quantity == "activation_bytes_first_stage":
        layer = layer_activation_bytes(
            transformer(given), given["micro_batch"], given["tp"],
            recompute=given["recompute"], sequence_parallel=given["sequence_parallel"],
        )  # fmt: skip
        return layer * first_stage_layers(given["layers"], given["pp"], given["virtual_stages"]) / GIB
    if quantity in ("mfu", "hfu") and "iteration_time_s" in given:
        model, count = transformer(given), given["global_batch"]
        flop = model_flop(model, count) if quantity == "mfu" else hardware_flop(model, count, given["recompute"])
        return 100 * utilisation(flop, given["iteration_time_s"], given["gpus"], given["peak_tflops"] * 1e12)
    if quantity == "mfu":
        token = 6 * given["parameters"] + 12 * given["layers"] * given["hidden"] * given["seq"]
        return 100 * utilisation(token * given["tokens_per_s_per_gpu"], 1.0, 1, given["peak_tflops"] * 1e12)
    if quantity == "parameters":
        return parameters(transformer(given)) / 1e9
    if quantity == "training_days":
        rate = given["hardware_tflops_per_gpu"] * 1e12
        return training_days(given["parameters"], given["tokens"], given["gpus"], rate)
    if quantity == "bubble_over_ideal_time":
        return bubble(given["pp"], given["microbatches"], given["virtual_stages"])
    if quantity == "bytes_sent_per_rank":
        kind = "all_gather" if case.id.startswith("allgather") else "all_reduce"
        return sent_bytes(kind, given["ranks"], given["bytes"])
    if quantity == "gpu_hours_to_target":
        return float(given["gpus"] * given["minutes"] / 60)
    assert quantity == "global_batch", f"{case.id}: no formula for {quantity}"
    return float(given["per_gpu_batch"] * given["gpus"] * given["accumulation"])


def transformer(given: Mapping[str, Any]) -> Transformer:
    """Shape of a case's model; Llama's perceptrons are gated, and are the only ones with a width of their own."""
    vocabulary = _MPT_VOCABULARY if str(given.get("model", "")).startswith("MPT") else _GPT_VOCABULARY
    return Transformer(
        layers=given["layers"], hidden=given["hidden"], heads=given.get("heads", given["hidden"] // 128),
        seq=given["seq"], vocab=given.get("vocab", vocabulary), ffn=given.get("ffn"), gated="ffn" in given,
        kv_heads=given.get("kv_heads"),
    )  # fmt: skip


def cluster_of(given: Mapping[str, Any]) -> ClusterSettings:
    """The cluster file that is nearest to a case's device."""
    gpu = str(given.get("gpu", ""))
    return load_cluster("8x8-h200" if gpu.startswith("H200") else "8x8-h100" if gpu.startswith("H100") else "64x8-a100")


def precision_of(given: Mapping[str, Any]) -> ComputeType:
    """The type of the matrix products."""
    return "fp8" if str(given.get("precision", "")).startswith(("fp8", "float8")) else "bf16"


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """How a case divides its model, with what the case does not say assumed: see :func:`division_of`."""

    gpus: int
    tp: int
    pp: int
    cp: int
    dp: int
    virtual: int
    micro_batch: int
    micro_batches: int
    sharded: bool
    recompute: str
    flash: bool


def division_of(given: Mapping[str, Any]) -> Division:
    """Read or assume: micro-batches of one in a pipeline, a virtual stage a layer in Llama's largest run.

    Papers of 2021 and 2022 (those that name a recomputation of a plain GPT) have no flash attention.
    """
    gpus, tp, pp, cp = given["gpus"], given.get("tp", 1), given.get("pp", 1), given.get("cp", 1)
    sharded = "dp_shard" in given or given.get("fsdp", False)
    dp = given.get("dp") or gpus // (tp * pp * cp)
    if "tokens_per_batch" in given:
        batch = given["tokens_per_batch"] / given["seq"]
    else:
        local = given.get("local_batch") or given.get("micro_batch", 1) * given.get("accumulation", 1)
        batch = given.get("global_batch") or local * dp
    micro = given.get("micro_batch") or (1 if pp > 1 else given.get("local_batch", 1))
    virtual = given.get("virtual_stages") or (8 if "tokens_per_batch" in given else 1)
    return Division(
        gpus=gpus, tp=tp, pp=pp, cp=cp, dp=dp, virtual=virtual, micro_batch=micro,
        micro_batches=max(1, round(batch / dp / micro)), sharded=sharded,
        recompute=str(given.get("recompute", "none")).split(" ")[0].strip(","),
        flash=sharded or "ffn" in given or precision_of(given) == "fp8",
    )  # fmt: skip


def work_of(model: Transformer, how: Division, grad_bytes: int) -> StepWork:
    """Work of a rank by closed formulas."""
    matrices, attention, logits = (how.micro_batch * flop / how.tp / how.pp / how.cp for flop in model.sample_flop)
    full, selective = how.recompute == "full", how.recompute == "selective" and not how.flash
    scores = 0.5 if how.flash else 1.0  # flash attention leaves out what causality masks
    layers = model.layers / how.pp
    moved = layer_activation_bytes(
        model, how.micro_batch, how.tp, recompute="none", sequence_parallel=how.recompute != "full" or how.flash,
        flash=how.flash,
    )  # fmt: skip
    hidden = 2 * model.seq * how.micro_batch * model.hidden / how.cp
    weights = (model.layers * model.layer_parameters + 2 * model.vocab * model.hidden) / how.tp / how.pp
    data, times = sent_bytes("all_reduce", how.dp, grad_bytes * weights), 1
    if how.sharded:
        gathered = 2 * sent_bytes("all_gather", how.dp, 2 * weights)
        data, times = gathered + sent_bytes("reduce_scatter", how.dp, grad_bytes * weights), how.micro_batches
    stride = how.tp * how.cp
    traffic = Traffic(
        bytes=data, times=times, reach=stride * how.dp, stride=stride, hidden=1.0 if how.sharded else 0.0
    )  # fmt: skip
    return StepWork(
        flop=matrices * (4 if full else 3) + 3 * logits,
        attention_flop=scores * attention * (4 if full or selective else 3),
        activation_bytes=layers * moved / how.cp * (4 / 3 if full else 1),
        tensor_bytes=layers * (6 if full else 4) * sent_bytes("all_reduce", how.tp, hidden),
        tensor_reach=how.tp,
        pipeline_bytes=2 * how.virtual * hidden / how.tp if how.pp > 1 else 0.0,
        pipeline_reach=how.gpus,
        micro_batches=how.micro_batches,
        bubble=bubble(how.pp, how.micro_batches, how.virtual),
        traffic=(traffic,),
        step_state_bytes=_ADAM_BYTES * weights / (how.dp if how.sharded else 1),
    )


def timed(case: Case) -> tuple[StepWork, ClusterSettings, ComputeType, float]:
    """A case as work on a cluster, with its step time in seconds."""
    given, model, how = case.given, transformer(case.given), division_of(case.given)
    work = work_of(model, how, 4 if "fp32 reduce" in str(given.get("precision")) else 2)
    return work, cluster_of(given), precision_of(given), seconds_of(case, model, how, case.expect.value)


def seconds_of(case: Case, model: Transformer, how: Division, value: float) -> float:
    """Turn a rate of a case's unit into the seconds of a step, and back: each is a constant over the other."""
    batch = how.micro_batches * how.micro_batch * how.dp
    quantity = case.expect.quantity
    if quantity == "iteration_time":
        return value
    if quantity == "tokens_per_s_per_gpu":
        return batch * model.seq / how.gpus / value
    flop = hardware_flop(model, batch, "full") if quantity == "hardware_tflops_per_gpu" else model_flop(model, batch)
    return flop / how.gpus / value / 1e12


def other(case: Case) -> float:
    """Predict a measured case that is not a step of a transformer."""
    given = case.given
    if case.expect.quantity == "algorithm_bandwidth":
        return float(given["bus_gb_per_s"]) / sent_bytes("all_reduce", given["gpus"], 1.0)
    if case.expect.quantity == "peak_memory_per_gpu":
        each = (given["peak_at_micro_batch_2_mib"] - given["state_mib"]) / 2
        return float(given["state_mib"] + given["micro_batch"] * each)
    if case.expect.quantity == "tokens_per_s_per_gpu_64_over_32":
        rates = []
        for gpus in given["gpus"]:
            sized = {**given, "gpus": gpus, "dp_shard": gpus}
            work = work_of(transformer(sized), division_of(sized), 2)
            rates.append(1 / step_time(work, cluster_of(given), "fp8", Efficiency()).total)
        return rates[1] / rates[0]
    if case.expect.quantity == "layer_time_full_recompute_over_none":
        times = []
        for recompute in ("none", "full"):
            how = division_of({**given, "recompute": recompute})
            work = msgspec.structs.replace(work_of(transformer(given), how, 2), step_state_bytes=0.0)
            times.append(step_time(work, cluster_of(given), "bf16", Efficiency()).total)
        return times[1] / times[0]
    return _resnet(case)


def _resnet(case: Case) -> float:
    """ResNet-50: products at the usual share of the peak; what is left of MLPerf's A100 time moves activations.

    That time is taken as TF32's; 16 bits halve the bytes and double the peak.
    """
    a100, h100, quantity = load_cluster("1x8-a100"), load_cluster("1x8-h100"), case.expect.quantity
    flop = _RESNET_GFLOP * 1e9 / Efficiency().compute
    known = 0.435 / 400  # seconds an image: MLPerf Storage v1.0, resnet50_a100.yaml
    moving = known - flop / a100.peak_flops("tf32")
    if quantity == "compute_time":
        device = h100 if case.given["gpu"] == "H100" else a100
        slower = a100.device.memory_gb_per_s.value / device.device.memory_gb_per_s.value
        return float(case.given["batch"]) * (flop / device.peak_flops("tf32") + moving * slower)
    if quantity == "images_per_s":
        return 1 / (flop / a100.peak_flops("fp16") + moving / 2)
    # Gradients of 25.6 M parameters are small beside a step: what of their all-reduce shows is the model's to say.
    first, last = case.given["gpus"]
    seconds = 256 / float(case.given.get("images_per_s_one", 1 / (flop / h100.peak_flops("fp16") + moving / 2)))
    cluster = load_cluster("8x8-h100" if "H100" in case.given["gpu"] else "64x8-a100")
    rates = []
    for ranks in (first, last):
        reduced = sent_bytes("all_reduce", ranks, 4 * 25.6e6) / cluster.bytes_per_s(ranks)
        exposed = max(0.0, reduced - seconds * 2 / 3)
        rates.append(ranks / (seconds + exposed))
    ratio: float = rates[1] / rates[0]
    return ratio


def compare(cases: Sequence[Case]) -> Figures:
    """Predict all cases. Raises ValueError for a quantity that nothing here predicts."""
    by_id = {case.id: case for case in cases}
    named = {name for case in cases for name in case.calibrate_on}
    found = []
    for case in cases:
        if case.id in NOT_MODELLED:
            continue
        if case.expect.quantity not in PREDICTED:
            known = ", ".join(PREDICTED)
            raise ValueError(f"case '{case.id}': '{case.expect.quantity}' is not predicted; predicted are {known}")
        efficiency, fitted_on = None, list[str]()
        if case.kind.startswith("formula"):
            role, value = "formula", formula(case)
        elif case.expect.quantity in _TIMED:
            role = "calibration" if case.id in named and not case.calibrate_on else "measured"
            fitted_on = case.calibrate_on or sorted(_pool(case, [by_id[name] for name in sorted(named)]))
            efficiency = fit([timed(by_id[name]) for name in fitted_on])
            work, cluster, kind, _ = timed(case)
            predicted_s = step_time(work, cluster, kind, efficiency).total
            value = seconds_of(case, transformer(case.given), division_of(case.given), predicted_s)
        else:
            role, value = "calibration" if case.id in named else "measured", other(case)
        difference = value - case.expect.value
        limit = case.expect.tolerance
        within = abs(difference) <= limit.get("absolute", limit.get("relative", 0.0) * case.expect.value)
        found.append(
            Predicted(
                id=case.id, role=role, predicted=value, published=case.expect.value,
                error=difference / case.expect.value, within=within, fitted_on=fitted_on, efficiency=efficiency,
                explanation=EXPLAINED.get(case.id, ""),
            )
        )  # fmt: skip
    formulas = [one for one in found if one.role == "formula"]
    measured = [one for one in found if one.role == "measured"]
    errors = [abs(one.error) for one in measured]
    return Figures(
        benchmark="reference_figures", num_cases=len(cases), formula_cases=len(formulas),
        formula_within=sum(one.within for one in formulas), measured_cases=len(measured),
        mean_error=statistics.mean(errors), median_error=statistics.median(errors), worst_error=max(errors),
        measured_within_own_tolerance=sum(one.within for one in measured), cases=found, not_modelled=NOT_MODELLED,
    )  # fmt: skip


_TIMED = ("iteration_time", "tokens_per_s_per_gpu", "hardware_tflops_per_gpu", "model_tflops_per_gpu")
PREDICTED = (
    *_TIMED, "model_state_bytes_per_gpu", "activation_bytes_first_stage", "mfu", "hfu", "parameters", "training_days",
    "bubble_over_ideal_time", "bytes_sent_per_rank", "gpu_hours_to_target", "global_batch", "algorithm_bandwidth",
    "peak_memory_per_gpu", "tokens_per_s_per_gpu_64_over_32", "layer_time_full_recompute_over_none", "compute_time",
    "images_per_s", "images_per_s_8_over_1", "speedup",
)  # fmt: skip


def _pool(case: Case, named: Sequence[Case]) -> list[str]:
    """Cases to fit on for one that names none."""
    usable = [one for one in named if one.expect.quantity in _TIMED and one.id not in NOT_MODELLED]
    if case.id in {one.id for one in usable}:
        return [case.id]
    family = case.source.split(",")[0]
    same = [one.id for one in usable if one.source.split(",")[0] == family]
    device, kind = cluster_of(case.given).device.name, precision_of(case.given)
    return same or [
        one.id for one in usable if cluster_of(one.given).device.name == device and precision_of(one.given) == kind
    ]
