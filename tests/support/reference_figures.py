"""The planner against published figures, of a file of cases with sources, givens and tolerances.

``tests/slow/test_reference_figures.py`` predicts every case. A step is written as a scenario (`reference_steps`) and
planned as a user's is: with the efficiencies that the product has, and fitted to the measured steps that the case's
``calibrate_on`` names. What no scenario can say is listed with its reason.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from fuelrail.bench.planner import choice
from fuelrail.bench.planner.formulas import bubble, sent_bytes, zero_state_bytes
from fuelrail.bench.planner.hardware import GIB
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.planner.step_time import (
    CONVOLUTION,
    DECODER,
    efficiency_of,
    fit,
    slopes,
    spread_factor,
    step_time,
)
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from support.published_formulas import (
    first_stage_layers,
    hardware_flop,
    layer_activation_bytes,
    model_flop,
    parameters,
    training_days,
    utilisation,
)
from support.reference_steps import (
    TIMED,
    cluster_of,
    scenario_of,
    seconds_of,
    software_of,
    transformer,
)

NOT_EXPRESSIBLE = {
    "titan-8B-n8-mem": "which activations torchtitan's selective recomputation kept is not in the case",
    "titan-8B-n8-compile-mem": "what the compiler fuses is not modelled",
    "titan-8B-n128-compile-mem": "what the compiler fuses is not modelled",
    "bevformer-base-gpu-hours": "the network is none of the trainer's, and its FLOP are not in the case",
    "sparse4dv2-samples": "the network is none of the trainer's, and its FLOP are not in the case",
    "nanotron-8-pp8-rate": "the model's shape is not in the case",
    "nanotron-8-d2t2p2-rate": "the model's shape is not in the case",
    "nanotron-mb-memory": "the model's shape is not in the case",
    "h100-ring-busbw": "the cluster files have their NVLink rate from this very source",
    "rn50-v100-amp-8-over-1": "no cluster file is of V100",
    "rn50-v100-32-amp-8-over-1": "no cluster file is of V100",
    "rn50-a100-amp-8-over-1": "the published pipeline is held up by its host's decoding, which the case does not give",
    "mlperf-rn50-64-over-8": "time to accuracy: the larger batch needs more epochs, which is not modelled",
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
    """One case with what was predicted: ``error`` is that of the product as it is, ``fitted`` that after a fit."""

    id: str
    role: str
    error: float
    within: bool
    in_range: bool = True
    fitted: float | None = None
    fitted_in_range: bool = True
    peak_gib: float = 0.0
    usable_gib: float = math.inf


def formula(case: Case) -> float:
    """Predict a case that follows from a closed formula, in its unit."""
    settings = case.given
    quantity = case.expect.quantity
    if quantity == "model_state_bytes_per_gpu" and "data_parallel" in settings:
        sizes = (
            settings["param_bytes"],
            settings["grad_bytes"],
            settings["optimiser_bytes"],
        )
        return (
            zero_state_bytes(
                settings["parameters"],
                settings["data_parallel"],
                settings["zero_stage"],
                *sizes,
            )
            / 1e9
        )
    if quantity == "model_state_bytes_per_gpu":
        parameter_bytes = (
            settings["param_bytes"] + settings["grad_bytes"] + settings["optimiser_bytes"]
        )
        return float(
            12
            * settings["layers"]
            * settings["hidden"] ** 2
            * parameter_bytes
            / settings["tp"]
            / settings["pp"]
            / GIB
        )
    if quantity == "activation_bytes_first_stage":
        layer = layer_activation_bytes(
            transformer(settings),
            settings["micro_batch"],
            settings["tp"],
            recompute=settings["recompute"],
            sequence_parallel=settings["sequence_parallel"],
        )
        return (
            layer
            * first_stage_layers(settings["layers"], settings["pp"], settings["virtual_stages"])
            / GIB
        )
    if quantity in ("mfu", "hfu") and "iteration_time_s" in settings:
        model = transformer(settings)
        count = settings["global_batch"]
        flop = (
            model_flop(model, count)
            if quantity == "mfu"
            else hardware_flop(model, count, settings["recompute"])
        )
        return 100 * utilisation(
            flop,
            settings["iteration_time_s"],
            settings["gpus"],
            settings["peak_tflops"] * 1e12,
        )
    if quantity == "mfu":
        token = (
            6 * settings["parameters"]
            + 12 * settings["layers"] * settings["hidden"] * settings["seq"]
        )
        return 100 * utilisation(
            token * settings["tokens_per_s_per_gpu"],
            1.0,
            1,
            settings["peak_tflops"] * 1e12,
        )
    if quantity == "parameters":
        return parameters(transformer(settings)) / 1e9
    if quantity == "training_days":
        rate = settings["hardware_tflops_per_gpu"] * 1e12
        return training_days(settings["parameters"], settings["tokens"], settings["gpus"], rate)
    if quantity == "bubble_over_ideal_time":
        return bubble(settings["pp"], settings["microbatches"], settings["virtual_stages"])
    if quantity == "bytes_sent_per_rank":
        kind = "all_gather" if case.id.startswith("allgather") else "all_reduce"
        return sent_bytes(kind, settings["ranks"], settings["bytes"])
    if quantity == "gpu_hours_to_target":
        return float(settings["gpus"] * settings["minutes"] / 60)
    assert quantity == "global_batch", f"{case.id}: no formula for {quantity}"
    return float(settings["per_gpu_batch"] * settings["gpus"] * settings["accumulation"])


@functools.cache
def planned(scenario: Scenario, gpu: str, gpus: int) -> choice.Fit:
    """Plan a case as the command does, whether it fits into memory or not."""
    return choice.fit(
        scenario,
        cluster_of({"gpu": gpu, "gpus": gpus}),
        scenario.parallel,
        fits=True,
    )


def resnet(case: Case) -> tuple[Scenario, float]:
    """ResNet-50 on one device, and the seconds of a step; MLPerf's emulated times are taken as TF32's."""
    settings = case.given
    rate = case.expect.quantity == "images_per_s"
    batch = settings["batch"]
    scenario = Scenario(
        name=case.id,
        model="resnet50",
        cluster="none",
        cameras=1,
        height=224,
        width=224,
        global_batch=batch,
        micro_batch=batch,
        precision="fp16" if rate else "tf32",
        parallel=ParallelSettings(optimiser="sgd"),
    )
    return scenario, batch / case.expect.value if rate else case.expect.value


def timed(case: Case) -> tuple[choice.Fit, Any, Any, float]:
    """A measured step: its plan, cluster, compute type and seconds."""
    if "layers" in case.given:
        settings = case.given
        gpus = case.given["gpus"]
        scenario = scenario_of(case.id, settings)
        seconds = seconds_of(
            settings,
            case.expect.quantity,
            case.expect.value,
            scenario.global_batch,
        )
    else:
        gpus = 1
        (scenario, seconds) = resnet(case)
    gpu = case.given["gpu"]
    return (
        planned(scenario, gpu, gpus),
        cluster_of({"gpu": gpu, "gpus": gpus}),
        scenario.precision,
        seconds,
    )


def step(case: Case, by_id: dict[str, Case]) -> Predicted:
    """Predict a measured step with the product's efficiencies, and with those fitted to what the case names."""
    planned_fit, cluster, kind, seconds = timed(case)
    family = DECODER if "layers" in case.given else CONVOLUTION
    used = efficiency_of(cluster.device.name, kind, software_of(case.given), family)
    error = planned_fit.time.total / seconds - 1
    fitted = None
    inside = True
    if case.calibrate_on:
        calibrations = [timed(by_id[name]) for name in case.calibrate_on]
        result = fit(
            [
                (case_fit.work, where, compute_type, took)
                for case_fit, where, compute_type, took in calibrations
            ],
            used,
        )
        predicted = step_time(planned_fit.work, cluster, kind, result.efficiency).total
        deviation = result.deviation(slopes(planned_fit.work, cluster, kind, result.efficiency))
        fitted = predicted / seconds - 1
        inside = abs(math.log(1 + fitted)) <= math.log(spread_factor(deviation))
    return Predicted(
        id=case.id,
        role="step",
        error=error,
        within=abs(error) <= case.expect.tolerance["relative"],
        in_range=abs(math.log(1 + error)) <= math.log(spread_factor(used.spread)),
        fitted=fitted,
        fitted_in_range=inside,
        peak_gib=choice.peak(planned_fit.stages) / GIB,
        usable_gib=choice.USABLE * cluster.device.memory_gib.value,
    )


