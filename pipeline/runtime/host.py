"""CPUs and memory that this process may use: the machine's, cut to its container's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

from fuelrail.pipeline.errors import ConfigError

_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")
_MEMORY_SHARE: Final = 0.25


def usable_cpus(cgroup: Path = _CGROUP) -> float:
    """Return the CPUs that this process may use: its affinity mask, cut to its container's quota
    (cgroup 2, then 1).
    """
    num_cpus = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        num_cpus = float(len(os.sched_getaffinity(0)))
    for folder in _cgroups(cgroup, controller=""):
        limit = _read(folder / "cpu.max") or "max 100000"
        quota, period = limit.split()
        if quota != "max":
            num_cpus = min(num_cpus, int(quota) / int(period))
    for folder in _cgroups(cgroup / "cpu", controller="cpu"):
        quota = _read(folder / "cpu.cfs_quota_us") or "-1"
        period = _read(folder / "cpu.cfs_period_us") or "100000"
        if quota != "-1":
            num_cpus = min(num_cpus, int(quota) / int(period))
    return num_cpus


def num_usable_cpus() -> int:
    """Return how many workers have a CPU of their own: :func:`usable_cpus`, a part of a CPU
    counted as one.
    """
    return max(1, math.ceil(usable_cpus()))


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control groups below ``root``, from the innermost to
    ``root``.

    ``controller`` is one of version 1; "" is for version 2. In a container the innermost one mostly
    is ``root``.
    """
    own_cgroups = _read(_OWN_CGROUPS) or ""
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(",") or ".." in path:
            continue
        innermost = root / path.lstrip("/")
        between = [folder for folder in innermost.parents if root in folder.parents]
        folders = [innermost, *between, root]
        return list(dict.fromkeys(folders))
    return [root]


def memory_limit_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Return the memory that the container may take, files in the page cache included; None
    without a limit.
    """
    limit = _read(cgroup / "memory.max")
    if limit in (None, "max"):
        return None
    return int(limit)


def free_memory_bytes(meminfo: Path = _MEMINFO) -> int:
    """Return the memory of the machine that can be taken now without swapping, as the kernel
    states it.
    """
    fields = {}
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, value = line.split(":", 1)
        fields[name] = value
    available_kib = fields["MemAvailable"].split()[0]
    return int(available_kib) * 1024


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Return memory that can be taken now without swapping: the machine's, cut to the rest of
    the container's limit.
    """
    free = free_memory_bytes(meminfo)
    limit = memory_limit_bytes(cgroup)
    if limit is None:
        return free
    used_bytes = int(_read(cgroup / "memory.current") or 0)
    return min(free, max(0, limit - used_bytes))


def ranks_on_host() -> int:
    """Return the number of ranks that share this host, as the launcher says (LOCAL_WORLD_SIZE),
    else 1.
    """
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    if stated.isdecimal():
        return max(1, int(stated))
    return 1


def stated_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as the launcher says (RANK,
    WORLD_SIZE), else 0 of 1. Raises ConfigError.
    """
    rank = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world} in the environment must be integers, the rank "
            "from 0 and below the size"
        )
    return int(rank), int(world)


def default_num_workers() -> int:
    """Return the number of decoding threads for this rank: its share of the CPUs that the
    process may use.
    """
    return max(1, num_usable_cpus() // ranks_on_host())


def default_memory_bytes() -> int:
    """Return the default memory for batch buffers of this rank."""
    return int(available_memory_bytes() * _MEMORY_SHARE) // ranks_on_host()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        # Not mounted, or not for us to see: then there is no limit that we could keep to.
        return None
