"""A Ray cluster of several nodes on this machine, for tests and benchmarks; as a program it is that cluster.

The program's argument is the number of nodes; it prints the address. Commands on stdin, a line each: ``kill`` ends the
youngest node as a power cut would (SIGKILL of its raylet and workers); ``add`` starts another. The end of the input
ends the cluster.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_ANSWER_S: Final = 300.0  # Ray's own waits are shorter
_STARTS: Final = 3  # a node on a busy machine may miss Ray's own deadline


def main(num_nodes: int) -> None:
    """Be the cluster until the input ends."""
    from ray.cluster_utils import Cluster

    def node(*, is_head: bool) -> dict[str, Any]:
        limits: dict[str, Any] = {
            "num_cpus": 1,
            "memory": 2 << 30,
            "object_store_memory": 80 << 20,
        }
        return {**limits, "include_dashboard": False, "dashboard_port": None} if is_head else limits

    cluster = Cluster(
        initialize_head=True,
        head_node_args=node(is_head=True),
        shutdown_at_exit=True,
    )
    nodes = [cluster.add_node(**node(is_head=False)) for _ in range(num_nodes - 1)]
    print(cluster.address, flush=True)
    for command in sys.stdin:
        if command.strip() == "kill":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            for start in range(_STARTS):
                try:
                    nodes.append(cluster.add_node(**node(is_head=False)))
                    break
                except Exception:
                    if start == _STARTS - 1:
                        raise
        print("done", flush=True)
    cluster.shutdown()


class RayCluster:
    """A cluster in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        self.address = address

    def tell(self, command: str) -> None:
        """``kill`` a node or ``add`` one, and wait until it is done; raises RuntimeError where it is not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise RuntimeError(f"the cluster has not answered '{command}' within {_ANSWER_S:.0f} s")
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("the cluster has ended")

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of this cluster whose title begins so; an actor's is ``ray::CLASS``."""
        named_processes = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                named_processes += [process] if " ".join(process.cmdline()).startswith(name) else []
        return named_processes


@contextlib.contextmanager
def ray_cluster(num_nodes: int) -> Iterator[RayCluster]:
    """A cluster of this number of nodes, of one core each."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "support.ray_cluster", str(num_nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        answered = select.select([process.stdout], [], [], _ANSWER_S)[0]
        address = process.stdout.readline().strip() if answered else ""
        if not address:
            raise RuntimeError("the cluster did not start: is Ray installed?")
        yield RayCluster(process, address)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
