"""Counterfactual runs: a baseline, and the same training run with one part left out at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fuelrail.bench.measure.occupancy import MIN_MEASURED_STEPS
from fuelrail.bench.measure.processes import NOTHING_MEASURED, WAS_INTERRUPTED
from fuelrail.bench.report.files import created_now, prepare_folder
from fuelrail.bench.report.options import output_folder
from fuelrail.bench.report.page import write_report
from fuelrail.bench.studies.diagnose.judge import (
    Counterfactual,
    Diagnosis,
    Round,
    counterfactual,
    find_bound,
)
from fuelrail.bench.studies.diagnose.report import (
    SCHEMA,
    VERSION,
    DiagnoseReport,
    Suggestion,
    suggestions,
)
from fuelrail.bench.studies.train.run import measure_all
from fuelrail.bench.studies.train.settings import (
    RECORDS,
    LeaveOut,
    RunPlan,
    TrainOptions,
    ask,
)
from fuelrail.pipeline.errors import ConfigError, FuelrailError
from fuelrail.pipeline.settings import Positive, flag, make_options
from fuelrail.pipeline.storage.filesystem import is_url

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.report import Report

_AS_IT_IS = "as-it-is"
_REPEAT = "as-it-is-again"


class DiagnoseOptions(TrainOptions, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.diagnose`: those of each training run, and what to do with the
    result.
    """

    trace: bool = False  # no flags here: diagnose chooses itself what to leave out
    leave_out: tuple[LeaveOut, ...] = ()
    apply: Annotated[bool, flag("try the settings that may help, and report their effect")] = False
    max_rounds: Annotated[
        Positive,
        flag("maximum number of rounds; all runs are repeated while noise hides their differences"),
    ] = 5


class _CutOff(Exception):  # noqa: N818 - a reason to stop, no error of the program
    """A run, or one after it, ended early."""

    def __init__(self, reason: str, *, interrupted: bool) -> None:
        super().__init__(reason)
        self.interrupted = interrupted


def diagnose(
    dataset: str | os.PathLike[str],
    options: DiagnoseOptions | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    html: bool = True,
    **changes: Any,  # fields of DiagnoseOptions
) -> DiagnoseReport:
    """Find the bottleneck of a training run by leaving out one part at a time.

    ``fuelrail.bench.diagnose("DATASET", steps=100)`` takes the fields of
    :class:`DiagnoseOptions` as keywords.

    ``out`` is a folder for the report and for those of the runs; None: nothing is
    written. Runs that end early make the report partial (``cut_off``), also after Ctrl+C. Raises
    ConfigError, DatasetErrors, and FuelrailError where a run is too short to show anything.
    """
    options = make_options(DiagnoseOptions, options, changes)
    if options.leave_out or options.trace:
        raise ConfigError(
            "leave_out and trace are for `train`: diagnose chooses itself what to leave out"
        )
    num_measured = None if options.steps is None else options.steps - options.warmup
    if num_measured is not None and num_measured < MIN_MEASURED_STEPS:
        raise ConfigError(
            f"{options.steps} steps - {options.warmup} warm-up = {num_measured} measured; at least "
            f"{MIN_MEASURED_STEPS} are needed: use more --steps"
        )
    with output_folder(out) as folder:
        return _Examination(dataset, options, folder, html=html and out is not None).run()


