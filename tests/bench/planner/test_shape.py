"""One rank of a fake cluster against real runs, papers' formulas and its own arithmetic at other sizes."""

from __future__ import annotations

import functools
import sys

import msgspec
import pytest
import torch
import torch.distributed as dist

from fuelrail.bench.measure.collectives import Counter
from fuelrail.bench.planner.choice import beside_teacher, taught
from fuelrail.bench.planner.fake_rank import Inputs, run_rank
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.planner.shape import shape_of, stages
from fuelrail.bench.planner.torch_private import private_parts
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.bench.trainer.strategies.settings import (
    Degrees,
    ParallelSettings,
    degrees_of,
)
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from support.allocator import peak_of
from support.models import build
from support.published_formulas import Transformer, model_flop

pytestmark = pytest.mark.slow  # each shape takes about a second

INPUTS = Inputs(micro_batch=4, cameras=2, height=64, width=128)
GPT = MODELS["gpt-tiny"]
FEWER_BLOCKS = {
    name: msgspec.structs.replace(MODELS[name], depth=4) for name in ("gpt-tiny", "vit-tiny")
}


def model(name):
    """The model with half of its blocks: each takes an eighth of a second."""
    return FEWER_BLOCKS.get(name, MODELS[name])


@functools.cache  # the one of a process alone is compared with several
def shape(name, world=1, rank=0, inputs=INPUTS, **options):
    settings = ParallelSettings(**options)
    return shape_of(model(name), settings, degrees_of(settings, world), inputs, rank=rank)


def batch():
    return {
        "img": torch.zeros(4, 2, 3, 64, 128, dtype=torch.uint8),
        "cam_valid": torch.ones(4, 2),
        "intrinsics": torch.eye(3).expand(4, 2, 3, 3).contiguous(),
        "valid": torch.ones(4),
        "cam2ego": torch.eye(4).expand(4, 2, 4, 4).contiguous(),
        "sample_key": list("abcd"),
    }


def allocated(name, recompute):
    """Bytes of a real step of one process at its peak, and its number of parameters."""
    network = build(model(name), "cpu", 0)
    parallel = parallelise(network, recompute=recompute)
    inputs = parallel.inputs(batch())
    peak = peak_of(lambda: parallel.forward_backward(inputs))
    # Of small inputs the tracker sees those that operators of the pass read; the images are what counts.
    held = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers(), *inputs))
    return peak + held, sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["gpt-tiny", "vit-tiny", "resnet-tiny", "bev-tiny"])
def test_peak_of_one_process_is_the_allocators(name, recompute):
    real, parameters = allocated(name, recompute)
    rank_shape = shape(name, recompute=recompute)
    assert rank_shape.parameters == parameters
    assert rank_shape.memory["moments"] == 8 * parameters
    # Convolutions of a CPU have scratch memory, which fake tensors do not show: up to 14 % on one with AVX2 alone.
    scratch = 0.01 if name in ("gpt-tiny", "vit-tiny") else 0.2
    assert rank_shape.peak_bytes - rank_shape.memory["moments"] == pytest.approx(real, rel=scratch)


def test_flop_are_the_papers_with_attention_computed_again_in_backward():
    paper = Transformer(layers=4, hidden=32, heads=8, seq=32, vocab=64)
    attention = paper.sample_flop[1]
    assert shape("gpt-tiny").flop == model_flop(paper, 4) + 4 * attention / 2


def test_sharded_ranks_gather_all_weights_twice_and_reduce_them_once():
    rank_shape = shape("gpt-tiny", 8, strategy="fsdp2")
    alone = shape("gpt-tiny")
    sent = {collective.kind: collective for collective in rank_shape.collectives}
    assert rank_shape.parameters * 8 == alone.parameters
    assert rank_shape.flop == alone.flop
    assert sent["reduce_scatter"].bytes == 4 * alone.parameters
    assert sent["all_gather"].bytes == 2 * 4 * alone.parameters
    assert {collective.axis for collective in rank_shape.collectives} == {"dp_shard"}
    assert rank_shape.peak_bytes < alone.peak_bytes


def test_tensor_parallel_divides_computing_and_reports_its_axis():
    alone = shape("gpt-tiny")
    rank_shape = shape("gpt-tiny", 4, rank=3, mesh="dp_shard=2,tp=2")
    assert rank_shape.flop == alone.flop / 2
    assert {collective.axis for collective in rank_shape.collectives} == {
        "dp_shard",
        "tp",
    }
    # Gather and scatter around attention and perceptron of four blocks, forward and backward, and at the ends.
    scattered = next(
        collective
        for collective in rank_shape.collectives
        if collective.axis == "tp" and collective.kind == "reduce_scatter"
    )
    hidden = 4 * GPT.context * GPT.width * 4
    assert (scattered.count, scattered.bytes) == (2 * 2 * 4 + 1, 17 * hidden)
    # Gradients of what the axis does not divide are summed once in a step, and the embedding's output in each pass.
    more = shape(
        "gpt-tiny",
        4,
        3,
        msgspec.structs.replace(INPUTS, micro_batches=3),
        mesh="dp_shard=2,tp=2",
    )
    single, thrice = (
        next(collective for collective in run_shape.collectives if collective.kind == "all_reduce")
        for run_shape in (rank_shape, more)
    )
    assert (single.count, thrice.count) == (1 + 18, 3 + 18)


