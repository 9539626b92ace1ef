from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuelrail.bench.measure import machine
from fuelrail.bench.measure.machine import CpuUse, CpuWatch


def burn(seconds):
    started = time.process_time()
    while time.process_time() - started < seconds:
        pass


def test_our_own_work_is_ours():
    watch = CpuWatch()
    burn(0.1)
    use = watch.use()
    assert use.own_cpus * use.seconds == pytest.approx(0.1, abs=0.05)


@pytest.mark.process
def test_children_that_ended_are_ours_too():
    watch = CpuWatch()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import time\nwhile time.process_time() < 0.1: pass",
        ],
        check=True,
    )
    use = watch.use()
    assert use.own_cpus * use.seconds >= 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [("_STAT", Path("nothing-here")), ("usable_cpus", lambda: 0.5)],
    ids=["no count", "a part"],
)
def test_without_the_systems_count_or_with_a_part_of_the_cpus_others_are_unknown(
    name, value, monkeypatch
):
    monkeypatch.setattr(machine, name, value)
    use = CpuWatch().use()
    assert use.other_cpus is None
    assert not use.disturbed


def test_others_are_what_the_system_counts_beyond_us(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "_STAT", stat)
    monkeypatch.setattr(machine, "usable_cpus", lambda: float(machine.os.cpu_count()))
    stat.write_text("cpu  100 0 50 9999 9999 0 0 0 0 0\ncpu0 1 1 1\n")
    watch = CpuWatch()
    stat.write_text("cpu  1000100 0 50 9999 9999 0 0 0 0 0\ncpu0 1 1 1\n")
    use = watch.use()
    assert use.disturbed
    assert (use.other_cpus + use.own_cpus) * use.seconds * machine.os.sysconf(
        "SC_CLK_TCK"
    ) == pytest.approx(1_000_000, rel=1e-3)


def test_a_little_of_others_is_not_a_disturbance():
    assert not CpuUse(seconds=1, own_cpus=1, other_cpus=0.09, usable=2).disturbed
    assert CpuUse(seconds=1, own_cpus=1, other_cpus=0.11, usable=2).disturbed
