"""The page of a diagnosis."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fuelrail.bench.report.files import REPORT_HTML
from fuelrail.bench.report.page import facts, figure, head, hero, note, page, table
from fuelrail.bench.report.plots import BLUE, GREY, PercentFormatter, new_figure, style, to_svg
from fuelrail.bench.studies.diagnose.report import RUNS_HEADER, TRIED_HEADER, conclusion, run_rows, title_of, tried_rows

if TYPE_CHECKING:
    from fuelrail.bench.studies.diagnose.judge import Diagnosis
    from fuelrail.bench.studies.diagnose.report import DiagnoseReport

_METHOD = (
    "The baseline is run first. Then one part is left out in each run, and the baseline is repeated. The gain of a run "
    "is the speed-up that removing this bottleneck would bring, until the next one. Intervals contain the gain of the "
    "mean step with 95% probability: from a block bootstrap over the steps of both runs, and with three rounds or more "
    "from the differences between rounds (Student's t). A gain is significant if it exceeds 2% and its whole interval "
    "is above the difference of the two baselines. Otherwise all runs are repeated, up to --max-rounds times."
)


def render_page(report: DiagnoseReport) -> str:
    """Return the page as one string; it loads nothing, and links to the reports of the runs in folders beside it."""
    ranks = f"{report.num_ranks} rank{'s' if report.num_ranks != 1 else ''}"
    device = str(report.accelerator["device"])
    emulated = "emulated " if report.accelerator["kind"] == "emulated" else ""
    about = (
        f"Training on <b>{escape(report.dataset.name)}</b> ({report.dataset.num_samples:,} samples, split "
        f"{escape(report.dataset.split)}): {ranks}, each one {escape(emulated + device)}"
    )
    parts = head(report, "Fuelrail diagnosis", "What bounds this training?", about)
    diagnosis = report.diagnosis
    if diagnosis is None:
        parts.append(note("No diagnosis: not all runs were made."))
        rows = [[escape(run.name), f"{run.step_ms:.2f}", f"{run.occupancy:.1%}"] for run in report.runs]
        parts += [table(["run", "step ms", "occupancy"], rows)] if rows else []
    else:
        gain = f"; without it {diagnosis.expected_gain:.0%} faster" if diagnosis.expected_gain else ""
        rounds = f"; {diagnosis.num_rounds} rounds" if diagnosis.num_rounds > 1 else ""
        what = "the bound of this run" if diagnosis.bound == "undecided" else "bounds this run"
        meaning = f"{what}{gain}; occupancy {diagnosis.occupancy:.1%}{rounds}"
        parts.append(hero(diagnosis.bound, meaning, f"{diagnosis.finding} {diagnosis.advice}"))
    parts += map(note, report.warnings)
    if diagnosis is not None:
        caption = (
            "How much faster the run is without each; lines: 95% intervals. Grey band: what two runs that differ in "
            "nothing differ by. Blue: significant. Grey: noise, or too small."
        )
        parts += ["<h2>What if it cost nothing?</h2>", figure(_bars(diagnosis), caption)]
        parts.append(table(list(map(escape, RUNS_HEADER)), ([*map(escape, row)] for row in run_rows(diagnosis))))
    if report.tried is not None:
        parts.append("<h2>What was tried</h2>")
        if report.tried:
            rows = [[*map(escape, row)] for row in tried_rows(report.tried)]
            parts.append(table(list(map(escape, TRIED_HEADER)), rows))
        parts.append(f"<p>{escape(conclusion(report.tried).capitalize())}.</p>")
    if report.runs:
        links = (f'<a href="{escape(run.name)}/{REPORT_HTML}">{escape(run.name)}</a>' for run in report.runs)
        parts.append(f'<p class="small">Reports of the runs: {", ".join(links)}.</p>')
    parts += ["<h2>How these figures are made</h2>", f"<p>{escape(_METHOD)}</p>"]
    parts += facts(report.machine, report.dataset, report.options)
    return page(f"Fuelrail diagnosis: {report.dataset.name}", parts)


def _bars(diagnosis: Diagnosis) -> str:
    entries = diagnosis.counterfactuals
    with style():
        drawn, axes = new_figure(0.6 + 0.3 * len(entries))
        for row, entry in enumerate(entries):
            stands_out = (
                entry.is_significant and entry.left_out != "again" and entry.gain_low > (diagnosis.noise or 0.0)
            )
            colour = BLUE if stands_out else GREY
            axes.barh(row, entry.gain, 0.62, color=colour, linewidth=0)
            axes.plot([entry.gain_low, entry.gain_high], [row, row], color="#222222", linewidth=1.0)
        if diagnosis.noise:
            axes.axvspan(-diagnosis.noise, diagnosis.noise, color=GREY, alpha=0.2, linewidth=0)
        axes.axvline(0, color="#777777", linewidth=0.8)
        axes.set_yticks(range(len(entries)), [title_of(entry) for entry in entries])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("more samples/s than the baseline")
        return to_svg(drawn, "Gain of each run without something")
