"""The dataset of map-style stacks.

It is not in `stack.py`, which the command line reads without torch.
"""

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
        number = self.numbers[row]
        return {"index": number, "x": torch.tensor([float(number)])}
