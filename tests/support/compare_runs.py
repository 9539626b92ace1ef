"""Comparisons that never happened."""

from __future__ import annotations

from fuelrail.bench.peers.peer import Work
from fuelrail.bench.peers.process import Check
from fuelrail.bench.studies.compare.laps import Timed
from fuelrail.bench.studies.compare.report import (
    CompareReport,
    ContestantResult,
    build_compare_report,
    make_run,
)
from support.bench_runs import DATASET, MACHINE

WORK = Work(
    height=256,
    width=704,
    batch_size=8,
    num_workers=2,
    seed=0,
    num_samples=600,
    source_wh=(1600, 900),
    cameras=("cam_front", "cam_back"),
)
CHECK = Check(
    num_images=36,
    lowest_psnr_db=41.0,
    mean_psnr_db=45.0,
    num_missing=0,
    num_repeated=0,
    fault=None,
)
IMAGES_PER_BATCH = 16


def timed(images_per_s, *, count=40, **changes) -> Timed:
    """Laps at this rate."""
    usual = Timed(
        first_batch_s=0.3,
        arrival_s=[number * IMAGES_PER_BATCH / images_per_s for number in range(count)],
        cpu_s=5.0,
        others_cpus=0.0,
        stolen_cpus=0.0,
        clock_jump_s=0.0,
        peak_memory_bytes=300 << 20,
    )
    return usual._replace(**changes)


def contestant(name, rates, left_out=None, reference=None) -> ContestantResult:
    """A contestant with a run of each of these rates; those of the reference in the laps between (default: its own)."""
    peer, _, recipe = name.partition(":")
    runs = [
        make_run(number, timed(rate), timed(beside), IMAGES_PER_BATCH)
        for number, (rate, beside) in enumerate(zip(rates, reference or rates, strict=True))
    ]
    check = None if left_out else CHECK
    return ContestantResult(
        name=name,
        peer=peer,
        recipe=recipe,
        check=check,
        left_out=left_out,
        runs=runs,
        figures=None,
    )


def compare_report_of(contestants, cut_off=None) -> CompareReport:
    """The report of these contestants."""
    return build_compare_report(
        machine=MACHINE,
        packages={"webdataset": "1.0"},
        dataset=DATASET,
        work=WORK,
        options={"seconds": 4.0},
        num_rounds=max((len(entry.runs) for entry in contestants), default=0),
        contestants=contestants,
        cut_off=cut_off,
    )
