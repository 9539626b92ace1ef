"""The document of a training report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import (
    GIB,
    Block,
    Document,
    Figure,
    Hero,
    Items,
    Note,
    Section,
    Table,
    Text,
    Tiles,
    document,
    format_number,
    marked,
    table_of,
    tiles_of,
)
from fuelrail.pipeline.cli import counted

if TYPE_CHECKING:
    from fuelrail.bench.measure.clock import Summary
    from fuelrail.bench.studies.train.report import Report

# Okabe and Ito's colours, which colour-blind readers can tell apart: work in blues and greens,
# waiting in orange.
PHASE_COLOURS = {
    "data_wait": "#d55e00",
    "host_to_device": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "all_reduce": "#cc79a7",
    "optimiser": "#009e73",
    "other": "#999999",
}
PHASE_LABELS = {phase: phase.replace("_", " ") for phase in PHASE_COLOURS} | {
    "all_reduce": "exposed all-reduce"
}
_PHASE_LEGEND = [(PHASE_LABELS[phase], colour) for phase, colour in PHASE_COLOURS.items()]

MIB = 2**20

_OCCUPANCY = marked(
    "**Occupancy** is the time in which the accelerator computes forward, backward and "
    "optimiser, divided by wall time, over all steps after warm-up, mean over ranks: MLPerf "
    "Storage’s accelerator utilisation. Exposed all-reduce doesn’t count as busy, because a "
    "rank that waits in it for a starved neighbour does no work; the column “with "
    "all-reduce” includes it."
)
_PHASES = marked(
    "**Data wait** runs from asking the loader for the next batch to getting it, **host to "
    "device** from then until the model’s inputs are on the device, **backward** until the "
    "last local gradient is computed, and **exposed all-reduce** from then until the last "
    "gradient is averaged over the ranks. **Other** is the rest of the wall time. A step "
    "begins where the one before ended, so nothing is left out."
)
_LOSSES = marked(
    "**Padding**: the share of the model’s predictions that count for nothing, and that "
    "share of forward and backward. **Imbalance**: what the dearest rank’s samples cost "
    "beyond the mean rank’s, by the order’s cost model or the one fitted, and the time that "
    "the mean rank waits for it: (1 - mean / dearest) of the dearest rank’s forward and "
    "backward. Both are parts of the phases above."
)
_STAGES = marked(
    "In the order in which data flows. **Starved**: waiting for the stage before. "
    "**Blocked**: the next stage has no room. If the accelerators wait for data, the "
    "stage that is always busy is the cause."
)
_ON_A_GPU = (
    "On a GPU the phases are from CUDA events on the compute stream. The loader copies "
    "images on a stream of its own, ahead of the trainer; host to device is only what the "
    "step still had to wait for."
)


_ON_THE_HOST = (
    "On a CPU the phases are by the clock of the thread that trains. The loader’s threads share "
    "the CPUs with it, so that loading makes forward and backward longer too."
)
_ON_A_CPU = (
    "The model ran on this machine’s CPU: its times and rates say nothing of a GPU’s, nor whether "
    "the loader keeps up with one."
)
_TITLES = {
    "cuda": "How busy were the accelerators?",
    "emulated": "How busy does this host keep emulated accelerators?",
    "cpu": "Where does a step’s time go on this CPU?",
}
_COMPUTING = ("forward", "backward", "optimiser")


def describe(report: Report, plots: Mapping[str, str]) -> Document:
    """Return the report as a document with these plots."""
    on_cpu = _on_cpu(report)
    device = str(report.accelerator["device"])
    if _emulated(report):
        device = f"emulated {device} ({report.accelerator['network']})"
    subtitle = marked(
        "Training on **{name}** ({samples:,} samples, split {split}): {ranks}, each one "
        "{device}, {batch} a rank and batch",
        name=report.dataset.name,
        samples=report.dataset.num_samples,
        split=report.dataset.split,
        ranks=counted(report.num_ranks, "rank"),
        device=device,
        batch=counted(report.options["batch_size"], "sample"),
    )
    computed = "accelerator computed"
    if on_cpu:
        computed = "rank was in forward, backward and optimiser"
    over_time = (
        f"Share of time in which each {computed}, over 5 steps. "
        f"Shaded: {report.window.num_warmup_steps} steps of warm-up."
    )
    parts: list[Block | Section] = [
        *_verdict(report),
        Section(
            "Occupancy over time",
            [Figure(plots.get("occupancy", ""), over_time)],
        ),
        *_step(report, plots),
    ]
    figures = report.figures
    costs: list[Block] = []
    if figures is not None and figures.losses:
        step_ms = figures.step_time.mean_ms
        rows = [
            [
                name,
                f"{loss.size:.1%}",
                format_number(loss.time_ms),
                f"{loss.time_ms / step_ms:.1%}",
            ]
            for name, loss in figures.losses.items()
        ]
        costs.append(Table(("lost to", "size", "time a step [ms]", "share of step"), rows))
        costs.append(Text(_LOSSES, small=True))
    if figures is not None and figures.cost_fit is not None:
        costs.append(Items([figures.cost_fit.sentence()]))
    if costs:
        parts.append(Section("Padding and imbalance", costs))
    saves = report.checkpoints
    lines = []
    if saves is not None and saves.restored is not None:
        lines.append(
            f"The run continued after step {saves.restored.step} from checkpoint "
            f"{saves.restored.folder}, which {counted(saves.restored.world_size, 'rank')} saved."
        )
    if saves is not None and saves.stall and saves.save and saves.num_bytes is not None:
        lines.append(
            f"{counted(saves.num_saves, 'checkpoint')} of {saves.num_bytes / 1e6:,.1f} "
            f"MB: each stalled the training for {saves.stall.mean_ms:.1f} ms and was "
            f"visible after {saves.save.mean_ms:,.0f} ms."
        )
    if lines:
        parts.append(Section("Checkpoints", [Items(lines)]))
    if figures is not None and figures.stages:
        figure = Figure(plots.get("stages", ""), _STAGES)
        parts.append(Section("Loader stages", [figure, table_of(figures.stages)]))
    parts += _ranks(report)
    if report.gpus:
        parts.append(Section("GPUs, by NVML, from start to end", [table_of(report.gpus)]))
    parts.append(_definitions(report))
    return document(
        report,
        brand="Fuelrail training report",
        title=_TITLES[report.accelerator["kind"]],
        subtitle=subtitle,
        parts=parts,
    )


def verdict(report: Report) -> str:
    """Return the run in two or three sentences."""
    figures = report.figures
    if figures is None:
        return f"No occupancy figure: {report.window.too_short}."
    sentences = []
    taker = "accelerators"
    if _on_cpu(report):
        taker = "model"
        share = {phase.phase: phase.share for phase in figures.phases}
        phase = max(_COMPUTING, key=lambda name: share[name])
        sentences.append(
            f"Forward, backward and optimiser take {figures.occupancy.mean:.1%} of the time on the "
            f"CPU, most of it {phase}."
        )
    nothing = "Nothing certain holds the training up by more than 2% of the time."
    sentences.append(report.findings[0].text if report.findings else nothing)
    rate = figures.throughput
    sentences.append(
        f"Without losses the {taker} would take {format_number(rate.demand_samples_per_s)} "
        f"samples/s; this run made {format_number(rate.samples_per_s)}."
    )
    return " ".join(sentences)


def _verdict(report: Report) -> list[Block]:
    figures = report.figures
    if figures is None:
        return [Note(verdict(report))]
    segments = [
        (PHASE_LABELS[row.phase], PHASE_COLOURS[row.phase], row.share) for row in figures.phases
    ]
    kinds = {
        "cuda": "accelerator occupancy",
        "emulated": "emulated accelerator occupancy",
    }
    kinds["cpu"] = "of the time in forward, backward and optimiser, on a CPU"
    kind = kinds[report.accelerator["kind"]]
    if _emulated(report):
        kind += f", with the published times of {report.accelerator['network']}"
    meaning = f"{kind}, mean of {report.num_ranks}; lowest rank {figures.occupancy.lowest:.1%}"
    names = {}
    if _on_cpu(report):
        names["gpu_hours_per_million_samples"] = "rank-hours per million samples"
    tiles = tiles_of(figures.throughput, figures, names=names)
    wait = next(phase for phase in figures.phases if phase.phase == "data_wait").time
    wait_label = f"data wait p50; p99 {format_number(wait.p99_ms)} ms"
    on_cpu = [Note(_ON_A_CPU)] if _on_cpu(report) else []
    return [
        Hero(f"{figures.occupancy.mean:.1%}", meaning, verdict(report), segments),
        Tiles([*tiles.entries, (f"{format_number(wait.p50_ms)} ms", wait_label)]),
        *on_cpu,
    ]


def _step(report: Report, plots: Mapping[str, str]) -> list[Section]:
    caption = (
        "Wall time of each step, mean over ranks; blue and green is work on the device, orange "
        "and pink waiting."
    )
    blocks: list[Block] = [Figure(plots.get("breakdown", ""), caption, _PHASE_LEGEND)]
    figures = report.figures
    if figures is not None:
        rows = [
            [PHASE_LABELS[row.phase], *_times(row.time), f"{row.share:.1%}"]
            for row in figures.phases
        ]
        rows.append(["whole step", *_times(figures.step_time), "100%"])
        header = (
            "phase",
            "mean [ms]",
            "p50 [ms]",
            "p99 [ms]",
            "max [ms]",
            "share",
        )
        hidden = figures.all_reduce_total
        blocks += [
            Table(
                header,
                rows,
                total=True,
                colours=[PHASE_COLOURS[row.phase] for row in figures.phases],
            ),
            Text(
                f"{figures.step_time.count} steps on all ranks after warm-up. All-reduce, "
                f"hidden behind backward or not: mean {format_number(hidden.mean_ms)} ms, "
                f"p99 {format_number(hidden.p99_ms)} ms.",
                small=True,
            ),
        ]
    blocks.append(
        Figure(
            plots.get("loss", ""),
            "The loss falls when images, geometry and boxes belong together.",
        )
    )
    return [Section("Where a step’s time goes", blocks)]


def _ranks(report: Report) -> list[Section]:
    """Return the figures of each rank, and of GPUs the bytes of its state and what else it held."""
    measured = {row.rank: row for row in report.figures.occupancy.ranks} if report.figures else {}
    emulated = "emulated " if _emulated(report) else ""
    rows = []
    for rank in report.ranks:
        figures = measured.get(rank.rank)
        cells = ["no figure", "no figure", "", ""]
        if figures is not None:
            against = (
                f"{format_number(figures.own_ms)} ({figures.slower:+.1%})",
                f"{figures.last_in:.0%}",
            )
            comparison = against if report.num_ranks > 1 else ("", "")
            cells = [
                f"{figures.occupancy:.1%}",
                f"{figures.including_all_reduce:.1%}",
                *comparison,
            ]
        rows.append(
            [
                f"{rank.rank}",
                emulated + rank.device,
                rank.backend or "none",
                *cells,
                f"{rank.num_steps}" + ("" if rank.completed else " (cut off)"),
                f"{rank.peak_rss_bytes / GIB:.2f}" if rank.peak_rss_bytes else "unknown",
                f"{rank.peak_device_bytes / GIB:.2f}" if rank.peak_device_bytes else "none",
            ]
        )
    header = [
        "rank",
        "device",
        "all-reduce by",
        "occupancy",
        "with all-reduce",
        "compute time [ms]",
        "slowest",
        "steps",
        "host memory [GiB]",
    ]
    if report.accelerator["kind"] != "cuda":
        rows = [row[:-1] for row in rows]
    else:
        header.append("GPU memory [GiB]")
    legend = marked(
        "Memory: the peak. **Compute time**: step time without all-reduce, compared with "
        "the other ranks’. **Slowest**: share of steps in which the other ranks waited for "
        "this one."
    )
    sections = [Section("Ranks", [Table(header, rows), Text(legend, small=True)])]
    kinds = ("model", "gradients", "optimiser")
    state_rows = [
        [
            f"{rank.rank}",
            *(f"{rank.state_bytes[kind] / MIB:,.1f}" for kind in kinds),
            f"{(rank.peak_device_bytes - sum(rank.state_bytes.values())) / MIB:,.1f}",
        ]
        for rank in report.ranks
        if rank.peak_device_bytes and rank.state_bytes
    ]
    state_header = (
        "rank",
        *(f"{kind} [MiB]" for kind in kinds),
        "activations and others, at the peak [MiB]",
    )
    if state_rows:
        sections.append(Section("Memory of the GPUs", [Table(state_header, state_rows)]))
    return sections


def _definitions(report: Report) -> Section:
    blocks = [Text(_OCCUPANCY), Text(_PHASES)]
    accelerator = report.accelerator
    if not _emulated(report):
        device = _ON_THE_HOST if _on_cpu(report) else _ON_A_GPU
        return Section("How these figures are made", [*blocks, Text(device)])
    backend = next((rank.backend for rank in report.ranks if rank.backend), None)
    emulated = (
        "This run used an emulated GPU: the figures say whether this host and dataset keep "
        "such an accelerator fed, not how fast it trains. Forward, backward and optimiser "
        f"last as published or derived for {accelerator['network']} on one "
        f"{accelerator['device']}: {accelerator['forward_ms']:g} ms and "
        f"{accelerator['backward_ms']:g} ms for each {accelerator['per']}, and "
        f"{accelerator['optimiser_ms']:g} ms a step. Only that counts as busy. Loading and "
        f"every wait are real, and so is the model {report.model['name']}, which stands in "
        f"with its {report.model['num_parameters'] or 0:,} parameters and its "
        f"{f'all-reduce by {backend}' if backend else 'gradients'}. What its work takes "
        "beyond the emulated time, and late wake-ups, are “other”: a slow host lowers "
        "occupancy and never raises it."
    )
    source = (
        f"Step times: {accelerator['derivation']} Sources: {'; '.join(accelerator['sources'])}."
    )
    return Section(
        "How these figures are made",
        [Text(emulated), *blocks, Text(source, small=True)],
    )


def _emulated(report: Report) -> bool:
    return bool(report.accelerator["kind"] == "emulated")


def _on_cpu(report: Report) -> bool:
    return bool(report.accelerator["kind"] == "cpu")


def _times(summary: Summary) -> list[str]:
    return [
        format_number(value)
        for value in (
            summary.mean_ms,
            summary.p50_ms,
            summary.p99_ms,
            summary.max_ms,
        )
    ]
