"""A model from outside: every strategy equals one process, runs resume on other meshes, evaluation is exact."""

from __future__ import annotations

import json
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fuelrail as fr
from fuelrail import bench
from fuelrail.bench.trainer.models.build import draft
from support import own_model
from support.own_model import STRATEGIES, Detector, divided, load, score
from support.ranks import run_ranks


@pytest.fixture(scope="module")
def dataset(tiny_dataset):
    return str(tiny_dataset({"train": (16, 16, 16), "val": (7, 6)}).root)


class Tied(nn.Module):
    """Two ways to change parameters after a module has them as its parts."""

    def __init__(self):
        super().__init__()
        self.words = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.words.weight


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.layers.insert(0, nn.BatchNorm1d(4))
        self.apply(self.begin)

    @staticmethod
    def begin(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(3))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.layers[1].running_mean.fill_(2)


@pytest.mark.parametrize(
    ("kind", "warns"),
    [(Plain, False), (Tied, True), (Late, True), (Detector, True)],
)
def test_a_draft_of_any_module_is_filled_with_its_values(kind, warns, caplog):
    torch.manual_seed(5)
    state = kind().state_dict()
    model, fill = draft(kind, "cpu", 5)
    assert all(value.is_meta for value in model.parameters())
    fill([model], False)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert ("makes it whole" in caplog.text) == warns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wrap": [nn.LSTM]},
            "wrap names LSTM, and model Detector has no part of it",
        ),
        ({"strategy": "fsdp3"}, "ParallelSettings"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(fr.errors.ConfigError, match=message):
        bench.parallelise(Detector, **options)


def test_frozen_batch_norm_and_frozen_parts_stay():
    parallel = divided(batch_norm="frozen")
    before = {name: value.clone() for name, value in parallel.models[0].state_dict().items()}
    batch = {
        "img": torch.randint(0, 255, (2, 1, 3, 32, 48), dtype=torch.uint8),
        "gt_boxes_3d": [torch.ones(1, 7)] * 2,
    }
    parallel.step([batch, batch])
    assert set(parallel.losses) == {"centre", "there"}
    changed = {
        name
        for name, value in parallel.models[0].state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert "queries" in changed
    assert not any(name.startswith(("backbone.1.", "frozen.")) for name in changed)


def test_accumulated_batches_are_one_larger_batch():
    batches = [
        {
            "img": torch.randint(0, 255, (2, 1, 3, 32, 48), dtype=torch.uint8),
            "gt_boxes_3d": [torch.ones(1, 7)] * 2,
        }
    ]
    batches.append(
        {
            "img": batches[0]["img"].flip(-1),
            "gt_boxes_3d": [torch.zeros(2, 7)] * 2,
        }
    )
    joined_batch = {
        "img": torch.cat([batch["img"] for batch in batches]),
        "gt_boxes_3d": [*batches[0]["gt_boxes_3d"], *batches[1]["gt_boxes_3d"]],
    }
    parts, joined = (divided(batch_norm="frozen", clip_norm=0.1) for _ in range(2))
    for _ in range(3):
        loss = parts.step(batches)
        assert float(loss) == pytest.approx(float(joined.step([joined_batch])), abs=2e-6)
        assert float(loss) == pytest.approx(float(sum(parts.losses.values())), abs=1e-6)


def run(dataset, place, steps):
    """Train to a number of steps; returns losses by step, logged values, and what the evaluations returned."""
    parallel = divided()
    losses_by_step = {}
    logged = {}
    scores = []

    def note(record, losses):
        losses_by_step[record.step] = losses | {"draw": random.random() + np.random.rand()}

    with (
        load(dataset, batch_size=4, shuffle=True, drop_last=True, seed=3) as loader,
        load(dataset, split="val", batch_size=4) as val,
        bench.Checkpoints(place, keep=2) as checkpoints,
    ):
        bench.train(
            parallel,
            loader,
            steps=steps,
            save_every=3,
            evaluate_every=4,
            average=0.9,
            checkpoints=checkpoints,
            evaluate=lambda: bench.evaluate(parallel, val, score),
            on_step=note,
            on_evaluate=lambda step, table: scores.append((step, table)),
            log=[logged_in(logged)],
        )
    return losses_by_step, logged, scores


def logged_in(logged_values):
    return lambda values, step: logged_values.__setitem__(step, values)


@pytest.mark.parametrize("several", [False, True])
def test_one_function_logs_as_a_list_of_functions_does(dataset, several):
    logged = {}
    log = [logged_in(logged)] if several else logged_in(logged)
    with load(dataset, batch_size=4, shuffle=True, drop_last=True, seed=3) as loader:
        bench.train(divided(), loader, steps=2, log=log)
    assert list(logged) == [1, 2] and {"loss", "learning_rate"} <= set(logged[2])


@pytest.mark.parametrize("log", ["wandb", [print, "wandb"], [None]])
def test_what_cannot_log_is_refused_before_the_first_step(dataset, log):
    with (
        load(dataset, batch_size=4, shuffle=True, drop_last=True, seed=3) as loader,
        pytest.raises(
            fr.errors.ConfigError,
            match=r"log=.* must be a function of values and step",
        ),
    ):
        bench.train(divided(), loader, steps=2, log=log)


@pytest.mark.costly
def test_a_run_that_stopped_continues_with_the_same_losses_averages_and_draws(dataset, tmp_path):
    random.seed(1)
    np.random.seed(1)
    all_losses, logged, scores = run(dataset, tmp_path / "whole", 9)
    random.seed(1)
    np.random.seed(1)
    first, *_ = run(dataset, tmp_path / "parts", 5)
    random.seed(2)
    rest, logged_rest, scores_rest = run(dataset, tmp_path / "parts", 9)
    assert first | rest == all_losses and list(rest) == [5, 6, 7, 8]
    assert [step for step, _ in scores] == [4, 8, 9]
    assert logged_rest[9] == logged[9] and {
        "loss",
        "centre",
        "there",
        "learning_rate",
        "evaluation/best",
    } <= set(logged[9])
    assert logged[1]["learning_rate"] == 1e-2 and logged[9]["learning_rate"] == pytest.approx(1e-3)
    (_, table), (_, table_rest) = scores[-1], scores_rest[-1]
    assert len(set(table["sample_key"])) == len(table["best"]) == len(table["boxes"]) == 13
    assert torch.equal(table["best"], table_rest["best"])
    fresh = divided()
    with load(dataset, split="val", batch_size=4) as val:
        assert not torch.equal(bench.evaluate(fresh, val, score)["best"], table["best"])


@pytest.mark.process
@pytest.mark.slow
def test_ranks_train_and_evaluate_as_one_process(dataset, tmp_path):
    run_ranks(2, own_model.__file__, dataset, tmp_path / "out.json", 4)
    differences = json.loads((tmp_path / "out.json").read_text())
    assert {name: differences[name] for name in STRATEGIES if differences[name] > 2e-6} == {}
    assert all(
        abs(differences[f"{name} moved"]) > 1e-3 and differences[f"{name} evaluated"]
        for name in STRATEGIES
    )


def test_a_student_learns_from_pairs_of_layers_of_another_module():
    torch.manual_seed(0)
    batch = torch.rand(4, 6)
    student = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5))
    teacher = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4), nn.Linear(4, 5))
    project = nn.Linear(3, 4)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    pairs = [
        bench.Pair("0", "1", nn.functional.mse_loss, 0.5, project),
        bench.Pair("", "", partial(bench.divergence, temperature=3.0)),
    ]
    model = bench.Distilling(
        student, teacher, pairs, lambda outputs, batch: outputs.square().mean()
    )
    losses = {name: value.detach() for name, value in model(batch).items()}
    hidden = teacher[1](batch)  # without dropout
    student_logits, teacher_logits = (
        values.detach().numpy().astype(np.float64) / 3
        for values in (student(batch), teacher[2](hidden))
    )
    log = [
        values - np.log(np.exp(values).sum(-1, keepdims=True))
        for values in (student_logits, teacher_logits)
    ]
    softened = 9 * (np.exp(log[1]) * (log[1] - log[0])).sum(-1).mean()
    assert float(losses["distilled/1/"]) == pytest.approx(softened, rel=1e-5)
    with torch.no_grad():
        distance = (project(student[0](batch)) - hidden).square().mean() / 2
        assert float(losses["distilled/0/0"]) == pytest.approx(float(distance), rel=1e-5)
        assert float(losses["student"]) == pytest.approx(float(student(batch).square().mean()))

    parallel = bench.parallelise(model)
    first, last = (float(parallel.step([batch])) for _ in range(2))
    assert last < first and project.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert torch.equal(model.eval()(batch), student(batch))
    with pytest.raises(AttributeError, match="nothing"):
        bench.Distilling(
            student,
            teacher,
            [bench.Pair("nothing", "", nn.functional.mse_loss)],
        )


