"""A measurement of the loader: from options to the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from fuelrail.bench.measure.machine import dataset_facts, machine_facts
from fuelrail.bench.measure.rates import median_rates
from fuelrail.bench.report.files import prepare_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.loader.report import (
    LoaderOptions,
    LoaderReport,
    build_loader_report,
)
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.schedule.selection import stored_image
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.runtime.host import usable_cpus
from fuelrail.pipeline.runtime.progress import Progress
from fuelrail.pipeline.settings import make_options


def bench_loader(
    dataset: str | os.PathLike[str],
    options: LoaderOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # fields of LoaderOptions
) -> LoaderReport:
    """Measure how fast a dataset can be loaded here, stage by stage, and what limits it.

    ``fuelrail.bench.bench_loader("DATASET", repeats=3)`` takes the fields of
    :class:`LoaderOptions` as keywords.

    ``out`` is a folder for the report; None: nothing is written. After Ctrl+C the report
    holds the complete rounds (``cut_off``). Raises ConfigError and DatasetErrors.
    """
    options = make_options(LoaderOptions, options, changes)
    if options.decoder != "auto":
        make_decoder(options.decoder)  # refuses an unknown name, and one that is not installed
    opened = open_dataset(dataset)
    facts = dataset_facts(opened, options.split)
    if facts.num_samples < options.batch_size:
        raise ConfigError(
            f"split '{options.split}' has {facts.num_samples} samples, fewer than a batch "
            f"of {options.batch_size}: use a smaller --batch-size"
        )
    if out is not None:
        prepare_folder(Path(out), html=html)
    from fuelrail.bench.studies.loader.run import (
        measure_rounds,
    )  # needs torch, and the checks above do not

    image = options.image or stored_image({"": opened})
    workers = options.workers or max(1, int(usable_cpus()))
    options = msgspec.structs.replace(options, image=image, workers=workers)
    with Progress("starting") as progress:
        rounds, peak_rss_bytes, cut_off = measure_rounds(opened, options, progress.update)
    report = build_loader_report(
        machine=machine_facts(),
        dataset=facts,
        options=msgspec.to_builtins(options),
        limits=median_rates([entry.limits for entry in rounds]),
        stages=median_rates([entry.stages for entry in rounds]),
        runs=[entry.run for entry in rounds],
        peak_rss_bytes=peak_rss_bytes,
        cut_off=cut_off,
    )
    if out is not None:
        write_report(report, Path(out), html=html)
    return report
