"""The report of ``fuelrail bench diagnose``: the bottleneck, the runs, and the effect of the
suggestions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fuelrail.bench.report.files import ReportHeader
from fuelrail.bench.studies.diagnose.judge import (
    Bound,
    Counterfactual,
    Diagnosis,
)
from fuelrail.pipeline.runtime.host import default_num_workers

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.settings import TrainSettings

SCHEMA = "fuelrail-bench-diagnose"

VERSION = 7

_LOOK_AHEAD_BYTES = 512 << 20
_MAX_WAITING = 64


class DiagnoseReport(ReportHeader, frozen=True, kw_only=True):
    """A whole report.

    ``cut_off`` says why it is partial: then ``diagnosis`` may be None, as not all runs were made.
    ``runs`` are the complete runs: folders beside the report, each with a report of its own.
    ``tried`` are runs of suggestions, named by their options; one helps if its gain is above
    ``tried_noise``. Their gains are compared with an unchanged run beside them, which made
    ``tried_against`` samples a second.
    """

    accelerator: dict[str, Any]
    num_ranks: int
    diagnosis: Diagnosis | None
    tried: list[Counterfactual] | None
    tried_noise: float = 0.0
    tried_against: float | None = None
    runs: list[str]


def title_of(entry: Counterfactual) -> str:
    """Return the title of a run."""
    return "baseline, repeated" if entry.name == "again" else f"without {entry.name}"


def verdict_on(entry: Counterfactual, noise: float) -> str:
    """Return whether a setting that was tried helps; ``noise``: by how much a repeat differed."""
    if entry.is_above(noise):
        return "helps"
    return "no significant difference" if entry.gain_high > -noise else "is slower"


def conclusion(tried: Sequence[Counterfactual], noise: float) -> str:
    """Return what to use; ``noise``: by how much a repeat differed."""
    if not tried:
        return (
            "nothing was tried: no setting of this command removes this bottleneck; see the advice"
        )
    winner = max(
        (entry for entry in tried if entry.is_above(noise)),
        key=lambda entry: entry.gain,
        default=None,
    )
    return (
        "none of the settings tried helped; see the advice"
        if winner is None
        else f"use: {winner.name}"
    )


def threads_that_wait(workers: int, gain: float) -> int:
    """Return how many threads waiting side by side hide their wait, to 64."""
    return max(2 * workers, min(_MAX_WAITING, math.ceil(workers * (1 + gain))))


class Suggestion(NamedTuple):
    """A suggestion: the options on the command line, and the fields of `TrainOptions` that they
    change.

    ``twice``: it helps when samples are read again, so the second run counts.
    """

    options: str
    changes: dict[str, Any]
    twice: bool = False


def suggestions(
    bound: Bound,
    settings: TrainSettings,
    *,
    num_shards: int,
    num_ranks: int,
    out: Path,
    gain: float = 0.0,
) -> list[Suggestion]:
    """Return what may remove a bottleneck, of the options of `bench train`; may be empty.

    ``gain`` is the speed-up without the bottleneck.
    """
    workers = settings.workers or max(1, default_num_workers() // num_ranks)
    more = [
        Suggestion(f"--workers {count}", {"workers": count})
        for count in (workers + 1, 2 * workers + 1)
    ]
    ahead = Suggestion("look_ahead_bytes=512 MiB", {"look_ahead_bytes": _LOOK_AHEAD_BYTES})
    window = (
        [Suggestion("--window 4", {"window": 4})]
        if settings.window is None and num_shards > 1
        else []
    )
    cache = Suggestion(
        "--cache-dir OUT/cache",
        {"cache_dir": str((out / "cache").absolute()), "storage": "auto"},
        twice=True,
    )
    doubled = 2 * settings.accumulation
    by_bound: dict[str, list[Suggestion]] = {
        "CPU decode": more,
        "decompression": more,
        "loader": more,
        "Python": [
            *([Suggestion("--workers 1", {"workers": 1})] if workers > 1 else []),
            *more[:1],
        ],
        "waiting transform": [
            Suggestion(f"--workers {count}", {"workers": count})
            for count in sorted({2 * workers, 4 * workers, threads_that_wait(workers, gain)})
        ],
        "storage": [
            *more[1:],
            ahead,
            *window,
            *([] if settings.cache_dir else [cache]),
        ],
        "cold cache": [Suggestion("nothing changed, the same samples again", {}, twice=True)],
        "network": [ahead, *([] if settings.cache_dir else [cache])],
        "GPU decode contention": [Suggestion("--decoder turbo", {"decoder": "turbo"})]
        if settings.decoder == "dali"
        else [],
        "kernel launches": [
            Suggestion(
                f"--batch-size {2 * settings.batch_size}",
                {"batch_size": 2 * settings.batch_size},
            )
        ],
        "all-reduce": [Suggestion(f"--accumulation {doubled}", {"accumulation": doubled})],
    }
    return by_bound.get(bound, [])
