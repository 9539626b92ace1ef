"""What bounds a training run, found by leaving things out: the run as it is against the same run without each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from fuelrail.bench.diff import compare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuelrail.bench.train_report import Figures, Report
    from fuelrail.bench.trainer.settings import LeaveOut

Bound = Literal["loader", "all-reduce", "slow rank", "compute", "host"]

# A gain below this, or one that noise explains, is none.
_NOTABLE = 0.02
# A rank whose own part of the step is longer than the others' by this share keeps them waiting.
_SLOWER = 0.05
_USED_UP = 0.85


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """The run without something: its mean step, and how much faster that is (0.25: 25 % more steps a second).

    ``gain_low`` to ``gain_high`` is a 95 % interval over the steps' noise in both runs.
    """

    left_out: str
    step_ms: float
    gain: float
    gain_low: float
    gain_high: float

    @property
    def counts(self) -> bool:
        """Whether the gain is worth a word and no noise."""
        return self.gain > _NOTABLE and self.gain_low > 0


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds the run, why we say so, and what to do."""

    bound: Bound
    finding: str
    advice: str
    step_ms: float
    occupancy: float
    counterfactuals: list[Counterfactual]


def diagnose(as_it_is: Report, without: Mapping[LeaveOut, Report]) -> Diagnosis:
    """Judge runs that differ in nothing but what was left out; all have figures."""
    figures = as_it_is.figures
    assert figures is not None, "a run without figures shows nothing"
    found = [_counterfactual(name, as_it_is, report) for name, report in without.items()]
    worst = max((entry for entry in found if entry.counts), key=lambda entry: entry.gain, default=None)
    slow_rank = _slow_rank(as_it_is)
    bound: Bound
    if worst is None:
        bound, finding, advice = _undisturbed(figures)
    elif worst.left_out == "loading":
        bound = "loader"
        finding = f"With batches from memory the run would be {worst.gain:.0%} faster: {_busiest_stage(figures)}"
        advice = _loader_advice(as_it_is)
    elif slow_rank is not None:
        rank, share = slow_rank
        bound = "slow rank"
        finding = (
            f"Rank {rank} takes {share:.0%} longer than the others for its own part of the step; they wait for it."
        )
        advice = f"Look at rank {rank}'s host and device: clock, temperature, other processes, its shards' storage."
    else:
        bound = "all-reduce"
        finding = f"Without the all-reduce the run would be {worst.gain:.0%} faster."
        advice = "Accumulate gradients over more batches, reduce in bf16, or use a faster link between the ranks."
    return Diagnosis(
        bound=bound,
        finding=finding,
        advice=advice,
        step_ms=figures.step_time.mean_ms,
        occupancy=figures.occupancy.mean,
        counterfactuals=found,
    )


def _counterfactual(name: str, as_it_is: Report, without: Report) -> Counterfactual:
    change = next(change for change in compare(as_it_is, without) if change.name.startswith("step time"))
    return Counterfactual(
        left_out=name,
        step_ms=change.after,
        gain=1 / change.ratio - 1,
        gain_low=1 / change.ratio_high - 1,
        gain_high=1 / change.ratio_low - 1,
    )


def _undisturbed(figures: Figures) -> tuple[Bound, str, str]:
    other = next(phase.share for phase in figures.phases if phase.phase == "other") + figures.overrun_share
    if other > _SLOWER:
        finding = f"Neither loading nor all-reduce holds the run up, but {other:.0%} of its time goes by on the host."
        return "host", finding, "Give the ranks more CPU cores, or look for slow Python in the training loop."
    finding = (
        "Healthy: leaving out loading or all-reduce gains nothing beyond noise, and the accelerators compute "
        f"{figures.occupancy.mean:.1%} of the time."
    )
    return "compute", finding, "Only a faster accelerator or a cheaper model makes this run faster."


def _busiest_stage(figures: Figures) -> str:
    if not figures.stages:
        return "the loader cannot keep up."
    stage = max(figures.stages, key=lambda stage: stage.busy)
    return f"the loader cannot keep up, and its stage '{stage.name}' is at work {stage.busy:.0%} of the time."


def _loader_advice(report: Report) -> str:
    cpu = report.cpu
    if cpu is not None and cpu.own + (cpu.others or 0.0) >= _USED_UP * cpu.usable:
        if cpu.disturbed:
            return "The CPUs are used up, in part by other processes: stop those, or give the ranks more cores."
        return "The CPUs are used up: give each rank more cores, store smaller images, or decode on the GPU."
    return "CPUs are free: use more decoding threads (--workers). `fuelrail bench loader` shows each stage."


def _slow_rank(report: Report) -> tuple[int, float] | None:
    """The rank whose own part of the step, the all-reduce left out, is longest, if it is longer by enough."""
    if len(report.series) < 2:
        return None
    first, count = report.window.num_warmup_steps, report.window.num_measured_steps
    window = slice(first, first + count)
    own_ms = [
        float(np.mean(np.array(series.wall_ms[window]) - np.array(series.phases_ms["all_reduce"][window])))
        for series in report.series
    ]
    slowest = int(np.argmax(own_ms))
    others = float(np.median([own for rank, own in enumerate(own_ms) if rank != slowest]))
    share = own_ms[slowest] / others - 1
    return (report.series[slowest].rank, share) if share > _SLOWER else None
