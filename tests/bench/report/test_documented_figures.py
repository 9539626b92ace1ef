"""Every figure on a page that names a result file is that of the file, rounded as the page has it.

The sentences and tables are made again from the files. A number of a cited paragraph that is in none of them is a
condition of the measurement, listed in ``CONDITIONS``, or the test fails.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from fuelrail.bench.measure.rates import ratio_interval
from fuelrail.bench.micro.browse import BrowseTimes, render
from fuelrail.bench.micro.rate import CASES
from fuelrail.bench.micro.writers import COMMAND, RESTART_COMMAND
from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.report.page import markdown_table, table_of
from fuelrail.bench.studies.compare.page import HEADER, rows
from fuelrail.bench.studies.compare.report import load_compare_report
from fuelrail.bench.studies.diff import load_comparable
from fuelrail.bench.studies.resume.session import SCHEMA, VERSION, ResumeReport
from support.bench_runs import RESULTS
from support.watched.battery import Battery

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("docs", "configs", "bench")
PAGES = sorted(
    chain(
        ROOT.glob("*.md"),
        (p for f in FOLDERS for s in ("md", "yaml", "svg") for p in (ROOT / f).rglob(f"*.{s}")),
    )
)
CITATION = re.compile(r"results/(\w+)\.json")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?")
OUR_CANDIDATE = "fuelrail, 2 workers"


def one_line(text: str) -> str:
    return " ".join(text.split())


def result(name: str):
    return msgspec.json.decode((RESULTS / f"{name}.json").read_bytes())


def ratios_to(
    name: str,
    baselines: tuple[str, ...],
    titles: tuple[str, ...] = tuple(CASES),
) -> tuple[float, float]:
    """The lowest and highest median of a candidate's rate over that of others, in the cases of both reports."""
    ratios = []
    for report in (result("sharding"), result("sharding_run2")):
        for comparison in report["comparisons"]:
            speedups = {entry["name"]: entry["speedup"] for entry in comparison["entries"]}
            if comparison["title"] in titles:
                ratios += [
                    speedups[name] / speedups[baseline]
                    for baseline in baselines
                    if {name, baseline} <= speedups.keys()
                ]
    return min(ratios), max(ratios)


def loaders() -> tuple[dict[str, float], dict[str, float], dict]:
    """Check each loader and recipe: images a second, and our speed-up; the figures of all."""
    figures = {
        f"{contestant['peer']}:{contestant['recipe']}": contestant["figures"]
        for contestant in result("compare")["contestants"]
    }
    times = {name: loader_figures["ours_times_as_fast"] for name, loader_figures in figures.items()}
    return (
        {
            name: loader_figures["images_per_s"]["median"]
            for name, loader_figures in figures.items()
        },
        times,
        figures,
    )


def restart_over(peer: str | None) -> str:
    """Restart shards over another loader, round by round, both as shares of the reference beside them."""
    runs = {
        f"{contestant['peer']}:{contestant['recipe']}": {
            run["round"]: run for run in contestant["runs"]
        }
        for contestant in result("compare")["contestants"]
    }
    shares = {
        name: {
            number: run["images_per_s"] / run["reference_images_per_s"]
            for number, run in runs_by_round.items()
        }
        for name, runs_by_round in runs.items()
        if name in ("fuelrail:restart", peer)
    }
    ours = shares["fuelrail:restart"]
    interval = ratio_interval(
        [ours[number] / (shares[peer][number] if peer else 1) for number in sorted(ours)]
    )
    return f"{interval.median:.2f}|{interval.low:.2f} to {interval.high:.2f}"


DECODED = (
    ("torch's DataLoader, loose files", "loose:sjfast", "loose:native"),
    ("webdataset", "wds:sjfast", "wds:native"),
    ("Grain, threads", "grain:thr-sjfast", "grain:thr-native"),
    ("SPDL, threads", "spdl:sjfast", "spdl:native"),
)


