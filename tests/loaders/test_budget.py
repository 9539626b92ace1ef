"""CPUs and memory by affinity, container and launcher."""

from __future__ import annotations

import os
from pathlib import Path

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
        (
            {
                "cpu__cpu_dot_cfs_quota_us": "200000",
                "cpu__cpu_dot_cfs_period_us": "100000",
            },
            2,
        ),
        ({"cpu__cpu_dot_cfs_quota_us": "-1"}, 8),
    ],
)
def test_a_containers_quota_bounds_the_cpus(eight, tmp_path, contents, cpus):
    assert host.usable_cpus(files(tmp_path, **contents)) == cpus


def test_the_smallest_quota_of_the_own_groups_bounds_the_cpus(eight, tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/user.slice/job\n")
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "cgroup")
    root = tmp_path / "root"
    (root / "user.slice/job").mkdir(parents=True)
    (root / "cpu.max").write_text("700000 100000\n")
    assert host.usable_cpus(root) == 7
    (root / "user.slice/cpu.max").write_text("150000 100000\n")
    (root / "user.slice/job/cpu.max").write_text("max 100000\n")
    assert host.usable_cpus(root) == 1.5
    (tmp_path / "cgroup").write_text("3:cpu,cpuacct:/job\n")
    (root / "cpu/job").mkdir(parents=True)
    (root / "cpu/job/cpu.cfs_quota_us").write_text("50000")
    assert host.usable_cpus(root) == 0.5


def test_workers_are_as_many_as_the_quota_allows(eight, tmp_path, monkeypatch):
    """Of shards, of a Ray cluster that is started here, and of decoding."""
    from fuelrail.sharding.engines import EngineOptions

    quota = files(tmp_path, cpu_dot_max="150000 100000\n")
    usable_cpus = host.usable_cpus
    monkeypatch.setattr(host, "usable_cpus", lambda: usable_cpus(quota))
    assert host.num_usable_cpus() == EngineOptions().num_workers == host.default_num_workers() == 2
    assert EngineOptions(workers=7).num_workers == 7


def test_no_module_counts_the_cpus_of_the_host():
    """But those that show the machine, or choose CPUs by number."""
    import fuelrail

    root = Path(fuelrail.__file__).parent
    names = ("cpu_count", "len(os.sched_getaffinity")
    counting = set()
    for folder in ("pipeline", "sharding", "loaders", "bench"):
        for path in (root / folder).rglob("*.py"):
            content = path.read_text()
            if any(name in content for name in names):
                counting.add(path.relative_to(root).as_posix())
    assert counting == {
        "pipeline/runtime/host.py",
        "bench/measure/machine.py",
        "bench/studies/compare/run.py",
    }


@pytest.mark.parametrize(
    ("local", "workers"),
    [("", 8), ("1", 8), ("3", 2), ("16", 1), ("x", 8), ("0", 8)],
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
