"""Runs of the training harness that never happened: records of chosen times, and a clock that tests turn by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from fuelrail.bench.measure import recorder as recorder_module
from fuelrail.bench.measure.accelerator import (
    AcceleratorProfile,
    ReferenceInput,
)
from fuelrail.bench.measure.clock import ThreadTimes
from fuelrail.bench.measure.machine import DatasetFacts, Gpu, MachineFacts
from fuelrail.bench.measure.records import (
    InputFacts,
    RankEnd,
    RankHeader,
    RankLog,
    StageSnapshot,
    StepRecord,
)
from fuelrail.bench.studies.train.report import Report, build_report
from fuelrail.bench.studies.train.settings import TrainSettings
from fuelrail.pipeline.runtime.stages import StageClock

MS = 1_000_000

PROFILE = AcceleratorProfile(
    name="test",
    device="Test GPU",
    network="test network",
    per="sample",
    reference_input=ReferenceInput(cameras=2, height=32, width=64),
    forward_ms=10.0,
    backward_ms=20.0,
    optimiser_ms=1.0,
    sources=["a test's invention"],
    derivation="None.",
)

SETTINGS = TrainSettings(
    dataset="/somewhere/private",
    batch_size=2,
    steps=20,
    warmup=4,
    precision="fp32",
    learning_rate=1e-3,
    model="stand-in",
    accelerator="emulated",
    profile=PROFILE,
    records="/somewhere/private/records",
)

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
"""What was measured, as pages cite it."""

MACHINE = MachineFacts(
    cpu="Test CPU",
    num_cpus=2,
    num_cpus_installed=4,
    memory_bytes=2**34,
    gpus=[Gpu(name="Test <GPU>", memory_bytes=2**35, driver="1.2")],
    system="Linux 6.1",
    python="3.11.7",
    fuelrail="0.1.0",
    commit="0123456789abcdef",
    uncommitted_changes=True,
    packages={"torch": "2.13.0"},
)

DATASET = DatasetFacts(
    name="a <tiny> set",
    fingerprint="f" * 16,
    split="train",
    num_samples=80,
    num_shards=2,
    cameras=["cam_front", "cam_back"],
)


class HandClock:
    """Stands still until a test (or the code under test, by waiting) moves it; sleepers wake ``lateness_ns`` late.

    The one made last is that of all recorders inside ``driving_recorders``.
    """

    current: HandClock

    @classmethod
    @contextmanager
    def driving_recorders(cls) -> Iterator[None]:
        """Let recorders read this clock, not the system's."""
        read = SimpleNamespace(
            monotonic_ns=lambda: cls.current.now,
            process_time_ns=lambda: 0,
            sleep=lambda _: None,  # it takes no time
        )
        with (
            mock.patch.object(recorder_module, "time", read),
            mock.patch.object(
                recorder_module,
                "thread_times",
                lambda: ThreadTimes(cls.current.cpu_ns, cls.current.queued_ns),
            ),
        ):
            yield

    def __init__(self, lateness_ns: int = 0) -> None:
        self.now = 1_000
        self.cpu_ns = self.queued_ns = 0
        self.lateness_ns = lateness_ns
        HandClock.current = self

    def now_ns(self) -> int:
        return self.now

    def wait_until(self, deadline_ns: int) -> int:
        if self.now < deadline_ns:
            self.now = deadline_ns + self.lateness_ns
        return self.now - deadline_ns

    def pass_ms(self, duration_ms: float) -> None:
        self.now += round(duration_ms * MS)

    def compute_ms(self, duration_ms: float, *, queued_ms: float = 0) -> None:
        """Pass time in which the thread computes, after it stood in the queue for a CPU."""
        self.pass_ms(duration_ms + queued_ms)
        self.cpu_ns += round(duration_ms * MS)
        self.queued_ns += round(queued_ms * MS)


def step(
    number: int,
    start_ns: int,
    *,
    wait_ms: float = 0,
    copy_ms: float = 0,
    reduce_ms: float = 0,
    other_ms: float = 0,
    **changes,
):
    """A step whose forward, backward and optimiser last as PROFILE's for one sample: 10 + 20 + 1 ms."""
    busy_ms = 31.0
    times = {
        "data_wait_ns": wait_ms,
        "host_to_device_ns": copy_ms,
        "forward_ns": 10.0,
        "backward_ns": 20.0,
        "all_reduce_ns": reduce_ms,
        "optimiser_ns": 1.0,
        "other_ns": other_ms,
        "all_reduce_total_ns": reduce_ms,
        "device_busy_ns": busy_ms,
    }
    fields = {name: round(value * MS) for name, value in times.items()}
    wall_ns = round((busy_ms + wait_ms + copy_ms + reduce_ms + other_ms) * MS)
    record = {
        "step": number,
        "epoch": 0,
        "num_samples": 2,
        "num_images": 4,
        "loss": 1.0 / (number + 1),
    }
    return StepRecord(
        **(record | fields | {"start_ns": start_ns, "end_ns": start_ns + wall_ns} | changes)
    )


def steps(count: int, start_ns: int = 5_000, **times) -> list[StepRecord]:
    """Consecutive steps, all alike."""
    records = []
    for number in range(count):
        records.append(step(number, start_ns, **times))
        start_ns = records[-1].end_ns
    return records


def log(records: list[StepRecord], *, digest: str = "same", complete: bool = True):
    """The log of a rank that did these steps, on the input that PROFILE is for."""
    first = _stages(0.5, 0)
    last = _stages(3.5, 30)
    return RankLog(
        header=RankHeader(device="Test GPU", backend="gloo", num_parameters=1234),
        input=InputFacts(num_cameras=2, height=32, width=64),
        steps=records,
        snapshots=[
            StageSnapshot(stages=first),
            *([StageSnapshot(stages=last)] if complete else []),
        ],
        end=RankEnd(parameters_xxh3=digest, peak_rss_bytes=2**30, peak_device_bytes=None)
        if complete
        else None,
    )


def report_of(logs, *, settings=SETTINGS, cut_off=None, cpu=None) -> Report:
    """The report of ranks that left these logs."""
    return build_report(
        settings,
        logs,
        machine=MACHINE,
        dataset=DATASET,
        cut_off=cut_off,
        cpu=cpu,
    )


def _stages(busy_s: float, items: int) -> list[StageClock]:
    return [
        StageClock(
            name=name,
            num_threads=1,
            items=items,
            busy_s=busy_s,
            starved_s=0.0,
            blocked_s=1.0,
            waiting=0,
            capacity=2,
        )
        for name in ("decode", "collate")
    ]
