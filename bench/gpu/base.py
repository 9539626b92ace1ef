"""What the GPU checks share: their input, their error, watching the JPEG engines, loaders, and training runs."""

from __future__ import annotations

import importlib.util
import itertools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from fuelrail.bench.measure.nvml import NvmlWatch
from fuelrail.bench.studies.train import run as train_run
from fuelrail.loaders import DataLoader, Transforms
from fuelrail.pipeline.errors import FuelrailError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fuelrail.bench.studies.train.report import Report

_T = TypeVar("_T")

_CALIBRATION_CYCLES = 50_000_000
_CLOCK_RISES_S = 1.0


class Bench(NamedTuple):
    """Input of a check: the torch device, a dataset with boxes and a lidar, a folder to write to, one to keep."""

    device: torch.device
    dataset: Path
    work: Path
    keep: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA one."""
        return self.device.type == "cuda"

    def pick(self, on_gpu: _T, on_cpu: _T) -> _T:
        """Return one of two values: a measurement's size on a GPU, or that of its twin on the CPU."""
        return on_gpu if self.on_gpu else on_cpu


class CheckFailed(Exception):  # noqa: N818 - a finding, not an error of the program
    """A failed check; the text says what was found."""


def has_dali() -> bool:
    """Return whether NVIDIA DALI can be found."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


def require_dali(decoder: str = "dali") -> None:
    """Raise CheckFailed where a check needs DALI and it is not installed."""
    if decoder == "dali" and not has_dali():
        raise CheckFailed(
            "NVIDIA DALI is not installed, so nothing of the GPU decoder was checked: install fuelrail[dali]"
        )


@contextmanager
def jpeg_engines(bench: Bench, decoder: str, facts: dict[str, Any], name: str = "jpeg_engines_busy") -> Iterator[None]:
    """Measure how busy the JPEG engines are inside; with DALI on a GPU, raise CheckFailed where they are idle.

    The share is NVML's, 0 to 1. Without NVML nobody knows whether DALI decodes by hardware, so that fails too.
    """
    if not bench.on_gpu:
        yield
        return
    with NvmlWatch(1) as watch:
        yield
    use = watch.use()
    share = None if use is None else use[0].jpeg
    facts[name] = share if use is None or share is None else round(share, 4)
    if decoder != "dali":
        return
    if share is None:
        raise CheckFailed(
            f"NVML does not say how busy the JPEG engines are: {watch.reason or 'the card does not know'}"
        )
    if share <= 0.0:
        raise CheckFailed("the JPEG engines were idle: CUDA cores or CPUs decoded; `fuelrail doctor` says why")


def make_loader(bench: Bench, dataset: Path, batch_size: int, decoder: str, **options: Any) -> DataLoader:  # noqa: ANN401
    """Return a loader of a check; its batches go to the device."""
    require_dali(decoder)
    transforms = options.pop("transforms", Transforms())
    return DataLoader(
        dataset, batch_size, seed=7, device=bench.device, transforms=_with_decoder(transforms, decoder), **options
    )


def _with_decoder(transforms: Transforms, decoder: str) -> Transforms:
    fields = {name: getattr(transforms, name) for name in transforms.__struct_fields__}
    return Transforms(**{**fields, "decoder": decoder})


def endless(loader: DataLoader) -> Iterator[Any]:
    """Yield the batches of epoch after epoch."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def percentiles(values: list[float]) -> list[float]:
    """Return median and 99th percentile, rounded to a thousandth."""
    ordered = sorted(values)
    return [round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for share in (0.5, 0.99)]


def keep_busy(cycles: int) -> None:
    """Queue a kernel on the current stream that only counts clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - there is no public way


def raise_clock(device: torch.device) -> None:
    """Keep an idle GPU busy until its clock has risen: it starts at a fraction of what it runs at."""
    ends_s = time.monotonic() + _CLOCK_RISES_S
    while time.monotonic() < ends_s:
        keep_busy(_CALIBRATION_CYCLES)
        torch.cuda.synchronize(device)


def cycles_per_ms(device: torch.device) -> float:
    """Measure the cycles of `keep_busy` in a millisecond, by the host's clock around a long one."""
    torch.cuda.synchronize(device)
    started_s = time.monotonic()
    keep_busy(_CALIBRATION_CYCLES)
    torch.cuda.synchronize(device)
    return _CALIBRATION_CYCLES / (1e3 * (time.monotonic() - started_s))


class Mark:
    """A place in the device's queue with a time: an event on a GPU, the host's clock in the twin."""

    def __init__(self, bench: Bench) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if bench.on_gpu else None  # type: ignore[no-untyped-call]
        self._at_s = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device is here."""
        if self._event is not None:
            self._event.synchronize()

    def ms_to(self, later: Mark) -> float:
        """Return the milliseconds from here to a later mark; both must have been reached."""
        if self._event is None:
            return 1e3 * (later._at_s - self._at_s)
        return float(self._event.elapsed_time(later._event))


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
