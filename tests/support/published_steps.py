"""Published runs beside those of the file of reference figures: what ran, on what, and how fast.

Each is written in the words of a case of that file (`support.reference_steps`), so that one function makes a scenario
of both. ``tokens_per_s`` are tokens a second of a device. All of them ran, so none should be refused for memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

NEMO = "NVIDIA NeMo 24.07, docs/source/performance/performance_summary.md, pre-training"
BRIDGE = "NVIDIA Megatron Bridge 25.11, docs/performance-summary.md, DGX-H100"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TRAINY = "Trainy, torchtitan's benchmarks/llama3_8b_h200_2025-06_torchtitan.md"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"

_H100 = "H100-80GB-SXM"
_TITAN_H100 = "H100-96GB-SXM HBM2e, 500 W limit"


class PublishedStep(NamedTuple):
    """A published run: ``given`` as in a case of the reference figures."""

    name: str
    source: str
    given: dict[str, Any]
    tokens_per_s: float


def _sizes(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, **more}


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return _sizes(layers, hidden, heads, ffn=ffn, **more)


_LLAMA2 = {
    "7B": _llama(32, 4096, 32, 11008, vocab=32000),
    "13B": _llama(40, 5120, 40, 13824, vocab=32000),
    "70B": _llama(80, 8192, 64, 28672, kv_heads=8, vocab=32000),
}
_LLAMA3 = {
    "8B": _llama(32, 4096, 32, 14336, kv_heads=8, vocab=128256),
    "70B": _llama(80, 8192, 64, 28672, kv_heads=8, vocab=128256),
    "405B": _llama(126, 16384, 128, 53248, kv_heads=8, vocab=128256),
}
_GPT3 = {
    "5B": _sizes(24, 4096, 32, vocab=51200),
    "20B": _sizes(44, 6144, 48, vocab=51200),
    "175B": _sizes(96, 12288, 96, vocab=51200),
}
_NEMOTRON = {  # whose perceptrons are wide, but not gated
    "8B": _sizes(32, 4096, 32, vocab=256000),
    "22B": _sizes(40, 6144, 48, vocab=256000),
    "340B": _sizes(96, 18432, 96, kv_heads=8, vocab=256000),
}
# Layers, width and heads; their embeddings are tied.
_MPT = {
    "30b": (48, 7168, 56),
    "13b": (40, 5120, 40),
    "7b": (32, 4096, 32),
    "3b": (32, 2560, 20),
    "1b": (24, 2048, 16),
}


def _nvidia(
    name: str, source: str, model: dict[str, Any], rate: float, **settings: Any
) -> PublishedStep:
    """NVIDIA's trainers keep and reduce gradients in bf16, and divide the optimiser's state."""
    common = {"precision": "fp8", "gpu": _H100}
    return PublishedStep(name, source, {**model, **common, **settings}, rate)


def _titan(name: str, model: str, rate: float, **settings: Any) -> PublishedStep:
    common = {"precision": "float8", "gpu": _TITAN_H100, "seq": 8192}
    return PublishedStep(name, TITAN, {**_LLAMA3[model], **common, **settings}, rate)


def _trainy(name: str, rate: float, **settings: Any) -> PublishedStep:
    common = {
        "precision": "float8",
        "gpu": "H200",
        "seq": 8192,
        "recompute": "selective",
    }
    return PublishedStep(
        name,
        TRAINY,
        {**_LLAMA3["8B"], **common, "local_batch": 2, **settings},
        rate,
    )


def _mpt(
    gpu: str,
    model: str,
    seq: int,
    gpus: int,
    micro: int,
    steps: int,
    full: bool,
    rate: float,
) -> PublishedStep:
    """``full`` recomputation; the precision is bf16, with fp32 weights in the optimiser."""
    layers, hidden, heads = _MPT[model]
    settings = {
        **_sizes(layers, hidden, heads, vocab=50368, tied=True),
        "seq": seq,
        "gpus": gpus,
        "dp_shard": gpus,
        "micro_batch": micro,
        "accumulation": steps,
        "recompute": "full" if full else "none",
        "precision": "bf16",
        "gpu": gpu,
    }
    return PublishedStep(f"mpt-{model}-{seq}-{gpu}-{gpus}", FOUNDRY, settings, rate)


# Model, tokens, devices, micro-batch, micro-batches, full recomputation, and tokens/s of an H100 and an A100 of 80 GB.
_MPT_RUNS = (
    ("30b", 8192, 8, 1, 21, True, 1384, 574),
    ("13b", 32768, 8, 1, 3, True, 1976, 1016),
    ("7b", 65536, 8, 1, 2, True, 1956, 1013),
    ("7b", 8192, 8, 8, 2, True, 6935, 3206),
    ("3b", 65536, 8, 1, 2, True, 3262, 1767),
    ("3b", 16384, 8, 1, 6, False, 11152, 5529),
    ("1b", 32768, 8, 1, 4, False, 12025, 6275),
    ("1b", 8192, 8, 3, 4, False, 29157, 13814),
)

PUBLISHED = (
    _nvidia(
        "nemo-gpt3-5B",
        NEMO,
        _GPT3["5B"],
        22521,
        seq=2048,
        gpus=64,
        global_batch=2048,
        micro_batch=4,
    ),
    _nvidia(
        "nemo-gpt3-20B",
        NEMO,
        _GPT3["20B"],
        5851,
        seq=2048,
        gpus=64,
        global_batch=256,
        micro_batch=2,
        tp=2,
    ),
    _nvidia(
        "nemo-gpt3-175B-512",
        NEMO,
        _GPT3["175B"],
        782,
        seq=2048,
        gpus=512,
        global_batch=2048,
        micro_batch=2,
        tp=4,
        pp=8,
        virtual_stages=6,
    ),
    _nvidia(
        "nemo-llama2-7B",
        NEMO,
        _LLAMA2["7B"],
        16847,
        seq=4096,
        gpus=8,
        global_batch=128,
        micro_batch=1,
    ),
    _nvidia(
        "nemo-llama2-13B",
        NEMO,
        _LLAMA2["13B"],
        8646,
        seq=4096,
        gpus=16,
        global_batch=128,
        micro_batch=1,
        pp=4,
        virtual_stages=10,
    ),
    _nvidia(
        "nemo-llama2-70B",
        NEMO,
        _LLAMA2["70B"],
        1707,
        seq=4096,
        gpus=64,
        global_batch=128,
        micro_batch=1,
        tp=4,
        pp=4,
        virtual_stages=20,
    ),
    _nvidia(
        "nemo-nemotron-8B",
        NEMO,
        _NEMOTRON["8B"],
        12701,
        seq=4096,
        gpus=64,
        global_batch=256,
        micro_batch=4,
        tp=2,
    ),
    _nvidia(
        "nemo-nemotron-22B",
        NEMO,
        _NEMOTRON["22B"],
        4256,
        seq=4096,
        gpus=64,
        global_batch=256,
        micro_batch=2,
        tp=2,
        pp=4,
        virtual_stages=10,
    ),
    _nvidia(
        "nemo-nemotron-340B",
        NEMO,
        _NEMOTRON["340B"],
        322,
        seq=4096,
        gpus=128,
        global_batch=32,
        micro_batch=1,
        tp=8,
        pp=8,
        virtual_stages=12,
    ),
    _nvidia(
        "nemo-llama3-8B",
        NEMO,
        _LLAMA3["8B"],
        12036,
        seq=8192,
        gpus=8,
        global_batch=128,
        micro_batch=1,
        cp=2,
    ),
    _nvidia(
        "nemo-llama3-70B",
        NEMO,
        _LLAMA3["70B"],
        1533,
        seq=8192,
        gpus=64,
        global_batch=128,
        micro_batch=1,
        tp=4,
        pp=4,
        cp=2,
        virtual_stages=5,
    ),
    _nvidia(
        "bridge-llama3-8B-25.11",
        BRIDGE,
        _LLAMA3["8B"],
        14451,
        seq=8192,
        gpus=8,
        global_batch=128,
        micro_batch=1,
        fsdp=True,
    ),
    _nvidia(
        "bridge-llama3-70B-25.11",
        BRIDGE,
        _LLAMA3["70B"],
        1602,
        seq=8192,
        gpus=64,
        global_batch=128,
        micro_batch=1,
        tp=4,
        pp=8,
        virtual_stages=5,
    ),
    _titan(
        "titan-8B-8-float8",
        "8B",
        8532,
        gpus=8,
        dp_shard=8,
        local_batch=2,
        recompute="selective",
    ),
    _titan(
        "titan-8B-128-float8",
        "8B",
        8380,
        gpus=128,
        dp_shard=128,
        local_batch=2,
        recompute="selective",
    ),
    _titan(
        "titan-8B-128-compile",
        "8B",
        6514,
        gpus=128,
        dp_shard=128,
        local_batch=2,
        recompute="selective",
        precision="bf16",
    ),
    _titan(
        "titan-8B-32768",
        "8B",
        3890,
        gpus=8,
        dp_shard=8,
        local_batch=1,
        recompute="full",
        seq=32768,
    ),
    _titan(
        "titan-8B-65536",
        "8B",
        2540,
        gpus=8,
        dp_shard=8,
        cp=2,
        local_batch=1,
        recompute="full",
        seq=65536,
    ),
    _trainy("trainy-8B-32", 10938, gpus=32, dp_shard=32),
    _trainy("trainy-8B-64", 10753, gpus=64, dp_shard=64),
    *(_mpt("H100-80GB", *run, rate) for *run, rate, _ in _MPT_RUNS),
    *(_mpt("A100-80GB", *run, rate) for *run, _, rate in _MPT_RUNS),
)
