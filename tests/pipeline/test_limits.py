"""The limits of sizes: what the page has of them, and what a reader says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fuelrail.pipeline.channels import selection
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.limits import LIMITS, MASKS_OF_SAMPLE, MEMBER, SAMPLE, Limit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"


def test_the_page_has_the_limits_of_members_and_samples() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Sizes")[1].split("\n## ")[0]
    sizes = [limit.maximum >> 20 for limit in (MEMBER, SAMPLE)]
    assert "{} MiB a member, {} MiB a sample".format(*sizes) in " ".join(section.split())


def test_no_limit_is_listed_twice() -> None:
    assert len({limit.subject for limit in LIMITS}) == len(LIMITS) > 10


@pytest.mark.parametrize(("number", "is_broken"), [(0, False), (9, False), (10, True)])
def test_a_limit_is_the_largest_number_that_is_allowed(number, is_broken) -> None:
    text = Limit("a bag", 9, "apples").broken(number)
    assert (text is not None) == is_broken
    assert text is None or text == "takes 10 apples when it is decoded, at most 9 are read"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("uint8", (None, None)), ("uint16", (None, None, 3))],
    ids=["gray", "RGB"],
)
def test_all_masks_of_a_sample_are_limited_together(monkeypatch, dtype, shape) -> None:
    pixels = np.zeros((4, 6, 3)[: len(shape)], dtype)
    limit = 2 * pixels.nbytes
    monkeypatch.setattr(selection, "MASKS_OF_SAMPLE", MASKS_OF_SAMPLE._replace(maximum=limit))
    table = [
        Channel(
            name=f"mask{number}",
            kind="image",
            field=f"mask{number}.png",
            law=Law("fixed"),
            dtype=dtype,
            axes=("height", "width", "colour")[: len(shape)],
            shape=shape,
        )
        for number in range(3)
    ]
    member = KINDS["image"].encode(pixels, table[0])
    members = {entry.field: member for entry in table}
    assert len(selection.decode_values(members, table[:2], "k")) == 2
    assert not list(selection.check_members(members, table[:2], {}))
    words = (
        f"'mask2' what the sample has of masks takes {3 * pixels.nbytes} bytes .* at most {limit}"
    )
    with pytest.raises(SchemaError, match=words):
        selection.decode_values(members, table, "k")
    ((field, text),) = selection.check_members(members, table, {})
    assert field == "mask2.png" and re.search(words, text)
