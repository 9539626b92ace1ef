"""What this process may use of its host: CPUs and memory, its share of them among the ranks that run there."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMORY_SHARE: Final = 0.25


class Budget(Settings, frozen=True):
    """Bounds for ``num_workers="auto"``: what it picks stays within them, whatever it finds.

    ``cpus``: decoding threads at most; None: half as many again as this rank's share of the CPUs that the process may
    use (affinity mask and container quota, over the ranks on this host). ``memory_bytes``: batch buffers at most; None:
    a quarter of this rank's share of the memory that is free when the loader is made.
    """

    cpus: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"budget: {name}={value} must be 1 or more")


DEFAULT_BUDGET: Final = Budget()


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may use: its affinity mask, cut to its container's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken now without swapping: the host's, cut to what is left of the container's limit."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _read(cgroup / "memory.max")
    if limit is not None and limit != "max":
        used = _read(cgroup / "memory.current")
        free = min(free, max(0, int(limit) - int(used or 0)))
    return free


def ranks_on_host() -> int:
    """Ranks that share this host, as the launcher says (LOCAL_WORLD_SIZE), else 1."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def default_num_workers() -> int:
    """Decoding threads for this rank: its share of the CPUs that the process may use."""
    return max(1, available_cpus() // ranks_on_host())


def default_memory_bytes() -> int:
    """Memory for batch buffers of this rank, if nothing else is said."""
    return int(available_memory_bytes() * _MEMORY_SHARE) // ranks_on_host()


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs by the cgroup's bandwidth limit (version 2, then 1), None without one."""
    told = _read(cgroup / "cpu.max")
    if told is not None:
        quota, period = told.split()
    else:
        quota = _read(cgroup / "cpu" / "cpu.cfs_quota_us") or "max"
        period = _read(cgroup / "cpu" / "cpu.cfs_period_us") or "100000"
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # not mounted, or not for us to see: then there is no limit that we could keep to
        return None