def readme() -> Iterator[str]:
    rates, times, _ = loaders()
    named = [
        times[name]["median"]
        for name in (
            "spdl:sjfast",
            "grain:thr-sjfast",
            "wds:sjfast",
            "mds:sjfast",
        )
    ]
    report = load_compare_report(RESULTS / "compare.json")
    yield f"decodes {times['loose:sjfast']['median']:.1f} times as many camera images a second as torch's DataLoader"
    yield f"{rates['fuelrail:turbo']:,.0f} images of 1600x900 a second on two CPU cores: "
    yield f"{min(named):.1f} to {max(named):.1f} times SPDL, Grain, webdataset and MosaicML Streaming"
    assert (report.dataset.name, report.machine.gpus) == (
        "nuscenes-3-keyframes-200-times",
        [],
    )
    yield "on three nuScenes keyframes, each repeated 200 times and held in memory"
    assert report.machine.cpu.startswith("AMD EPYC")
    yield "Measured in a VM with two AMD EPYC cores and no GPU"


def compared() -> Iterator[str]:
    report = load_compare_report(RESULTS / "compare.json")
    (rates, times, _) = loaders()
    yield markdown_table(HEADER, list(rows(report)))
    yield from (f"> {warning}" for warning in report.warnings)
    for fast, cited in (
        ("grain:thr-cv2fast", "grain:thr-sjfast"),
        ("wds:cv2fast", "wds:sjfast"),
    ):
        yield f"`{fast}` ({rates[fast]:.0f})"
        assert rates[fast] > rates[cited]
    yield f"({rates['grain:thr-sjfast']:.0f}, {rates['wds:sjfast']:.0f}), by two runs each"
    for words, name in (
        ("SPDL's threads", "spdl:sjfast"),
        ("Grain's", "grain:thr-sjfast"),
        ("webdataset", "wds:sjfast"),
        ("MosaicML Streaming", "mds:sjfast"),
        ("torch's DataLoader over loose files", "loose:sjfast"),
    ):
        interval = times[name]
        assert interval["low"] > 1
        yield f"{interval['median']:.2f} times {words} ({interval['low']:.2f} to {interval['high']:.2f})"
    yield "it is {} times as fast again ({})".format(*restart_over(None).split("|"))
    yield "{} times SPDL ({})".format(*restart_over("spdl:sjfast").split("|"))
    yield "{} times Grain ({})".format(*restart_over("grain:thr-sjfast").split("|"))
    often = [
        contestant for contestant in result("compare")["contestants"] if len(contestant["runs"]) > 2
    ]
    spread = [
        contestant["figures"]["images_per_s"]["high"] / contestant["figures"]["images_per_s"]["low"]
        for contestant in often
    ]
    shares = [
        [
            run["images_per_s"] / run["reference_images_per_s"]
            for run in contestant["runs"]
            if run["reference_images_per_s"]
        ]
        for contestant in often
    ]
    between = max(
        max(contestant_shares) / min(contestant_shares)
        for contestant_shares in shares
        if contestant_shares
    )
    yield f"still differ by up to {max(spread) - 1:.0%}, ratios by up to {between - 1:.0%}".replace(
        "%", " %"
    )
    stolen = max(
        run["stolen_cpus"]
        for contestant in result("compare")["contestants"]
        for run in contestant["runs"]
    )
    yield f"its host kept back {stolen:.2f} CPUs at most"
    yield f"{report.created}, {report.num_rounds} rounds"


def decoded() -> Iterator[str]:
    """Loaders with our decoder over themselves with simplejpeg's, round by round, as shares of the reference."""
    shares = {
        f"{contestant['peer']}:{contestant['recipe']}": {
            run["round"]: run["images_per_s"] / run["reference_images_per_s"]
            for run in contestant["runs"]
            if run["reference_images_per_s"]
        }
        for contestant in result("compare_decode")["contestants"]
    }
    rates = {
        f"{contestant['peer']}:{contestant['recipe']}": contestant["figures"]["images_per_s"][
            "median"
        ]
        for contestant in result("compare_decode")["contestants"]
    }
    table = []
    for words, other, ours in DECODED:
        interval = ratio_interval(
            [shares[ours][number] / shares[other][number] for number in sorted(shares[ours])]
        )
        table.append(
            [
                words,
                f"{rates[other]:.0f}",
                f"{rates[ours]:.0f}",
                f"{interval.median:.2f}",
                f"{interval.low:.2f} to {interval.high:.2f}",
            ]
        )
    header = ["loader", "simplejpeg", "fr.decode_jpeg", "ratio", "95 % interval"]
    yield markdown_table(header, table)
    yield f"{result('compare_decode')['num_rounds']} rounds in turns"


