import lightning.pytorch as pl
import torch
from model import Model

import fuelrail as fr


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def train_dataloader(self):
        transforms = fr.Transforms(image=fr.ImageAugment(height=32, width=48), select=["sign"])
        return fr.DataLoader(
            "dataset", batch_size=2, shuffle=True, drop_last=True, transforms=transforms
        )

    def training_step(self, batch):
        images = batch["img"][:, 0]
        labels = batch["sign"]
        return self.model(images, labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


trainer = pl.Trainer(
    max_epochs=4, limit_train_batches=2, logger=False, enable_checkpointing=False, accelerator="cpu"
)
trainer.fit(Classifier())
