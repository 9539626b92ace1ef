"""Collectives by kind and bytes."""

from __future__ import annotations

import pytest
import torch

from fuelrail.bench.measure.collectives import collective_of

TENSOR = torch.zeros(100)
LARGE = torch.zeros(400)
GROUP = object()


@pytest.mark.parametrize(
    ("operator", "arguments", "kind", "num_bytes"),
    [
        (
            torch.ops.c10d.allreduce_.default,
            ([TENSOR], GROUP),
            "all_reduce",
            400,
        ),
        (
            torch.ops._c10d_functional.all_reduce.default,
            (TENSOR, "sum", "0"),
            "all_reduce",
            400,
        ),
        (
            torch.ops.c10d._allgather_base_.default,
            (LARGE, TENSOR, GROUP),
            "all_gather",
            1600,
        ),
        (
            torch.ops.c10d._reduce_scatter_base_.default,
            (TENSOR, LARGE, GROUP),
            "reduce_scatter",
            1600,
        ),
        (
            torch.ops._c10d_functional.all_gather_into_tensor.default,
            (TENSOR, 4, "0"),
            "all_gather",
            1600,
        ),
        (
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
            (TENSOR, "sum", 4, "0"),
            "reduce_scatter",
            400,
        ),
        (torch.ops.c10d.send.default, ([TENSOR], GROUP, 1, 0), "send", 400),
    ],
)
def test_bytes_are_those_of_a_large_ring(operator, arguments, kind, num_bytes):
    assert collective_of(operator, arguments) == (kind, num_bytes)
