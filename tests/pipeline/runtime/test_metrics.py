"""Prometheus text and the endpoint, over real HTTP."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from typing import NamedTuple

import pytest

from fuelrail.loaders.storage.protocol import StorageStats
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.metrics import (
    HELP,
    Metric,
    MetricsServer,
    loader_metrics,
    parse,
)
from fuelrail.pipeline.runtime.stages import StageClock


class Stats(NamedTuple):
    stages: tuple = (
        StageClock(
            name="decode",
            num_threads=2,
            items=12,
            busy_s=1.5,
            starved_s=0.25,
            blocked_s=0.125,
            waiting=3,
            capacity=8,
        ),
        StageClock(
            name="collate",
            num_threads=1,
            items=4,
            busy_s=0.5,
            starved_s=2,
            blocked_s=3,
            waiting=0,
            capacity=2,
        ),
    )
    batches: int = 4
    samples: int = 12
    images: int = 72
    waited_s: float = 0.75
    elapsed_s: float = 3.0
    storage: StorageStats = StorageStats(
        "obstore", *range(100, 100 + len(StorageStats._fields) - 1)
    )
    bad_samples: int = 2


def served(*metrics: Metric) -> str:
    with (
        MetricsServer(lambda: metrics, port=0) as server,
        urllib.request.urlopen(server.url, timeout=10) as answer,
    ):
        return answer.read().decode()


@pytest.mark.costly
def test_the_text_is_what_prometheus_reads():
    text = served(*loader_metrics(Stats(), {"rank": "1"}))
    assert '# TYPE fuelrail_batches_total counter\nfuelrail_batches_total{rank="1"} 4.0\n' in text
    assert 'fuelrail_stage_seconds_total{rank="1",stage="decode",state="starved"} 0.25\n' in text
    assert (
        '# TYPE fuelrail_stage_queue gauge\nfuelrail_stage_queue{rank="1",stage="decode"} 3.0\n'
        in text
    )
    for number, field in enumerate(StorageStats._fields[1:], 100):
        name = (
            f"fuelrail_{field}"
            if field.startswith("cache_")
            else f"fuelrail_storage_{field.removeprefix('span_')}"
        )
        value = rf'^{name}(_total)?{{backend="obstore",rank="1"}} {number}\.0$'
        assert re.search(value, text, re.MULTILINE), f"every count of storage is reported: {field}"
    for name in HELP:
        assert text.count(f"# TYPE {name} ") == text.count(f"# HELP {name} ") == 1, (
            "one group a name"
        )


@pytest.mark.costly
@pytest.mark.parametrize("label", ["plain", 'a"b', "a\\b\\n", "two\nlines", "\u00fc\u20ac"])
def test_what_is_served_is_read_back(label):
    (metric,) = parse(served(Metric("fuelrail_stage_queue", {"stage": label, "rank": "0"}, 1 / 3)))
    assert metric == (
        "fuelrail_stage_queue",
        {"stage": label, "rank": "0"},
        1 / 3,
    )


class TestServer:
    def test_it_serves_fresh_figures_until_closed(self):
        batches = iter(range(5, 100))
        before = threading.active_count()
        with MetricsServer(
            lambda: loader_metrics(Stats(batches=next(batches)), {}), port=0
        ) as server:
            for expected in (5, 6):
                with urllib.request.urlopen(server.url, timeout=10) as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    figures = {
                        metric.name: metric.value for metric in parse(answer.read().decode())
                    }
                assert figures["fuelrail_batches_total"] == expected
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(server.url, timeout=10)
        assert threading.active_count() == before

    @pytest.mark.costly
    def test_a_client_that_says_nothing_keeps_nobody_out(self):
        with MetricsServer(list, port=0) as server:
            host, port = server.url.removeprefix("http://").removesuffix("/metrics").rsplit(":", 1)
            silent = socket.create_connection((host, int(port)), timeout=10)
            with (
                silent,
                urllib.request.urlopen(server.url, timeout=10) as answer,
            ):
                assert answer.status == 200

    @pytest.mark.costly
    def test_a_taken_port_is_said(self):
        with MetricsServer(list, port=0) as server:
            port = int(server.url.rsplit(":", 1)[1].removesuffix("/metrics"))
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*choose another port"):
                MetricsServer(list, port=port)

    @pytest.mark.parametrize("port", [-1, 70000])
    def test_no_port_at_all(self, port):
        with pytest.raises(ConfigError, match=f":{port}: "):
            MetricsServer(list, port=port)
