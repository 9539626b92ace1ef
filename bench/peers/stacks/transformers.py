"""The Trainer of Hugging Face transformers, whose loop is its own."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fuelrail.bench.peers.stacks.rows import Rows
from fuelrail.bench.peers.stacks.stack import EPOCHS, Job, NotRun, Stack


class TransformersModel(torch.nn.Module):
    """A layer that tells which rows it is trained on."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.job = job
        self.epoch = 0

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.job.see(self.epoch, index.tolist())
        outputs = self.layer(x)
        loss = outputs.square().mean()
        return {"loss": loss, "logits": loss.reshape(1)}


class TransformersSave(transformers.TrainerCallback):  # type: ignore[misc]
    """Has checkpoints saved, and the rank killed after them."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self.job = model.job

    def on_epoch_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        epoch = state.epoch or 0
        self.model.epoch = int(epoch + 1e-3)

    def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        control.should_save = self.job.is_saving and not self.job.is_border

    def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
        control.should_save = self.job.is_saving and self.job.is_border

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        job = self.job
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        if job.is_border:
            job.save(self.model.epoch + 1, 0, path)
        else:
            job.save(self.model.epoch, job.step, path)


class TransformersStack(Stack):
    """`resume_from_checkpoint`."""

    packages = ("transformers", "accelerate", "torch")
    way = "Trainer.train(resume_from_checkpoint=...)"

    def train(self) -> None:
        job = self.job
        setup = self.setup
        if job.leaves_loop:
            raise NotRun("the loop is the Trainer's")
        model = TransformersModel(job)
        arguments = transformers.TrainingArguments(
            output_dir=str(job.folder / "trainer"),
            per_device_train_batch_size=setup.batch,
            num_train_epochs=EPOCHS,
            dataloader_num_workers=setup.workers,
            dataloader_drop_last=setup.drop_last,
            eval_strategy="steps" if setup.evaluation else "no",
            eval_steps=setup.evaluation or None,
            save_strategy="no",
            seed=3,
            use_cpu=True,
            report_to=[],
            remove_unused_columns=False,
        )
        rows = Rows(range(setup.rows))
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=rows,
            callbacks=[TransformersSave(model)],
        )
        checkpoint = job.states[0] if job.states else None
        trainer.train(resume_from_checkpoint=checkpoint)
