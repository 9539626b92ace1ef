"""Settings that may lift a bound, to be tried, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fuelrail.bench.diagnosis import counterfactual
from fuelrail.loaders.budget import default_num_workers

if TYPE_CHECKING:
    from pathlib import Path

    from fuelrail.bench.diagnosis import Bound
    from fuelrail.bench.train_report import Report
    from fuelrail.bench.trainer.settings import TrainSettings

_LOOK_AHEAD_BYTES = 512 << 20
# Gains below this are not worth a changed setting.
_WORTH = 0.02


class Trial(NamedTuple):
    """Something to try: the options that do it, and the settings that they change.

    ``twice``: it pays from the second time on that samples are read, so that one counts.
    """

    options: str
    changes: dict[str, Any]
    twice: bool = False


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial brought: samples/s against the run as it is, with a 95 % interval, beside the noise of a repeat."""

    options: str
    samples_per_s: float
    gain: float
    gain_low: float
    gain_high: float
    noise: float = 0.0

    @property
    def helps(self) -> bool:
        """Whether it is faster by more than noise, and by enough to be worth it."""
        return self.gain > _WORTH and self.gain_low > self.noise


def trials(bound: Bound, settings: TrainSettings, *, num_shards: int, num_ranks: int, out: Path) -> list[Trial]:
    """What may help against a bound, within the settings of `bench train`; empty where no setting does."""
    workers = settings.num_workers or max(1, default_num_workers() // num_ranks)
    more = [Trial(f"--workers {count}", {"num_workers": count}) for count in (workers + 1, 2 * workers + 1)]
    ahead = Trial("look_ahead_bytes=512 MiB", {"look_ahead_bytes": _LOOK_AHEAD_BYTES})
    window = [Trial("--window 4", {"window": 4})] if settings.window is None and num_shards > 1 else []
    cache = Trial(
        "--cache-dir OUT/cache", {"cache_dir": str((out / "cache").absolute()), "storage": "auto"}, twice=True
    )
    doubled = 2 * settings.accumulation
    known: dict[str, list[Trial]] = {
        "CPU decode": more,
        "decompression": more,
        "loader": more,
        "Python": [*([Trial("--workers 1", {"num_workers": 1})] if workers > 1 else []), *more[:1]],
        "storage": [*more[1:], ahead, *window, *([] if settings.cache_dir else [cache])],
        "cold cache": [Trial("nothing changed, the same samples again", {}, twice=True)],
        "network": [ahead, *([] if settings.cache_dir else [cache])],
        "too few shards": [ahead, *([] if settings.cache_dir else [cache])],
        "GPU decode contention": [Trial("--decoder turbo", {"decoder": "turbo"})] if settings.decoder == "dali" else [],
        "kernel launches": [Trial(f"--batch-size {2 * settings.batch_size}", {"batch_size": 2 * settings.batch_size})],
        "all-reduce": [Trial(f"--accumulation {doubled}", {"accumulation": doubled})],
    }
    return known.get(bound, [])


def judge(trial: Trial, as_it_is: Report, tried: Report, noise: float = 0.0) -> Tried:
    """What a trial brought; both reports have figures. ``noise``: by how much a repeat of the same run differed."""
    assert tried.figures is not None
    found = counterfactual(trial.options, as_it_is, tried)
    return Tried(
        options=trial.options,
        samples_per_s=tried.figures.throughput.samples_per_s,
        gain=found.gain,
        gain_low=found.gain_low,
        gain_high=found.gain_high,
        noise=noise,
    )


def best(tried: list[Tried]) -> Tried | None:
    """The one that helps most, if any does."""
    return max((entry for entry in tried if entry.helps), key=lambda entry: entry.gain, default=None)
