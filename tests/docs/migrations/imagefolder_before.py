import torch
from model import Model
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
dataset = ImageFolder("images/train", PILToTensor())
loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
for _ in range(2):
    for images, labels in loader:
        loss = model(images, labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
