import torch
from accelerate import Accelerator
from model import Model
from signs import Signs

accelerator = Accelerator(cpu=True)
model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
loader = torch.utils.data.DataLoader(Signs("signs"), batch_size=2, shuffle=True)
model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
for _ in range(2):
    for images, labels in loader:
        loss = model(images, labels)
        accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
