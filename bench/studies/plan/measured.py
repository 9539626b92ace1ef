"""What measurements add to a scenario: a dataset, a report of its loader, and reports of training on the cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.measure.machine import dataset_facts
from fuelrail.bench.planner.scenario import Data, Scenario
from fuelrail.bench.planner.step_time import StepWork, fit, limits_of, step_time
from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.studies.loader import report as loader_report
from fuelrail.bench.studies.loader.report import LoaderReport
from fuelrail.bench.studies.train.report import Report, load_report
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.loaders.config import Transforms
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings, ComputeType


def calibrated(asked: Scenario, cluster: ClusterSettings, reports: Sequence[str]) -> tuple[Scenario, list[str]]:
    """Return the scenario with fitted efficiencies, and what they rest on. Raises ConfigError."""
    cases: list[tuple[StepWork, ClusterSettings, ComputeType, float]] = []
    for name in reports:
        path = Path(name)
        cases.append(_case(load_report(path), path, cluster))
    found = fit(cases, asked.efficiency)
    errors = [abs(step_time(work, where, kind, found).total / seconds - 1) for work, where, kind, seconds in cases]
    said = (
        f"efficiency {found.compute:.0%} of the peak and activations moved {found.passes:g} times, fitted to "
        f"{len(cases)} report{'s' if len(cases) != 1 else ''}; off by {max(errors):.0%} at most on them"
    )
    ends = limits_of(found)
    if ends:
        said += f"; {' and '.join(ends)} is the limit of what can be, so the model does not describe these steps"
    return msgspec.structs.replace(asked, efficiency=found), [said]


def _case(report: Report, path: Path, cluster: ClusterSettings) -> tuple[StepWork, ClusterSettings, ComputeType, float]:
    """Return what a run counted, and how long its steps took without waiting for data."""
    name = str(report.model["name"])
    if report.accelerator["kind"] != "cuda":
        raise ConfigError(
            f"--calibrate '{path}': its accelerator was emulated, which says nothing of '{cluster.device.name}'; give "
            "a report of `fuelrail bench train --accelerator cuda` on the cluster"
        )
    if report.figures is None or name not in MODELS:
        raise ConfigError(f"--calibrate '{path}' has no steps of a known model; give one with figures")
    options = report.options
    if report.num_ranks > cluster.num_devices:
        raise ConfigError(
            f"--calibrate '{path}' is of {report.num_ranks} ranks, and cluster '{cluster.name}' has "
            f"{cluster.num_devices} devices; give the report's own cluster"
        )
    settings = ParallelSettings.among(options, str(path))
    image = Transforms().image
    run = Scenario(
        name=path.name, model=report.model["name"], cluster=cluster.name,
        global_batch=report.global_batch,
        micro_batch=options["batch_size"], precision=options["precision"], parallel=settings,
        cameras=max(1, len(report.dataset.cameras)), height=image.height, width=image.width,
    )  # fmt: skip
    inside = msgspec.structs.replace(
        cluster,
        nodes=math.ceil(report.num_ranks / cluster.devices_per_node),
        devices_per_node=min(report.num_ranks, cluster.devices_per_node),
    )
    waits = sum(phase.time.mean_ms for phase in report.figures.phases if phase.phase == "data_wait")
    seconds = (report.figures.step_time.mean_ms - waits) / 1e3
    from fuelrail.bench.planner.choice import fit as shape_and_time  # needs torch, and the checks above do not

    return shape_and_time(run, inside, settings).work, inside, run.precision, seconds


def with_data(asked: Scenario, dataset: str, split: str) -> Scenario:
    """Take from a dataset what the scenario does not say."""
    facts = dataset_facts(open_dataset(dataset), split)
    size = None if facts.mean_sample_bytes is None else max(1, round(facts.mean_sample_bytes))
    return msgspec.structs.replace(
        asked,
        cameras=asked.cameras or (len(facts.cameras) if asked.reads_images else 0) or None,
        sample_bytes=asked.sample_bytes or size,
        samples_per_epoch=asked.samples_per_epoch or facts.num_samples or None,
    )


def with_loader(asked: Scenario, cluster: ClusterSettings, data: Data, path: Path) -> tuple[Scenario, Data, list[str]]:
    """Take what a loader was measured to do; raises ConfigError for a report without figures."""
    report = load_report_of(path, LoaderReport, loader_report.SCHEMA, loader_report.VERSION)
    figures = report.figures
    if figures is None:
        raise ConfigError(f"--loader-report '{path}' has no figures: {report.too_short}; measure for longer")
    asked = msgspec.structs.replace(
        asked,
        cameras=asked.cameras or (len(report.dataset.cameras) if asked.reads_images else 0) or None,
        sample_bytes=asked.sample_bytes or max(1, round(report.dataset.mean_sample_bytes or 0)),
    )
    per_cpu = 1000 / figures.cpu_s_per_1000_images
    where = f"`fuelrail bench loader` of {report.created} on {report.machine.cpu}"
    data = msgspec.structs.replace(
        data,
        images_per_node_s=cluster.host.cpus.value * per_cpu,
        images_source=f"{cluster.host.cpus.value:g} CPUs x {per_cpu:.0f} images/s of CPU time: {where}",
    )
    said = [f"CPUs of the cluster decode as fast as those of the loader's report ({report.machine.cpu})"]
    if figures.bound.kind == "storage":
        rate = figures.stored_mb_per_s / 1e3 * cluster.nodes
        data = msgspec.structs.replace(
            data, storage_gb_per_s=rate, storage_source=f"{figures.stored_mb_per_s:.0f} MB/s of a node: {where}"
        )
        said.append("each node reads as fast as the one of the loader's report, all of them at once")
    else:
        said.append(f"storage is the cluster file's: the measured loader was held up by {figures.bound.kind}")
    return asked, data, said
