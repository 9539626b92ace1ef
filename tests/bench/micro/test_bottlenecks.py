"""The committed result of the injected bottlenecks; the runs themselves take minutes on a quiet machine."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from fuelrail.bench.micro import bottlenecks
from fuelrail.bench.micro.bottlenecks import CASES, Bottlenecks
from fuelrail.bench.studies.diagnose.judge import Bound
from fuelrail.pipeline.settings import convert

RESULT = Path(__file__).parents[3] / "bench" / "results" / "bottlenecks.json"


def test_the_committed_result_has_every_case_named_rightly():
    result = msgspec.json.decode(RESULT.read_bytes(), type=Bottlenecks)
    assert [case.name for case in result.cases] == list(CASES)
    assert [case.name for case in result.cases if not case.right] == []


def test_twelve_bounds_and_a_healthy_run():
    bounds = {case.bound for case in CASES.values()}
    assert len(bounds) == 13
    assert bounds <= {*get_args(Bound)}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_injected_is_a_valid_run(name):
    case = CASES[name]
    profile = msgspec.structs.replace(bottlenecks._PROFILE, **case.profile)
    assert convert(msgspec.to_builtins(profile), type(profile), name) == profile
    if "transform" in case.settings:
        module, _, function = case.settings["transform"].partition(":")
        assert (module, getattr(bottlenecks, function)) == (bottlenecks.__name__, bottlenecks.slow_transform)
