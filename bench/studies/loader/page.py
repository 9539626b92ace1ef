"""The page of a loader report."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuelrail.bench.report.page import GIB, facts, figure, head, hero, note, page, table, tiles
from fuelrail.bench.report.plots import (
    BLUE,
    GREY,
    ORANGE,
    PercentFormatter,
    legend_above,
    new_figure,
    stage_bars,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.bench.measure.rates import Interval, Rate
    from fuelrail.bench.studies.loader.report import LoaderFigures, LoaderReport

_METHOD = (
    "Rounds alternate between the whole loader, each of its stages alone, and this machine's limits, so that a "
    "disturbance affects all three. Only the steady part of each run counts: the marginal standard error rule cuts "
    "off the start. The report has the medians over the rounds, with the lowest and the highest value; for five "
    "rounds that is a 94% confidence interval of the median, for any distribution. The consumer does nothing with the "
    "batches."
)


_ALONE = (
    "Stages and limits work on samples that are in memory. The limits are what the libraries take for the same bytes "
    "with the loader's number of decoding threads, into reused memory, and nothing around them."
)


def render_page(report: LoaderReport) -> str:
    """Return the page as one string; it refers to nothing outside itself."""
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
    return f" ({interval.low:.{digits}f} to {interval.high:.{digits}f})" if interval.has_interval else ""


def _rows(rates: Sequence[Rate]) -> list[list[str]]:
    return [
        [escape(rate.name), str(rate.num_threads), f"{rate.samples_per_s:,.1f}", f"{rate.cpu_ms_per_sample:.3f}"]
        for rate in rates
    ]


_GREEN = "#009e73"


STAGE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def loader_plots(report: LoaderReport) -> dict[str, str]:
    """Return all plots that the report has data for, by name, each an ``<svg>`` element."""
    with style():
        drawn = {"batches": _batches(report), "cpu": _cpu(report), "stages": _stages(report), "queues": _queues(report)}
        if report.figures is not None and not report.figures.is_waterfall_noise:
            drawn["waterfall"] = _waterfall(report)
    return drawn


def _waterfall(report: LoaderReport) -> str:
    """Bars from the library's limit to the whole loader; what each step loses is drawn pale."""
    assert report.figures is not None
    steps = report.figures.waterfall
    cameras = len(report.dataset.cameras)
    figure, axes = new_figure(0.75 + 0.42 * len(steps))
    before = 0.0
    for row, step in enumerate(steps):
        if step.samples_per_s is None:  # what this machine doesn't have
            continue
        rate = step.samples_per_s * cameras
        if rate < before:
            axes.barh(row, before - rate, 0.62, left=rate, color=ORANGE, alpha=0.35, linewidth=0)
        axes.barh(row, rate, 0.62, color=_GREEN if step.name.startswith("whole") else BLUE, linewidth=0)
        axes.text(rate * 0.99, row, f"{rate:.0f}", ha="right", va="center", color="white", fontsize=9)
        before = rate
    axes.set_yticks(range(len(steps)), [step.name for step in steps])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("images/s, all threads")
    return to_svg(figure, "From the limit to the loader")


def _batches(report: LoaderReport) -> str:
    """Rate of each batch over the time of its run, one line a run; the part that counts is drawn strong."""
    figure, axes = new_figure(2.5)
    batch_size = report.options["batch_size"]
    rates_of_runs = [batch_size / np.maximum(np.array(run.batch_s), 1e-9) for run in report.runs]
    for run, rates in zip(report.runs, rates_of_runs, strict=True):
        at_s = np.cumsum(run.batch_s)
        cut = run.num_warm_up_batches
        axes.plot(at_s[: cut + 1], rates[: cut + 1], color=GREY, linewidth=0.9)
        axes.plot(at_s[cut:], rates[cut:], color=BLUE, linewidth=1.0, alpha=0.7)
    if report.figures is not None:
        axes.axhline(report.figures.samples_per_s.median, color="#333333", linewidth=0.9, linestyle=(0, (5, 3)))
    axes.set_xlim(left=0)
    # The second of two batches that were ready together takes microseconds: drawn whole, it would flatten the rest.
    every = np.concatenate(rates_of_runs)
    axes.set_ylim(0, min(1.05 * every.max(), 3 * float(np.median(every))))
    axes.set_xlabel("time since the loader was made [s]")
    axes.set_ylabel("samples/s, batch by batch")
    return to_svg(figure, "Rate over time, one line a run")


def _queues(report: LoaderReport) -> str:
    """Plot the fill of each stage's queue over the last run."""
    run = report.runs[-1]
    figure, axes = new_figure(2.5)
    at_s = [depths.at_s for depths in run.queues]
    for number, (stage, colour) in enumerate(zip(run.stages, STAGE_COLOURS, strict=False)):
        filled = [depths.waiting[number] / stage.capacity for depths in run.queues]
        axes.step(at_s, filled, where="post", color=colour, linewidth=1.0, label=f"{stage.name} (of {stage.capacity})")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.02, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("time since the loader was made [s]")
    axes.set_ylabel("queue filled")
    legend_above(axes)
    return to_svg(figure, "Queue depths over time")


def _cpu(report: LoaderReport) -> str:
    """CPU time of one sample, stage by stage, beside what the libraries alone would take for the same bytes."""
    rates = [*report.stages, *report.limits]
    figure, axes = new_figure(0.8 + 0.27 * len(rates))
    colours = [BLUE] * len(report.stages) + [GREY] * len(report.limits)
    rows = list(range(len(report.stages))) + [len(report.stages) + 0.5 + row for row in range(len(report.limits))]
    values = [rate.cpu_ms_per_sample for rate in rates]
    axes.barh(rows, values, 0.66, color=colours, linewidth=0)
    for row, value in zip(rows, values, strict=True):
        axes.text(value + max(values) * 0.008, row, f"{value:.2f}", va="center", fontsize=8, color="#333333")
    axes.set_yticks(rows, [rate.name for rate in rates])
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.08)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("CPU time of one sample [ms]")
    return to_svg(figure, "CPU time of one sample")


def _stages(report: LoaderReport) -> str:
    """Return the stages' clocks, summed over all runs."""
    rows = []
    for clocks in zip(*(run.stages for run in report.runs), strict=True):
        parts = [sum(getattr(clock, name) for clock in clocks) for name in ("busy_s", "starved_s", "blocked_s")]
        busy, starved, blocked = (part / (sum(parts) or 1.0) for part in parts)
        rows.append((f"{clocks[0].name} x{clocks[0].num_threads}", busy, starved, blocked))
    return stage_bars(rows)
