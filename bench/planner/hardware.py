"""A cluster as its file says it: devices, links, host, storage and price, each number with its
source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings, load_yaml

# `configs/` is beside `bench/` in a checkout (whose package is a link: so resolve) and in an
# installed package.
CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
ComputeType = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
GIB = 2**30

# What no device reaches today by a factor of ten: a figure above is in another unit.
_LARGEST_TFLOPS = 5e4
_LARGEST_GB_PER_S = 1e5
_LARGEST_GIB = 4096.0
_LARGEST_PORT_GB_PER_S = 125  # 1 Tb/s a device; ports are sold by their bits


class Sourced(Settings, frozen=True):
    """A number and where it is from."""

    value: Annotated[float, msgspec.Meta(gt=0)]
    source: Annotated[str, msgspec.Meta(min_length=8)]


class Device(Settings, frozen=True, kw_only=True):
    """One accelerator: memory in GiB, its rate in GB/s (1e9 bytes), dense peaks in TFLOP/s by
    compute type.
    """

    name: str
    memory_gib: Sourced
    memory_gb_per_s: Sourced
    peak_tflops: dict[ComputeType, Sourced]


class Link(Settings, frozen=True, kw_only=True):
    """What joins devices: GB/s (1e9 bytes) per device in one direction; ``latency_us`` a
    collective, besides its bytes.

    Inside a node the rate is nccl-tests' bus bandwidth. Between nodes it is one device's share of
    its node's ports: a group with several devices in each node has a ring through each port, and so
    a multiple of it (NVIDIA/nccl-tests issue 119: four ports of 25 GB/s are a bus bandwidth of 100
    GB/s).
    """

    name: str
    gb_per_s: Sourced
    latency_us: Sourced


class Host(Settings, frozen=True, kw_only=True):
    """One node besides its devices: CPUs, and images that one of them decodes in a second."""

    cpus: Sourced
    images_per_cpu_s: Sourced


class ClusterSettings(Settings, frozen=True, kw_only=True):
    """A cluster of equal nodes. ``storage_gb_per_s`` is what all nodes together can read."""

    name: str
    nodes: Count
    devices_per_node: Count
    device: Device
    inside: Link
    between: Link | None = None
    host: Host
    storage_gb_per_s: Sourced
    usd_per_device_hour: Sourced | None = None

    @property
    def num_devices(self) -> int:
        """Number of accelerators."""
        return self.nodes * self.devices_per_node

    @property
    def images_per_node_s(self) -> float:
        """Images that the CPUs of a node decode in a second."""
        return self.host.cpus.value * self.host.images_per_cpu_s.value

    def link(self, reach: int) -> Link:
        """Return the slowest link that a group passes whose ranks lie within ``reach``
        successive ranks.
        """
        return (
            self.inside if reach <= self.devices_per_node or self.between is None else self.between
        )

    def bytes_per_s(self, reach: int, stride: int = 1) -> float:
        """Return the bus bandwidth of a group: every ``stride``-th of ``reach`` successive
        ranks.
        """
        link = self.link(reach)
        if link is self.inside:
            return link.gb_per_s.value * 1e9
        ports = max(1, self.devices_per_node // stride)
        return min(ports * link.gb_per_s.value, self.inside.gb_per_s.value) * 1e9

    def peak_flops(self, kind: ComputeType) -> float:
        """Return the device's dense peak in FLOP/s.

        Raises ConfigError where the file does not say it.
        """
        peaks = self.device.peak_tflops
        if kind not in peaks:
            raise ConfigError(
                f"cluster '{self.name}' has no peak_tflops for {kind}; it has: "
                f"{', '.join(sorted(peaks))}; add it with its source, or choose one of these"
            )
        return peaks[kind].value * 1e12


def load_cluster(name_or_path: str) -> ClusterSettings:
    """Load a cluster file, or one of ``configs/clusters`` by name.

    Raises ConfigError for what cannot be.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = CLUSTERS / f"{name_or_path}.yaml"
        if not path.is_file():
            names = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.yaml")))
            raise ConfigError(
                f"cluster '{name_or_path}' is not known; known: {names}; or give the path "
                "of a .yaml"
            )
    cluster = load_yaml(path, ClusterSettings)
    device = cluster.device
    limits = {
        "device.memory_gib": (device.memory_gib, _LARGEST_GIB),
        "device.memory_gb_per_s": (device.memory_gb_per_s, _LARGEST_GB_PER_S),
        **{
            f"device.peak_tflops.{kind}": (peak, _LARGEST_TFLOPS)
            for kind, peak in device.peak_tflops.items()
        },
        "inside.gb_per_s": (
            cluster.inside.gb_per_s,
            device.memory_gb_per_s.value,
        ),
    }
    if cluster.between is not None:
        limits["between.gb_per_s"] = (
            cluster.between.gb_per_s,
            _LARGEST_PORT_GB_PER_S,
        )
    for name, (number, largest) in limits.items():
        if number.value > largest:
            raise ConfigError(
                f"{path}: {name} is {number.value:g}, and at most {largest:g} is possible; "
                "check the unit (GB/s and TFLOP/s, not bit/s or GFLOP/s)"
            )
    if not device.peak_tflops:
        raise ConfigError(
            f"{path}: device.peak_tflops is empty; give at least one of fp32, tf32, bf16, fp16, fp8"
        )
    if cluster.nodes > 1 and cluster.between is None:
        raise ConfigError(
            f"{path}: {cluster.nodes} nodes need the link 'between' them; add it, or use nodes: 1"
        )
    return cluster
