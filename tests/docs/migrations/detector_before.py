import torch
from model import Model
from torchvision.datasets import Kitti
from torchvision.transforms import PILToTensor

CLASSES = ["Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc"]


def collate(samples):
    images, targets = zip(*samples, strict=True)
    known_boxes = [[box for box in target if box["type"] in CLASSES] for target in targets]
    return torch.stack(images), [
        [(CLASSES.index(box["type"]), *box["bbox"]) for box in boxes] for boxes in known_boxes
    ]


model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
dataset = Kitti("root", transform=PILToTensor())
loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=collate)
for _ in range(2):
    for images, labels in loader:
        loss = model(images, labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
