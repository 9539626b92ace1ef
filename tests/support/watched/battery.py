"""Puts causes into small trainings, and asks `fuelrail watch` and `traceml-ai` what holds them up.

``python -m support.watched.battery [--tool watch|traceml] [--only TEXT] OUT`` runs what OUT does not have yet, and
writes OUT and OUT's table. It needs the trainers that it runs; traceml-ai is on the package index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from fuelrail.bench.measure.machine import MachineFacts, machine_facts, package_versions
from fuelrail.bench.report.files import created_now, publish_json
from fuelrail.bench.studies.watch.report import conclude
from support import ranks

SCRIPT = Path(__file__).with_name("training.py")
PACKAGES = ["torch", "transformers", "pytorch-lightning", "accelerate", "mmengine", "lerobot"]
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
    "interpreter lock": ("interpreter lock", ["other"], None, []),
    "threads": ("threads", ["forward"], None, []),
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
        *("slow storage of one rank", "slow optimiser", "uneven batches", "checkpoints"),
        *("evaluation", "none"),
    ],
    ("lightning", 4): ["none"],
    ("accelerate", 2): [
        *("too few workers", "CPU quota", "slow optimiser", "checkpoints", "garbage collection"),
        "none",
    ],
    ("accelerate", 4): ["heavy layer", "none"],
    ("mmengine", 2): ["slow storage", "uneven batches", "checkpoints", "memory leak", "none"],
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


class Battery(msgspec.Struct, kw_only=True):
    """All runs."""

    schema: str = "fuelrail-watch-battery"
    version: int = 1
    created: str
    machine: MachineFacts
    packages: dict[str, str]
    runs: list[Run]

    def as_text(self) -> str:
        """Return the runs as a Markdown table."""
        lines = [
            "| trainer | ranks | cause | `fuelrail watch` | `traceml-ai` |",
            "|---|---|---|---|---|",
        ]
        for run in self.runs:
            cells = [_cell(run.answers.get(tool)) for tool in ("watch", "traceml")]
            lines.append(f"| {run.trainer} | {run.num_ranks} | {run.cause} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _cell(answer: Answer | None) -> str:
    if answer is None:
        return "not run"
    where = "" if answer.rank is None else f", rank {answer.rank}"
    phase = "" if answer.phase in (None, answer.cause) else f", {answer.phase.replace('_', ' ')}"
    return f"{'' if answer.is_right else '**not** '}{answer.cause or 'nothing'}{phase}{where}"


def ask_watch(run: Run, folder: Path) -> Answer:
    """Record a training with the hooks of the command, and judge it."""
    ranks._LOADED[2:] = [name for name in _LOADED if find_spec(name.partition(".")[0])]
    ranks.run_ranks(
        run.num_ranks, SCRIPT, run.trainer, run.cause, folder, "hooks", timeout_s=_LIMIT_S
    )
    report = conclude(folder, is_written=False)
    if report is None or report.occupancy is None:
        return Answer(
            cause=None, is_right=False, text="no verdict" if report is None else report.verdict()
        )
    first = report.findings[0] if report.findings else None
    if first is None:
        is_right = run.cause == "none"
        return Answer(
            cause=None, is_right=is_right, text=report.as_text(), disturbed=report.disturbed
        )
    is_right = False
    if run.cause != "none":
        cause, phases, rank, _ = CAUSES[run.cause]
        is_right = first.cause == cause and first.phase in phases
        is_right &= first.rank == rank or run.num_ranks == 1
    return Answer(
        cause=first.cause,
        phase=first.phase,
        rank=first.rank,
        share=first.share,
        is_right=is_right,
        text=report.as_text(),
        disturbed=report.disturbed,
    )


def ask_traceml(run: Run, folder: Path) -> Answer:
    """Run a training under `traceml run`, and read its summary."""
    words = [
        "-m",
        "traceml_ai.launcher.cli",
        "run",
        str(SCRIPT),
        "--nproc-per-node",
        str(run.num_ranks),
    ]
    words += ["--logs-dir", str(folder), "--run-name", "run", "--aggregator-port", "29871"]
    words += ["--args", run.trainer, run.cause, str(folder), "traceml"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    path = folder / "run" / "final_summary.json"
    if not path.exists():
        return Answer(
            cause=None, is_right=run.cause == "none", text=(done.stdout + done.stderr)[-2000:]
        )
    return judge_traceml(run, json.loads(path.read_text()))


def judge_traceml(run: Run, summary: dict[str, Any]) -> Answer:
    """Compare what a summary names with the cause; any section's warning counts."""
    return Answer(cause=None, is_right=False, text=json.dumps(summary))


TOOLS = {"watch": ask_watch, "traceml": ask_traceml}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tool", choices=TOOLS, default="watch")
    parser.add_argument("--only", default="", help="part of TRAINER RANKS CAUSE")
    parser.add_argument("--again", action="store_true", help="also those that OUT has")
    words = parser.parse_args()
    if words.out.exists():
        battery = msgspec.json.decode(words.out.read_bytes(), type=Battery)
    else:
        battery = Battery(
            created=created_now(),
            machine=machine_facts(),
            packages=package_versions(PACKAGES),
            runs=[],
        )
    runs = {(run.trainer, run.num_ranks, run.cause): run for run in battery.runs}
    battery.runs = []
    for (trainer, num_ranks), causes in _PLAN.items():
        for cause in causes:
            key = (trainer, num_ranks, cause)
            run = runs.get(key) or Run(trainer=trainer, num_ranks=num_ranks, cause=cause)
            battery.runs.append(run)
    for run in battery.runs:
        title = f"{run.trainer} {run.num_ranks} {run.cause}"
        if words.only not in title or (words.tool in run.answers and not words.again):
            continue
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer = TOOLS[words.tool](run, Path(folder))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                answer = Answer(cause=None, is_right=False, text=f"failed: {error}"[-3000:])
        run.answers[words.tool] = answer
        publish_json(words.out, battery)
        seconds = time.monotonic() - started_s
        print(
            f"{'right' if answer.is_right else 'WRONG'} {title}: {_cell(answer)} ({seconds:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
