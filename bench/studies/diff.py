"""``fuelrail bench diff``: two reports of one kind compared, beyond the noise of both, with an exit code for CI.

A report has the fields ``schema`` and ``version``. Reading checks both, and the presence and type of every field. The
version is raised with any change of a field's name, type or meaning. ``python -m fuelrail.bench.studies.diff FOLDER``
writes the JSON Schema of every kind; ``make docs`` puts them on the site.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from fuelrail.bench.report.console import print_table, report_console
from fuelrail.bench.report.files import ReportHeader, load_report_of, read_report
from fuelrail.bench.studies.diagnose import report as diagnose_report
from fuelrail.bench.studies.diagnose.report import DiagnoseReport
from fuelrail.bench.studies.loader import report as loader_report
from fuelrail.bench.studies.loader.report import LoaderReport
from fuelrail.bench.studies.scale import report as scale_report
from fuelrail.bench.studies.scale.report import ScaleReport
from fuelrail.bench.studies.train import report as train_report
from fuelrail.bench.studies.train.report import Report, step_ratios
from fuelrail.pipeline.cli import Command, PrintOptions, add_flags, from_flags, print_json
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options

if TYPE_CHECKING:
    import argparse

    from fuelrail.bench.measure.rates import Interval
    from fuelrail.bench.studies.compare.report import CompareReport

    Comparable = Report | LoaderReport | ScaleReport | CompareReport

COMPARE_ROOM = "fuelrail.bench.studies.compare"
FROM_CHECKOUT = (
    "`fuelrail bench compare` and its reports are not in the installed package: clone the repository, run `pip install "
    "-e '.[bench,peers,view]'` in it, and repeat the command there"
)
_WORSE = 1


class Kind(NamedTuple):
    """One kind of report."""

    schema: str
    version: int
    type: type[ReportHeader]


def _kinds() -> dict[str, Kind]:
    kinds = [
        Kind(train_report.SCHEMA, train_report.VERSION, Report),
        Kind(loader_report.SCHEMA, loader_report.VERSION, LoaderReport),
        Kind(scale_report.SCHEMA, scale_report.VERSION, ScaleReport),
        Kind(diagnose_report.SCHEMA, diagnose_report.VERSION, DiagnoseReport),
    ]
    if find_spec(COMPARE_ROOM) is not None:
        from fuelrail.bench.studies.compare.report import SCHEMA, VERSION, CompareReport

        kinds.append(Kind(SCHEMA, VERSION, CompareReport))
    return {kind.schema: kind for kind in kinds}


KINDS = _kinds()


class DiffOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.diff`, and the flags of ``fuelrail bench diff``."""

    threshold: Annotated[float, msgspec.Meta(ge=0, lt=1), flag("tolerated slowdown (0.02 = 2 %)")] = 0.02
    other_dataset: Annotated[bool, flag("compare reports of different datasets or splits; refused otherwise")] = False


class Change(NamedTuple):
    """One figure before and after; ``ratio`` is after / before, with an interval that takes both sides' noise in.

    ``higher_is_better`` says which way is which. The change is real when the interval leaves out 1. With fewer than
    three repeats on a side there is no interval (None), and no change counts as real.
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
        return self.ratio_low is not None and self.ratio_high is not None and not self.ratio_low <= 1 <= self.ratio_high

    def is_worse(self, threshold: float) -> bool:
        """Return whether it is real and a loss of more than ``threshold`` (0.02 for 2 %)."""
        loss = 1 - self.ratio if self.higher_is_better else 1 - 1 / self.ratio
        return self.is_real and loss > threshold


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two reports compared.

    ``worse``: names of the figures that are worse beyond noise and threshold. ``differences``: what else differs, such
    as the machine or an option, one line each.
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

    ``fuelrail.diff("A", "B", threshold=0.05)`` takes the fields of :class:`DiffOptions` as keywords. Raises ConfigError
    for reports that cannot be compared.
    """
    options = make_options(DiffOptions, options, changes)
    old, new = _load(before), _load(after)
    sides = [old.dataset, new.dataset]
    if not options.other_dataset and len({(side.fingerprint, side.split) for side in sides}) > 1:
        shown = " and ".join(f"'{side.name}', split '{side.split}' ({side.fingerprint[:12]})" for side in sides)
        raise ConfigError(
            f"the reports are of different data: {shown}; compare reports of one dataset, or run with --other-dataset"
        )
    found = compare(old, new)
    worse = [change.name for change in found if change.is_worse(options.threshold)]
    return Comparison(changes=found, worse=worse, differences=differences(old, new))


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
    report: Any = load_report_of(path, kind.type, kind.schema, kind.version)
    if isinstance(report, DiagnoseReport):
        raise ConfigError(f"'{path}' is a diagnosis: compare the reports of its runs, in the folders beside it")
    if isinstance(report, Report | LoaderReport) and report.figures is None:
        raise ConfigError(f"report '{path}' has no figures to compare: its run was too short")
    return report  # type: ignore[no-any-return]


