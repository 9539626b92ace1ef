from __future__ import annotations

import msgspec
import pytest

from fuelrail.bench.measure.records import (
    CheckpointRestore,
    CheckpointSave,
    RankLog,
)
from fuelrail.bench.report.page import (
    format_number,
    render_markdown,
    render_page,
)
from fuelrail.bench.studies.train.page import verdict
from fuelrail.pipeline.order.pack import Pack
from fuelrail.pipeline.order.spec import OrderSpec
from support.bench_runs import MS, SETTINGS, log, report_of, step, steps
from support.html_page import Page

pytestmark = pytest.mark.slow

LEARNED = log(steps(60))
LEARNED.end = msgspec.structs.replace(
    LEARNED.end,
    peak_device_bytes=2**23,
    state_bytes={"model": 2**20, "gradients": 2**20, "optimiser": 2**21},
)
LEARNED.saves = [CheckpointSave(step=20, stall_ns=10**7, total_ns=10**9, num_bytes=10**6)]
LEARNED.restored = CheckpointRestore(
    step=10, folder="step-00000010.0123abcd", world_size=4, skipped=["<cut>"]
)
SUMS = {"x": (4, 10.0, 30.0)}
ON_CPU = msgspec.structs.replace(SETTINGS, accelerator="cpu", profile=None, model="own:Net")
RUNS = {
    "with memory and checkpoints": report_of(
        [LEARNED],
        settings=msgspec.structs.replace(SETTINGS, checkpoint="/private"),
    ),
    "two ranks": report_of(
        [log(steps(20, wait_ms=3)), log(steps(20, wait_ms=3, reduce_ms=2))],
        settings=msgspec.structs.replace(SETTINGS, price_per_gpu_hour=2.5),
    ),
    "three hundred steps": report_of([log(steps(300, wait_ms=3))]),
    "a first step that towers": report_of(
        [log([step(0, 0, wait_ms=9_000), *steps(30, 9_031_000_000)])]
    ),
    "too short": report_of([log(steps(3))]),
    "nothing": report_of([RankLog()], cut_off="rank 0 <died>"),
    "cut off": report_of(
        [log(steps(20)), log(steps(14), complete=False)],
        cut_off="rank 1 was ended",
    ),
    "a loss of NaN": report_of([log([step(n, 31_000_000 * n, loss=None) for n in range(20)])]),
    "accumulating": report_of(
        [log(steps(20))],
        settings=msgspec.structs.replace(SETTINGS, accumulation=2),
    ),
    "packs": report_of(
        [
            log(steps(30, padding=0.2, sums=SUMS)),
            log(steps(30, padding=0.4, sums=SUMS)),
        ],
        settings=msgspec.structs.replace(
            SETTINGS,
            order=OrderSpec(pack=Pack(budget=8, cost="x")),
            cost=("x",),
        ),
    ),
    "on a CPU": report_of([log(steps(20, cpu_ns=31 * MS))], settings=ON_CPU),
    "on a GPU": report_of(
        [log(steps(20))],
        settings=msgspec.structs.replace(SETTINGS, accelerator="cuda", profile=None),
    ),
}


@pytest.fixture(scope="module", params=list(RUNS))
def run(request):
    report = RUNS[request.param]
    return report, Page(render_page(report))


def test_the_page_is_well_formed_and_tells_what_the_report_tells(run):
    report, page = run
    page.check()
    assert "a <tiny> set" in page.text
    assert "Test <GPU>" in page.text
    if report.cut_off:
        assert f"Partial report: {report.cut_off}" in page.text
    if report.figures is not None:
        assert f"{report.figures.occupancy.mean:.1%}" in page.text
        hours = report.figures.throughput.gpu_hours_per_million_samples
        assert format_number(hours) in page.text
    else:
        assert "No occupancy figure" in page.text
    on_cpu = report.accelerator["kind"] == "cpu"
    for said in ("rank-hours", "on this CPU", "say nothing of a GPU’s"):
        assert (said in page.text) == (on_cpu and report.figures is not None)
    emulated = report.accelerator["kind"] == "emulated"
    for said in (
        "This run used an emulated GPU",
        "emulated Test GPU",
        "keep emulated accelerators?",
        *(["with the published times of test network"] if report.figures is not None else []),
        "a test's invention",
    ):
        assert (said in page.text) == emulated


def test_memory_and_checkpoints_are_shown():
    report = RUNS["with memory and checkpoints"]
    text = Page(render_page(report)).text
    markdown = render_markdown(report)
    for said in (
        "continued after step 10 from checkpoint step-00000010.0123abcd, which 4 ranks saved",
        "1 checkpoint of 1.0 MB: each stalled the training for 10.0 ms and was visible after 1,000 ms",
        "set aside; the run continued from the one before. <cut>",
    ):
        assert said in text
        assert said in markdown.replace("\\<", "<")
    assert "| 0 | 1.0 | 1.0 | 2.0 | 4.0 |" in markdown
    assert "/private" not in text


def test_pages_of_equal_reports_are_equal():
    report = RUNS["two ranks"]
    assert render_page(report) == render_page(report)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"wait_ms": 30}, "The loader holds"),
        ({"reduce_ms": 30}, "Collectives themselves"),
        ({"other_ms": 30}, "Work outside"),
        ({}, "Nothing certain holds"),
    ],
)
def test_the_verdict_names_the_largest_loss(times, said):
    assert said in verdict(report_of([log(steps(20, **times))]))


def test_padding_and_imbalance_have_times_of_their_own():
    page = render_markdown(RUNS["packs"])
    assert "| padding | 30.0% | 9.00 | 29.0% |" in page
    assert "| imbalance | 0.0% | 0 | 0.0% |" in page
    assert "No cost model from 52 steps: x is the same in all of them." in page
    assert "Padding and imbalance" not in render_markdown(RUNS["two ranks"])
