"""Each kind of bound, injected into the figures of a run of ten seconds on four CPUs."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from fuelrail.bench.measure.machine import CpuUse
from fuelrail.bench.measure.rates import Rate
from fuelrail.bench.studies.loader.report import find_bound
from fuelrail.pipeline.runtime.stages import StageClock

SECONDS = 10.0
CPU_MS = {"fetch": 0.5, "parse": 0.5, "decode": 20.0, "collate": 0.2}


def judge(
    *,
    samples_per_s,
    busy,
    threads=None,
    cpu_ms=CPU_MS,
    usable=4.0,
    other_cpus=0.0,
    jpeg_ms=15.0,
):
    """``busy`` gives each stage's busy share, the rest is starved; CPU in use follows from rate and CPU time."""
    count = dict.fromkeys(busy, 1) | {"decode": 4} | (threads or {})
    clocks = [
        StageClock(
            name=name,
            num_threads=count[name],
            items=int(samples_per_s * SECONDS),
            waiting=0,
            capacity=2,
            blocked_s=0.0,
            busy_s=share * count[name] * SECONDS,
            starved_s=(1 - share) * count[name] * SECONDS,
        )
        for name, share in busy.items()
    ]
    alone = [
        Rate(
            name=name,
            num_threads=count[name],
            samples_per_s=1e3 / ms,
            cpu_ms_per_sample=ms,
        )
        for name, ms in cpu_ms.items()
    ]
    total_ms = sum(cpu_ms.values())
    cpu = CpuUse(
        seconds=SECONDS,
        own_cpus=samples_per_s * total_ms / 1e3,
        other_cpus=other_cpus,
        usable=usable,
    )
    jpeg = Rate(name="j", num_threads=4, samples_per_s=1, cpu_ms_per_sample=jpeg_ms)
    return find_bound(
        samples_per_s,
        cpu_ms_per_sample=total_ms,
        cpu=cpu,
        clocks=clocks,
        alone=alone,
        jpeg=jpeg,
    )


IDLE = {"fetch": 0.1, "parse": 0.1, "decode": 0.5, "collate": 0.1}
DECODING = IDLE | {"decode": 0.99}
READING = {"fetch": 15.0, "parse": 1.0, "decode": 4.0, "collate": 0.1}
PARSING = {"fetch": 0.5, "parse": 9.0, "decode": 5.0, "collate": 0.2}
WAITING = {"fetch": 0.5, "parse": 0.5, "decode": 10.0, "collate": 0.2}


@pytest.mark.parametrize(
    ("run", "kind", "stage", "said", "gain"),
    [
        (
            {"samples_per_s": 180, "busy": DECODING},
            "cpu",
            "decode",
            "15.0 ms of it",
            21.2 / 15,
        ),
        # The loader leaves out what the crop leaves out: a library that decodes more is not a limit.
        (
            {"samples_per_s": 180, "busy": DECODING, "jpeg_ms": 25.0},
            "cpu",
            "decode",
            "on whole images, takes 25.0 ms",
            None,
        ),
        (
            {"samples_per_s": 180, "busy": IDLE, "cpu_ms": READING},
            "cpu",
            "fetch",
            "",
            20.1 / 5.1,
        ),
        (
            {"samples_per_s": 45, "busy": DECODING, "other_cpus": 3.0},
            "cpu",
            "decode",
            "of the 1.0 CPUs that other processes left free of 4",
            21.2 / 15,
        ),
        (
            {
                "samples_per_s": 48,
                "busy": IDLE | {"decode": 0.98},
                "threads": {"decode": 1},
            },
            "threads",
            "decode",
            "--workers 4",
            1e3 * 4 / 21.2 / 48,
        ),
        # Of one thread of Python; decode is next.
        (
            {
                "samples_per_s": 105,
                "busy": IDLE | {"parse": 0.99},
                "cpu_ms": PARSING,
            },
            "single thread",
            "parse",
            "",
            200 / 105,
        ),
        (
            {"samples_per_s": 40, "busy": IDLE | {"fetch": 0.99}},
            "storage",
            "fetch",
            "",
            ANY,
        ),
        (
            {"samples_per_s": 100, "busy": DECODING, "cpu_ms": WAITING},
            "waiting",
            "decode",
            "",
            ANY,
        ),
        ({"samples_per_s": 40, "busy": IDLE}, "hand-over", None, "", None),
        # Stages without any time are not divided by.
        (
            {"samples_per_s": 1, "busy": dict.fromkeys(CPU_MS, 0.0)},
            "hand-over",
            None,
            "",
            None,
        ),
    ],
)
def test_the_bound_is_named_with_what_its_removal_gains(run, kind, stage, said, gain):
    bound = judge(**run)
    assert (bound.kind, bound.stage) == (kind, stage)
    assert said in bound.finding + bound.advice
    assert bound.gain == (gain if gain is None or gain is ANY else pytest.approx(gain))
    assert gain is not None or "no loader can" not in bound.advice