def compare(before: Comparable, after: Comparable) -> list[Change]:
    """Return the changes of two reports that have figures.

    Raises ConfigError where they are of different kinds, have no figures of the same thing, or one that is not above 0.
    """
    if before.schema != after.schema:
        raise ConfigError(f"reports of different kinds cannot be compared: {before.schema} and {after.schema}")
    changes: Any = {Report: _train_changes, LoaderReport: _loader_changes, ScaleReport: _scale_changes}
    found: list[Change] = changes.get(type(before), _compare_changes)(before, after)
    if not found:
        raise ConfigError("the reports have no figures of the same thing: there is nothing to compare")
    for change in found:
        if change.before <= 0 or change.after <= 0:
            raise ConfigError(
                f"'{change.name}' is {change.before:g} in A and {change.after:g} in B; both must be above 0 to be "
                "compared: measure again"
            )
    return found


def _train_changes(before: Report, after: Report) -> list[Change]:
    assert before.figures is not None
    assert after.figures is not None
    ratios = step_ratios(before, after)
    old, new = before.figures, after.figures
    times = [("mean step time [ms]", old.step_time.mean_ms, new.step_time.mean_ms, ratios, False)]
    # The batches being the same, rates and occupancy follow the step time; else they are no comparison.
    if _work(before) == _work(after):
        rates = ratios.mean() / ratios
        for name, a, b in (
            ("occupancy", old.occupancy.mean, new.occupancy.mean),
            ("samples/s", old.throughput.samples_per_s, new.throughput.samples_per_s),
        ):
            times.append((name, a, b, b / a * rates, True))
    changes = []
    for name, a, b, of, higher_is_better in times:
        low, high = np.quantile(of, (0.025, 0.975)).tolist()
        changes.append(Change(name, a, b, low, high, higher_is_better))
    return changes


def _loader_changes(before: LoaderReport, after: LoaderReport) -> list[Change]:
    old, new = before.figures, after.figures
    assert old is not None
    assert new is not None
    return [
        _of_intervals("samples/s", old.samples_per_s, new.samples_per_s, True),
        _of_intervals("CPU time a sample [ms]", old.cpu_ms_per_sample, new.cpu_ms_per_sample, False),
        _of_intervals("first batch [s]", old.first_batch_s, new.first_batch_s, False),
    ]


def _compare_changes(before: CompareReport, after: CompareReport) -> list[Change]:
    """Return every contestant that both timed."""
    sides = [
        {one.name: one.figures.images_per_s for one in side.contestants if one.figures} for side in (before, after)
    ]
    return [
        _of_intervals(f"{name} [images/s]", sides[0][name], rate, True)
        for name, rate in sides[1].items()
        if name in sides[0]
    ]


def _scale_changes(before: ScaleReport, after: ScaleReport) -> list[Change]:
    """Return every run that both measured."""
    runs = {(run.num_ranks, run.batch_size): run for run in before.measured}
    changes = []
    for new in after.measured:
        old = runs.get((new.num_ranks, new.batch_size))
        if old is not None:
            name = f"step of {new.num_ranks} ranks x {new.batch_size} [ms]"
            low, high = new.step_low_ms / old.step_high_ms, new.step_high_ms / old.step_low_ms
            changes.append(Change(name, old.step_ms, new.step_ms, low, high, False))
    return changes


