"""Runs a script of the tests as several ranks, without their start-up time."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.context import ForkServerContext

TESTS = Path(__file__).parents[1]
_POLL_S = 0.02
_LOADED = [
    "support.checkpoint_ranks",
    "fuelrail.bench.studies.train.worker",
    "torch.distributed.launcher.api",
    "torch._dynamo",  # an optimiser imports it at its first step, which takes each fork a second
]


def warm() -> ForkServerContext:
    """Return a context whose processes are forks of one that has torch and the trainer loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    before = dict(os.environ)
    rank_environment = environment()
    os.environ.update(
        rank_environment
    )  # older versions of Python do not give the server `sys.path`, and load nothing without it
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def run_ranks(num_ranks: int, *arguments: object, timeout_s: float = 280) -> str:
    """Run ``SCRIPT ...`` or ``-m MODULE ...`` as ranks with the environment of torchrun; return what they printed.

    When a rank fails, the others are killed, and so does this.
    """
    with socket.socket() as free, TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        log = Path(folder, "log")
        shared = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
        }
        shared |= {
            "MASTER_PORT": free.getsockname()[1],
            "GLOO_SOCKET_IFNAME": "lo",
        }
        free.close()
        words = list(map(str, arguments))
        ranks = [
            warm().Process(
                target=run_program,
                args=(
                    words,
                    shared | {"RANK": rank, "LOCAL_RANK": rank},
                    str(log),
                ),
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        ends_s = time.monotonic() + timeout_s
        try:
            while any(process.is_alive() for process in ranks) and not any(
                process.exitcode for process in ranks
            ):
                assert time.monotonic() < ends_s, f"{words} did not end; {_said(log)}"
                time.sleep(_POLL_S)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * num_ranks, f"ranks ended with {codes}; {_said(log)}"
        return log.read_text()


def run_program(words: Sequence[str], env: Mapping[str, object], log: str | None) -> None:
    """Be ``python WORDS`` with these further variables, in a fork; its output is added to ``log``."""
    os.environ.update({name: str(value) for name, value in env.items()})
    folders = str(env.get("PYTHONPATH", "")).split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    if log is not None:
        with open(log, "ab") as output:  # noqa: PTH123 - as `subprocess` has it
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    is_module = words[0] == "-m"
    code = 1
    sys.argv = list(words[1:] if is_module else words)
    sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that is loaded
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - reported by traceback and status
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _said(log: Path) -> str:
    return log.read_text(errors="replace")[:6000] if log.exists() else "nothing was printed"


def environment() -> dict[str, str]:
    """Ours, with the package and the tests' support importable, and gloo on the loopback interface."""
    paths = [
        str(TESTS.parent / ".src"),
        str(TESTS),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
