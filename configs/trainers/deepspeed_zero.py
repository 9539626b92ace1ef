"""DeepSpeed ZeRO: ``torchrun --nproc-per-node 2 configs/trainers/deepspeed_zero.py DATASET``.

The loader's position travels as ``client_state`` of DeepSpeed's own checkpoints. Needs ``pip
install deepspeed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deepspeed
import torch
from example import TRANSFORMS, Checkpoints, arguments, build_model, inputs, report, targets
from torch.nn.functional import mse_loss

from fuelrail import DataLoader

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, zero_stage: int = 1) -> None:
    """Train on this rank with ZeRO stage 1, 2 or 3."""
    options = arguments(argv)
    model = build_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    checkpoints = Checkpoints(options, f"zero{zero_stage}")
    first = 0
    with DataLoader(
        options.dataset,
        batch_size=2,
        shuffle=True,
        drop_last=True,
        transforms=TRANSFORMS,
        seed=7,
        device=engine.device,
    ) as loader:
        if folder := checkpoints.newest():
            _, client_state = engine.load_checkpoint(str(folder))
            loader.load_state_dict(client_state["loader"])
            first = client_state["step"]
        for step, batch in checkpoints.batches(loader, first):
            loss = mse_loss(engine(inputs(batch)), targets(batch))
            engine.backward(loss)
            engine.step()
            report(step, loss.item(), batch)
            if checkpoints.due(step + 1):
                with checkpoints.saving(step + 1) as folder:
                    engine.save_checkpoint(
                        str(folder), client_state={"loader": loader.state_dict(), "step": step + 1}
                    )


if __name__ == "__main__":
    main()
