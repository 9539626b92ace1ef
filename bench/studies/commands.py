"""``fuelrail bench WORD`` and ``fuelrail plan``: each study as a command with settings, a report,
its files and text.

What a study needs is imported when its command runs: torch and matplotlib take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fuelrail.bench.planner.scenario import PlanOptions
from fuelrail.bench.report.files import (
    TRACE_JSON,
    ReportHeader,
    exit_code,
    prepare_folder,
    publish,
    report_files,
)
from fuelrail.bench.report.options import OutputOptions, PlanOutput, add_dataset
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
from fuelrail.pipeline.cli import Command, add_flags, from_flags, print_json

if TYPE_CHECKING:
    import argparse

    import msgspec

    from fuelrail.bench.studies.plan.report import PlanReport
    from fuelrail.bench.studies.train.report import Report


class Study(NamedTuple):
    """One study as a command.

    ``make`` gets the argument, the options, the folder for the report (None: none is wanted) and
    whether a page is wanted. It writes the report and returns it; None where another process prints
    it. ``printed``: the fields that ``--json`` prints; all of them if empty.
    """

    help: str
    description: str
    options: type[msgspec.Struct]
    make: Callable[[Any, Any, Any, bool], Any]
    argument: Callable[[argparse.ArgumentParser], object] = add_dataset
    printed: tuple[str, ...] = ()
    output: type[OutputOptions] = OutputOptions


def study_command(word: str, study: Study) -> Command:
    """Return the command of a study."""

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.description = study.description
        study.argument(parser)
        add_flags(parser, study.options, names={"resume": "continue"})
        add_flags(parser, study.output)

    def run(arguments: argparse.Namespace) -> int:
        options = from_flags(arguments, study.options)
        output = from_flags(arguments, study.output)
        out = output.folder(word)
        report = study.make(arguments, options, out, output.html)
        if report is None:
            return 0
        if output.json:
            print_json(
                {name: getattr(report, name) for name in study.printed} if study.printed else report
            )
        else:
            from fuelrail.bench.report.console import (
                print_report,
                report_console,
            )

            console = report_console()
            print_report(report, console)
            if out is not None:
                console.print(
                    "\nwritten: " + ", ".join(map(str, report_files(out, html=output.html)))
                )
        return exit_code(report) if isinstance(report, ReportHeader) else 0

    return Command(study.help, configure, run)


def _train(
    arguments: argparse.Namespace, options: TrainOptions, out: Path, html: bool
) -> Report | None:
    report = bench_train(arguments.dataset, options, out=out, html=html)
    if options.trace and report is not None:
        sys.stderr.write(f"written: {out / TRACE_JSON}; open it in ui.perfetto.dev\n")
    return report


def _of_dataset(
    run: Callable[..., ReportHeader],
) -> Callable[[argparse.Namespace, Any, Path, bool], ReportHeader]:
    """Return the ``make`` of a study that takes the dataset, its options, ``out`` and ``html``."""
    return lambda arguments, options, out, html: run(arguments.dataset, options, out=out, html=html)


def _plan(
    arguments: argparse.Namespace,
    options: PlanOptions,
    out: Path | None,
    html: bool,
) -> PlanReport:
    if out is not None:
        prepare_folder(out, html=html)
    report = plan(arguments.scenario, options)
    if out is not None:
        write_report(report, out, html=html)
    if report.recipe is not None:
        publish(
            (out or Path()) / FILES[options.recipe or ""],
            report.recipe.encode(),
        )
    return report


STUDIES = {
    "train": Study(
        "train a model on all ranks and measure how busy the accelerators were",
        "Trains a model, divided over the ranks as --strategy or --mesh says, and writes "
        "report.json, report.md and report.html: occupancy, the time of each phase of the "
        "step, the loader's stages, throughput.",
        TrainOptions,
        _train,
        printed=("cut_off", "window", "figures", "checkpoints", "warnings"),
    ),
    "loader": Study(
        "measure how fast a dataset can be loaded, stage by stage, and what limits it",
        "Runs the loader at full speed, each of its stages alone, and this machine's limits "
        "on the same bytes, all from the page cache. Reports rates, CPU time, the time to "
        "the first batch, and the bottleneck of the loader.",
        LoaderOptions,
        _of_dataset(bench_loader),
        printed=("cut_off", "figures", "too_short", "warnings"),
    ),
    "scale": Study(
        "measure weak and strong scaling on emulated accelerators",
        "Trains with 1, 2, 4 ranks of this host on emulated accelerators: with a fixed "
        "batch per rank (weak scaling) and with a fixed global batch (strong scaling). "
        "`fuelrail plan` predicts scaling over a cluster.",
        ScaleOptions,
        _of_dataset(scale),
    ),
    "diagnose": Study(
        (
            "find the bottleneck of a training run by switching off one part at a time, and try "
            "settings that may help"
        ),
        "Repeats `bench train` with one part left out at a time: loading, storage, "
        "decompression, decoding, the copy, the all-reduce. The differences name the "
        "bottleneck and the speed-up without it. Writes report.json, report.md and "
        "report.html. Takes the arguments of `bench train`, for each run.",
        DiagnoseOptions,
        _of_dataset(diagnose),
    ),
    "comm": Study(
        help=(
            "measure collectives by size and axis of the mesh, and write a cluster file for "
            "`fuelrail plan`"
        ),
        description="Times all-reduce, all-gather, reduce-scatter and send/receive between ranks of "
        "this host; inside torchrun (torchrun ... --no-python fuelrail bench comm) between "
        "the ranks of its job. Bus bandwidths are nccl-tests'.",
        options=CommOptions,
        make=lambda _, options, out, html: run_comm(options, out, html=html),
        argument=lambda _: None,
    ),
}
"""The words of ``fuelrail bench``."""

_PLAN = Study(
    help="say what fits, how fast it trains, what it costs, and whether the data keeps up",
    description="Predicts, without training: the simplest way to divide the model that fits the "
    "cluster, its step time, rate and cost, and whether storage and decoding keep up. Flags "
    "replace what the scenario says.",
    options=PlanOptions,
    make=_plan,
    argument=lambda parser: parser.add_argument(
        "scenario",
        metavar="SCENARIO",
        nargs="?",
        help="model, cluster and batch: a name that `fuelrail presets` lists, or a YAML file "
        "(default: what --model, --cluster and --global-batch say)",
    ),
    output=PlanOutput,
)
COMMANDS = {"plan": study_command("plan", _PLAN)}
