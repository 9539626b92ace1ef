"""A measured training run: from options to the ranks, and from their records to a report."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fuelrail.bench.measure.accelerator import DEFAULT_PROFILE, AcceleratorProfile, load_profile, profile_names
from fuelrail.bench.measure.machine import (
    CpuUse,
    CpuWatch,
    DatasetFacts,
    MachineFacts,
    dataset_facts,
    installed_gpus,
    machine_facts,
)
from fuelrail.bench.measure.nvml import GpuUse, NvmlWatch
from fuelrail.bench.measure.records import RankLog, rank_path, read_rank
from fuelrail.bench.ranks.launch import Outcome, run_ranks
from fuelrail.bench.report.files import REPORT_JSON, TRACE_JSON, merge_traces, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.report.progress import Progress
from fuelrail.bench.studies.train.convergence import compare_losses, global_batch, time_to
from fuelrail.bench.studies.train.report import Report, build_report, load_report
from fuelrail.bench.studies.train.settings import TrainOptions, TrainSettings
from fuelrail.bench.trainer.distill.settings import DISTILL, weights_of
from fuelrail.bench.trainer.models.settings import MODELS
from fuelrail.bench.trainer.strategies.settings import check_fits, degrees_of
from fuelrail.loaders.config import Transforms
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.settings import as_settings, make_options
from fuelrail.pipeline.storage.filesystem import filesystem, is_url

_SETTINGS_FILE = "settings.json"
_LOG_FILE = "ranks.log"
_RECORDS = "records"
_DEFAULT_STEPS = 60


def train(
    dataset: str | os.PathLike[str],
    options: TrainOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # noqa: ANN401 - fields of TrainOptions
) -> Report:
    """Train a small multi-camera model on a dataset and report how busy the accelerators were.

    ``fuelrail.train("DATASET", ranks=2, steps=100)`` takes the fields of :class:`TrainOptions` as keywords. ``out`` is
    a folder for report.json, report.md and (with ``html``) report.html; None: nothing is written. A run that ends early
    is reported as partial (``cut_off``), also after Ctrl+C. Raises ConfigError, DatasetErrors, and FuelrailError where
    no step was made.
    """
    return run_training(dataset, make_options(TrainOptions, options, changes), out, html=html).reports[0]


def run_training(
    dataset: str | os.PathLike[str], options: TrainOptions, out: str | os.PathLike[str] | None, *, html: bool
) -> Made:
    """Make one run and write its report into ``out``, if given; see :func:`train`."""
    if (world := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"this is one of WORLD_SIZE={world} processes; `bench train` starts all ranks itself, on one host: run it "
            "once, with --ranks; for several hosts start a script of your own as configs/recipes do"
        )
    if options.trace and out is None:
        raise ConfigError("trace=True writes a file: give out=FOLDER")
    other = None if options.against is None else load_report(_report_file(options.against))
    with output_folder(out) as folder:
        runs = [TrainRun(dataset, options, folder / _RECORDS)]
        if options.check_batch is not None:
            runs.append(TrainRun(dataset, _larger_batch(options, options.check_batch), folder / f"{_RECORDS}-larger"))
        prepare_folder(folder, html=html and out is not None)
        made = _compared(measure_all(runs), options, other)
        if out is not None:
            write_report(made.reports[0], folder, html=html)
        if options.trace:
            traces = runs[0].settings.traces
            merge_traces(traces, folder / TRACE_JSON)
            shutil.rmtree(traces, ignore_errors=True)
    return made


def _report_file(place: str) -> Path:
    path = Path(place)
    return path / REPORT_JSON if path.is_dir() else path


def _larger_batch(options: TrainOptions, batch_size: int) -> TrainOptions:
    """The same number of samples in steps of another size; the learning rate is scaled with it (Goyal et al. 2017).

    With ``base_batch`` the ranks scale the rate themselves.
    """
    if options.checkpoint is not None or options.against is not None:
        raise ConfigError("check_batch makes two runs of its own: leave out checkpoint and against")
    if batch_size <= options.batch_size:
        raise ConfigError(
            f"check_batch={batch_size} must be above batch_size={options.batch_size}, which it is compared with"
        )
    scale = batch_size / options.batch_size
    steps = None if options.epochs is not None else int((options.steps or _DEFAULT_STEPS) / scale)
    if steps == 0:
        raise ConfigError(f"steps={options.steps} are less than one step of check_batch={batch_size}: use more steps")
    rate = options.learning_rate * (scale if options.base_batch is None else 1)
    return msgspec.structs.replace(options, batch_size=batch_size, steps=steps, learning_rate=rate)


def _compared(made: Made, options: TrainOptions, other: Report | None) -> Made:
    """Add to the last report what is said on its loss: compared with another run's, and with a target."""
    report, name = made.reports[-1], options.against
    if len(made.reports) > 1:
        other, name = made.reports[0], f"the run with batch size {options.batch_size}"
    batch = global_batch(report.options, report.num_ranks)
    if other is not None:
        sides = (report.series, batch, other.series, global_batch(other.options, other.num_ranks))
        report = msgspec.structs.replace(report, against=compare_losses(*sides, str(name)))
    if options.target_loss is not None:
        target = time_to(options.target_loss, report.series, batch)
        report = msgspec.structs.replace(report, target=target)
    return made._replace(reports=[report])


