"""The loader report as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.markdown import document, table
from fuelrail.bench.studies.loader.report import step_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.measure.rates import Rate
    from fuelrail.bench.studies.loader.report import LoaderFigures, LoaderReport


def render_markdown(report: LoaderReport) -> str:
    """Return the whole report as one text."""
    lines = [f"No figures: {report.too_short}."] if report.figures is None else _figures(report.figures)
    for title, rates in (
        ("stage alone", report.stages),
        ("stage upon stage", report.stacked),
        ("this machine's limits, same bytes", report.limits),
    ):
        lines += ["", *_rates(title, rates)]
    return document(report, "Loader", report.dataset.name, lines)


def _figures(figures: LoaderFigures) -> list[str]:
    rate, images, first = figures.samples_per_s, figures.images_per_s, figures.first_batch_s
    stored = f"{rate.median:.1f} samples/s, {figures.stored_mb_per_s:.0f} MB/s as stored"
    peak = f"peak memory {figures.peak_rss_bytes / 1e6:.0f} MB"
    steps = [] if figures.is_waterfall_noise else [step_cells(step) for step in figures.waterfall]
    doubt = [] if figures.waterfall_doubt is None else [figures.waterfall_doubt, ""]
    return [
        f"- {images.median:.0f} images/s ({images.shown('.0f')}), {stored}",
        f"- {figures.cpu_s_per_1000_images:.2f} CPU-s per 1,000 images; first batch after {first.median:.2f} s; {peak}",
        f"- bound: {figures.bound.finding} {figures.bound.advice}",
        "",
        *doubt,
        *(table(("from the limit to the loader", "samples/s", "left"), steps) if steps else []),
    ]


def _rates(title: str, rates: Sequence[Rate]) -> list[str]:
    rows = [
        [rate.name, str(rate.num_threads), f"{rate.samples_per_s:,.1f}", f"{rate.cpu_ms_per_sample:.3f}"]
        for rate in rates
    ]
    return table((title, "threads", "samples/s", "CPU ms a sample"), rows)
