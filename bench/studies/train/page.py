"""The page of a training report."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fuelrail.bench.report.page import GIB, bar, facts, figure, head, hero, key, legend, note, page, table, tiles
from fuelrail.bench.studies.train.plots import PHASE_COLOURS, PHASE_LABELS, plots
from fuelrail.bench.studies.train.report import learning_sentences

if TYPE_CHECKING:
    from fuelrail.bench.measure.clock import Summary
    from fuelrail.bench.studies.train.report import Figures, Report

# Losses below this share of the wall time are not worth a sentence.
_NOTABLE = 0.02

MIB = 2**20

_EMULATION = (
    "This run used an emulated GPU, as MLPerf Storage does. The figures say whether this host and this dataset would "
    "keep such an accelerator fed, not how fast it trains."
)


_OCCUPANCY = (
    "<b>Occupancy</b> is the time in which the accelerator computes forward, backward and optimiser, divided by wall "
    "time, over all steps after warm-up: MLPerf Storage’s accelerator utilisation (AU = total compute time / total "
    "running time), mean over ranks. Stricter than there: exposed all-reduce doesn’t count as busy, because a rank "
    "that waits in it for a starved neighbour does no work; the column “with all-reduce” includes it."
)


_PHASES = (
    "<b>Data wait</b> runs from asking the loader for the next batch to getting it, <b>host to device</b> from then "
    "until the model’s inputs lie on the device, <b>backward</b> until the last local gradient is computed, and "
    "<b>exposed all-reduce</b> from then until the last gradient is averaged over the ranks. <b>Other</b> is the rest "
    "of the wall time: targets, records, and in an emulation late wake-ups and the stand-in’s work beyond the emulated "
    "phases. A step begins where the one before ended, so nothing is left "
    "out."
)


_ON_A_GPU = (
    "On a GPU the phases come from CUDA events on the compute stream. The loader copies images on a stream of its own, "
    "ahead of the trainer: that time is its <b>transfer</b> stage, and <b>host to device</b> is only what the step "
    "still had to wait for."
)


_EMULATED_PHASES = (
    "In the emulation a phase is the emulated time, and only that counts as busy. What the stand-in’s real work takes "
    "beyond it, and late wake-ups, are “other”. So a slow or overloaded host lowers occupancy and never raises it. "
    "Gradients become ready as they would on the device, so the real all-reduce overlaps the emulated backward."
)


def render_page(report: Report) -> str:
    """Return the page as one string; it refers to nothing outside itself."""
    drawn = plots(report)
    parts = [
        *_head(report),
        *_verdict(report),
        *_real_and_emulated(report),
        *_over_time(report, drawn),
        *_step(report, drawn),
        *_memory(report, drawn),
        *_learning(report),
        *_loader(report, drawn),
        *_ranks(report),
        *_definitions(report),
        *facts(report.machine, report.dataset, report.options),
    ]
    return page(f"Fuelrail training report: {report.dataset.name}", parts)


def verdict(report: Report) -> str:
    """Return the run in two or three sentences."""
    figures = report.figures
    if figures is None:
        return f"No occupancy figure: {report.window.too_short}."
    share = {phase.phase: phase.share for phase in figures.phases}
    device = "emulated accelerators" if _emulated(report) else "accelerators"
    text = (
        f"The {device} computed {figures.occupancy.mean:.1%} of the time. Waiting for data took "
        f"{share['data_wait']:.1%}, copies to the device {share['host_to_device']:.1%} and exposed all-reduce "
        f"{share['all_reduce']:.1%}. "
    )
    losses = {
        "the loader, which delivers data more slowly than the accelerators take it": share["data_wait"],
        "the copies to the device": share["host_to_device"],
        "the all-reduce, or the rank that the others wait for in it": share["all_reduce"],
        "the host outside the phases (“other”)": share["other"],
    }
    worst, size = max(losses.items(), key=lambda entry: entry[1])
    if size < _NOTABLE:
        return text + f"Nothing holds the accelerators up by more than {_NOTABLE:.0%}: this run is bound by compute."
    rate = figures.throughput
    return text + (
        f"The largest loss is {worst}. Fully busy, the accelerators would take {rate.demand_samples_per_s:.1f} "
        f"samples/s; they got {rate.samples_per_s:.1f}."
    )


def _head(report: Report) -> list[str]:
    ranks = f"{report.num_ranks} rank{'s' if report.num_ranks != 1 else ''}"
    about = (
        f"Training on <b>{escape(report.dataset.name)}</b> ({report.dataset.num_samples:,} samples, split "
        f"{escape(report.dataset.split)}): {ranks}, each one {escape(_accelerator_name(report))}, "
        f"{report.options['batch_size']} samples a rank and batch"
    )
    return head(report, "Fuelrail training report", "How busy were the accelerators?", about)


def _verdict(report: Report) -> list[str]:
    figures = report.figures
    if figures is None:
        return [note(verdict(report)), *map(note, report.warnings)]
    segments = [(PHASE_LABELS[row.phase], PHASE_COLOURS[row.phase], row.share) for row in figures.phases]
    emulated = "emulated " if _emulated(report) else ""
    source = "" if report.source is None else f" {report.source.sentence()}"
    meaning = f"{emulated}accelerator occupancy, mean of {report.num_ranks}; lowest rank {figures.occupancy.lowest:.1%}"
    shown = hero(f"{figures.occupancy.mean:.1%}", meaning, verdict(report) + source, bar(segments))
    return [shown, _tiles(figures), *map(note, report.warnings)]


def _tiles(figures: Figures) -> str:
    rate = figures.throughput
    wait = next(phase for phase in figures.phases if phase.phase == "data_wait")
    cost = rate.cost_per_million_samples
    entries = [
        *([] if cost is None else [(f"{cost:,.2f}", "cost per million samples, in the price’s currency")]),
        (f"{rate.samples_per_s:.1f}", f"samples/s ({rate.images_per_s:.0f} images/s)"),
        (f"{figures.step_time.p50_ms:.1f} ms", f"step time p50; p99 {figures.step_time.p99_ms:.1f} ms"),
        (f"{wait.time.p50_ms:.2f} ms", f"data wait p50; p99 {wait.time.p99_ms:.1f} ms"),
        (f"{rate.gpu_hours_per_million_samples:.1f}", "GPU-hours per million samples"),
    ]
    if figures.mfu is not None:
        entries.append((f"{figures.mfu:.1%}", "model FLOP utilisation"))
    return tiles(entries)


def _real_and_emulated(report: Report) -> list[str]:
    accelerator = report.accelerator
    if not _emulated(report):
        return []
    backend = next((rank.backend for rank in report.ranks if rank.backend), None)
    reduce = f"gradients and their all-reduce ({escape(backend)})" if backend else "gradients (one rank: no all-reduce)"
    parameters = report.model["num_parameters"] or 0
    real = (
        "Reading shards, checking, decoding, augmenting and batching; every wait for data. A small stand-in model of "
        f"{parameters:,} parameters trains on the batches: loss, {reduce}, optimiser. Wall time of everything."
    )
    emulated = (
        f"How long forward, backward and optimiser occupy the device: the time published or derived for "
        f"{escape(accelerator['network'])} on one {escape(accelerator['device'])} "
        f"({accelerator['forward_ms']:g} ms forward and {accelerator['backward_ms']:g} ms backward per "
        f"{accelerator['per']}, {accelerator['optimiser_ms']:g} ms optimiser a step). The host sleeps through it and "
        "is free to load. Copies to the device and the real network's gradient sizes are not emulated."
    )
    head = '<table class="real"><thead><tr><th>real, measured</th><th>emulated</th></tr></thead>'
    return [
        "<h2>What is real here, and what is emulated</h2>",
        f"<p>{_EMULATION}</p>",
        f"{head}<tbody><tr><td>{real}</td><td>{emulated}</td></tr></tbody></table>",
    ]


def _over_time(report: Report, drawn: dict[str, str]) -> list[str]:
    if "occupancy" not in drawn:
        return []
    warmup = report.window.num_warmup_steps
    caption = (
        "Share of time in which each accelerator computed, over the last 5 steps up to each moment. The first "
        f"{warmup} steps (shaded) are warm-up and count nowhere."
    )
    parts = ["<h2>Occupancy over time</h2>", figure(drawn["occupancy"], caption)]
    if "timeline" in drawn:
        caption = "The first steps after warm-up on one clock: what each rank was doing when."
        parts += [figure(drawn["timeline"], caption, _phase_legend())]
    return parts


def _step(report: Report, drawn: dict[str, str]) -> list[str]:
    if "breakdown" not in drawn:
        return []
    caption = (
        "Wall time of each step, mean over ranks; the warm-up is shaded. Blue and green is work on the device, orange "
        "and pink is waiting."
    )
    parts = ["<h2>Where a step’s time goes</h2>", figure(drawn["breakdown"], caption, _phase_legend())]
    figures = report.figures
    if figures is not None:
        rows = [
            [key(PHASE_COLOURS[row.phase]) + PHASE_LABELS[row.phase], *_times(row.time), f"{row.share:.1%}"]
            for row in figures.phases
        ]
        rows.append(["whole step", *_times(figures.step_time), "100%"])
        parts.append(table(["phase", "mean [ms]", "p50 [ms]", "p99 [ms]", "max [ms]", "share"], rows, total=True))
        hidden = figures.all_reduce_total
        parts.append(
            f'<p class="small">{figures.step_time.count} steps on all ranks after warm-up. All-reduce in all, hidden '
            f"behind backward or not: mean {hidden.mean_ms:.2f} ms, p99 {hidden.p99_ms:.2f} ms. Percentiles of phases "
            "don’t add up to those of the step.</p>"
        )
    captions = {
        "waits": "How long steps waited for data, after warm-up, all ranks.",
        "histogram": "Step times after warm-up, all ranks.",
        "loss": "The loss falls when images, geometry and boxes belong together.",
    }
    present = [figure(drawn[name], caption) for name, caption in captions.items() if name in drawn]
    # Three charts that say little where little is lost: they are a click away then.
    is_open = "" if figures is not None and figures.occupancy.mean > 1 - _NOTABLE else " open"
    more = "Waits, step times and loss"
    return [*parts, f'<details{is_open}><summary>{more}</summary><div class="row">{"".join(present)}</div></details>']


def _memory(report: Report, drawn: dict[str, str]) -> list[str]:
    if not report.memory:
        return []
    on_gpu = report.memory[0].source == "allocator"
    caption = (
        "Bytes by kind on rank "
        f"0. The step took longer than others: {'the allocator wrote down' if on_gpu else 'a tracker followed'} "
        f"{'each block' if on_gpu else 'each tensor'}. "
        + ("Activations include what is temporary." if on_gpu else "The optimiser’s temporary tensors count as its.")
    )
    rows = [
        [
            f"{rank}",
            f"{line.peak_bytes / MIB:,.1f}",
            "none" if line.reserved is None else f"{max(line.reserved) / MIB:,.1f}",
            ", ".join(f"{kind} {max(values) / MIB:,.1f}" for kind, values in line.allocated.items()),
        ]
        for rank, line in enumerate(report.memory)
    ]
    header = ["rank", "peak [MiB]", "reserved [MiB]", "most of each kind [MiB]"]
    return [
        "<h2>Memory over a step</h2>",
        figure(drawn["memory"], caption) if "memory" in drawn else "",
        table(header, rows),
    ]


def _learning(report: Report) -> list[str]:
    """Loss compared, targets and checkpoints, one sentence each."""
    lines = learning_sentences(report)
    return ["<h2>Learning and checkpoints</h2>", *(f"<p>{escape(line)}</p>" for line in lines)] if lines else []


def _loader(report: Report, drawn: dict[str, str]) -> list[str]:
    if "stages" not in drawn or report.figures is None:
        return []
    rows = [
        [
            escape(stage.name),
            f"{stage.num_threads}",
            f"{stage.items_per_s:.1f}",
            f"{stage.busy:.1%}",
            f"{stage.starved:.1%}",
            f"{stage.blocked:.1%}",
        ]
        for stage in report.figures.stages
    ]
    caption = (
        "In the order in which data flows. <b>Busy</b>: working. <b>Starved</b>: waiting for the stage before. "
        "<b>Blocked</b>: the next stage has no room. Where the accelerators wait for data, look for the stage that is "
        "always busy; where stages are blocked, the loader is ahead of the accelerators, as it should be."
    )
    return [
        "<h2>Loader stages</h2>",
        figure(drawn["stages"], caption),
        table(["stage", "threads, all ranks", "items/s", "busy", "starved", "blocked"], rows),
    ]


def _ranks(report: Report) -> list[str]:
    by_rank = {row.rank: row for row in report.figures.occupancy.ranks} if report.figures else {}
    emulated = "emulated " if _emulated(report) else ""
    paces = {pace.rank: pace for pace in report.figures.paces} if report.figures else {}
    rows = [
        [
            f"{rank.rank}",
            escape(emulated + rank.device),
            escape(rank.backend or "none"),
            f"{by_rank[rank.rank].occupancy:.1%}" if rank.rank in by_rank else "no figure",
            f"{by_rank[rank.rank].including_all_reduce:.1%}" if rank.rank in by_rank else "no figure",
            f"{paces[rank.rank].own_ms:.1f} ({paces[rank.rank].slower:+.1%})" if rank.rank in paces else "",
            f"{paces[rank.rank].last_in:.0%}" if rank.rank in paces else "",
            f"{rank.num_steps}" + ("" if rank.completed else " (cut off)"),
            f"{rank.peak_rss_bytes / GIB:.2f}" if rank.peak_rss_bytes else "unknown",
            f"{rank.peak_device_bytes / GIB:.2f}" if rank.peak_device_bytes else "none",
        ]
        for rank in report.ranks
    ]
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
    if _emulated(report):
        rows = [row[:-1] for row in rows]
    else:
        header.append("GPU memory [GiB]")
    legend_of = (
        '<p class="small">Memory: the peak. <b>Compute time</b>: step time without all-reduce, compared with the '
        "other ranks’. <b>Slowest</b>: share of steps in which the other ranks waited for this one.</p>"
    )
    return ["<h2>Ranks</h2>", table(header, rows), legend_of, *_gpus(report)]


def _gpus(report: Report) -> list[str]:
    """Render the measurements of NVML."""
    if not report.gpus:
        return []
    rows = [
        [
            f"{gpu.index}",
            f"{gpu.kernels:.0%}",
            f"{gpu.memory_traffic:.0%}",
            *("unknown" if share is None else f"{share:.0%}" for share in (gpu.decoder, gpu.jpeg)),
            f"{gpu.peak_memory_bytes / GIB:.1f}",
            f"{gpu.mean_sm_clock_mhz:.0f}",
        ]
        for gpu in report.gpus
    ]
    header = ["GPU", "kernels ran", "memory busy", "video decoder", "JPEG decoder", "memory [GiB]", "SM clock [MHz]"]
    return ["<h2>GPUs, by NVML, from start to end</h2>", table(header, rows)]


def _definitions(report: Report) -> list[str]:
    parts = ["<h2>How these figures are made</h2>", f"<p>{_OCCUPANCY}</p>", f"<p>{_PHASES}</p>"]
    if not _emulated(report):
        return [*parts, f"<p>{_ON_A_GPU}</p>"]
    parts.append(f"<p>{_EMULATED_PHASES}</p>")
    figures, accelerator = report.figures, report.accelerator
    if figures is not None:
        parts.append(
            "<p>What the emulation itself cost: the stand-in worked on the host for "
            f"{figures.stand_in_share:.1%} of the wall time, it outlasted the emulated phases by "
            f"{figures.overrun_share:.2%}, and the host ended them {figures.overshoot_share:.2%} late.</p>"
        )
    sources = "; ".join(escape(source) for source in accelerator["sources"])
    parts.append(f'<p class="small">Step times: {escape(accelerator["derivation"])} Sources: {sources}.</p>')
    return parts


def _emulated(report: Report) -> bool:
    return bool(report.accelerator["kind"] == "emulated")


def _accelerator_name(report: Report) -> str:
    accelerator = report.accelerator
    if not _emulated(report):
        return str(accelerator["device"])
    return f"emulated {accelerator['device']} ({accelerator['network']})"


def _times(summary: Summary) -> list[str]:
    return [f"{value:.2f}" for value in (summary.mean_ms, summary.p50_ms, summary.p99_ms, summary.max_ms)]


def _phase_legend() -> str:
    return legend([(PHASE_LABELS[phase], colour) for phase, colour in PHASE_COLOURS.items()])