def ratio(case: Case) -> float:
    """Predict a measured case that is not a step."""
    settings = case.given
    quantity = case.expect.quantity
    if quantity == "algorithm_bandwidth":
        return float(settings["bus_gb_per_s"]) / sent_bytes("all_reduce", settings["gpus"], 1.0)
    if quantity == "tokens_per_s_per_gpu_64_over_32":
        first, last = settings["gpus"]
        totals = []
        for gpus in (first, last):
            sized = {**settings, "gpus": gpus, "dp_shard": gpus}
            totals.append(planned(scenario_of(case.id, sized), settings["gpu"], gpus).time.total)
        return totals[0] / totals[1]
    assert quantity == "layer_time_full_recompute_over_none", (
        f"{case.id}: nothing predicts {quantity}"
    )
    parts = []
    for recompute in ("none", "full"):
        time = planned(
            scenario_of(case.id, {**settings, "recompute": recompute}),
            settings["gpu"],
            settings["gpus"],
        ).time
        parts.append(time.compute + time.memory + time.tensor)
    return parts[1] / parts[0]


def predict(cases: Sequence[Case]) -> list[Predicted]:
    """Predict all cases that a scenario or a formula can say."""
    by_id = {case.id: case for case in cases}
    predictions = []
    for case in cases:
        if case.id in NOT_EXPRESSIBLE:
            continue
        if not case.kind.startswith("formula") and case.expect.quantity in (
            *TIMED,
            "compute_time",
            "images_per_s",
        ):
            predictions.append(step(case, by_id))
            continue
        role, value = (
            ("formula", formula(case))
            if case.kind.startswith("formula")
            else ("ratio", ratio(case))
        )
        difference = value - case.expect.value
        limit = case.expect.tolerance
        within = abs(difference) <= limit.get(
            "absolute", limit.get("relative", 0.0) * case.expect.value
        )
        predictions.append(
            Predicted(
                id=case.id,
                role=role,
                error=difference / case.expect.value,
                within=within,
            )
        )
    return predictions


def mean_error(errors: Sequence[float]) -> float:
    """Mean of the sizes of errors."""
    return statistics.mean(map(abs, errors))
