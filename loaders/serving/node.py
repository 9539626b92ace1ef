"""One process that makes the batches of all ranks of a host, ``where="node"``.

The ranks find it by an abstract Unix socket, whose name is made of the user, the job, as the
launcher's environment states it, and the number of this loader among those of its process: all
ranks make theirs in the same order. The first local rank starts it, in a session of its own; it
ends with the last rank. Only processes of the same user are served.

A connection says first which local rank it is, and the process begins when each local rank has one
that lives: a job that was killed as it began leaves a process whose connections are dead, and the
same job, started again, finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
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
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
_numbers: Final = itertools.count()
_NAMES: Final = 8
"""Names that are tried, where other users have taken the first ones."""
_CONNECT_S: Final = 1.0
_BACKLOG: Final = 128
_RANK_BYTES: Final = 20
"""The longest number of a local rank, as text."""


def connect_node() -> Callable[[], tuple[None, Connection]]:
    """Return what connects this rank's next loader to the process of its host, and starts that
    where it is missing.

    Raises ConfigError without the launcher's LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "where='node' needs LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT in the "
            "environment, as torchrun sets them: start the ranks by it, or take where='process'"
        )
    job = [os.environ.get(name, "") for name in _JOB]
    text = "\n".join([*job, str(next(_numbers))])
    digest = hashlib.sha256(text.encode()).hexdigest()
    stem = f"fuelrail-{os.getuid()}-{digest[:32]}"
    names = [stem, *(f"{stem}-{number}" for number in range(1, _NAMES))]
    local_rank = os.environ["LOCAL_RANK"]

    def connect() -> tuple[None, Connection]:
        started: subprocess.Popen[bytes] | None = None
        until_s = time.monotonic() + _START_S
        while True:
            connection = _connect(names)
            if connection is not None:
                with contextlib.suppress(OSError):  # it begins with other ranks, and takes no more
                    connection.send_bytes(local_rank.encode())
                    return None, connection
                connection.close()
            elif started is not None and started.poll() == 0:  # there was one already
                started = None
            elif started is not None and started.poll() is not None:
                raise ChildProcessError(
                    "the process that makes this host's batches ended with exit code "
                    f"{started.returncode}; the lines above say why"
                )
            if time.monotonic() > until_s:
                raise ChildProcessError(
                    f"no process makes this host's batches after {_START_S:g} s: the rank "
                    "with LOCAL_RANK=0 starts it when it iterates a loader with "
                    "where='node', which all ranks of a host must do"
                )
            if local_rank == "0" and started is None:
                started = _start_process(names)
            time.sleep(0.05)

    return connect


def _connect(names: Sequence[str]) -> Connection | None:
    """Connect to this user's process at the first of these names that has one; None: none has.

    Any user may take a name, as the kernel shows them to all.
    """
    for name in names:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Another user's socket that accepts nothing would make the caller wait for ever.
        channel.settimeout(_CONNECT_S)
        try:
            channel.connect(f"\0{name}")
            _, user = _read_peer(channel)
        except OSError:
            channel.close()
            continue
        if user == os.getuid():
            channel.setblocking(True)
            return Connection(channel.detach())
        channel.close()
    return None


def _start_process(names: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__, str(ranks_on_host()), *names]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )


def _read_peer(channel: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, as of when it connected or listened, and its user."""
    size = struct.calcsize("3i")
    process, user, _ = struct.unpack(
        "3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return process, user


def _start_time(process: int) -> str | None:
    """Return when a process started, in ticks since the machine did; None where it is gone."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return facts.rpartition(")")[2].split()[19]


class _Rank:
    """A local rank's connection, as a client of the server of its data-parallel rank."""

    def __init__(
        self,
        connection: Connection,
        process: int,
        server: RankServer,
    ) -> None:
        self._connection = connection
        self._process = process
        self._started = _start_time(process)
        self.server = server
        self.client = server.join(connection)

    def is_alive(self) -> bool:
        """Return whether the other end is open, and its process the one that has opened it.

        A child of a rank that was killed may hold the other end open.
        """
        if not self.client.is_connected:
            return False
        if self._started is not None and _start_time(self._process) != self._started:
            return False
        watcher = select.poll()
        watcher.register(self._connection.fileno(), select.POLLRDHUP)
        return not watcher.poll(0)


