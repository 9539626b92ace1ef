"""The witness in others' trainers: it sees what they train on, over a resume too, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fuelrail.loaders.integrations.witness import (
    watch_accelerate,
    watch_lightning,
    watch_transformers,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # other people's warnings are theirs
]
ROWS = 40


class Rows(Dataset):
    """Rows of four numbers, each with its number and a target."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, object]:
        return {
            "index": row,
            "x": torch.full((4,), float(row)),
            "labels": torch.tensor(1.0),
        }


def test_lightning_resumes_with_its_witness(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.losses: list[float] = []

        def training_step(self, batch, _):
            loss = (self.layer(batch["x"]) - batch["labels"][:, None]).abs().mean()
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def fit(callbacks: list, epochs: int, checkpoint: Path | None = None) -> list[float]:
        lightning.seed_everything(3)
        model = Model()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            default_root_dir=tmp_path,
        )
        loader = DataLoader(Rows(), batch_size=8, shuffle=True)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return model.losses

    watching = watch_lightning(expected=ROWS)
    assert fit([watching], 2) == fit([], 2)
    assert [report.faults for report in watching.witness.reports] == [[], []]
    assert [report.rows for report in watching.witness.reports] == [ROWS, ROWS]
    fit([watch_lightning(expected=ROWS)], 2)
    resumed = watch_lightning(expected=ROWS)
    fit([resumed], 3, tmp_path / "last.ckpt")
    assert [(report.epoch, report.faults) for report in resumed.witness.reports] == [(2, [])]


def test_transformers_resumes_with_its_witness(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, labels, index):
            return {"loss": (self.layer(x) - labels[:, None]).abs().mean() + 0 * index.sum()}

    def train(callbacks: list, **changes: object) -> list[float]:
        torch.manual_seed(3)
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            num_train_epochs=2,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            Model(), arguments, train_dataset=Rows(), callbacks=callbacks
        )
        trainer.train(**changes)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    watching = watch_transformers(expected=ROWS)
    assert train([watching]) == train([])
    assert [report.faults for report in watching.witness.reports] == [[], []]
    resumed = watch_transformers(expected=ROWS)
    train([resumed], resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert [(report.rows, report.faults) for report in resumed.witness.reports] == [
        (ROWS, []),
        (ROWS, []),
    ]


def test_accelerate_resumes_with_its_witness(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def prepare() -> tuple:
        accelerate.utils.set_seed(3)
        seeded = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seeded)
        loader = accelerator.prepare(DataLoader(Rows(), batch_size=8, shuffle=True))
        return accelerator, loader, watch_accelerate(accelerator, loader)

    accelerator, loader, watched = prepare()
    batches = []
    for place, batch in enumerate(watched):
        batches.append(batch["index"].tolist())
        if place == 2:
            accelerator.save_state(tmp_path / "state")
    assert watched.reports[0].faults == []
    for skipped, kinds in ((3, []), (2, ["repeated"]), (4, ["missing"])):
        accelerator, loader, watched = prepare()
        accelerator.load_state(tmp_path / "state")
        watched.loader = accelerator.skip_first_batches(loader, skipped)
        watched._on_fault = "ignore"
        rest = [batch["index"].tolist() for batch in watched]
        (report,) = watched.reports
        assert [fault.kind for fault in report.faults] == kinds
        assert len(rest) == 5 - skipped
