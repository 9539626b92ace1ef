"""Counters of a running loader in Prometheus' text format, and an endpoint that serves them; standard library only.

Metrics, all with the labels of the endpoint (``rank``, ...):

===================================== ======= =====================================================================
name                                  type    meaning
===================================== ======= =====================================================================
fuelrail_batches_total                counter batches handed to the trainer
fuelrail_samples_total                counter samples in them
fuelrail_images_total                 counter images in them
fuelrail_wait_seconds_total           counter time the trainer waited for batches
fuelrail_uptime_seconds_total         counter time since the start of the loader's first iteration
fuelrail_stage_items_total            counter work calls finished, by ``stage``
fuelrail_stage_seconds_total          counter thread-seconds by ``stage`` and ``state`` (busy, starved, blocked)
fuelrail_stage_threads                gauge   threads of a stage
fuelrail_stage_queue                  gauge   results that wait behind a stage
fuelrail_stage_queue_capacity         gauge   how many may
fuelrail_storage_spans_total          counter samples that storage handed out
fuelrail_storage_bytes_total          counter bytes of them
fuelrail_storage_requests_total       counter requests to remote storage that were answered
fuelrail_storage_request_bytes_total  counter bytes that these brought, gaps and hedges included
fuelrail_storage_retries_total        counter requests or reads made again after a failure
fuelrail_storage_hedges_total         counter second requests, made because the first was slow
fuelrail_storage_hedges_won_total     counter those that were answered first
fuelrail_storage_refetched_total      counter samples read again because they came short or with a wrong checksum
fuelrail_storage_concurrency          gauge   requests that may be in flight
fuelrail_cache_hits_total             counter samples found in the cache
fuelrail_cache_misses_total           counter samples that were not
fuelrail_cache_hit_bytes_total        counter bytes of those found
fuelrail_cache_evictions_total        counter samples that made room for others
fuelrail_cache_damaged_total          counter cache files that were missing, cut or corrupt
fuelrail_cache_bytes                  gauge   bytes in the cache, of all processes that share it
fuelrail_bad_samples_total            counter distinct bad samples that were substituted
===================================== ======= =====================================================================

Occupancy as the loader sees it is ``1 - rate(fuelrail_wait_seconds_total) / rate(fuelrail_uptime_seconds_total)``.
"""

from __future__ import annotations

import http.server
import re
import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from fuelrail.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from fuelrail.pipeline.runtime.stages import StageClock

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_STORAGE: Final = {
    "spans": ("fuelrail_storage_spans_total", "samples that storage handed out"),
    "span_bytes": ("fuelrail_storage_bytes_total", "bytes of the samples that storage handed out"),
    "requests": ("fuelrail_storage_requests_total", "requests to remote storage that were answered"),
    "request_bytes": ("fuelrail_storage_request_bytes_total", "bytes that requests brought, gaps and hedges included"),
    "retries": ("fuelrail_storage_retries_total", "requests or reads made again after a failure"),
    "hedges": ("fuelrail_storage_hedges_total", "second requests, made because the first was slow"),
    "hedges_won": ("fuelrail_storage_hedges_won_total", "second requests that were answered first"),
    "refetched": ("fuelrail_storage_refetched_total", "samples read again: they came short or with a wrong checksum"),
    "concurrency": ("fuelrail_storage_concurrency", "requests that may be in flight"),
    "cache_hits": ("fuelrail_cache_hits_total", "samples found in the cache"),
    "cache_misses": ("fuelrail_cache_misses_total", "samples that were not in the cache"),
    "cache_hit_bytes": ("fuelrail_cache_hit_bytes_total", "bytes of the samples found in the cache"),
    "cache_evictions": ("fuelrail_cache_evictions_total", "samples that made room for others in the cache"),
    "cache_damaged": ("fuelrail_cache_damaged_total", "cache files that were missing, cut or corrupt"),
    "cache_bytes": ("fuelrail_cache_bytes", "bytes in the cache, of all processes that share it"),
}
"""Fields of `fuelrail.loaders.storage.StorageStats`, and what they are here."""

HELP: Final = dict(_STORAGE.values()) | {
    "fuelrail_batches_total": "batches handed to the trainer",
    "fuelrail_samples_total": "samples handed to the trainer",
    "fuelrail_images_total": "images handed to the trainer",
    "fuelrail_wait_seconds_total": "time the trainer waited for batches",
    "fuelrail_uptime_seconds_total": "time since the start of the first iteration",
    "fuelrail_stage_items_total": "work calls finished",
    "fuelrail_stage_seconds_total": "thread-seconds by state: busy in work, starved for input, blocked for room",
    "fuelrail_stage_threads": "threads of a stage",
    "fuelrail_stage_queue": "results that wait behind a stage",
    "fuelrail_stage_queue_capacity": "results that may wait behind a stage",
    "fuelrail_bad_samples_total": "distinct bad samples that were substituted",
}


