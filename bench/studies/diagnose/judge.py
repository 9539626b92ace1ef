"""Find the bottleneck of a training run: the baseline compared with runs that leave out one part
each. Pure.

Each counterfactual answers "what if this cost nothing?", so its gain is also what lifting the bound
would bring, as far as the next bound. The one with the largest gain names the bound; facts that no
single run shows (is the dataset remote, was it the first time that its bytes were read) distinguish
its kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from fuelrail.bench.measure.rates import MIN_REPEATS, ratio_interval
from fuelrail.bench.report.page import format_number
from fuelrail.bench.studies.train.report import step_ratios
from fuelrail.bench.studies.train.warnings import USED_UP, WAITING

if TYPE_CHECKING:
    from fuelrail.bench.studies.train.figures import Figures
    from fuelrail.bench.studies.train.report import Report
    from fuelrail.bench.studies.train.settings import LeaveOut

Bound = Literal[
    "storage",
    "network",
    "cold cache",
    "decompression",
    "CPU decode",
    "Python",
    "waiting transform",
    "waiting model",
    "loader",
    "host to device",
    "GPU decode contention",
    "kernel launches",
    "all-reduce",
    "slow rank",
    "host",
    "compute",
    "undecided",
]

_T = TypeVar("_T")

NOTABLE = 0.02
"""A gain below this, or one that noise explains, is none."""
# Time on the host or in the copy, or a second run that is faster, by a share that is worth a word.
_SLOWER = 0.05
# Reading was under way for most of the first run, and for less than half of that in the second: its
# caches were cold.
_READING = 0.5
_WARMED = 0.5
# A host that takes this much of the device's time to queue its work.
_LAUNCH_BOUND = 0.95
_BOUNDS: dict[str, Bound] = {
    "host_to_device": "host to device",
    "other": "host",
    "evaluation": "host",
    "checkpoint": "host",
}
"""Bounds by the phase of what holds all ranks up, which no counterfactual run takes away."""
_COMPUTING = ("forward", "backward", "optimiser")
_IN_THE_LOADER: tuple[LeaveOut, ...] = (
    "storage",
    "decompression",
    "decode",
    "transform",
)


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """A run compared with the baseline: its mean step, and how much faster it is (0.25: 25 % more
    samples a second).

    ``name`` says what it leaves out; ``again`` is the baseline repeated. ``gain_low`` to
    ``gain_high`` is a 95 % interval over the steps' noise in both runs.
    """

    name: str
    step_ms: float
    samples_per_s: float
    gain: float
    gain_low: float
    gain_high: float

    def is_above(self, noise: float) -> bool:
        """Return whether the gain is notable, and its whole interval above what a repeat differs
        by.
        """
        return self.gain > NOTABLE and self.gain_low > noise


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The bottleneck of a run, the evidence, advice, and the speed-up without that bottleneck.

    ``noise``: by how much the same run differed from its repeat. A gain counts if its whole
    interval is above the noise. ``num_rounds``: how many times all runs were made.
    """

    bound: Bound
    finding: str
    advice: str
    expected_gain: float
    step_ms: float
    occupancy: float
    counterfactuals: list[Counterfactual]
    noise: float
    num_rounds: int


class _Verdict(NamedTuple):
    bound: Bound
    finding: str
    advice: str
    gain: float


class Round(NamedTuple):
    """One round of all runs, which differ only in what was left out: the baseline, without each
    part, and repeated.
    """

    as_it_is: Report
    without: Mapping[LeaveOut, Report]
    repeat: Report


