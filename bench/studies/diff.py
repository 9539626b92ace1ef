"""``fuelrail bench diff``: two reports of one kind compared, beyond the noise of both, with an exit
code for CI.

A report has the fields ``schema`` and ``version``. Reading checks both, and the presence and type
of every field. The version is raised with any change of a field's name, type or meaning.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fuelrail.bench.measure.display import displayed_fields
from fuelrail.bench.report.console import print_table, report_console
from fuelrail.bench.report.files import (
    ReportHead,
    load_report_of,
    read_report,
)
from fuelrail.bench.report.options import command
from fuelrail.bench.studies.diagnose import report as diagnose_report
from fuelrail.bench.studies.diagnose.report import DiagnoseReport
from fuelrail.bench.studies.loader import report as loader_report
from fuelrail.bench.studies.loader.report import LoaderFigures, LoaderReport
from fuelrail.bench.studies.scale import report as scale_report
from fuelrail.bench.studies.scale.report import ScaleReport
from fuelrail.bench.studies.train import report as train_report
from fuelrail.bench.studies.train.report import Report, step_ratios
from fuelrail.bench.studies.watch import report as watch_report
from fuelrail.bench.studies.watch.report import WatchReport
from fuelrail.pipeline.cli import PrintOptions, print_json
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options

if TYPE_CHECKING:
    from fuelrail.bench.measure.rates import Interval
    from fuelrail.bench.studies.compare.report import CompareReport

    Comparable: TypeAlias = Report | LoaderReport | ScaleReport | CompareReport | WatchReport

COMPARE_ROOM = "fuelrail.bench.studies.compare"
FROM_CHECKOUT = (
    "`fuelrail bench compare` and `bench resume` are not in the installed package: clone the "
    "repository, run `pip install -e '.[bench,peers,view]'` in it, and repeat the command there"
)
_WORSE = 1


KINDS: dict[str, tuple[type[ReportHead], int]] = {
    train_report.SCHEMA: (Report, train_report.VERSION),
    loader_report.SCHEMA: (LoaderReport, loader_report.VERSION),
    scale_report.SCHEMA: (ScaleReport, scale_report.VERSION),
    diagnose_report.SCHEMA: (DiagnoseReport, diagnose_report.VERSION),
    watch_report.SCHEMA: (WatchReport, watch_report.VERSION),
}
"""The type and the version of each kind of report, by its schema."""
if find_spec(COMPARE_ROOM) is not None:
    from fuelrail.bench.studies.compare import report as compare_report

    KINDS[compare_report.SCHEMA] = (
        compare_report.CompareReport,
        compare_report.VERSION,
    )


class DiffOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.bench.diff`, and the flags of ``fuelrail bench diff``."""

    threshold: Annotated[
        float, msgspec.Meta(ge=0, lt=1), flag("tolerated slowdown (0.02 = 2 %)")
    ] = 0.02
    other_dataset: Annotated[
        bool,
        flag("compare reports of different datasets or splits; refused otherwise"),
    ] = False


