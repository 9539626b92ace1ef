from model import Model
from transformers import Trainer, TrainingArguments

import fuelrail as fr


class SignTrainer(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(inputs["img"][:, 0], inputs["sign"])

    def get_train_dataloader(self):
        transforms = fr.Transforms(image=fr.ImageAugment(height=32, width=48), select=["sign"])
        return fr.DataLoader(
            "dataset", batch_size=2, shuffle=True, drop_last=True, transforms=transforms
        )


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=8,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = SignTrainer(Model(), arguments)
trainer.train()
