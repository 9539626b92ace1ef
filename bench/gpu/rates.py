"""What the GPU's checks have in common: what they get, how they fail, and training runs through the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuelrail.__main__ import main as fuelrail_main
from fuelrail.bench.studies.train.report import load_report

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fuelrail.bench.studies.train.report import Report


class Bench(NamedTuple):
    """What a check gets: the torch device, a dataset, and a folder to write to."""

    device: torch.device
    dataset: Path
    work: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.type == "cuda"


class CheckFailed(Exception):  # noqa: N818 - a finding, not an error of the program
    """What was checked does not hold; the text says what was found."""


def train(dataset: Path, out: Path, *, steps: tuple[int, int], **options: object) -> Report:
    """The report of ``fuelrail bench train`` on a dataset; raises CheckFailed where it does not end well.

    ``steps``: how many, and how many of them are warm-up. ``options`` are the command's, such as ``batch_size``.
    """
    arguments = ["bench", "train", str(dataset), "--out", str(out), "--no-html"]
    for name, value in {"steps": steps[0], "warmup": steps[1], **options}.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    code = fuelrail_main(arguments)
    if code != 0:
        log = out / "records" / "ranks.log"
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
        raise CheckFailed(f"`fuelrail {' '.join(arguments)}` ended with exit code {code}; {tail}")
    return load_report(out / "report.json")
