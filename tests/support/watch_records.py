"""Records of a watch made by hand, in which what holds whom up is known to the microsecond."""

from __future__ import annotations

from fuelrail.bench.measure.records import NAMED, RankHeader, RankLog, StepDetails, StepRecord
from fuelrail.bench.studies.watch.judge import PARTS
from fuelrail.bench.studies.watch.report import build_report

STEPS = 60
PLAIN = {"data_wait": 1, "forward": 30, "backward": 50, "optimiser": 5, "all_reduce": 2, "other": 1}


def record(number: int, times: dict[str, float], **details: int) -> StepRecord:
    """A step of these milliseconds, which vary by a per mille."""
    ns = {part: round(ms * 1e6 * (1 + 1e-3 * (number % 3))) for part, ms in times.items()}
    named = {f"{part}_ns": ns.pop(part, 0) for part in NAMED}
    ns["other"] = ns.get("other", 0) + sum(named.values())
    start_ns = number * sum(ns.values())
    return StepRecord(
        step=number,
        epoch=0,
        num_samples=8,
        num_images=0,
        loss=None,
        start_ns=start_ns,
        end_ns=start_ns + sum(ns.values()),
        device_busy_ns=ns["forward"] + ns["backward"] + ns["optimiser"],
        details=StepDetails(**named, **details),
        **{f"{phase}_ns": ns.get(phase, 0) for phase in PARTS if f"{phase}_ns" not in named},
    )


def report_on(*ranks: list[StepRecord], world: int | None = None, **facts: int):
    header = RankHeader(device="d", backend="gloo", num_parameters=1, world=len(ranks), **facts)
    logs = {rank: RankLog() for rank in range(world or len(ranks))}
    logs |= {rank: RankLog(header=header, steps=steps) for rank, steps in enumerate(ranks)}
    return build_report(logs)


def rank(times: dict[str, float] | None = None, **details: int) -> list[StepRecord]:
    return [record(number, PLAIN | (times or {}), **details) for number in range(STEPS)]
