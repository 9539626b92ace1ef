"""What measurements add to a scenario: a dataset, a report of its loader, and reports of
training on the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.measure.machine import dataset_facts
from fuelrail.bench.planner.hardware import Sourced, load_cluster
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.planner.step_time import (
    NUMBERS,
    Efficiency,
    Fitted,
    efficiency_of,
    fit,
    has_range,
)
from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.studies.loader import report as loader_report
from fuelrail.bench.studies.loader.report import LoaderReport
from fuelrail.bench.studies.train.report import load_report
from fuelrail.bench.trainer.models.settings import MODEL_IMAGE, MODELS
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.cli import counted
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.settings import load_yaml

_LEAST_PIXELS = 8  # of a side: matrices of cameras are smaller

if TYPE_CHECKING:
    from fuelrail.bench.planner.hardware import ClusterSettings


def measured(
    scenario: Scenario,
    cluster: ClusterSettings,
    files: Sequence[str],
) -> tuple[Fitted | None, list[str]]:
    """Fit the efficiencies to measured steps, and say how well they are known. Raises ConfigError.

    None where neither the measured steps nor published ones are of the model's family: it stays a
    bound.
    """
    runs = [_run(Path(name), cluster) for name in files]
    # Needs torch, and the checks above do not.
    from fuelrail.bench.planner import choice

    cases = []
    for run, where, seconds in runs:
        settings = next(choice.candidates(run, where))
        plan = choice.fit(run, where, settings, fits=True)
        cases.append((plan.work, where, run.precision, seconds))
    device = cluster.device.name
    published = has_range(device, scenario.precision, scenario.family, scenario.software)
    families = sorted({run.family for run, _, _ in runs})
    if not published and scenario.family not in families:
        said = (
            f"--measure: the measured steps are of {', '.join(families)}, and the plan of "
            f"{scenario.family}; it stays a bound: measure a step of this model"
        )
        return None, [said]
    start = efficiency_of(device, scenario.precision, scenario.software, scenario.family)
    if not published:
        spread = max(start.spread, Efficiency().spread)
        start = msgspec.structs.replace(start, spread=spread)
    fitted = fit(cases, start)
    numbers = []
    for name in NUMBERS:
        text = f"{name} {getattr(fitted.efficiency, name):.2f}"
        if name not in fitted.determined:
            text += " (mostly as before: these steps do not determine it)"
        numbers.append(text)
    steps = counted(len(cases), "measured step")
    largest_error = max(map(abs, fitted.errors))
    said = (
        f"efficiency: {len(NUMBERS)} numbers fitted to {steps}; "
        f"identifiable by them: {len(fitted.determined)}; {', '.join(numbers)}; off by "
        f"{largest_error:.0%} at most on these steps"
    )
    return fitted, [said]


def _run(path: Path, cluster: ClusterSettings) -> tuple[Scenario, ClusterSettings, float]:
    """Return what ran, where, and the seconds of its step: of a scenario or a report of
    training.
    """
    if path.suffix in (".yaml", ".yml"):
        run = load_yaml(path, Scenario)
        where = load_cluster(run.cluster)
        if run.measured_step_s is None or run.parallel == "auto":
            raise ConfigError(
                f"--measure '{path}' needs parallel, and measured_step_s: the seconds of a "
                "step; add them"
            )
        if where.device.name != cluster.device.name:
            raise ConfigError(
                f"--measure '{path}' is of '{where.device.name}', and the plan of "
                f"'{cluster.device.name}'; measure on that"
            )
        return run, where, run.measured_step_s
    report = load_report(path)
    name = str(report.model["name"])
    if report.accelerator["kind"] != "cuda":
        raise ConfigError(
            f"--measure '{path}': its accelerator was {report.accelerator['kind']}, which says "
            f"nothing of '{cluster.device.name}'; give a report of `fuelrail bench train "
            "--accelerator cuda` on the cluster"
        )
    if report.figures is None or name not in MODELS:
        raise ConfigError(
            f"--measure '{path}' has no steps of a known model; give one with figures"
        )
    options = report.options
    if report.num_ranks > cluster.num_devices:
        raise ConfigError(
            f"--measure '{path}' is of {report.num_ranks} ranks, and cluster '{cluster.name}' has "
            f"{cluster.num_devices} devices; give the report's own cluster"
        )
    settings = ParallelSettings.among(options, str(path))
    image = MODEL_IMAGE
    run = Scenario(
        name=path.name,
        model=report.model["name"],
        cluster=cluster.name,
        global_batch=report.global_batch,
        micro_batch=options["batch_size"],
        precision=options["precision"],
        parallel=settings,
        cameras=max(1, len(report.dataset.cameras)),
        height=image.height,
        width=image.width,
    )
    inside = msgspec.structs.replace(
        cluster,
        nodes=math.ceil(report.num_ranks / cluster.devices_per_node),
        devices_per_node=min(report.num_ranks, cluster.devices_per_node),
    )
    # The step without what it waited for data.
    waits = [phase for phase in report.figures.phases if phase.phase == "data_wait"]
    wait_ms = sum(phase.time.mean_ms for phase in waits)
    busy_ms = report.figures.step_time.mean_ms - wait_ms
    return run, inside, busy_ms / 1e3


def with_data(scenario: Scenario, dataset: str, split: str) -> Scenario:
    """Take from a dataset what the scenario does not say."""
    facts = dataset_facts(open_dataset(dataset), split)
    # An own model may read images by other names.
    has_images = scenario.reads_images or scenario.is_own
    num_cameras = len(facts.cameras) if has_images else 0
    size = facts.mean_sample_bytes
    if size is not None:
        size = max(1, round(size))
    return msgspec.structs.replace(
        scenario,
        cameras=scenario.cameras or num_cameras or None,
        sample_bytes=scenario.sample_bytes or size,
        samples_per_epoch=scenario.samples_per_epoch or facts.num_samples or None,
    )


def with_example(scenario: Scenario) -> Scenario:
    """Take from an own model's ``example`` how many images a sample has, and their size, where it
    has some.

    Images are tensors of three channels, first or last, of at least ``_LEAST_PIXELS`` a side.
    """
    from fuelrail.bench.planner.fake_rank import example_of  # needs torch

    sizes: list[tuple[int, int, int]] = []  # images of a sample, height, width
    for shape in example_of(str(scenario.model)):
        if len(shape) < 4:
            continue
        *outer, first, second, third = shape
        num_images = math.prod(outer[1:])
        if first == 3 and min(second, third) >= _LEAST_PIXELS:
            sizes.append((num_images, second, third))
        elif third == 3 and min(first, second) >= _LEAST_PIXELS:
            sizes.append((num_images, first, second))
    if not sizes:
        return scenario
    _, height, width = max(sizes, key=lambda size: size[1] * size[2])
    return msgspec.structs.replace(
        scenario,
        cameras=scenario.cameras or sum(count for count, _, _ in sizes),
        height=scenario.height or height,
        width=scenario.width or width,
    )


def images_said(read: Scenario, scenario: Scenario, example: Scenario) -> str:
    """Say how many images of an own model's sample are decoded, and who says so.

    ``read`` is the scenario as it was given, ``example`` with what the model's example has.
    """
    if scenario.cameras is None:
        return (
            f"decoding: none, for example() of '{scenario.model}' has no images (tensors of 3 "
            "channels); give --cameras, --height and --width if a sample has some"
        )
    source = f"as example() of '{scenario.model}' has them"
    if read.cameras is not None:
        source = "as was given"
    elif example.cameras is None:
        source = "as the dataset has them"
    size = "" if scenario.height is None else f" of {scenario.height} x {scenario.width}"
    return f"decoding: {scenario.cameras} images{size} in a sample, {source}"


def with_loader(
    scenario: Scenario,
    cluster: ClusterSettings,
    path: Path,
) -> tuple[Scenario, ClusterSettings, list[str]]:
    """Take what a loader was measured to do, also for the cluster; raises ConfigError for a
    report without figures.
    """
    report = load_report_of(path, LoaderReport, loader_report.SCHEMA, loader_report.VERSION)
    figures = report.figures
    if figures is None:
        raise ConfigError(
            f"--loader-report '{path}' has no figures: {report.too_short}; measure for longer"
        )
    has_images = scenario.reads_images or scenario.is_own
    num_cameras = len(report.dataset.cameras) if has_images else 0
    mean_bytes = round(report.dataset.mean_sample_bytes or 0)
    scenario = msgspec.structs.replace(
        scenario,
        cameras=scenario.cameras or num_cameras or None,
        sample_bytes=scenario.sample_bytes or max(1, mean_bytes),
    )
    per_cpu = 1000 / figures.cpu_s_per_1000_images
    where = f"`fuelrail bench loader` of {report.created} on {report.machine.cpu}"
    decoded = Sourced(per_cpu, f"{per_cpu:.0f} images/s of CPU time: {where}")
    cluster = msgspec.structs.replace(
        cluster,
        host=msgspec.structs.replace(cluster.host, images_per_cpu_s=decoded),
    )
    said = [
        f"CPUs of the cluster decode as fast as those of the loader's report ({report.machine.cpu})"
    ]
    if figures.bound.kind == "storage":
        rate = figures.stored_mb_per_s / 1e3 * cluster.nodes
        stored = Sourced(rate, f"{figures.stored_mb_per_s:.0f} MB/s of a node: {where}")
        cluster = msgspec.structs.replace(cluster, storage_gb_per_s=stored)
        said.append(
            "each node reads as fast as the one of the loader's report, all of them at once"
        )
    else:
        said.append(
            "storage is the cluster file's: the measured loader was held up by "
            f"{figures.bound.kind}"
        )
    return scenario, cluster, said