class _Examination:
    """The runs of one diagnosis; ``made`` holds the reports of those that are complete."""

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        options: DiagnoseOptions,
        out: Path,
        *,
        html: bool,
    ) -> None:
        self._dataset = dataset
        self._options = options
        self._out = out
        self._html = html
        self._made: dict[str, Report] = {}
        self._tried_against: float | None = None
        self._settings = self._run(_AS_IT_IS).settings
        # The copy and the launches are measured without a run of their own.
        parts: list[LeaveOut] = [
            "loading",
            "storage",
            "decompression",
            "decode",
        ]
        if self._settings.transform is not None:
            parts.append("transform")
        if options.ranks > 1:
            parts.append("all-reduce")
        self._left_out = {f"without-{name}": name for name in parts}

    def run(self) -> DiagnoseReport:
        """Make the runs, judge them and write the report; see :func:`diagnose`."""
        first_round = self._round("")  # checks all settings before the first run
        prepare_folder(self._out, html=self._html, modules=("scipy",))
        diagnosis = None
        tried = None
        cut_off = None
        interrupted = False
        try:
            self._measure(first_round)
            num_rounds = 1
            diagnosis = self._judge(num_rounds)
            while diagnosis.bound == "undecided" and num_rounds < self._options.max_rounds:
                num_rounds += 1
                self._measure(self._round(_prefix(num_rounds)))
                diagnosis = self._judge(num_rounds)
            if self._options.apply:
                tried = self._try(diagnosis)
        except _CutOff as error:
            if not self._made:
                if error.interrupted:
                    raise KeyboardInterrupt(NOTHING_MEASURED) from error
                raise FuelrailError(f"no run is complete: {error}") from error
            cut_off = str(error)
            interrupted = error.interrupted
        except KeyboardInterrupt:
            if not self._made:
                raise KeyboardInterrupt(NOTHING_MEASURED) from None
            cut_off = WAS_INTERRUPTED
            interrupted = True
        base = self._made[_AS_IT_IS]
        # A cold cache is warm now, so trials are compared with the very first run.
        noise = 0.0 if diagnosis is None or diagnosis.bound == "cold cache" else diagnosis.noise
        report = DiagnoseReport(
            schema=SCHEMA,
            version=VERSION,
            created=created_now(),
            cut_off=cut_off,
            interrupted=interrupted,
            machine=base.machine,
            dataset=base.dataset,
            accelerator=base.accelerator,
            options=base.options,
            num_ranks=base.num_ranks,
            diagnosis=diagnosis,
            tried=tried,
            tried_noise=noise,
            tried_against=self._tried_against,
            runs=list(self._made),
            warnings=base.warnings,
            disturbed=next(
                (
                    report_made.disturbed
                    for report_made in self._made.values()
                    if report_made.disturbed is not None
                ),
                None,
            ),
        )
        write_report(report, self._out, html=self._html)
        return report

    def _run(self, name: str, **changes: object) -> RunPlan:
        fields = {field: getattr(self._options, field) for field in TrainOptions.__struct_fields__}
        options = TrainOptions(**fields | changes)
        return ask(self._dataset, options, self._out / name / RECORDS)

    def _round(self, prefix: str) -> dict[str, RunPlan]:
        plan: dict[str, tuple[LeaveOut, ...]] = {
            _AS_IT_IS: (),
            **{name: (part,) for name, part in self._left_out.items()},
            _REPEAT: (),
        }
        return {
            prefix + name: self._run(prefix + name, leave_out=part) for name, part in plan.items()
        }

    def _judge(self, num_rounds: int) -> Diagnosis:
        rounds = [
            Round(
                self._made[prefix + _AS_IT_IS],
                {part: self._made[prefix + name] for name, part in self._left_out.items()},
                self._made[prefix + _REPEAT],
            )
            for prefix in map(_prefix, range(1, num_rounds + 1))
        ]
        return find_bound(rounds, is_remote=is_url(self._dataset))

    def _measure(self, runs: dict[str, RunPlan]) -> None:
        """Make the runs and add their reports to those made, each written into its folder;
        raises _CutOff.
        """
        for name in runs:
            prepare_folder(self._out / name, html=self._html)
        reports, cut_off = measure_all(list(runs.values()))
        interrupted = reports[0].interrupted
        for name, report in zip(runs, reports, strict=False):
            write_report(report, self._out / name, html=self._html)
            if report.cut_off is not None:
                raise _CutOff(
                    f"the run '{name}': {report.cut_off}",
                    interrupted=interrupted,
                )
            if report.figures is None:
                raise FuelrailError(f"the run '{name}' is too short: {report.window.too_short}")
            self._made[name] = report
        if cut_off is not None:
            raise _CutOff(
                f"the runs after '{list(runs)[len(reports) - 1]}': {cut_off}",
                interrupted=interrupted,
            )

    def _try(self, diagnosis: Diagnosis) -> list[Counterfactual]:
        """Run what may help, after one more unchanged run: the machine may have drifted since
        the first.
        """
        facts = self._made[_AS_IT_IS].dataset
        ideas = suggestions(
            diagnosis.bound,
            self._settings,
            num_shards=facts.num_shards,
            num_ranks=self._options.ranks,
            out=self._out,
            gain=diagnosis.expected_gain,
        )
        if not ideas:
            return []
        plan: list[tuple[str, Suggestion]] = []
        for number, idea in enumerate(ideas):
            plan += [
                (f"trial-{number}{'-first-time' if first else ''}", idea)
                for first in ((1, 0) if idea.twice else (0,))
            ]
        runs = {"before-trials": self._run("before-trials")}
        self._measure(runs | {name: self._run(name, **idea.changes) for name, idea in plan})
        base = self._made[_AS_IT_IS if diagnosis.bound == "cold cache" else "before-trials"]
        if base.figures is not None:
            self._tried_against = base.figures.throughput.samples_per_s
        return [
            counterfactual(idea.options, base, self._made[f"trial-{number}"])
            for number, idea in enumerate(ideas)
        ]


def _prefix(number: int) -> str:
    """Return the start of the folders' names in a round; the first round's have none."""
    return "" if number == 1 else f"round-{number}-"
