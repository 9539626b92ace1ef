"""Two reports of the same kind compared: what became faster or slower, beyond the noise of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.bench.measure.rates import Interval, bootstrap_means
from fuelrail.bench.studies.compare.report import CompareReport
from fuelrail.bench.studies.loader.report import LoaderReport
from fuelrail.bench.studies.scale.report import ScaleReport
from fuelrail.bench.studies.train.report import Report
from fuelrail.pipeline.errors import ConfigError

Comparable = Report | LoaderReport | CompareReport | ScaleReport

_CONFIDENCE = 0.95


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


def compare(before: Comparable, after: Comparable) -> list[Change]:
    """Return the changes of two reports that have figures.

    Raises ConfigError where they are of different kinds, have no figures of the same thing, or one that is not above 0.
    """
    changes: list[Change] | None = None
    if isinstance(before, Report) and isinstance(after, Report):
        changes = _train_changes(before, after)
    elif isinstance(before, LoaderReport) and isinstance(after, LoaderReport):
        changes = _loader_changes(before, after)
    elif isinstance(before, CompareReport) and isinstance(after, CompareReport):
        changes = _compare_changes(before, after)
    elif isinstance(before, ScaleReport) and isinstance(after, ScaleReport):
        changes = _scale_changes(before, after)
    if changes is None:
        raise ConfigError(f"reports of different kinds cannot be compared: {before.schema} and {after.schema}")
    if not changes:
        raise ConfigError("the reports have no figures of the same thing: there is nothing to compare")
    for change in changes:
        if change.before <= 0 or change.after <= 0:
            raise ConfigError(
                f"'{change.name}' is {change.before:g} in A and {change.after:g} in B; both must be above 0 to be "
                "compared: measure again"
            )
    return changes


def refuse_other_data(before: Comparable, after: Comparable) -> None:
    """Raise ConfigError where two reports are of different datasets or splits."""
    old, new = before.dataset, after.dataset
    if (old.fingerprint, old.split) != (new.fingerprint, new.split):
        sides = " and ".join(f"'{side.name}', split '{side.split}' ({side.fingerprint[:12]})" for side in (old, new))
        raise ConfigError(
            f"the reports are of different data: {sides}; compare reports of one dataset, or run with --other-dataset"
        )


def differences(before: Comparable, after: Comparable) -> list[str]:
    """List other differences of two measurements that may explain a change, one line each."""
    return [
        f"{name}: {old} -> {new}"
        for name, old, new in _differing(_conditions(before), _conditions(after))
        if old != new
    ]


def _train_changes(before: Report, after: Report) -> list[Change]:
    assert before.figures is not None
    assert after.figures is not None
    sides = [_steps(before), _steps(after)]
    means = [bootstrap_means(side, seed) for seed, side in enumerate(sides)]

    def change(name: str, old: float, new: float, ratios: NDArray[np.float64], *, higher_is_better: bool) -> Change:
        low, high = np.quantile(ratios, ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2))
        return Change(name, old, new, float(low), float(high), higher_is_better)

    step_ratio = means[1] / means[0]
    old, new = before.figures, after.figures
    changes = [
        change("mean step time [ms]", old.step_time.mean_ms, new.step_time.mean_ms, step_ratio, higher_is_better=False)
    ]
    # The batches being the same, rates and occupancy follow the step time; else they are no comparison.
    if _work(before) == _work(after):
        changes += [
            change(name, a, b, (b / a) * step_ratio.mean() / step_ratio, higher_is_better=True)
            for name, a, b in (
                ("occupancy", old.occupancy.mean, new.occupancy.mean),
                ("samples/s", old.throughput.samples_per_s, new.throughput.samples_per_s),
            )
        ]
    return changes


def _loader_changes(before: LoaderReport, after: LoaderReport) -> list[Change]:
    assert before.figures is not None
    assert after.figures is not None
    pairs = [
        ("samples/s", before.figures.samples_per_s, after.figures.samples_per_s, True),
        ("CPU time a sample [ms]", before.figures.cpu_ms_per_sample, after.figures.cpu_ms_per_sample, False),
        ("first batch [s]", before.figures.first_batch_s, after.figures.first_batch_s, False),
    ]
    return [
        _of_intervals(name, old, new, higher_is_better=higher_is_better) for name, old, new, higher_is_better in pairs
    ]


def _compare_changes(before: CompareReport, after: CompareReport) -> list[Change]:
    """Return every contestant that both timed."""
    figures = {entry.name: entry.figures for entry in before.contestants}
    changes = []
    for entry in after.contestants:
        old, new = figures.get(entry.name), entry.figures
        if old is None or new is None:
            continue
        name = f"{entry.name} [images/s]"
        changes.append(_of_intervals(name, old.images_per_s, new.images_per_s, higher_is_better=True))
    return changes


def _of_intervals(name: str, old: Interval, new: Interval, *, higher_is_better: bool) -> Change:
    """Return a change between two medians; its interval is lowest over highest and the reverse, if both have one."""
    low = high = None
    if old.has_interval and new.has_interval:
        low, high = new.low / old.high, new.high / old.low
    return Change(name, old.median, new.median, low, high, higher_is_better)


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


def _steps(report: Report) -> NDArray[np.float64]:
    """Mean wall time over ranks of each measured step, in ms."""
    first, count = report.window.num_warmup_steps, report.window.num_measured_steps
    steps = np.array([series.wall_ms[first : first + count] for series in report.series], dtype=np.float64)
    mean: NDArray[np.float64] = steps.mean(axis=0)
    return mean


def _work(report: Report) -> tuple[Any, ...]:
    options = report.options
    return report.num_ranks, options["batch_size"], options["accumulation"], report.accelerator.get("name")


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


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[tuple[str, Any, Any]]:
    names = [*before, *(name for name in after if name not in before)]
    return [(name, before.get(name, "none"), after.get(name, "none")) for name in names]
