"""A teacher's stored logits: bytes beside other layouts, bias of the gradient, students taught by
them, decoding time.

    python -m fuelrail.bench.micro.logits [--out FILE] [--seeds N] [--steps N]

Teacher and students are decoders of the reference trainer; they read the words of the documentation
of Python's standard library. The layouts of others are computed here on the same logits:
DistillKit's has tokens of whole bits in order of probability, a few values as bfloat16 and a
polynomial in the rank for the others; Megatron-LM's (pull request 5019) uint16, a bool for bit 17
and float16 log-probabilities, in zstd.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
import zstandard
from torch import Tensor

from fuelrail.bench.annotation.teacher import Reduction
from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.source import documentation_texts
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.trainer.distill.student import divergence
from fuelrail.bench.trainer.models.build import build_model
from fuelrail.bench.trainer.models.settings import MODELS, GptSettings
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.logits import SAMPLED, TOPK, Logits
from fuelrail.pipeline.channels.table import Channel, Law, Vocabulary

WORDS = 1024
CONTEXT = 32
COUNT = 50
BATCH = 8
TEACHER = GptSettings(width=96, depth=3, heads=4, vocabulary=WORDS, context=CONTEXT)
STUDENT = GptSettings(width=48, depth=2, heads=2, vocabulary=WORDS, context=CONTEXT)
Lesson = Callable[[Tensor, Tensor, Sequence[str]], Tensor]
"""A student's logits, the teacher's, and the samples' keys, to the loss."""


class LayoutFigures(msgspec.Struct, frozen=True):
    """Bytes of a position, and the mean divergence [nats] of what is read from the top k that
    were stored.
    """

    vocabulary: int
    k: int
    layout: str
    bytes: float
    error_nats: float | None


class LogitsReport(msgspec.Struct, frozen=True):
    """All figures of one run; see `measure`."""

    machine: MachineFacts
    layouts: list[LayoutFigures]
    gradients: dict[str, dict[str, float]]
    students: dict[str, list[float]]
    teacher_loss: float
    decoding: dict[str, float]


def channel_of(
    kind: str, k: int, vocabulary: int, dtype: str = "uint8", length: int | None = None
) -> Channel:
    """Return the entry of logits of k tokens a position."""
    return Channel(
        name="logits",
        kind=kind,
        field="logits.lgt",
        law=Law("fixed"),
        dtype=dtype if kind == TOPK else "",
        axes=("position", "token"),
        shape=(length, k),
        vocabulary=Vocabulary("words", vocabulary),
    )


def stored(logits: Tensor, channel: Channel, key: str) -> tuple[Logits, int]:
    """Return logits [T, V] as they are read again, and their bytes."""
    kind = KINDS[channel.kind]
    data = kind.encode(Reduction()(logits, channel, key), channel)
    return kind.decode(data, channel), len(data)


