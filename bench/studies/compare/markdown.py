"""The comparison as Markdown, with all that its figures depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.markdown import document, table
from fuelrail.bench.studies.compare.report import REFERENCE, ranking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fuelrail.bench.peers.peer import Work
    from fuelrail.bench.studies.compare.report import CompareReport, Contestant

HEADER = (
    "loader:recipe", "images/s", "lowest to highest", f"speed-up of {REFERENCE}", "95 % interval",
    "CPU-s per 1,000 images", "peak MB", "first batch [s]", "PSNR dB, mean (lowest)", "runs",
)  # fmt: skip


def rows(report: CompareReport) -> Iterator[list[str]]:
    """One row a contestant that was timed, the fastest first."""
    for entry in ranking(report):
        yield _row(entry)


def _row(entry: Contestant) -> list[str]:
    figures, check = entry.figures, entry.check
    assert figures is not None
    rate, times = figures.images_per_s, figures.ours_times_as_fast
    # A ratio of something to itself, or a single one, has no interval.
    interval = (
        f"{times.low:.2f} to {times.high:.2f}" if times and times.has_interval and entry.name != REFERENCE else ""
    )
    return [
        entry.name,
        f"{rate.median:.0f}",
        f"{rate.low:.0f} to {rate.high:.0f}" if rate.has_interval else "",
        "" if times is None else f"{times.median:.2f}",
        interval,
        f"{figures.cpu_s_per_1000_images:.2f}",
        f"{figures.peak_memory_bytes / 1e6:.0f}",
        f"{figures.first_batch_s:.2f}",
        "" if check is None else f"{check.mean_psnr_db:.1f} ({check.lowest_psnr_db:.1f})",
        str(rate.num_repeats),
    ]


def describe(work: Work) -> str:
    """Return the work of the loaders in one sentence."""
    return (
        f"{work.num_samples:,} samples of {len(work.cameras)} images, {work.source_wh[0]}x{work.source_wh[1]} JPEG, to "
        f"uint8 batches of {work.batch_size} x {len(work.cameras)} x 3 x {work.height} x {work.width}, shuffled, on "
        f"{work.num_workers} CPUs"
    )


def render_markdown(report: CompareReport) -> str:
    """Return the whole report as one text."""
    lines = table(HEADER, rows(report))
    out = [entry for entry in report.contestants if entry.left_out is not None]
    if out:
        lines += ["", "Left out:", "", *(f"- {entry.name}: {entry.left_out}" for entry in out)]
    about = f"{describe(report.work)}, {report.num_rounds} rounds"
    return document(report, "Loaders compared", about, lines, {**report.machine.packages, **report.packages})
