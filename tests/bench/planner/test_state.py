"""Bytes of a strategy's state, and the refusal of a model that does not fit."""

from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.planner.state import (
    check_memory,
    expert_parameters,
    least_bytes,
    num_parameters,
    state_bytes,
    state_of,
)
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings
from fuelrail.pipeline.errors import ConfigError


def test_state_is_sixteen_bytes_a_parameter_divided_by_the_shards():
    size = MODELS["gpt2"]
    state_bytes = least_bytes(size, ParallelSettings(), Degrees(), "fp32")
    assert state_bytes == 16 * (
        2 * 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    )
    assert (
        least_bytes(
            size,
            ParallelSettings(strategy="zero1"),
            Degrees(dp_replicate=8),
            "fp32",
        )
        == state_bytes * 9 // 16
    )
    # arXiv 1910.02054 leaves out the block that is gathered: 8 bytes for each of its parameters.
    block = 12 * 768**2 + 13 * 768
    assert (
        least_bytes(size, ParallelSettings(), Degrees(dp_shard=2), "fp32")
        == state_bytes // 2 + 8 * block
    )
    assert (
        least_bytes(size, ParallelSettings(), Degrees(dp_shard=8), "fp32")
        == state_bytes // 8 + 8 * block
    )


def test_a_hundred_billion_parameters_fit_on_enough_gpus():
    check_memory(
        "gpt-100b",
        settings=ParallelSettings(),
        degrees=Degrees(dp_shard=64),
        precision="bf16",
        available=80 * 2**30,
        alone=True,
    )
    check_memory(
        "gpt-100b",
        settings=ParallelSettings(),
        degrees=Degrees(pp=8, tp=8),
        precision="bf16",
        available=80 * 2**30,
        alone=True,
    )


@pytest.mark.parametrize("degrees", [Degrees(dp_replicate=8), Degrees(dp_shard=8)], ids=str)
def test_ranks_that_share_experts_have_their_part_of_the_experts_alone(degrees):
    """Shards have their share of everything in any case: whose experts are whole nowhere."""
    size = msgspec.structs.replace(MODELS["gpt-tiny"], experts=8, active_experts=2)
    experts = size.depth * expert_parameters(size)
    dense = num_parameters(size).total - experts
    assert dense == num_parameters(MODELS["gpt-tiny"]).total - experts / 8 + size.depth * 8 * 32
    state = state_of(size, ParallelSettings(), degrees, "fp32", expert_parallel=4)
    part = 1 / 8 if degrees.dp_shard > 1 else 1.0
    expert_part = 1 / 8 if degrees.dp_shard > 1 else 1 / 4
    parameters = dense * part + experts * expert_part
    assert state == (4 * parameters, 4 * parameters, 8 * parameters)


def test_zero2_holds_its_shards_beside_what_it_gathered():
    """Of each parameter: a gathered copy, and 4 bytes of master weight, gradient and two moments over the ranks."""
    size = MODELS["gpt2"]
    parameters = least_bytes(size, ParallelSettings(), Degrees(), "fp32") / 16
    for ranks, precision, copy in (
        (2, "fp32", 4),
        (8, "fp32", 4),
        (8, "bf16", 2),
    ):
        settings = ParallelSettings(strategy="zero2")
        degrees = Degrees(dp_shard=ranks)
        assert state_bytes(size, settings, degrees, precision) == parameters * (copy + 16 / ranks)


def test_a_model_that_does_not_fit_is_refused_with_what_would():
    with pytest.raises(
        ConfigError,
        match=r"at least 2\.4 GiB .* fit with dp_shard=2 or model gpt-tiny",
    ):
        check_memory(
            "gpt2",
            settings=ParallelSettings(),
            degrees=Degrees(),
            precision="fp32",
            available=2**31,
            alone=True,
        )
    with pytest.raises(ConfigError, match="no degree of sharding makes it fit here"):
        check_memory(
            "gpt-tiny",
            settings=ParallelSettings(),
            degrees=Degrees(),
            precision="fp32",
            available=1000,
            alone=False,
        )
    check_memory(
        "gpt2",
        settings=ParallelSettings(),
        degrees=Degrees(),
        precision="fp32",
        available=2**32,
        alone=True,
    )
    offloaded = ParallelSettings(offload=True)
    shards = Degrees(dp_shard=2)
    check_memory(
        "gpt2",
        settings=offloaded,
        degrees=shards,
        precision="fp32",
        available=2**30,
        alone=True,
    )
    with pytest.raises(ConfigError, match=r"at least 1\.3 GiB"):  # offloaded to the same memory
        check_memory(
            "gpt2",
            settings=offloaded,
            degrees=shards,
            precision="fp32",
            available=2**30,
            alone=False,
        )
