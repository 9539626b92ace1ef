"""Measures how training scales on this host, and what the simulation needs to know."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE
from fuelrail.bench.measure.machine import usable_cpus
from fuelrail.bench.measure.rates import bootstrap_means
from fuelrail.bench.planner.scale_model import Fit, Overhead
from fuelrail.bench.studies.loader.run import run_loader
from fuelrail.bench.studies.loader.stages import LoaderChoice
from fuelrail.bench.studies.scale.report import FITTED_RANKS, Measured, Scaling
from fuelrail.bench.studies.train import command as train_command
from fuelrail.bench.studies.train.run import Made, TrainRun, measure_all
from fuelrail.loaders import Transforms
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from fuelrail.bench.measure.accelerator import AcceleratorProfile
    from fuelrail.bench.studies.train.report import Report


class ScalePlan:
    """The runs of one measurement, checked; ``arguments`` are those of ``fuelrail bench scale``.

    Every number of ranks runs its points one after another on the same processes: the fixed batch a rank (weak
    scaling), and its part of the largest number's global batch (strong scaling), which for the largest is the same run.
    Raises ConfigError and DatasetErrors.
    """

    def __init__(self, arguments: argparse.Namespace, ranks: Sequence[int], records: Path) -> None:
        self.ranks, self.batch_size = ranks, arguments.batch_size
        self.global_batch = ranks[-1] * arguments.batch_size
        uneven = [count for count in ranks if self.global_batch % count]
        if uneven:
            raise ConfigError(
                f"--ranks {','.join(map(str, ranks))}: strong scaling shares {self.global_batch} samples among them, "
                f"which {uneven[0]} ranks cannot do evenly; use powers of two"
            )
        self._arguments = arguments
        self.runs = {count: self._runs(count, records) for count in ranks}
        profile = self.runs[ranks[0]][0].settings.profile
        if profile is None:
            raise ConfigError("bench scale runs on emulated accelerators: use --accelerator emulated:PROFILE")
        self.profile: AcceleratorProfile = profile

    def _runs(self, count: int, records: Path) -> list[TrainRun]:
        sizes = sorted({self.batch_size, self.global_batch // count})
        return [TrainRun(self._train(count, size), records / f"ranks-{count}-batch-{size}") for size in sizes]

    def _train(self, count: int, batch_size: int) -> argparse.Namespace:
        """The arguments of ``fuelrail bench train`` for one run."""
        given = self._arguments
        parser = argparse.ArgumentParser()
        train_command.configure_run(parser)
        accelerator = f"emulated:{DEFAULT_PROFILE}" if given.accelerator == "auto" else given.accelerator
        values = {
            "ranks": count, "batch-size": batch_size, "steps": given.steps, "warmup": given.warmup,
            "accelerator": accelerator, "split": given.split, "decoder": given.decoder, "seed": given.seed,
        }  # fmt: skip
        words = [str(given.dataset), *(f"--{name}={value}" for name, value in values.items())]
        return parser.parse_args(words if given.workers is None else [*words, f"--workers={given.workers}"])

    def measure(self, count: int) -> Made:
        """Run all points of a number of ranks."""
        return measure_all(self.runs[count])

    def point(self, report: Report) -> Measured | None:
        """A report as a point; None where its window was too short for figures."""
        if report.figures is None:
            return None
        count, size = report.num_ranks, report.options["batch_size"]
        scalings: list[Scaling] = []
        if size == self.batch_size:
            scalings.append("weak")
        if size * count == self.global_batch:
            scalings.append("strong")
        low, high = np.quantile(bootstrap_means(_column(report, "wall").mean(axis=0), 0), (0.025, 0.975))
        return Measured(
            num_ranks=count,
            batch_size=size,
            scalings=scalings,
            step_ms=report.figures.step_time.mean_ms,
            step_low_ms=float(low),
            step_high_ms=float(high),
            step_p99_ms=report.figures.step_time.p99_ms,
            samples_per_s=report.figures.throughput.samples_per_s,
            occupancy=report.figures.occupancy.mean,
            efficiency={},
        )

    def fit(self, reports: Sequence[Report], loader_seconds: float) -> Fit:
        """Measure the loader alone and put together what the simulation draws from.

        Only runs of up to ``FITTED_RANKS`` ranks are looked at: the others are there to try the model.
        """
        dataset, settings = open_dataset(self._arguments.dataset), self.runs[self.ranks[0]][0].settings
        choice = LoaderChoice(
            split=settings.split,
            batch_size=self.batch_size,
            num_workers=settings.num_workers or max(1, int(usable_cpus())),
            decoder=settings.decoder,
            verify=True,
            points=False,
            seed=settings.seed,
        )
        run = run_loader(dataset, Transforms().image, choice, loader_seconds)
        num_cameras = len(dataset.manifest.cameras)
        per_sample = 1 if self.profile.per == "sample" else num_cameras
        seen = [report for report in reports if report.num_ranks <= FITTED_RANKS and report.figures is not None]
        small = [report for report in seen if report.options["batch_size"] == self.batch_size]
        two = [report for report in small if report.num_ranks > 1]
        sizes = dataset.index.column("length")
        return Fit(
            service_ms=[1e3 * value for value in run.batch_s[run.num_warm_up_batches :]],
            service_batch=self.batch_size,
            forward_backward_ms=per_sample * (self.profile.forward_ms + self.profile.backward_ms),
            optimiser_ms=self.profile.optimiser_ms,
            overheads=[
                Overhead(ranks_on_host=report.num_ranks, ms=self._overhead_ms(report, num_cameras)) for report in small
            ],
            all_reduce_ms=float(np.mean([_communication_ms(report) for report in two])) if two else 0.0,
            trainer_cpus=min((report.figures.stand_in_share for report in small if report.figures), default=0.0),
            host_cpus=usable_cpus(),
            queue_batches=settings.prefetch_factor + 1,
            sample_bytes=float(np.mean(sizes)),
        )

    def _overhead_ms(self, report: Report, num_cameras: int) -> list[float]:
        """What is left of each step after data wait, device time and exposed all-reduce; all ranks."""
        device_ms = self.profile.step_ms(self.batch_size, self.batch_size * num_cameras)
        rest = _column(report, "wall") - _column(report, "data_wait") - _column(report, "all_reduce") - device_ms
        values: list[float] = np.maximum(rest, 0.0).ravel().tolist()
        return values


def _communication_ms(report: Report) -> float:
    """Exposed all-reduce of the rank that came last, which waits for nobody; mean over steps."""
    return float(_column(report, "all_reduce").min(axis=0).mean())


def _column(report: Report, name: str) -> NDArray[np.float64]:
    """The measured window of one column [ranks, steps], in ms."""
    first, count = report.window.num_warmup_steps, report.window.num_measured_steps
    columns = [series.wall_ms if name == "wall" else series.phases_ms[name] for series in report.series]
    return np.array([column[first : first + count] for column in columns], dtype=np.float64)
