"""Measurements beside other processes: the headline says it, before any figure, in every form of every report."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from fuelrail.bench.measure.machine import CpuUse, combine_host_uses
from fuelrail.bench.report.console import print_report
from fuelrail.bench.report.page import render_markdown
from support.bench_runs import log, report_of, steps
from support.compare_runs import compare_report_of, contestant
from support.loader_runs import loader_report_of, loader_run
from support.scale_runs import scale_report

BUSY = CpuUse(seconds=3.0, own_cpus=0.9, other_cpus=1.1, usable=2.0)
IDLE = CpuUse(seconds=3.0, own_cpus=1.9, other_cpus=0.0, usable=2.0)


def compared(other_cpus):
    entries = [
        contestant("fuelrail:turbo", [900.0]),
        contestant("wds:cv2", [500.0]),
    ]
    loaded = [
        [msgspec.structs.replace(run, others_cpus=other_cpus) for run in entry.runs]
        for entry in entries
    ]
    return compare_report_of(
        [
            msgspec.structs.replace(entry, runs=runs)
            for entry, runs in zip(entries, loaded, strict=True)
        ]
    )


REPORTS = {
    "train": lambda cpu: report_of([log(steps(20))], cpu=cpu),
    "loader": lambda cpu: loader_report_of(
        [loader_run(rate, cpu=cpu) for rate in (124.0, 125.0, 126.0)]
    ),
    "compare": lambda cpu: compared(cpu.other_cpus),
    "scale": lambda cpu: scale_report(disturbed=cpu.disturbed),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_the_headline_says_that_others_used_the_host(kind):
    for cpu, loaded in ((BUSY, True), (IDLE, False)):
        report = REPORTS[kind](cpu)
        console = Console(file=io.StringIO(), soft_wrap=True)
        print_report(report, console)
        for text in (render_markdown(report), console.file.getvalue()):
            assert ("Measured on a loaded host: other processes used" in text) is loaded
            assert ("(loaded host: not reliable)" in text) is loaded
            assert not loaded or text.index("Measured on a loaded host") < text.index(
                "(loaded host"
            )


def test_ranks_of_one_host_are_no_others_to_each_other():
    rank = CpuUse(seconds=2.0, own_cpus=1.0, other_cpus=1.0, usable=2.0)
    assert combine_host_uses([rank, rank]).other_cpus == 0
    assert combine_host_uses([rank, rank]).disturbed is None
    beside = CpuUse(seconds=2.0, own_cpus=0.5, other_cpus=1.5, usable=2.0)
    assert (
        combine_host_uses([beside, beside]).disturbed
        == "other processes used 1.0 of 2 CPUs, this measurement 1.0"
    )
    assert (
        combine_host_uses([CpuUse(seconds=1, own_cpus=1, other_cpus=None, usable=2)]).other_cpus
        is None
    )
