"""Alerts and the dashboard name metrics that an endpoint of a loader has, and divide only what has equal labels."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
import yaml

from fuelrail import DataLoader
from fuelrail.bench import serve_metrics
from support.datasets import build_dataset
from support.pages import ROOT

MONITORING = ROOT / "configs" / "monitoring"
ALERTS = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
EXPRESSIONS = [rule["expr"] for rule in ALERTS]
EXPRESSIONS += [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("metrics") / "d"
    build_dataset(root, {"train": (2, 2)}, size=(64, 48))
    loader = DataLoader(root, batch_size=2, transforms={"image": {"height": 32, "width": 64}})
    with loader, serve_metrics(loader) as server:
        assert len(list(loader)) == 2
        with urllib.request.urlopen(server.url) as answer:
            return answer.read().decode()


@pytest.mark.network
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_metrics_and_labels_exist(served, expression) -> None:
    names = set(re.findall(r"\bfuelrail_\w+", expression))
    assert names
    for name in names:
        assert re.search(rf"^{name}\{{", served, re.MULTILINE), name
    for label, _ in re.findall(r'(\w+)(=~|=)"', expression):
        assert f'{label}="' in served
    assert expression.count("(") == expression.count(")")


def test_alerts_say_what_is_wrong_and_for_which_rank() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) >= 5
    assert all("$labels.rank" in rule["annotations"]["summary"] for rule in ALERTS)


def test_panels_do_not_overlap() -> None:
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        panel_cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not panel_cells & cells
        assert place["x"] + place["w"] <= 24
        cells |= panel_cells
