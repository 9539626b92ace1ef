"""The document of a loader report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import (
    Block,
    Document,
    Figure,
    Hero,
    Note,
    Section,
    Text,
    document,
    marked,
    table_of,
    tiles_of,
)
from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from fuelrail.bench.studies.loader.report import LoaderReport

_METHOD = (
    "Rounds alternate between the whole loader, each of its stages alone, and this "
    "machine's limits, so that a disturbance affects all three. Only the steady part of "
    "each run counts: the marginal standard error rule cuts off the start. The report has "
    "the medians over the rounds, with the lowest and the highest value; for five rounds "
    "that is a 94% confidence interval of the median, for any distribution. The consumer "
    "does nothing with the batches."
)

_STAGES = marked(
    "In the order in which data flows, over all runs. **Busy**: working. **Starved**: "
    "waiting for the stage before. **Blocked**: the next stage has no room. The stage that "
    "is always busy sets the pace."
)

_ALONE = (
    "Stages and limits work on samples that are in memory. The limits are what the "
    "libraries take for the same bytes with the loader's number of decoding threads, into "
    "reused memory, and nothing around them."
)


def describe(report: LoaderReport, plots: Mapping[str, str]) -> Document:
    """Return the report as a document with these plots."""
    threads = report.options["workers"]
    where = report.options.get("where")
    subtitle = marked(
        (
            "Loading **{name}** ({samples:,} samples, split {split}) with {threads}{where}, "
            "{batch} samples a batch"
        ),
        name=report.dataset.name,
        samples=report.dataset.num_samples,
        split=report.dataset.split,
        threads=counted(threads, "decoding thread"),
        batch=report.options["batch_size"],
        where=f", where='{where}'" if where else "",
    )
    parts: list[Block | Section] = [Note(f"No figures: {report.too_short}.")]
    figures = report.figures
    if figures is not None:
        images = figures.images_per_s
        bound = figures.bound
        gain = "" if bound.gain is None else f" At best {bound.gain:.1f} times as fast."
        parts = [
            Hero(
                f"{images.median:.0f}",
                f"images/s; {images.in_words('.0f')}",
                f"{bound.finding} {bound.advice}{gain}",
            ),
            tiles_of(figures),
        ]
    rates = table_of([*report.stages, *report.limits])
    parts += [
        Section("Loader stages", [Figure(plots.get("stages", ""), _STAGES)]),
        Section("What a sample costs", [rates, Text(_ALONE, small=True)]),
        Section("How these figures are made", [Text(_METHOD)]),
    ]
    return document(
        report,
        brand="Fuelrail loader report",
        title="How fast can this dataset be loaded here?",
        subtitle=subtitle,
        parts=parts,
    )
