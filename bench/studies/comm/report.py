"""The report of ``fuelrail bench comm``: times and bandwidths as nccl-tests defines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from fuelrail.bench.measure.display import display
from fuelrail.bench.planner.formulas import sent_bytes
from fuelrail.bench.report.files import ReportHead
from fuelrail.pipeline.settings import NotNegative, Positive, Settings, flag

SCHEMA = "fuelrail-bench-comm"
VERSION = 1
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]
KINDS: tuple[Kind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "send_recv",
)


class CommOptions(Settings, frozen=True, kw_only=True):
    """Options of ``fuelrail bench comm``."""

    ranks: Annotated[
        Positive,
        flag("number of ranks on this host; inside torchrun its own count"),
    ] = 2
    mesh: Annotated[
        str | None,
        flag(
            (
                "axes of a mesh, each of which is measured, as in bench train (default: all "
                "ranks as one)"
            ),
            metavar="AXIS=N,...",
        ),
    ] = None
    smallest: Annotated[Positive, flag("smallest tensor in bytes")] = 1 << 10
    largest: Annotated[Positive, flag("largest tensor in bytes")] = 1 << 26
    repeats: Annotated[Positive, flag("collectives of each size; the median counts")] = 10
    warmup: Annotated[NotNegative, flag("collectives of each size before that")] = 3
    backend: Annotated[
        Literal["auto", "nccl", "gloo"],
        flag("collective library; auto: nccl on a GPU"),
    ] = "auto"
    base: Annotated[
        str | None,
        flag(
            "cluster of configs/clusters, or a .yaml, that cluster.yaml takes all but the measured "
            "link from; without it none is written",
            metavar="CLUSTER",
        ),
    ] = None


class TimedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """One size of one collective: the median time of the slowest rank; bandwidths in 1e9 bytes a
    second.

    ``num_bytes`` are those of the whole tensor. ``algorithm_gb_per_s`` is bytes over time;
    ``bus_gb_per_s`` that times 2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather and
    reduce-scatter, 1 for send and receive (nccl-tests, doc/PERFORMANCE.md).
    """

    kind: Annotated[Kind, display("collective")]
    axis: Annotated[str, display("axis")]
    ranks: Annotated[int, display("ranks")]
    num_bytes: Annotated[int, display("bytes", digits=",")]
    microseconds: Annotated[float, display("us", digits=",.1f")]
    algorithm_gb_per_s: Annotated[float, display("algorithm GB/s", digits=".3f")]
    bus_gb_per_s: Annotated[float, display("bus GB/s", digits=".3f")]


class CommReport(ReportHead, frozen=True, kw_only=True):
    """A whole report. ``nodes``: number of hosts on which the ranks were."""

    backend: str
    device: str
    nodes: int
    ranks: int
    options: CommOptions
    timed: list[TimedCollective]


def timed(
    kind: Kind,
    axis: str,
    ranks: int,
    num_bytes: int,
    seconds: float,
) -> TimedCollective:
    """Return the bandwidths of a measured time."""
    factor = 1.0 if kind == "send_recv" else sent_bytes(kind, ranks, 1)
    rate = num_bytes / seconds / 1e9
    return TimedCollective(
        kind=kind,
        axis=axis,
        ranks=ranks,
        num_bytes=num_bytes,
        microseconds=seconds * 1e6,
        algorithm_gb_per_s=rate,
        bus_gb_per_s=rate * factor,
    )


def link_of(timed: Sequence[TimedCollective]) -> tuple[float, float]:
    """Return GB/s and microseconds of a link: the largest all-reduce's bus bandwidth, and the
    smallest one's time.

    Of several axes the one with most ranks counts. Needs an all-reduce.
    """
    ranks = max(row.ranks for row in timed)
    reduced = sorted(
        (row for row in timed if row.kind == "all_reduce" and row.ranks == ranks),
        key=lambda row: row.num_bytes,
    )
    return reduced[-1].bus_gb_per_s, reduced[0].microseconds
