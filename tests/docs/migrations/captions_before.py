import torch
import webdataset as wds
from model import Model

model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
dataset = wds.WebDataset("tars/train.tar", shardshuffle=False).shuffle(100)
dataset = dataset.decode("torchrgb8").to_tuple("jpg", "txt").batched(2)
loader = wds.WebLoader(dataset, batch_size=None)
for _ in range(2):
    for images, captions in loader:
        loss = model(images, captions)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
