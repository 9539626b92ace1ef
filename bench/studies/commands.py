"""``fuelrail bench WORD`` and ``fuelrail plan``: each study as a command with settings, a report,
its files and text.

What a study needs is imported when its command runs: torch and matplotlib take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fuelrail.bench.planner.scenario import PlanOptions
from fuelrail.bench.report.files import (
    TRACE_JSON,
    ReportHeader,
    exit_code,
    prepare_folder,
    publish,
    report_files,
)
from fuelrail.bench.report.options import DATASET, OutputOptions, PlanOutput, command
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.comm.report import CommOptions
from fuelrail.bench.studies.comm.run import run_comm
from fuelrail.bench.studies.diagnose.run import DiagnoseOptions, diagnose
from fuelrail.bench.studies.loader.measure import bench_loader
from fuelrail.bench.studies.loader.report import LoaderOptions
from fuelrail.bench.studies.plan.recipe import FILES
from fuelrail.bench.studies.plan.run import plan
from fuelrail.bench.studies.scale.report import ScaleOptions
from fuelrail.bench.studies.scale.run import scale
from fuelrail.bench.studies.train.run import bench_train
from fuelrail.bench.studies.train.settings import TrainOptions
from fuelrail.pipeline.cli import Command, print_json

if TYPE_CHECKING:
    import msgspec

    from fuelrail.bench.studies.plan.report import PlanReport
    from fuelrail.bench.studies.train.report import Report


def study(
    word: str,
    help: str,  # noqa: A002 - as argparse names it
    measure: Callable[..., Any],
    *,
    options: type[msgspec.Struct],
    arguments: Mapping[str, Mapping[str, Any]] = MappingProxyType({"dataset": DATASET}),
    names: Mapping[str, str] | None = None,
    printed: Sequence[str] = (),
    output: type[OutputOptions] = OutputOptions,
    description: str,
) -> Command:
    """Return the command of a study.

    Args:
        word: that of the command, which names the folder of the report.
        help: one line.
        measure: gets the arguments, the options, ``out``, the folder for the report (None: none is
            wanted), and ``html``, whether a page is wanted. It writes the report and returns it;
            None where another process prints it.
        options: the struct of its flags.
        arguments: argparse's keywords for each argument that is no flag.
        names: fields whose flag has another name.
        printed: the fields that ``--json`` prints; all of them if empty.
        output: the flags of the report.
        description: what the command does, for its own help.
    """

    def run(*values: Any) -> int:
        *places, chosen, writing = values
        out = writing.folder(word)
        report = measure(*places, chosen, out=out, html=writing.html)
        if report is None:
            return 0
        if writing.json:
            print_json({name: getattr(report, name) for name in printed} if printed else report)
        else:
            from fuelrail.bench.report.console import (
                print_report,
                report_console,
            )

            console = report_console()
            print_report(report, console)
            if out is not None:
                console.print(
                    "\nwritten: " + ", ".join(map(str, report_files(out, html=writing.html)))
                )
        return exit_code(report) if isinstance(report, ReportHeader) else 0

    return command(
        help,
        run,
        arguments=arguments,
        options=(options, output),
        names=names,
        description=description,
    )


def train(
    dataset: str,
    options: TrainOptions,
    *,
    out: Path,
    html: bool,
) -> Report | None:
    """Measure a run, and say where its trace is."""
    report = bench_train(dataset, options, out=out, html=html)
    if options.trace and report is not None:
        sys.stderr.write(f"written: {out / TRACE_JSON}; open it in ui.perfetto.dev\n")
    return report


def write_plan(
    scenario: str | None,
    options: PlanOptions,
    *,
    out: Path | None,
    html: bool,
) -> PlanReport:
    """Plan, and write the plan's report and launch file."""
    if out is not None:
        prepare_folder(out, html=html)
    report = plan(scenario, options)
    if out is not None:
        write_report(report, out, html=html)
    if report.recipe is not None:
        publish(
            (out or Path()) / FILES[options.recipe or ""],
            report.recipe.encode(),
        )
    return report


STUDIES = {
    "train": study(
        "train",
        "train a model on all ranks and measure how busy the accelerators were",
        train,
        options=TrainOptions,
        printed=("cut_off", "window", "figures", "checkpoints", "warnings"),
        description="Trains a model, divided over the ranks as --strategy or --mesh says, and "
        "writes report.json, report.md and report.html: occupancy, the time of each phase of the "
        "step, the loader's stages, throughput.",
    ),
    "loader": study(
        "loader",
        "measure how fast a dataset can be loaded, stage by stage, and what limits it",
        bench_loader,
        options=LoaderOptions,
        printed=("cut_off", "figures", "too_short", "warnings"),
        description="Runs the loader at full speed, each of its stages alone, and this machine's "
        "limits on the same bytes, all from the page cache. Reports rates, CPU time, the time to "
        "the first batch, and the bottleneck of the loader.",
    ),
    "scale": study(
        "scale",
        "measure weak and strong scaling on emulated accelerators",
        scale,
        options=ScaleOptions,
        description="Trains with 1, 2, 4 ranks of this host on emulated accelerators: with a fixed "
        "batch per rank (weak scaling) and with a fixed global batch (strong scaling). "
        "`fuelrail plan` predicts scaling over a cluster.",
    ),
    "diagnose": study(
        "diagnose",
        (
            "find the bottleneck of a training run by switching off one part at a time, and try "
            "settings that may help"
        ),
        diagnose,
        options=DiagnoseOptions,
        description="Repeats `bench train` with one part left out at a time: loading, storage, "
        "decompression, decoding, the copy, the all-reduce. The differences name the "
        "bottleneck and the speed-up without it. Writes report.json, report.md and "
        "report.html. Takes the arguments of `bench train`, for each run.",
    ),
    "comm": study(
        "comm",
        (
            "measure collectives by size and axis of the mesh, and write a cluster file for "
            "`fuelrail plan`"
        ),
        run_comm,
        options=CommOptions,
        arguments={},
        description="Times all-reduce, all-gather, reduce-scatter and send/receive between ranks "
        "of this host; inside torchrun (torchrun ... --no-python fuelrail bench comm) between "
        "the ranks of its job. Bus bandwidths are nccl-tests'.",
    ),
}
"""The words of ``fuelrail bench``."""

COMMANDS = {
    "plan": study(
        "plan",
        "say what fits, how fast it trains, what it costs, and whether the data keeps up",
        write_plan,
        options=PlanOptions,
        arguments={
            "scenario": {
                "metavar": "SCENARIO",
                "nargs": "?",
                "help": "model, cluster and batch: a name that `fuelrail presets` lists, or a YAML "
                "file (default: what --model, --cluster and --global-batch say)",
            }
        },
        output=PlanOutput,
        description="Predicts, without training: the simplest way to divide the model that fits "
        "the cluster, its step time, rate and cost, and whether storage and decoding keep up. "
        "Flags replace what the scenario says.",
    )
}
