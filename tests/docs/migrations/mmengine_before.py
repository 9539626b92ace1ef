from mmengine.model import BaseModel
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from model import Model
from signs import Signs

DATASETS.register_module(module=Signs, force=True)


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, images, labels, mode="loss"):
        return {"loss": self.model(images, labels)}


train_dataloader = {
    "dataset": {"type": "Signs", "folder": "signs"},
    "batch_size": 2,
    "sampler": {"type": "DefaultSampler", "shuffle": True},
    "num_workers": 0,
    "collate_fn": {"type": "default_collate"},
}
runner = Runner(
    Classifier(),
    "out",
    train_dataloader,
    train_cfg={"by_epoch": True, "max_epochs": 2},
    log_level="ERROR",
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 1e-3}},
)
runner.train()
