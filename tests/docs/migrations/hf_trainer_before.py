import torch
from model import Model
from signs import Signs
from transformers import Trainer, TrainingArguments


class SignTrainer(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(inputs["images"], inputs["labels"])


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=8,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = SignTrainer(Model(), arguments, train_dataset=Signs("signs"), data_collator=collate)
trainer.train()