def test_a_teacher_costs_its_forward_pass():
    how = {
        "model": "bev-tiny",
        "teacher": "vit-tiny",
        "cluster": "1x8-a100",
        "global_batch": 32,
        "precision": "fp32",
    }
    scenario = Scenario(name="n", **how)
    teacher_work = taught(scenario, INPUTS, 8)
    teacher = build(MODELS["vit-tiny"], "cpu", 0)
    inputs = teacher.inputs(batch())
    with torch.no_grad(), Counter(None) as counted:
        peak = peak_of(lambda: teacher.predict(*inputs))
    assert teacher_work.flop == pytest.approx(counted.flop, rel=0.05)
    assert teacher_work.weights_bytes == 4 * sum(p.numel() for p in teacher.parameters()) // 8
    assert peak < teacher_work.pass_bytes < 4 * peak
    degrees = Degrees(dp_replicate=8)
    (alone,) = stages(
        MODELS["bev-tiny"],
        settings=ParallelSettings(),
        degrees=degrees,
        inputs=INPUTS,
        precision="fp32",
    )
    (beside,) = beside_teacher(scenario, degrees, INPUTS, [alone])
    assert beside.flop == alone.flop + teacher_work.flop
    assert beside.peak_bytes == alone.peak_bytes + teacher_work.weights_bytes + max(
        0, teacher_work.pass_bytes - alone.kept_bytes
    )
    assert [collective.axis for collective in beside.collectives] == [
        "dp_replicate",
        "dp_teacher",
    ]
    read = msgspec.structs.replace(scenario, teacher_from="layer", sample_bytes=1000)
    assert beside_teacher(read, degrees, INPUTS, [alone]) == [alone]
    assert read.stored_bytes == 1000 + 2 * 8 * 8
    with pytest.raises(
        ConfigError,
        match="teacher 'vit-tiny' would predict the whole batch on each of pp=2 ranks",
    ):
        beside_teacher(scenario, Degrees(pp=2), INPUTS, [alone])


def test_copies_send_their_gradients():
    rank_shape = shape("gpt-tiny", 8, strategy="ddp")
    sent = [
        (collective.kind, collective.ranks, collective.bytes)
        for collective in rank_shape.collectives
    ]
    assert sent == [("all_reduce", 8, 4 * rank_shape.parameters)]


def test_a_sharded_optimiser_sends_the_parameters_that_its_ranks_changed():
    copies = shape("gpt-tiny", 8, strategy="ddp")
    rank_shape = shape("gpt-tiny", 8, strategy="zero1")
    assert rank_shape.memory["moments"] == copies.memory["moments"] / 8
    reduced, changed = rank_shape.collectives
    assert [reduced] == copies.collectives
    tensors = len(list(build(model("gpt-tiny"), "cpu", 0).parameters()))
    assert (changed.kind, changed.count, changed.bytes) == (
        "broadcast",
        tensors,
        4 * rank_shape.parameters,
    )


