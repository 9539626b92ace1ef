"""Losses from stored logits: equal to the full divergence where all is stored, right in the mean where it is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fuelrail import DataLoader, Transforms
from fuelrail.bench.annotation.run import annotate
from fuelrail.bench.trainer.distill.student import distilled, divergence
from fuelrail.bench.trainer.distill.teacher import LAYER
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.gpt import tokens_of
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.parallel import parallelise
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.errors import ConfigError
from support.datasets import build_dataset
from support.parallel_equality import train_step

SIZE = 40
NUM_DRAWS = 10_000


def topk(teacher: torch.Tensor, k: int) -> Logits:
    probabilities = teacher.softmax(-1)
    weights, indices = probabilities.topk(k, dim=-1)
    known_tokens = torch.ones(teacher.shape[:-1], dtype=torch.bool)
    return Logits(indices.int(), weights, 1 - weights.sum(-1), known_tokens)


def drawn(teacher: torch.Tensor, count: int, generator: torch.Generator) -> Logits:
    flat = teacher.softmax(-1).flatten(0, -2)
    indices = torch.multinomial(flat, count, replacement=True, generator=generator).view(
        *teacher.shape[:-1], count
    )
    weights = torch.full(indices.shape, 1 / count)
    return Logits(
        indices.int(),
        weights,
        None,
        torch.ones(teacher.shape[:-1], dtype=torch.bool),
    )


@pytest.fixture
def pair():
    torch.manual_seed(3)
    return torch.randn(2, 3, SIZE, requires_grad=True), 3 * torch.randn(2, 3, SIZE)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_top_k_of_the_whole_vocabulary_is_the_full_divergence(pair, temperature) -> None:
    student, teacher = pair
    full = divergence(student, teacher, temperature)
    listed = divergence(student, topk(teacher / temperature, SIZE), temperature)
    torch.testing.assert_close(listed, full, rtol=1e-4, atol=1e-5)
    full_gradient, got = (
        torch.autograd.grad(values.sum(), student)[0] for values in (full, listed)
    )
    torch.testing.assert_close(got, full_gradient, rtol=1e-4, atol=1e-6)


def test_the_rest_of_top_k_counts_as_one_token(pair) -> None:
    student, teacher = pair
    stored = topk(teacher, 5)
    q = teacher.softmax(-1)
    p = student.detach().softmax(-1)
    indices = stored.indices.long()
    teacher_shares, student_shares = (
        torch.cat(
            [
                shares.gather(-1, indices),
                1 - shares.gather(-1, indices).sum(-1, keepdim=True),
            ],
            -1,
        )
        for shares in (q, p)
    )
    expected = (teacher_shares * (teacher_shares / student_shares).log()).sum(-1)
    torch.testing.assert_close(divergence(student, stored).detach(), expected, rtol=1e-4, atol=1e-5)
    assert (expected < divergence(student, teacher, 1.0).detach()).all()


def test_a_student_that_is_sure_of_the_listed_tokens_keeps_a_gradient_towards_the_rest() -> None:
    student = torch.zeros(1, 10)
    student[0, :2] = 40.0
    student.requires_grad_()
    stored = Logits(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.5, 0.4]]),
        torch.tensor([0.1]),
        torch.ones(1, dtype=bool),
    )
    value = divergence(student, stored).sum()
    value.backward()
    assert math.isfinite(value.item()) and student.grad is not None
    assert student.grad[0, 2:].sum().item() == pytest.approx(-0.1, rel=1e-3)


def test_draws_have_the_gradient_of_the_full_divergence_in_the_mean_and_top_k_has_not(
    pair,
) -> None:
    student, teacher = pair
    (full,) = torch.autograd.grad(divergence(student, teacher, 1.0).sum(), student)
    generator = torch.Generator().manual_seed(5)
    students = student.detach().expand(NUM_DRAWS, *student.shape).clone().requires_grad_()
    values = divergence(students, drawn(teacher.expand(NUM_DRAWS, *teacher.shape), 8, generator))
    (gradients,) = torch.autograd.grad(values.sum(), students)
    error = gradients.std(0) / math.sqrt(NUM_DRAWS)
    off = (gradients.mean(0) - full).abs() / error.clamp(min=1e-9)
    assert off[error > 1e-7].square().mean().sqrt() < 1.5 and off[error > 1e-7].max() < 4.5
    entropy = -(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1)
    expected = divergence(student, teacher, 1.0).detach() + entropy
    torch.testing.assert_close(values.detach().mean(0), expected, rtol=0.02, atol=0.02)
    naive = topk(teacher, 8)
    renormalised = naive._replace(
        weights=naive.weights / naive.weights.sum(-1, keepdim=True), tail=None
    )
    (biased,) = torch.autograd.grad(divergence(student, renormalised).sum(), student)
    assert (biased - full).abs().max() > 20 * error.max()


def test_masks_and_weights_of_tokens(pair) -> None:
    student, teacher = pair
    stored = topk(teacher, 4)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    masked = stored.map(lambda part: part * mask.view(2, 3, *[1] * (part.ndim - 2)))._replace(
        mask=mask
    )
    values = divergence(student, masked)
    assert (values[~mask] == 0).all() and (values[mask] > 0).all()
    weights = torch.tensor([[1.0, 5.0, 0.5], [2.0, 0.0, 9.0]])
    alone = divergence(student, stored)
    expected = (alone[0, 0] + 0.5 * alone[0, 2] + 2 * alone[1, 0]) / 3.5
    torch.testing.assert_close(divergence(student, masked, weights=weights), expected)
    full = divergence(student, teacher, weights=weights)
    torch.testing.assert_close(full, (divergence(student, teacher) * weights).sum() / 17.5)
    none = divergence(student, masked, weights=torch.zeros(2, 3))
    none.backward()
    assert none.item() == 0 and student.grad is not None and torch.isfinite(student.grad).all()


def test_half_precision_students_and_packed_rows(pair) -> None:
    student, teacher = pair
    stored = topk(teacher, 4)
    rows = Logits(*(part.flatten(0, 1) for part in stored[:4]))._replace(
        offsets=torch.tensor([0, 3, 6])
    )
    values = divergence(student.flatten(0, 1), rows)
    assert torch.equal(values.view(2, 3), divergence(student, stored))
    assert divergence(student.bfloat16(), stored).dtype == torch.float32
    assert np.isfinite(divergence(student.bfloat16(), stored).detach().numpy()).all()


GPT = MODELS["gpt-tiny"]
TINY = Transforms(image={"height": 16, "width": 16})  # type: ignore[arg-type]
TABLE = """
- {name: logits, kind: logits_topk, field: logits.lgt, dtype: float16, axes: [position, token], shape: [32, 64],
   law: {name: fixed}, vocabulary: {name: words, size: 64}}
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A dataset, and a decoder's logits of it, whole and stored in several ways."""
    folder = tmp_path_factory.mktemp("taught")
    build_dataset(folder / "data", {"train": (8,)}, size=(16, 16))
    torch.manual_seed(1)
    model = build_model(GPT)
    with torch.no_grad():
        model.head.vocabulary.weight.mul_(8)

    def logits(batch):
        return {"logits": model.predict(tokens_of(batch, GPT))[1]}

    (folder / "table.yaml").write_text(TABLE)
    ways = {
        "whole": {},
        "all": {"channels": folder / "table.yaml"},
        "topk": {"store": "topk:16"},
        "sampled": {"store": "sampled:40"},
        "some": {"channels": folder / "table.yaml", "positions": 0.5},
        "soft": {"channels": folder / "table.yaml", "temperature": 2.0},
    }
    for name, options in ways.items():
        annotate(
            folder / "data",
            folder / name,
            logits,
            batch_size=4,
            workers=1,
            transforms=TINY,
            **options,
        )
    return folder


