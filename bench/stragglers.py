"""Which rank the others wait for: each rank's own part of the step, the all-reduce left out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.clock import NS_PER_MS
from fuelrail.bench.occupancy import measured_steps
from fuelrail.bench.records import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.occupancy import Window
    from fuelrail.bench.records import StepRecord

# A rank is called slow if its own part is longer than the others' by this share, and longest in most steps.
SLOWER, MOSTLY = 0.05, 0.75
_OWN = tuple(phase for phase in PHASES if phase != "all_reduce")


class RankPace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's own part of the step against the others'.

    ``slower`` is by how much its mean is longer than the median of the other ranks' (negative: shorter);
    ``last_in`` the share of steps in which it was the last to come to the all-reduce; ``most_in`` the phase in which it
    loses most, or wins most, against the others.
    """

    rank: int
    own_ms: float
    slower: float
    last_in: float
    most_in: str

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for this rank, by more than chance."""
        return self.slower > SLOWER and self.last_in >= MOSTLY


def rank_paces(ranks: Sequence[Sequence[StepRecord]], window: Window) -> list[RankPace]:
    """The pace of each rank over the measured window; none for a single rank."""
    if len(ranks) < 2:
        return []
    phases = np.array(
        [[[step.phase_ns(phase) for phase in _OWN] for step in measured_steps(steps, window)] for steps in ranks],
        dtype=np.float64,
    )  # [ranks, steps, phases]
    own = phases.sum(axis=2)
    last = own.argmax(axis=0)
    means = phases.mean(axis=1)
    paces = []
    for rank in range(len(ranks)):
        others = np.delete(means, rank, axis=0)
        beyond = means[rank] - np.median(others, axis=0)
        slower = float(own[rank].mean() / np.median(others.sum(axis=1)) - 1)
        most = int(np.argmax(beyond if slower >= 0 else -beyond))
        paces.append(
            RankPace(
                rank=rank,
                own_ms=float(own[rank].mean()) / NS_PER_MS,
                slower=slower,
                last_in=float((last == rank).mean()),
                most_in=_OWN[most],
            )
        )
    return paces
