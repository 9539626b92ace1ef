"""Bounds injected into runs that never happened: each must be named, and a healthy run called healthy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.cpu_watch import CpuUse
from fuelrail.bench.diagnose_command import DiagnosisReport
from fuelrail.bench.diagnosis import diagnose
from support.bench_runs import SETTINGS, log, report_of, step
from support.datasets import build_dataset


def training(seed, *, ranks=2, leave_out=(), cpu=None, **times_ms):
    """A report of runs whose steps take these times, a little noise on each; a list is one value a rank."""
    logs = []
    for rank in range(ranks):
        rng = np.random.default_rng([seed, rank])
        records = [step(0, 0)]
        for number in range(1, 60):
            own = {
                name: (value[rank] if isinstance(value, list) else value) + rng.exponential(0.2)
                for name, value in times_ms.items()
            }
            records.append(step(number, records[-1].end_ns, **own))
        logs.append(log(rank, records, digest=f"{rank}" if leave_out else "same"))
    settings = msgspec.structs.replace(SETTINGS, leave_out=leave_out)
    return msgspec.structs.replace(report_of(logs, settings=settings), cpu=cpu)


def judge(base, *, without_loading=None, without_all_reduce=None):
    return diagnose(
        base,
        {
            "loading": training(1, leave_out=("loading",), **(without_loading or {})),
            "all-reduce": training(2, leave_out=("all-reduce",), **(without_all_reduce or {})),
        },
    )


def test_nothing_wrong_is_called_healthy():
    found = judge(training(0, wait_ms=0.1), without_loading={"wait_ms": 0.0}, without_all_reduce={"wait_ms": 0.1})
    assert found.bound == "compute"
    assert found.finding.startswith("Healthy")
    assert not any(entry.counts for entry in found.counterfactuals)


def test_a_loader_that_cannot_keep_up():
    found = judge(training(0, wait_ms=15), without_loading={"wait_ms": 0.1}, without_all_reduce={"wait_ms": 15})
    assert found.bound == "loader"
    assert "'decode'" in found.finding
    assert "--workers" in found.advice
    loading = found.counterfactuals[0]
    assert loading.gain_low < loading.gain < loading.gain_high
    assert loading.gain == pytest.approx(46.2 / 31.3 - 1, abs=0.02)


@pytest.mark.parametrize(("others", "said"), [(0.0, "more cores"), (1.0, "other processes")])
def test_a_loader_without_free_cpus(others, said):
    cpu = CpuUse(seconds=2.0, own=1.9 - others, others=others, usable=2.0)
    found = judge(training(0, wait_ms=15, cpu=cpu), without_all_reduce={"wait_ms": 15})
    assert found.bound == "loader"
    assert said in found.advice


def test_an_all_reduce_that_is_slow():
    found = judge(training(0, reduce_ms=12), without_loading={"reduce_ms": 12})
    assert (found.bound, found.occupancy) == ("all-reduce", pytest.approx(31 / 43, abs=0.02))


def test_a_rank_that_the_others_wait_for():
    base = training(0, other_ms=[0.0, 9.0], reduce_ms=[9.0, 0.0])
    found = judge(base, without_loading={"reduce_ms": 9.0}, without_all_reduce={"other_ms": [0.0, 9.0]})
    assert found.bound == "slow rank"
    assert found.finding.startswith("Rank 1 takes")


def test_a_host_that_is_slow_between_the_phases():
    found = judge(training(0, other_ms=5), without_loading={"other_ms": 5}, without_all_reduce={"other_ms": 5})
    assert found.bound == "host"


def test_the_larger_of_two_losses_is_named():
    found = judge(
        training(0, wait_ms=3, reduce_ms=9), without_loading={"reduce_ms": 9}, without_all_reduce={"wait_ms": 3}
    )
    assert found.bound == "all-reduce"
    assert all(entry.counts for entry in found.counterfactuals)


def test_the_command_runs_and_tells(tmp_path, capsys):
    build_dataset(tmp_path / "data", {"train": (12,)})
    out = tmp_path / "out"
    options = ["--batch-size", "1", "--steps", "12", "--warmup", "2", "--workers", "1", "--no-html"]
    options += ["--accelerator", "emulated:resnet50-224-h100", "--out", str(out)]
    assert main(["bench", "diagnose", str(tmp_path / "data"), *options]) == 0
    result = msgspec.json.decode((out / "report.json").read_bytes(), type=DiagnosisReport)
    assert [entry.left_out for entry in result.diagnosis.counterfactuals] == ["loading"]  # one rank reduces nothing
    assert list(result.runs) == ["as-it-is", "without-loading"]
    assert all((out / name).is_file() for name in result.runs.values())
    assert "bound by: " in capsys.readouterr().out


def test_a_run_too_short_is_refused_before_it_is_made(tmp_path, capsys):
    options = ["--steps", "12", "--warmup", "5", "--out", str(tmp_path / "out")]
    assert main(["bench", "diagnose", str(tmp_path / "data"), *options]) == 2
    assert "leave 7 steps to measure" in capsys.readouterr().err
