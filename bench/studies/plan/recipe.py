"""The file that launches a plan: by Slurm, as a Kubeflow job, or torchrun on each node.

Slurm's `srun` is given the CPUs of a task, which it does not take from `sbatch`; its signal goes to the ranks, not to
the batch shell alone; and every shell replaces itself by what it starts, so that a signal reaches the trainer.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING

from fuelrail.bench.planner.scenario import TransformerShape
from fuelrail.bench.trainer.strategies.settings import ParallelSettings

if TYPE_CHECKING:
    from fuelrail.bench.planner.choice import Fit
    from fuelrail.bench.planner.hardware import ClusterSettings
    from fuelrail.bench.planner.scenario import Scenario

FILES = {"slurm": "launch.sbatch", "kubernetes": "launch.yaml", "torchrun": "launch.sh"}
_EVERY = 100  # steps between two checkpoints, where the failures of the job are not known
_PLAIN = ParallelSettings()


def recipe(kind: str, asked: Scenario, cluster: ClusterSettings, fit: Fit, interval_s: float | None) -> str:
    """Return the text of a launch file."""
    every = _EVERY if interval_s is None else max(1, round(interval_s / fit.time.total))
    if kind == "kubernetes":
        return _kubernetes(asked, cluster, _command(asked, fit, every))
    command = " ".join(_shell(word) for word in _command(asked, fit, every))
    launch = (
        'torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --rdzv-backend c10d \\\n'
        '  --rdzv-endpoint "$FIRST_NODE:29500" --rdzv-id "${RUN:-fuelrail}" --max-restarts 3 \\\n'
        f"  {command}"
    )
    return (_SLURM if kind == "slurm" else _TORCHRUN).format(
        about=f"{asked.name}: {fit.settings.mesh or fit.settings.strategy} on {cluster.num_devices} devices",
        nodes=cluster.nodes, gpus=cluster.devices_per_node, cpus=round(cluster.host.cpus.value),
        asked=_needed(asked), launch=launch,
    )  # fmt: skip


def _command(asked: Scenario, fit: Fit, every: int) -> list[str]:
    """Return what torchrun starts: `bench train` of a named model, the caller's own trainer of another one."""
    if isinstance(asked.model, TransformerShape) or asked.is_own:
        return ["$TRAINER", "$DATASET", "--checkpoint=$CHECKPOINTS", f"--every={every}"]
    how, words = fit.settings, ["-m", "fuelrail", "bench", "train", "$DATASET", "--accelerator=cuda"]
    words += [f"--model={asked.model}", f"--precision={asked.precision}"]
    pipeline = fit.degrees.pp > 1
    batch = asked.micro_batch * (fit.inputs.micro_batches if pipeline else 1)
    words += [f"--batch-size={batch}", f"--accumulation={1 if pipeline else fit.inputs.micro_batches}"]
    for name in ("strategy", "mesh", "recompute", "pipeline_schedule", "micro_batches", "optimiser"):
        value = getattr(how, name)
        if value != getattr(_PLAIN, name):
            words.append(f"--{name.replace('_', '-')}={value}")
    if asked.reads_images:
        words.append("--transforms=$TRANSFORMS")
    return [*words, "--checkpoint=$CHECKPOINTS", f"--every={every}", "--steps=$STEPS"]


def _needed(asked: Scenario) -> str:
    """Return the lines that end the script where a variable is not given."""
    needed = {"DATASET": "folder or URL of the dataset", "CHECKPOINTS": "folder on storage that all nodes share"}
    if isinstance(asked.model, TransformerShape) or asked.is_own:
        needed["TRAINER"] = "your training script, which divides the model as the first line says"
    else:
        needed["STEPS"] = "number of optimiser steps"
        if asked.reads_images:
            needed["TRANSFORMS"] = f"YAML file of size and augmentation, for {asked.height}x{asked.width} pixels"
    return "\n".join(f': "${{{name}:?{text}}}"' for name, text in needed.items())


def _shell(word: str) -> str:
    return f'"{word}"' if "$" in word else shlex.quote(word)


def _kubernetes(asked: Scenario, cluster: ClusterSettings, command: list[str]) -> str:
    """Return a job of Kubeflow's Training Operator; JSON is YAML too."""
    names = sorted({word.partition("$")[2] for word in command if "$" in word} - {"CHECKPOINTS"})
    words = [word.replace("$CHECKPOINTS", "/checkpoints") for word in command]
    for name in names:
        words = [word.replace(f"${name}", f"$({name})") for word in words]
    container = {
        "name": "pytorch", "image": "fuelrail", "command": ["torchrun", *words],
        "env": [{"name": name, "value": "REPLACE"} for name in names],
        "resources": {
            "requests": {"cpu": str(max(1, math.floor(cluster.host.cpus.value * 0.9)))},
            "limits": {"nvidia.com/gpu": str(cluster.devices_per_node)},
        },
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "checkpoints", "mountPath": "/checkpoints"},
        ],
    }  # fmt: skip
    pod = {
        # Time for a checkpoint after SIGTERM.
        "terminationGracePeriodSeconds": 120, "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}},
        ],
    }  # fmt: skip
    job = {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "fuelrail"},
        "spec": {
            "nprocPerNode": str(cluster.devices_per_node),
            "elasticPolicy": {
                "rdzvBackend": "c10d", "minReplicas": cluster.nodes, "maxReplicas": cluster.nodes, "maxRestarts": 3,
            },
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": cluster.nodes, "restartPolicy": "OnFailure", "template": {"spec": pod},
                }
            },
        },
    }  # fmt: skip
    return f"# {asked.name}: replace each REPLACE, and the image.\n" + json.dumps(job, indent=2) + "\n"


_SLURM = """#!/usr/bin/env bash
# {about}: sbatch --export=ALL,DATASET=...,CHECKPOINTS=... launch.sbatch
#SBATCH --job-name=fuelrail
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
{asked}
FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export FIRST_NODE NODES="$SLURM_JOB_NUM_NODES" GPUS={gpus} RUN="$SLURM_JOB_ID"
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 {launch}
"""
_TORCHRUN = """#!/usr/bin/env bash
# {about}: run this on every node, with FIRST_NODE, the address of the first one.
set -euo pipefail
: "${{FIRST_NODE:?address of the first node}}"
{asked}
NODES={nodes} GPUS={gpus}
exec {launch}
"""
