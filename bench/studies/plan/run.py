"""Plan a scenario: what it says, what a dataset and reports of this cluster add, the choice, and
the report.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fuelrail.bench.planner.hardware import load_cluster
from fuelrail.bench.planner.scenario import (
    PlanOptions,
    Scenario,
    check,
    with_options,
)
from fuelrail.bench.studies.plan.measured import (
    images_said,
    measured,
    with_data,
    with_example,
    with_loader,
)
from fuelrail.pipeline.settings import load_yaml, make_options

if TYPE_CHECKING:
    from fuelrail.bench.studies.plan.report import PlanReport


def plan(
    scenario: str | os.PathLike[str] | Scenario | None = None,
    options: PlanOptions | None = None,
    **changes: Any,  # fields of PlanOptions
) -> PlanReport:
    """Plan a scenario: a struct, the path of its YAML file, or None where the options say all of
    it.

    ``fuelrail.bench.plan("SCENARIO.yaml", data="DATASET")`` takes the fields of
    :class:`PlanOptions` as keywords.

    Raises ConfigError for what a scenario leaves out or what cannot be divided, and where
    nothing fits: with the reason for each strategy.
    """
    options = make_options(PlanOptions, options, changes)
    named = scenario if isinstance(scenario, Scenario | None) else load_yaml(scenario, Scenario)
    planned_scenario = with_options(named, options)
    assumed: list[str] = []
    read = planned_scenario
    if planned_scenario.is_own:
        planned_scenario = with_example(planned_scenario)
    example = planned_scenario
    if options.data is not None:
        planned_scenario = with_data(planned_scenario, options.data, options.split)
        if options.loader_report is None:
            assumed.append(
                "no report of `fuelrail bench loader` for the dataset: decoding and storage "
                "are the cluster file's; measure them on a host of the cluster and give "
                "--loader-report"
            )
    cluster = load_cluster(planned_scenario.cluster)
    if options.loader_report is not None:
        planned_scenario, cluster, texts = with_loader(
            planned_scenario, cluster, Path(options.loader_report)
        )
        assumed += texts
    check(planned_scenario)
    if planned_scenario.is_own:
        assumed.append(images_said(read, planned_scenario, example))
    fitted = None
    if options.measure:
        fitted, texts = measured(planned_scenario, cluster, options.measure)
        if fitted is not None:
            planned_scenario = msgspec.structs.replace(
                planned_scenario, efficiency=fitted.efficiency
            )
        assumed += texts
    from fuelrail.bench.planner.scaling import scaling_curves

    # These need torch, and the checks above do not.
    from fuelrail.bench.studies.plan.recipe import recipe
    from fuelrail.bench.studies.plan.report import build_report, explanations
    from fuelrail.bench.studies.plan.variants import choose, remedies, sweep

    chosen, tried = choose(planned_scenario, cluster)
    at_once = cluster.num_devices * planned_scenario.micro_batch
    if planned_scenario.parallel == "auto" and planned_scenario.global_batch < at_once:
        assumed.append(
            f"a global_batch of {planned_scenario.global_batch} is less than one "
            f"micro-batch of {planned_scenario.micro_batch} on each of "
            f"{cluster.num_devices} devices ({at_once}), so the model itself is divided"
        )
    assumed.append(
        f"scaling: storage stays {cluster.storage_gb_per_s.value:g} GB/s for all nodes, "
        "however many"
    )
    if cluster.between is None:
        assumed.append(
            f"scaling ends at {cluster.devices_per_node} devices, one node: cluster "
            f"'{cluster.name}' has no link 'between' nodes; add it to the file for more"
        )
    report = build_report(planned_scenario, cluster, chosen, fitted)
    interval_s = report.checkpoint_interval_s
    return msgspec.structs.replace(
        report,
        options={
            name: value
            for name, value in msgspec.to_builtins(options).items()
            if value not in (None, False, [])
        },
        tried=tried,
        sweep=sweep(planned_scenario, cluster) if options.sweep else [],
        scaling=scaling_curves(planned_scenario, cluster, chosen),
        assumed=[*report.assumed, *assumed],
        explained=explanations(planned_scenario, cluster, chosen) if options.explain else {},
        remedies=remedies(planned_scenario, cluster, chosen, tried),
        recipe=None
        if options.recipe is None
        else recipe(
            options.recipe,
            scenario=planned_scenario,
            cluster=cluster,
            fit=chosen,
            interval_s=interval_s,
        ),
    )
