"""The trace: what Perfetto needs of the format, and what it says of the pipeline."""

from __future__ import annotations

import json
from itertools import pairwise

from fuelrail.pipeline.runtime.stages import Pipeline, Stage
from fuelrail.pipeline.runtime.trace import TraceRecorder


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
        [("decode", n, n // 3) for n in range(9)]
        + [(name, n, n) for name in ("collate", "wait") for n in range(3)]
    )
    assert all(event["dur"] >= 0 and event["ts"] > 1e15 for event in work), (
        "microseconds since 1970"
    )
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert {names[event["tid"]] for event in work} <= {
        "test-decode-0",
        "test-decode-1",
        "test-collate-0",
        "MainThread",
    }
    assert {"fuelrail rank 3"} == {e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_an_arrow_leads_from_a_batchs_first_work_to_the_trainer():
    events = record().events()
    for batch in range(3):
        arrow = [event for event in events if event.get("id") == batch]
        phases = [event["ph"] for event in sorted(arrow, key=lambda event: event["ts"])]
        assert phases == ["s", "t", "t", "t", "f"]


def test_it_keeps_to_the_trace_event_format(tmp_path):
    """Rule by rule: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Google, 2016)."""
    record().write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices = {}
    arrows = {}
    for event in trace["traceEvents"]:
        kind = event["ph"]
        assert type(event["pid"]) is int
        assert isinstance(event["name"], str)
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            assert event["name"] == "process_name" or type(event["tid"]) is int
            continue
        assert kind in ("X", "s", "t", "f")
        assert type(event["tid"]) is int
        assert isinstance(event["ts"], int | float)
        assert isinstance(event["cat"], str)
        place = (event["pid"], event["tid"])
        if kind == "X":
            assert isinstance(event["dur"], int | float)
            assert event["dur"] >= 0
            slices.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            arrows.setdefault((event["cat"], event["name"], event["id"]), []).append(
                (event["ts"], kind, place)
            )
            assert event.get("bp", "e") == "e"
            assert ("bp" in event) == (kind == "f")
    for track in slices.values():
        track.sort()
        # Work on one thread follows on other work; what overlapped in part no viewer could draw.
        assert all(end <= begin for (_, end), (begin, _) in pairwise(track))
    for steps in arrows.values():
        steps.sort()
        assert [kind for _, kind, _ in steps] == [
            "s",
            *"t" * (len(steps) - 2),
            "f",
        ]
        for ts, _, place in steps:
            assert any(begin <= ts < end or begin == ts for begin, end in slices[place]), (
                "an arrow is tied to work"
            )
    assert len(arrows) == 3


def test_it_keeps_the_latest_spans_only():
    assert [span.stage for span in record(max_spans=2).spans()][-1] == "wait"
    assert len(record(max_spans=2).spans()) == 2
