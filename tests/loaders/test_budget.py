"""CPUs and memory by affinity, container and launcher."""

from __future__ import annotations

import os

import pytest

from fuelrail.pipeline.runtime import host


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def files(root, **contents):
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("contents", "cpus"),
    [
        ({}, 8),
        ({"cpu_dot_max": "max 100000\n"}, 8),
        ({"cpu_dot_max": "350000 100000\n"}, 3.5),
        ({"cpu_dot_max": "10000 100000\n"}, 0.1),
        ({"cpu_dot_max": "1600000 100000\n"}, 8),
        ({"cpu__cpu_dot_cfs_quota_us": "200000", "cpu__cpu_dot_cfs_period_us": "100000"}, 2),
        ({"cpu__cpu_dot_cfs_quota_us": "-1"}, 8),
    ],
)
def test_a_containers_quota_bounds_the_cpus(eight, tmp_path, contents, cpus):
    assert host.usable_cpus(files(tmp_path, **contents)) == cpus


@pytest.mark.parametrize(
    ("local", "workers"), [("", 8), ("1", 8), ("3", 2), ("16", 1), ("x", 8), ("0", 8)]
)
def test_ranks_share_the_host(eight, monkeypatch, local, workers):
    monkeypatch.setattr(host, "usable_cpus", lambda: 8.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert host.default_num_workers() == workers


def test_memory_is_what_host_and_container_leave(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n")
    assert host.available_memory_bytes(tmp_path, meminfo) == 4000 * 1024
    files(tmp_path, memory_dot_max="max")
    assert host.available_memory_bytes(tmp_path, meminfo) == 4000 * 1024
    files(tmp_path, memory_dot_max="1000000", memory_dot_current="400000")
    assert host.available_memory_bytes(tmp_path, meminfo) == 600000


def test_this_host_has_some():
    assert host.default_num_workers() >= 1
    assert host.default_memory_bytes() > 0
