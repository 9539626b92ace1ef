"""Puts causes into small trainings, and asks `fuelrail watch` and `traceml-ai` what holds them up.

``python -m support.watched.battery [--tool watch|traceml] [--only TEXT] WORK OUT`` runs what the folder WORK does not
have, judges all, and writes OUT. It needs the trainers that it runs; traceml-ai is on the package index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts, package_versions
from fuelrail.bench.report.files import created_now, publish_json
from fuelrail.bench.studies.watch.report import conclude
from support import ranks

SCRIPT = Path(__file__).with_name("training.py")
PACKAGES = [
    "torch",
    "transformers",
    "pytorch-lightning",
    "accelerate",
    "mmengine",
    "lerobot",
    "traceml-ai",
]
_LIMIT_S = 240
_LOADED = [
    "transformers.trainer",
    "pytorch_lightning",
    "accelerate",
    "mmengine.runner",
    "torch._dynamo",
]

CAUSES: dict[str, tuple[str, list[str], int | None, list[str]]] = {
    "slow storage": ("storage", ["data_wait"], None, ["INPUT_BOUND"]),
    "slow storage of one rank": ("storage", ["data_wait"], 1, ["INPUT_STRAGGLER"]),
    "slow transform": ("preprocessing", ["data_wait"], None, ["INPUT_BOUND"]),
    "slow transform of one rank": ("preprocessing", ["data_wait"], 1, ["INPUT_STRAGGLER"]),
    "too few workers": ("storage", ["data_wait"], None, ["INPUT_BOUND"]),
    "stalling worker": ("stalls", ["data_wait"], None, ["INPUT_BOUND"]),
    "cold cache": ("cold cache", ["data_wait"], None, ["INPUT_BOUND"]),
    "collate": ("preprocessing", ["data_wait"], None, ["INPUT_BOUND"]),
    "interpreter lock": ("interpreter lock", ["other"], None, ["HIGH_PROCESS_CPU"]),
    "threads": ("threads", ["forward"], None, ["HIGH_PROCESS_CPU"]),
    "uneven batches": ("uneven ranks", ["forward"], None, ["STRAGGLER"]),
    "CPU quota": ("slow rank", ["forward", "backward"], 1, ["COMPUTE_STRAGGLER", "STRAGGLER"]),
    "heavy layer": ("slow rank", ["forward"], 1, ["COMPUTE_STRAGGLER"]),
    "small all-reduces": ("collective", ["all_reduce"], None, ["RESIDUAL_HEAVY"]),
    "slow optimiser": ("optimiser", ["optimiser"], None, ["COMPUTE_BOUND"]),
    "item": ("synchronisation", ["other"], None, ["RESIDUAL_HEAVY"]),
    "copies": ("copy", ["host_to_device"], None, ["H2D_BOUND"]),
    "logging": ("logging", ["logging"], None, ["RESIDUAL_HEAVY"]),
    "logging of one rank": ("logging", ["logging"], 0, ["STRAGGLER"]),
    "checkpoints": ("checkpoint", ["checkpoint"], 0, ["STRAGGLER", "RESIDUAL_HEAVY"]),
    "evaluation": ("evaluation", ["evaluation"], None, ["RESIDUAL_HEAVY"]),
    "garbage collection": ("garbage collection", ["other"], None, ["RESIDUAL_HEAVY"]),
    "memory leak": ("memory leak", ["other"], 1, ["CREEP_EARLY", "CREEP_CONFIRMED"]),
}
"""Of each cause: what a watch shall call it, the phases of which it may name one, the rank, and the kinds of
`traceml-ai` that count as right. Where that has no kind of its own, the nearest one counts."""

_PLAN = {
    ("plain", 2): [
        *("slow storage", "slow transform of one rank", "too few workers", "stalling worker"),
        *("cold cache", "collate", "interpreter lock", "threads", "CPU quota"),
        *("small all-reduces", "garbage collection", "memory leak", "none"),
    ],
    ("plain", 4): ["heavy layer", "uneven batches", "slow storage of one rank", "none"],
    ("transformers", 2): [
        *("slow storage", "slow transform", "heavy layer", "logging", "checkpoints", "evaluation"),
        "none",
    ],
    ("lightning", 2): [
        *("slow optimiser", "uneven batches", "checkpoints", "evaluation", "none"),
    ],
    ("lightning", 4): ["none"],
    ("accelerate", 2): [
        *("too few workers", "CPU quota", "slow optimiser", "checkpoints", "none"),
    ],
    ("accelerate", 4): ["heavy layer", "none"],
    ("mmengine", 2): ["slow storage", "uneven batches", "checkpoints", "none"],
    ("lerobot", 2): ["slow transform of one rank", "cold cache", "logging of one rank", "none"],
    ("cuda", 1): ["slow storage", "item", "copies", "logging", "none"],
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool named first: cause, phase and rank (None: none); whether that is right."""

    cause: str | None
    phase: str | None = None
    rank: int | None = None
    share: float | None = None
    is_right: bool
    text: str
    disturbed: str | None = None


class Run(msgspec.Struct, kw_only=True):
    """A training with a cause, and each tool's answer."""

    trainer: str
    num_ranks: int
    cause: str
    answers: dict[str, Answer] = {}

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{self.trainer} {self.num_ranks} {self.cause}"