def trained(taught, layer: str, **settings) -> list[float]:
    layers = {LAYER: str(taught / layer)}
    with DataLoader(
        taught / "data",
        4,
        shuffle=True,
        num_workers=1,
        transforms=TINY,
        layers=layers,
    ) as loader:
        wrap, _ = distilled(
            GPT,
            loader,
            "cpu",
            layer=layers[LAYER],
            **{"weights": "logits=1", **settings},
        )
        parallel = parallelise(lambda: wrap(build_model(GPT)))
        return [train_step(parallel, batch) for batch in loader]


@pytest.mark.costly
def test_the_trainers_decoder_learns_from_either_kind(taught) -> None:
    full_losses = trained(taught, "whole", temperature=1.0)
    assert trained(taught, "all") == pytest.approx(full_losses, rel=1e-3)
    assert trained(taught, "soft") == pytest.approx(
        trained(taught, "whole", temperature=2.0), rel=1e-3
    )
    topk, sampled, partial_losses = (trained(taught, name) for name in ("topk", "sampled", "some"))
    assert all(loss < full for loss, full in zip(topk, full_losses, strict=True)), (
        "tokens that count as one differ by less"
    )
    assert len({tuple(losses) for losses in (full_losses, topk, sampled, partial_losses)}) == 4
    assert partial_losses == pytest.approx(full_losses, rel=0.5), (
        "a mean over the positions that are stored"
    )
    with pytest.raises(
        ConfigError,
        match=r"temperature=3.0: layer '.*soft' has logits that were stored at 2.0",
    ):
        trained(taught, "soft", temperature=3.0)


def test_a_layer_of_another_vocabulary_is_refused(taught) -> None:
    layers = {LAYER: str(taught / "topk")}
    says = r"'logits' of \[1024, 50304\], for a student of .*; it has \[32, 64\]"
    with (
        DataLoader(taught / "data", 4, transforms=TINY, layers=layers) as loader,
        pytest.raises(ConfigError, match=says),
    ):
        distilled(MODELS["gpt2"], loader, "cpu", layer=layers[LAYER])
