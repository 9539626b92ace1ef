"""The launcher's own process: ranks on this host under torch elastic, as ``torchrun --standalone``
starts them.

It differs from torchrun in two things: it writes down which rank ended how (torchrun only prints
that), and nothing outlives it: it ends when the process that started it is gone, and its ranks end
when it is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fuelrail.bench.ranks.launch import RankExit

_PR_SET_PDEATHSIG = 1
_MONITOR_INTERVAL_S = 0.1


def end_with(parent: int, signum: signal.Signals) -> None:
    """Have this process signalled when ``parent``, the process that started it, ends.

    On Linux; elsewhere nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before we could ask
        os.kill(os.getpid(), signum)


def main(arguments: Sequence[str]) -> int:
    """Run ``PARENT NUM_RANKS EXITS MODULE [ARGUMENT ...]``: the module once a rank; it gets our
    process id last.

    EXITS is the file that names, as JSON, the ranks that failed.
    """
    parent, num_ranks, exits, *program = arguments
    end_with(int(parent), signal.SIGTERM)
    # Slow to import, so only once nobody can be left without a parent.
    from torch.distributed.elastic.multiprocessing.api import (
        DefaultLogsSpecs,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import (
        ChildFailedError,
    )
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
        failed = [
            RankExit(rank=rank, exit_code=failure.exitcode)
            for rank, failure in error.failures.items()
        ]
        Path(exits).write_bytes(msgspec.json.encode(failed))
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
