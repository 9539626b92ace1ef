"""What may be wrong with a run's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fuelrail.bench.studies.train.settings import is_own

if TYPE_CHECKING:
    from fuelrail.bench.measure.machine import CpuUse, DatasetFacts
    from fuelrail.bench.measure.occupancy import Window
    from fuelrail.bench.measure.records import RankLog
    from fuelrail.bench.studies.train.figures import Figures
    from fuelrail.bench.studies.train.settings import TrainSettings

# Shares of the wall time or of the steps below which there is no warning.
_NOISE = 0.01
_NOTABLE = 0.02
# What a thread that computes may wait, in parts of the wall time.
WAITING = 0.1
# CPUs of which this share is in use are used up.
USED_UP = 0.85
# A run whose storage read a smaller share of its bytes was fed by the page cache.
_FROM_CACHE = 0.5


def find_warnings(
    settings: TrainSettings,
    logs: Sequence[RankLog],
    window: Window,
    figures: Figures | None,
    dataset: DatasetFacts,
    cpu: CpuUse | None,
) -> list[str]:
    """Return all warnings; ``figures`` is None if the window is too short."""
    warnings: list[str] = []
    if settings.leave_out:
        warnings.append(
            f"This run left out {' and '.join(settings.leave_out)}: it measures what that "
            "costs, not training."
        )
    elif ranks_disagree(logs):
        warnings.append(
            "The ranks ended with different weights: their gradients differed. Do not trust "
            "this run."
        )
    restored = logs[0].restored if logs else None
    if restored is not None:
        warnings += [
            "A newer checkpoint was damaged and is set aside; the run continued from the one "
            f"before. {name}."
            for name in restored.skipped
        ]
    if any(step.loss is None for log in logs for step in log.steps):
        warnings.append(
            "The loss was not finite in some steps: lower the learning rate. The times are valid."
        )
    facts = next((log.input for log in logs if log.input), None)
    if facts is not None and settings.profile is not None:
        reference = settings.profile.reference_input
        want = (reference.cameras, reference.width, reference.height)
        got = (facts.num_cameras, facts.width, facts.height)
        if want != got:
            warnings.append(
                f"The profile's times hold for {want[0]} x {want[1]}x{want[2]} pixels, the "
                f"batches had {got[0]} x {got[1]}x{got[2]}: the emulated step times do not "
                "fit this input."
            )
    if figures is None:
        return warnings
    count = sum(step.num_samples for log in logs for step in log.steps)
    reads_storage = {"loading", "storage"}.isdisjoint(settings.leave_out)
    if reads_storage and count and dataset.mean_sample_bytes:
        passes = count / dataset.num_samples
        read = [log.end.read_bytes if log.end else None for log in logs]
        share = sum(filter(None, read)) / (count * dataset.mean_sample_bytes)
        samples_text = f"{count:,} samples, {passes:.1f} times through the split"
        # Unknown are a network's bytes, those of a rank that was cut off, and all where the kernel
        # does not count.
        is_unknown = "://" in settings.dataset or None in read
        if is_unknown and passes >= 2:
            warnings.append(
                f"The run took {samples_text}: later epochs may have been read from a cache."
            )
        elif not is_unknown and share < _FROM_CACHE:
            warnings.append(
                f"Storage read {share:.0%} of the bytes of {samples_text}; the page cache had "
                "the rest. A dataset larger than memory is read from storage in every epoch: "
                "measure with one to learn about storage."
            )
    if settings.profile is not None and is_own(settings.model):
        warnings.append(
            f"Forward and backward last as those of {settings.profile.network} on one "
            f"{settings.profile.device}, not as those of model '{settings.model}': --accelerator "
            "cpu measures it here, --accelerator cuda on a GPU."
        )
    is_late = max(figures.overrun_share, figures.overshoot_share) > _NOISE
    if settings.profile is not None and is_late:
        overrun = (
            "the real model took longer than the emulated GPU would: "
            f"{figures.overrun_share:.1%} of the time went into that, and "
            f"{figures.overshoot_share:.1%} into phases that ended late. This time counts as "
            "“other”, so occupancy is a lower bound."
        )
        if cpu is None or cpu.own_cpus + (cpu.other_cpus or 0.0) >= USED_UP * cpu.usable:
            warnings.append(
                f"The CPUs are overloaded: {overrun} Use a slower profile, or more cores a rank."
            )
        else:
            warnings.append(
                f"The ranks used only {cpu.own_cpus:.1f} of {cpu.usable:g} CPUs, but {overrun} "
                "The model's thread waits, or is too slow: use a slower profile, or --accelerator "
                "cpu."
            )
    if figures.queued_share > WAITING:
        warnings.append(
            f"In {figures.queued_share:.0%} of the wall time the thread that trains stood in the "
            "queue for a CPU: they are overloaded, and its times are too long. Use fewer "
            "--workers, fewer ranks or more cores, and end other processes."
        )
    if figures.waiting_share > WAITING:
        warnings.append(
            f"In {figures.waiting_share:.0%} of the wall time the thread that trains was in "
            "forward, backward or the optimiser and wanted no CPU: it slept, or waited for a lock, "
            "a file, the network or other ranks."
        )
    # The largest share of a rank's steps fed from stock: results that waited before and not after.
    stock = 0.0
    for log in logs:
        if len(log.snapshots) != 2:
            continue
        first, last = log.snapshots
        if first.stages and last.stages:
            taken_batches = first.stages[-1].waiting - last.stages[-1].waiting
            share = taken_batches / settings.accumulation / window.num_measured_steps
            stock = max(stock, share)
    if stock > _NOTABLE:
        warnings.append(
            f"{stock:.0%} of the measured steps used batches that were prefetched before "
            f"measuring began. In a long run occupancy may be up to {100 * stock:.0f} "
            "points lower: measure more steps."
        )
    return warnings


def ranks_disagree(logs: Sequence[RankLog]) -> bool:
    """Return whether ranks that completed have different weights."""
    return len({log.end.parameters_xxh3 for log in logs if log.end}) > 1
