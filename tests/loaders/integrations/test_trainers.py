"""Every example trainer, really run, killed between steps and in a save, and resumed: the samples and losses of a run
that nothing interrupted.

The trainers beyond torch are tested where they are installed: ``pip install -e '.[trainers]'``, deepspeed,
megatron-core, ray[train].
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import pickle
import re
import subprocess
import sys
from itertools import islice

import pytest
import torch

from fuelrail import DataLoader, World
from support.batches import TINY, load
from support.ranks import TESTS, environment

pytestmark = pytest.mark.process

NUM_STEPS = 8
EXAMPLES = TESTS.parent / "configs" / "trainers"


@pytest.fixture(scope="module")
def tiny(build_once):
    return build_once({"train": (5, 7, 9)})[0]


def expected(root, world):
    """(step, epoch, keys) of the first steps, from a loader that nobody stopped."""
    with DataLoader(
        root, batch_size=2, shuffle=True, drop_last=True, seed=7, world=world
    ) as loader:
        batches = (batch for _ in range(9) for batch in loader)
        return [
            (step, b["epoch"], b["sample_key"]) for step, b in enumerate(islice(batches, NUM_STEPS))
        ]


def output_of(text, rank):
    """What an example reported of one rank, and the losses."""
    lines = re.findall(
        rf"^.*rank {rank} step (\d+) epoch (\d+)(?: loss (\S+))? samples (.+)$",
        text,
        re.MULTILINE,
    )
    return [(int(step), int(epoch), keys.split()) for step, epoch, _, keys in lines], [
        loss for *_, loss, _ in lines
    ]


def run(root, out, *examples):
    """Run examples whole and with ends; compare the steps of each; return the losses of each rank of the whole runs."""
    command = [
        sys.executable,
        TESTS / "support" / "trainer_ranks.py",
        root,
        out,
        *examples,
    ]
    done = subprocess.run(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout.decode()[-6000:]
    outputs = {}
    for example in examples:
        name = example.partition(":")[0] + example.partition("=")[2]
        assert json.loads((out / f"{name}.json").read_text()) == CHECKPOINTS
        outputs[name] = [assert_same_steps(out, name, rank) for rank in range(2)]
    return outputs


# The checkpoints after each phase: two are kept, a save that was cut off is never among them.
CHECKPOINTS = {
    "whole": ["step-6", "step-8"],
    "killed": ["step-2", "step-4"],
    "saving": ["step-2", "step-4", "unfinished-6"],
    "terminated": ["step-6", "step-7"],
    "rest": ["step-7", "step-8"],
}
STEPS = {
    "killed": (0, 5),
    "saving": (4, 6),
    "terminated": (4, 7),
    "rest": (7, 8),
}


def assert_same_steps(out, name, rank):
    """Every step after a restart has the samples and the loss of the run that nothing interrupted."""
    steps, losses = output_of((out / f"{name}-whole-{rank}.txt").read_text(), rank)
    for phase, (first, last) in STEPS.items():
        resumed = output_of((out / f"{name}-{phase}-{rank}.txt").read_text(), rank)
        if phase == "killed" and rank == 0 and len(resumed[0]) == last - 1:
            last -= 1  # it fell before it could report the step at which the other one did
        assert resumed == (steps[first:last], losses[first:last]), phase
    return steps, losses


DATA_PARALLEL = (World(0, 2), World(1, 2))
SAME_BATCHES = (World(0, 1), World(0, 1))


def assert_samples(root, ranks, worlds):
    assert [steps for steps, _ in ranks] == [expected(root, world) for world in worlds]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_torch_brings(tiny, tmp_path):
    ranks = run(tiny, tmp_path, "ddp", "fsdp2", "tensor_parallel", "pipeline_parallel")
    assert_samples(tiny, ranks["ddp"], DATA_PARALLEL)
    assert_samples(tiny, ranks["fsdp2"], DATA_PARALLEL)
    assert_samples(tiny, ranks["tensor_parallel"], SAME_BATCHES)
    assert_samples(tiny, ranks["pipeline_parallel"], SAME_BATCHES)
    for rank in range(2):
        # Sharded or not, it is the same training: nothing was lost over checkpoint and resume either.
        ddp, fsdp2 = (ranks[name][rank][1] for name in ("ddp", "fsdp2"))
        assert [float(loss) for loss in fsdp2] == pytest.approx(
            [float(loss) for loss in ddp], abs=2e-3
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "example", "worlds"),
    [
        ("lightning", "lightning_ddp", DATA_PARALLEL),
        ("accelerate", "accelerate_ddp", DATA_PARALLEL),
        ("mmengine", "mmengine_runner", DATA_PARALLEL),
        ("deepspeed", "deepspeed_zero:zero_stage=1", DATA_PARALLEL),
        ("deepspeed", "deepspeed_zero:zero_stage=2", DATA_PARALLEL),
        ("deepspeed", "deepspeed_zero:zero_stage=3", DATA_PARALLEL),
        ("megatron", "megatron_core:tensor_parallel=2", SAME_BATCHES),
        ("megatron", "megatron_core:tensor_parallel=1", DATA_PARALLEL),
    ],
)
def test_other_trainers(tiny, tmp_path, package, example, worlds):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (ranks,) = run(tiny, tmp_path, example).values()
    assert_samples(tiny, ranks, worlds)


def epochs_of(root, count):
    """The keys of each batch, epoch by epoch, of a loader that nobody stopped."""
    with load(root, 2, seed=7, image=TINY) as loader:
        return [[batch["sample_key"] for batch in loader] for _ in range(count)]


@pytest.mark.filterwarnings("ignore::Warning")  # Lightning's advice, and what torch has deprecated
def test_lightning_with_limited_batches_takes_another_epoch_each_time(tiny, tmp_path):
    pl = pytest.importorskip(
        "lightning.pytorch",
        reason="lightning is not installed: pip install -e '.[trainers]'",
    )
    received = []

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def train_dataloader(self):
            loader = load(tiny, 2, seed=7, image=TINY)
            loader.set_epoch(self.current_epoch)
            return loader

        def training_step(self, batch):
            received.append(batch["sample_key"])
            return self.weight * batch["img"].float().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    def trainer(epochs):
        return pl.Trainer(
            max_epochs=epochs,
            limit_train_batches=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    keys_by_epoch = epochs_of(tiny, 5)
    first = trainer(3)
    first.fit(Model())
    assert received == [keys for epoch in keys_by_epoch[:3] for keys in epoch[:2]]
    first.save_checkpoint(tmp_path / "run.ckpt")
    received.clear()
    trainer(5).fit(Model(), ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    assert received == [keys for epoch in keys_by_epoch[3:] for keys in epoch[:2]], (
        "as without a stop"
    )


@pytest.mark.filterwarnings("ignore::Warning")
def test_accelerate_leaves_the_loader_as_it_is_and_restores_it(tiny, tmp_path):
    accelerate = pytest.importorskip(
        "accelerate",
        reason="accelerate is not installed: pip install -e '.[trainers]'",
    )
    epochs = epochs_of(tiny, 3)
    accelerator = accelerate.Accelerator(cpu=True)
    loader = load(tiny, 2, seed=7, image=TINY)
    assert accelerator.prepare(loader) is loader
    for refused in (
        accelerator.prepare_data_loader,
        accelerator.skip_first_batches,
    ):
        with pytest.raises(
            AttributeError,
            match=r"no `prepare_data_loader`, no skipped batches",
        ):
            refused(loader)
    accelerator.register_for_checkpointing(loader)
    for epoch in range(2):
        assert [batch["sample_key"] for batch in islice(loader, 3)] == epochs[epoch][:3]
    accelerator.save_state(str(tmp_path))
    assert [batch["sample_key"] for batch in islice(loader, 3)] == epochs[2][:3]
    accelerator.load_state(str(tmp_path))
    assert [batch["sample_key"] for batch in loader] == epochs[1][3:]
    loader.close()


@pytest.mark.filterwarnings("ignore::Warning")
def test_mmengine_with_limited_batches_takes_another_epoch_each_time(tiny, tmp_path):
    pytest.importorskip(
        "mmengine",
        reason="mmengine is not installed: pip install -e '.[trainers]'",
    )
    from mmengine.model import BaseModel
    from mmengine.registry import LOOPS
    from mmengine.runner import EpochBasedTrainLoop, Runner

    from fuelrail.loaders.integrations import mmengine

    received = []

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, mode="loss", **batch):
            received.append((batch["epoch"], batch["sample_key"]))
            return {"loss": self.weight * batch["img"].float().mean()}

    @LOOPS.register_module(force=True)
    class Limited(EpochBasedTrainLoop):
        def run_epoch(self):
            self.runner.call_hook("before_train_epoch")
            for number, batch in enumerate(self.dataloader):
                self.run_iter(number, batch)
                if number == 1:
                    break
            self.runner.call_hook("after_train_epoch")
            self._epoch += 1

    def train(epochs, **options):
        dataset = mmengine.FuelrailDataset(
            str(tiny),
            2,
            shuffle=True,
            drop_last=True,
            seed=7,
            num_workers=1,
            transforms={"image": TINY},
        )
        outer = torch.utils.data.DataLoader(
            dataset, batch_size=None, collate_fn=mmengine.fuelrail_batch
        )
        Runner(
            Model(),
            str(tmp_path),
            train_dataloader=outer,
            train_cfg={"type": "Limited", "max_epochs": epochs},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
            custom_hooks=[{"type": "FuelrailStateHook"}],
            default_hooks={"sampler_seed": None},
            log_level="ERROR",
            experiment_name=f"limited-{epochs}",
            **options,
        ).train()

    keys_by_epoch = epochs_of(tiny, 5)
    train(3)
    assert received == [(epoch, keys) for epoch in range(3) for keys in keys_by_epoch[epoch][:2]]
    received.clear()
    train(5, resume=True)
    assert received == [(2, keys) for keys in keys_by_epoch[2][2:4]] + [
        (3, keys) for keys in keys_by_epoch[3][:2]
    ], "as after a break"


@pytest.mark.filterwarnings("ignore::Warning")
def test_trainers_are_given_the_loader_itself(tiny, tmp_path):
    """What takes a loader gets its batches; what would index it gets an error that names the way."""
    received = []
    epoch_keys = epochs_of(tiny, 1)[0]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def note(self, batch):
            received.append(batch["sample_key"])
            return self.weight * batch["img"].float().mean()

    with load(tiny, 2, seed=7, image=TINY) as loader:
        pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

        class Module(Model, pl.LightningModule):
            training_step = Model.note

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 1e-3)

        quiet = dict.fromkeys(
            (
                "logger",
                "enable_checkpointing",
                "enable_progress_bar",
                "enable_model_summary",
            ),
            False,
        )
        pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(Module(), loader)
        assert received == epoch_keys
    received.clear()
    with load(tiny, 2, seed=7, image=TINY) as loader:
        pytest.importorskip("mmengine", reason="mmengine is not installed")
        from mmengine.model import BaseModel
        from mmengine.runner import Runner

        class Based(Model, BaseModel):
            def forward(self, mode="loss", **batch):
                return {"loss": self.note(batch)}

        Runner(
            Based(),
            str(tmp_path),
            loader,
            train_cfg={"by_epoch": True, "max_epochs": 1},
            log_level="ERROR",
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
            default_hooks={"sampler_seed": None},
            experiment_name="itself",
        ).train()
        assert received == epoch_keys
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, report_to="none", use_cpu=True
        )
        with pytest.raises(
            TypeError,
            match="Hugging Face's Trainer takes it from `get_train_dataloader`",
        ):
            transformers.Trainer(Model(), arguments, train_dataset=loader).train()


class _Calls:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.function = function
        self.arguments = arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # MMEngine's import compiles functions with torch.jit
@pytest.mark.parametrize(
    "call",
    [(getattr, str, "format"), (os.getcwd,)],
    ids=["getattr", "function"],
)
def test_mmengine_checkpoints_that_call_anything_else_are_refused(call):
    pytest.importorskip(
        "mmengine",
        reason="mmengine is not installed: pip install -e '.[trainers]'",
    )
    import fuelrail.loaders.integrations.mmengine  # noqa: F401 - adds what is allowed

    file = io.BytesIO()
    torch.save({"message_hub": _Calls(*call)}, file)
    file.seek(0)
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        torch.load(file)


def run_ray(dataset, folder, how):
    """Run the example of Ray Train on two CPUs; its workers die once, at step 4."""
    # `ray.train` is there in every installation of ray, and raises without what ray[train] brings.
    pytest.importorskip("ray.train", reason="ray[train] is not installed", exc_type=ImportError)
    settings = {
        "PYTHONPATH": environment()["PYTHONPATH"] + os.pathsep + str(EXAMPLES),
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "400",
    }
    done = subprocess.run(
        [sys.executable, "-m", "support.ray_failures", EXAMPLES, dataset, folder, how],
        capture_output=True,
        text=True,
        timeout=580,
        env={**environment(), **settings},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_ray_train_goes_on_with_more_workers(tiny, tmp_path):
    said = run_ray(tiny, tmp_path, "more")
    # Ray may print a worker's line twice.
    ranks = [
        list(map(ast.literal_eval, dict.fromkeys(map(repr, output_of(said, rank)[0]))))
        for rank in range(2)
    ]
    alone = [entry for entry in ranks[0] if len(entry[2]) == 4]
    assert [step for step, *_ in alone] == [0, 1, 2, 3, 4]
    for step, epoch, keys in alone:
        first, second = (expected(tiny, world)[step] for world in DATA_PARALLEL)
        assert (step, epoch, keys) == (*first[:2], first[2] + second[2])
    for rank, world in enumerate(DATA_PARALLEL):
        shared = [entry for entry in ranks[rank] if len(entry[2]) == 2]
        assert shared == expected(tiny, world)[4:], "the step at which it died came again"


@pytest.mark.timeout(900)
def test_ray_train_continues_after_its_workers_died(tiny, tmp_path):
    said = run_ray(tiny, tmp_path, "again")
    plain = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            EXAMPLES / "ddp.py",
            tiny,
            "--steps=8",
            f"--checkpoint={tmp_path / 'ddp'}",
        ],
        env={
            **environment(),
            "PYTHONPATH": environment()["PYTHONPATH"] + os.pathsep + str(EXAMPLES),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    for rank, world in enumerate(DATA_PARALLEL):
        reported, losses = output_of(said, rank)
        steps, plain_losses = output_of(plain.stdout, rank)
        losses_of = {step: loss for (step, *_), loss in zip(steps, plain_losses, strict=True)}
        assert [losses_of[step] for step, *_ in reported] == losses, (
            "model, optimiser and generators came back"
        )
        repeated = [entry for entry in reported if entry[0] >= 4]
        assert sorted({entry[0] for entry in reported}) == list(range(NUM_STEPS))
        for step, epoch, keys in reported:
            assert (step, epoch, keys) == expected(tiny, world)[step]
        assert len([entry for entry in repeated if entry[0] == 4]) >= 2, (
            "the step at which they died came again"
        )


@pytest.mark.parametrize("has_gpu", [True, False])
def test_nccl_is_bound_to_the_ranks_gpu(has_gpu, monkeypatch):
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "example.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    calls = []
    monkeypatch.setattr(
        example.dist,
        "init_process_group",
        lambda *args, **options: calls.append((args, options)),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    example.join_group()
    assert calls == (
        [(("nccl",), {"device_id": torch.device("cuda", 1)})] if has_gpu else [(("gloo",), {})]
    )


def test_no_example_joins_a_group_by_itself():
    joining_files = {
        file.name
        for file in EXAMPLES.glob("*.py")
        if "init_process_group(" in file.read_text(encoding="utf-8")
    }
    assert joining_files == {"example.py", "mmengine_runner.py"}
