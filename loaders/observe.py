"""A loader's metrics for Prometheus and for ``fuelrail top``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from fuelrail.pipeline.metrics import Metric, MetricsServer, loader_metrics

if TYPE_CHECKING:
    from fuelrail.loaders.loader import DataLoader


def serve_metrics(loader: DataLoader, *, port: int = 0, host: str = "127.0.0.1") -> MetricsServer:
    """Serve a loader's :meth:`~fuelrail.loaders.DataLoader.stats` at ``http://HOST:PORT/metrics``.

    ``port`` 0 takes any free one; with several ranks on a host give each its own, such as ``9400 + local_rank``. The
    answer's ``url`` is what ``fuelrail top`` wants, its ``close()`` ends it. Metrics and labels:
    :mod:`fuelrail.pipeline.metrics`; the labels here are ``dataset``, ``rank`` and ``world_size``. The server does not
    keep the loader alive. Raises ConfigError where the port cannot be had.
    """
    labels = {
        "dataset": loader.dataset.manifest.name,
        "rank": str(loader.world.rank),
        "world_size": str(loader.world.size),
    }
    alive = weakref.ref(loader)

    def collect() -> list[Metric]:
        there = alive()
        return [] if there is None else loader_metrics(there.stats(), labels)

    return MetricsServer(collect, port=port, host=host)
