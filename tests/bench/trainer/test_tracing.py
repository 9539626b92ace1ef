from __future__ import annotations

import json

import torch

from fuelrail.bench.measure.accelerator import EmulatedAccelerator
from fuelrail.bench.ranks.tracing import RankTrace, TracedAccelerator
from fuelrail.bench.report.files import merge_traces
from support.bench_runs import PROFILE, HandClock, steps


def traced_steps(trace, accelerator, records):
    """Steps whose phases the accelerator tells, with some work of torch in each."""
    for record in records:
        with accelerator.host_to_device():
            pass
        with accelerator.forward(1, 2):
            torch.ones(4, 4) @ torch.ones(4, 4)
        with accelerator.backward():
            accelerator.gradients_ready(1.0)
            accelerator.all_reduce_started()
            accelerator.all_reduce_finished()
        with accelerator.optimiser():
            pass
        accelerator.finish_step()
        trace.recorder("decode", record.step, record.step, 0.0, 0.001)
        yield record


def test_phases_stages_and_the_profilers_events_lie_in_one_file_on_one_clock(
    tmp_path,
):
    for rank in range(2):
        trace = RankTrace(tmp_path / "trace", rank)
        accelerator = TracedAccelerator(EmulatedAccelerator(PROFILE, HandClock()), trace)
        records = steps(10)
        assert list(trace.of_steps(traced_steps(trace, accelerator, records))) == records
        trace.write()
    assert merge_traces(tmp_path / "trace", tmp_path / "trace.json") == 2
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    trainer = [event for event in spans if event.get("cat") == "trainer"]
    names = {event["name"] for event in trainer}
    assert names == {
        "step",
        "host to device",
        "forward",
        "backward",
        "optimiser",
        "all-reduce",
    }
    assert [event["args"]["step"] for event in trainer if event["name"] == "step"] == [
        *range(10)
    ] * 2
    assert any(event.get("cat") == "loader" and event["name"] == "decode" for event in spans)
    # What torch did lies inside the forward pass of a step: its clock and ours are one, to a millisecond.
    (matmul, *_) = [event for event in spans if event["name"] == "aten::mm"]
    forwards = [event for event in trainer if event["name"] == "forward"]
    slack_us = 1000
    assert any(
        forward["ts"] - slack_us <= matmul["ts"] <= forward["ts"] + forward["dur"] + slack_us
        for forward in forwards
    )
    assert all("ts" in event or event["ph"] == "M" for event in events)
    processes = {event["pid"] for event in spans if event.get("cat") == "cpu_op"}
    assert not processes & {event["pid"] for event in trainer}
