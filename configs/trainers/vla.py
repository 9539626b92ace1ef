"""A small vision-language-action model: ``torchrun --nproc-per-node 2 configs/trainers/vla.py
DATASET``.

Patches of all cameras and the tokens of a prompt go through one transformer; it predicts the next
token, and where the vehicle is in the next frames of the clip, in its own frame. What trains it is
Fuelrail's own: `parallelise` divides it, `Checkpoints` save it with the loader's position, `train`
is the loop, `evaluate` gives errors over another split. A run that is killed continues, with
another ``--strategy`` and on another number of ranks too.

The prompt says what is around: a word for each object, so samples differ in length.
``--balance=num_boxes`` deals the samples of each global batch to the ranks so that all have about
as many words. Each sample counts the same in the loss, whatever its length, so that balance does
not change it.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from example import TRANSFORMS, arguments
from torch import Tensor, nn

import fuelrail as fr
from fuelrail import bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fuelrail.bench.measure.records import StepRecord
    from fuelrail.bench.trainer.strategies.step import Parallel

SAMPLES = {"transforms": TRANSFORMS, "window": fr.FrameWindow(frames=(0, 1, 2, 3), pad="mask")}
VOCABULARY = 256
METRES = 10.0


class Vla(nn.Module):
    """Images, a prompt and the future of a batch to the losses of trajectory and words; in
    evaluation, a trajectory.
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 4,
        patch: int = 16,
        frames: int = 3,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, width, patch, patch), nn.GELU(), nn.Conv2d(width, width, 1)
        )
        self.places = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width))
        self.words = nn.Embedding(VOCABULARY, width)
        self.future = nn.Embedding(frames, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.waypoint = nn.Linear(width, 2)
        self.next_word = nn.Linear(width, VOCABULARY)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the losses by name; in evaluation mode the trajectory [B, frames, 2] in metres."""
        images = batch["img"]
        cam2ego = batch["cam2ego"]
        if "frame_valid" in batch:  # with a window: what is known now
            # [B, N, 3, H, W]
            images = images[:, 0]
            cam2ego = cam2ego[:, 0]
        seen = (
            self.vision(images.flatten(0, 1).float() / 127.5 - 1).flatten(2).transpose(1, 2)
        )  # [B*N, P, C]
        seen = seen + self.places(cam2ego.flatten(0, 1).flatten(1).nan_to_num())[:, None]
        seen = seen.reshape(len(images), -1, seen.shape[-1])
        tokens, real = prompt_of(batch)
        asked = self.future.weight.expand(len(images), -1, -1)
        hidden = torch.cat((seen, self.words(tokens[:, :-1]), asked), dim=1)
        count = hidden.shape[1]
        words = tokens.shape[1] - 1
        mask = mask_of(count, seen.shape[1], images.device)
        hides = torch.zeros(len(images), count, dtype=torch.bool, device=images.device)
        # Each prompt without its last word, also where others are longer: what is said must not
        # depend on the batch.
        hides[:, seen.shape[1] : seen.shape[1] + words] = ~real[:, 1:]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, src_key_padding_mask=hides)
        hidden = self.norm(hidden)
        trajectory = self.waypoint(hidden[:, -asked.shape[1] :]).float() * METRES
        if not self.training:
            return {"trajectory": trajectory}
        logits = self.next_word(hidden[:, seen.shape[1] : seen.shape[1] + words]).float()
        losses = {
            "words": mean_of(
                F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none"), real[:, 1:]
            )
        }
        if "frame_valid" in batch:
            there, wanted = future_of(batch)
            losses["trajectory"] = mean_of((trajectory - wanted).abs().sum(-1) / METRES, there)
        return losses


def mean_of(losses: Tensor, real: Tensor) -> Tensor:
    """The mean over samples of the mean of each one's real losses, both [B, T]."""
    return ((losses * real).sum(1) / real.sum(1).clamp(min=1)).mean()


def mask_of(count: int, images: int, device: torch.device) -> Tensor:
    """What must not be seen, True in [T, T]: words and waypoints that come later.

    All see the images.
    """
    later = torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
    later[:, :images] = False
    return later


def prompt_of(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The prompt int64 [B, T], and which of its tokens are real, bool [B, T].

    It is the first tokens of the channel `tokens`; without it the bytes of the clip's name, and a
    word for each object.
    """
    if "tokens" in batch:
        tokens = batch["tokens"][:, :17].long() % VOCABULARY
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    device = batch["img"].device
    names = [
        torch.tensor(list(clip.encode()[-8:].rjust(8)), device=device) for clip in batch["clip_id"]
    ]
    objects = batch.get("gt_labels_3d") or [torch.empty(0, dtype=torch.long, device=device)] * len(
        names
    )
    prompts = [
        torch.cat((name, (labels + 1) % VOCABULARY))
        for name, labels in zip(names, objects, strict=True)
    ]
    real = nn.utils.rnn.pad_sequence(
        [torch.ones_like(one, dtype=torch.bool) for one in prompts], batch_first=True
    )
    return nn.utils.rnn.pad_sequence(prompts, batch_first=True), real


def future_of(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Whether the clip has each later frame, [B, T - 1], and where the vehicle is then, in
    metres [B, T - 1, 2].
    """
    return batch["frame_valid"][:, 1:].float(), batch["ego2key"][:, 1:, :2, 3]


def score(outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The mean distance of each sample's waypoints in metres, [B]; 0 at the end of a clip."""
    there, wanted = future_of(batch)
    distance = (outputs["trajectory"] - wanted).norm(dim=-1)
    return {"distance_m": (distance * there).sum(1) / there.sum(1).clamp(min=1)}


def divided(model: Callable[[], Vla] = Vla, **options: Any) -> Parallel:
    """Divide the model over the ranks, with its optimiser and schedule."""
    return bench.parallelise(
        model,
        wrap=[nn.TransformerEncoderLayer],
        optimiser=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05),
        schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000),
        clip_norm=1.0,
        **options,
    )


def main(
    argv: Sequence[str] | None = None,
    on_step: Callable[[StepRecord, dict[str, float]], object] | None = None,
) -> None:
    """Train from the newest checkpoint; print each step's losses and, at the end, the error over
    all samples.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    strategy = words.pop(0).partition("=")[2] if words[0].startswith("--strategy=") else "fsdp2"
    column = words.pop(0).partition("=")[2] if words[0].startswith("--balance=") else None
    order = fr.OrderSpec(seed=7, balance=fr.Balance(cost=column) if column else None)
    options = arguments(words)

    is_first = os.environ.get("RANK", "0") == "0"

    def note(record: StepRecord, losses: dict[str, float]) -> None:
        if is_first:
            print(  # noqa: T201
                f"step {record.step} "
                + " ".join(f"{name} {value:.6f}" for name, value in losses.items())
            )
        if on_step is not None:
            on_step(record, losses)

    parallel = divided(strategy=strategy)
    same = {**SAMPLES, "device": parallel.device, "world": parallel.mesh}
    with (
        fr.DataLoader(
            options.dataset, batch_size=2, order=order, drop_last=True, seed=7, **same
        ) as loader,
        fr.DataLoader(options.dataset, batch_size=2, **same) as everything,
        bench.Checkpoints(options.checkpoint / "vla") as checkpoints,
    ):
        bench.train(
            parallel,
            loader,
            steps=options.steps,
            save_every=options.every,
            average=0.99,
            checkpoints=checkpoints,
            on_step=note,
        )
        scores = bench.evaluate(parallel, everything, score)
        if is_first:
            count = len(scores["sample_key"])
            distance_m = float(scores["distance_m"].mean())
            print(f"distance {distance_m:.6f} m over {count} samples")  # noqa: T201


if __name__ == "__main__":
    main()
