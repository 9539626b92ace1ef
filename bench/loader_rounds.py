"""What ``fuelrail bench loader`` measures: the whole loader, each stage alone, stage upon stage, this machine's limits.

In turns, round after round, so that a machine that grows slower or is disturbed for a while favours none of the four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuelrail.bench.console import NOTHING_MEASURED
from fuelrail.bench.cuda import pinned_copy
from fuelrail.bench.limits import measure_limits, sample_sizes
from fuelrail.bench.loader_run import run_loader
from fuelrail.bench.memory import peak_memory_bytes
from fuelrail.bench.stages import measure_stacked, measure_stages, record_stages

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuelrail.bench.limits import SampleSizes
    from fuelrail.bench.loader_run import LoaderRun
    from fuelrail.bench.rates import Rate
    from fuelrail.bench.stages import LoaderChoice, Recorded
    from fuelrail.pipeline.augment import ImageAugment
    from fuelrail.pipeline.dataset import Dataset

_NUM_BATCHES_KEPT = 3
_NUM_SAMPLES_KEPT = 12


class Round(NamedTuple):
    """One round."""

    run: LoaderRun
    stages: list[Rate]
    stacked: list[Rate]
    limits: list[Rate]


class Rounds(NamedTuple):
    """The whole rounds, one at least; ``cut_off`` says why they are fewer than were asked for."""

    rounds: list[Round]
    sizes: SampleSizes
    peak_rss_bytes: int
    cut_off: str | None


def measure_rounds(
    dataset: Dataset,
    image: ImageAugment,
    choice: LoaderChoice,
    *,
    num_rounds: int,
    seconds: float,
    tell: Callable[[str], None],
) -> Rounds:
    """Warm up and measure; ``tell`` is told what is under way.

    Interrupted, it returns the rounds before; raises KeyboardInterrupt, saying so, where there are none.
    """
    rounds: list[Round] = []
    cut_off = None
    try:
        tell("warming up")
        run_loader(dataset, image, choice, seconds)
        # Read now: what follows keeps batches that a loader would not.
        peak_rss_bytes = peak_memory_bytes()
        num_batches = max(_NUM_BATCHES_KEPT, -(-_NUM_SAMPLES_KEPT // choice.batch_size))
        bench = _Bench(dataset, image, choice, record_stages(dataset, image, choice, num_batches), seconds)
        for number in range(num_rounds):
            where = f"round {number + 1} of {num_rounds}"
            rounds.append(bench.round(where, tell))
    except KeyboardInterrupt:
        if not rounds:
            raise KeyboardInterrupt(NOTHING_MEASURED) from None
        cut_off = f"it was interrupted after {len(rounds)} of {num_rounds} rounds"
    return Rounds(rounds, bench.sizes(), peak_rss_bytes, cut_off)


class _Bench:
    """All that a round needs."""

    def __init__(
        self,
        dataset: Dataset,
        image: ImageAugment,
        choice: LoaderChoice,
        recorded: list[Recorded],
        seconds: float,
    ) -> None:
        self._dataset, self._image, self._choice, self._recorded = dataset, image, choice, recorded
        self._seconds, self._part_s = seconds, min(1.0, seconds / 8)
        self._items = {entry.stage.name: entry.items for entry in recorded}
        manifest = dataset.manifest
        self._output_bytes = len(manifest.cameras) * 3 * image.height * image.width
        self._lidars = {lidar.channel for lidar in manifest.lidars if not choice.points}
        self._to_device = pinned_copy(self._output_bytes)

    def sizes(self) -> SampleSizes:
        """How large the recorded samples are."""
        return sample_sizes(self._items["parse"], self._items["decode"], self._output_bytes)

    def round(self, where: str, tell: Callable[[str], None]) -> Round:
        """Measure all four once."""
        dataset, image, choice, part_s = self._dataset, self._image, self._choice, self._part_s
        tell(f"{where}: the whole loader")
        run = run_loader(dataset, image, choice, self._seconds)
        tell(f"{where}: each stage alone")
        alone = measure_stages(self._recorded, choice.batch_size, part_s)
        tell(f"{where}: stage upon stage")
        names = [entry.stage.name for entry in self._recorded]
        stacked = measure_stacked(dataset, image, choice, names[:-1], part_s)
        tell(f"{where}: this machine's limits")
        limits = measure_limits(
            self._items["parse"],
            self._items["decode"],
            self._lidars,
            self._output_bytes,
            choice.num_workers,
            part_s,
            dataset,
            self._to_device,
        )
        return Round(run, alone, stacked, limits)
