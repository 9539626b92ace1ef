"""A dataset as many write one: images and a table of labels. The scripts beside it begin with it."""

import csv
from pathlib import Path

import cv2
import torch


class Signs(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = Path(folder)
        with (self.folder / "labels.csv").open() as file:
            self.rows = list(csv.DictReader(file))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        image = cv2.cvtColor(cv2.imread(str(self.folder / row["path"])), cv2.COLOR_BGR2RGB)
        return torch.from_numpy(image).permute(2, 0, 1), int(row["sign"])
