"""One hostile name in every page, every command, `top` and the metrics: it shows as text and is never obeyed."""

from __future__ import annotations

import io
import re
import types
import typing
from html.parser import HTMLParser

import msgspec
import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from fuelrail.__main__ import main
from fuelrail.bench.measure.machine import machine_facts
from fuelrail.bench.planner.scenario import Scenario
from fuelrail.bench.report import page
from fuelrail.bench.report.console import print_report
from fuelrail.bench.report.page import render_markdown, render_page
from fuelrail.bench.studies.comm.report import CommOptions, CommReport, timed
from fuelrail.bench.studies.diagnose.judge import Diagnosis
from fuelrail.bench.studies.diagnose.report import DiagnoseReport
from fuelrail.bench.studies.plan.run import plan
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.pipeline.runtime import top
from fuelrail.pipeline.runtime.metrics import (
    MetricsServer,
    loader_metrics,
    parse,
)
from fuelrail.pipeline.runtime.stages import StageClock
from support.bench_runs import DATASET, MACHINE, log, report_of, steps
from support.compare_runs import compare_report_of, contestant
from support.hostile import edited, small_dataset
from support.html_page import Page
from support.loader_runs import loader_report_of, loader_run
from support.scale_runs import scale_report

SCENARIO = Scenario(
    name="tiny",
    model="gpt-tiny",
    cluster="1x8-h100",
    global_batch=16,
    parallel=ParallelSettings(strategy="zero1"),
)
HOSTILE = (
    "x\x1b]0;title\x07\x1b[31m **b** _i_ `c` ~~s~~ [open](javascript:alert`1`) ![i](http://x.example/i) [r][r] "
    "<script>alert(1)</script> <http://x.example> &lt; | $\\frac{ [red]markup[/red] \u202e\u2066 \\\n# heading\n- item"
)
SHORT = "$\\frac{<a href=//x>\x1b"  # beside a plot there is no room for more
MARKED = "javascript:alert"


def comm_report():
    timings = [
        timed("all_reduce", axis="all", ranks=2, num_bytes=size, seconds=1e-3)
        for size in (1024, 65536)
    ]
    return CommReport(
        schema="fuelrail-bench-comm",
        version=1,
        created="2026-01-01T00:00:00+00:00",
        machine=machine_facts(),
        backend="gloo",
        device="cpu",
        nodes=1,
        ranks=2,
        options=CommOptions(),
        timed=timings,
        warnings=["one"],
        disturbed="others",
    )


def diagnose_report():
    diagnosis = Diagnosis(
        bound="storage",
        finding="It waits.",
        advice="Read ahead.",
        step_ms=10.0,
        occupancy=0.5,
        expected_gain=0.2,
        noise=0.01,
        counterfactuals=[],
        num_rounds=1,
    )
    return DiagnoseReport(
        schema="fuelrail-bench-diagnose",
        version=5,
        created="2026-01-01T00:00:00+00:00",
        cut_off=None,
        machine=MACHINE,
        dataset=DATASET,
        accelerator={"kind": "cuda", "device": "H100"},
        options={},
        num_ranks=1,
        diagnosis=diagnosis,
        tried=None,
        warnings=["one"],
        disturbed="others",
        runs=["baseline"],
    )


REPORTS = {
    "train": lambda: report_of([log(steps(20)) for rank in (0, 1)]),
    "loader": lambda: loader_report_of([loader_run(124.0), loader_run(125.0), loader_run(126.0)]),
    "compare": lambda: compare_report_of(
        [contestant("fuelrail:turbo", [900.0]), contestant("wds:cv2", [500.0])]
    ),
    "scale": scale_report,
    "diagnose": diagnose_report,
    "comm": comm_report,
    "plan": lambda: plan(SCENARIO),
}
# Read by programs, not from a file of others: formats, dates and words that code compares with.
OURS = {"schema", "created", "commit", "kind", "phase", "stage", "per", "axis"}


