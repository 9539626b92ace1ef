"""What checkpoints cost a run, and how often to save them."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.measure.clock import Summary, summarise_ns
from fuelrail.bench.measure.records import CheckpointRestore

if TYPE_CHECKING:
    from fuelrail.bench.measure.records import RankLog
    from fuelrail.bench.studies.train.settings import TrainSettings

_S_PER_DAY = 86_400


class CheckpointFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints of a run.

    ``stall``: what each save took from the training, of the rank that lost most. ``save``: how long it took in the
    background, until it was visible. ``interval_s`` is the suggested time between two saves at
    ``failures_per_day`` failures (:func:`suggested_interval_s`), and
    ``interval_steps`` the same in steps of the measured window; None where a figure for it is missing.
    """

    restored: CheckpointRestore | None
    num_saves: int
    num_bytes: int | None
    stall: Summary | None
    save: Summary | None
    failures_per_day: float | None
    interval_s: float | None
    interval_steps: int | None

    def sentences(self) -> list[str]:
        """Return the figures as text."""
        lines = []
        if self.restored is not None:
            lines.append(
                f"The run continued after step {self.restored.step} from checkpoint {self.restored.folder}, which "
                f"{self.restored.world_size} rank{'s' if self.restored.world_size != 1 else ''} saved."
            )
        if self.stall is not None and self.save is not None and self.num_bytes is not None:
            plural = "s" if self.num_saves != 1 else ""
            lines.append(
                f"{self.num_saves} checkpoint{plural} of {self.num_bytes / 1e6:,.1f} MB: each stalled the training for "
                f"{self.stall.mean_ms:.1f} ms and was visible after {self.save.mean_ms:,.0f} ms."
            )
        if self.interval_s is not None:
            steps = "" if self.interval_steps is None else f", {self.interval_steps:,} steps of this run"
            lines.append(
                f"At {self.failures_per_day:g} failures a day, save every {self.interval_s:,.0f} s{steps}: that loses "
                "the least time to saves and to steps done again (Daly 2006)."
            )
        return lines


def checkpoint_figures(
    settings: TrainSettings, logs: Sequence[RankLog], step_ms: float | None
) -> CheckpointFigures | None:
    """Return the figures of a run's checkpoints; None for a run without. ``step_ms``: mean time of a step."""
    if settings.checkpoint is None:
        return None
    failures_per_day = settings.failures_per_day
    # Ranks that were killed may lack the last ones.
    saves = list(zip(*(log.saves for log in logs), strict=False))
    stall = summarise_ns([max(save.stall_ns for save in ranks) for ranks in saves]) if saves else None
    save = summarise_ns([max(save.total_ns for save in ranks) for ranks in saves]) if saves else None
    interval_s = None
    if stall is not None and save is not None and failures_per_day is not None:
        interval_s = suggested_interval_s(stall.mean_ms / 1e3, save.mean_ms / 1e3, failures_per_day)
    steps = None
    if interval_s is not None and step_ms is not None:
        steps = max(1, round(interval_s * 1e3 / step_ms))
    return CheckpointFigures(
        restored=logs[0].restored,
        num_saves=len(saves),
        num_bytes=saves[-1][0].num_bytes if saves else None,
        stall=stall,
        save=save,
        failures_per_day=failures_per_day,
        interval_s=interval_s,
        interval_steps=steps,
    )


def suggested_interval_s(stall_s: float, save_s: float, failures_per_day: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    ``stall_s``: what one save takes from the training. ``save_s``: how long it takes in the background; saves do not
    overlap, so the interval is at least that. ``failures_per_day``: of the whole job, more than 0.

    Daly's estimate, J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006) 303-312, equation 37: for a cost C and a mean time M between failures
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2 M, else M. Its first term is Young's (1974).
    """
    mean_s = _S_PER_DAY / failures_per_day
    ratio = stall_s / (2 * mean_s)
    best = mean_s if ratio >= 1 else sqrt(2 * stall_s * mean_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s
    return max(best, save_s)