def find_bound(rounds: Sequence[Round], *, is_remote: bool = False) -> Diagnosis:
    """Judge rounds of runs, all over the same samples and with figures."""
    first = rounds[0]
    baselines = [_figures(entry_round.as_it_is) for entry_round in _counted(rounds)]
    gains = {
        name: _over_rounds(
            name,
            [(entry_round.as_it_is, entry_round.without[name]) for entry_round in rounds],
        )
        for name in first.without
    }
    repeat = _over_rounds(
        "again",
        [(entry_round.as_it_is, entry_round.repeat) for entry_round in rounds],
    )
    noise = abs(repeat.gain)
    # The same run twice differs by the machine's drift, unless it is faster because reading was:
    # then the runs between differ by that too.
    reading = _fetch_busy(first.as_it_is)
    reading_again = _fetch_busy(first.repeat)
    is_faster = repeat.is_above(0.0) and repeat.gain > _SLOWER
    if is_faster and reading > _READING and reading_again < _WARMED * reading:
        verdict = _Verdict(
            "cold cache",
            f"The second run over the same samples was {repeat.gain:.0%} faster: what the first "
            "one read from slow storage was in a cache then.",
            "No change is needed if epochs fit into memory or the cache: only the first one is "
            "slow. Else warm it up before the job (`cat DATASET/*.tar* > /dev/null`), or give "
            "--cache-dir on a local disk.",
            repeat.gain,
        )
    else:
        counting = {name: entry for name, entry in gains.items() if entry.is_above(noise)}
        verdict = _judge(first, counting, is_remote=is_remote)
        largest = max(gains.values(), key=lambda entry: entry.gain)
        # A bound that one run shows, such as time on the host, counts if it is larger than the
        # noise.
        is_open = largest.gain > NOTABLE and largest.gain_high > _SLOWER
        if not counting and is_open and verdict.gain <= noise:
            verdict = _Verdict(
                "undecided",
                f"No gain is larger than noise: the repeated baseline differed by {noise:.1%}, "
                f"and the largest gain, without {largest.name}, is {largest.gain:+.1%} "
                f"({largest.gain_low:+.1%} to {largest.gain_high:+.1%}).",
                "Run it on an idle machine, with more --steps, or with more --max-rounds.",
                0.0,
            )
    return Diagnosis(
        bound=verdict.bound,
        finding=verdict.finding,
        advice=verdict.advice,
        expected_gain=verdict.gain,
        step_ms=mean(figures.step_time.mean_ms for figures in baselines),
        occupancy=mean(figures.occupancy.mean for figures in baselines),
        counterfactuals=[*gains.values(), repeat],
        noise=noise,
        num_rounds=len(rounds),
    )


def _figures(report: Report) -> Figures:
    assert report.figures is not None, "a run without figures shows nothing"
    return report.figures


def _counted(rounds: Sequence[_T]) -> Sequence[_T]:
    """Return the rounds whose figures are given: all, or the first of too few for an interval."""
    return rounds if len(rounds) >= MIN_REPEATS else rounds[:1]


def _over_rounds(name: str, pairs: Sequence[tuple[Report, Report]]) -> Counterfactual:
    """Return the gain over all rounds; its interval is that of the rounds, or of the steps with
    fewer than three.
    """
    entries = [counterfactual(name, as_it_is, changed) for as_it_is, changed in _counted(pairs)]
    if len(entries) == 1:
        return entries[0]
    ratio = ratio_interval([1 + entry.gain for entry in entries])
    return Counterfactual(
        name=name,
        step_ms=mean(entry.step_ms for entry in entries),
        samples_per_s=mean(entry.samples_per_s for entry in entries),
        gain=ratio.median - 1,
        gain_low=ratio.low - 1,
        gain_high=ratio.high - 1,
    )


def counterfactual(name: str, as_it_is: Report, changed: Report) -> Counterfactual:
    """Compute how much faster one run is than another, per sample; both have figures."""
    old = _figures(as_it_is)
    new = _figures(changed)
    # Steps of other sizes: more samples a step make up for a longer one.
    work = _samples_a_step(changed) / _samples_a_step(as_it_is)
    high, low = (work / np.quantile(step_ratios(as_it_is, changed), (0.025, 0.975)) - 1).tolist()
    return Counterfactual(
        name=name,
        step_ms=new.step_time.mean_ms,
        samples_per_s=new.throughput.samples_per_s,
        gain=work * old.step_time.mean_ms / new.step_time.mean_ms - 1,
        gain_low=low,
        gain_high=high,
    )