class Battery(msgspec.Struct, kw_only=True):
    """All runs."""

    schema: str = "fuelrail-watch-battery"
    version: int = 1
    created: str
    machine: MachineFacts
    packages: dict[str, str]
    runs: list[Run]

    def num_right(self, tool: str, *, is_clean: bool) -> int:
        """Return how many runs with a cause, or without, a tool judged right."""
        runs = [run for run in self.runs if (run.cause == "none") == is_clean]
        return sum(run.answers[tool].is_right for run in runs)

    def as_text(self) -> str:
        """Return the runs as a Markdown table."""
        lines = [
            "| trainer | ranks | cause | `fuelrail watch` | `traceml-ai` |",
            "|---|---|---|---|---|",
        ]
        for run in self.runs:
            cause = "*none*" if run.cause == "none" else run.cause
            cells = [_cell(run.answers.get(tool)) for tool in ("watch", "traceml")]
            lines.append(f"| {run.trainer} | {run.num_ranks} | {cause} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _cell(answer: Answer | None) -> str:
    if answer is None:
        return "not run"
    where = "" if answer.rank is None else f", rank {answer.rank}"
    phase = "" if answer.phase in (None, answer.cause) else f", {answer.phase.replace('_', ' ')}"
    named = answer.cause or ("no data" if answer.text == "no data" else "nothing")
    return f"{named}{phase}{where}{'' if answer.is_right else ' (wrong)'}"


def plan() -> list[Run]:
    """Return the runs, without answers."""
    runs = []
    for (trainer, num_ranks), causes in _PLAN.items():
        runs += [Run(trainer=trainer, num_ranks=num_ranks, cause=cause) for cause in causes]
    return runs


def run_watch(run: Run, folder: Path) -> None:
    """Record a training with the hooks of the command."""
    ranks._LOADED[2:] = [name for name in _LOADED if find_spec(name.partition(".")[0])]
    ranks.run_ranks(
        run.num_ranks, SCRIPT, run.trainer, run.cause, folder, "hooks", timeout_s=_LIMIT_S
    )


def judge_watch(run: Run, folder: Path) -> Answer:
    """Return the verdict's first finding."""
    report = conclude(folder, is_written=False)
    if report is None or report.occupancy is None:
        return Answer(cause=None, is_right=False, text="no verdict")
    answer = Answer(cause=None, is_right=False, text=report.verdict(), disturbed=report.disturbed)
    if not report.findings:
        return msgspec.structs.replace(answer, is_right=run.cause == "none")
    first = report.findings[0]
    is_right = False
    if run.cause != "none":
        cause, phases, rank, _ = CAUSES[run.cause]
        is_right = first.cause == cause and first.phase in phases
        is_right &= first.rank == rank or run.num_ranks == 1
    return msgspec.structs.replace(
        answer, cause=first.cause, phase=first.phase, rank=first.rank, is_right=is_right
    )


def run_traceml(run: Run, folder: Path) -> None:
    """Run a training under `traceml run`."""
    words = ["run", str(SCRIPT), "--nproc-per-node", str(run.num_ranks)]
    words += ["--logs-dir", str(folder), "--run-name", "run", "--aggregator-port", "29871"]
    words += ["--args", run.trainer, run.cause, str(folder), "traceml"]
    done = subprocess.run(
        [sys.executable, "-m", "traceml_ai.launcher.cli", *words],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    (folder / "said").write_text(done.stdout + done.stderr)


def judge_traceml(run: Run, folder: Path) -> Answer:
    """Return the summary's primary diagnosis, or any section's warning that is of the cause."""
    path = folder / "run" / "final_summary.json"
    summary = json.loads(path.read_text()) if path.exists() else None
    if summary is None or not summary["primary_diagnosis"]["evidence"].get("steps_analyzed"):
        return Answer(cause=None, is_right=False, text="no data")
    issues = [summary["primary_diagnosis"]]
    issues += summary["step_time"]["issues"] + summary["step_memory"]["issues"]
    issues += summary["process"]["issues"]
    _, _, rank, kinds = CAUSES.get(run.cause, (None, None, None, []))
    right = [
        issue
        for issue in issues
        if issue["kind"] in kinds and (rank in (None, _culprit(issue)) or run.num_ranks == 1)
    ]
    named = [issue for issue in issues[:1] if issue["severity"] in ("warn", "crit")]
    first = (right or named or [None])[0]
    return Answer(
        cause=None if first is None else first["kind"],
        rank=None if first is None else _culprit(first),
        is_right=bool(right) if kinds or run.cause != "none" else first is None,
        text=(first or issues[0])["summary"],
    )


def _culprit(issue: dict[str, Any]) -> int | None:
    """Return the rank that a straggler's diagnosis blames."""
    evidence = issue.get("evidence", {})
    is_one = "STRAGGLER" in issue["kind"]
    return evidence.get("culprit_rank", evidence.get("worst", {}).get("rank")) if is_one else None


TOOLS = {"watch": (run_watch, judge_watch), "traceml": (run_traceml, judge_traceml)}


def main() -> None:
    """Run what is missing, and judge all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="folder for what the runs leave")
    parser.add_argument("out", type=Path, help="file of the results")
    parser.add_argument(
        "--tool", choices=[*TOOLS, "none"], help="run this one only (default: both)"
    )
    parser.add_argument("--only", default="", help="part of 'TRAINER RANKS CAUSE'")
    words = parser.parse_args()
    battery = Battery(
        created=created_now(),
        machine=machine_facts(),
        packages=package_versions(PACKAGES),
        runs=plan(),
    )
    for run in battery.runs:
        for tool, (make, judge) in TOOLS.items():
            folder = words.work / tool / run.title.replace(" ", "-")
            if words.tool in (None, tool) and words.only in run.title and not folder.exists():
                folder.mkdir(parents=True)
                try:
                    make(run, folder)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    (folder / "said").write_text(f"failed: {error}")
            if folder.exists():
                answer = run.answers[tool] = judge(run, folder)
                word = "right" if answer.is_right else "WRONG"
                print(f"{word} {tool} {run.title}: {_cell(answer)}", flush=True)
    publish_json(words.out, battery)


if __name__ == "__main__":
    main()
