"""How the GPU checks are run: chosen, ordered, stopped, and kept in a file after every check."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import msgspec
import pytest
import torch

from support import gpu_bench, gpu_record
from support.gpu_bench import require_dali, why_no_gpu
from support.gpu_record import GpuCheck

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]


def read(path):
    return msgspec.json.decode(path.read_bytes(), type=GpuCheck)


def outcomes(result):
    return [(each.name, each.outcome) for each in result.checks]


@pytest.fixture
def run(pytester, monkeypatch):
    """Run checks, given as text, as on a GPU; returns pytest's result and the file."""
    monkeypatch.setattr(gpu_record, "why_no_gpu", lambda: None)

    def work(checks, *options):
        pytester.makepyfile(
            f"import os, pathlib, pytest, signal\nfrom gpu.conftest import facts\n{checks}"
        )
        done = pytester.runpytest_inprocess(
            "-p",
            "support.gpu_record",
            "--out=out.json",
            "-p",
            "no:cacheprovider",
            *options,
            no_reraise_ctrlc=True,
        )
        return done, read(pytester.path / "out.json")

    return work


@pytest.mark.costly
def test_the_file_is_written_after_every_check_and_sigterm_keeps_what_there_is(run, pytester):
    before = signal.getsignal(signal.SIGTERM)
    done, result = run("""
def test_a_b(facts):
    facts["figure"] = 1

def test_c(facts):
    facts["before"] = pathlib.Path("out.json").read_text().count('"passed"')
    facts["half"] = 0.5
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal comes first")

def test_d(facts):
    facts["figure"] = 1
""")
    assert outcomes(result) == [("a b", "passed"), ("c", "failed")]
    assert result.cut_off == "SIGTERM during 'c'"
    assert result.checks[-1].facts == {"before": 1, "half": 0.5}
    assert result.checks[-1].problem == "stopped by SIGTERM"
    assert done.ret == pytest.ExitCode.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
    done.stdout.fnmatch_lines(
        [
            "passed  a b * {'figure': 1}",
            "1 of 2 checks failed, 0 were not run; result in out.json",
        ]
    )


def test_checks_are_chosen_by_the_time_that_is_left(run):
    _, result = run(
        """
def test_one(facts):
    facts["figure"] = 1

@pytest.mark.seconds(1000.0)
def test_long(facts):
    facts["figure"] = 1

test_three = test_one
""",
        "--seconds",
        "500",
    )
    assert outcomes(result) == [
        ("one", "passed"),
        ("long", "not run"),
        ("three", "passed"),
    ]
    assert result.checks[1].problem.startswith("it takes about 1000 s, and ")


def test_a_check_that_fails_or_breaks_keeps_its_facts_and_the_others_still_run(
    run,
):
    done, result = run("""
def test_fails(facts):
    facts["measured"] = 3
    assert not facts, "it is wrong"

def test_breaks(facts):
    facts["measured"] = 1 / 0

@pytest.fixture
def broken():
    pytest.fail("no input")

def test_has_no_input(broken):
    pass

def test_holds(facts):
    facts["figure"] = 1
""")
    fails, breaks, lacks, holds = result.checks
    assert (fails.outcome, fails.facts) == ("failed", {"measured": 3})
    assert fails.problem.startswith("it is wrong")
    assert "ZeroDivisionError" in breaks.problem
    assert (lacks.outcome, lacks.problem) == ("failed", "no input")
    assert holds.outcome == "passed"
    assert done.ret == 1


@pytest.mark.process
def test_every_fed_check_runs_with_both_decoders_and_all_are_listed():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/gpu",
        "--out",
        "-",
        "--collect-only",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {
        name: float(seconds)
        for seconds, name in re.findall(r"^ +(\d+) s  (.+)$", done.stdout, re.MULTILINE)
    }
    for name in (
        "six cameras are fed",
        "resnet50 is fed",
        "occupancy against the step",
        "loader alone",
        "contention",
    ):
        assert {f"{name} (turbo)", f"{name} (dali)"} <= listed.keys()
    assert sum(listed.values()) < 40 * 60
    # What must be known after ten minutes: the decoder's share, the loader's rate and the occupancy.
    names = [*listed]
    first = [*listed.values()][: names.index("occupancy against the step (dali)") + 1]
    assert names[0] == "torch computes and nvml answers"
    assert sum(first) < 10 * 60


@pytest.mark.parametrize("is_small", [False, True])
def test_on_a_gpu_without_dali_a_check_fails_that_needs_it(is_small, bench, monkeypatch):
    monkeypatch.setattr(gpu_bench.importlib.util, "find_spec", lambda name: None)
    expected = pytest.skip.Exception if is_small else AssertionError
    with pytest.raises(expected, match="NVIDIA DALI is not installed"):
        require_dali(bench._replace(is_small=is_small))


@pytest.mark.process
@pytest.mark.parametrize(("driver", "extra"), [("580.65.06", "dali-cu13"), ("535.104.05", "dali")])
def test_make_installs_dali_by_the_driver(driver, extra, tmp_path):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "-n", "gpu-check"],
        cwd=ROOT,
        env=path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f'-e ".[dev,{extra},nvml]"' in done.stdout
    assert "-m gpu tests/gpu --out gpu-check.json" in done.stdout


@pytest.mark.process
def test_it_runs_from_a_plain_folder_of_wheels():
    """Without a virtual environment: the base interpreter, the checkout, and a folder of packages on PYTHONPATH."""
    wheels = sysconfig.get_path("purelib")
    environment = {
        "PYTHONPATH": f"{ROOT / '.src'}:{wheels}",
        "PATH": "/nowhere",
        "HOME": os.environ["HOME"],
    }
    command = [
        sys._base_executable,
        "-s",
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "--out",
        "gpu-check.json",
    ]
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "shows no GPU here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_gpu_that_torch_can_use_it_says_so_in_one_sentence(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    new = types.SimpleNamespace(name="NVIDIA H100", driver="580.1")
    for gpus, said in (
        ([], "shows no GPU here"),
        ([new], "NVIDIA H100 (driver 580.1), but torch"),
    ):
        monkeypatch.setattr(gpu_bench, "installed_gpus", lambda gpus=gpus: gpus)
        assert said in why_no_gpu()
