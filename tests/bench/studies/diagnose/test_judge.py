"""Bounds injected into runs that never happened: each must be named, and a healthy run called healthy."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import numpy as np
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.report.page import render_page
from fuelrail.bench.studies.diagnose.judge import (
    Bound,
    Round,
    counterfactual,
    find_bound,
)
from fuelrail.bench.studies.diagnose.report import (
    DiagnoseReport,
    conclusion,
    suggestions,
    verdict_on,
)
from fuelrail.bench.studies.train.figures import TransformFigures
from fuelrail.bench.studies.train.report import load_report
from fuelrail.bench.studies.train.settings import TrainOptions
from support.bench_runs import MS, SETTINGS, log, report_of, step


def training(seed, *, ranks=2, leave_out=(), cpu=None, noise_ms=0.2, **times_ms):
    """A report of runs whose steps take these times, a little noise on each; a list is one value a rank."""
    logs = []
    for rank in range(ranks):
        rng = np.random.default_rng([seed, rank])
        records = [step(0, 0)]
        for number in range(1, 60):
            rank_times = {
                name: value
                if name.endswith("_ns")
                else (value[rank] if isinstance(value, list) else value) + rng.exponential(noise_ms)
                for name, value in times_ms.items()
            }
            records.append(step(number, records[-1].end_ns, **rank_times))
        logs.append(log(records, digest=f"{rank}" if leave_out else "same"))
    settings = msgspec.structs.replace(SETTINGS, leave_out=leave_out)
    return msgspec.structs.replace(report_of(logs, settings=settings), cpu=cpu)


def judge(base, *, without=None, repeat_times=None, **facts):
    """``without`` maps what is left out to the step times of that run; ``repeat_times`` are those of the second run.

    Without them the second run is the same as the first.
    """
    runs = {
        "loading": {},
        "storage": {},
        "decompression": {},
        "decode": {},
        "all-reduce": {},
    } | (without or {})
    reports = {
        name: training(number, leave_out=(name,), **times)
        for number, (name, times) in enumerate(runs.items(), 1)
    }
    second = base if repeat_times is None else training(99, **repeat_times)
    return find_bound([Round(base, reports, second)], **facts)


def everywhere(**times):
    """Every run the same: nothing that is left out helps."""
    return dict.fromkeys(("loading", "storage", "decompression", "decode", "all-reduce"), times)


def test_nothing_wrong_is_called_healthy():
    verdict = judge(training(0, wait_ms=0.1), without=everywhere(wait_ms=0.1))
    assert verdict.bound == "compute"
    assert verdict.finding.startswith("Healthy")
    assert verdict.expected_gain == 0
    assert not any(entry.is_above(0.0) for entry in verdict.counterfactuals)


WAITS = {"wait_ms": 15.0}
LOADER = {
    "storage": "storage",
    "decompression": "decompression",
    "decode": "CPU decode",
    "transform": "Python",
}
SLOW_RANK = {"other_ms": [0.0, 9.0], "reduce_ms": [9.0, 0.0]}
# In step, what one of them waits for data, the other waits in the all-reduce; apart, they are as fast.
TAKING_TURNS = {"wait_ms": [1.0, 15.0], "reduce_ms": [15.0, 1.0]}
WAIT_AND_REDUCE = {"wait_ms": 3, "reduce_ms": 9}
CONTENDED = {"wait_ms": 0.1, "backward_ns": round(35 * MS), "other_ms": 15.0}
NO_LOADING = {"loading": {}}
NO_STORAGE = {"loading": {}, "storage": {}}


@pytest.mark.parametrize(
    ("times", "helps", "facts", "bound"),
    [
        (
            WAITS,
            NO_STORAGE,
            {"repeat_times": WAITS, "is_remote": True},
            "network",
        ),
        (
            {"other_ms": 1.2},
            everywhere(other_ms=0.1),
            {"repeat_times": {"other_ms": 0.0}},
            "compute",
        ),  # it became faster
        ({"reduce_ms": 12}, {"all-reduce": {}}, {}, "all-reduce"),
        ({"copy_ms": 12}, {}, {}, "host to device"),
        (CONTENDED, NO_LOADING | {"decode": {}}, {}, "GPU decode contention"),
        (SLOW_RANK, {"all-reduce": {"other_ms": [0.0, 9.0]}}, {}, "slow rank"),
        (
            TAKING_TURNS,
            NO_LOADING | {"decode": {}, "all-reduce": {"wait_ms": 10.0}},
            {},
            "CPU decode",
        ),
        ({"other_ms": 5}, {}, {}, "host"),
        (
            WAIT_AND_REDUCE,
            {"loading": {"reduce_ms": 9}, "all-reduce": {"wait_ms": 3}},
            {},
            "all-reduce",
        ),  # the larger loss
    ],
)
def test_the_part_whose_absence_helps_is_named(times, helps, facts, bound):
    verdict = judge(training(0, **times), without=everywhere(**times) | helps, **facts)
    assert verdict.bound == bound
    if times == {"reduce_ms": 12}:
        assert verdict.occupancy == pytest.approx(31 / 43, abs=0.02)
    if bound == "slow rank":
        assert verdict.finding.startswith("Rank 1 takes")
        assert "'other'" in verdict.finding


@pytest.mark.parametrize(("left_out", "bound"), LOADER.items())
def test_the_stage_whose_absence_helps_is_named_with_the_gain(left_out, bound):
    without = everywhere(**WAITS) | NO_LOADING | {left_out: {"wait_ms": 1.0}}
    verdict = judge(training(0, **WAITS), without=without, repeat_times=WAITS)
    assert verdict.bound == bound
    assert "Without any loading the run would be" in verdict.finding
    assert verdict.expected_gain == pytest.approx(46.2 / 32.2 - 1, abs=0.03)


def with_transform(report, **figures):
    transform = TransformFigures(wall_ms=40.0, queued_ms=0.0, **figures)
    return msgspec.structs.replace(
        report,
        figures=msgspec.structs.replace(report.figures, transform=transform),
    )


@pytest.mark.parametrize(
    ("figures", "bound"),
    [
        ({"cpu_ms": 0.4, "cpus": 0.01}, "waiting transform"),
        ({"cpu_ms": 38.0, "cpus": 0.95}, "Python"),
        (
            {"cpu_ms": 10.0, "cpus": 0.95},
            "Python",
        ),  # four threads that take turns
    ],
)
def test_a_transform_that_waits_gets_more_threads_and_not_numpy(figures, bound, tmp_path):
    base = with_transform(training(0, **WAITS), **figures)
    without = everywhere(**WAITS) | NO_LOADING | {"transform": {"wait_ms": 1.0}}
    verdict = judge(base, without=without)
    assert verdict.bound == bound
    assert ("interpreter's lock" in verdict.finding) == (bound == "Python")
    settings = msgspec.structs.replace(SETTINGS, workers=2)
    tried = suggestions(
        verdict.bound,
        settings,
        num_shards=4,
        num_ranks=2,
        out=tmp_path,
        gain=8.9,
    )
    if bound == "waiting transform":
        assert "of 40.0 ms a sample its thread computes for 0.400 ms" in verdict.finding
        assert [trial.options for trial in tried] == [
            "--workers 4",
            "--workers 8",
            "--workers 20",
        ]
        assert "--workers" in verdict.advice and "numpy" not in verdict.advice


def on_cpu(report, **figures):
    return msgspec.structs.replace(
        report,
        accelerator={"kind": "cpu", "device": "CPU, 2 threads"},
        figures=msgspec.structs.replace(report.figures, **figures),
    )


@pytest.mark.parametrize(
    ("waiting", "bound", "said"),
    [
        (0.9, "waiting model", "In 90% of the time its thread wanted no CPU"),
        (0.0, "compute", "a GPU make"),
    ],
)
def test_a_model_on_a_cpu_is_the_bound_and_whether_it_waits_is_said(waiting, bound, said):
    base = on_cpu(training(0, wait_ms=0.1), waiting_share=waiting)
    verdict = judge(base, without=everywhere(wait_ms=0.1))
    assert verdict.bound == bound
    assert verdict.expected_gain == pytest.approx(waiting / (1 - waiting))
    assert "most of it in backward" in verdict.finding
    assert said in f"{verdict.finding} {verdict.advice}"
    assert "accelerators" not in verdict.finding and "overloaded" not in verdict.finding


def test_noise_does_not_hide_what_a_model_was_seen_to_wait():
    """No run tells more than the repeat; how long the thread wanted no CPU was measured."""
    steps = {"wait_ms": 15.0, "noise_ms": 6.0}
    helped = {"wait_ms": 6.0, "noise_ms": 6.0}
    without = everywhere(**steps) | {"loading": helped, "decode": helped}
    repeat_times = {"wait_ms": 7.5, "noise_ms": 6.0}
    bounds = [
        judge(
            on_cpu(training(0, **steps), waiting_share=share),
            without=without,
            repeat_times=repeat_times,
        ).bound
        for share in (0.0, 0.6)
    ]
    assert bounds == ["undecided", "waiting model"]


def test_loading_that_takes_the_cpu_from_the_model_is_not_called_decoding_on_a_gpu():
    verdict = judge(
        on_cpu(training(0, **CONTENDED)),
        without=everywhere(**CONTENDED) | NO_LOADING | {"decode": {}},
    )
    assert verdict.bound == "host"
    assert "Loading and training share the CPUs" in verdict.finding


def test_a_cache_that_was_cold():
    """Whatever comes after the first run is faster, by the same."""
    cold = reading(training(0, **WAITS), 0.9)
    warm = reading(training(1), 0.1)
    reports = {name: training(number, leave_out=(name,)) for number, name in enumerate(LOADER, 2)}
    verdict = find_bound([Round(cold, reports, warm)])
    assert verdict.bound == "cold cache"
    assert verdict.expected_gain == pytest.approx(46.2 / 31.2 - 1, abs=0.03)


def reading(report, busy):
    """The report with a stage `fetch` that was busy for that share."""
    stages = [
        msgspec.structs.replace(stage, name="fetch", busy=busy)
        for stage in report.figures.stages[:1]
    ]
    return msgspec.structs.replace(
        report, figures=msgspec.structs.replace(report.figures, stages=stages)
    )


@pytest.mark.parametrize(("other_seconds", "said"), [(0.0, "more cores"), (1.0, "Other processes")])
def test_a_loader_without_free_cpus(other_seconds, said):
    cpu = CpuUse(seconds=2.0, own_cpus=1.9 - other_seconds, other_cpus=other_seconds, usable=2.0)
    without = everywhere(**WAITS) | NO_LOADING | {"decode": {}}
    assert said in judge(training(0, **WAITS, cpu=cpu), without=without).advice


@pytest.mark.parametrize(
    ("own_seconds", "advice"),
    [(0.9, "where='process'"), (1.9, "RemoteWorkers(num_workers=1)")],
)
def test_a_loader_that_holds_up_the_trainers_python_belongs_elsewhere(own_seconds, advice):
    """Without it the time outside the phases is shorter, not the wait."""
    busy = {"wait_ms": 1.0, "other_ms": 9.0}
    cpu = CpuUse(seconds=2.0, own_cpus=own_seconds, other_cpus=0.0, usable=2.0)
    verdict = judge(
        training(0, **busy, cpu=cpu),
        without=everywhere(**busy) | {"loading": {"other_ms": 1.0}},
        repeat_times=busy,
    )
    assert verdict.bound == "Python"
    assert advice in verdict.advice
    assert verdict.expected_gain == pytest.approx(41.2 / 32.2 - 1, abs=0.03)


def test_ranks_of_one_model_share_what_they_load():
    shared = msgspec.structs.replace(
        training(0, **WAITS), global_batch=2
    )  # of two ranks with two samples each
    runs = {
        "without": everywhere(**WAITS) | NO_LOADING | {"decode": {}},
        "repeat_times": WAITS,
    }
    assert (
        "2 ranks of one model load the same samples each: with where='node'"
        in judge(shared, **runs).advice
    )
    assert "where='node'" not in judge(training(0, **WAITS), **runs).advice


def test_used_up_cpus_are_counted_in_those_of_other_machines():
    """19 CPUs and 46 % more of them, for two ranks."""
    cpu = CpuUse(seconds=2.0, own_cpus=19.0, other_cpus=0.0, usable=20.0)
    verdict = judge(
        training(0, **WAITS, cpu=cpu),
        without=everywhere(**WAITS) | NO_LOADING | {"decode": {}},
        repeat_times=WAITS,
    )
    assert "where=fr.RemoteWorkers(num_workers=5), a CPU each, for each rank" in verdict.advice


def test_steps_of_other_sizes_are_compared_by_sample():
    base = training(0)
    doubled = training(1, other_ms=31.0)
    doubled = msgspec.structs.replace(doubled, options={**doubled.options, "accumulation": 2})
    assert counterfactual("trial", base, doubled).gain == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [(1, ["--workers 2"]), (3, ["--workers 1", "--workers 4"])],
)
def test_nothing_is_tried_that_changes_nothing(num_workers, options, tmp_path):
    settings = msgspec.structs.replace(SETTINGS, workers=num_workers)
    trials = suggestions("Python", settings, num_shards=4, num_ranks=2, out=tmp_path)
    assert [trial.options for trial in trials] == options


@pytest.mark.parametrize("bound", [*get_args(Bound)])
def test_every_bound_has_trials_or_none_and_tells_so(bound, tmp_path):
    trials = suggestions(bound, SETTINGS, num_shards=4, num_ranks=2, out=tmp_path)
    line = conclusion(
        [counterfactual(trial.options, training(0, **WAITS), training(1)) for trial in trials],
        0.0,
    )
    assert line.startswith("use: " if trials else "nothing was tried")
    for trial in trials:
        msgspec.structs.replace(TrainOptions(), **trial.changes)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_the_command_runs_and_prints_what_its_report_and_page_say(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    options = [
        "--batch-size",
        "1",
        "--steps",
        "12",
        "--warmup",
        "2",
        "--workers",
        "1",
        "--no-html",
    ]
    options += [
        "--accelerator",
        "emulated:resnet50-224-h100",
        "--out",
        str(out),
        "--apply",
        "--max-rounds",
        "1",
    ]
    assert main(["bench", "diagnose", str(dataset), *options]) == 0
    result = msgspec.json.decode((out / "report.json").read_bytes(), type=DiagnoseReport)
    left_out = [
        "loading",
        "storage",
        "decompression",
        "decode",
    ]  # one rank reduces nothing
    assert [entry.name for entry in result.diagnosis.counterfactuals] == [
        *left_out,
        "again",
    ]
    assert result.runs[:6] == [
        "as-it-is",
        *(f"without-{name}" for name in left_out),
        "as-it-is-again",
    ]
    assert result.tried is not None
    for run in result.runs:
        assert load_report(out / run).cut_off is None
        assert (out / run / "report.md").is_file()
    links = re.findall(r'href="([^"#]+)"', render_page(result))
    assert links == [f"{run}/report.html" for run in result.runs]
    assert result.diagnosis.finding in (out / "report.md").read_text()
    assert f"{result.diagnosis.bound} " in capsys.readouterr().out


def test_a_gain_within_the_noise_of_a_repeat_gives_no_verdict():
    """Decode's gain was 17.5 % (from 0.3 % on), more than the repeat's 16.9 %, but not by enough."""
    steps = {"wait_ms": 15.0, "noise_ms": 6.0}
    helped = {"wait_ms": 6.0, "noise_ms": 6.0}
    noisy = everywhere(**steps) | {"loading": helped, "decode": helped}
    verdict = judge(
        training(0, **steps),
        without=noisy,
        repeat_times={"wait_ms": 7.5, "noise_ms": 6.0},
    )
    decode = next(entry for entry in verdict.counterfactuals if entry.name == "decode")
    assert 0 < decode.gain_low < verdict.noise < decode.gain
    assert verdict.bound == "undecided"
    assert f"the repeated baseline differed by {verdict.noise:.1%}" in verdict.finding
    assert verdict.expected_gain == 0


def test_further_rounds_tell_what_one_could_not():
    """The first repeat was disturbed; over five rounds the gain stands out, and the repeat does not."""
    waits = {"wait_ms": 15.0, "noise_ms": 6.0}
    helped = {"wait_ms": 1.0, "noise_ms": 6.0}
    names = ("loading", "storage", "decompression", "decode", "all-reduce")
    helps = {"loading", "decode"}

    def without(seed):
        return {
            name: training(
                seed + n,
                leave_out=(name,),
                **(helped if name in helps else waits),
            )
            for n, name in enumerate(names)
        }

    first = Round(
        training(0, **waits),
        without(10),
        training(99, wait_ms=1.5, noise_ms=6.0),
    )
    assert find_bound([first]).bound == "undecided"
    more = [
        Round(training(n, **waits), without(n + 10), training(n + 99, **waits))
        for n in (100, 200, 300, 400)
    ]
    verdict = find_bound([first, *more])
    assert (verdict.bound, verdict.num_rounds) == ("CPU decode", 5)
    assert verdict.noise < 0.1
    # Steps are of the same rounds as gains: the baseline's too.
    rounds = [first, *more]
    of_baseline = [measured_round.as_it_is.figures.step_time.mean_ms for measured_round in rounds]
    assert verdict.step_ms == pytest.approx(np.mean(of_baseline))
    occupancy = [measured_round.as_it_is.figures.occupancy.mean for measured_round in rounds]
    assert verdict.occupancy == pytest.approx(np.mean(occupancy))
    for entry in verdict.counterfactuals:
        assert verdict.step_ms / entry.step_ms - 1 == pytest.approx(entry.gain, abs=0.03)


def test_a_trial_within_noise_shows_no_difference():
    base = training(0, **WAITS)
    same = training(1, **WAITS)
    assert verdict_on(counterfactual("--workers 2", base, same), 0.1) == "no significant difference"
    better = counterfactual("--workers 2", base, training(2))
    assert verdict_on(better, 0.1) == "helps"
    assert verdict_on(better, 0.6) == "no significant difference"