def test_stages_hold_what_the_schedule_leaves_in_flight():
    inputs = msgspec.structs.replace(INPUTS, micro_batch=1, micro_batches=8)
    options = {"strategy": "pipeline", "micro_batches": 8}
    stages = [shape("gpt-tiny", 4, rank, inputs, **options) for rank in range(4)]
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    # Also a stage that reads the targets alone has all inputs.
    input_bytes = [stage.memory["Inputs and buckets"] for stage in stages]
    assert (
        input_bytes
        == [stage.memory["inputs of other micro-batches"] // 7 for stage in stages]
        == [input_bytes[0]] * 4
    )
    assert sum(stage.parameters for stage in stages) == shape("gpt-tiny").parameters
    assert stages[1].hidden_bytes == GPT.context * GPT.width * 4
    assert sum(stage.flop for stage in stages) == shape("gpt-tiny").flop / 4
    gpipe = shape("gpt-tiny", 4, 0, inputs, pipeline_schedule="GPipe", **options)
    assert gpipe.in_flight == 8
    assert gpipe.peak_bytes - stages[0].peak_bytes == 4 * stages[0].kept_bytes


@pytest.mark.parametrize(("rank", "stage", "in_flight"), [(128, 1, 7), (896, 7, 1)])
def test_a_rank_of_1024_has_the_blocks_of_its_stage(rank, stage, in_flight):
    settings = ParallelSettings(mesh="pp=8,dp_shard=16,tp=8", micro_batches=8)
    inputs = Inputs(micro_batch=1, micro_batches=8)
    short_model = msgspec.structs.replace(MODELS["gpt-100b"], depth=16)
    rank_shape = shape_of(
        short_model,
        settings,
        degrees_of(settings, 1024),
        inputs,
        rank=rank,
        precision="bf16",
    )
    assert (rank_shape.stage, rank_shape.in_flight) == (stage, in_flight)
    if stage == 1:
        # 2 of 16 layers of 12 h^2 weights, over 16 x 8 ranks; the rest is biases and norms.
        assert rank_shape.parameters == pytest.approx(2 * 12 * 10240**2 / 128, rel=0.01)


@pytest.mark.parametrize(
    ("world", "parallel", "rows", "count"),
    [
        pytest.param(8, ParallelSettings(mesh="dp_shard=4,tp=2"), 8, 3, marks=pytest.mark.long),
        (4, ParallelSettings(strategy="zero1", recompute="full"), 1, 2),
        (4, ParallelSettings(mesh="pp=2,dp_shard=2", micro_batches=4), 4, 4),
        (
            32,
            ParallelSettings(
                mesh="pp=4,dp_replicate=2,dp_shard=2,tp=2",
                micro_batches=8,
                recompute="full",
            ),
            4,
            8,
        ),
    ],
    ids=["sharded", "copies", "stages", "all of them"],
)
def test_a_shape_from_small_runs_is_the_whole_models(world, parallel, rows, count):
    degrees = degrees_of(parallel, world)
    # Runs of two and three blocks stand for stages of four; stages of two are run whole, with other shards.
    gpt = GPT if degrees.pp > 1 else model("gpt-tiny")
    inputs = Inputs(micro_batch=rows, micro_batches=count)
    stage_shapes = stages(gpt, settings=parallel, degrees=degrees, inputs=inputs, precision="fp32")
    assert len(stage_shapes) == degrees.pp
    for quick in (stage_shapes[0], *stage_shapes[-2:]):
        exact = shape_of(gpt, parallel, degrees, inputs, rank=quick.rank)
        assert (quick.flop, quick.parameters, quick.in_flight) == (
            exact.flop,
            exact.parameters,
            exact.in_flight,
        )
        assert (quick.stage, quick.collectives, quick.forward) == (
            exact.stage,
            exact.collectives,
            exact.forward,
        )
        assert quick.kept_bytes == pytest.approx(exact.kept_bytes, rel=0.01)
        assert quick.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.01)


def test_plans_share_runs():
    """Whatever the micro-batch, the number of shards and stages, the buckets, and where the optimiser's state lies."""
    run_rank.cache_clear()
    for world, rows in ((4, 1), (16, 4)):
        for options in (
            {"strategy": "ddp", "bucket_mib": 2.0},
            {"strategy": "zero1"},
            {"strategy": "ddp"},
        ):
            settings = ParallelSettings(**options)
            stages(
                GPT,
                settings=settings,
                degrees=degrees_of(settings, world),
                inputs=Inputs(micro_batch=rows, micro_batches=4),
                precision="fp32",
            )
    assert run_rank.cache_info().misses == 2, "of 2 and of 3 blocks"
    for mesh, world in (
        ("dp_shard=8", 8),
        ("dp_shard=4", 4),
        ("dp_replicate=2,dp_shard=2", 4),
    ):
        settings = ParallelSettings(mesh=mesh)
        stages(
            GPT,
            settings=settings,
            degrees=degrees_of(settings, world),
            inputs=Inputs(micro_batch=1, micro_batches=2),
            precision="fp32",
        )
    assert run_rank.cache_info().misses == 4


def test_pipelines_of_any_length_share_the_runs_of_their_ends():
    run_rank.cache_clear()
    for mesh, depth, misses in (
        ("pp=2", 8, 4),
        ("pp=4", 16, 5),
        ("pp=8", 32, 5),
    ):
        settings = ParallelSettings(mesh=mesh, micro_batches=8)
        degrees = degrees_of(settings, 2 * depth // 8)
        gpt = msgspec.structs.replace(GPT, depth=depth)
        inputs = Inputs(micro_batch=1, micro_batches=8)
        shapes = stages(
            gpt,
            settings=settings,
            degrees=degrees,
            inputs=inputs,
            precision="fp32",
        )
        assert [shape.stage for shape in shapes] == list(range(degrees.pp))
        assert run_rank.cache_info().misses == misses, mesh


def test_images_that_are_smaller_than_a_kernel_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"images of 2 x 8 pixels are smaller than .* every 8\. pixel",
    ):
        shape(
            "bev-tiny",
            inputs=msgspec.structs.replace(INPUTS, height=2, width=8),
        )


def test_what_is_refused():
    with pytest.raises(ConfigError, match="tp=3 does not divide the 8 heads"):
        shape("gpt-tiny", 3, strategy="tensor")
    with pytest.raises(
        ConfigError,
        match=r"DualPipeV is not planned.*use one of GPipe, 1F1B, Interleaved1F1B",
    ):
        shape(
            "gpt-tiny",
            2,
            inputs=msgspec.structs.replace(INPUTS, micro_batch=1, micro_batches=4),
            strategy="pipeline",
            pipeline_schedule="DualPipeV",
            micro_batches=4,
        )
    assert not dist.is_initialized()


def test_private_parts_of_torch_are_where_they_were(monkeypatch):
    """Fails when torch moves them; what users then see names torch's version and the fallback."""
    assert len(private_parts().forget) == 4
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(FuelrailError, match=r"torch .* has moved a part that the planner runs"):
        private_parts()
