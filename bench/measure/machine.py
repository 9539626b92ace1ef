"""The facts to report with each figure: hardware, limits, versions and commit.

No host names, user names or paths.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import fuelrail
from fuelrail.pipeline.runtime.host import memory_limit_bytes, usable_cpus
from fuelrail.pipeline.text import shortened

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset

# What decides speed or results; named here so that the report lists the same packages everywhere.
_PACKAGES = (
    "torch",
    "numpy",
    "pyarrow",
    "opencv-python-headless",
    "simplejpeg",
    "pillow",
    "pillow-simd",
    "zstandard",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
)

_STATUS = Path("/proc/self/status")

_STAT = Path("/proc/stat")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as its driver names it."""

    name: str
    memory_bytes: int
    driver: str


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a measurement.

    ``num_cpus``: CPUs that this process may use, after affinity and cgroup quota.
    """

    cpu: str
    num_cpus: float
    num_cpus_installed: int
    memory_bytes: int
    gpus: list[Gpu]
    system: str
    python: str
    fuelrail: str
    commit: str | None
    uncommitted_changes: bool | None
    packages: dict[str, str]


def machine_facts() -> MachineFacts:
    """Collect the facts of this machine; what cannot be found out is "unknown" or None, never
    invented.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        cpu = f"{match.group(1).strip() if match else 'unknown'} ({platform.machine()})"
    except OSError:
        cpu = platform.processor() or "unknown"
    # The checkout that this code runs from; resolved, because it reaches this file through a link.
    root = Path(__file__).resolve().parents[2]
    commit = None
    status = None
    if (root / ".git").exists() and shutil.which("git") is not None:
        commit = _git(root, "rev-parse", "HEAD") or None
        # Result files are what a measurement writes, also while it runs: they do not change what
        # is measured.
        command = "status --porcelain --untracked-files=no -- . :(exclude)bench/results"
        status = _git(root, *command.split())
    # What follows the number of the kernel's release is free text that may name a site.
    release = re.match(r"[\d.]*\d", platform.release())
    return MachineFacts(
        cpu=cpu,
        num_cpus=usable_cpus(),
        num_cpus_installed=os.cpu_count() or 1,
        memory_bytes=min(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            memory_limit_bytes() or sys.maxsize,
        ),
        gpus=installed_gpus(),
        system=f"{platform.system()} {release.group(0)}" if release else platform.system(),
        python=platform.python_version(),
        fuelrail=fuelrail.__version__,
        commit=commit,
        uncommitted_changes=None if status is None else bool(status),
        packages=package_versions(_PACKAGES),
    )


def installed_gpus() -> list[Gpu]:
    """Return the GPUs that the NVIDIA driver shows; without torch, which would take seconds to
    load.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [row.split(", ") for row in answer.stdout.splitlines()] if answer.returncode == 0 else []
    return [
        Gpu(
            name=name,
            memory_bytes=int(mib) * 2**20 if mib.isdigit() else 0,
            driver=driver,
        )
        for name, mib, driver in (row for row in rows if len(row) == 3)
    ]


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(root: Path, *arguments: str) -> str | None:
    answer = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


class DatasetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The dataset, without its path. ``mean_sample_bytes``: of a sample of the split, as stored."""

    name: str
    fingerprint: str
    split: str
    num_samples: int
    num_shards: int
    cameras: list[str]
    mean_sample_bytes: float | None = None


def dataset_facts(dataset: Dataset, split: str) -> DatasetFacts:
    """Return the facts of one split; raises ConfigError where there is none of that name."""
    entry = dataset.split(split)
    lengths = dataset.index.column(
        "length", entry.first_sample, entry.first_sample + entry.num_samples
    )
    return DatasetFacts(
        name=shortened(dataset.manifest.name),
        fingerprint=dataset.manifest.fingerprint,
        split=split,
        num_samples=entry.num_samples,
        num_shards=entry.num_shards,
        cameras=[camera.channel for camera in dataset.manifest.cameras],
        mean_sample_bytes=float(lengths.mean()) if len(lengths) else None,
    )


