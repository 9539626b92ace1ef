"""Cluster files: numbers with sources, and what is refused."""

from __future__ import annotations

import pytest

from fuelrail.bench.planner.hardware import CLUSTERS, load_cluster
from fuelrail.pipeline.errors import ConfigError


def test_a_group_across_nodes_has_its_members_ports():
    cluster = load_cluster("8x8-h100")
    port = 48e9
    inside = 370e9
    assert cluster.num_devices == 64
    assert cluster.bytes_per_s(8) == inside
    assert cluster.bytes_per_s(64) == inside  # eight ports are faster than a ring of NVLink
    assert cluster.bytes_per_s(64, 8) == port
    assert cluster.bytes_per_s(64, 4) == 2 * port
    assert load_cluster("8x8-a100-ethernet").bytes_per_s(64) == 8 * 1.25e9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "gb_per_s: {value: 3350",
            "gb_per_s: {value: 3350000",
            "memory_gb_per_s is 3.35e\\+06, and at most 100000",
        ),
        (
            "  gb_per_s: {value: 48,",
            "  gb_per_s: {value: 400,",
            "between.gb_per_s is 400, and at most 125",
        ),
        (
            "memory_gib: {value: 80,",
            "memory_gib: {value: -80,",
            "must be a number > 0",
        ),
        (
            "nodes: 8",
            "nodes: 0",
            "must be a whole number from 1 to 1000000; got 0",
        ),
        (', source: "400 Gb/s', ', sourse: "400 Gb/s', "sourse"),
    ],
)
def test_impossible_numbers_are_refused(tmp_path, old, new, message):
    text = (CLUSTERS / "8x8-h100.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_cluster(str(path))


def test_nodes_without_a_link_between_them_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((CLUSTERS / "1x8-h100.yaml").read_text().replace("nodes: 1", "nodes: 2", 1))
    with pytest.raises(ConfigError, match="2 nodes need the link 'between' them"):
        load_cluster(str(path))


def test_unknown_names_and_types():
    with pytest.raises(ConfigError, match=r"cluster '9x9' is not known; known: .*8x8-h100"):
        load_cluster("9x9")
    with pytest.raises(
        ConfigError,
        match="has no peak_tflops for fp8; it has: bf16, fp16, fp32, tf32",
    ):
        load_cluster("1x8-a100").peak_flops("fp8")
