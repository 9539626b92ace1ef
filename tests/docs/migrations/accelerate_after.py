import torch
from accelerate import Accelerator
from model import Model

import fuelrail as fr

accelerator = Accelerator(cpu=True)
model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
transforms = fr.Transforms(image=fr.ImageAugment(height=32, width=48), select=["sign"])
loader = fr.DataLoader("dataset", batch_size=2, shuffle=True, drop_last=True, transforms=transforms)
model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
for _ in range(2):
    for batch in loader:
        images = batch["img"][:, 0]
        labels = batch["sign"]
        loss = model(images, labels)
        accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
