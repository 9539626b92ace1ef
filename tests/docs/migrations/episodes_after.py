import torch
from model import Model

import fuelrail as fr

model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
transforms = fr.Transforms(image=fr.ImageAugment(height=32, width=48), select=["action"])
window = {"frames": [0, 1, 2], "pad": "repeat_edge"}
loader = fr.DataLoader(
    "dataset", batch_size=2, shuffle=True, drop_last=True, transforms=transforms, window=window
)
for _ in range(2):
    for batch in loader:
        images = batch["img"][:, 0, 0]
        actions = batch["action"]
        loss = model(images, actions)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
