"""Published steps as scenarios: what a user would write of each, and the cluster that it ran on.

What a case does not say is assumed here, for all cases alike: micro-batches of one in a pipeline, Megatron's and
llm-foundry's vocabularies, heads of 128 channels, a virtual stage a layer in Llama's largest run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.hardware import (
    ClusterSettings,
    Device,
    Sourced,
    load_cluster,
)
from fuelrail.bench.planner.scenario import Scenario, TransformerShape
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from support.published_formulas import Transformer, hardware_flop, model_flop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuelrail.bench.planner.hardware import ComputeType
    from fuelrail.bench.planner.step_time import Software

_MPT_VOCABULARY = 50368  # llm-foundry's, padded
_GPT_VOCABULARY = 51200  # Megatron's, padded


def transformer(settings: Mapping[str, Any]) -> Transformer:
    """Shape of a case's model; Llama's perceptrons are gated, and are the only ones with a width of their own."""
    vocabulary = (
        _MPT_VOCABULARY if str(settings.get("model", "")).startswith("MPT") else _GPT_VOCABULARY
    )
    return Transformer(
        layers=settings["layers"],
        hidden=settings["hidden"],
        heads=settings.get("heads", settings["hidden"] // 128),
        seq=settings["seq"],
        vocab=settings.get("vocab", vocabulary),
        ffn=settings.get("ffn"),
        gated="ffn" in settings,
        kv_heads=settings.get("kv_heads"),
    )


def precision_of(settings: Mapping[str, Any]) -> ComputeType:
    """The type of the matrix products."""
    return "fp8" if str(settings.get("precision", "")).startswith(("fp8", "float8")) else "bf16"


def software_of(settings: Mapping[str, Any]) -> Software | None:
    """Whose kernels computed in 8 bits: torchtitan says float8, NVIDIA fp8."""
    if precision_of(settings) != "fp8":
        return None
    return "torch" if str(settings["precision"]).startswith("float8") else "nvidia"


def is_fused(settings: Mapping[str, Any]) -> bool:
    """Whether attention was one kernel: in Megatron on A100, before FlashAttention, it was not."""
    is_mpt = settings.get("tied", False) or str(settings.get("model", "")).startswith("MPT")
    return is_mpt or not str(settings["gpu"]).startswith("A100")


def cluster_of(settings: Mapping[str, Any]) -> ClusterSettings:
    """The shipped cluster of a case's device, with as many nodes as it ran on and the memory it had."""
    gpu = str(settings["gpu"])
    name = (
        "8x8-h200"
        if gpu.startswith("H200")
        else "8x8-h100"
        if gpu.startswith("H100")
        else "64x8-a100"
    )
    cluster = load_cluster(name)
    gpus = settings["gpus"]
    memory = next((size for size in (96, 40) if f"{size}GB" in gpu), None)
    device = cluster.device
    if memory is not None:
        device = msgspec.structs.replace(
            device, memory_gib=Sourced(value=memory, source="the case's device")
        )
    if "500 W" in gpu:
        device = msgspec.structs.replace(device, **limited(device))
    return msgspec.structs.replace(
        cluster,
        nodes=-(-gpus // 8),
        devices_per_node=min(gpus, cluster.devices_per_node),
        device=device,
    )


def limited(device: Device) -> dict[str, Any]:
    """Rates of torchtitan's devices: slower memory, and peaks "between SXM and NVL", of which the mean is taken.

    NVIDIA's NVL has 1,671 of the SXM's 1,979 TFLOP/s (sparse, 16 bits).
    """
    source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, hardware and second footnote"
    share = (1 + 1671 / 1979) / 2
    peaks = {
        kind: Sourced(value=share * peak.value, source=source)
        for kind, peak in device.peak_tflops.items()
    }
    return {
        "memory_gb_per_s": Sourced(value=2400, source=source),
        "peak_tflops": peaks,
    }


def scenario_of(
    identity: str, settings: Mapping[str, Any], step_s: float | None = None
) -> Scenario:
    """Write a case of a transformer as a scenario."""
    gpus = settings["gpus"]
    tp = settings.get("tp", 1)
    pp = settings.get("pp", 1)
    cp = settings.get("cp", 1)
    sharded = "dp_shard" in settings or settings.get("fsdp", False)
    data = gpus // (tp * pp)
    if "tokens_per_batch" in settings:
        batch = round(settings["tokens_per_batch"] / settings["seq"] / data / pp) * data * pp
    else:
        local = settings.get("local_batch") or settings.get("micro_batch", 1) * settings.get(
            "accumulation", 1
        )
        batch = settings.get("global_batch") or local * data // cp
    micro = settings.get("micro_batch") or (1 if pp > 1 else settings.get("local_batch", 1))
    virtual = settings.get("virtual_stages") or (8 if "tokens_per_batch" in settings else 1)
    sizes = {
        "pp": pp,
        "dp_shard" if sharded else "dp_replicate": data,
        "tp": tp,
    }
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    model = transformer(settings)
    return Scenario(
        name=identity,
        cluster=cluster_of(settings).name,
        global_batch=batch,
        micro_batch=micro,
        model=TransformerShape(
            layers=model.layers,
            width=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.ffn,
            gated=model.gated,
            vocabulary=model.vocab,
            tied=settings.get("tied", str(settings.get("model", "")).startswith("MPT")),
        ),
        sequence=settings["seq"],
        precision=precision_of(settings),
        weights="bf16",
        gradients="bf16" if software_of(settings) == "nvidia" else None,
        software=software_of(settings),
        attention=None if is_fused(settings) else "unfused",
        context_parallel=cp,
        virtual_stages=virtual,
        measured_step_s=step_s,
        parallel=ParallelSettings(
            mesh=mesh or None,
            recompute=str(settings.get("recompute", "none")).split(" ")[0].strip(","),
            pipeline_schedule="Interleaved1F1B" if virtual > 1 and pp > 1 else "1F1B",
        ),
    )


def seconds_of(settings: Mapping[str, Any], quantity: str, value: float, batch: int) -> float:
    """Turn a rate of a case's unit into the seconds of a step, and back: each is a constant over the other."""
    model = transformer(settings)
    if quantity == "iteration_time":
        return value
    if quantity == "tokens_per_s_per_gpu":
        return batch * model.seq / settings["gpus"] / value
    flop = (
        hardware_flop(model, batch, "full")
        if quantity == "hardware_tflops_per_gpu"
        else model_flop(model, batch)
    )
    return flop / settings["gpus"] / value / 1e12


TIMED = (
    "iteration_time",
    "tokens_per_s_per_gpu",
    "hardware_tflops_per_gpu",
    "model_tflops_per_gpu",
)
