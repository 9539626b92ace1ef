"""Figures that the documents state are those of the files in bench/results. Named after FINDINGS, section 2."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)


def result(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def test_n3_the_rate_beside_gnu_tar_names_the_whole_command():
    for claim in re.finditer(r"two thirds of GNU tar's rate", TEXT):
        assert "the whole command" in TEXT[claim.end() : claim.end() + 200]


def test_n5_restart_markers_are_stated_round_by_round():
    rates = result("decode_loader")["images_per_s"]
    pairs = zip(rates["loader, turbo, restart rows"], rates["loader, turbo"], strict=True)
    median = statistics.median(cut / whole for cut, whole in pairs)
    for stated in re.findall(r"BEV crop then loads ([\d.]+) times as fast", TEXT):
        assert float(stated) == pytest.approx(median, abs=0.005)


def test_n6_the_rate_beside_s3fs_names_its_client():
    for claim in re.finditer(r"times the rate of `s3fs`", TEXT):
        assert "obstore" in TEXT[claim.end() : claim.end() + 100]


def test_n7_compiled_code_is_not_said_to_give_the_same_pixels():
    assert not re.search(r"times as fast, the same pixels", TEXT)


def test_n8_the_fastest_recipes_are_said_to_be_of_those_run_often_enough():
    assert "every loader with the recipe that is its fastest" not in TEXT


def test_n9_mapped_reading_is_stated_as_the_file_has_it():
    found = [
        entry["speedup"]
        for comparison in result("storage_raw")["comparisons"]
        for entry in comparison["entries"]
        if entry["name"] == "fuelrail, mapped + xxh3, pages not mapped yet"
    ]
    assert "at 0.9 of a `pread`" not in TEXT
    for low, high in re.findall(r"at ([\d.]+) to ([\d.]+) of a `pread` with digest the first time", TEXT):
        assert (float(low), float(high)) == pytest.approx((min(found), max(found)), abs=0.006)


def test_n11_a_digest_is_not_said_to_name_the_member():
    """The digest is of a sample's span: which member is damaged it does not say."""
    assert "errors name shard, offset, key and member" not in TEXT
    assert not re.search(r"digest before use; [^.]*\bmember\b", TEXT)
