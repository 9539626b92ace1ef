"""Our loaders in Accelerate's loops and in the Trainer of transformers: as they are, on other ranks, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import fuelrail as fr
from support.batches import TINY, load
from support.pages import ROOT, follow
from support.trainer_kills import GLOBAL_BATCH, NUM_ROWS, Model, Rows, make_loader, run_kills

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from fuelrail.loaders.integrations.huggingface import (  # noqa: E402 - after the skip
    prepare_loader,
    set_train_loader,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::Warning"),
]  # of the libraries
ORDER = fr.order.BatchSampler(NUM_ROWS, fr.OrderSpec(seed=7), global_batch=GLOBAL_BATCH)


def make_accelerator(*, accumulation=1, **settings):
    config = accelerate.utils.DataLoaderConfiguration(**settings)
    return accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=config
    )


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_killed_trainer_continues_on_other_ranks(name, tmp_path):
    assert run_kills(name, tmp_path, 2, seed=5) > 0


def test_a_loader_says_its_rows_over_all_ranks(build_once, tmp_path):
    sampler = fr.order.BatchSampler(
        NUM_ROWS, global_batch=GLOBAL_BATCH, world=fr.World(1, 5), drop_last=False
    )
    loader = sampler.count(DataLoader(Rows(), batch_sampler=sampler))
    training = Training(tmp_path, loader, max_steps=1)
    prepared = training.trainer.get_train_dataloader()
    assert prepared.total_batch_size == GLOBAL_BATCH
    assert training.trainer.num_examples(prepared) == len(prepared.dataset) == 9 * GLOBAL_BATCH
    with load(build_once({"train": (5, 7, 9)})[0], 2, image=TINY, rank=1, size=3) as own:
        assert prepare_loader(make_accelerator(), own).total_batch_size == 6


@pytest.mark.parametrize("dispatch_batches", [None, True])
@pytest.mark.parametrize("split_batches", [False, True])
def test_prepare_leaves_a_loader_as_it_is(dispatch_batches, split_batches):
    accelerator = make_accelerator(dispatch_batches=dispatch_batches, split_batches=split_batches)
    loader = prepare_loader(accelerator, make_loader())
    assert accelerator.prepare(loader) is loader
    assert [batch["row"].tolist() for batch in loader] == [ORDER[step] for step in range(8)]


def test_a_state_is_that_of_the_last_optimiser_step(tmp_path):
    accelerator = make_accelerator(accumulation=3)
    loader = prepare_loader(accelerator, make_loader())
    model = accelerator.prepare(Model())
    synchronised = []
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            synchronised.append(accelerator.sync_gradients)
        if step == 4:
            accelerator.save_state(tmp_path)
        assert batch["row"].tolist() == ORDER[step]
    assert synchronised == [False, False, True, False, False, True, False, True]
    accelerator.load_state(tmp_path)
    assert [batch["row"].tolist() for batch in loader] == [ORDER[step] for step in range(3, 8)]
    with pytest.raises(AttributeError, match="leave skip_first_batches out"):
        accelerator.skip_first_batches(loader, 2)


def test_a_fuelrail_dataset_continues_in_accelerate(build_once, tmp_path):
    root = build_once({"train": (5, 7, 9)})[0]
    with load(root, 2, seed=7, image=TINY) as plain:
        keys = [batch["sample_key"] for batch in plain]
    accelerator = make_accelerator()
    with load(root, 2, seed=7, image=TINY) as loader:
        prepared = prepare_loader(accelerator, loader)
        ends = []
        for number, batch in enumerate(prepared, 1):
            assert batch["sample_key"] == keys[number - 1]
            ends.append(prepared.end_of_dataloader)
            if number == 3:
                accelerator.save_state(tmp_path)
        assert ends == [False] * (len(keys) - 1) + [True]
        accelerator.load_state(tmp_path)
        assert [batch["sample_key"] for batch in prepared] == keys[3:]


@pytest.mark.parametrize(
    ("kind", "dispatch"),
    [
        (fr.order.BatchSampler, False),
        (fr.order.Sampler, False),
        (fr.order.Sampler, True),
    ],
    ids=["batches", "rows", "dispatched_rows"],
)
def test_a_loader_whose_batches_would_be_dealt_out_again_is_refused(kind, dispatch):
    sampler = kind(NUM_ROWS, global_batch=GLOBAL_BATCH, world=fr.World(0, 2))
    options = {"batch_sampler": sampler}
    if kind is fr.order.Sampler:
        options = {"sampler": sampler, "batch_size": sampler.rank_batch}
    accelerate.PartialState(cpu=True)
    with pytest.raises(fr.errors.OrderError, match=r"sampler\.count\(loader\)"):
        list(
            accelerate.data_loader.prepare_data_loader(
                DataLoader(Rows(), **options),
                torch.device("cpu"),
                num_processes=2,
                process_index=0,
                put_on_device=True,
                dispatch_batches=dispatch,
            )
        )


class Training:
    """A Trainer of transformers, and the rows that it has trained on."""

    def __init__(self, folder, loader=None, *, max_steps, accumulation=3, **arguments):
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        rows = self.rows = []

        class Noting(transformers.Trainer):
            def compute_loss(self, model, inputs, **_):
                rows.append(inputs["row"].tolist())
                return model(**inputs)["loss"]

        self.trainer = Noting(
            Model(),
            transformers.TrainingArguments(
                str(folder),
                max_steps=max_steps,
                save_steps=2,
                gradient_accumulation_steps=accumulation,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                **arguments,
            ),
        )
        if loader is not None:
            set_train_loader(self.trainer, loader)


def test_a_trainer_resumes_from_a_moved_checkpoint_and_trains_an_epochs_last_batches(tmp_path):
    Training(tmp_path / "first", make_loader(), max_steps=2).trainer.train()
    (tmp_path / "first" / "checkpoint-2").rename(tmp_path / "moved")
    resumed = Training(
        tmp_path / "second",
        make_loader(),
        max_steps=6,
        restore_callback_states_from_checkpoint=True,
    )
    resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "moved"))
    assert resumed.rows == [ORDER[step] for step in range(6, 16)]
    assert resumed.trainer.state.epoch == 2


@pytest.mark.parametrize("hook", ["on_step_end", "on_step_begin"])
def test_a_checkpoint_on_a_signal_has_the_position_of_the_last_optimiser_step(hook, tmp_path):
    """The Trainer writes it at the beginning of step 3, or before its optimiser step, with all of its batches drawn."""
    stopped = Training(tmp_path, make_loader(), max_steps=4, enable_jit_checkpoint=True)
    from transformers import TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    handler = stopped.trainer.callback_handler
    (jit,) = (item for item in handler.callbacks if isinstance(item, JITCheckpointCallback))

    def ask(self, args, state, control, **_):
        jit.jit_manager.is_checkpoint_requested = state.global_step == 2

    stopped.trainer.add_callback(type("Ask", (TrainerCallback,), {hook: ask})())
    stopped.trainer.train()
    resumed = Training(tmp_path, make_loader(), max_steps=4)
    resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.rows == [ORDER[step] for step in range(6, 11)]


def test_a_trainer_refuses_a_checkpoint_without_a_position(tmp_path):
    plain = Training(tmp_path, max_steps=2)
    plain.trainer.train_dataset = Rows()
    plain.trainer.args.remove_unused_columns = False
    plain.trainer.train()
    resumed = Training(tmp_path, make_loader(), max_steps=4)
    with pytest.raises(fr.errors.OrderError, match="step 2 has no position of this loader"):
        resumed.trainer.train(resume_from_checkpoint=True)


def test_a_trainer_refuses_another_accumulation_in_a_resumed_run(tmp_path):
    Training(tmp_path, make_loader(), max_steps=2).trainer.train()
    resumed = Training(tmp_path, make_loader(), max_steps=4, accumulation=2)
    with pytest.raises(fr.errors.OrderError, match=r"6 batches into its epoch of 8, .* 4 into one"):
        resumed.trainer.train(resume_from_checkpoint=True)


def test_a_trainer_refuses_epochs_of_other_lengths(tmp_path):
    costs = [row % 7 + 1 for row in range(NUM_ROWS)]
    pack = fr.Pack(budget=9, cost="cost", window=64)
    sampler = fr.order.BatchSampler(
        {"cost": costs}, fr.OrderSpec(seed=7, pack=pack), global_batch=2
    )
    lengths = {sampler._batching.of_epoch(epoch).num_steps for epoch in range(8)}
    assert len(lengths) > 1
    packed = Training(
        tmp_path, sampler.count(DataLoader(Rows(), batch_sampler=sampler)), max_steps=300
    )
    with pytest.raises(fr.errors.OrderError, match="train packs with Accelerate"):
        packed.trainer.train()


class Augmented(Rows):
    def __getitem__(self, row):
        return {"row": row, "x": torch.rand(1)}


def test_workers_draw_other_random_numbers_on_each_rank(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    drawn = []
    for rank in range(2):
        monkeypatch.setattr(transformers.TrainingArguments, "process_index", rank)
        sampler = fr.order.BatchSampler(NUM_ROWS, global_batch=4, world=fr.World(rank, 2))
        loader = DataLoader(Augmented(), batch_sampler=sampler, num_workers=1)
        training = Training(tmp_path, sampler.count(loader), max_steps=1)
        drawn.append(next(iter(training.trainer.get_train_dataloader()))["x"])
    assert not torch.equal(*drawn)


def test_workers_keep_the_users_function(tmp_path):
    sampler = fr.order.BatchSampler(NUM_ROWS, global_batch=4)
    loader = DataLoader(Rows(), batch_sampler=sampler, worker_init_fn=print)
    Training(tmp_path, sampler.count(loader), max_steps=1)
    assert loader.worker_init_fn is print


@pytest.mark.parametrize("argument", ["ignore_data_skip", "auto_find_batch_size"])
def test_arguments_that_cannot_hold_are_refused(argument, tmp_path):
    with pytest.raises(fr.errors.ConfigError, match=f"{argument}=True"):
        Training(tmp_path, make_loader(), max_steps=1, **{argument: True})


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def follow_page(package, *headings):
        pytest.importorskip(package, reason=f"{package} is not installed")
        path = ROOT / "docs" / "guides" / "huggingface.md"
        return follow(path, "Accelerate, transformers and Lightning", *headings)

    return follow_page


def test_the_page_trains_with_accelerate(page, capsys):
    page("accelerate", "Accelerate")
    assert capsys.readouterr().out == "5\n"


def test_the_page_trains_with_transformers(page):
    assert page("transformers", "The Trainer of transformers")["state"].epoch == 1.75


def test_the_page_trains_with_lightning(page):
    names = page("pytorch_lightning", "Lightning")
    assert (names["first"].num_batches, names["resumed"].num_batches) == (6, 10)
