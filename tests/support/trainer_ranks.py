"""Runs some of configs/trainers as two ranks each: once whole, and once killed, killed in a save, and terminated.

Arguments: DATASET OUT EXAMPLE[:KEY=VALUE] ... What an example prints in a phase goes to OUT/EXAMPLE-PHASE-RANK.txt, the
names of its checkpoints after each phase of the second run to OUT/EXAMPLE.json. The ranks are forks of this process:
frameworks are imported once. A rank that dies takes the other one with it, as under torchrun.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # an optimiser imports it at its first step, which takes each fork a second
import torch.distributed as dist
import torch.distributed.checkpoint

EXAMPLES = Path(__file__).parents[2] / "configs" / "trainers"
NUM_RANKS = 2
WORLD = {
    "WORLD_SIZE": str(NUM_RANKS),
    "LOCAL_WORLD_SIZE": str(NUM_RANKS),
    "MASTER_ADDR": "127.0.0.1",
}
WORLD |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
# Of eight steps, with a save after every two: what ends a phase.
PHASES = {
    "whole": None,
    "killed": "kill at step 4",
    "saving": "kill in a save",
    "terminated": "stop at step 6",
    "rest": None,
}


def hooked(module, end: str | None, rank: int) -> None:
    """Have this rank end as the phase says."""
    report = module.report
    save = torch.save

    def last_report(step, *arguments):
        report(step, *arguments)
        if end == f"kill at step {step}" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if end == f"stop at step {step}" and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def half_a_save(value, file, *arguments, **options):
        save(value, file, *arguments, **options)
        if isinstance(file, str | os.PathLike):
            os.truncate(file, Path(file).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    module.report = last_report
    if end == "kill in a save" and rank == 0:
        torch.save = half_a_save


def run_rank(module, arguments: list[str], options: dict[str, int], file: Path) -> None:
    """Run an example in this process, a fork, and end it."""
    code = 1
    try:
        with file.open("w") as output, contextlib.redirect_stdout(output):
            if hasattr(module, "join_group"):
                module.join_group()
            module.main(arguments, **options)
            if dist.is_initialized():
                dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not do what its parent does next
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def launch(
    module,
    arguments: list[str],
    options: dict[str, int],
    end: str | None,
    files: list[Path],
) -> None:
    """Run all ranks of a phase, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {}
    for rank, file in enumerate(files):
        if (process := os.fork()) == 0:
            same = {
                "WORLD_SIZE": NUM_RANKS,
                "LOCAL_WORLD_SIZE": NUM_RANKS,
                "GROUP_RANK": 0,
                "TORCHELASTIC_RUN_ID": "run",
            }
            rank_environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            os.environ.update(
                {name: str(value) for name, value in {**same, **rank_environment}.items()}
            )
            hooked(module, end, rank)
            run_rank(module, arguments, options, file)
        ranks[process] = rank
    failed = []
    while ranks:
        process, status = os.wait()
        del ranks[process]
        if status:
            failed.append(status)
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
    killed = signal.SIGKILL in failed  # the other one may end first, of a lost connection
    assert killed if end and "kill" in end else not failed, (
        f"{files[0].name}: the ranks ended with {failed}"
    )


def main(dataset: str, out: str, *examples: str) -> None:
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    for example in examples:
        name, _, setting = example.partition(":")
        key, _, value = setting.partition("=")
        module = importlib.import_module(name)
        place = Path(out, name + value)
        if name == "mmengine_runner":
            importlib.import_module("matplotlib.pyplot")  # its Runner draws
        checkpoint_names = {}
        for phase, end in PHASES.items():
            folder = place.with_name(f"{place.name}-{'whole' if phase == 'whole' else 'killed'}")
            arguments = [
                dataset,
                "--steps",
                "8",
                "--every",
                "2",
                "--checkpoint",
                str(folder),
            ]
            files = [
                place.with_name(f"{place.name}-{phase}-{rank}.txt") for rank in range(NUM_RANKS)
            ]
            launch(
                module,
                arguments=arguments,
                options={key: int(value)} if key else {},
                end=end,
                files=files,
            )
            checkpoints = [
                path
                for path in folder.glob("*/*")
                if path.name.startswith(("step-", "unfinished-"))
            ]
            checkpoint_names[phase] = sorted(path.name for path in checkpoints)
        place.with_name(f"{place.name}.json").write_text(json.dumps(checkpoint_names))


main(*sys.argv[1:])
