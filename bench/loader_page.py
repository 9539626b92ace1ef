"""The page of a loader report."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import msgspec

from fuelrail.bench.loader_plots import loader_plots
from fuelrail.bench.page import GIB, facts, figure, head, hero, note, page, table, tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.loader_report import LoaderFigures, LoaderReport
    from fuelrail.bench.rates import Rate
    from fuelrail.bench.steady import Interval

_METHOD = (
    "Rounds alternate between the whole loader, each of its stages alone, and this machine's limits, so that a "
    "disturbance hits all three. Of each run of the loader, the part counts that is steady: the marginal standard "
    "error rule cuts off the start. Medians over the rounds are told, with the lowest and the highest; for five rounds "
    "that is a 94% confidence interval of the median, whatever the distribution. The consumer does nothing with the "
    "batches."
)
_ALONE = (
    "Stages and limits work on samples that are in memory. The limits are what the libraries take for the same bytes "
    "with the loader's number of decoding threads, into reused memory, and nothing around them."
)


def render_loader_html(report: LoaderReport) -> str:
    """The page as one string; it refers to nothing outside itself."""
    drawn = loader_plots(report)
    stacked = [msgspec.structs.replace(rate, name=f"up to here: {rate.name}") for rate in report.stacked]
    threads = report.options["num_workers"]
    about = (
        f"Loading <b>{escape(report.dataset.name)}</b> ({report.dataset.num_samples:,} samples, split "
        f"{escape(report.dataset.split)}) with {threads} decoding thread{'s' if threads != 1 else ''}, "
        f"{report.options['batch_size']} samples a batch"
    )
    parts = head(report, "Fuelrail loader report", "How fast can this dataset be loaded here?", about)
    if report.figures is None:
        parts.append(note(f"No figures: {report.too_short}."))
    else:
        parts += _figures(report.figures)
    parts += map(note, report.warnings)
    if "waterfall" in drawn:
        caption = (
            "All with the same number of threads. Pale: what the step costs. The library decodes whole images, the "
            "loader may leave out what the crop leaves out, and then be faster."
        )
        parts += ["<h2>From the limit to the loader</h2>", figure(drawn["waterfall"], caption)]
    if report.figures is not None and report.figures.waterfall_doubt is not None:
        parts.append(note(f"From the limit to the loader: {report.figures.waterfall_doubt}"))
    parts += [
        "<h2>Loader stages</h2>",
        figure(
            drawn["stages"],
            "In the order in which data flows, over all runs. <b>Busy</b>: working. <b>Starved</b>: waiting for the "
            "stage before. <b>Blocked</b>: the next stage has no room. The stage that is always busy sets the pace.",
        ),
        "<h2>Queue depths over time</h2>",
        figure(
            drawn["queues"],
            "Of the last run: how full the queue behind each stage was when a batch was taken. The stage behind a full "
            "queue and before an empty one sets the pace.",
        ),
        "<h2>What a sample costs</h2>",
        figure(drawn["cpu"], "Blue: the loader's stages. Grey: the libraries alone."),
        table(
            ["what", "threads", "samples/s", "CPU time a sample [ms]"],
            _rows([*report.stages, *stacked, *report.limits]),
        ),
        f'<p class="small">{escape(_ALONE)}</p>',
        "<h2>Rate over time</h2>",
        figure(
            drawn["batches"],
            f"One line a run; grey is warm-up{', dashed the median' if report.figures else ''}. "
            "Batches that were ready together go off the top.",
        ),
        "<h2>How these figures are made</h2>",
        f"<p>{escape(_METHOD)}</p>",
        *facts(report.machine, report.dataset, report.options),
    ]
    return page(f"Fuelrail loader report: {report.dataset.name}", parts)


def _figures(figures: LoaderFigures) -> list[str]:
    images, bound = figures.images_per_s, figures.bound
    gain = "" if bound.gain is None else f" At best {bound.gain:.1f} times as fast."
    meaning = f"images/s; {images.shown('.0f')}"
    return [
        hero(f"{images.median:.0f}", meaning, f"{bound.finding} {bound.advice}{gain}"),
        tiles(
            [
                (f"{figures.samples_per_s.median:.1f}", f"samples/s{_range(figures.samples_per_s)}"),
                (f"{figures.cpu_s_per_1000_images:.2f} s", "CPU time per 1,000 images"),
                (f"{figures.stored_mb_per_s:.0f} MB/s", "as stored"),
                (f"{figures.first_batch_s.median:.2f} s", f"to the first batch{_range(figures.first_batch_s, 2)}"),
                (f"{figures.peak_rss_bytes / GIB:.2f} GiB", "peak memory of the process"),
            ]
        ),
    ]


def _range(interval: Interval, digits: int = 1) -> str:
    return f" ({interval.low:.{digits}f} to {interval.high:.{digits}f})" if interval.is_told else ""


def _rows(rates: Sequence[Rate]) -> list[list[str]]:
    return [
        [escape(rate.name), str(rate.num_threads), f"{rate.samples_per_s:,.1f}", f"{rate.cpu_ms_per_sample:.3f}"]
        for rate in rates
    ]
