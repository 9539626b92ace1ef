"""One dataset from every engine, undisturbed and killed at random: is it the same bytes?

Each case shards one source with the command line, as a user does. *Killed* cases send SIGKILL at random moments to the
command and its processes (of a Ray cluster, which lives on, every third time to a node instead) and run the same
command again, until there were as many deaths as asked for; a run that finishes in between is compared and begun anew.
What is compared is the SHA-256 of every file of the dataset.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fuelrail.bench.files import publish_json
from fuelrail.bench.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.ray_cluster import RayCluster, ray_cluster
from fuelrail.bench.micro.sharding_source import make_dataroot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOCAL: Final = {
    "in-process": ("--engine", "threads", "--workers", "1"),
    "1 process": ("--engine", "processes", "--workers", "1"),
    "2 processes": ("--engine", "processes", "--workers", "2"),
    "4 processes": ("--engine", "processes", "--workers", "4"),
}
NODES: Final = {"Ray, 1 node": 1, "Ray, 2 nodes": 2, "Ray, 3 nodes": 3}
_NODE_DIES_EVERY: Final = 3


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, undisturbed or not: digest of the whole dataset, deaths, how often it was finished.

    ``num_failed_with_node``: how often the command did not outlive a node's death, and was run again.
    """

    engine: str
    killed: bool
    dataset_sha256: str
    num_deaths: int
    num_nodes_killed: int
    num_failed_with_node: int
    num_finished: int


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The report. ``identical``: every finished dataset of every case had the same bytes."""

    benchmark: str
    machine: MachineFacts
    num_shards: int
    num_bytes: int
    identical: bool
    cases: list[Case]


def digest_of(folder: Path) -> str:
    """SHA-256 over names and digests of all files of a dataset, which has no others."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                whole.update(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


class Trial:
    """One engine on one source."""

    def __init__(
        self, name: str, source: Path, folder: Path, options: Sequence[str], cluster: RayCluster | None
    ) -> None:
        self._name, self._out, self._cluster = name, folder / "out", cluster
        self._command = [
            sys.executable, "-m", "fuelrail", "shard", f"nuscenes:{source}", str(self._out), "--seed", "11",
            "--shard-size", "6MB", "--splits", "train=0.75,val=0.25", *options,
        ]  # fmt: skip

    def undisturbed(self) -> tuple[Case, float]:
        """Run it once; the case, and how long it took [s]."""
        begun = time.monotonic()
        if self._run(None):
            raise RuntimeError(f"{self._name}: the command failed")
        took = time.monotonic() - begun
        return self._case(killed=False, finished={self._finish()}, num_finished=1), took

    def counts(self) -> tuple[int, int]:
        """How many shards it makes, and of how many bytes."""
        if self._run(None):
            raise RuntimeError(f"{self._name}: the command failed")
        sizes = [path.stat().st_size for path in self._out.glob("*.tar")]
        shutil.rmtree(self._out)
        return len(sizes), sum(sizes)

    def killed(self, num_deaths: int, took_s: float, draw: random.Random) -> Case:
        """Run it until it died so often, then to its end."""
        deaths = nodes = failed = num_finished = 0
        finished: set[str] = set()
        while deaths < num_deaths:
            node = self._cluster is not None and deaths % _NODE_DIES_EVERY == 2 and self._name != "Ray, 1 node"
            if not self._run(draw.uniform(0.25, 1.0) * took_s, node=node):
                finished.add(self._finish())
                num_finished += 1
                if not node:
                    continue  # it was done before it was to die
            else:
                failed += node
            deaths += 1
            nodes += node
        if self._run(None):
            raise RuntimeError(f"{self._name}: the command failed after {deaths} deaths")
        finished.add(self._finish())
        return self._case(
            killed=True,
            finished=finished,
            num_finished=num_finished + 1,
            num_deaths=deaths,
            num_nodes_killed=nodes,
            num_failed_with_node=failed,
        )

    def _case(self, *, killed: bool, finished: set[str], num_finished: int, **counts: int) -> Case:
        digest = finished.pop() if len(finished) == 1 else "several: " + " ".join(sorted(finished))
        counts = {"num_deaths": 0, "num_nodes_killed": 0, "num_failed_with_node": 0, **counts}
        return Case(engine=self._name, killed=killed, dataset_sha256=digest, num_finished=num_finished, **counts)

    def _finish(self) -> str:
        digest = digest_of(self._out)
        shutil.rmtree(self._out)
        return digest

    def _run(self, kill_after_s: float | None, *, node: bool = False) -> int:
        """Run the command, or kill it, or a node under it; returns its exit code."""
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        run = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            return run.wait(kill_after_s)
        if node and self._cluster is not None:
            self._cluster.tell("kill")
            code = run.wait()
            self._cluster.tell("add")
            return code
        os.killpg(run.pid, signal.SIGKILL)
        return run.wait()


def measure(folder: Path, source: Path, engines: Sequence[str], num_deaths: int) -> Iterator[Case]:
    """All cases, one after the other."""
    draw = random.Random(0)
    for name in engines:
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(ray_cluster(NODES[name])) if name in NODES else None
            options = LOCAL[name] if cluster is None else ("--engine", "ray", "--ray-address", cluster.address)
            trial = Trial(name, source, folder, options, cluster)
            case, took_s = trial.undisturbed()
            yield case
            if num_deaths:
                yield trial.killed(num_deaths, took_s, draw)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case; returns 1 where the bytes differ."""
    parser = argparse.ArgumentParser(prog="python -m fuelrail.bench.micro.sharding_identity", description=__doc__)
    engines = [*LOCAL, *NODES]
    parser.add_argument(
        "--engines", nargs="+", choices=engines, default=engines, metavar="ENGINE", help=", ".join(engines)
    )
    parser.add_argument("--deaths", type=int, default=20, help="in each killed case (default 20)")
    parser.add_argument(
        "--frames",
        type=int,
        default=160,
        help="samples of six images and a sweep, 41 at least: two clips (default 160)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    options = parser.parse_args(argv)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="fuelrail-identity-") as scratch:
        source = Path(scratch) / "source"
        make_dataroot(source, options.frames, lidar=True)
        probe = Trial("in-process", source, Path(scratch) / "probe", LOCAL["in-process"], None)
        num_shards, num_bytes = probe.counts()
        for case in measure(Path(scratch), source, options.engines, options.deaths):
            cases.append(case)
            deaths = "undisturbed"
            if case.killed:
                deaths = f"{case.num_deaths} deaths, {case.num_nodes_killed} of nodes"
            digest = case.dataset_sha256[:16]
            sys.stdout.write(f"{case.engine:12} {deaths:24} finished {case.num_finished:2}x  {digest}\n")
            sys.stdout.flush()
            if options.out is not None:  # after each case: the whole takes its time
                report = Identity(
                    benchmark="sharding_identity",
                    machine=machine_facts(),
                    num_shards=num_shards,
                    num_bytes=num_bytes,
                    identical=len({case.dataset_sha256 for case in cases}) == 1,
                    cases=cases,
                )
                publish_json(options.out, report)
    identical = len({case.dataset_sha256 for case in cases}) == 1
    sys.stdout.write("identical\n" if identical else "NOT identical\n")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
