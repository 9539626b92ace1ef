"""What the GPU checks share: their input, their error, and training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fuelrail.bench.studies.train import run as train_run
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from fuelrail.bench.studies.train.report import Report


class Bench(NamedTuple):
    """Input of a check: the torch device, a dataset, and a folder to write to."""

    device: torch.device
    dataset: Path
    work: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.type == "cuda"


class CheckFailed(Exception):  # noqa: N818 - a finding, not an error of the program
    """A failed check; the text says what was found."""


def train(dataset: Path, out: Path, **options: Any) -> Report:  # noqa: ANN401 - fields of TrainOptions
    """Return the report of `fuelrail.train` on a dataset; raises CheckFailed where the run does not complete.

    ``options`` are the fields of its options, such as ``batch_size``.
    """
    try:
        report = train_run.train(dataset, out=out, html=False, **options)
        why = report.cut_off
    except FuelrailError as error:
        why = str(error)
    if why is not None:
        log = out / "records" / "ranks.log"
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else ""
        raise CheckFailed(f"training on '{dataset}' did not complete: {why}; {tail}")
    return report
