"""The training report as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuelrail.bench.report.markdown import document, table
from fuelrail.bench.studies.train.report import learning_sentences

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.report import Figures, Report


def render_markdown(report: Report) -> str:
    """Return the whole report as one text."""
    accelerator = report.accelerator
    emulated = accelerator["kind"] == "emulated"
    device = f"emulated {accelerator['device']} ({accelerator['network']})" if emulated else accelerator["device"]
    ranks = f"{report.num_ranks} rank{'s' if report.num_ranks != 1 else ''}"
    what = f"{ranks}, each one {device}, {report.options['batch_size']} samples a rank and batch"
    figures = report.figures
    body = [f"No figures: {report.window.too_short}."] if figures is None else _figures(report, figures)
    body += _memory(report)
    learned = [f"- {sentence}" for sentence in learning_sentences(report)]
    body += ["", *learned] if learned else []
    return document(report, "Training", f"{report.dataset.name}: {what}", body)


def _figures(report: Report, figures: Figures) -> list[str]:
    occupancy, rate, window = figures.occupancy, figures.throughput, report.window
    cost = rate.cost_per_million_samples
    busy = (
        f"- **occupancy {occupancy.mean:.1%}** (lowest rank {occupancy.lowest:.1%}), "
        f"{window.num_measured_steps} steps after {window.num_warmup_steps} of warm-up"
    )
    pace = (
        f"- {rate.samples_per_s:.1f} samples/s, {rate.images_per_s:.0f} images/s; fully busy, the accelerators would "
        f"take {rate.demand_samples_per_s:.1f} samples/s"
    )
    hours = f"- {rate.gpu_hours_per_million_samples:.2f} GPU-hours per million samples" + (
        "" if cost is None else f", {cost:,.2f} in the price's currency"
    )
    lines = [busy, pace, hours]
    if report.source is not None:
        lines.append(f"- {report.source.sentence()}")
    if figures.mfu is not None:
        lines.append(f"- model FLOP utilisation {figures.mfu:.1%}")
    phases = [
        [row.phase.replace("_", " "), f"{row.time.mean_ms:.2f}", f"{row.time.p50_ms:.2f}", f"{row.time.p99_ms:.2f}",
         f"{row.share:.1%}"]
        for row in figures.phases
    ]  # fmt: skip
    step = figures.step_time
    phases.append(["whole step", f"{step.mean_ms:.2f}", f"{step.p50_ms:.2f}", f"{step.p99_ms:.2f}", "100%"])
    stages = [
        [stage.name, str(stage.num_threads), f"{stage.items_per_s:.1f}", f"{stage.busy:.1%}", f"{stage.starved:.1%}",
         f"{stage.blocked:.1%}"]
        for stage in figures.stages
    ]  # fmt: skip
    paces = {pace.rank: pace for pace in figures.paces}
    ranks = [
        [str(row.rank), f"{row.occupancy:.1%}", f"{row.including_all_reduce:.1%}",
         f"{paces[row.rank].own_ms:.1f} ({paces[row.rank].slower:+.1%})" if row.rank in paces else ""]
        for row in occupancy.ranks
    ]  # fmt: skip
    lines += ["", *table(("phase", "mean ms", "p50 ms", "p99 ms", "share"), phases)]
    if stages:
        header = ("loader stage", "threads, all ranks", "items/s", "busy", "starved", "blocked")
        lines += ["", *table(header, stages)]
    lines += ["", *table(("rank", "occupancy", "with all-reduce", "compute time ms"), ranks)]
    gpus = [
        [str(gpu.index), f"{gpu.kernels:.0%}", "unknown" if gpu.jpeg is None else f"{gpu.jpeg:.0%}",
         f"{gpu.peak_memory_bytes / 2**30:.1f}", f"{gpu.mean_sm_clock_mhz:.0f}"]
        for gpu in report.gpus or []
    ]  # fmt: skip
    if gpus:
        lines += ["", *table(("GPU", "kernels ran", "JPEG decoder", "memory GiB", "SM clock MHz"), gpus)]
    return lines


def _memory(report: Report) -> list[str]:
    memory = [
        [str(rank), f"{line.peak_bytes / 2**20:,.1f}", "none" if line.reserved is None else
         f"{max(line.reserved) / 2**20:,.1f}",
         ", ".join(f"{kind} {max(values) / 2**20:,.1f}" for kind, values in line.allocated.items())]
        for rank, line in enumerate(report.memory or [])
    ]  # fmt: skip
    if memory:
        return ["", *table(("rank", "peak memory MiB", "reserved MiB", "most of each kind MiB"), memory)]
    return []
