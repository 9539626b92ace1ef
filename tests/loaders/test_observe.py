"""What a running loader tells of itself: waits, endpoint, trace, NVTX ranges; and what tuning does to its batches."""

from __future__ import annotations

import gc
import json
import logging
import urllib.request

import pytest
import torch

from fuelrail import Budget, ImageAugment
from fuelrail.bench import TraceRecorder, serve_metrics
from fuelrail.loaders.autotune import (
    Autotuner,
    Tuning,
    batches_in_flight,
    make_tuner,
)
from fuelrail.loaders.batch.stages import with_ranges
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.metrics import parse
from fuelrail.pipeline.runtime.stages import Stage
from support.batches import load, unlike


class TestStats:
    def test_waits_add_up_over_epochs_and_closes(self, tiny):
        loader = load(tiny)
        list(loader)
        first = loader.stats()
        assert 0 < first.waited_s <= first.elapsed_s
        loader.close()
        list(loader)
        second = loader.stats()
        assert second.waited_s > first.waited_s
        assert second.elapsed_s > first.elapsed_s
        assert second.batches == 14


def scraped(server):
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        return parse(answer.read().decode())


class TestMetrics:
    @pytest.mark.costly
    def test_the_endpoint_tells_the_loaders_counters(self, tiny):
        loader = load(tiny, rank=1, size=2)
        with serve_metrics(loader) as server:
            count = len(list(loader))
            metrics = scraped(server)
        values = {
            (name, labels.get("stage"), labels.get("state")): value
            for name, labels, value in metrics
        }
        for name, per_batch in (("batches", 1), ("samples", 3), ("images", 6)):
            assert values[f"fuelrail_{name}_total", None, None] == per_batch * count
        assert values["fuelrail_stage_items_total", "decode", None] >= 3 * count
        assert values["fuelrail_stage_seconds_total", "decode", "busy"] > 0
        assert values["fuelrail_storage_spans_total", None, None] >= 3 * count
        assert metrics[0].labels == {
            "dataset": "tiny",
            "rank": "1",
            "world_size": "2",
        }

    @pytest.mark.costly
    def test_it_does_not_keep_the_loader_alive(self, tiny):
        loader = load(tiny)
        with serve_metrics(loader) as server:
            del loader
            gc.collect()
            assert scraped(server) == []


def test_the_trace_has_every_stage_of_every_batch(tiny, tmp_path):
    trace = TraceRecorder()
    with load(tiny, trace=trace, transform=lambda sample: sample) as loader:
        count = len(list(loader))
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for stage in ("fetch", "parse", "decode", "transform", "collate", "wait"):
        done = {
            event["args"]["batch"]
            for event in events
            if event["ph"] == "X" and event["name"] == stage
        }
        assert set(range(count)) <= done, stage


class TestRanges:
    def test_they_open_and_close_around_the_work_whatever_it_does(self):
        calls = []
        decode = Stage("decode", lambda value: calls.append("work") or 1 // value, 1, 1)
        stage = with_ranges(decode, calls.append, lambda: calls.append("pop"))
        assert stage.work(1) == 1
        with pytest.raises(ZeroDivisionError):
            stage.work(0)
        assert calls == ["fuelrail decode", "work", "pop"] * 2

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
    def test_with_the_real_library(self):
        assert with_ranges(Stage("decode", abs, 1, 1)).work(-1) == 1


class TestAutotune:
    @pytest.mark.costly
    def test_batches_are_the_same_whatever_it_does(self, tiny, monkeypatch, caplog):
        """With windows of one batch, and a trainer that counts as kept waiting, it changes something all the time."""
        monkeypatch.setattr("fuelrail.loaders.autotune._HUNGRY", -1.0)
        monkeypatch.setattr("fuelrail.loaders.autotune._PAUSE", 2.0)
        image = ImageAugment(
            height=32,
            width=48,
            train=True,
            resize_range=(0.5, 0.8),
            flip_prob=0.5,
        )
        monkeypatch.setattr(
            "fuelrail.loaders.batch.stages.make_tuner",
            lambda *_, **__: Autotuner(Tuning(2, 2), Tuning(5, 4), window_s=0.0, window_batches=1),
        )
        plain, tuned = (load(tiny, 2, image=image, num_workers=n, seed=3) for n in (1, "auto"))
        with caplog.at_level(logging.INFO, "fuelrail"), plain, tuned:
            for _ in range(4):
                assert unlike(list(tuned), list(plain)) == []
        assert "autotune: trying" in caplog.text

    def test_it_stays_within_the_budget(self, monkeypatch):
        monkeypatch.setattr("fuelrail.loaders.autotune.default_num_workers", lambda: 8)
        tuner = make_tuner(Budget(cpus=6, memory_bytes=1200), 4, 100, 2)
        assert tuner.tuning == (6, 2)
        assert tuner.limits.num_workers == 6
        assert batches_in_flight(tuner.limits, 4) * 100 <= 1200
        assert tuner.limits.ready > 2
        assert make_tuner(Budget(), 4, 100, 2).limits.num_workers == 12

    def test_a_budget_that_holds_nothing_is_refused_with_what_it_takes(self, tiny):
        with pytest.raises(ConfigError, match=r"memory_bytes=1000 does not hold the \d+ bytes"):
            load(tiny, num_workers=Budget(memory_bytes=1000))
