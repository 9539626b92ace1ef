"""The file that launches a plan, out of a shipped recipe: by Slurm, as a Kubeflow job, or
torchrun on each node.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import yaml

from fuelrail.bench.planner.hardware import CLUSTERS
from fuelrail.bench.trainer.strategies.settings import ParallelSettings

if TYPE_CHECKING:
    from fuelrail.bench.planner.choice import Fit
    from fuelrail.bench.planner.hardware import ClusterSettings
    from fuelrail.bench.planner.scenario import Scenario

FILES = {
    "slurm": "launch.sbatch",
    "kubernetes": "launch.yaml",
    "torchrun": "launch.sh",
}
_RECIPES = CLUSTERS.parent / "recipes"
# steps between two checkpoints, where failures of the job or the time of a step are not known
_EVERY = 100
_TRAINER = re.compile(r"configs/trainers/fsdp2\.py.*\Z", re.DOTALL)


def recipe(
    kind: str,
    scenario: Scenario,
    cluster: ClusterSettings,
    fit: Fit,
    interval_s: float | None,
) -> str:
    """Return the text of a launch file: the shipped recipe with the plan's nodes, devices, CPUs
    and trainer; of Kubernetes the job of Kubeflow's Training Operator.
    """
    from fuelrail.bench.planner.choice import is_bound  # needs torch

    every = _EVERY
    if interval_s is not None and not is_bound(scenario, cluster, fit.settings):
        every = max(1, round(interval_s / fit.time.total))
    words, variables = _trainer(scenario, fit, every)
    nodes = cluster.nodes
    gpus = cluster.devices_per_node
    cpus = max(1, int(cluster.host.cpus.value))
    comment = (
        f"# {scenario.name}: {fit.settings.mesh or fit.settings.strategy} on "
        f"{cluster.num_devices} devices.\n"
    )
    if kind == "kubernetes":
        job = yaml.safe_load((_RECIPES / "pytorchjob.yaml").read_text(encoding="utf-8"))
        job["spec"]["nprocPerNode"] = str(gpus)
        job["spec"]["elasticPolicy"] |= {"minReplicas": nodes, "maxReplicas": nodes}
        worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
        worker["replicas"] = nodes
        (container,) = worker["template"]["spec"]["containers"]
        environment = {name: f"REPLACE: {text}" for name, text in variables.items()} | {
            "CHECKPOINTS": "/checkpoints"
        }
        container["env"] = [{"name": name, "value": value} for name, value in environment.items()]
        container["command"] = [
            "torchrun",
            *(re.sub(r"\$(\w+)", r"$(\1)", word) for word in words),
        ]
        # Less what the node keeps for itself.
        container["resources"] = {
            "requests": {"cpu": str(max(1, cpus - 2))},
            "limits": {"nvidia.com/gpu": str(gpus)},
        }
        return comment + str(yaml.safe_dump(job, sort_keys=False))
    launch = (_RECIPES / "torchrun.sh").read_text(encoding="utf-8")
    launch = launch[launch.index("exec torchrun") :]
    # Quoted, as a folder may have blanks; what is of the plan has none.
    launch = _TRAINER.sub(
        " ".join(f'"{word}"' if "$" in word else word for word in words).replace("\\", "") + "\n",
        launch,
    )
    asks = "".join(f': "${{{name}:?{text}}}"\n' for name, text in variables.items())
    if kind == "torchrun":
        first = ': "${FIRST_NODE:?address of the first node}"\n'
        launch = launch.replace("${NODES:-8}", f"${{NODES:-{nodes}}}").replace(
            "${GPUS:-8}", f"${{GPUS:-{gpus}}}"
        )
        return f"#!/usr/bin/env bash\n{comment}set -euo pipefail\n{first}{asks}{launch}"
    text = (_RECIPES / "slurm.sbatch").read_text(encoding="utf-8")
    for name, value in {
        "nodes": nodes,
        "gpus-per-node": gpus,
        "cpus-per-task": cpus,
    }.items():
        text = re.sub(rf"(#SBATCH --{name}=)\d+", rf"\g<1>{value}", text)
    head, _, rest = text.partition("#SBATCH")
    rest = re.sub(r': "\$\{DATASET.*\n', asks.replace("\\", ""), rest)
    rest = re.sub(
        r"export FIRST_NODE .*",
        f'NODES="$SLURM_JOB_NUM_NODES" GPUS={gpus} RUN="$SLURM_JOB_ID"',
        rest,
    )
    launch = (
        launch.removeprefix("exec ").replace("${NODES:-8}", "$NODES").replace("${GPUS:-8}", "$GPUS")
    )
    rest = rest.replace("configs/recipes/torchrun.sh\n", launch)
    return f"{head.splitlines()[0]}\n{comment}#SBATCH{rest}"


def _trainer(
    scenario: Scenario,
    fit: Fit,
    every: int,
) -> tuple[list[str], dict[str, str]]:
    """Return what torchrun starts, and the variables that it needs: `bench train` of a named
    model, else a script.
    """
    variables = {
        "DATASET": "folder or URL of the dataset",
        "CHECKPOINTS": "folder on storage that all nodes share",
    }
    saves = ["--checkpoint=$CHECKPOINTS", f"--every={every}"]
    if scenario.is_own or not isinstance(scenario.model, str):
        variables["TRAINER"] = (
            "your training script, which divides the model as the second line says"
        )
        return ["$TRAINER", "$DATASET", *saves], variables
    variables["STEPS"] = "number of optimiser steps"
    words = [
        "-m",
        "fuelrail",
        "bench",
        "train",
        "$DATASET",
        "--accelerator=cuda",
        f"--model={scenario.model}",
    ]
    at_once = fit.inputs.micro_batches if fit.degrees.pp > 1 else 1
    words += [
        f"--precision={scenario.run_precision}",
        f"--batch-size={scenario.micro_batch * at_once}",
        f"--accumulation={fit.inputs.micro_batches // at_once}",
    ]
    how = fit.settings
    for name in (
        "strategy",
        "mesh",
        "recompute",
        "pipeline_schedule",
        "micro_batches",
        "optimiser",
    ):
        if getattr(how, name) != getattr(ParallelSettings(), name):
            words.append(f"--{name.replace('_', '-')}={getattr(how, name)}")
    if scenario.reads_images:
        variables["TRANSFORMS"] = (
            f"YAML file of size and augmentation, for {scenario.height}x{scenario.width} pixels"
        )
        words.append("--transforms=$TRANSFORMS")
    return [*words, *saves, "--steps=$STEPS"], variables
