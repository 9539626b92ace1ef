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
        found = batch["boxes2d_image_2"]
        boxes = zip(found["label"], found["box"], strict=True)
        labels = [
            [(int(label), *box.tolist()) for label, box in zip(*one, strict=True)] for one in boxes
        ]
        loss = model(images, labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
