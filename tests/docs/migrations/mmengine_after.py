from mmengine.model import BaseModel
from mmengine.runner import Runner
from model import Model

import fuelrail.loaders.integrations.mmengine  # noqa: F401 - registers what the config names


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, img, sign, mode="loss", **rest):
        return {"loss": self.model(img[:, 0], sign)}


train_dataloader = {
    "dataset": {
        "type": "FuelrailDataset",
        "dataset": "dataset",
        "batch_size": 2,
        "shuffle": True,
        "drop_last": True,
        "transforms": {"image": {"height": 32, "width": 48}, "select": ["sign"]},
    },
    "batch_size": None,
    "sampler": None,
    "num_workers": 0,
    "collate_fn": {"type": "fuelrail_batch"},
}
runner = Runner(
    Classifier(),
    "out",
    train_dataloader,
    train_cfg={"by_epoch": True, "max_epochs": 2},
    log_level="ERROR",
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
    default_hooks={"sampler_seed": None},
)
runner.train()