def _judge(
    first: Round,
    counting: Mapping[LeaveOut, Counterfactual],
    *,
    is_remote: bool,
) -> _Verdict:
    figures = _figures(first.as_it_is)
    slow = next((rank for rank in figures.occupancy.ranks if rank.is_slow), None)
    # A slow rank is slow without all-reduce too. In step, of two ranks that starve alike one gets
    # its batch last every time, while the other's lie ready.
    is_slow_alone = False
    if slow is not None and "all-reduce" in counting:
        apart = _figures(first.without["all-reduce"])
        is_slow_alone = apart.occupancy.ranks[slow.rank].is_slow
    if slow is not None and is_slow_alone:
        return _Verdict(
            "slow rank",
            f"Rank {slow.rank} takes {slow.slower:.0%} longer than the others for its "
            f"compute time, most of it in '{slow.most_in.replace('_', ' ')}'; the others "
            "wait for it in the all-reduce.",
            (
                f"Look at rank {slow.rank}'s host and device: clock, temperature, other "
                "processes, its shards' storage."
            ),
            slow.slower,
        )
    loading = counting.get("loading")
    reducing = counting.get("all-reduce")
    on_cpu = first.as_it_is.accelerator["kind"] == "cpu"
    if on_cpu and loading is not None and _is_shorter(first, "loading", *_COMPUTING):
        return _Verdict(
            "host",
            f"Without loading the run would be {loading.gain:.0%} faster, though it rarely waits "
            "for data: forward, backward and optimiser themselves get shorter. Loading and "
            "training share the CPUs.",
            "Give each rank more CPU cores, or train on a GPU. "
            f"{_more_cpus(first.as_it_is, loading.gain)}.",
            loading.gain,
        )
    if loading is not None and _is_shorter(first, "decode", "forward", "backward"):
        gain = counting["decode"].gain if "decode" in counting else loading.gain
        return _Verdict(
            "GPU decode contention",
            f"Without decoding the run would be {gain:.0%} faster, though it rarely waits "
            "for data: forward and backward themselves get shorter. Decoding on the GPU "
            "takes its computing units from the training.",
            "Decode on the CPU (--decoder turbo) where cores are free, or leave more of the "
            "decoding to the hardware decoder (baseline JPEGs, larger batches).",
            gain,
        )
    if loading is not None and _is_shorter(first, "loading", "other"):
        return _Verdict(
            "Python",
            f"Without loading the run would be {loading.gain:.0%} faster, though it rarely "
            "waits for data: the trainer's own Python gets shorter. Threads of the loader "
            "hold the interpreter's lock, or take its CPU.",
            f"{_more_cpus(first.as_it_is, loading.gain)}."
            if (
                first.as_it_is.cpu is not None
                and first.as_it_is.cpu.own_cpus >= USED_UP * first.as_it_is.cpu.usable
            )
            else "Make batches in a process of their own: where='process'.",
            loading.gain,
        )
    if reducing is not None and (loading is None or reducing.gain >= 0.9 * loading.gain):
        return _Verdict(
            "all-reduce",
            f"Without the all-reduce the run would be {reducing.gain:.0%} faster.",
            "Accumulate gradients over more batches than "
            f"{first.as_it_is.options['accumulation']}, reduce in bf16, or use a faster link "
            "between the ranks.",
            reducing.gain,
        )
    if loading is not None:
        verdict = _in_the_loader(first.as_it_is, counting, loading, is_remote=is_remote)
        count = _samples_a_step(first.as_it_is) // first.as_it_is.global_batch
        sharing = ""
        if count > 1:
            sharing = (
                f" {count} ranks of one model load the same samples each: with where='node' a host "
                "makes them once."
            )
        return verdict._replace(advice=verdict.advice + sharing)
    return _undisturbed(first.as_it_is, figures)


