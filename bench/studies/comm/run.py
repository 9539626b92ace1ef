"""Measure collectives: start ranks on this host, or be one of those that torchrun started; write
report and cluster.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import yaml

from fuelrail.bench.measure.machine import installed_gpus
from fuelrail.bench.planner.hardware import (
    ClusterSettings,
    Sourced,
    load_cluster,
)
from fuelrail.bench.ranks.launch import run_ranks
from fuelrail.bench.report.files import prepare_folder, publish
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.comm.report import CommOptions, CommReport, link_of
from fuelrail.bench.trainer.strategies.settings import (
    ParallelSettings,
    degrees_of,
)
from fuelrail.pipeline.errors import ConfigError, FuelrailError

CLUSTER_YAML = "cluster.yaml"


def run_comm(
    options: CommOptions,
    out: Path,
    *,
    html: bool = True,
) -> CommReport | None:
    """Measure and write into ``out``; None on ranks of torchrun other than the first, which write
    nothing.

    Raises ConfigError for what does not divide and for a cluster of other devices, and
    FuelrailError where a rank ends early, and where a cluster file was asked for and other
    processes disturbed the measurement.
    """
    if options.smallest > options.largest:
        raise ConfigError(
            f"smallest={options.smallest} is more than largest={options.largest}; sizes are "
            "bytes: swap them"
        )
    base = None
    if options.base is not None:
        base = load_cluster(options.base)
        if options.backend == "gloo" or not installed_gpus():
            raise ConfigError(
                f"base={options.base}: its devices are {base.device.name}, and the collectives "
                "would run by gloo on the CPU, whose rates are not those of its links; measure on "
                "its GPUs with nccl, or leave out --base"
            )
    if os.environ.get("RANK", "0") == "0":
        prepare_folder(out, html=html)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        from fuelrail.bench.studies.comm.measure import measure

        report = measure(options)
        if int(os.environ["RANK"]) != 0:
            return None
    else:
        report = measure_on_this_host(options)
    write_report(report, out, html=html)
    if base is not None:
        if report.disturbed is not None:
            raise FuelrailError(
                f"{CLUSTER_YAML} is not written: {report.disturbed}; stop those, and repeat "
                "the measurement"
            )
        text = yaml.safe_dump(msgspec.to_builtins(with_link(base, report)), sort_keys=False)
        publish(out / CLUSTER_YAML, text.encode())
    return report


def measure_on_this_host(options: CommOptions) -> CommReport:
    """Return what ranks of this host measure, started for that."""
    if options.ranks < 2:
        raise ConfigError(f"ranks={options.ranks}: a collective needs 2 ranks or more")
    if options.mesh is not None:
        degrees_of(ParallelSettings(mesh=options.mesh), options.ranks)
    with tempfile.TemporaryDirectory(prefix="fuelrail-comm-") as folder:
        options_file, report_file, log = (
            Path(folder) / name for name in ("options.json", "report.json", "log")
        )
        options_file.write_bytes(msgspec.json.encode(options))
        program = [
            "fuelrail.bench.studies.comm.measure",
            str(options_file),
            str(report_file),
        ]
        outcome = run_ranks(program, options.ranks, log, lambda: None)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.exit_code:
            raise FuelrailError(
                f"a rank ended early; the end of its log:\n{log.read_text()[-900:]}"
            )
        return msgspec.json.decode(report_file.read_bytes(), type=CommReport)


def with_link(base: ClusterSettings, report: CommReport) -> ClusterSettings:
    """Return the cluster with the measured link: between nodes where the ranks were on several,
    else inside one.
    """
    rate, latency = link_of(report.timed)
    source = (
        f"`fuelrail bench comm`, {report.created}: {report.ranks} ranks, {report.backend} on "
        f"{report.device}"
    )
    name = "between" if report.nodes > 1 else "inside"
    link = base.between or base.inside if name == "between" else base.inside
    if (
        name == "between"
    ):  # a node's ports are shared by its ranks; the file says one device's share
        rate /= max(1, report.ranks // report.nodes)
    measured = msgspec.structs.replace(
        link,
        gb_per_s=Sourced(value=rate, source=f"{source}, all-reduce, bus bandwidth"),
        latency_us=Sourced(value=latency, source=f"{source}, smallest all-reduce"),
    )
    return msgspec.structs.replace(base, **{name: measured})
