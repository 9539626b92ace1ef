"""The dataset of map-style stacks. Not in `stack.py`, which the command line reads without torch."""

from __future__ import annotations

from typing import Any

import torch


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows that hold their number."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"index": self.numbers[row], "x": torch.tensor([float(self.numbers[row])])}