def scaled() -> Iterator[str]:
    report = load_comparable(RESULTS / "scale.json")
    table = table_of(report.measured)
    yield markdown_table(table.header, table.rows)
    yield f"{report.options['steps']} steps of each run"


def sharded() -> Iterator[str]:
    report = result("sharding")
    by_case = [
        {entry["name"]: entry for entry in comparison["entries"]}
        for comparison in report["comparisons"]
    ]
    for name in by_case[0]:
        cells = [
            ""
            if name not in case
            else f"1 ({report['mb_per_s'][title]['GNU tar']:,.0f} MB/s)"
            if name == "GNU tar"
            else "{speedup:.2f}".format(**case[name])
            for title, case in zip(CASES, by_case, strict=True)
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    shares = [report["share_of_floor"][title] for title in CASES]
    cells = [f"{middle:.2f}" for _, middle, _ in shares]
    yield f"| {OUR_CANDIDATE}, of the floor with both digests | {' | '.join(cells)} |"
    measured = [entry for case in by_case for name, entry in case.items() if name != "GNU tar"]
    shares += [(e["speedup_q25"], e["speedup"], e["speedup_q75"]) for e in measured]
    low = min(low / middle for low, middle, _ in shares)
    high = max(high / middle for _, middle, high in shares)
    yield f"quartiles are {low:.2f} to {high:.2f} times the median"
    yield "| cameras, 480 frames | cameras and lidar, 340 frames | cameras, 1,440 frames | cameras, 480 frames, lean"
    assert [case.num_frames for case in CASES.values()] == [480, 340, 1440, 480]
    first, lidar, long, lean = (
        next(entry["speedup"] for entry in comparison["entries"] if entry["name"] == OUR_CANDIDATE)
        for comparison in result("sharding_run2")["comparisons"]
    )
    yield f"gave {first:.2f} of tar in the first case, {lidar:.2f} with lidar"
    yield f"{long:.2f} for 1,440 frames, {lean:.2f} with lean tables"


def sharding_page() -> Iterator[str]:
    cameras, _, long, _ = CASES
    full = ratios_to(OUR_CANDIDATE, ("GNU tar",), (cameras, long))
    yield "write at {:.2f} to {:.2f} times the rate of GNU tar".format(*full)
    for words, baseline in (
        ("and {:.2f} to {:.2f} times that of GNU tar followed by SHA-256", "GNU tar, then SHA-256"),
        (
            "{:.2f} to {:.2f} times as fast as two processes of `webdataset.ShardWriter` that get",
            "webdataset.ShardWriter, 2 processes",
        ),
        (
            "{:.2f} to {:.2f} times as fast as one that joins the tables",
            "webdataset.ShardWriter, tables joined",
        ),
    ):
        yield words.format(*ratios_to(OUR_CANDIDATE, (baseline,)))
    command = ratios_to(COMMAND, ("GNU tar",))
    yield "with its start, at {:.2f} to {:.2f} times that of GNU tar".format(*command)
    (_, _, figures) = loaders()
    yield "loads {} times as fast (95 % interval {}".format(*restart_over(None).split("|"))
    names = ("fuelrail:turbo", "fuelrail:restart")
    plain, cut = (figures[name]["cpu_s_per_1000_images"] for name in names)
    yield f"takes {plain - cut:.2f} ms less of a core"
    restart = result("sharding_restart")
    num_images = restart["num_files"]["own source"]
    command_time = restart["cpu_s_per_gb"]["own source"]
    ratio = command_time[RESTART_COMMAND] / command_time[COMMAND]
    yield f"On {num_images // 6} frames of nuScenes' images"
    yield f"takes {ratio:.1f} times the processor time"
    rates = restart["mb_per_s"]["own source"]
    yield f"{rates[COMMAND] / rates[RESTART_COMMAND]:.1f} times as long"
    cost = restart["restart"]["own source"]
    yield f"get {cost['bytes_after'] / cost['bytes_before'] - 1:.1%} larger".replace("%", " %")


def recipes() -> Iterator[str]:
    used = result("sharding")["cpu_s_per_gb"]["cameras"][COMMAND]
    yield f"CPU: {used:.1f} CPU-seconds a GB"


def clusters() -> Iterator[str]:
    """Cluster files: what one CPU decodes is half of what two do."""
    rate = loaders()[0]["fuelrail:turbo"]
    cpus = result("compare")["machine"]["num_cpus"]
    yield f"fuelrail:turbo: {rate:.0f} images/s of 1600x900 to 704x256 on {cpus:.0f} CPUs"
    yield f"images_per_cpu_s: {{value: {int(rate / cpus)}, "


def your_dataset() -> Iterator[str]:
    single_rank, of_8, first = result("metadata")["comparisons"][:3]
    yield f"drawn {single_rank['entries'][1]['speedup']:.2f} times as fast as by torch's `DistributedSampler`"
    yield f"by one rank of 8 {of_8['entries'][1]['speedup']:.1f} times as fast"
    (peak,) = re.findall(r"with (\d+) bytes at most", first["title"])
    yield f"comes after {1e3 * first['entries'][0]['seconds_per_call']:.1f} ms and {int(peak) / 1e6:.1f} MB"


def shared_batches() -> Iterator[str]:
    report = result("where_shared")
    assert report["cpu_ratio"] <= 1.15
    yield f"took {report['cpu_ratio']:.2f} times the CPU time of one rank whose threads make them"
    report = result("where")
    assert report["step_p99_ms"]["process"] == pytest.approx(
        report["step_p99_ms"]["threads"], rel=0.05
    )
    yield f"makes batches at {report['rate_ratio']:.2f} times the rate of threads"
    share = result("overhead")["share"]
    yield f"one camera of six takes {share['one camera of six']:.2f} of the processor time of all six"
    yield f"everything but decoding is {share['nothing decoded']:.0%} of it"


def stored_logits() -> Iterator[str]:
    report = result("logits")
    sizes: dict[str, list[dict]] = {}
    for layout in report["layouts"]:
        if layout["vocabulary"] == 128_256:
            sizes.setdefault(layout["layout"], []).append(layout)
    yield markdown_table(
        ("layout", "k = 50", "k = 64", "k = 128", "divergence at 64 [nats]"),
        [
            (
                name,
                *(f"{layout['bytes']:,.0f}" for layout in layouts),
                "" if (off := layouts[1]["error_nats"]) is None else f"{off:.0e}",
            )
            for name, layouts in sizes.items()
        ],
    )
    full = report["students"]["full"]
    losses = []
    for name, student_losses in report["students"].items():
        beyond = [
            100 * (loss / reference - 1)
            for loss, reference in zip(student_losses, full, strict=True)
        ]
        span = "" if name == "full" else f"{min(beyond):.2f} to {max(beyond):.2f}"
        losses.append((name, f"{sum(student_losses) / len(student_losses):.3f}", span))
    yield markdown_table(("taught by", "loss, mean", "above full, seed by seed [%]"), losses)
    drawn, top, bare = (
        report["gradients"][name]
        for name in ("sampled", "topk with its tail", "topk without its tail")
    )
    yield f"{drawn['share_of_norm']:.1%} of its norm, {drawn['standard_errors']:.2f} of its standard error"
    yield f"{top['share_of_norm']:.0%} for top-k with its tail and {bare['share_of_norm']:.0%} without"
    shares = [report["decoding"][name] for name in ("logits_topk", "logits_sampled")]
    yield "{:.1%} (top-k) and {:.1%} (draws) of the processor time of a step".format(*shares)
    assert max(shares) < 0.05 and drawn["standard_errors"] < 3
    yield f"the teacher's own is {report['teacher_loss']:.3f}"
    off = {name: layouts[1]["error_nats"] for name, layouts in sizes.items()}
    assert 500 < off["DistillKit, budget"] / off["topk, uint8"] < 2000, "a thousand times as far"


def video_of_logs() -> Iterator[str]:
    codecs = result("video")["codecs"]
    rates = {
        name: codec["cpu_rate"]["ffmpeg, decode and scale"][1] for name, codec in codecs.items()
    }
    yield f"at {rates['h264']:.2f} (H.264), {rates['hevc']:.2f} (HEVC) and {rates['av1']:.2f} (AV1) times the rate"
    assert all(codec["num_frames"] == 3 * codec["num_kept"] for codec in codecs.values())


def resumed() -> Iterator[str]:
    report = load_report_of(RESULTS / "resume.json", ResumeReport, SCHEMA, VERSION)
    assert report.machine.uncommitted_changes is False
    exact = [
        stack.name
        for stack in report.stacks
        if {cell.outcome for cell in stack.cells.values()} <= {"exact", "not run"}
    ]
    yield (
        f"Of {len(report.stacks)} recipes {len(exact)} are exact in each history that was run: "
        f"{', '.join(exact[:-1])} and {exact[-1]}."
    )
    yield f"each of {len(report.histories)} histories {report.times} times"


def watched() -> Iterator[str]:
    report = msgspec.json.decode((RESULTS / "watch.json").read_bytes(), type=Battery)
    assert report.machine.uncommitted_changes is False
    yield report.as_text()
    num_clean = sum(run.cause == "none" for run in report.runs)
    yield f"put {len(report.runs) - num_clean} causes into small trainings"
    yield f"left {num_clean} clean"
    num_disturbed = sum(run.answers["watch"].disturbed is not None for run in report.runs)
    assert num_disturbed == 0
    yield f"no other process used its CPUs in any of the {len(report.runs)} runs"
    ours = report.num_right("watch", is_clean=False), report.num_right("watch", is_clean=True)
    theirs = report.num_right("traceml", is_clean=False), report.num_right("traceml", is_clean=True)
    yield f"`fuelrail watch` named {ours[0]} causes right and none in {ours[1]} clean runs"
    yield f"`traceml-ai` {theirs[0]} and {theirs[1]}"
    assert ours[0] >= 36 and ours[1] == num_clean


def share(fraction: float) -> str:
    return f"{round(100 * fraction)} %"


def remedied() -> Iterator[str]:
    report = result("remedies")
    assert report["machine"]["uncommitted_changes"] is False
    for case in report["cases"]:
        interval = f"{share(case['interval'][0])} to {share(case['interval'][1])}"
        predicted = f"{share(case['predicted'])} ({interval})"
        yield f"| {case['case']} | {case['remedy']} | {predicted} | {share(case['made'])} |"
    within, num_cases = report["num_within_a_tenth"], len(report["cases"])
    yield f"In {within} of {num_cases} cases the two differ by less than 10 % of the step"
    assert within >= 8


def browsed() -> Iterator[str]:
    report = msgspec.json.decode((RESULTS / "browse.json").read_bytes(), type=BrowseTimes)
    assert report.machine.uncommitted_changes is False
    yield render(report)
    yield f"Medians of {len(report.cases[0].open_s)} rounds"
    yield f"waits {report.latency_s * 1e3:.0f} ms"
    of_s3 = [case for case in report.cases if case.place == "s3"]
    (number,) = {count for case in of_s3 for count in case.requests_until_first_sample}
    yield f"until the first sample it had {number} requests"


CLAIMS = {
    "docs/browse.md": browsed,
    "docs/loader.md": shared_batches,
    "docs/sources.md": video_of_logs,
    "README.md": readme,
    "bench/RESULTS.md": lambda: chain(
        compared(),
        decoded(),
        scaled(),
        sharded(),
        stored_logits(),
        resumed(),
        watched(),
        remedied(),
    ),
    "docs/sharding.md": sharding_page,
    "docs/guides/your-dataset.md": your_dataset,
    "configs/recipes/README.md": recipes,
}
# What a paragraph says of how was measured, and numbers that are computed from the prices and rates that it states.
CONDITIONS = {
    "bench/RESULTS.md": [
        "600 samples of 6 images, 1600x900 JPEG",
        "batches of 8 x 6 x 3 x 256 x 704",
        "1600x900",
        "on 2 CPUs",
        "95 %",
        "200 times",
        "2 of 2 CPUs usable",
        "lies above 1:",
        "34 boxes and 77 sensor rows",
        "--rounds 0",
        "--rounds 3",
        "128,256 words",
        "50 of 1,024 words",
        "8 windows of 32",
        "10,000 draws",
        "250 steps",
        "pull request 5019",
        "288 rows in 24 shards, 12 rows a step over 2 or 4 ranks: 24 steps an epoch, two epochs",
        "Python 3.11",
        "Python 3.12",
        "on 2 and 4 ranks",
        "those of one rank are in rank 1, logging and checkpoints in rank 0",
        "`traceml-ai`** 0.5.0",
        "processes of the same priority that mostly used 1.2 to 1.9 CPUs",
        "once took 10 to 15 % for its collectives, so they are named from 15 % on",
        "16 to 30 % in collectives",
        "LeRobot 0.4.4 ran beside Transformers 4.57",
        "the 5.24 of the other runs",
    ],
    "docs/sharding.md": ["1600x900"],
    "docs/sources.md": ["from 1080p at 30 Hz to JPEGs of 576x320 at 10 Hz"],
    "docs/guides/your-dataset.md": ["250,000 rows in batches of 64"],
    "configs/recipes/README.md": [
        "1,000,000 GB take 972 CPU-hours",
        "reads 1 and writes 1 byte",
        "50 Gb/s port 80 %",
        "5 GB/s",
        "16 CPUs",
        "180 kB",
        "64 MiB",
        "1.00 USD",
        "0.0004 USD",
        "0.005 USD",
    ],
}


def cited(page: Path) -> list[str]:
    """What of a page is of a result file: paragraphs that name one with the table behind them; all of RESULTS."""
    text = page.read_text(encoding="utf-8")
    if page.name == "RESULTS.md":
        return [text]
    parts = re.split(r"\n\s*\n", text)
    behind = [
        n
        for n, part in enumerate(parts)
        if n and part.startswith("|") and CITATION.search(parts[n - 1])
    ]
    tables = (
        [] if page.parent.name == "recipes" else behind
    )  # `tests/test_recipes.py` computes that one
    return [part for number, part in enumerate(parts) if CITATION.search(part) or number in tables]


def test_every_result_is_cited_and_every_cited_one_exists():
    cited_names = {
        name for page in PAGES for name in CITATION.findall(page.read_text(encoding="utf-8"))
    }
    assert cited_names == {path.stem for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("page", CLAIMS)
def test_figures_are_those_of_the_file(page):
    text = one_line((ROOT / page).read_text(encoding="utf-8"))
    assert [claim for claim in map(one_line, CLAIMS[page]()) if claim not in text] == []


def test_no_figure_beside_a_result_is_left_unchecked():
    unchecked_numbers = {}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        claims = CLAIMS.get(name, list)
        for part in cited(page) if page.suffix == ".md" else []:
            rest = one_line(part)
            for claim in sorted(
                [*map(one_line, claims()), *CONDITIONS.get(name, [])],
                key=len,
                reverse=True,
            ):
                rest = rest.replace(claim, " ")
            if numbers := NUMBER.findall(rest):
                unchecked_numbers[name] = (numbers, rest)
    assert unchecked_numbers == {}


def test_cluster_files_have_the_rate_of_one_processor():
    source, value = clusters()
    for path in (ROOT / "configs" / "clusters").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert (value in text) and (source in text), path.name
