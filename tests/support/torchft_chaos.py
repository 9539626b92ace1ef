"""Four replicas under torchft on gloo that are killed, paused and joined at random, and what became of their rows.

Replicas are forks of a process that has torch loaded, so a new one takes no start-up time. Each writes a line as it
takes a step and one as it commits it. A model in float32 and one in float64 are trained together, by SGD. Beside the
loader each replica draws rows by torchft's own sampler, whose position it saves at each committed step.

python -m support.torchft_chaos DATASET FOLDER EVENTS SEED prints a `Report` as JSON.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from datetime import timedelta
from itertools import chain, islice, repeat
from mmap import mmap
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, mse_loss
from torchdata.stateful_dataloader import StatefulDataLoader

from fuelrail import DataLoader, World, rank_weight
from support.forked import fork, join
from support.ranks import TESTS

sys.path.append(str(TESTS.parent / "configs" / "trainers"))

NUM_REPLICAS = 4
GLOBAL_BATCH = 10
NUM_LAST_STEPS = 30
"""Steps of all replicas after the last event."""
TIMEOUT = timedelta(seconds=1.5)
"""A replica that is paused for longer is left out of its step."""
HEARTBEAT_MS = 1000
"""After so many milliseconds without a word of a replica the others go on."""
MOST_PAUSE_S = 2.5


class Report(msgspec.Struct):
    """What came of a run."""

    events: dict[str, int]
    num_steps: int
    num_repeated: int
    """Attempts at a step that were not committed, or whose commit was lost with the replica."""
    wrong_steps: list[int]
    """Steps whose committed rows are not the undisturbed run's, in its order."""
    worst_float32: float
    worst_float64: float
    """Largest difference of a weight from that of the run on one rank."""
    sizes: dict[int, int]
    """Committed steps by number of replicas."""
    crashed: int
    """Replicas that ended by themselves, with an error."""
    sampler_rows: int
    sampler_lost: int
    sampler_twice: int
    """Rows of the epochs that torchft's sampler has ended on all replicas; trained never; trained again."""


class Pair(nn.Module):
    """One linear model in float32 and in float64, and the sum of their losses on a batch."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.float64 = nn.Linear(num_features, 1, dtype=torch.float64)
        self.float32 = nn.Linear(num_features, 1)
        self.float32.load_state_dict(self.float64.state_dict())

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        single = mse_loss(self.float32(features.float()), targets.float())
        return single.double() + mse_loss(self.float64(features), targets)


def examples(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and targets of a batch, in float64: each row's by that row alone."""
    images = batch["img"]
    pooled = adaptive_avg_pool2d(images.flatten(0, 1).double() / 255, (2, 3))
    counts = torch.tensor([[len(boxes) / 10] for boxes in batch["gt_boxes_3d"]])
    return pooled.reshape(len(images), -1), counts.double()


def make_loader(root: str) -> DataLoader:
    """The whole run's loader, as of one rank: the quorum says which one it is."""
    return DataLoader(
        root,
        GLOBAL_BATCH,
        shuffle=True,
        drop_last=True,
        transforms={"image": {"height": 32, "width": 64}},
        seed=7,
        world=World(),
        num_workers=1,
    )


def make_model(loader: DataLoader) -> tuple[Pair, torch.optim.Optimizer]:
    """The pair for the images of a loader, and its optimiser."""
    model = Pair(len(loader.cameras) * 3 * 2 * 3)
    return model, torch.optim.SGD(model.parameters(), 0.02)


class SharedSteps:
    """The newest step of each replica, and the last step of the run, in memory that forks share."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap(-1, 8 * (NUM_REPLICAS + 1))).cast("q")
        self.end = 2**40

    @property
    def end(self) -> int:
        return self._numbers[NUM_REPLICAS]

    @end.setter
    def end(self, step: int) -> None:
        self._numbers[NUM_REPLICAS] = step

    def __getitem__(self, replica: int) -> int:
        return self._numbers[replica]

    def __setitem__(self, replica: int, step: int) -> None:
        self._numbers[replica] = step


class TorchftRows:
    """The rows that torchft's sampler gives a replica, which go on after a restart from the newest committed step."""

    def __init__(self, num_rows: int, replica: int, file: Path) -> None:
        from torchft.data import DistributedSampler

        self._sampler = DistributedSampler(
            range(num_rows),
            replica_rank=replica,
            num_replica_groups=NUM_REPLICAS,
            group_rank=0,
            num_replicas=1,
            seed=7,
        )
        self._loader = StatefulDataLoader(range(num_rows), batch_size=2, sampler=self._sampler)
        self._file = file
        self._epoch = 0
        if file.exists():
            saved = torch.load(file)
            self._epoch = saved["epoch"]
            self._sampler.set_epoch(self._epoch)
            self._loader.load_state_dict(saved["loader"])
        self._batches = iter(self._loader)

    def take(self) -> tuple[int, list[int]]:
        """The next batch, with its epoch."""
        batch = next(self._batches, None)
        if batch is None:
            self._epoch += 1
            self._sampler.set_epoch(self._epoch)
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return self._epoch, batch.tolist()

    def commit(self) -> None:
        """Save the position."""
        new = self._file.with_suffix(".new")
        torch.save({"epoch": self._epoch, "loader": self._loader.state_dict()}, new)
        new.replace(self._file)