class TrainRun:
    """A training run whose options are checked; :func:`measure_all` runs it.

    ``records`` is the folder for the ranks' records. Raises ConfigError and DatasetErrors.
    """

    def __init__(self, dataset: str | os.PathLike[str], options: TrainOptions, records: Path) -> None:
        self._dataset = dataset_facts(open_dataset(dataset), options.split)
        self.settings = _settings(os.fspath(dataset), options, records)
        self.num_ranks = options.ranks
        self._price = options.price_per_gpu_hour
        self.records = records
        _check_world(self.num_ranks, self.settings, self._dataset)
        check_decoder(self.settings)

    def report(self, machine: MachineFacts, outcome: Outcome, cpu: CpuUse | None, gpus: list[GpuUse] | None) -> Report:
        """Return the report of the ranks' records; raises FuelrailError, or KeyboardInterrupt, without any step."""
        logs = [read_rank(rank_path(self.records, rank)) for rank in range(self.num_ranks)]
        # Whole even if what came after it was not: the next run on the same ranks, or the ranks' end.
        complete = all(log.end is not None for log in logs)
        cut_off = None if complete else why_cut_off(outcome, logs)
        if cut_off is not None and not any(log.steps for log in logs):
            if outcome.interrupted:
                raise KeyboardInterrupt
            raise FuelrailError(f"no step was run: {cut_off}")
        return build_report(
            self.settings,
            logs,
            machine=machine,
            dataset=self._dataset,
            cut_off=cut_off,
            cpu=cpu,
            price_per_gpu_hour=self._price,
            gpus=gpus,
        )


class Made(NamedTuple):
    """The reports of runs that were made one after the other.

    ``cut_off`` says why reports are missing, or why the last one is partial; ``interrupted``: by Ctrl+C or SIGTERM.
    """

    reports: list[Report]
    cut_off: str | None
    interrupted: bool


def measure_all(runs: Sequence[TrainRun]) -> Made:
    """Make several runs one after the other in the same processes, and return a report of each.

    The folder of the first one's records holds the ranks' log. A run that is cut off is reported too, as partial, if
    it made a step; later runs are left out. Without any step, raises what :meth:`TrainRun.report`
    raises. The use of the CPUs is reported for all runs together.
    """
    for run in runs:
        _prepare(run.records)
    first = runs[0]
    settings_file = first.records / _SETTINGS_FILE
    settings_file.write_bytes(msgspec.json.encode([run.settings for run in runs]))
    machine = machine_facts()
    watch = CpuWatch()
    with NvmlWatch(first.num_ranks if first.settings.profile is None else 0) as gpus:
        outcome = _launch(first.num_ranks, runs, settings_file)
    cpu = watch.use()
    reports: list[Report] = []
    cut_off = None
    for run in runs:
        try:
            report = run.report(machine, outcome, cpu, gpus.use())
        except (FuelrailError, KeyboardInterrupt) as error:
            if not reports:
                raise
            cut_off = str(error) or "the run was interrupted"
            break
        if gpus.reason is not None:
            report = msgspec.structs.replace(
                report, warnings=[*report.warnings, f"No facts of the GPUs from NVML: {gpus.reason}."]
            )
        reports.append(report)
        cut_off = report.cut_off
        if cut_off is not None:
            break
    return Made(reports, cut_off, outcome.interrupted)


