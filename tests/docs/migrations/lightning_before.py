import lightning.pytorch as pl
import torch
from model import Model
from signs import Signs


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Signs("signs"), batch_size=2, shuffle=True)

    def training_step(self, batch):
        images, labels = batch
        return self.model(images, labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


trainer = pl.Trainer(
    max_epochs=4, limit_train_batches=2, logger=False, enable_checkpointing=False, accelerator="cpu"
)
trainer.fit(Classifier())
