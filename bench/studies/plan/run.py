"""Plan a scenario: what it says, what a dataset and reports of this cluster add, the choice, and the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.hardware import GIB, ClusterSettings, load_cluster
from fuelrail.bench.planner.scenario import Data, PlanOptions, Scenario, check, with_options
from fuelrail.bench.studies.plan.measured import measured, with_data, with_loader
from fuelrail.bench.trainer.models.settings import GptSettings
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import load_yaml, make_options

if TYPE_CHECKING:
    from fuelrail.bench.planner.choice import Fit
    from fuelrail.bench.studies.plan.report import PlanReport, Tried


def plan(
    scenario: str | os.PathLike[str] | Scenario | None = None,
    options: PlanOptions | None = None,
    **changes: Any,  # fields of PlanOptions
) -> PlanReport:
    """Plan a scenario: a struct, the path of its YAML file, or None where the options say all of it.

    ``fuelrail.plan("SCENARIO.yaml", data="DATASET")`` takes the fields of :class:`PlanOptions` as keywords. Raises
    ConfigError for what a scenario leaves out or what cannot be divided, and where nothing fits: with the reason for
    each strategy.
    """
    options = make_options(PlanOptions, options, changes)
    read = scenario if isinstance(scenario, Scenario | None) else load_yaml(scenario, Scenario)
    asked = with_options(read, options)
    assumed: list[str] = []
    if options.data is not None:
        asked = with_data(asked, options.data, options.split)
        if options.loader_report is None:
            assumed.append(
                "no report of `fuelrail bench loader` for the dataset: decoding and storage are the cluster file's; "
                "measure them on a host of the cluster and give --loader-report"
            )
    cluster = load_cluster(asked.cluster)
    data = Data(
        images_per_node_s=cluster.host.cpus.value * cluster.host.images_per_cpu_s.value,
        images_source=f"{cluster.host.cpus.value:g} CPUs x {cluster.host.images_per_cpu_s.source}",
        storage_gb_per_s=cluster.storage_gb_per_s.value, storage_source=cluster.storage_gb_per_s.source,
    )  # fmt: skip
    if options.loader_report is not None:
        asked, data, found = with_loader(asked, cluster, data, Path(options.loader_report))
        assumed += found
    check(asked)
    fitted = None
    if options.measure:
        fitted, found = measured(asked, cluster, options.measure)
        asked = msgspec.structs.replace(asked, efficiency=fitted.efficiency)
        assumed += found
    from fuelrail.bench.planner.scaling import scaling_curves  # need torch, and the checks above do not
    from fuelrail.bench.studies.plan.recipe import recipe
    from fuelrail.bench.studies.plan.remedies import remedies
    from fuelrail.bench.studies.plan.report import build_report, step_range
    from fuelrail.bench.studies.plan.sweep import sweep

    chosen, tried = choose(asked, cluster)
    at_once = cluster.num_devices * asked.micro_batch
    if asked.parallel == "auto" and asked.global_batch < at_once:
        assumed.append(
            f"a global_batch of {asked.global_batch} is less than one micro-batch of {asked.micro_batch} on each of "
            f"{cluster.num_devices} devices ({at_once}), so the model itself is divided"
        )
    swept = sweep(asked, cluster, data) if options.sweep else []
    curves = scaling_curves(asked, cluster, chosen, data)
    assumed.append(f"scaling: storage stays {data.storage_gb_per_s:g} GB/s for all nodes, however many")
    if cluster.between is None:
        assumed.append(
            f"scaling ends at {cluster.devices_per_node} devices, one node: cluster '{cluster.name}' has no link "
            "'between' nodes; add it to the file for more"
        )
    said = {name: value for name, value in msgspec.to_builtins(options).items() if value not in (None, False, [])}
    report = build_report(asked, cluster, chosen, data, said, (tried, swept, curves, assumed))
    rates = {one.strategy: one.samples_per_s for one in tried if one.samples_per_s is not None}
    launch = None
    if options.recipe is not None:
        launch = recipe(options.recipe, asked, cluster, chosen, report.checkpoint_interval_s)
    return msgspec.structs.replace(
        report,
        step_range_s=step_range(asked, cluster, chosen, data, fitted),
        remedies=remedies(asked, cluster, chosen, data, rates),
        recipe=launch,
    )


def choose(asked: Scenario, cluster: ClusterSettings) -> tuple[Fit, list[Tried]]:
    """Return the simplest strategy that fits, or the asked one, and all that were tried. Raises ConfigError.

    Other ways to train without recomputation and without divided layers are tried too, for some may be faster.
    """
    from fuelrail.bench.planner.choice import IndivisibleError, candidates, fit, named, peak
    from fuelrail.bench.studies.plan.report import Tried

    tried: list[Tried] = []
    chosen: Fit | None = None
    for settings in candidates(asked, cluster):
        if chosen is not None and settings.recompute != "none":
            break
        try:
            found = fit(asked, cluster, settings)
        except IndivisibleError as error:
            hint = "" if asked.parallel != "auto" else ", or --mesh, which can divide the layers instead"
            raise ConfigError(f"strategy {named(settings)}: {error}{hint}") from error
        except ConfigError as error:
            if asked.parallel != "auto":
                raise ConfigError(f"strategy {named(settings)}: {error}") from error
            tried.append(Tried(strategy=named(settings), fails=str(error)))
            continue
        chosen = chosen or found
        rate = asked.global_batch / found.time.total
        tried.append(Tried(strategy=named(settings), fails=None, peak_gib=peak(found.stages) / GIB, samples_per_s=rate))
    if chosen is not None:
        return chosen, tried
    reasons = list(dict.fromkeys(one.fails for one in tried))
    why = reasons[0] if len(reasons) == 1 else "; ".join(f"{one.strategy}: {one.fails}" for one in tried)
    if isinstance(asked.settings, GptSettings) and not asked.low:
        why = (
            f"{why}; this is with fp32 weights and whole gradients, as Fuelrail's trainer has them: --weights bf16 "
            "plans a trainer with less"
        )
    raise ConfigError(f"model '{asked.named}' does not fit on {cluster.num_devices} x {cluster.device.name}: {why}")
