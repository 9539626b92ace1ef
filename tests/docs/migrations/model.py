"""The model of the scripts. It notes what it is given: by the grey level of each picture its label."""

import torch


class Model(torch.nn.Module):
    records: list = []  # noqa: RUF012 - of all models

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, images, labels):
        levels = images.float().flatten(1).mean(1)
        plain = labels.tolist() if isinstance(labels, torch.Tensor) else list(labels)
        self.records += [
            (round(level / 10), label) for level, label in zip(levels.tolist(), plain, strict=True)
        ]
        return (self.weight * levels).mean()
