"""Step times by hand, and fits that find what made their cases."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.bench.measure.collectives import Collective
from fuelrail.bench.planner.choice import buckets, traffic_of
from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.planner.shape import Shape
from fuelrail.bench.planner.step_time import (
    EFFICIENCIES,
    Efficiency,
    StepWork,
    Traffic,
    best_of,
    efficiency_of,
    fit,
    has_range,
    spread_factor,
    step_time,
)
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings


def test_parts_add_up():
    cluster = load_cluster("1x8-h100")
    work = StepWork(
        flop=989.5e12 / 4,
        activation_bytes=3350e9 / 10,
        tensor_bytes=37e9,
        tensor_reach=8,
        micro_batches=2,
        bubble=0.5,
        traffic=(Traffic(bytes=370e9, reach=8, hidden=1.0),),
        step_state_bytes=335e9,
    )
    parts = step_time(work, cluster, "bf16", Efficiency(products=0.5, passes=2))
    assert (parts.compute, parts.memory, parts.tensor) == pytest.approx((1.0, 0.4, 0.2))
    assert (parts.bubble, parts.data_total, parts.optimiser) == pytest.approx((0.8, 1.0, 0.1))
    assert parts.data_exposed == pytest.approx(1.0 - 1.4 / 2)
    assert parts.total == pytest.approx(1.0 + 0.4 + 0.2 + 0.8 + 0.3 + 0.1)


def test_every_message_takes_the_links_latency():
    """Of layers and stages as of gradients: 3,872 gathers at 20 us are 77 ms, however small they are."""
    cluster = load_cluster("8x8-h100")
    inside = 20e-6
    between = 50e-6
    work = StepWork(
        flop=0.0,
        activation_bytes=0.0,
        tensor_count=121,
        tensor_reach=8,
        pipeline_count=2,
        pipeline_reach=64,
        micro_batches=32,
        traffic=(Traffic(bytes=0.0, count=3, reach=64, stride=8, times=5),),
    )
    parts = step_time(work, cluster, "bf16", Efficiency())
    assert (parts.tensor, parts.pipeline) == pytest.approx((3872 * inside, 64 * between))
    assert parts.data_exposed == parts.data_total == pytest.approx(15 * between)


def test_the_last_bucket_of_copies_hides_behind_nothing():
    mib = 2**20
    assert [buckets(size * mib, None) for size in (1, 4, 32)] == [
        (1, 1.0),
        (2, 0.75),
        (3, 6 / 32),
    ]
    assert buckets(16 * mib, 4.0) == (4, 0.25)
    exposed = [
        step_time(
            StepWork(
                flop=989.5e12,
                activation_bytes=0.0,
                traffic=(Traffic(bytes=370e9, reach=8, hidden=2.0, last=last),),
            ),
            load_cluster("1x8-h100"),
            "bf16",
            Efficiency(products=1.0),
        ).data_exposed
        for last in (0.0, 0.5)
    ]
    assert exposed == pytest.approx([0.0, 0.5])


def shape(degrees, sent, ahead=(), *, flop=9e12, parameters=10**9, count=4):
    """A rank that sends this: kind, axis, ranks, number and bytes of a step; ``ahead`` of it in forward passes."""
    listed = [
        [Collective(kind=k, axis=a, ranks=r, count=n, bytes=b) for k, a, r, n, b in part]
        for part in (sent, ahead)
    ]
    return Shape(
        rank=0,
        stage=0,
        parameters=parameters,
        memory={},
        peak_bytes=0,
        kept_bytes=0,
        in_flight=1,
        flop=flop,
        hidden_bytes=0,
        micro_batches=count,
        collectives=listed[0],
        forward=listed[1],
    )


cluster_of = functools.cache(load_cluster)


def seconds(traffic, name="8x8-h100", flop=0.0):
    """All, and what is exposed of it."""
    work = StepWork(flop=flop, activation_bytes=0.0, micro_batches=4, traffic=tuple(traffic))
    parts = step_time(work, cluster_of(name), "bf16", Efficiency(products=1.0))
    return parts.data_total, parts.data_exposed


def test_a_sharded_optimiser_takes_longer_than_copies_by_the_parameters_it_sends():
    """A ring passes each of 4 bytes of a billion parameters on once, at eight ports of 48 GB/s below NVLink's rate."""
    copies = ("all_reduce", "dp_replicate", 64, 1, 4 * 10**9)
    sent = ("broadcast", "dp_replicate", 64, 300, 4 * 10**9)
    degrees = Degrees(dp_replicate=64)
    size = 9 * 10**12
    blocks = 24
    ddp = seconds(
        traffic_of(
            ParallelSettings(),
            degrees=degrees,
            shape=shape(degrees, [copies]),
            flop=size,
            teacher_flop=0,
            blocks=blocks,
        )
    )
    settings = ParallelSettings(strategy="zero1")
    zero1 = seconds(
        traffic_of(
            settings,
            degrees=degrees,
            shape=shape(degrees, [copies, sent]),
            flop=size,
            teacher_flop=0,
            blocks=blocks,
        )
    )
    more = 4e9 / min(8 * 48e9, 370e9) + 300 * 50e-6
    assert zero1[0] - ddp[0] == pytest.approx(more)
    assert zero1[1] - ddp[1] == pytest.approx(more), "nothing is left to hide behind"


