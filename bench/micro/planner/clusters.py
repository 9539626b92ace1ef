"""Random emulated clusters, which the planner knows by their cluster file alone: step time and bottleneck against runs.

Each cluster has 1, 2 or 4 devices of one node. Its file is drawn: peak, memory rate, link, CPUs for decoding, storage,
and perhaps a slow device. The emulation waits as the file says, in real runs of ``bench train``: phases last the
model's FLOP over the peak, buckets wait for the link, the decode and fetch stages last what a sample takes, and one
rank's forward pass lasts longer. The file's link is a bus bandwidth as nccl-tests defines it: (p - 1) / p of the
emulated one, which takes 2 n / bandwidth for any number of ranks.

    python -m fuelrail.bench.micro.planner.clusters --out bench/results/planner_clusters.json
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from fuelrail.bench.measure.machine import MachineFacts, dataset_facts, machine_facts
from fuelrail.bench.micro.profiles import made_profile
from fuelrail.bench.planner.fake_rank import Inputs
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.planner.shape import shape_of
from fuelrail.bench.planner.state import FP32, num_parameters
from fuelrail.bench.planner.step_time import Efficiency
from fuelrail.bench.ranks.injection import Injection
from fuelrail.bench.report.files import publish_json
from fuelrail.bench.studies.plan.run import plan
from fuelrail.bench.studies.train.run import TrainRun, measure_all
from fuelrail.bench.studies.train.settings import TrainOptions
from fuelrail.bench.trainer.models.settings import MODELS, ModelName
from fuelrail.bench.trainer.strategies.settings import Degrees, ParallelSettings
from fuelrail.loaders import Transforms
from fuelrail.pipeline.errors import FuelrailError
from support.cameras import write_cameras

WITHIN = 0.1
_MODEL: ModelName = "light"
_CAMERAS = ("cam_front", "cam_front_right")
_BUCKET_MIB = 0.004  # a quarter of the model: with one bucket, as torch would make, nothing would hide the link
_WARMUP = 4
_BOUNDS = {1: ("computing", "decoding", "storage"),
           2: ("computing", "communication", "decoding", "storage", "straggler"),
           4: ("computing", "communication", "decoding", "storage", "straggler")}  # fmt: skip


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster in milliseconds: a sample's decoding and reading in a rank, computing of a step, its slow device."""

    ranks: int
    bound: str
    compute_ms: float
    optimiser_ms: float
    reduce_ms: float
    latency_ms: float
    decode_ms: float
    fetch_ms: float
    slowest: float


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster: what was measured and predicted; ``error`` is predicted over measured step, less 1."""

    drawn: Drawn
    measured_ms: float
    predicted_ms: float
    error: float
    bottleneck: str
    right: bool
    within: bool


class Clusters(msgspec.Struct, frozen=True, kw_only=True):
    """The result file; ``others_cpus``: what other processes used of the machine meanwhile."""

    benchmark: str
    machine: MachineFacts
    seed: int
    others_cpus: float | None
    num_clusters: int
    steps_within: int
    bottlenecks_right: int
    worst_error: float
    clusters: list[Predicted]


def draw(seed: int, count: int) -> list[Drawn]:
    """Draw clusters, each held up by one thing, which takes at least 1.4 times what comes next."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        ranks = (1, 2, 4)[number % 3]
        bound = rng.choice(_BOUNDS[ranks])
        compute = rng.uniform(120, 240)
        reduce_ms = 0.0 if ranks == 1 else compute * rng.uniform(0.1, 0.4)
        if bound == "communication":
            compute, reduce_ms = compute / 2, compute * rng.uniform(1.5, 2.5)
        alone = compute + reduce_ms
        found.append(
            Drawn(
                ranks=ranks, bound=bound, compute_ms=compute, optimiser_ms=rng.uniform(1, 5), reduce_ms=reduce_ms,
                latency_ms=0.0 if ranks == 1 else rng.uniform(0.1, 1.0),
                decode_ms=alone * rng.uniform(1.4, 2.5) if bound == "decoding" else compute * rng.uniform(0.2, 0.6),
                fetch_ms=alone * rng.uniform(1.4, 2.5) if bound == "storage" else compute * rng.uniform(0.1, 0.6),
                slowest=rng.uniform(0.3, 0.4) if bound == "straggler" else 1.0,
            )
        )  # fmt: skip
    return found


def cluster_file(drawn: Drawn, flop: float, sample_bytes: float, path: Path) -> None:
    """Write what the planner is to know."""

    def number(value: float) -> dict[str, Any]:
        return {"value": value, "source": "drawn for this emulation"}

    gradients = num_parameters(MODELS[_MODEL])[0] * FP32
    share = 2 * (drawn.ranks - 1) / drawn.ranks
    cluster: dict[str, Any] = {
        "name": path.stem, "nodes": 1, "devices_per_node": drawn.ranks,
        "device": {
            "name": "emulated", "memory_gib": number(16),
            "memory_gb_per_s": number(7 * gradients / drawn.optimiser_ms / 1e6),
            "peak_tflops": {"fp32": number(flop / drawn.compute_ms / 1e9)},
        },
        "inside": {
            "name": "emulated",
            "gb_per_s": number(share * gradients / drawn.reduce_ms / 1e6 if drawn.reduce_ms else 1e-6),
            "latency_us": number(max(1e-3, 1e3 * drawn.latency_ms)),
        },
        "host": {"cpus": number(drawn.ranks), "images_per_cpu_s": number(1e3 * len(_CAMERAS) / drawn.decode_ms)},
        "storage_gb_per_s": number(drawn.ranks * sample_bytes / drawn.fetch_ms / 1e6),
    }  # fmt: skip
    if drawn.slowest < 1:
        cluster["slowest_device"] = number(drawn.slowest)
    path.write_text(yaml.safe_dump(cluster))


