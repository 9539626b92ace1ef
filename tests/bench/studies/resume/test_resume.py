"""Killed and resumed stacks are judged right, where the outcome is known by how the stack is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuelrail.__main__ import main
from fuelrail.bench.peers.stacks.stack import STACKS, Setup
from fuelrail.bench.studies.resume.histories import HISTORIES
from fuelrail.bench.studies.resume.ranks import RankPart
from fuelrail.bench.studies.resume.session import SCHEMA, counted_rows

PROGRAM = Path(__file__).parents[3] / "support" / "resume_stacks.py"


@pytest.mark.process
def test_outcomes_are_those_that_the_stacks_were_made_for() -> None:
    run = subprocess.run([sys.executable, PROGRAM], stdout=subprocess.PIPE, check=True, timeout=250)
    said = json.loads(run.stdout)
    assert {name: entry[0] for name, entry in said.items()} == {
        "epoch start, kill": "repeats 96",
        "epoch start, last-step": "repeats 288",
        "skip, kill": "exact",
        "skip, batch": "loses 96",
        "skip, keep": "exact",
        "our order, fewer-ranks": "exact",
        "our order, buffer": "not run",
        "one batch more, kill": "loses 12",
        "backwards, kill": "other order",
        "refusing, batch": "refuses",
        "crashing, kill": "crashes",
        "no way, kill": "not run",
        "own rows, whole": "exact (unbroken: repeats 288, loses 288, ranks saw the same)",
    }
    assert said["refusing, batch"][1] == (
        "in act 2: ValueError: no resume in the middle of an epoch"
    )
    assert "came again" in said["epoch start, kill"][1]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # its ranks are forks
def test_the_command_adds_to_its_report(tmp_path, capfd) -> None:
    command = ["bench", "resume", "--times", "1", "--out", str(tmp_path), "--history", "whole"]
    assert main([*command, "--stack", "torch"]) == 0
    assert main([*command, "--stack", "torch-skip", "--add"]) == 0
    assert "| torch-skip | exact |" in capfd.readouterr().out
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert report["schema"] == SCHEMA
    outcomes = {stack["name"]: stack["cells"]["whole"]["outcome"] for stack in report["stacks"]}
    assert outcomes == {"torch": "exact", "torch-skip": "exact"}


def test_names_that_there_are_not_are_refused(capsys) -> None:
    assert main(["bench", "resume", "--stack", "torchvision"]) == 2
    assert "there are torch, torch-skip" in capsys.readouterr().err
    assert main(["bench", "resume", "--add"]) == 2
    assert "--add needs --out" in capsys.readouterr().err


def test_histories_end_and_divide_rows() -> None:
    for name, history in HISTORIES.items():
        *killed, last = history.acts
        assert last.steps is None, name
        assert all(act.steps for act in killed), name
        for act in history.acts:
            assert act.setup.global_batch % act.setup.ranks == 0, name
    assert len({module for module, _, _ in STACKS.values()}) >= 15
    assert Setup().rows % Setup().global_batch == 0


def test_rows_are_counted_at_each_global_step() -> None:
    ranks = [RankPart(log=[(0, [1, 2]), (0, [3])]), RankPart(log=[(0, [4, 5]), (0, [6])])]
    counted = counted_rows([ranks, [RankPart(log=[(0, [1])])]])
    assert sorted(counted) == [(0, 4), (0, 6), (0, 7)]
    assert counted[0, 4] == dict.fromkeys((1, 2, 4, 5), 1)
    assert counted[0, 7][1] == 2