def test_weights_come_and_go_as_safetensors_with_a_report(tmp_path):
    parallel = divided(seed=1)
    place = tmp_path / "weights.safetensors"
    bench.save_weights(parallel, place)
    saved = load_file(place)  # safetensors' own
    assert saved.keys() == parallel.models[0].state_dict().keys()
    assert all(
        torch.equal(value, saved[name]) for name, value in parallel.models[0].state_dict().items()
    )

    target = divided(seed=2)
    report = bench.load_weights(
        target, place, rename=lambda name: None if name == "queries" else name
    )
    assert (report.missing, report.unexpected, report.other_shape) == (
        ["queries"],
        [],
        {},
    )
    state = target.models[0].state_dict()
    assert {name for name, value in state.items() if not torch.equal(value, saved[name])} == {
        "queries"
    }
    report = bench.load_weights(target, {"queries": torch.ones(8, 3), "more": torch.ones(1)})
    assert report.other_shape == {
        "queries": "[8, 3] there, [8, 16] here"
    } and report.unexpected == ["more"]
    with pytest.raises(fr.errors.ConfigError, match="neither a safetensors file nor a folder"):
        bench.load_weights(target, tmp_path / "nothing")
    for spoiled in (
        b"",
        bytes(100),
        place.read_bytes()[:-4],
        (2**63).to_bytes(8, "little") + b"{}",
    ):
        place.write_bytes(spoiled)
        with pytest.raises(
            fr.errors.ConfigError,
            match=r"weights '.*weights.safetensors' cannot be read: .*; take the file",
        ):
            bench.load_weights(target, tmp_path)
    place.unlink()
    os.mkfifo(place)  # is not waited for
    with pytest.raises(fr.errors.ConfigError, match="neither a safetensors file nor a folder"):
        bench.load_weights(target, tmp_path)


def test_losses_of_float64_are_not_rounded():
    class Thirds(nn.Linear):
        def forward(self, batch):
            return {
                "one": super().forward(batch).sum(),
                "other": super().forward(batch).sum(),
            }

    parallel = bench.parallelise(
        Thirds(2, 1, dtype=torch.float64),
        optimiser=partial(torch.optim.SGD, lr=1.0),
    )
    bias = parallel.models[0].bias.detach().clone()
    batch = torch.ones(1, 2, dtype=torch.float64)
    assert parallel.step([batch] * 3).dtype == torch.float64
    assert torch.allclose(
        parallel.models[0].bias, bias - 2, rtol=0, atol=1e-14
    )  # three thirds of two losses


def test_what_is_in_the_place_of_the_settings_is_named():
    with pytest.raises(
        fr.errors.ConfigError,
        match="must be a ParallelSettings; or give its fields by name",
    ):
        bench.parallelise(nn.Linear(2, 2), lambda outputs, batch: outputs)