def run_of(drawn: Drawn, dataset: Path, records: Path, steps: int) -> TrainRun:
    """Return the run that waits as the cluster does."""
    gradients = num_parameters(MODELS[_MODEL])[0] * FP32
    profile = made_profile(
        records.parent.name, "drawn", forward_ms=drawn.compute_ms / 3, backward_ms=drawn.compute_ms * 2 / 3,
        optimiser_ms=drawn.optimiser_ms,
    )  # fmt: skip
    if drawn.reduce_ms:
        rate = 2 * gradients / drawn.reduce_ms / 1e6
        profile = msgspec.structs.replace(profile, link_gb_per_s=rate, link_latency_us=1e3 * drawn.latency_ms)
    inject = Injection(stage_lasts={"decode": drawn.decode_ms, "fetch": drawn.fetch_ms})
    if drawn.slowest < 1:
        longer = drawn.compute_ms * (1 / 3 + 1 / drawn.slowest - 1)
        inject = msgspec.structs.replace(inject, forward=longer, rank=drawn.ranks - 1)
    records.parent.mkdir()
    options = TrainOptions(
        ranks=drawn.ranks, batch_size=1, steps=_WARMUP + steps, warmup=_WARMUP, model=_MODEL, workers=1,
        profile=profile, inject=inject, bucket_mib=_BUCKET_MIB,
    )  # fmt: skip
    return TrainRun(dataset, options, records)


def measure(folder: Path, seed: int, count: int, steps: int) -> Clusters:
    """Emulate and plan each cluster. Raises FuelrailError where a run ends early."""
    clusters = draw(seed, count)
    facts = dataset_facts(write_cameras(folder / "cameras", 96, channels=_CAMERAS), "train")
    size = facts.mean_sample_bytes or 0.0
    image = Transforms().image
    inputs = Inputs(micro_batch=1, cameras=len(_CAMERAS), height=image.height, width=image.width)
    flop = shape_of(MODELS[_MODEL], ParallelSettings(), Degrees(), inputs).flop
    found: dict[int, Predicted] = {}
    others: list[float] = []
    for ranks in sorted({drawn.ranks for drawn in clusters}):
        numbers = [number for number, drawn in enumerate(clusters) if drawn.ranks == ranks]
        runs = [
            run_of(clusters[number], folder / "cameras", folder / f"cluster-{number}" / "records", steps)
            for number in numbers
        ]
        made = measure_all(runs)
        if made.cut_off is not None:
            raise FuelrailError(f"the measurement was cut off: {made.cut_off}")
        for number, report in zip(numbers, made.reports, strict=True):
            if report.figures is None:
                raise FuelrailError(f"no figures: {report.window.too_short}")
            if report.cpu is not None and report.cpu.others is not None:
                others.append(report.cpu.others)
            file = folder / f"cluster-{number}.yaml"
            cluster_file(clusters[number], flop, size, file)
            found[number] = _predicted(clusters[number], file, report.figures.step_time.mean_ms, size)
    ordered = [found[number] for number in range(count)]
    return Clusters(
        benchmark="planner_clusters", machine=machine_facts(), seed=seed, others_cpus=max(others, default=None),
        num_clusters=count, steps_within=sum(one.within for one in ordered),
        bottlenecks_right=sum(one.right for one in ordered), worst_error=max(abs(one.error) for one in ordered),
        clusters=ordered,
    )  # fmt: skip


def _predicted(drawn: Drawn, file: Path, measured_ms: float, sample_bytes: float) -> Predicted:
    image = Transforms().image
    asked = Scenario(
        name=file.stem, model=_MODEL, cluster=str(file), global_batch=drawn.ranks, precision="fp32",
        parallel=ParallelSettings(bucket_mib=_BUCKET_MIB), cameras=len(_CAMERAS),
        height=image.height, width=image.width,
        sample_bytes=round(sample_bytes), efficiency=Efficiency(compute=1.0, passes=0.0),
    )  # fmt: skip
    said = plan(asked)
    error = 1e3 * said.step_s / measured_ms - 1
    return Predicted(
        drawn=drawn, measured_ms=measured_ms, predicted_ms=1e3 * said.step_s, error=error, bottleneck=said.bottleneck,
        right=said.bottleneck == drawn.bound, within=abs(error) <= WITHIN,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 if a cluster is off."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.planner.clusters", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--clusters", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="measured in each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuelrail-clusters-") as folder:
        result = measure(Path(folder), options.seed, options.clusters, options.steps)
    for one in result.clusters:
        print(  # noqa: T201
            f"{one.drawn.ranks} {one.drawn.bound:14} {one.measured_ms:7.1f} ms, predicted {one.predicted_ms:7.1f} "
            f"({one.error:+.1%}) {one.bottleneck:14} {'right' if one.right else 'WRONG'} "
            f"{'within' if one.within else 'OFF'}"
        )
    print(f"{result.steps_within} within {WITHIN:.0%}, {result.bottlenecks_right} right; others {result.others_cpus}")  # noqa: T201
    if options.out is not None:
        publish_json(options.out, result)
    return 0 if result.steps_within == result.bottlenecks_right == result.num_clusters else 1


if __name__ == "__main__":
    sys.exit(main())