def replace_texts(value, change, kind=typing.Any, name=""):
    """The report with ``change`` applied to every text of a field that may hold any text."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        changed = {
            item.name: replace_texts(getattr(value, item.name), change, item.type, item.name)
            for item in fields
        }
        return msgspec.structs.replace(value, **changed)
    kinds = [item for item in typing.get_args(kind) if item is not types.NoneType]
    if isinstance(value, list | dict):
        while isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
            kind = kinds[0]
            kinds = list(typing.get_args(kind))
        inner = kinds[-1] if kinds else typing.Any
        if isinstance(value, list):
            return [replace_texts(item, change, inner, name) for item in value]
        return {key: replace_texts(item, change, inner, key) for key, item in value.items()}
    if isinstance(value, str) and name not in OURS and (kind in (str, typing.Any) or str in kinds):
        return change(value)
    return value


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.targets = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.targets += [
            value for name, value in attributes if name in {"href", "src"} or name.startswith("on")
        ]


def structure(markdown):
    """Kinds of tokens, those of text left out; the target of a link is a file beside the report."""
    kinds = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown):
        kinds += [
            token.type,
            *(part.type for part in token.children or [] if part.type != "text"),
        ]
        targets = [part.attrs["href"] for part in token.children or [] if "href" in part.attrs]
        assert all(re.fullmatch(r"[\w.%~/-]+/report\.html", target) for target in targets)
    return kinds


@pytest.fixture(scope="module", params=list(REPORTS))
def reports(request):
    """The same report with plain, with hostile and with short hostile names."""
    report = REPORTS[request.param]()
    return [
        replace_texts(report, lambda text, said=said: text + said) for said in ("x", HOSTILE, SHORT)
    ]


def test_a_page_with_hostile_names_has_the_tags_and_links_of_any_other(reports):
    plain, hostile = (Tags(page_without_plots(report)) for report in reports[:2])
    assert MARKED in Page(page_without_plots(reports[1])).text, "the name is there, as text"
    assert hostile.tags == plain.tags
    assert len(hostile.targets) == len(plain.targets)
    assert all(re.fullmatch(r"[\w.%~/-]+/report\.html", target) for target in hostile.targets), (
        "files beside the report"
    )
    assert "\x1b" not in page_without_plots(reports[1])


def page_without_plots(report):
    return page._template("page.html.j2").render(document=page.document_of(report), style="")


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
def test_plots_are_drawn_with_hostile_names_and_hold_no_link(reports):
    text = render_page(reports[2])
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text
    assert "<script" not in text
    assert not [target for target in Tags(text).targets if re.match(r"\s*\w+:", target)]


def test_markdown_with_hostile_names_has_the_structure_of_any_other(reports):
    plain, hostile = (structure(render_markdown(report)) for report in reports[:2])
    assert hostile == plain


def test_a_terminal_gets_hostile_names_as_text(reports):
    console = Console(
        file=io.StringIO(),
        soft_wrap=True,
        markup=False,
        highlight=False,
        width=10_000,
    )
    print_report(reports[1], console)
    text = console.file.getvalue()
    assert text.replace("\n", "").isprintable()
    assert not re.search(r"^(# heading|- item)", text, re.MULTILINE)


def stage(name):
    return StageClock(
        name=name,
        num_threads=2,
        items=20,
        busy_s=1.9,
        starved_s=0.1,
        blocked_s=0.0,
        waiting=6,
        capacity=8,
    )


class Stats(typing.NamedTuple):
    stages: tuple
    batches: int = 1
    samples: int = 1
    images: int = 1
    waited_s: float = 0.5
    elapsed_s: float = 1.0
    storage: object = None
    bad_samples: int = 0


def metrics():
    from fuelrail.loaders.storage.protocol import StorageStats

    return loader_metrics(
        Stats((stage(HOSTILE),), storage=StorageStats(HOSTILE)),
        {"rank": HOSTILE, "job": HOSTILE},
    )


@pytest.mark.costly
def test_metrics_and_top_carry_hostile_names_as_text(capsys):
    with MetricsServer(metrics, port=0) as server:
        import urllib.request

        body = urllib.request.urlopen(server.url).read().decode()
        assert main(["top", server.url, "--once", "--interval", "0.05"]) == 0
    assert all(line.startswith(("#", "fuelrail_")) for line in body.splitlines()), (
        "no line of the name's"
    )
    assert {metric.labels["job"] for metric in parse(body)} == {HOSTILE}
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    assert "[red]markup" in printed.replace("\n", "") or "\\x1b" in printed
    assert not re.search(r"^(# heading|- item)", printed, re.MULTILINE)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda text: re.sub(r"fuelrail_stage_threads\{.*\n", "", text),
            "fuelrail_stage_threads lacks",
        ),
        (
            lambda text: re.sub(r"(fuelrail_stage_queue\{[^\n]*\}) \S+", r"\1 NaN", text),
            "is nan",
        ),
        (
            lambda text: re.sub(r"(fuelrail_batches_total\{[^\n]*\}) \S+", r"\1 +Inf", text),
            "is inf",
        ),
        (
            lambda text: re.sub(r"(fuelrail_images_total\{[^\n]*\}) \S+", r"\1 1e300", text),
            "at most 1e+18",
        ),
        (lambda text: "\x1b[31m{\n", "no metrics at"),
        (
            lambda text: "".join(f'fuelrail_stage_threads{{stage="{n}"}} 1\n' for n in range(999)),
            "999 stages",
        ),
    ],
    ids=[
        "a metric lacks",
        "NaN",
        "Inf",
        "too large",
        "another format",
        "endless stages",
    ],
)
def test_top_refuses_metrics_of_no_loader_in_a_sentence(change, said, monkeypatch, capsys):
    with MetricsServer(metrics, port=0) as server:
        real = top.parse
        monkeypatch.setattr(top, "parse", lambda text: real(change(text)))
        assert main(["top", server.url, "--once", "--interval", "0.05"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.replace("\n", "").isprintable()
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def hostile_dataset(tmp_path_factory):
    """A dataset whose name, licence, classes and sources say what they should not."""
    folder = tmp_path_factory.mktemp("hostile-text")
    small_dataset(folder / "small")
    with edited(folder / "small", folder / "evil") as parts:
        parts.manifest["name"] = parts.manifest["license"] = HOSTILE
        parts.manifest["classes"] = [*parts.manifest["classes"][:-1], HOSTILE]
        for number, channel in enumerate(parts.manifest["channels"]):
            if channel["name"] != "boxes":  # whose entry has no choice
                channel["source_name"] = f"{number} {HOSTILE}"
    assert main(["verify", str(folder / "evil")]) == 0, "it is read, not refused"
    return folder / "evil"


COMMANDS = [
    "verify",
    "verify --deep",
    "verify --json",
    "inspect",
    "inspect --batch",
    "inspect --json",
    "log",
    "log --json",
    "tag",
    "view --output OUT/sheet.png",
    "order describe --global-batch 2",
    "reshard OUT/again",
    "bench loader --seconds 0.05 --repeats 1 --batch-size 2 --workers 1 --out OUT/loader",
    "bench train --model light --steps 6 --warmup 1 --batch-size 1 --workers 1 --out OUT/train",
    "inspect clip-0000-000000",
    "inspect no-such-key",
    "diff SMALL",
    "order describe --global-batch 2 --config OUT/packs.yaml",
    "order describe --config OUT/refused.yaml --json",
    "annotate OUT/layer --model of_tests:number --batch-size 2 --workers 1",
    "annotate OUT/layer --model of_tests:ends --json --batch-size 2 --workers 1",
]


@pytest.mark.process
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_prints_and_writes_hostile_names_as_text(
    words, hostile_dataset, tmp_path, capfd, monkeypatch
):
    model = "def number(batch):\n    return {'x': batch['frame']}\n"
    model += f"def ends(batch):\n    raise OSError({HOSTILE!r})\n"
    (tmp_path / "of_tests.py").write_text(model)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "packs.yaml").write_text(
        "pack: {budget: 9, cost: {linear: {frame: 1}, constant: 1}}"
    )
    (tmp_path / "refused.yaml").write_text("pack: {budget: 9, cost: frame}")
    word, *options = words.split()
    position = 2 if word in {"bench", "order"} else 1
    command = [word, *options]
    command.insert(position, str(hostile_dataset))
    places = {
        "OUT": str(tmp_path),
        "SMALL": str(hostile_dataset.parent / "small"),
    }
    main([re.sub("OUT|SMALL", lambda match: places[match.group()], part) for part in command])
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said
    assert re.sub("[\n\r]", "", said).isprintable()
    assert not re.search(r"^(# heading|- item)", said, re.MULTILINE)
    for file in tmp_path.rglob("*.html"):
        assert not [target for target in Tags(file.read_text()).targets if ":" in target]
