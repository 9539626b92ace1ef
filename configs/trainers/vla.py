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

SAMPLES = {
    "transforms": TRANSFORMS,
    "window": fr.FrameWindow(frames=(0, 1, 2, 3), pad="mask"),
}
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
            nn.Conv2d(3, width, patch, stride=patch),
            nn.GELU(),
            nn.Conv2d(width, width, 1),
        )
        self.places = nn.Sequential(
            nn.Linear(16, width),
            nn.GELU(),
            nn.Linear(width, width),
        )
        self.words = nn.Embedding(VOCABULARY, width)
        self.future = nn.Embedding(frames, width)
        blocks = [
            nn.TransformerEncoderLayer(
                width,
                nhead=4,
                dim_feedforward=4 * width,
                dropout=dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.waypoint = nn.Linear(width, 2)
        self.next_word = nn.Linear(width, VOCABULARY)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the losses by name; in evaluation mode the trajectory [B, frames, 2] in metres."""
        images = batch["img"]
        cam2ego = batch["cam2ego"]
        if "frame_valid" in batch:  # with a window: the first frame is now
            images = images[:, 0]
            cam2ego = cam2ego[:, 0]
        # Images are [B, N, 3, H, W].
        pixels = images.flatten(0, 1).float() / 127.5 - 1
        patches = self.vision(pixels).flatten(2).transpose(1, 2)  # [B * N, P, C]
        cameras = cam2ego.flatten(0, 1).flatten(1).nan_to_num()
        patches = patches + self.places(cameras)[:, None]
        patches = patches.reshape(len(images), -1, patches.shape[-1])  # [B, N * P, C]
        tokens, is_real = make_prompt(batch)
        words = self.words(tokens[:, :-1])
        waypoints = self.future.weight.expand(len(images), -1, -1)
        hidden = torch.cat((patches, words, waypoints), dim=1)
        num_patches = patches.shape[1]
        words_end = num_patches + words.shape[1]
        mask = make_mask(hidden.shape[1], num_patches, images.device)
        is_padding = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=images.device)
        # Each prompt without its last word, also where others are longer: what is said must not
        # depend on the batch.
        is_padding[:, num_patches:words_end] = ~is_real[:, 1:]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, src_key_padding_mask=is_padding)
        hidden = self.norm(hidden)
        trajectory = self.waypoint(hidden[:, words_end:]).float() * METRES
        if not self.training:
            return {"trajectory": trajectory}
        logits = self.next_word(hidden[:, num_patches:words_end]).float()
        word_losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        losses = {"words": average_losses(word_losses, is_real[:, 1:])}
        if "frame_valid" in batch:
            exists, positions = read_future(batch)
            distances = (trajectory - positions).abs().sum(-1) / METRES
            losses["trajectory"] = average_losses(distances, exists)
        return losses


def average_losses(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over samples of the mean of each one's losses in the mask, both [B, T]."""
    sums = (losses * mask).sum(1)
    counts = mask.sum(1).clamp(min=1)
    return (sums / counts).mean()


def make_mask(length: int, num_patches: int, device: torch.device) -> Tensor:
    """Return what must not be seen, True in [T, T]: words and waypoints that come later.

    All see the images.
    """
    is_later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    is_later[:, :num_patches] = False
    return is_later


def make_prompt(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the prompt int64 [B, T], and which of its tokens are real, bool [B, T].

    It is the first tokens of the channel `tokens`; without it the bytes of the clip's name, and a
    word for each object.
    """
    if "tokens" in batch:
        tokens = batch["tokens"][:, :17].long() % VOCABULARY
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    device = batch["img"].device
    no_objects = torch.empty(0, dtype=torch.long, device=device)
    labels = batch.get("gt_labels_3d") or [no_objects] * len(batch["clip_id"])
    prompts = []
    for clip_id, objects in zip(batch["clip_id"], labels, strict=True):
        letters = clip_id.encode()[-8:].rjust(8)
        name = torch.tensor(list(letters), device=device)
        words = (objects + 1) % VOCABULARY
        prompts.append(torch.cat((name, words)))
    real = [torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts]
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    return tokens, nn.utils.rnn.pad_sequence(real, batch_first=True)


def read_future(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return whether the clip has each later frame, [B, T - 1], and where the vehicle is then, in
    metres [B, T - 1, 2].
    """
    exists = batch["frame_valid"][:, 1:].float()
    positions = batch["ego2key"][:, 1:, :2, 3]
    return exists, positions


def score(outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mean distance of each sample's waypoints in metres, [B]; 0 at the end of a
    clip.
    """
    exists, positions = read_future(batch)
    distances = (outputs["trajectory"] - positions).norm(dim=-1)
    sums = (distances * exists).sum(1)
    return {"distance_m": sums / exists.sum(1).clamp(min=1)}


def divide(model: Callable[[], Vla] = Vla, **options: Any) -> Parallel:
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
    strategy = "fsdp2"
    if words[0].startswith("--strategy="):
        strategy = words.pop(0).removeprefix("--strategy=")
    column = ""
    if words[0].startswith("--balance="):
        column = words.pop(0).removeprefix("--balance=")
    balance = fr.Balance(cost=column) if column else None
    order = fr.OrderSpec(seed=7, balance=balance)
    options = arguments(words)
    is_first = os.environ.get("RANK", "0") == "0"

    def report_step(record: StepRecord, losses: dict[str, float]) -> None:
        if is_first:
            text = " ".join(f"{name} {value:.6f}" for name, value in losses.items())
            print(f"step {record.step} {text}")  # noqa: T201
        if on_step is not None:
            on_step(record, losses)

    parallel = divide(strategy=strategy)
    loading: dict[str, Any] = {**SAMPLES, "device": parallel.device, "world": parallel.mesh}
    with (
        fr.DataLoader(
            options.dataset,
            batch_size=2,
            order=order,
            drop_last=True,
            seed=7,
            **loading,
        ) as train_loader,
        fr.DataLoader(options.dataset, batch_size=2, **loading) as test_loader,
        bench.Checkpoints(options.checkpoint / "vla") as checkpoints,
    ):
        bench.train(
            parallel,
            train_loader,
            steps=options.steps,
            save_every=options.every,
            average=0.99,
            checkpoints=checkpoints,
            on_step=report_step,
        )
        scores = bench.evaluate(parallel, test_loader, score)
        if is_first:
            count = len(scores["sample_key"])
            distance_m = float(scores["distance_m"].mean())
            print(f"distance {distance_m:.6f} m over {count} samples")  # noqa: T201


if __name__ == "__main__":
    main()