class _Host:
    """The servers of a host's data-parallel ranks; they begin when all ranks are here."""

    def __init__(self, num_ranks: int, listening: socket.socket) -> None:
        self._num_ranks = num_ranks
        self._listening = listening
        self._servers: dict[int, tuple[Setup, RankServer]] = {}
        self._ranks: dict[int, _Rank] = {}
        self._lock = threading.Lock()
        self.has_begun = threading.Event()
        self.threads: list[threading.Thread] = []

    def admit(self, connection: Connection, process: int) -> None:
        """Read a rank's number and setup, and make it a client of its rank's server."""
        try:
            local_rank = int(connection.recv_bytes(_RANK_BYTES))
            content = connection.recv_bytes()
        except (EOFError, OSError, ValueError):  # no rank of ours
            connection.close()
            return
        try:
            with self._lock:
                if self.has_begun.is_set():
                    connection.close()
                    return
                # Before the servers begin, a rank that is gone or comes again is forgotten, and so
                # is a server that has no client then.
                for number, rank in list(self._ranks.items()):
                    if number == local_rank or not rank.is_alive():
                        del self._ranks[number]
                        rank.server.leave(rank.client)
                for number, (_, server) in list(self._servers.items()):
                    if not server.clients:
                        del self._servers[number]
                        server.close()
                if not 0 <= local_rank < self._num_ranks:
                    connection.close()
                    return
                try:
                    setup: Setup = pickle.loads(content)
                except Exception as error:
                    raise ConfigError(
                        f"the loader cannot be made in the process of where='node' ({error}): "
                        "functions must be of a module that can be imported"
                    ) from error
                rank_number = setup.arguments[0].world.rank
                if rank_number not in self._servers:
                    self._servers[rank_number] = setup, RankServer(setup)
                first_setup, server = self._servers[rank_number]
                if _plain(first_setup) != _plain(setup):
                    raise ConfigError(
                        f"processes of data-parallel rank {rank_number} make loaders with "
                        "different arguments for where='node': make the same loaders in the same "
                        "order on all ranks"
                    )
                connection.send(None)
                self._ranks[local_rank] = _Rank(connection, process, server)
                if len(self._ranks) == self._num_ranks:
                    for setup, server in self._servers.values():
                        if setup.shares_cpus:
                            num_workers = setup.arguments[0].num_workers * len(server.clients)
                            server.tune(Tuning(num_workers, setup.arguments[0].prefetch_factor))
                        thread = threading.Thread(target=server.serve)
                        thread.start()
                        self.threads.append(thread)
                    self.has_begun.set()
                    # From now on a connection is refused, so that its rank starts another process.
                    self._listening.shutdown(socket.SHUT_RDWR)
        except (EOFError, OSError):
            connection.close()
        except Exception as error:  # noqa: BLE001 - its trainer says what is wrong
            connection.send(pickled_error(error))

    def is_deserted(self) -> bool:
        """Return whether no rank that lives is connected."""
        with self._lock:
            return not any(rank.is_alive() for rank in self._ranks.values())


def _plain(setup: Setup) -> tuple[object, object]:
    """Return what must be equal for all clients of one rank, without what may be equal and
    compares as different.
    """
    arguments, datasets = setup.arguments
    functions = dict.fromkeys(("transform", "batch_transform", "collate_fn", "layers"))
    return msgspec.structs.replace(arguments, **functions), datasets


def main(num_ranks: int, names: Sequence[str]) -> None:
    """Serve this number of ranks at the first name that is free, until the last of them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started_s = time.monotonic()
    with _listen(names) as listening:
        host = _Host(num_ranks, listening)
        while not host.has_begun.is_set():
            if time.monotonic() > started_s + _START_S and host.is_deserted():
                os._exit(1)
            try:
                channel, _address = listening.accept()
            except OSError:  # nobody has come for some time, or the ranks are all here
                continue
            process, user = _read_peer(channel)
            if user != os.getuid():
                channel.close()
                continue
            channel.setblocking(True)
            connection = Connection(channel.detach())
            threading.Thread(target=host.admit, args=(connection, process), daemon=True).start()
    for thread in host.threads:
        thread.join()
    os._exit(0)


def _listen(names: Sequence[str]) -> socket.socket:
    """Return a socket that listens at the first name that is free.

    Ends the process where this user has such a process already.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for name in names:
        try:
            listening.bind(f"\0{name}")
        except OSError:
            if _connect([name]) is not None:
                os._exit(0)
            continue
        listening.listen(_BACKLOG)
        listening.settimeout(1.0)
        return listening
    raise SystemExit(
        f"where='node': other users have taken all {len(names)} names of this job's socket, such "
        f"as '@{names[0]}': start the job with another MASTER_PORT"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
