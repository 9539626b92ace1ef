"""One process that makes the batches of all ranks of a host, ``where="node"``.

The ranks find it by an abstract Unix socket, whose name is made of the user, the job, as the launcher's environment
states it, and the number of this loader among those of its process: all ranks make theirs in the same order. The first
local rank starts it, in a session of its own; it ends with the last rank. Only processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from fuelrail.loaders.autotune import Tuning
from fuelrail.loaders.serving.server import RankServer, Setup
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.runtime.host import ranks_on_host
from fuelrail.pipeline.runtime.workers import pickled_error

_START_S: Final = 120.0
"""How long a rank waits for the process, which imports torch first."""
_JOB: Final = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_numbers: Final = itertools.count()


def connect_node() -> Callable[[], tuple[None, Connection]]:
    """Return what connects this rank's next loader to the process of its host, and starts that where it is missing.

    Raises ConfigError without the launcher's LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "where='node' needs LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT in the environment, as torchrun sets "
            "them: start the ranks by it, or take where='process'"
        )
    job = [os.environ.get(name, "") for name in _JOB]
    digest = hashlib.sha256("\n".join([*job, str(next(_numbers))]).encode()).hexdigest()
    name = f"fuelrail-{os.getuid()}-{digest[:32]}"
    is_first = os.environ["LOCAL_RANK"] == "0"

    def connect() -> tuple[None, Connection]:
        started: subprocess.Popen[bytes] | None = None
        until_s = time.monotonic() + _START_S
        while True:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                channel.connect(f"\0{name}")
            except OSError as error:
                channel.close()
                if started is not None and started.poll() is not None:
                    raise ChildProcessError(
                        f"the process that makes this host's batches ended with exit code {started.returncode}; the "
                        "lines above say why"
                    ) from error
                if time.monotonic() > until_s:
                    raise ChildProcessError(
                        f"no process makes this host's batches after {_START_S:g} s: the rank with LOCAL_RANK=0 starts "
                        "it when it iterates a loader with where='node', which all ranks of a host must do"
                    ) from error
                if is_first and started is None:
                    started = _start(name)
                time.sleep(0.05)
                continue
            _check_peer(channel)
            return None, Connection(channel.detach())

    return connect


def _start(name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__, name, str(ranks_on_host())]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
    )


def _check_peer(channel: socket.socket) -> None:
    _, user, _ = struct.unpack(
        "3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if user != os.getuid():
        channel.close()
        raise PermissionError(
            f"the other end of this host's batches belongs to user {user}, not to {os.getuid()}"
        )


class _Host:
    """The servers of a host's data-parallel ranks; they begin when all ranks are here."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._servers: dict[int, tuple[Setup, RankServer]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self.has_begun = threading.Event()
        self.threads: list[threading.Thread] = []

    def admit(self, connection: Connection) -> None:
        """Read a rank's setup, and make it a client of its data-parallel rank's server."""
        try:
            content = connection.recv_bytes()
            with self._lock:
                server = self._server(content)
                connection.send(None)
                server.join(connection)
                self._count += 1
                if self._count == self._num_ranks:
                    self._begin()
        except (EOFError, OSError):
            connection.close()
        except Exception as error:  # noqa: BLE001 - its trainer says what is wrong
            connection.send(pickled_error(error))

    def is_deserted(self) -> bool:
        """Return whether no rank is connected."""
        return not any(server.is_wanted() for _, server in list(self._servers.values()))

    def _server(self, content: bytes) -> RankServer:
        try:
            setup: Setup = pickle.loads(content)
        except Exception as error:
            raise ConfigError(
                f"the loader cannot be made in the process of where='node' ({error}): functions must be of a module "
                "that can be imported"
            ) from error
        rank = setup.arguments[0].world.rank
        known = self._servers.get(rank)
        if known is None:
            known = self._servers[rank] = setup, RankServer(setup)
        if _plain(known[0]) != _plain(setup):
            raise ConfigError(
                f"processes of data-parallel rank {rank} make loaders with different arguments for where='node': make "
                "the same loaders in the same order on all ranks"
            )
        return known[1]

    def _begin(self) -> None:
        for setup, server in self._servers.values():
            if setup.shares_cpus:
                own, ready = setup.arguments[0].num_workers, setup.arguments[0].prefetch_factor
                server.tune(Tuning(own * len(server.clients), ready))
            thread = threading.Thread(target=server.serve)
            thread.start()
            self.threads.append(thread)
        self.has_begun.set()


def _plain(setup: Setup) -> tuple[object, object]:
    """Return what must be equal for all clients of one rank, without what may be equal and compares as different."""
    arguments, datasets = setup.arguments
    functions = dict.fromkeys(("transform", "batch_transform", "collate_fn", "layers"))
    return msgspec.structs.replace(arguments, **functions), datasets


def main(name: str, num_ranks: int) -> None:
    """Serve this number of ranks, until the last of them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host = _Host(num_ranks)
    started_s = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{name}")
        listening.listen(num_ranks)
        listening.settimeout(1.0)
        accepted = 0
        while accepted < num_ranks:
            if host.is_deserted() and time.monotonic() > started_s + _START_S:
                os._exit(1)
            with contextlib.suppress(PermissionError, TimeoutError):
                channel, _address = listening.accept()
                _check_peer(channel)
                channel.setblocking(True)
                threading.Thread(
                    target=host.admit, args=(Connection(channel.detach()),), daemon=True
                ).start()
                accepted += 1
    host.has_begun.wait(_START_S)
    for thread in host.threads:
        thread.join()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