def layouts(logits: Tensor, k: int) -> Iterator[LayoutFigures]:
    """Yield the figures of all layouts on logits [T, V]."""
    number, vocabulary = logits.shape
    bits = (vocabulary - 1).bit_length()
    logs, indices = logits.log_softmax(-1).topk(k, dim=-1)

    def figures(layout: str, num_bytes: float, read: Tensor | None) -> LayoutFigures:
        error = (
            None
            if read is None
            else F.kl_div(
                read.log_softmax(-1), logs.log_softmax(-1), log_target=True, reduction="sum"
            )
        )
        return LayoutFigures(
            vocabulary=vocabulary,
            k=k,
            layout=layout,
            bytes=num_bytes,
            error_nats=None if error is None else float(error) / number,
        )

    for dtype in ("uint8", "float16"):
        reduced, num_bytes = stored(logits, channel_of(TOPK, k, vocabulary, dtype), "a")
        order = indices.argsort(-1).argsort(-1)
        yield figures(
            f"topk, {dtype}",
            num_bytes / number,
            torch.from_numpy(reduced.weights).log().gather(-1, order),
        )
    yield figures(
        "sampled", stored(logits, channel_of(SAMPLED, k, vocabulary), "a")[1] / number, None
    )
    yield figures("whole bits, uint8, scale and tail", -(-bits * k // 8) + k + 4, None)
    for name, exact, powers in (
        ("recommended", 16, (0, 1, 2, 3, 4, 0.5)),
        ("budget", 1, (0, 1, 0.5)),
    ):
        ranks = torch.arange(k - exact, dtype=torch.float64)[:, None] ** torch.tensor(
            powers, dtype=torch.float64
        )
        fitted = (ranks @ (torch.linalg.pinv(ranks) @ logs[:, exact:].double().T)).T.float()
        read = torch.cat([logs[:, :exact].bfloat16().float(), fitted], -1)
        yield figures(f"DistillKit, {name}", -(-bits * k // 8) + 2 * exact + 4 * len(powers), read)
    arrays = [
        (indices & 0xFFFF).numpy().astype("<u2"),
        (indices >> 16).numpy().astype(bool),
        logs.half().numpy(),
    ]
    squeezed = sum(len(zstandard.ZstdCompressor(3).compress(array.tobytes())) for array in arrays)
    yield figures("Megatron-LM PR 5019", squeezed / number, logs.half().float())


def gradients(student: Tensor, teacher: Tensor, draws: int) -> dict[str, dict[str, float]]:
    """Return how far mean gradients are from the full divergence's: as a share of its norm, and
    in standard errors.
    """
    q = teacher.double().softmax(-1)
    p = student.double().softmax(-1)
    channel = channel_of(SAMPLED, COUNT, student.shape[1])
    total = torch.zeros_like(p)
    squares = torch.zeros_like(p)
    for number in range(draws):
        read = stored(teacher, channel, str(number))[0].map(torch.from_numpy)
        leaf = student.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(divergence(leaf, read).sum(), leaf)
        total += gradient
        squares += gradient.double() ** 2
    mean = total / draws
    error = ((squares / draws - mean**2).clamp(min=0) / draws).sum().sqrt()
    weights, indices = q.topk(COUNT, dim=-1)
    renormalised = torch.zeros_like(q).scatter(-1, indices, weights / weights.sum(-1, keepdim=True))
    rest = 1 - torch.zeros_like(q).scatter(-1, indices, 1.0)
    ratio = (q * rest).sum(-1, keepdim=True) / (p * rest).sum(-1, keepdim=True)
    tailed = torch.zeros_like(q).scatter(-1, indices, weights) + rest * p * ratio
    norm = (p - q).norm()
    off = {
        "sampled": mean - (p - q),
        "topk without its tail": q - renormalised,
        "topk with its tail": q - tailed,
    }
    return {
        name: {
            "share_of_norm": float(error_vector.norm() / norm),
            "standard_errors": float(error_vector.norm() / error),
        }
        for name, error_vector in off.items()
    }


def texts() -> tuple[Tensor, Tensor]:
    """Return windows of words int64 [N, CONTEXT + 1] to train and to validate on; rare words are
    one.
    """
    documents = documentation_texts(without=frozenset({"test"}))
    words = [word for text in documents for word in text.lower().split()]
    numbers = {
        word: number + 1 for number, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))
    }
    tokens = torch.tensor([numbers.get(word, 0) for word in words])
    windows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order[256:]], windows[order[:256]]


def trained(
    size: GptSettings, windows: Tensor, steps: int, seed: int, teacher: Any, lesson: Lesson
) -> Any:
    """Train a decoder on batches of windows; without a teacher, on the next words."""
    torch.manual_seed(seed)
    model: Any = build_model(size)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = torch.randint(len(windows), (BATCH,), generator=generator)
        optimiser.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        tokens = windows[rows]
        with torch.no_grad():
            said = tokens[:, 1:] if teacher is None else teacher.predict(tokens)[1]
        loss = lesson(model.predict(tokens)[1], said, [str(row) for row in rows.tolist()])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
    return model


def next_words(logits: Tensor, tokens: Tensor, _: Sequence[str]) -> Tensor:
    """Return the cross-entropy of the words that came."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def from_stored(
    logits: Tensor, said: Tensor, keys: Sequence[str], *, channel: Channel, tail: bool = True
) -> Tensor:
    """Return the mean divergence from what a layer of this channel would hold."""
    read = KINDS[channel.kind].collate(
        [stored(row, channel, key)[0] for row, key in zip(said, keys, strict=True)], channel, ()
    )
    teacher = read.map(torch.from_numpy)
    if channel.kind == TOPK and not tail:
        teacher = teacher._replace(
            weights=teacher.weights / teacher.weights.sum(-1, keepdim=True), tail=None
        )
    return divergence(logits, teacher).mean()


def lessons() -> dict[str, Lesson]:
    """Return the losses that students are compared under."""
    top = channel_of(TOPK, COUNT, WORDS, length=CONTEXT)
    drawn = channel_of(SAMPLED, COUNT, WORDS, length=CONTEXT)
    return {
        "full": lambda logits, said, _: divergence(logits, said, 1.0).mean(),
        "sampled:50": partial(from_stored, channel=drawn),
        "topk:50": partial(from_stored, channel=top),
        "topk:50 without its tail": partial(from_stored, channel=top, tail=False),
    }


def decoding(repeats: int) -> dict[str, float]:
    """Return the processor time of decoding and collating as a share of a step of the smallest
    decoder, in turns.
    """
    size: Any = MODELS["gpt-tiny"]
    model: Any = build_model(size)
    optimiser = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(size.vocabulary, (16, size.context + 1))
    said = torch.randn(16, size.context, size.vocabulary)
    shares_by_kind: dict[str, list[float]] = {}
    for kind, _ in itertools.product((TOPK, SAMPLED), range(repeats)):
        channel = channel_of(kind, COUNT, size.vocabulary, length=size.context)
        members = [
            KINDS[kind].encode(Reduction()(member, channel, str(number)), channel)
            for number, member in enumerate(said)
        ]
        start_s = time.process_time()
        read = KINDS[kind].collate(
            [KINDS[kind].decode(member, channel) for member in members], channel, ()
        )
        decoded_s = time.process_time()
        optimiser.zero_grad()
        torch.autograd.backward(
            divergence(model.predict(tokens)[1], read.map(torch.from_numpy)).mean()
        )
        optimiser.step()
        shares_by_kind.setdefault(kind, []).append(
            (decoded_s - start_s) / (time.process_time() - decoded_s)
        )
    return {kind: statistics.median(shares) for kind, shares in shares_by_kind.items()}


def measure(seeds: int, steps: int, draws: int) -> LogitsReport:
    """Measure all; a student's figure is its cross-entropy on windows that none was trained on."""
    facts = machine_facts()
    torch.set_num_threads(1)  # beside others, threads that wait for each other would count as time
    generator = torch.Generator().manual_seed(0)
    wide = 2.5 * torch.randn(256, 128_256, generator=generator)
    shares = decoding(15)
    windows, held = texts()
    teacher = trained(
        TEACHER, windows=windows, steps=4 * steps, seed=0, teacher=None, lesson=next_words
    )
    teacher.eval().requires_grad_(requires_grad=False)

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(next_words(model.predict(held)[1], held[:, 1:], ()))

    said = teacher.predict(held[:8])[1].flatten(0, 1)
    tables = [
        figures_row
        for logits, ks in ((wide, (50, 64, 128)), (said, (50,)))
        for k in ks
        for figures_row in layouts(logits, k)
    ]
    student_logits = (
        trained(STUDENT, windows=windows, steps=steps // 4, seed=9, teacher=None, lesson=next_words)
        .predict(held[:8])[1]
        .detach()
        .flatten(0, 1)
    )
    slopes = gradients(student_logits[:8], said[:8], draws)
    students: dict[str, list[float]] = {name: [] for name in lessons()}
    for seed, (name, lesson) in itertools.product(range(seeds), lessons().items()):
        students[name].append(
            loss(
                trained(
                    STUDENT, windows=windows, steps=steps, seed=seed, teacher=teacher, lesson=lesson
                )
            )
        )
        print(f"seed {seed}, {name}: {students[name][-1]:.4f}", file=sys.stderr)  # noqa: T201
    return LogitsReport(
        machine=facts,
        layouts=tables,
        gradients=slopes,
        students=students,
        teacher_loss=loss(teacher),
        decoding=shares,
    )


def main(argv: list[str]) -> int:
    """Measure, print a table, and write the report where that is asked."""
    parser = argparse.ArgumentParser(prog="logits", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file for the report as JSON")
    parser.add_argument("--seeds", type=int, default=5, help="students of each kind")
    parser.add_argument("--steps", type=int, default=250, help="steps of a student")
    parser.add_argument(
        "--draws", type=int, default=10_000, help="draws of which the mean gradient is taken"
    )
    arguments = parser.parse_args(argv)
    report = measure(arguments.seeds, arguments.steps, arguments.draws)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())  # noqa: T201
    if arguments.out is not None:
        publish_json(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