def _of_intervals(name: str, old: Interval, new: Interval, higher_is_better: bool) -> Change:
    """Return a change between two medians; its interval is lowest over highest and the reverse, if both have one."""
    low = high = None
    if old.has_interval and new.has_interval:
        low, high = new.low / old.high, new.high / old.low
    return Change(name, old.median, new.median, low, high, higher_is_better)


def _work(report: Report) -> tuple[Any, ...]:
    options = report.options
    return report.num_ranks, options["batch_size"], options["accumulation"], report.accelerator.get("name")


def differences(before: Comparable, after: Comparable) -> list[str]:
    """List other differences of two measurements that may explain a change, one line each."""
    old, new = _conditions(before), _conditions(after)
    pairs = {name: (old.get(name, "none"), new.get(name, "none")) for name in old | new}
    return [f"{name}: {a} -> {b}" for name, (a, b) in pairs.items() if a != b]


def _conditions(report: Comparable) -> dict[str, Any]:
    machine = report.machine
    conditions = {
        "dataset": report.dataset.fingerprint,
        "split": report.dataset.split,
        "processor": machine.cpu,
        "CPUs": machine.num_cpus,
        "GPUs": [gpu.name for gpu in machine.gpus],
        "python": machine.python,
        "commit": machine.commit,
        **{f"package {name}": version for name, version in machine.packages.items()},
        **{f"option {name}": value for name, value in report.options.items()},
    }
    if isinstance(report, Report):
        conditions |= {
            "cut off": report.cut_off,
            "ranks": report.num_ranks,
            "accelerator": report.accelerator.get("name", "cuda"),
        }
    return conditions


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two reports of `bench train`, `loader`, `compare` or `scale`. Exit code 0: nothing is worse; 1: "
        "something is worse by more than --threshold, and the noise of both does not explain it; 2: no comparison."
    )
    parser.add_argument("before", metavar="A", type=Path, help="report.json, or its folder")
    parser.add_argument("after", metavar="B", type=Path, help="the report to judge")
    add_flags(parser, DiffOptions)
    add_flags(parser, PrintOptions)


def _run(arguments: argparse.Namespace) -> int:
    options = from_flags(arguments, DiffOptions)
    found = diff(arguments.before, arguments.after, options)
    if from_flags(arguments, PrintOptions).json:
        rows = [change._asdict() | {"ratio": change.ratio, "is_real": change.is_real} for change in found.changes]
        print_json({"changes": rows, "worse": found.worse, "differences": found.differences})
    else:
        _print(found, options.threshold)
    return _WORSE if found.worse else 0


def _print(found: Comparison, threshold: float) -> None:
    console = report_console()
    for line in found.differences:
        if line.startswith(("dataset:", "split:")):
            console.print(f"warning: the reports are of different data: {line}")
    print_table(console, ("figure", "A", "B", "B / A", "interval", ""), map(_row, found.changes))
    for line in found.differences:
        console.print(f"also differs: {line}")
    worse = ": " + ", ".join(found.worse) if found.worse else ""
    console.print(f"{'' if worse else 'nothing is '}worse by more than {threshold:.1%}, beyond noise{worse}")


def _row(change: Change) -> list[str]:
    interval, verdict = "none", "unknown: fewer than 3 repeats"
    if change.ratio_low is not None and change.ratio_high is not None:
        interval = f"{change.ratio_low:.3f} to {change.ratio_high:.3f}"
        better = (change.ratio > 1) == change.higher_is_better
        verdict = "within noise" if not change.is_real else "better" if better else "worse"
    return [change.name, f"{change.before:,.4g}", f"{change.after:,.4g}", f"{change.ratio:.3f}", interval, verdict]


DIFF = Command("compare two reports, and fail if the second is worse beyond noise", _configure, _run)


def json_schema(kind: Kind) -> bytes:
    """Return the JSON Schema of a kind as a document."""
    document = msgspec.json.schema(kind.type)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.schema, **document}
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1) + b"\n"


def write_schemas(folder: Path) -> None:
    """Write the schemas of all kinds into a folder, as ``SCHEMA-vVERSION.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS.values():
        (folder / f"{kind.schema}-v{kind.version}.json").write_bytes(json_schema(kind))


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