def peak_memory_bytes() -> int:
    """Return the peak resident set of this process.

    Linux: VmHWM of ``/proc/self/status``. ``ru_maxrss`` does not replace it: a process inherits it
    from the one that it was forked from, so under a large parent a small process looks as large.
    """
    try:
        match = re.search(
            r"^VmHWM:\s*(\d+) kB",
            _STATUS.read_text(encoding="ascii"),
            re.MULTILINE,
        )
    except OSError:
        match = None
    if match is not None:
        return int(match.group(1)) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


class CpuUse(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"own_cpus": "own", "other_cpus": "others"},
):
    """Mean number of CPUs in use over a while: by this process and its ended children, and by all
    others.

    ``other_cpus`` is None where it cannot be known: without ``/proc/stat``, or where we may use
    only some of the CPUs that it counts.
    """

    seconds: float
    own_cpus: float
    other_cpus: float | None
    usable: float

    @property
    def disturbed(self) -> str | None:
        """A message on the CPU time of other processes, if that was more than a twentieth of the
        CPUs.
        """
        if self.other_cpus is None or self.other_cpus <= 0.05 * self.usable:
            return None
        return (
            f"other processes used {self.other_cpus:.1f} of {self.usable:g} CPUs, this measurement "
            f"{self.own_cpus:.1f}"
        )


def combine_host_uses(uses: Sequence[CpuUse]) -> CpuUse:
    """Return the use of one host's CPUs by processes that watched it together: to each the rest
    were others.
    """
    own_cpus = sum(use.own_cpus for use in uses)
    totals = [use.own_cpus + use.other_cpus for use in uses if use.other_cpus is not None]
    other_cpus = max(0.0, max(totals) - own_cpus) if totals else None
    return CpuUse(
        seconds=max(use.seconds for use in uses),
        own_cpus=own_cpus,
        other_cpus=other_cpus,
        usable=uses[0].usable,
    )


class CpuWatch:
    """Counts from its making to :meth:`use`; ``own_s`` returns the CPU seconds that are not
    others'.
    """

    def __init__(self, own_s: Callable[[], float] | None = None) -> None:
        self._count_s = own_s or _own_s
        self._started_s = time.monotonic()
        self._own_s = self._count_s()
        self._host_s = host_cpu_s()

    def use(self) -> CpuUse:
        """Return the use of the CPUs since the watch was made."""
        seconds = max(time.monotonic() - self._started_s, 1e-9)
        own_cpus = (self._count_s() - self._own_s) / seconds
        host_s = host_cpu_s()
        other_cpus = None
        if self._host_s is not None and host_s is not None:
            other_cpus = max(0.0, (host_s - self._host_s) / seconds - own_cpus)
        return CpuUse(
            seconds=seconds,
            own_cpus=own_cpus,
            other_cpus=other_cpus,
            usable=usable_cpus(),
        )


def _own_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (
            resource.getrusage(resource.RUSAGE_SELF),
            resource.getrusage(resource.RUSAGE_CHILDREN),
        )
    )


def all_cpu_s() -> float | None:
    """Return the CPU seconds of all processes since the machine started: user, nice, system, irq,
    softirq, steal.

    None where there is no ``/proc/stat``.
    """
    return _cpu_s((1, 2, 3, 6, 7, 8))


def host_cpu_s() -> float | None:
    """Return :func:`all_cpu_s` of a host all of whose CPUs we may use; None elsewhere.

    In a container that may use some of the host's CPUs, the host's count says nothing about ours.
    """
    return all_cpu_s() if usable_cpus() == os.cpu_count() else None


def stolen_cpu_s() -> float | None:
    """Return CPU seconds that the host kept from a virtual machine since it started; None
    without ``/proc/stat``.
    """
    return _cpu_s((8,))


def _cpu_s(columns: tuple[int, ...]) -> float | None:
    try:
        fields = _STAT.read_text(encoding="ascii").partition("\n")[0].split()
    except OSError:
        return None
    return sum(int(fields[column]) for column in columns) / os.sysconf("SC_CLK_TCK")
