"""Two reports of the same kind held against each other: what became faster or slower, beyond the noise of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fuelrail.bench.loader_report import SCHEMA as LOADER_SCHEMA
from fuelrail.bench.loader_report import LoaderReport
from fuelrail.bench.train_report import SCHEMA as TRAIN_SCHEMA
from fuelrail.bench.train_report import Report
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import convert

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_KINDS: dict[str, type[Report | LoaderReport]] = {TRAIN_SCHEMA: Report, LOADER_SCHEMA: LoaderReport}
_VERSION = 1
_NUM_RESAMPLES = 2000
_CONFIDENCE = 0.95


class Change(NamedTuple):
    """One figure before and after; ``ratio`` is after / before, with an interval that takes both sides' noise in.

    ``higher_is_better`` says which way is which. The change is real when the interval leaves out 1.
    """

    name: str
    before: float
    after: float
    ratio_low: float
    ratio_high: float
    higher_is_better: bool

    @property
    def ratio(self) -> float:
        """After over before."""
        return self.after / self.before

    @property
    def is_real(self) -> bool:
        """Whether noise does not explain it."""
        return not self.ratio_low <= 1.0 <= self.ratio_high

    def is_worse(self, threshold: float) -> bool:
        """Whether it is real and a loss of more than ``threshold`` (0.02 for 2 %)."""
        loss = 1 - self.ratio if self.higher_is_better else 1 - 1 / self.ratio
        return self.is_real and loss > threshold


def load_any_report(path: Path) -> Report | LoaderReport:
    """Read a report of either kind; raises ConfigError for other files, other versions, and reports without figures."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"report '{path}' cannot be read: {error}") from error
    schema, version = (raw.get("schema"), raw.get("version")) if isinstance(raw, dict) else (None, None)
    kind = _KINDS.get(schema) if isinstance(schema, str) else None
    if kind is None or version != _VERSION:
        known = ", ".join(_KINDS)
        raise ConfigError(f"'{path}' has schema {schema!r} version {version!r}; known are {known}, version {_VERSION}")
    report: Report | LoaderReport = convert(raw, kind, str(path))
    if report.figures is None:
        raise ConfigError(f"report '{path}' has no figures to compare: its run was too short")
    return report


def compare(before: Report | LoaderReport, after: Report | LoaderReport) -> list[Change]:
    """The changes of two reports that have figures; raises ConfigError where they are of different kinds."""
    if isinstance(before, Report) and isinstance(after, Report):
        return _train_changes(before, after)
    if isinstance(before, LoaderReport) and isinstance(after, LoaderReport):
        return _loader_changes(before, after)
    raise ConfigError(f"reports of different kinds cannot be compared: {before.schema} and {after.schema}")


def differences(before: Report | LoaderReport, after: Report | LoaderReport) -> list[str]:
    """What else differs between two measurements and may explain a change, one line each."""
    return [
        f"{name}: {old} -> {new}"
        for name, old, new in _differing(_conditions(before), _conditions(after))
        if old != new
    ]


def _train_changes(before: Report, after: Report) -> list[Change]:
    assert before.figures is not None
    assert after.figures is not None
    sides = [_steps(before), _steps(after)]
    # Steps are alike but not independent (epochs turn, queues drain), so blocks of them are drawn.
    means = [_bootstrap_means(side, seed) for seed, side in enumerate(sides)]

    def change(name: str, old: float, new: float, ratios: NDArray[np.float64], *, higher_is_better: bool) -> Change:
        low, high = np.quantile(ratios, ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2))
        return Change(name, old, new, float(low), float(high), higher_is_better)

    step_ratio = means[1] / means[0]
    old, new = before.figures, after.figures
    changes = [
        change("step time, mean [ms]", old.step_time.mean_ms, new.step_time.mean_ms, step_ratio, higher_is_better=False)
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
    # Lowest over highest and the reverse: wider than the two intervals' own confidence, so no false alarm from either.
    return [
        Change(name, old.median, new.median, new.low / old.high, new.high / old.low, higher_is_better)
        for name, old, new, higher_is_better in pairs
    ]


def _steps(report: Report) -> NDArray[np.float64]:
    """Mean wall time over ranks of each measured step, in ms."""
    first, count = report.window.num_warmup_steps, report.window.num_measured_steps
    steps = np.array([series.wall_ms[first : first + count] for series in report.series], dtype=np.float64)
    mean: NDArray[np.float64] = steps.mean(axis=0)
    return mean


def _bootstrap_means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Means of resamples made of blocks of consecutive values (circular block bootstrap, block length n^(1/3))."""
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, count, (_NUM_RESAMPLES, -(-count // length)))
    rows = (starts[:, :, None] + np.arange(length)) % count
    means: NDArray[np.float64] = values[rows.reshape(_NUM_RESAMPLES, -1)[:, :count]].mean(axis=1)
    return means


def _work(report: Report) -> tuple[Any, ...]:
    options = report.options
    return report.num_ranks, options["batch_size"], options["accumulation"], report.accelerator.get("name")


def _conditions(report: Report | LoaderReport) -> dict[str, Any]:
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