def _settings(dataset: str, options: TrainOptions, records: Path) -> TrainSettings:
    if options.steps is not None and options.epochs is not None:
        raise ConfigError(f"steps={options.steps} and epochs={options.epochs} exclude each other: give one of them")
    if options.transforms is not None:
        as_settings(options.transforms, Transforms, "transforms")  # refused before ranks are started
    profile = options.profile or _profile(options.accelerator)
    default = "stand-in" if degrees_of(options, options.ranks).pp == 1 else "bev-tiny"  # one layer cannot be cut
    changes: dict[str, Any] = {
        name: str(Path(place).absolute())
        for name in ("cache_dir", "transforms")
        if (place := getattr(options, name)) is not None
    }
    changes |= {
        "dataset": dataset if is_url(dataset) else str(Path(dataset).absolute()),
        "records": str(records.absolute()),
        "steps": _DEFAULT_STEPS if options.steps is None and options.epochs is None else options.steps,
        "precision": options.precision or ("fp32" if profile else "bf16"),
        "model": options.model or (default if profile else "base"),
        "profile": profile,
        "checkpoint": _checkpoint_place(options),
        **_teacher_places(options),
    }
    return TrainSettings(**{**msgspec.structs.asdict(options), **changes})


def _teacher_places(options: TrainOptions) -> dict[str, str | None]:
    """The places of teacher and layer as all ranks see them. Raises ConfigError."""
    places = {"teacher": options.teacher, "teacher_layer": options.teacher_layer}
    if set(places.values()) == {None}:
        given = {"distill": options.distill, "temperature": options.temperature}
        if lone := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{lone[0]}={given[lone[0]]} needs a teacher: give teacher or teacher_layer")
    elif None not in places.values():
        raise ConfigError(
            f"teacher={options.teacher} and teacher_layer={options.teacher_layer} exclude each other: give one of them"
        )
    weights_of(options.distill or DISTILL)
    return {
        name: place if place is None or is_url(place) else str(Path(place).absolute()) for name, place in places.items()
    }


