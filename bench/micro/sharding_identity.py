"""One dataset from every engine, undisturbed and killed at random: is it the same bytes?

Each case shards one source with the command line, as a user does. *Killed* cases send SIGKILL to the command and its
processes (of a Ray cluster, which lives on, every third time to a node instead) and run the same command again, until
there were as many deaths as asked for; a run that finishes in between is compared and repeated. Death comes a random
moment after a random number of the shards that are left to be made, up to a third of them; one in six comes at any
moment of a run, start and end included. What is compared is the SHA-256 of every file of the dataset.

With ``--out`` the report is written after each case, and the same command continues with the cases that it lacks; with
``--seconds`` none is started after that time.
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

from fuelrail.bench.measure.machine import MachineFacts, machine_facts
from fuelrail.bench.micro.sharding_source import make_dataroot
from fuelrail.bench.report.files import publish_json
from support.ray_cluster import RayCluster, ray_cluster

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
_RUN_S: Final = 600.0  # in which a command ends, whatever has died under it


class Death(msgspec.Struct, frozen=True):
    """One death: shards that the run had found when it began, and shards that were there when it, or a node, died."""

    shards_found: int
    shards_there: int
    of_node: bool


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, undisturbed or not: digest of the whole dataset, deaths, how often it was finished, time taken [s].

    ``num_while_writing``: deaths of runs that had made some of the shards they were to make, and not all.
    ``failures``: what the command said when it did not outlive a node's death, and was run again.
    """

    engine: str
    killed: bool
    dataset_sha256: str
    num_deaths: int
    num_while_writing: int
    num_nodes_killed: int
    deaths: list[Death]
    failures: list[str]
    num_finished: int
    took_s: float


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The report. ``identical``: every finished dataset of every case had the same bytes; ``missing``: not yet run."""

    benchmark: str
    machine: MachineFacts
    num_frames: int
    num_shards: int
    num_bytes: int
    num_deaths: int
    identical: bool
    missing: list[str]
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
        self._said = folder / "said"
        self._command = [
            sys.executable, "-m", "fuelrail", "shard", f"nuscenes:{source}", str(self._out), "--seed", "11",
            "--shard-size", "4MB", "--splits", "train=0.75,val=0.25", *options,
        ]  # fmt: skip

    def undisturbed(self) -> Case:
        """Run it once."""
        begun = time.monotonic()
        self._run_to_the_end()
        took_s = time.monotonic() - begun
        return self._case({self._finish()}, took_s=took_s, num_finished=1)

    def counts(self) -> tuple[int, int]:
        """How many shards it makes, and of how many bytes."""
        self._run_to_the_end()
        sizes = [path.stat().st_size for path in self._out.glob("*.tar")]
        shutil.rmtree(self._out)
        return len(sizes), sum(sizes)

    def killed(self, num_deaths: int, num_shards: int, undisturbed_s: float, draw: random.Random) -> Case:
        """Run it until it died so often, then to its end. It makes ``num_shards``, in ``undisturbed_s`` or less."""
        begun = time.monotonic()
        num_finished = 0
        deaths: list[Death] = []
        failures: list[str] = []
        finished: set[str] = set()
        while len(deaths) < num_deaths:
            found = self._num_shards()
            left = num_shards - found
            kill_at: tuple[int, float] | None = None  # all that is left is the end, which lone late deaths strike
            if draw.random() < 1 / 6:
                kill_at = found, draw.uniform(0.25, 1.0) * undisturbed_s
            elif left:
                kill_at = found + draw.randint(1, -(-left // 3)), draw.uniform(0, 2 * undisturbed_s / num_shards)
            node = kill_at is not None and len(deaths) % _NODE_DIES_EVERY == 2 and NODES.get(self._name, 1) > 1
            there: list[int] = []
            run_begun = time.monotonic()
            if not self._run(kill_at, there, node=node):
                if not there:  # done before it was to die: the run that says how long one takes was held up
                    undisturbed_s = min(undisturbed_s, time.monotonic() - run_begun)
                finished.add(self._finish())
                num_finished += 1
            elif not there:
                raise RuntimeError(f"{self._name}: the command failed before anything died: {self._last_words()}")
            elif node:
                failures.append(self._last_words())
            deaths += [Death(found, number, node) for number in there]
        self._run_to_the_end()
        finished.add(self._finish())
        return self._case(
            finished,
            killed=True,
            took_s=time.monotonic() - begun,
            num_finished=num_finished + 1,
            num_while_writing=sum(death.shards_found < death.shards_there < num_shards for death in deaths),
            deaths=deaths,
            failures=failures,
        )

    def _case(
        self,
        finished: set[str],
        *,
        took_s: float,
        num_finished: int,
        killed: bool = False,
        num_while_writing: int = 0,
        deaths: Sequence[Death] = (),
        failures: Sequence[str] = (),
    ) -> Case:
        return Case(
            engine=self._name,
            killed=killed,
            dataset_sha256=finished.pop() if len(finished) == 1 else "several: " + " ".join(sorted(finished)),
            num_deaths=len(deaths),
            num_while_writing=num_while_writing,
            num_nodes_killed=sum(death.of_node for death in deaths),
            deaths=list(deaths),
            failures=list(failures),
            num_finished=num_finished,
            took_s=round(took_s, 1),
        )

    def _num_shards(self) -> int:
        return len(list(self._out.glob("*.tar")))

    def _finish(self) -> str:
        digest = digest_of(self._out)
        shutil.rmtree(self._out)
        return digest

    def _last_words(self) -> str:
        return " ".join(self._said.read_text(errors="replace").split())[-500:]

    def _run_to_the_end(self) -> None:
        if self._run(None, []):
            raise RuntimeError(f"{self._name}: the command failed: {self._last_words()}")

    def _run(self, kill_at: tuple[int, float] | None, at_deaths: list[int], *, node: bool = False) -> int:
        """Run the command, or kill it, or a node under it, and note how many shards there are; returns its exit code.

        ``kill_at``: number of shards, and seconds to wait after that. Raises RuntimeError where it is not done
        within :data:`_RUN_S`.
        """
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        with self._said.open("w") as said:
            run = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=said, env=environment, start_new_session=True
            )
        try:
            if kill_at is not None:
                if self._is_done_before(run, *kill_at):
                    return run.wait()
                at_deaths.append(self._num_shards())
                if not node or self._cluster is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    return run.wait()
                self._cluster.tell("kill")
            code = run.wait(_RUN_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{self._name}: the command was not done after {_RUN_S:.0f} s") from error
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        if node and self._cluster is not None:
            self._cluster.tell("add")
        return code

    def _is_done_before(self, run: subprocess.Popen[bytes], num_shards: int, pause_s: float) -> bool:
        """Wait for this number of shards, then for this time; whether the run ended meanwhile."""
        deadline = time.monotonic() + _RUN_S
        while self._num_shards() < num_shards:
            if run.poll() is not None:
                return True
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(run.args, _RUN_S)
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(pause_s)
        return run.poll() is not None


def measure(
    folder: Path,
    source: Path,
    engines: Sequence[str],
    num_deaths: int,
    num_shards: int,
    done: Sequence[Case],
    until_s: float,
) -> Iterator[Case]:
    """Run the cases that are not ``done``; none is started after ``until_s`` on the monotonic clock."""
    draw = random.Random(len(done))
    for name in engines:
        known = [case for case in done if case.engine == name]
        if len(known) == 2:
            continue
        if time.monotonic() > until_s:
            return
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(ray_cluster(NODES[name])) if name in NODES else None
            options = LOCAL[name] if cluster is None else ("--engine", "ray", "--ray-address", cluster.address)
            trial = Trial(name, source, folder, options, cluster)
            undisturbed = trial.undisturbed()
            if not known:
                yield undisturbed
            if num_deaths and time.monotonic() < until_s:
                yield trial.killed(num_deaths, num_shards, undisturbed.took_s, draw)


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
        default=120,
        help="samples of six images and a sweep, 41 at least: two clips (default 120)",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write (default: the temporary folder)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="report as JSON; what it has already is not run again")
    options = parser.parse_args(argv)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuelrail-identity-", dir=options.dir) as scratch:
        source = Path(scratch) / "source"
        make_dataroot(source, options.frames, lidar=True)
        num_shards, num_bytes = Trial("in-process", source, Path(scratch), LOCAL["in-process"], None).counts()

        def report_of(cases: list[Case]) -> Identity:
            ran = {(case.engine, case.killed) for case in cases}
            kinds = (False, True) if options.deaths else (False,)
            return Identity(
                benchmark="sharding_identity",
                machine=machine_facts(),
                num_frames=options.frames,
                num_shards=num_shards,
                num_bytes=num_bytes,
                num_deaths=options.deaths,
                identical=len({case.dataset_sha256 for case in cases}) == 1,
                missing=[
                    f"{name}, {'killed' if kind else 'undisturbed'}"
                    for name in options.engines
                    for kind in kinds
                    if (name, kind) not in ran
                ],
                cases=cases,
            )

        report = report_of(_cases_in(options.out, options.frames, options.deaths, num_shards, num_bytes))
        for case in measure(
            Path(scratch), source, options.engines, options.deaths, num_shards, report.cases, begun + options.seconds
        ):
            report = report_of([*report.cases, case])
            deaths = "undisturbed"
            if case.killed:
                deaths = f"{case.num_deaths} deaths, {case.num_while_writing} writing, {case.num_nodes_killed} of nodes"
            sys.stdout.write(
                f"{case.engine:12} {deaths:35} finished {case.num_finished:2}x  {case.dataset_sha256[:16]} "
                f"{case.took_s:6.1f} s\n"
            )
            sys.stdout.flush()
            if options.out is not None:
                publish_json(options.out, report)
    sys.stdout.write("identical\n" if report.identical else "NOT identical\n")
    if report.missing:
        sys.stdout.write(f"not run yet: {'; '.join(report.missing)}\n")
    return 0 if report.identical else 1


def _cases_in(out: Path | None, num_frames: int, num_deaths: int, num_shards: int, num_bytes: int) -> list[Case]:
    """The cases of an earlier run with the same data and deaths."""
    try:
        earlier = msgspec.json.decode(out.read_bytes(), type=Identity) if out is not None else None
    except (OSError, msgspec.DecodeError):
        return []
    wanted = (num_frames, num_deaths, num_shards, num_bytes)
    if earlier is None or (earlier.num_frames, earlier.num_deaths, earlier.num_shards, earlier.num_bytes) != wanted:
        return []
    return earlier.cases


if __name__ == "__main__":
    sys.exit(main())
