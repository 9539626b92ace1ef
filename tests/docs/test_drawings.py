"""Drawings with figures in them show what the code computes."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from fuelrail.bench.report.files import load_report_of
from fuelrail.bench.studies.resume.drawing import picture
from fuelrail.bench.studies.resume.session import SCHEMA, VERSION, ResumeReport
from fuelrail.pipeline.order.batching import Batching, World
from fuelrail.pipeline.order.spec import OrderSpec, position_map
from support.bench_runs import RESULTS
from support.pages import ROOT

DRAWINGS = sorted((ROOT / "docs" / "assets").glob("*.svg"))


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.stem)
def test_it_says_what_it_shows_and_loads_nothing(drawing) -> None:
    tree = ElementTree.parse(drawing)
    assert tree.getroot().find("{*}title").text
    assert not re.search(r"https?://(?!www\.w3\.org/)", drawing.read_text(encoding="utf-8"))


def test_the_resume_shows_the_samples_that_the_order_gives() -> None:
    """24 samples, seed 7, epoch 0: six steps on 4 ranks; then three on 4 and three on 2 from the saved state on."""
    texts = ElementTree.parse(ROOT / "docs" / "assets" / "resume.svg").findall("{*}text")
    drawn_samples = [int(text.text) for text in texts if text.get("class") == "sample"]
    ranks = [int(text.text[1:]) for text in texts if re.fullmatch(r"r\d", text.text)]
    order = position_map(OrderSpec(seed=7), [24], 0)

    def list_delivered(size: int, start: int, steps: int) -> list[tuple[int, int]]:
        parts = [Batching(24, 4, World(rank, size), start=start) for rank in range(size)]
        pairs = []
        for step in range(steps):
            for rank, part in enumerate(parts):
                samples = np.asarray(order(part.positions(step))).tolist()
                pairs += [(sample, rank) for sample in samples]
        return pairs

    uninterrupted = list_delivered(4, 0, 6)
    consumed = Batching(24, 4, World(0, 4)).consumed(3)
    resumed = list_delivered(4, 0, 3) + list_delivered(2, consumed, 3)
    assert list(zip(drawn_samples, ranks, strict=True)) == uninterrupted + resumed
    assert [sample for sample, _ in uninterrupted] == [sample for sample, _ in resumed]


def test_the_cells_are_those_of_the_runs() -> None:
    report = load_report_of(RESULTS / "resume.json", ResumeReport, SCHEMA, VERSION)
    drawing = ROOT / "docs" / "assets" / "stacks.svg"
    assert drawing.read_text(encoding="utf-8") == picture(report)
    texts = ElementTree.parse(drawing).findall("{*}text")
    drawn = [text.text for text in texts if text.get("class") == "cell"]
    outcomes = [cell.outcome for stack in report.stacks for cell in stack.cells.values()]
    assert len(drawn) == sum(outcome != "not run" for outcome in outcomes)
    assert sum(text.startswith("exact") for text in drawn) == sum(
        outcome.startswith("exact") for outcome in outcomes
    )
    assert drawn.count("+96 -96") == outcomes.count("repeats 96, loses 96") > 0


def test_the_bars_are_those_of_the_comparison() -> None:
    """Each loader at its own rate: the recipe with the most runs, the fastest of those."""
    drawing = (ROOT / "docs" / "assets" / "compare.svg").read_text(encoding="utf-8")
    report = json.loads((ROOT / "bench" / "results" / "compare.json").read_text(encoding="utf-8"))
    timed = [contestant for contestant in report["contestants"] if contestant["figures"]]
    rates = {}
    for peer in {contestant["peer"] for contestant in timed}:
        recipes = [contestant for contestant in timed if contestant["peer"] == peer]
        num_runs = max(len(contestant["runs"]) for contestant in recipes)
        rates[peer] = max(
            contestant["figures"]["images_per_s"]["median"]
            for contestant in recipes
            if len(contestant["runs"]) == num_runs
        )
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", drawing)
    drawn_rates = [int(text) for text in texts[texts.index("images/s") + 1 :] if text.isdigit()]
    assert drawn_rates == sorted((round(rate) for rate in rates.values()), reverse=True)
    names = [text for text in texts if re.fullmatch(r"[A-Za-z][\w-]+", text)]
    assert names[0] == "Fuelrail"
    assert len(names) == len(rates)