def _checkpoint_place(options: TrainOptions) -> str | None:
    """The place of checkpoints as all ranks see it. Raises ConfigError where it cannot be one."""
    if options.memory and options.warmup < 3:
        raise ConfigError(f"memory=True follows the third warm-up step: warmup={options.warmup} must be 3 or more")
    place = options.checkpoint
    if place is None:
        return None
    if options.leave_out:
        raise ConfigError(
            f"checkpoint={place!r} and leave_out={options.leave_out} exclude each other: a run without a part measures "
            "what that costs, it does not train"
        )
    if is_url(place):
        filesystem(place)
        if place.startswith("memory:"):
            raise ConfigError(f"checkpoint={place!r} would end with each rank's process; use a folder or another URL")
        return place
    folder = Path(place.removeprefix("file://")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--checkpoint '{place}' cannot be a folder: {error.strerror}; choose another one") from error
    return str(folder)


def _profile(choice: str) -> AcceleratorProfile | None:
    """Return the profile to emulate, or None for CUDA."""
    if choice == "auto":
        return None if installed_gpus() else load_profile(DEFAULT_PROFILE)
    if choice == "cuda":
        if not installed_gpus():
            raise ConfigError(
                "accelerator 'cuda' needs a GPU, and the NVIDIA driver shows no GPU here; use emulated:PROFILE"
            )
        return None
    kind, _, name = choice.partition(":")
    if kind != "emulated" or not name:
        raise ConfigError(
            f"accelerator {choice!r} must be auto, cuda or emulated:PROFILE; profiles: {', '.join(profile_names())}"
        )
    return load_profile(name)


def check_decoder(settings: TrainSettings) -> None:
    """Refuse a decoder that the ranks' loaders would refuse, before ranks are started; without torch where possible.

    Raises ConfigError.
    """
    if settings.decoder == "auto":
        return
    from fuelrail.loaders.decode import make_decoder

    make_decoder(settings.decoder)


def _check_world(num_ranks: int, settings: TrainSettings, dataset: DatasetFacts) -> None:
    degrees = degrees_of(settings, num_ranks)
    check_fits(settings, degrees, MODELS[settings.model], settings.batch_size)
    if degrees.composed and "all-reduce" in settings.leave_out:
        raise ConfigError(f"leave_out all-reduce needs whole models on each rank, and the mesh is {degrees}; use ddp")
    global_batch = degrees.data * settings.batch_size * settings.accumulation
    if dataset.num_samples < global_batch:
        raise ConfigError(
            f"split '{dataset.split}' has {dataset.num_samples} samples, one step takes {global_batch} = "
            f"{degrees.data} data-parallel ranks x {settings.batch_size} samples x {settings.accumulation} batches: "
            "use fewer ranks or smaller batches"
        )
    num_gpus = len(installed_gpus())
    if settings.profile is None and num_ranks > num_gpus:
        raise ConfigError(
            f"{num_ranks} ranks need a GPU each, and the NVIDIA driver shows {num_gpus} here; use fewer ranks"
        )


def _prepare(records: Path) -> None:
    """Make the folder of the ranks' records; those of an earlier run must not be taken for this run's."""
    try:
        if records.exists():
            shutil.rmtree(records)
        records.mkdir()
    except OSError as error:
        raise ConfigError(
            f"folder '{records.parent}' cannot be written: {error.strerror}; choose another one"
        ) from error


def _launch(num_ranks: int, runs: Sequence[TrainRun], settings_file: Path) -> Outcome:
    program = ["fuelrail.bench.studies.train.worker", str(settings_file)]
    what = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    with Progress(f"starting {what}") as progress:

        def show_progress() -> None:
            if not progress.due():
                return
            under_way = [run for run in runs if rank_path(run.records, 0).exists()] or runs[:1]
            settings = under_way[-1].settings
            done = len(read_rank(rank_path(under_way[-1].records, 0)).steps)
            target = f" of {settings.steps}" if settings.steps else ""
            without = f" without {' and '.join(settings.leave_out)}" if settings.leave_out else ""
            number = f"run {len(under_way)} of {len(runs)}, " if len(runs) > 1 else ""
            share = (len(under_way) - 1 + done / settings.steps) / len(runs) if settings.steps else 0.0
            progress.update(f"{number}{what}{without}: step {done}{target}", share)

        return run_ranks(program, num_ranks, settings_file.with_name(_LOG_FILE), show_progress)


def why_cut_off(outcome: Outcome, logs: Sequence[RankLog]) -> str | None:
    """One sentence on why a run ended early, or None: the first cause, not what the other ranks died of after it."""
    if outcome.interrupted:
        return "the run was interrupted"
    if outcome.exit_code == 0:
        return None
    log_hint = f"their output is in records/{_LOG_FILE} beside the report"
    if any(log.failure is not None and log.failure.kind == "timed out" for log in logs):
        silent = [rank for rank, log in enumerate(logs) if log.failure is None and log.end is None]
        if silent:
            done = ", ".join(str(len(logs[rank].steps)) for rank in silent)
            return (
                f"rank {', '.join(map(str, silent))} did not answer within the time limit (timeout_s), after "
                f"{done} steps; {log_hint}"
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
        failure, rank = min(failures, key=lambda entry: (entry[0].kind != "refused", entry[0].at_ns))
        message = f"rank {rank}: {failure.message}"
        return message if failure.kind == "refused" else f"{message} (the ranks' {log_hint[6:]})"
    ended = ", ".join(str(rank) for rank, log in enumerate(logs) if log.end is None)
    return f"rank {ended or 'unknown'} ended early with exit code {outcome.exit_code}; {log_hint}"
