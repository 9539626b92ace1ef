import torch
from model import Model

import fuelrail as fr

model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
transforms = fr.Transforms(image=fr.ImageAugment(height=32, width=48), select=["boxes2d_image_2"])
loader = fr.DataLoader("dataset", batch_size=2, shuffle=True, drop_last=True, transforms=transforms)
for _ in range(2):
    for batch in loader:
        images = batch["img"][:, 0]
        boxes = batch["boxes2d_image_2"]
        rows = zip(boxes["label"], boxes["box"], strict=True)
        labels = [
            [(int(label), *box.tolist()) for label, box in zip(*row, strict=True)] for row in rows
        ]
        loss = model(images, labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
