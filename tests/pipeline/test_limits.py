"""The limits of sizes: their one table in the documents, and what a reader says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fuelrail.pipeline.limits import LIMITS, Limit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
ROW = re.compile(r"\| (.+) \| ([\d,]+) (\w+) \|")


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Sizes")[1].split("\n## ")[0]
    rows = [match.groups() for match in map(ROW.fullmatch, section.splitlines()) if match]
    assert rows == [(limit.subject, f"{limit.maximum:,}", limit.unit) for limit in LIMITS]


@pytest.mark.parametrize(("number", "is_broken"), [(0, False), (9, False), (10, True)])
def test_a_limit_is_the_largest_number_that_is_allowed(number, is_broken) -> None:
    text = Limit("a bag", 9, "apples").broken(number)
    assert (text is not None) == is_broken
    assert text is None or text == "takes 10 apples when it is decoded, at most 9 are read"