def test_each_axis_of_hybrid_shards_has_its_own_link():
    """Shards within a node send over NVLink; copies across nodes send a shard's gradients through one port each."""
    degrees = Degrees(dp_replicate=8, dp_shard=8)
    weight_bytes = 4 * 10**9
    sent = [
        ("all_gather", "dp_shard", 8, 200, 8 * weight_bytes),
        ("reduce_scatter", "dp_shard", 8, 25, weight_bytes),
        ("all_reduce", "dp_replicate", 8, 25, weight_bytes // 8),
    ]
    ahead = [("all_gather", "dp_shard", 8, 100, 4 * weight_bytes)]
    parts = list(
        traffic_of(
            ParallelSettings(),
            degrees=degrees,
            shape=shape(degrees, sent, ahead),
            flop=9 * 10**12,
            teacher_flop=0,
            blocks=24,
        )
    )
    total, exposed = seconds(parts)
    inside = 9 * weight_bytes * 7 / 8 / 370e9 + 225 * 20e-6
    across = 2 * weight_bytes / 8 * 7 / 8 / 48e9 + 25 * 50e-6
    assert total == exposed == pytest.approx(inside + across)
    flat = [(kind, "dp_shard", 64, number, size) for kind, _, _, number, size in sent[:2]]
    ahead = [("all_gather", "dp_shard", 64, 100, 4 * weight_bytes)]
    degrees = Degrees(dp_shard=64)
    flat_s, _ = seconds(
        traffic_of(
            ParallelSettings(),
            degrees=degrees,
            shape=shape(degrees, flat, ahead),
            flop=9 * 10**12,
            teacher_flop=0,
            blocks=24,
        )
    )
    assert flat_s == pytest.approx(9 * weight_bytes * 63 / 64 / 370e9 + 225 * 50e-6)


@pytest.mark.parametrize("stages", [1, 4])
def test_sharded_traffic_hides_as_far_as_something_is_computed_meanwhile(
    stages,
):
    """However fast the link: of each pass one block of 24, and what is in none, computes beside nothing."""
    degrees = Degrees(pp=stages, dp_shard=8)
    weight_bytes = 4 * 10**9
    count = 4
    sent = [
        ("all_gather", "dp_shard", 8, 200, 8 * weight_bytes),
        ("reduce_scatter", "dp_shard", 8, 25, weight_bytes),
    ]
    ahead = [("all_gather", "dp_shard", 8, 100, 4 * weight_bytes)]
    rank_shape = shape(degrees, sent, ahead)
    parts = list(
        traffic_of(
            ParallelSettings(),
            degrees=degrees,
            shape=rank_shape,
            flop=rank_shape.flop,
            teacher_flop=0,
            blocks=24,
        )
    )
    total, exposed = seconds(parts, flop=1e30)  # computing lasts for ever
    rate = 370e9
    latency = 20e-6
    gather, reduce = (
        size * 7 / 8 / rate + number * latency
        for number, size in ((25, weight_bytes), (25, weight_bytes))
    )
    assert total == pytest.approx(2 * count * gather + reduce)
    alone = 1 / (24 / stages + 1)
    # A pipeline reduces when its last micro-batch is done.
    last = reduce if stages > 1 else reduce * alone
    assert exposed == pytest.approx(2 * count * gather * alone + last)
    forward = seconds(
        [part for part in parts if part.hidden == pytest.approx(1 / 3)],
        flop=rank_shape.flop,
    )
    window = rank_shape.flop / 3 / 989.5e12
    assert forward[1] == pytest.approx(count * max(gather * alone, gather - window * (1 - alone)))


AMOUNTS = st.floats(0, 1e12)
SHARE = st.floats(0, 1)


@given(
    size=AMOUNTS,
    more=AMOUNTS,
    hidden=SHARE,
    last=SHARE,
    times=st.integers(1, 8),
    flop=st.floats(0, 1e16),
)
def test_more_bytes_never_shorten_a_step_and_no_more_is_exposed_than_is_sent(
    size, more, hidden, last, times, flop
):
    traffic = Traffic(
        bytes=size,
        count=2,
        reach=64,
        stride=8,
        times=times,
        hidden=hidden,
        last=last,
    )
    total, exposed = seconds([traffic], flop=flop)
    assert total * last * (1 - 1e-9) <= exposed <= total * (1 + 1e-9)
    _, longer = seconds([msgspec.structs.replace(traffic, bytes=size + more)], flop=flop)
    assert longer >= exposed * (1 - 1e-9)
    _, beside = seconds([traffic], flop=2 * flop)
    assert beside <= exposed * (1 + 1e-9)
    assert seconds([traffic], "8x8-a100-ethernet", flop)[0] >= total * (1 - 1e-9)


def test_attention_stays_in_16_bits():
    work = StepWork(flop=989.5e12, attention_flop=989.5e12, activation_bytes=0.0)
    assert step_time(
        work, load_cluster("1x8-h100"), "fp8", Efficiency(attention=1.0)
    ).total == pytest.approx(1.0)


def test_a_fit_finds_what_made_its_steps_and_says_what_they_do_not_determine():
    cluster = load_cluster("1x8-h100")
    truth = Efficiency(products=0.35, passes=20)
    works = [
        StepWork(flop=1e14, activation_bytes=1e10),
        StepWork(flop=1e13, activation_bytes=1e11),
    ]
    cases = [
        (work, cluster, "bf16", step_time(work, cluster, "bf16", truth).total) for work in works
    ]
    joint_fit = fit(cases, Efficiency())
    assert (
        joint_fit.efficiency.products,
        joint_fit.efficiency.passes,
    ) == pytest.approx((0.35, 20), rel=0.03)
    assert joint_fit.determined == ["products", "passes"]
    assert max(map(abs, joint_fit.errors)) < 0.02, "the prior holds them back a little"
    single_fit = fit(cases[:1], Efficiency())
    assert single_fit.determined == ["products"], "a step of products says nothing of what moves"
    assert (
        single_fit.efficiency.attention,
        single_fit.efficiency.convolution,
    ) == (
        Efficiency().attention,
        Efficiency().convolution,
    )
    tilted = np.array([1.0, 0, 0, 0, 0])
    assert joint_fit.deviation(tilted) < Efficiency().spread, (
        "measured steps make the range narrower"
    )
    # What was never measured stays as wide as it was.
    assert single_fit.deviation(np.array([0, 1.0, 0, 0, 0])) > 0.4


@given(
    st.sampled_from(["attention_flop", "convolution_flop"]),
    st.floats(1e12, 1e14),
)
def test_each_kind_of_operation_computes_at_its_own_share(kind, flop):
    cluster = load_cluster("1x8-h100")
    used = Efficiency(products=0.5, attention=0.25, convolution=0.1)
    work = StepWork(flop=flop + 1e13, activation_bytes=0.0, **{kind: flop})
    share = {"attention_flop": 0.25, "convolution_flop": 0.1}[kind]
    expected = (1e13 / 0.5 + flop / share) / cluster.peak_flops("bf16")
    assert step_time(work, cluster, "bf16", used).compute == pytest.approx(expected)
    measured = msgspec.structs.replace(work, device_s=0.25, micro_batches=4)
    assert step_time(measured, cluster, "bf16", used).total == 1.0, (
        "a measured time stands for all computing"
    )


def test_a_row_of_efficiencies_is_of_a_generation_a_precision_and_a_software():
    assert efficiency_of("NVIDIA H200-SXM", "bf16") == efficiency_of("NVIDIA H100-SXM5", "fp16")
    rows = [
        efficiency_of("NVIDIA H100-SXM5", "fp8", software) for software in (None, "torch", "nvidia")
    ]
    assert len({row.products for row in rows}) == 3
    assert rows[1].products < rows[0].products < rows[2].products
    assert rows[0].spread >= max(row.spread for row in rows), "of software that is not said"
    assert efficiency_of("Another", "bf16").spread > efficiency_of("NVIDIA A100", "bf16").spread
    # Arithmetic without tensor cores reaches a larger share of its smaller peak.
    without = efficiency_of("Tesla P100", "fp32")
    assert without.convolution > 2 * efficiency_of("NVIDIA A100", "bf16").convolution


@pytest.mark.parametrize(
    ("device", "kind", "family", "is_known"),
    [
        ("NVIDIA A100", "bf16", "dense decoder", True),
        ("NVIDIA H200", "fp8", "dense decoder", True),
        ("NVIDIA A100", "fp16", "convolution", True),
        ("NVIDIA A100", "tf32", "convolution", False),
        ("NVIDIA H100", "tf32", "dense decoder", False),
        ("NVIDIA H100", "bf16", "convolution", False),  # of one source
        ("NVIDIA A100", "fp32", "dense decoder", False),
        ("NVIDIA H100", "bf16", "mixture of experts", False),
        ("NVIDIA A100", "bf16", "module:detector", False),
        ("NVIDIA A100", "bf16", "vit-base", False),
        ("Another", "bf16", "dense decoder", False),
    ],
)
def test_a_range_is_of_a_family_whose_steps_were_published(device, kind, family, is_known):
    assert has_range(device, kind, family) == is_known


def test_the_least_time_is_below_the_range_of_each_row():
    work = StepWork(
        flop=1e13,
        attention_flop=1e12,
        convolution_flop=1e12,
        activation_bytes=1e10,
    )
    cluster = load_cluster("1x8-h100")
    for used in EFFICIENCIES.values():
        usual, best = (
            step_time(work, cluster, "bf16", efficiency).total
            for efficiency in (used, best_of(used))
        )
        assert best <= usual / spread_factor(used.spread) * 1.05


def test_a_step_waits_for_launches_where_they_take_longer():
    cluster = load_cluster("1x8-h100")
    work = StepWork(flop=989.5e9, activation_bytes=0.0, micro_batches=8, operators=1000)
    parts = step_time(work, cluster, "bf16", Efficiency(products=1.0, launch_us=5.0))
    assert parts.compute == pytest.approx(8e-3)
    assert parts.total == pytest.approx(8 * 1000 * 5e-6)
    long = msgspec.structs.replace(work, flop=989.5e11)
    assert step_time(long, cluster, "bf16", Efficiency(products=1.0)).launch == 0.0
    slow = [(work, cluster, "bf16", 3 * parts.total)]
    fitted = fit(slow, Efficiency(products=1.0, launch_us=5.0))
    assert fitted.determined == ["launch_us"] and fitted.errors[0] == pytest.approx(0.0, abs=0.02)


def test_attention_that_is_not_one_kernel_has_a_share_of_its_own():
    cluster = load_cluster("1x8-a100")
    work = StepWork(flop=312e12, attention_flop=312e12, activation_bytes=0.0)
    used = Efficiency(attention=0.5, unfused=0.1)
    fused = step_time(work, cluster, "bf16", used).total
    unfused = msgspec.structs.replace(work, is_fused=False)
    assert step_time(unfused, cluster, "bf16", used).total == pytest.approx(5 * fused)