def _in_the_loader(
    base: Report,
    counting: Mapping[LeaveOut, Counterfactual],
    loading: Counterfactual,
    *,
    is_remote: bool,
) -> _Verdict:
    stages = [counting[name] for name in _IN_THE_LOADER if name in counting]
    worst = max(stages, key=lambda entry: entry.gain, default=None)
    start = f"Without any loading the run would be {loading.gain:.0%} faster"
    if worst is None:
        finding = f"{start}, but no stage alone accounts for it: the loader cannot keep up"
        busiest = max(_figures(base).stages, key=lambda stage: stage.busy, default=None)
        if busiest is not None:
            finding += f", and its stage '{busiest.name}' is at work {busiest.busy:.0%} of the time"
        return _Verdict(
            "loader",
            f"{finding}.",
            f"{_threads_advice(base, loading.gain)} `fuelrail bench loader` shows each stage.",
            loading.gain,
        )
    gain = worst.gain
    start = f"{start}; {gain:.0%} faster without "
    if worst.name == "storage":
        start = f"{start}reading."
        if is_remote:
            return _Verdict(
                "network",
                f"{start} The dataset is remote: the link, or the store behind it, delivers too "
                "little.",
                "Keep what was read on a local disk (--cache-dir), move the data nearer, use "
                "fewer ranks a link, or, where each file is slow, smaller shards (`fuelrail "
                "reshard DATASET NEW --shard-size 64MB`).",
                gain,
            )
        return _Verdict(
            "storage",
            f"{start} The disk is too slow, and reading again is no faster.",
            (
                "Put the dataset on local NVMe or into memory, read in longer runs (--window), or "
                "store smaller images."
            ),
            gain,
        )
    if worst.name == "decompression":
        return _Verdict(
            "decompression",
            (
                f"{start}decompressing and parsing members: one thread, or all CPUs, cannot "
                "keep up with it."
            ),
            (
                "Store only the members that training reads, and lidar sweeps or large members "
                "raw or at a lower level."
            ),
            gain,
        )
    transform = _figures(base).transform
    if worst.name == "transform" and transform is not None and transform.waits:
        threads = max(1, _num_threads(base) // base.num_ranks)
        return _Verdict(
            "waiting transform",
            f"{start}the transform: of {format_number(transform.wall_ms)} ms a sample its thread "
            f"computes for {format_number(transform.cpu_ms)} ms. It waits: for a file, the "
            "network, a lock or another process, or it sleeps.",
            f"Let more threads wait at a time: --workers {math.ceil(threads * (1 + gain))} would "
            f"hide it, now {threads}; or remove the wait, such as by preparing it when sharding.",
            gain,
        )
    if worst.name == "transform":
        return _Verdict(
            "Python",
            (
                f"{start}the transform: its Python code runs under the interpreter's lock, one "
                "thread at a time."
            ),
            "Move its loops into numpy, torch or OpenCV, do it on whole batches on the "
            "device, prepare it when sharding, or run it in processes (transform_in='process').",
            gain,
        )
    return _Verdict(
        "CPU decode",
        f"{start}decoding images.",
        _threads_advice(base, gain),
        gain,
    )


def _fetch_busy(report: Report) -> float:
    """Return the share of time in which reading was under way."""
    return next(
        (stage.busy for stage in _figures(report).stages if stage.name == "fetch"),
        0.0,
    )


def _undisturbed(report: Report, figures: Figures) -> _Verdict:
    if report.accelerator["kind"] == "cuda" and figures.launch_share >= _LAUNCH_BOUND:
        return _Verdict(
            "kernel launches",
            f"The host needs {figures.launch_share:.0%} of the device's time to queue its "
            "work: the device waits for launches.",
            "Use larger batches, torch.compile or CUDA graphs, and fused optimisers.",
            0.0,
        )
    for loss in report.findings:
        bound = _BOUNDS.get(loss.phase)
        if bound is not None and loss.rank is None and loss.low > _SLOWER:
            return _Verdict(bound, loss.text, loss.advice, loss.share / (1 - loss.share))
    if report.accelerator["kind"] == "cpu":
        # The model computes on the CPU, for most of the time.
        share = {phase.phase: phase.share for phase in figures.phases}
        longest = max(_COMPUTING, key=lambda phase: share[phase])
        finding = (
            "Leaving anything out gains nothing beyond noise: the model itself takes "
            f"{figures.occupancy.mean:.1%} of the time on the CPU, most of it in {longest} "
            f"({share[longest]:.1%})."
        )
        if figures.waiting_share > WAITING:
            return _Verdict(
                "waiting model",
                f"{finding} In {figures.waiting_share:.0%} of the time its thread wanted no CPU: "
                "it slept, or waited for a lock, a file, the network or other ranks.",
                f"Look for what {longest} waits for.",
                figures.waiting_share / (1 - figures.waiting_share),
            )
        return _Verdict(
            "compute",
            finding,
            "Only a cheaper model, more or faster CPUs, or a GPU make this run faster; how much of "
            "a GPU the loader keeps busy, --accelerator emulated:PROFILE measures.",
            0.0,
        )
    finding = (
        "Healthy: leaving anything out gains nothing beyond noise, and the accelerators compute "
        f"{figures.occupancy.mean:.1%} of the time."
    )
    return _Verdict(
        "compute",
        finding,
        "Only a faster accelerator or a cheaper model makes this run faster.",
        0.0,
    )


def _is_shorter(runs: Round, without: LeaveOut, *phases: str) -> bool:
    """Return whether leaving out a part shortens these phases, by more than the wait for data."""
    base = runs.as_it_is
    left_out = runs.without[without]
    before = _phases_ms(base, *phases)
    waited = _phases_ms(base, "data_wait")
    saved = before - _phases_ms(left_out, *phases)
    waited_less = waited - _phases_ms(left_out, "data_wait")
    return saved > max(2 * NOTABLE * before, waited_less)


def _phases_ms(report: Report, *names: str) -> float:
    return sum(phase.time.mean_ms for phase in _figures(report).phases if phase.phase in names)


def _more_cpus(report: Report, gain: float) -> str:
    """Say how many CPUs of other machines would take a wait away: the loader's now are too few
    by that share.
    """
    cpus = report.machine.num_cpus if report.cpu is None else report.cpu.own_cpus
    count = max(1, math.ceil(cpus * gain / report.num_ranks))
    return (
        f"Let other machines make batches: where=fr.RemoteWorkers(num_workers={count}), a CPU "
        "each, for each rank"
    )


def _samples_a_step(report: Report) -> int:
    options = report.options
    return int(report.num_ranks * options["batch_size"] * options["accumulation"])


def _num_threads(report: Report) -> int:
    """Return the decoding threads of all ranks, which call the transform too."""
    stages = _figures(report).stages
    return next((stage.num_threads for stage in stages if stage.name == "decode"), 0)


def _threads_advice(report: Report, gain: float) -> str:
    cpus = report.machine.num_cpus
    threads = _num_threads(report)
    if report.cpu is not None and report.cpu.disturbed:
        return (
            f"Other processes take {report.cpu.other_cpus:.1f} of the {cpus:g} CPUs: stop "
            "those, or give the ranks more cores."
        )
    if threads >= cpus:
        return (
            "The CPUs are used up: give each rank more cores, store smaller images, or "
            f"decode on the GPU. {_more_cpus(report, gain)}."
        )
    per_rank = max(1, int(cpus) // report.num_ranks)
    return (
        f"Use more decoding threads: --workers {per_rank} gives each rank its share of the "
        f"{cpus:g} CPUs."
    )
