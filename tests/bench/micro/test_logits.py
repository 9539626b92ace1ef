"""The study of stored logits: layouts have the sizes that their makers state, and ours is none of the larger ones."""

from __future__ import annotations

import pytest
import torch

from fuelrail.bench.micro.logits import decoding, gradients, layouts

STATED = {64: 192, 128: 328}
"""DistillKit's page: about 300 bytes of 128 tokens, 114 of 50 in its budget form."""


@pytest.fixture(scope="module")
def logits():
    return 2.5 * torch.randn(16, 128_256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("k", [64, 128])
def test_top_k_takes_fewer_bytes_than_the_layouts_of_others(logits, k) -> None:
    figures = {figure.layout: figure for figure in layouts(logits, k)}
    ours = figures["topk, uint8"]
    head = 8 / len(logits)
    assert figures["DistillKit, recommended"].bytes == STATED[k]
    assert ours.bytes - head <= min(
        figure.bytes for name, figure in figures.items() if name[0] in "DM" and "budget" not in name
    )
    assert figures["sampled"].bytes < ours.bytes < figures["topk, float16"].bytes
    assert (
        figures["topk, float16"].error_nats
        < ours.error_nats
        < 0.2 * figures["DistillKit, recommended"].error_nats
    )


def test_a_polynomial_of_three_terms_is_smaller_and_a_hundred_times_further_from_the_teacher(
    logits,
) -> None:
    figures = {figure.layout: figure for figure in layouts(logits, 50)}
    assert figures["DistillKit, budget"].bytes == 121 < figures["topk, uint8"].bytes == 137.5
    assert figures["DistillKit, budget"].error_nats > 100 * figures["topk, uint8"].error_nats


def test_draws_have_no_bias_that_the_standard_error_does_not_explain() -> None:
    torch.manual_seed(0)
    errors = gradients(torch.randn(2, 1000), 1.5 * torch.randn(2, 1000), 300)
    assert (
        errors["sampled"]["standard_errors"] < 3 < errors["topk with its tail"]["standard_errors"]
    )


@pytest.mark.slow
def test_decoding_is_timed_beside_a_step() -> None:
    assert all(0 < share < 1 for share in decoding(1).values())