class StorageCounters(Protocol):
    """What a storage backend counts; the fields of ``_STORAGE`` besides."""

    @property
    def backend(self) -> str: ...  # noqa: D102


class LoaderCounters(Protocol):
    """The statistics of a loader (`fuelrail.loaders.LoaderStats`)."""

    @property
    def stages(self) -> Sequence[StageClock]: ...  # noqa: D102
    @property
    def batches(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> int: ...  # noqa: D102
    @property
    def images(self) -> int: ...  # noqa: D102
    @property
    def waited_s(self) -> float: ...  # noqa: D102
    @property
    def elapsed_s(self) -> float: ...  # noqa: D102
    @property
    def storage(self) -> StorageCounters: ...  # noqa: D102
    @property
    def bad_samples(self) -> int: ...  # noqa: D102


class Metric(NamedTuple):
    """One value with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def loader_metrics(stats: LoaderCounters, labels: Mapping[str, str]) -> list[Metric]:
    """Return the metrics of one loader; see the module's table."""
    metrics = [
        Metric("fuelrail_batches_total", labels, stats.batches),
        Metric("fuelrail_samples_total", labels, stats.samples),
        Metric("fuelrail_images_total", labels, stats.images),
        Metric("fuelrail_wait_seconds_total", labels, stats.waited_s),
        Metric("fuelrail_uptime_seconds_total", labels, stats.elapsed_s),
        Metric("fuelrail_bad_samples_total", labels, stats.bad_samples),
    ]
    for clock in stats.stages:
        own = {**labels, "stage": clock.name}
        metrics += [
            Metric("fuelrail_stage_items_total", own, clock.items),
            Metric("fuelrail_stage_seconds_total", {**own, "state": "busy"}, clock.busy_s),
            Metric("fuelrail_stage_seconds_total", {**own, "state": "starved"}, clock.starved_s),
            Metric("fuelrail_stage_seconds_total", {**own, "state": "blocked"}, clock.blocked_s),
            Metric("fuelrail_stage_threads", own, clock.num_threads),
            Metric("fuelrail_stage_queue", own, clock.waiting),
            Metric("fuelrail_stage_queue_capacity", own, clock.capacity),
        ]
    own = {**labels, "backend": stats.storage.backend}
    return metrics + [Metric(name, own, getattr(stats.storage, field)) for field, (name, _) in _STORAGE.items()]


def render(metrics: Iterable[Metric]) -> str:
    """Metrics as Prometheus' text exposition format 0.0.4, grouped by name."""
    groups: dict[str, list[Metric]] = {}
    for metric in metrics:
        groups.setdefault(metric.name, []).append(metric)
    lines = []
    for name, group in groups.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}"]
        for metric in group:
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in metric.labels.items())
            lines.append(f"{name}{{{labels}}} {metric.value:.10g}")
    return "\n".join(lines) + "\n"


_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> list[Metric]:
    """Read what :func:`render` wrote; lines of other forms are left out."""
    found = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            name, labels, value = match.groups()
            read = {key: _unescape(told) for key, told in _LABEL.findall(labels or "")}
            found.append(Metric(name, read, float(value)))
    return found


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _unescape(value: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value)


class MetricsServer:
    """Serves ``/metrics`` over HTTP from a thread of its own, until closed.

    ``collect`` is called for each request, on the server's thread. ``port`` 0 takes any free one, see :attr:`url`.
    ``host`` is 127.0.0.1 by default: there is no password. Raises ConfigError where the port is taken.
    """

    def __init__(self, collect: Callable[[], Iterable[Metric]], *, port: int, host: str = "127.0.0.1") -> None:
        class Handler(_Handler):
            pass

        Handler.collect = staticmethod(collect)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (_Server,), {"address_family": family})
        try:
            self._server: _Server = server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics cannot be served on {host}:{port}: {error}; choose another port, or 0 for any free one"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="fuelrail-metrics", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"MetricsServer({self.url})"

    def close(self) -> None:
        """Stop serving and free the port; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Not http.server's own: that one asks the name service for the host's name, which can take seconds.
class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is none of the trainer's business: print nothing."""


class _Handler(http.server.BaseHTTPRequestHandler):
    collect: Callable[[], Iterable[Metric]]
    timeout = 10  # a client that connects and says nothing must not keep its thread for ever

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404, "only /metrics is here")
            return
        body = render(type(self).collect()).encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - http.server's name
        """Requests are not logged: one a second for weeks."""