def die_with_parent() -> None:
    """Have this process killed when the one that forked it ends."""
    set_signal_of_parents_death = 1
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)


def run_replica(number: int, lighthouse: str, root: str, folder: Path, steps: SharedSteps) -> None:
    """Train as one replica until the run's last step, and save the weights."""
    from torchft import Manager, ProcessGroupGloo
    from torchft_ddp import elastic_steps

    die_with_parent()
    logging.disable(logging.CRITICAL)
    log = os.open(folder / f"{number}-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    theirs = TorchftRows(GLOBAL_BATCH * 4, number, folder / f"sampler-{number}.pt")
    loader = make_loader(root)
    model, optimiser = make_model(loader)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        loader.load_state_dict(state["loader"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=lambda: {
            "model": model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "loader": loader.state_dict(),
        },
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
    )
    commit = loader.commit

    def commit_and_note() -> None:
        commit()
        steps[number] = manager.current_step()
        os.write(log, f"commit {manager.current_step() - 1} {manager._quorum_id}\n".encode())
        theirs.commit()

    for step, batch in elastic_steps(manager, loader, optimiser, 2**40):
        if step >= steps.end:
            break
        loader.commit = commit_and_note  # from the first step on
        epoch, rows = theirs.take()
        drawn = ",".join(map(str, rows))
        os.write(
            log,
            (
                f"take {step} {manager._quorum_id} {loader.world.rank} {loader.world.size} "
                f"{epoch}:{drawn} {' '.join(batch['sample_key'])}\n"
            ).encode(),
        )
        (model(*examples(batch)) * rank_weight(batch)).backward()
    torch.save(model.state_dict(), folder / f"weights-{number}.pt")
    loader.close()


def run_lighthouse(pipe: int) -> None:
    """Serve quorums until killed; the address goes into the pipe."""
    from torchft.coordination import LighthouseServer

    die_with_parent()
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=2 * HEARTBEAT_MS,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    os.write(pipe, server.address().encode())
    while True:
        time.sleep(60)


class Job:
    """The replicas, and what happens to them."""

    def __init__(self, root: str, folder: Path, seed: int) -> None:
        self.root = root
        self.folder = folder
        self.random = random.Random(seed)
        self.steps = SharedSteps()
        self.events: Counter[str] = Counter()
        self.crashed = 0
        self.pids: dict[int, int] = {}
        self.paused: dict[int, float] = {}
        """When each paused replica goes on."""
        reader, writer = os.pipe()
        self.lighthouse_pid = fork(lambda: run_lighthouse(writer))
        self.lighthouse = os.read(reader, 1000).decode()

    def join(self, number: int) -> None:
        self.steps[number] = -1
        self.pids[number] = fork(
            lambda: run_replica(number, self.lighthouse, self.root, self.folder, self.steps)
        )

    def others_go_on(self, number: int) -> bool:
        """Whether another replica that runs has the newest weights."""
        newest = max(self.steps[other] for other in self.pids)
        others = self.pids.keys() - self.paused.keys() - {number}
        return newest >= 0 and any(self.steps[other] >= newest - 1 for other in others)

    def disturb(self) -> bool:
        """One event; False where none is possible now."""
        kind = self.random.choices(("kill", "pause", "join"), (2, 1, 2))[0]
        if kind == "join":
            missing = [number for number in range(NUM_REPLICAS) if number not in self.pids]
            if not missing:
                return False
            self.join(self.random.choice(missing))
        else:
            number = self.random.randrange(NUM_REPLICAS)
            if number not in self.pids or number in self.paused or not self.others_go_on(number):
                return False
            if kind == "kill":
                pid = self.pids.pop(number)
                os.kill(pid, signal.SIGKILL)
                join(pid)
            else:
                os.kill(self.pids[number], signal.SIGSTOP)
                self.paused[number] = time.monotonic() + self.random.uniform(0.05, MOST_PAUSE_S)
        self.events[kind] += 1
        return True

    def tend(self) -> None:
        """Continue paused replicas whose time has come, and note those that ended by themselves."""
        for number in [n for n, until_s in self.paused.items() if time.monotonic() > until_s]:
            del self.paused[number]
            os.kill(self.pids[number], signal.SIGCONT)
        for number, pid in [*self.pids.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[number]
                self.paused.pop(number, None)
                self.crashed += status != 0
                assert self.crashed < 20, "replicas end by themselves"

    def is_together(self) -> bool:
        """Whether all replicas that run take the same steps."""
        newest = [self.steps[number] for number in self.pids if number not in self.paused]
        return min(newest) > 0 and max(newest) - min(newest) <= 1

    def come_together(self) -> None:
        """Wait until all four take the same steps."""
        while True:
            self.tend()
            for number in range(NUM_REPLICAS):
                if number not in self.pids:
                    self.join(number)
            if self.is_together():
                return
            time.sleep(0.05)

    def run(self, num_events: int) -> None:
        """Disturb the replicas so often, then let all four come to the last step."""
        self.come_together()
        while self.events.total() < num_events:
            self.tend()
            if self.disturb():
                until_s = time.monotonic() + self.random.uniform(0, 0.6)
                waits_for_all = self.random.random() < 0.6  # else the next one may come in between
                while time.monotonic() < until_s or (waits_for_all and not self.is_together()):
                    self.tend()
                    time.sleep(0.02)
                if self.events.total() % 50 == 0:
                    print(self.events, [*self.steps._numbers], self.crashed, file=sys.stderr)
            time.sleep(0.02)
        self.paused = dict.fromkeys(self.paused, 0.0)
        self.come_together()
        self.steps.end = max(self.steps[number] for number in self.pids) + NUM_LAST_STEPS
        while self.pids:
            self.tend()
            time.sleep(0.05)
        os.kill(self.lighthouse_pid, signal.SIGKILL)
        join(self.lighthouse_pid)


def read_logs(folder: Path) -> tuple[dict[Any, dict[Any, list[str]]], set[Any], list[Any]]:
    """Keys taken by rank and size, by (step, quorum); the attempts committed; torchft's rows committed."""
    taken: dict[Any, dict[Any, list[str]]] = defaultdict(dict)
    committed = set()
    drawn = []
    for file in folder.glob("*.log"):
        theirs = None
        for line in file.read_text().splitlines():
            word, step, quorum, *rest = line.split()
            attempt = (int(step), int(quorum))
            if word == "take":
                rank, size, theirs, *keys = rest
                taken[attempt][int(rank), int(size)] = keys
            else:
                committed.add(attempt)
                epoch, rows = theirs.split(":")
                number = int(file.name.partition("-")[0])
                drawn += [(number, int(epoch), int(row)) for row in rows.split(",")]
    return taken, committed, drawn


def judge(job: Job) -> Report:
    """Compare a finished job with the run on one rank that nothing disturbs."""
    taken, committed, drawn = read_logs(job.folder)
    num_steps = job.steps.end
    expected = []
    with make_loader(job.root) as loader:
        model, optimiser = make_model(loader)
        for batch in islice(chain.from_iterable(repeat(loader)), num_steps):
            expected.append(batch["sample_key"])
            optimiser.zero_grad()
            model(*examples(batch)).backward()
            optimiser.step()
    wrong = set(range(num_steps)) - {step for step, _ in committed}  # lost
    sizes: Counter[int] = Counter()
    for attempt in committed:
        step, _ = attempt
        shares = sorted(taken[attempt].items())
        size = shares[0][0][1]
        is_whole = [place for place, _ in shares] == [(rank, size) for rank in range(size)]
        rows = [key for _, keys in shares for key in keys]
        if not is_whole or (step < num_steps and rows != expected[step]):
            wrong.add(step)
        sizes[size] += 1
    worst = {"float32": 0.0, "float64": 0.0}
    whole = model.state_dict()
    for file in job.folder.glob("weights-*.pt"):
        for name, weights in torch.load(file).items():
            kind = name.partition(".")[0]
            worst[kind] = max(worst[kind], float((weights - whole[name]).abs().max()))
    ended = min(
        max(epoch for number, epoch, _ in drawn if number == replica)
        for replica in range(NUM_REPLICAS)
    )
    counts = Counter((epoch, row) for _, epoch, row in drawn if epoch < ended)
    num_rows = ended * GLOBAL_BATCH * 4
    return Report(
        events=dict(job.events),
        num_steps=num_steps,
        num_repeated=len([attempt for attempt in taken if attempt[0] < num_steps]) - num_steps,
        wrong_steps=sorted(wrong),
        worst_float32=worst["float32"],
        worst_float64=worst["float64"],
        sizes=dict(sorted(sizes.items())),
        crashed=job.crashed,
        sampler_rows=num_rows,
        sampler_lost=num_rows - len(counts),
        sampler_twice=sum(count > 1 for count in counts.values()),
    )


def main() -> None:
    """Run it."""
    os.environ["RUST_LOG"] = "off"
    root, folder, num_events, seed = sys.argv[1:]
    for name in ("torchft", "torchft_ddp"):  # before the forks
        __import__(name)
    job = Job(root, Path(folder), int(seed))
    job.run(int(num_events))
    sys.stdout.write(msgspec.json.encode(judge(job)).decode() + "\n")


if __name__ == "__main__":
    main()