class Change(NamedTuple):
    """One figure before and after; ``ratio`` is after / before, with an interval that takes both
    sides' noise in.

    ``higher_is_better`` says which way is which. The change is real when the interval leaves out 1.
    With fewer than three repeats on a side there is no interval (None), and no change counts as
    real.
    """

    name: str
    before: float
    after: float
    ratio_low: float | None
    ratio_high: float | None
    higher_is_better: bool

    @property
    def ratio(self) -> float:
        """After over before."""
        return self.after / self.before

    @property
    def is_real(self) -> bool:
        """Whether noise does not explain it."""
        return (
            self.ratio_low is not None
            and self.ratio_high is not None
            and not self.ratio_low <= 1 <= self.ratio_high
        )

    def is_worse(self, threshold: float) -> bool:
        """Return whether it is real and a loss of more than ``threshold`` (0.02 for 2 %)."""
        loss = 1 - self.ratio if self.higher_is_better else 1 - 1 / self.ratio
        return self.is_real and loss > threshold


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two reports compared.

    ``worse``: names of the figures that are worse beyond noise and threshold. ``differences``: what
    else differs, such as the machine or an option, one line each.
    """

    changes: list[Change]
    worse: list[str]
    differences: list[str]


def diff(
    before: Comparable | str | os.PathLike[str],
    after: Comparable | str | os.PathLike[str],
    options: DiffOptions | None = None,
    **changes: Any,  # fields of DiffOptions
) -> Comparison:
    """Compare two reports of one kind, given as reports, files or folders.

    ``fuelrail.bench.diff("A", "B", threshold=0.05)`` takes the fields of :class:`DiffOptions` as
    keywords. Raises ConfigError for reports that cannot be compared.
    """
    options = make_options(DiffOptions, options, changes)
    old = _load(before)
    new = _load(after)
    # A watch of anybody's trainer knows no dataset.
    sides = [side.dataset for side in (old, new) if not isinstance(side, WatchReport)]
    splits = {(side.fingerprint, side.split) for side in sides}
    if len(splits) > 1 and not options.other_dataset:
        sides_text = " and ".join(
            f"'{side.name}', split '{side.split}' ({side.fingerprint[:12]})" for side in sides
        )
        raise ConfigError(
            f"the reports are of different data: {sides_text}; compare reports of one "
            "dataset, or run with --other-dataset"
        )
    rows = compare(old, new)
    # Parts of a watched step explain its time, and may grow at each other's cost.
    judged = rows[:1] if isinstance(new, WatchReport) else rows
    worse = [change.name for change in judged if change.is_worse(options.threshold)]
    return Comparison(changes=rows, worse=worse, differences=differences(old, new))


def _load(report: Comparable | str | os.PathLike[str]) -> Comparable:
    return report if isinstance(report, msgspec.Struct) else load_comparable(Path(report))


def load_comparable(path: Path) -> Comparable:
    """Read a report that can be compared with another of its kind.

    Raises ConfigError for other files, other versions, reports without figures, and diagnoses.
    """
    raw = read_report(path)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    kind = KINDS.get(schema) if isinstance(schema, str) else None
    if kind is None:
        hint = f"; {FROM_CHECKOUT}" if schema == "fuelrail-bench-compare" else ""
        raise ConfigError(f"'{path}' has schema {schema!r}; known are {', '.join(KINDS)}{hint}")
    report_type, version = kind
    report: Any = load_report_of(path, report_type, str(schema), version)
    if isinstance(report, DiagnoseReport):
        raise ConfigError(
            f"'{path}' is a diagnosis: compare the reports of its runs, in the folders beside it"
        )
    has_figures = True
    if isinstance(report, WatchReport):
        has_figures = bool(report.times)
    elif isinstance(report, Report | LoaderReport):
        has_figures = report.figures is not None
    if not has_figures:
        raise ConfigError(f"report '{path}' has no figures to compare: its run was too short")
    return report  # type: ignore[no-any-return]


def compare(before: Comparable, after: Comparable) -> list[Change]:
    """Return the changes of two reports that have figures.

    Raises ConfigError where they are of different kinds, have no figures of the same thing, or one
    that is not above 0.
    """
    if before.schema != after.schema:
        raise ConfigError(
            f"reports of different kinds cannot be compared: {before.schema} and {after.schema}"
        )
    rows = []
    if isinstance(before, Report):
        assert isinstance(after, Report)
        assert before.figures is not None
        assert after.figures is not None
        ratios = step_ratios(before, after)
        old_figures = before.figures
        new_figures = after.figures
        figures = [
            (
                "mean step time [ms]",
                old_figures.step_time.mean_ms,
                new_figures.step_time.mean_ms,
                ratios,
                False,
            )
        ]
        # The batches being the same, rates and occupancy follow the step time; else they are no
        # comparison.
        if _work(before) == _work(after):
            rates = ratios.mean() / ratios
            for name, a, b in (
                ("occupancy", old_figures.occupancy.mean, new_figures.occupancy.mean),
                (
                    "samples/s",
                    old_figures.throughput.samples_per_s,
                    new_figures.throughput.samples_per_s,
                ),
            ):
                figures.append((name, a, b, b / a * rates, True))
        for name, a, b, ratio_samples, higher_is_better in figures:
            low, high = np.quantile(ratio_samples, (0.025, 0.975)).tolist()
            change = Change(
                name=name,
                before=a,
                after=b,
                ratio_low=low,
                ratio_high=high,
                higher_is_better=higher_is_better,
            )
            rows.append(change)
    else:
        old = _figures(before)
        new = _figures(after)
        for name in (name for name in new if name in old):
            first = old[name]
            second = new[name]
            # Lowest over highest and the reverse, where both have an interval.
            has_interval = first.has_interval and second.has_interval
            rows.append(
                Change(
                    name=name,
                    before=first.median,
                    after=second.median,
                    ratio_low=second.low / first.high if has_interval else None,
                    ratio_high=second.high / first.low if has_interval else None,
                    higher_is_better=not name.endswith(("[ms]", "[s]")),
                )
            )
    if not rows:
        raise ConfigError(
            "the reports have no figures of the same thing: there is nothing to compare"
        )
    for change in rows:
        if change.before <= 0 or change.after <= 0:
            raise ConfigError(
                f"'{change.name}' is {change.before:g} in A and {change.after:g} in B; both "
                "must be above 0 to be compared: measure again"
            )
    return rows


def _figures(report: Any) -> dict[str, Interval]:
    """Return what can be compared of a report, by name; where it is a time, the unit in the name
    says so.
    """
    if isinstance(report, ScaleReport):
        return {
            f"step of {run.num_ranks} ranks x {run.batch_size} [ms]": run.step_ms
            for run in report.measured
        }
    if isinstance(report, WatchReport):
        return report.times
    if isinstance(report, LoaderReport):
        fields = displayed_fields(LoaderFigures)
        return {
            entry.label: getattr(report.figures, name)
            for name, entry in fields.items()
            if entry.better is not None
        }
    return {
        f"{contestant.name} [images/s]": contestant.figures.images_per_s
        for contestant in report.contestants
        if contestant.figures
    }


def _work(report: Report) -> tuple[Any, ...]:
    options = report.options
    return (
        report.num_ranks,
        options["batch_size"],
        options["accumulation"],
        report.accelerator.get("name"),
    )


def differences(before: Comparable, after: Comparable) -> list[str]:
    """List other differences of two measurements that may explain a change, one line each."""
    old = _conditions(before)
    new = _conditions(after)
    pairs = {name: (old.get(name, "none"), new.get(name, "none")) for name in old | new}
    return [f"{name}: {a} -> {b}" for name, (a, b) in pairs.items() if a != b]


def _conditions(report: Comparable) -> dict[str, Any]:
    machine = report.machine
    conditions: dict[str, Any] = {
        "processor": machine.cpu,
        "CPUs": machine.num_cpus,
        "GPUs": [gpu.name for gpu in machine.gpus],
        "python": machine.python,
        "commit": machine.commit,
        **{f"package {name}": version for name, version in machine.packages.items()},
        **{f"option {name}": value for name, value in report.options.items()},
    }
    if isinstance(report, WatchReport):
        return conditions | {"ranks": report.num_ranks}
    conditions |= {"dataset": report.dataset.fingerprint, "split": report.dataset.split}
    if isinstance(report, Report):
        conditions |= {
            "cut off": report.cut_off,
            "ranks": report.num_ranks,
            "accelerator": report.accelerator.get("name", "cuda"),
        }
    return conditions


def print_comparison(
    before: Path,
    after: Path,
    options: DiffOptions,
    printing: PrintOptions,
) -> int:
    """Print the changes between two reports; return 1 where something is worse."""
    comparison = diff(before, after, options)
    code = _WORSE if comparison.worse else 0
    if printing.json:
        changes = [
            change._asdict() | {"ratio": change.ratio, "is_real": change.is_real}
            for change in comparison.changes
        ]
        print_json(msgspec.structs.asdict(comparison) | {"changes": changes})
        return code
    console = report_console()
    for line in comparison.differences:
        if line.startswith(("dataset:", "split:")):
            console.print(f"warning: the reports are of different data: {line}")
    header = ("figure", "A", "B", "B / A", "interval", "")
    rows = []
    for change in comparison.changes:
        interval = "none"
        verdict = "unknown: fewer than 3 repeats"
        if change.ratio_low is not None and change.ratio_high is not None:
            interval = f"{change.ratio_low:.3f} to {change.ratio_high:.3f}"
            is_better = (change.ratio > 1) == change.higher_is_better
            verdict = "better" if is_better else "worse"
            if not change.is_real:
                verdict = "within noise"
        rows.append(
            [
                change.name,
                f"{change.before:,.4g}",
                f"{change.after:,.4g}",
                f"{change.ratio:.3f}",
                interval,
                verdict,
            ]
        )
    print_table(console, header, rows)
    for line in comparison.differences:
        console.print(f"also differs: {line}")
    worse = ": " + ", ".join(comparison.worse) if comparison.worse else ""
    console.print(
        f"{'' if worse else 'nothing is '}worse by more than {options.threshold:.1%}, "
        f"beyond noise{worse}"
    )
    return code


DIFF = command(
    "compare two reports, and fail if the second is worse beyond noise",
    print_comparison,
    arguments={
        "before": {
            "metavar": "A",
            "type": Path,
            "help": "report.json, or its folder",
        },
        "after": {"metavar": "B", "type": Path, "help": "the report to judge"},
    },
    options=(DiffOptions, PrintOptions),
    description="Compares two reports of `bench train`, `loader`, `compare` or `scale`, or of "
    "`fuelrail watch`. Exit code 0: nothing is worse; 1: something is worse by more than "
    "--threshold, and the noise of both does not explain it; 2: no comparison.",
)
