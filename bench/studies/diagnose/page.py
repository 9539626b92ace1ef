"""The document of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuelrail.bench.report.files import REPORT_HTML
from fuelrail.bench.report.page import (
    Block,
    Document,
    Figure,
    Hero,
    Items,
    Note,
    Section,
    Span,
    Table,
    Text,
    document,
    format_number,
    marked,
)
from fuelrail.bench.studies.diagnose.report import (
    DiagnoseReport,
    conclusion,
    title_of,
    verdict_on,
)
from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from fuelrail.bench.studies.diagnose.judge import Counterfactual

_METHOD = (
    "The baseline is run first. Then one part is left out in each run, and the baseline is "
    "repeated. The gain of a run is the speed-up that removing this bottleneck would bring, "
    "until the next one. Intervals contain the gain of the mean step with 95% probability: "
    "from a block bootstrap over the steps of both runs, and with three rounds or more from "
    "the differences between rounds (Student's t); steps are then the mean over all rounds, "
    "gains the median. A gain is significant if it exceeds 2% and its whole interval is "
    "above the difference of the two baselines. Otherwise all runs are repeated, up to "
    "--max-rounds times."
)
_GAIN = ("faster by", "95 % interval")


def describe(report: DiagnoseReport, plots: Mapping[str, str]) -> Document:
    """Return the report as a document with these plots."""
    kind = report.accelerator["kind"]
    emulated = "emulated " if kind == "emulated" else ""
    places = {"emulated": " on emulated accelerators", "cpu": " on this CPU"}
    subtitle = marked(
        (
            "Training on **{name}** ({samples:,} samples, split {split}): {ranks}, each one "
            "{emulated}{device}"
        ),
        name=report.dataset.name,
        samples=report.dataset.num_samples,
        split=report.dataset.split,
        ranks=counted(report.num_ranks, "rank"),
        emulated=emulated,
        device=report.accelerator["device"],
    )
    parts: list[Block | Section] = []
    diagnosis = report.diagnosis
    if diagnosis is None:
        parts.append(Note("No diagnosis: not all runs were made."))
    else:
        gain = (
            f"; without it {diagnosis.expected_gain:.0%} faster" if diagnosis.expected_gain else ""
        )
        rounds = f"; {diagnosis.num_rounds} rounds" if diagnosis.num_rounds > 1 else ""
        subject = "the bound of this run" if diagnosis.bound == "undecided" else "bounds this run"
        meaning = f"{subject}{gain}; occupancy {diagnosis.occupancy:.1%}{rounds}"
        parts.append(
            Hero(
                diagnosis.bound,
                meaning,
                f"{diagnosis.finding} {diagnosis.advice}",
            )
        )
        caption = (
            "How much faster the run is without each part; lines: 95% intervals. Grey band: the "
            "difference between two identical runs. Blue: significant. Grey: noise, or too small."
        )
        rows = [
            [title_of(run), format_number(run.step_ms), *_gain_cells(run)]
            for run in diagnosis.counterfactuals
        ]
        table = Table(
            ("run", "step ms", *_GAIN),
            [["baseline", format_number(diagnosis.step_ms), "", ""], *rows],
        )
        parts.append(
            Section(
                "What if it cost nothing?",
                [Figure(plots.get("gains", ""), caption), table],
            )
        )
    if report.tried is not None:
        rows = [
            [
                trial.name,
                format_number(trial.samples_per_s),
                *_gain_cells(trial),
                verdict_on(trial, report.tried_noise),
            ]
            for trial in report.tried
        ]
        if rows and report.tried_against is not None:
            unchanged = format_number(report.tried_against)
            rows.insert(0, ["unchanged", unchanged, "", "", ""])
        tried = [Table(("settings tried", "samples/s", *_GAIN, ""), rows)] if rows else []
        parts.append(
            Section(
                "What was tried",
                [*tried, Items([conclusion(report.tried, report.tried_noise)])],
            )
        )
    if report.runs:
        links = [Span(f"{run} ", file=f"{run}/{REPORT_HTML}") for run in report.runs]
        parts.append(Text((Span("Reports of the runs: "), *links), small=True))
    parts.append(Section("How these figures are made", [Text(_METHOD)]))
    return document(
        report,
        brand="Fuelrail diagnosis",
        title=f"What bounds this training{places.get(kind, '')}?",
        subtitle=subtitle,
        parts=parts,
    )


def _gain_cells(entry: Counterfactual) -> list[str]:
    return [
        f"{entry.gain:+.1%}",
        f"{entry.gain_low:+.1%} to {entry.gain_high:+.1%}",
    ]
