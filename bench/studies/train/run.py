"""A measured training run: from options to the ranks, and from their records to a report."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fuelrail.bench.measure.machine import (
    CpuUse,
    CpuWatch,
    MachineFacts,
    machine_facts,
)
from fuelrail.bench.measure.nvml import GpuUse, NvmlWatch
from fuelrail.bench.measure.processes import WAS_INTERRUPTED
from fuelrail.bench.measure.records import RankLog, rank_path, read_rank
from fuelrail.bench.ranks.launch import Outcome, run_ranks
from fuelrail.bench.report.files import TRACE_JSON, merge_traces, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.train.report import Report, build_report
from fuelrail.bench.studies.train.settings import (
    RECORDS,
    RunPlan,
    TrainOptions,
    ask,
)
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.runtime.progress import Progress
from fuelrail.pipeline.settings import make_options

_SETTINGS_FILE = "settings.json"
_LOG_FILE = "ranks.log"


def bench_train(
    dataset: str | os.PathLike[str],
    options: TrainOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # fields of TrainOptions
) -> Report | None:
    """Train a model on a dataset and report how busy the accelerators were.

    ``fuelrail.bench.bench_train("DATASET", ranks=2, steps=100)`` takes the fields of
    :class:`TrainOptions` as keywords. ``out`` is a folder for report.json, report.md and (with
    ``html``) report.html; None: nothing is written. A run that ends early is reported as partial
    (``cut_off``), also after Ctrl+C. Raises ConfigError, DatasetErrors, and FuelrailError where no
    step was made.

    Under torchrun, on several hosts too, the processes are the ranks; all but the first return
    None.
    """
    options = make_options(TrainOptions, options, changes)
    in_world = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    is_first = not in_world or os.environ["RANK"] == "0"
    if in_world:
        world = int(os.environ["WORLD_SIZE"])
        if options.ranks not in (1, world) or options.trace:
            raise ConfigError(
                f"this is one of WORLD_SIZE={world} processes of torchrun, which are the "
                "ranks of the run: leave out --ranks and --trace"
            )
        options = msgspec.structs.replace(options, ranks=world)
    if options.trace and out is None:
        raise ConfigError("trace=True writes a file: give out=FOLDER")
    with output_folder(out if is_first else None) as folder:
        run = ask(dataset, options, folder / RECORDS)
        prepare_folder(folder, html=html and out is not None and is_first)
        report = None
        if not in_world:
            report = measure_all([run]).reports[0]
        else:
            # Takes seconds: torch.
            from fuelrail.bench.studies.train.worker import run_in_world

            _prepare(run)
            machine = machine_facts()
            watch = CpuWatch()
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            with NvmlWatch(local if run.settings.accelerator == "cuda" else 0) as gpus:
                run_in_world(run.settings)
            if is_first:
                report = _report(
                    run,
                    machine=machine,
                    outcome=Outcome(0, False, []),
                    cpu=watch.use(),
                    gpus=gpus.use(),
                )
        if report is not None and out is not None:
            write_report(report, folder, html=html)
        if options.trace:
            traces = run.settings.traces
            merge_traces(traces, folder / TRACE_JSON)
            shutil.rmtree(traces, ignore_errors=True)
    return report


class RunReports(NamedTuple):
    """The reports of runs that were made one after the other.

    ``cut_off`` says why reports are missing, or why the last one is partial.
    """

    reports: list[Report]
    cut_off: str | None


def measure_all(runs: Sequence[RunPlan]) -> RunReports:
    """Make several runs one after the other in the same processes, and return a report of each.

    The folder of the first one's records holds the ranks' log. A run that is cut off is reported
    too, as partial, if it made a step; later runs are left out. Raises KeyboardInterrupt or
    FuelrailError where none made one. The use of the CPUs is reported for all runs together.
    """
    for run in runs:
        _prepare(run)
    first = runs[0].settings
    settings_file = Path(first.records) / _SETTINGS_FILE
    settings_file.write_bytes(msgspec.json.encode([run.settings for run in runs]))
    machine = machine_facts()
    watch = CpuWatch()
    with NvmlWatch(first.ranks if first.accelerator == "cuda" else 0) as gpus:
        program = ["fuelrail.bench.studies.train.worker", str(settings_file)]
        ranks_text = f"{first.ranks} rank{'s' if first.ranks > 1 else ''}"
        with Progress(f"starting {ranks_text}") as progress:

            def show_progress() -> None:
                if not progress.due():
                    return
                files = [rank_path(Path(run.settings.records), 0) for run in runs]
                files = [file for file in files if file.exists()]
                number = max(1, len(files))
                settings = runs[number - 1].settings
                done = len(read_rank(files[-1]).steps) if files else 0
                text = ranks_text
                if len(runs) > 1:
                    text = f"run {number} of {len(runs)}, {text}"
                if settings.leave_out:
                    text += f" without {' and '.join(settings.leave_out)}"
                text += f": step {done}"
                share = 0.0
                if settings.steps:
                    text += f" of {settings.steps}"
                    share = (number - 1 + done / settings.steps) / len(runs)
                progress.update(text, share)

            outcome = run_ranks(
                program,
                first.ranks,
                settings_file.with_name(_LOG_FILE),
                show_progress,
            )
    cpu = watch.use()
    reports: list[Report] = []
    cut_off = None
    for run in runs:
        try:
            report = _report(run, machine=machine, outcome=outcome, cpu=cpu, gpus=gpus.use())
        except (FuelrailError, KeyboardInterrupt) as error:
            if not reports:
                raise
            cut_off = str(error) or WAS_INTERRUPTED
            break
        if gpus.reason is not None:
            warning = f"No facts of the GPUs from NVML: {gpus.reason}."
            warnings = [*report.warnings, warning]
            report = msgspec.structs.replace(report, warnings=warnings)
        reports.append(report)
        cut_off = report.cut_off
        if cut_off is not None:
            break
    return RunReports(reports, cut_off)


def _report(
    run: RunPlan,
    machine: MachineFacts,
    outcome: Outcome,
    cpu: CpuUse | None,
    gpus: list[GpuUse] | None,
) -> Report:
    """Return the report of the ranks' records; raise FuelrailError, or KeyboardInterrupt,
    without any step.
    """
    records = Path(run.settings.records)
    logs = [read_rank(rank_path(records, rank)) for rank in range(run.settings.ranks)]
    # Whole even if what came after it was not: the next run on the same ranks, or the ranks' end.
    complete = all(log.end is not None for log in logs)
    cut_off = None if complete else why_cut_off(outcome, logs)
    if cut_off is not None and not any(log.steps for log in logs):
        if outcome.interrupted:
            raise KeyboardInterrupt
        raise FuelrailError(f"no step was run: {cut_off}")
    return build_report(
        run.settings,
        logs,
        machine=machine,
        dataset=run.dataset,
        cut_off=cut_off,
        cpu=cpu,
        gpus=gpus,
        interrupted=outcome.interrupted,
    )


def _prepare(run: RunPlan) -> None:
    """Make the folder of the ranks' records; those of an earlier run must not be taken for this
    run's.
    """
    records = Path(run.settings.records)
    try:
        if records.exists():
            shutil.rmtree(records)
        records.mkdir()
    except OSError as error:
        raise ConfigError(
            f"folder '{records.parent}' cannot be written: {error.strerror}; choose another one"
        ) from error


def why_cut_off(outcome: Outcome, logs: Sequence[RankLog]) -> str | None:
    """Return one sentence on why a run ended early, or None: the first cause, not the later
    faults of other ranks.
    """
    if outcome.interrupted:
        return WAS_INTERRUPTED
    if outcome.exit_code == 0:
        return None
    log_place = f"records/{_LOG_FILE} beside the report"
    if any(log.failure is not None and log.failure.kind == "timed out" for log in logs):
        silent = [rank for rank, log in enumerate(logs) if log.failure is None and log.end is None]
        if silent:
            done = ", ".join(str(len(logs[rank].steps)) for rank in silent)
            return (
                f"rank {', '.join(map(str, silent))} did not answer within the time limit "
                f"(timeout_s), after {done} steps; their output is in {log_place}"
            )
    # One that a signal took left no word; SIGTERM is how the launcher ends the ranks beside it.
    for exit_ in outcome.failed:
        if exit_.exit_code < 0 and exit_.exit_code != -signal.SIGTERM:
            name = signal.Signals(-exit_.exit_code).name
            hint = "; the system may be out of memory" if name == "SIGKILL" else ""
            num_steps = len(logs[exit_.rank].steps)
            return f"rank {exit_.rank} was ended by {name} after {num_steps} steps{hint}"
    failures = [(log.failure, rank) for rank, log in enumerate(logs) if log.failure is not None]
    if failures:
        failure, rank = min(
            failures,
            key=lambda entry: (entry[0].kind != "refused", entry[0].at_ns),
        )
        message = f"rank {rank}: {failure.message}"
        if failure.kind == "refused":
            return message
        return f"{message} (the ranks' output is in {log_place})"
    ended = ", ".join(str(rank) for rank, log in enumerate(logs) if log.end is None)
    return (
        f"rank {ended or 'unknown'} ended early with exit code {outcome.exit_code}; "
        f"their output is in {log_place}"
    )
