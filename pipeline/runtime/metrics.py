"""Counters of a running loader as Prometheus metrics, and an endpoint that serves them.

All have the labels of the endpoint (``rank``, ...); `HELP` says what each is. Names that end with
``_total`` are counters, the others gauges. Those of a stage have the label ``stage``, its seconds
also ``state``.

Occupancy as the loader sees it is ``1 - rate(fuelrail_wait_seconds_total) /
rate(fuelrail_uptime_seconds_total)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

from fuelrail.pipeline.errors import ConfigError, needs

with needs("an endpoint of metrics, or `fuelrail top`,", "fuelrail[bench]"):
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from fuelrail.pipeline.runtime.stages import StageClock

_STORAGE: Final = {
    "spans": (
        "fuelrail_storage_spans_total",
        "samples that storage handed out",
    ),
    "span_bytes": (
        "fuelrail_storage_bytes_total",
        "bytes of the samples that storage handed out",
    ),
    "requests": (
        "fuelrail_storage_requests_total",
        "requests to remote storage that were answered",
    ),
    "request_bytes": (
        "fuelrail_storage_request_bytes_total",
        "bytes that requests brought, gaps and hedges included",
    ),
    "retries": (
        "fuelrail_storage_retries_total",
        "requests or reads made again after a failure",
    ),
    "hedges": (
        "fuelrail_storage_hedges_total",
        "second requests, made because the first was slow",
    ),
    "hedges_won": (
        "fuelrail_storage_hedges_won_total",
        "second requests that were answered first",
    ),
    "refetched": (
        "fuelrail_storage_refetched_total",
        "samples read again: they came short or with a wrong checksum",
    ),
    "concurrency": (
        "fuelrail_storage_concurrency",
        "requests that may be in flight",
    ),
    "cache_hits": ("fuelrail_cache_hits_total", "samples found in the cache"),
    "cache_misses": (
        "fuelrail_cache_misses_total",
        "samples that were not in the cache",
    ),
    "cache_hit_bytes": (
        "fuelrail_cache_hit_bytes_total",
        "bytes of the samples found in the cache",
    ),
    "cache_evictions": (
        "fuelrail_cache_evictions_total",
        "samples that made room for others in the cache",
    ),
    "cache_damaged": (
        "fuelrail_cache_damaged_total",
        "cache files that were missing, cut or corrupt",
    ),
    "cache_bytes": (
        "fuelrail_cache_bytes",
        "bytes in the cache, of all processes that share it",
    ),
}
"""Fields of `fuelrail.loaders.storage.StorageStats`, and what they are here."""

_LOADER: Final = {
    "batches": ("fuelrail_batches_total", "batches handed to the trainer"),
    "samples": ("fuelrail_samples_total", "samples handed to the trainer"),
    "images": ("fuelrail_images_total", "images handed to the trainer"),
    "waited_s": (
        "fuelrail_wait_seconds_total",
        "time the trainer waited for batches",
    ),
    "elapsed_s": (
        "fuelrail_uptime_seconds_total",
        "time since the start of the first iteration",
    ),
    "bad_samples": (
        "fuelrail_bad_samples_total",
        "distinct bad samples that were substituted",
    ),
}
"""Fields of `LoaderStats`."""

_STAGE: Final = {
    "items": ("fuelrail_stage_items_total", "work calls finished"),
    "num_threads": ("fuelrail_stage_threads", "threads of a stage"),
    "waiting": ("fuelrail_stage_queue", "results that wait behind a stage"),
    "capacity": (
        "fuelrail_stage_queue_capacity",
        "results that may wait behind a stage",
    ),
}
"""Fields of `StageClock`."""

HELP: Final = {
    **dict(_STORAGE.values()),
    **dict(_LOADER.values()),
    **dict(_STAGE.values()),
    "fuelrail_stage_seconds_total": (
        "thread-seconds by state: busy in work, starved for input, blocked for room"
    ),
}


class LoaderCounters(Protocol):
    """The statistics of a loader (`LoaderStats`): the fields of ``_LOADER``, and these."""

    @property
    def stages(self) -> Sequence[StageClock]: ...  # noqa: D102
    @property
    def storage(self) -> Any: ...  # noqa: D102 - `StorageStats`


class Metric(NamedTuple):
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def loader_metrics(stats: LoaderCounters, labels: Mapping[str, str]) -> list[Metric]:
    """Return the metrics of one loader."""
    metrics = _metrics(_LOADER, stats, labels)
    for clock in stats.stages:
        stage_labels = {**labels, "stage": clock.name}
        metrics += _metrics(_STAGE, clock, stage_labels)
        for state in ("busy", "starved", "blocked"):
            seconds = Metric(
                "fuelrail_stage_seconds_total",
                labels={**stage_labels, "state": state},
                value=getattr(clock, f"{state}_s"),
            )
            metrics.append(seconds)
    storage_labels = {**labels, "backend": stats.storage.backend}
    return metrics + _metrics(_STORAGE, stats.storage, storage_labels)


def _metrics(
    fields: Mapping[str, tuple[str, str]],
    counters: object,
    labels: Mapping[str, str],
) -> list[Metric]:
    return [Metric(name, labels, getattr(counters, field)) for field, (name, _) in fields.items()]


class _Metrics(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for name, labels, value in self._collect():
            if name not in families:
                families[name] = Family(
                    name.removesuffix("_total"),
                    HELP[name],
                    "counter" if name.endswith("_total") else "gauge",
                )
            families[name].add_sample(name, dict(labels), value)
        return families.values()


def parse(text: str) -> list[Metric]:
    """Read the text that a :class:`MetricsServer` serves; raises ValueError where it is in
    another format.
    """
    return [
        Metric(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


class MetricsServer:
    """Serves ``/metrics`` over HTTP from a thread of its own, until closed.

    ``collect`` is called for each request, on a thread of the server's. ``port`` 0 takes any free
    one, see :attr:`url`. ``host`` is 127.0.0.1 by default: there is no password. Raises ConfigError
    where the port is taken.
    """

    def __init__(
        self,
        collect: Callable[[], Iterable[Metric]],
        *,
        port: int,
        host: str = "127.0.0.1",
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Metrics(collect))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics cannot be served on {host}:{port}: {error}; choose another port, "
                "or 0 for any free one"
            ) from error
        host_text = f"[{host}]" if ":" in host else host
        self.url = f"http://{host_text}:{self._server.server_address[1]}/metrics"

    def __repr__(self) -> str:
        return f"MetricsServer({self.url})"

    def close(self) -> None:
        """Stop serving and free the port; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
