"""The trace: what Perfetto needs of the format, and what it says of the pipeline."""

from __future__ import annotations

import json

from fuelrail.pipeline.stages import Pipeline, Stage
from fuelrail.pipeline.trace import TraceRecorder


def record(**options):
    trace = TraceRecorder(**options)
    stages = [Stage("decode", int, 2, 4), Stage("collate", list, 1, 2, group=3)]
    assert len(list(Pipeline(iter(range(9)), stages, name="test", observer=trace))) == 3
    return trace


def test_every_item_of_every_stage_is_there_with_its_batch(tmp_path):
    record(rank=3).write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert sorted((e["name"], e["args"]["item"], e["args"]["batch"]) for e in work) == sorted(
        [("decode", n, n // 3) for n in range(9)] + [(name, n, n) for name in ("collate", "wait") for n in range(3)]
    )
    assert all(event["dur"] >= 0 and event["ts"] > 1e15 for event in work), "microseconds since 1970"
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {names[event["tid"]] for event in work} <= {"test-decode-0", "test-decode-1", "test-collate-0", "MainThread"}
    assert {"fuelrail rank 3"} == {e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_an_arrow_leads_from_a_batchs_first_work_to_the_trainer():
    events = record().events()
    for batch in range(3):
        arrow = [event for event in events if event.get("id") == batch]
        phases = [event["ph"] for event in sorted(arrow, key=lambda event: event["ts"])]
        assert phases == ["s", "t", "t", "t", "f"]


def test_it_keeps_the_latest_spans_only():
    assert [span.stage for span in record(max_spans=2).spans()][-1] == "wait"
    assert len(record(max_spans=2).spans()) == 2
