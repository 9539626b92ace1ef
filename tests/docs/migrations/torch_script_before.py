import torch
from model import Model
from signs import Signs

model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
loader = torch.utils.data.DataLoader(Signs("signs"), batch_size=2, shuffle=True)
for _ in range(2):
    for images, labels in loader:
        loss = model(images, labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
