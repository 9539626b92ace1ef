"""The document of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fuelrail.bench.peers.peer import OURS, Work
from fuelrail.bench.report.page import (
    Block,
    Document,
    Figure,
    Hero,
    Items,
    Section,
    Table,
    Text,
    document,
)
from fuelrail.bench.studies.compare.report import (
    REFERENCE,
    CompareReport,
    ranking,
    reasons_left_out,
)

HEADER = (
    "loader:recipe",
    "images/s",
    "lowest to highest",
    f"speed-up of {REFERENCE}",
    "95 % interval",
    "CPU-s per 1,000 images",
    "peak MB",
    "first batch [s]",
    "PSNR dB, mean (lowest)",
    "runs",
)
_METHOD = (
    "Every loader runs in a process of its own, all pinned to the same CPUs, with its data "
    f"in the page cache (up to 4 GiB). {REFERENCE} runs during the whole round. Every other "
    "loader is started once per round and runs four laps, after its first batch and a "
    "warm-up lap. The two loaders alternate: the waiting loader is paused with all its "
    "workers, and the one that starts changes from lap to lap. A rate is the slope of the "
    "line through the arrival times of the batches in all laps. A ratio compares laps in "
    "turns, one ratio a round, so that a machine whose speed changes within seconds "
    "disturbs both alike. The interval is Student's t on the logarithms over the rounds. "
    "Every run is included unless listed otherwise. Before the timing, the images of every "
    "loader are checked against the reference (decode at full size, shrink by area, crop), "
    "and the samples of an epoch are counted. The consumer takes batches and does nothing "
    "with them. Memory counts shared pages once, and pages of mapped files, from which "
    "Fuelrail and SPDL read their shards. Fuelrail's batches contain matrices and boxes as "
    "well as images; those of the others contain images only."
)


def describe(report: CompareReport, plots: Mapping[str, str]) -> Document:
    """Return the report as a document with these plots."""
    parts: list[Block | Section] = []
    rivals = [entry for entry in ranking(report) if entry.peer != OURS]
    for rival in rivals:
        times = rival.figures.ours_times_as_fast if rival.figures is not None else None
        if times is None:
            continue
        interval = ""
        undecided = ""
        if times.has_interval:
            interval = f" (95 % interval {times.low:.2f} to {times.high:.2f})"
        if times.has_interval and times.low <= 1 <= times.high:
            undecided = " The interval contains 1: these rounds do not show which is faster."
        hero = Hero(
            f"{times.median:.2f} x",
            f"{REFERENCE} against {rival.name}, the fastest of the others",
            f"{REFERENCE} delivers images {times.median:.2f} times as fast as "
            f"{rival.name}{interval}, on the same CPUs and files.{undecided} {len(rivals)} "
            "other ways to load were timed.",
        )
        parts.append(hero)
        break
    if ranking(report):
        caption = "Median of the rounds; the line is lowest to highest. Green: Fuelrail."
        figure = Figure(plots.get("rates", ""), caption)
        parts.append(Section("Images a second", [figure, Table(HEADER, list(rows(report)))]))
    reasons = reasons_left_out(report.contestants)
    parts += [Section("Left out", [Items(reasons)])] if reasons else []
    parts.append(Section("How these figures are made", [Text(_METHOD)]))
    subtitle = f"{describe_work(report.work)}, {report.num_rounds} rounds"
    packages = {**report.machine.packages, **report.packages}
    return document(
        report,
        brand="Fuelrail comparison",
        title="The same images through every loader",
        subtitle=subtitle,
        parts=parts,
        packages=packages,
    )


def rows(report: CompareReport) -> Iterator[list[str]]:
    """Yield one row for each contestant that was timed, the fastest first."""
    for entry in ranking(report):
        figures = entry.figures
        check = entry.check
        assert figures is not None
        rate = figures.images_per_s
        times = figures.ours_times_as_fast
        # A ratio of something to itself, or a single one, has no interval.
        interval = (
            f"{times.low:.2f} to {times.high:.2f}"
            if times and times.has_interval and entry.name != REFERENCE
            else ""
        )
        yield [
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


def describe_work(work: Work) -> str:
    """Return the work of the loaders in one sentence."""
    return (
        f"{work.num_samples:,} samples of {len(work.cameras)} images, "
        f"{work.source_wh[0]}x{work.source_wh[1]} JPEG, to uint8 batches of "
        f"{work.batch_size} x {len(work.cameras)} x 3 x {work.height} x {work.width}, "
        f"shuffled, on {work.num_workers} CPUs"
    )
