"""Functions that a user could give to a loader; worker processes import them from here."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch

from fuelrail.pipeline.errors import SchemaError


class OddError(Exception):
    """An error that does not survive pickling: its arguments are not those that it was made of."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def everything(sample: dict[str, Any]) -> dict[str, Any]:
    """Change each kind of entry: images in place, tensors of other shapes and dtypes, texts, arrays, numbers."""
    images = sample["img"].values() if isinstance(sample["img"], dict) else [sample["img"]]
    for image in images:
        image += torch.randint(
            0,
            9,
            image.shape,
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(5),
        )
    return {
        **sample,
        "turned": sample["intrinsics"].transpose(-1, -2),
        "none": torch.empty(0, 3, dtype=torch.bfloat16),
        "half": sample["ego2img"].to(torch.bfloat16),
        "array": np.arange(len(sample["gt_boxes_3d"])),
        "text": sample["sample_key"].upper(),
        "number": sample["seed"] % 7,
    }


def replaced(sample: dict[str, Any]) -> dict[str, Any]:
    """Return images of another size, and no other entry."""
    return {"img": sample["img"][..., ::2], "process": os.getpid()}


def failing(sample: dict[str, Any]) -> dict[str, Any]:
    """Fail as the dataset's first sample says that it should; nothing else happens to the others."""
    if sample["frame"] == 1:
        raise ValueError(f"no {sample['sample_key']}")
    if sample["frame"] == 2:
        raise SchemaError("bad", key="k", member="m")
    if sample["frame"] == 3:
        raise OddError(1, 2)
    if sample["frame"] == 0:
        return {"img": sample["img"], "function": lambda: None}
    return sample


class KilledOnce:
    """Kill the process that works on the first sample, unless a file is there."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if not os.path.exists(self.flag):  # noqa: PTH110
            with open(self.flag, "w"):  # noqa: PTH123
                os.kill(os.getpid(), signal.SIGKILL)
        return sample


def waiting(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(60)
    return sample
