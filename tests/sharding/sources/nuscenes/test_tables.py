"""Tables are read in pieces, strictly; links that lead nowhere are named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.nuscenes import tables
from fuelrail.sharding.sources.nuscenes.tables import (
    Named,
    Scene,
    Tables,
    check_finite,
)
from fuelrail.sharding.sources.shared.files import source_files


def tables_in(folder) -> Tables:
    return Tables(source_files(str(folder.parent)), folder.name)


# Texts that look like the gap between two records.
NASTY = st.text(alphabet='}{,"[] \n\\ab', max_size=12)


@settings(max_examples=150)
@given(
    texts=st.lists(NASTY, max_size=30),
    piece_bytes=st.integers(4, 200),
    indent=st.sampled_from([None, 0, 2]),
    bom=st.booleans(),
)
def test_pieces_join_to_the_table(tmp_path_factory, texts, piece_bytes, indent, bom):
    folder = tmp_path_factory.mktemp("tables")
    records = [
        {"token": str(number), "name": text, "more": {"a": [1]}}
        for number, text in enumerate(texts)
    ]
    (folder / "category.json").write_text(
        ("\ufeff" if bom else "") + json.dumps(records, indent=indent)
    )
    before = tables._PIECE_BYTES
    tables._PIECE_BYTES = piece_bytes
    try:
        read = tables_in(folder).all("category", Named)
    finally:
        tables._PIECE_BYTES = before
    assert [(record.token, record.name) for record in read] == [
        (r["token"], r["name"]) for r in records
    ]


def test_large_tables_come_in_several_pieces(tmp_path, monkeypatch):
    (tmp_path / "category.json").write_text(
        json.dumps([{"token": str(n), "name": "x"} for n in range(1000)], indent=0)
    )
    monkeypatch.setattr(tables, "_PIECE_BYTES", 4096)
    assert len(list(tables_in(tmp_path).read("category", Named))) > 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"token": "a"}', "not a JSON list"),
        ("", "not a JSON list"),
        ('[{"token": "a", "name": "b"}', "not JSON"),
        ('[{"token": "a"}]', "the field 'name' is missing"),
        ('[{"token": 1, "name": "b"}]', "must be text; got "),
        ('[{"token": "a", "name": "b"}] x', "not JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (
            '[{"token": "a", "name": "b", "c": ' + "[" * 300_000,
            "nested too deeply",
        ),
        (
            '[{"token": "a", "name": "' + "b" * (17 << 20),
            "a record of table '.*' has [0-9]+ bytes, of which at most",
        ),
        ('[{"token": "\udce4", "name": "b"}]', "not JSON"),
    ],
)
def test_what_is_not_a_table_is_refused(tmp_path, text, says):
    (tmp_path / "category.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SourceError, match=says) as caught:
        tables_in(tmp_path).all("category", Named)
    assert "category.json" in str(caught.value)


def test_the_place_of_a_bad_record_is_reported(tmp_path):
    records = [{"token": str(n), "name": "", "log_token": "", "nbr_samples": 1} for n in range(9)]
    records[6]["nbr_samples"] = "1"
    (tmp_path / "scene.json").write_text(json.dumps(records))
    with pytest.raises(SourceError, match=r"scene\.json.*at 'nbr_samples' of entry 6: "):
        tables_in(tmp_path).all("scene", Scene)


def test_missing_tables_are_all_named(tmp_path):
    with pytest.raises(SourceError, match=r"v1\.0-mini' cannot be read"):
        tables_in(tmp_path / "v1.0-mini").check()
    for table in tables.TABLES:
        (tmp_path / f"{table}.json").write_text("[]")
    tables_in(tmp_path).check()
    (tmp_path / "ego_pose.json").unlink()
    (tmp_path / "sample.json").unlink()
    with pytest.raises(SourceError, match=r"ego_pose\.json, sample\.json missing"):
        tables_in(tmp_path).check()


def test_numbers_that_are_none():
    owners = ["p", "q"]
    good = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    check_finite(good, owners, table="ego_pose", column="rotation")
    for value, column in (
        (np.nan, "translation"),
        (np.inf, "translation"),
        (0.9, "rotation"),
    ):
        bad = good.copy()
        bad[1, 1] = value
        with pytest.raises(SourceError, match=f"table 'ego_pose': row 'q' has the {column}"):
            check_finite(bad, owners, table="ego_pose", column=column)
