"""The launcher's own process: ranks on this host under torch elastic, as ``torchrun --standalone`` starts them.

It differs from torchrun in two things: it writes down which rank ended how (torchrun only prints that), and nothing
outlives it: it ends when the process that started it is gone, and its ranks end when it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from fuelrail.bench.ranks.launch import RankExit

_PR_SET_PDEATHSIG = 1
_MONITOR_INTERVAL_S = 0.1


def end_with(parent: int, signum: signal.Signals) -> None:
    """Have this process signalled when ``parent``, the process that started it, ends. On Linux; elsewhere nothing."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before we could ask
        os.kill(os.getpid(), signum)


def join_world(device: str | None, timeout_s: float, *, acts: bool) -> None:
    """Join the ranks' group, on the CPU where ``device`` is None. ``acts``: this rank stands in for a device."""
    import torch
    import torch.distributed as dist

    acts = acts and sys.platform == "linux"
    if acts:
        _act_as_device(os.SCHED_FIFO)
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        timeout=timedelta(seconds=timeout_s),
        device_id=None if device is None else torch.device(device),
    )
    if acts:
        _act_as_device(os.SCHED_FIFO | os.SCHED_RESET_ON_FORK)


def _act_as_device(policy: int) -> None:
    """Let this thread, and with SCHED_FIFO those that it starts, run whenever they want to, where that is permitted.

    This thread and gloo's stand in for a device and its link, which would not wait for a CPU that is busy decoding.
    They take little of it, so the loader's threads, which are scheduled as ever, lose little.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, policy, os.sched_param(1))


def main(arguments: Sequence[str]) -> int:
    """Run ``PARENT NUM_RANKS EXITS MODULE [ARGUMENT ...]``: the module once a rank; it gets our process id last.

    EXITS is the file that names, as JSON, the ranks that failed.
    """
    parent, num_ranks, exits, *program = arguments
    end_with(int(parent), signal.SIGTERM)
    # Slow to import, so only once nobody can be left without a parent.
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    try:
        # Torch leaves its own folder of logs behind.
        with tempfile.TemporaryDirectory(prefix="fuelrail-ranks-") as logs:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=int(num_ranks),
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",  # this host's own name need not resolve
                max_restarts=0,
                monitor_interval=_MONITOR_INTERVAL_S,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            elastic_launch(config, sys.executable)("-m", *program, str(os.getpid()))
    except ChildFailedError as error:
        failed = [RankExit(rank=rank, exit_code=failure.exitcode) for rank, failure in error.failures.items()]
        Path(exits).write_bytes(msgspec.json.encode(failed))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
