"""Loops of torch under a clock of our own: each phase of a step has exactly its time."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fuelrail.bench.measure import recorder as module
from fuelrail.bench.measure.clock import ThreadTimes
from fuelrail.bench.measure.hooks import Hooks
from fuelrail.bench.measure.recorder import Recorder, num_rows
from fuelrail.bench.measure.records import PHASES, rank_path, read_rank
from support.fake_cuda import FakeCuda
from support.fake_streams import FakeEvent

WAIT, FORWARD, BACKWARD, UPDATE, SAVE, LOG = 2, 30, 50, 7, 11, 13


class Ticks:
    """A clock that moves only when it is told to, by what the loop does."""

    def __init__(self) -> None:
        self.ns = 1000

    def __deepcopy__(self, _: object) -> Ticks:
        return self

    def pass_by(self, ns: int) -> None:
        self.ns += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    read = types.SimpleNamespace(
        monotonic_ns=lambda: ticks.ns,
        process_time_ns=lambda: 0,
        sleep=lambda _: None,  # it takes no time
    )
    monkeypatch.setattr(module, "time", read)
    monkeypatch.setattr(module, "thread_times", lambda: ThreadTimes(ticks.ns // 2, 0))
    return ticks


class Backward(torch.autograd.Function):
    clock: Ticks

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        Backward.clock.pass_by(BACKWARD)
        return gradient


class Model(nn.Module):
    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.clock = clock
        self.inner = nn.Linear(2, 1)

    def forward(self, x):
        self.clock.pass_by(FORWARD)
        return Backward.apply(self.inner(x))


class Update(torch.optim.SGD):
    clock: Ticks

    def step(self, closure=None):
        self.clock.pass_by(UPDATE)
        return super().step(closure)


class SlowFile(io.BytesIO):
    clock: Ticks

    def write(self, data):
        if not self.tell():
            self.clock.pass_by(SAVE)
        return super().write(data)


class Loop:
    """The parts of a training loop, each of which takes its time."""

    def __init__(self, clock: Ticks, folder, **hooks) -> None:
        Backward.clock = Update.clock = SlowFile.clock = clock
        self.clock = clock
        self.folder = folder
        self.recorder = Recorder(folder, rank=0, world=1)
        self.model = Model(clock)
        self.optimizer = Update(self.model.parameters(), lr=0.1)
        self.hooks = Hooks(self.recorder, **hooks)

    def batch(self) -> torch.Tensor:
        self.recorder.ask()
        self.clock.pass_by(WAIT)
        batch = torch.ones(4, 2)
        self.recorder.got(batch)
        return batch

    def learn(self) -> None:
        self.model(self.batch()).sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batch: torch.Tensor, model: nn.Module | None = None) -> None:
        model = model or self.model
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()

    def end(self):
        self.recorder.close()
        self.hooks.remove()
        return read_rank(rank_path(self.folder, 0)).steps


@pytest.fixture
def loop(clock, tmp_path):
    made = Loop(clock, tmp_path)
    yield made
    made.hooks.remove()


def phases(step) -> dict[str, int]:
    assert sum(step.phase_ns(phase) for phase in PHASES) == step.wall_ns
    return {phase: time for phase in PHASES if (time := step.phase_ns(phase))}


PLAIN = {"data_wait": WAIT, "forward": FORWARD, "backward": BACKWARD, "optimiser": UPDATE}


def test_each_phase_has_its_own_time_and_what_comes_after_an_update_is_of_the_next_step(loop):
    for _ in range(4):
        loop.learn()
        loop.update()
        loop.clock.pass_by(LOG)
    steps = loop.end()
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert phases(steps[1]) == PLAIN | {"other": LOG}
    assert steps[1].start_ns == steps[0].end_ns
    assert steps[1].device_busy_ns == FORWARD + BACKWARD + UPDATE
    assert steps[1].cpu_ns == pytest.approx(steps[1].device_busy_ns / 2, abs=2)
    assert steps[1].num_samples == 4


def test_batches_up_to_an_update_are_one_step(loop):
    for _ in range(3):
        loop.learn()
        loop.learn()
        loop.update()
    step = loop.end()[1]
    assert phases(step) == {
        "data_wait": 2 * WAIT,
        "forward": 2 * FORWARD,
        "backward": 2 * BACKWARD,
        "optimiser": UPDATE,
    }
    assert step.num_samples == 8


def test_without_an_optimiser_of_torch_a_batch_is_a_step(loop):
    for _ in range(70):
        loop.learn()
    steps = loop.end()
    assert len(steps) == 6
    assert phases(steps[-1]) == {name: PLAIN[name] for name in ("data_wait", "forward", "backward")}


def test_the_loss_is_of_forward_and_clipping_of_the_optimiser(loop):
    for _ in range(2):
        loss = loop.model(loop.batch()).sum()
        loop.clock.pass_by(3)
        loss.backward()
        loop.clock.pass_by(4)
        loop.update()
    assert phases(loop.end()[1]) == PLAIN | {"forward": FORWARD + 3, "optimiser": UPDATE + 4}


@pytest.mark.parametrize("is_watched", [True, False], ids=["watched", "of-another-loader"])
def test_evaluation_with_its_batches_is_told_apart(loop, is_watched):
    for _ in range(4):
        loop.learn()
        loop.update()
    for _ in range(3):
        if not is_watched:
            loop.clock.pass_by(WAIT)
        loop.evaluate(loop.batch() if is_watched else torch.ones(1, 2))
    loop.learn()
    loop.update()
    step = loop.end()[4]
    assert step.details.evaluation_ns == 3 * (WAIT + FORWARD)
    assert phases(step) == PLAIN | {"other": 3 * (WAIT + FORWARD)}


def test_evaluation_of_a_module_that_was_not_called_before_is_told_apart(loop):
    for _ in range(6):
        loop.learn()
        loop.update()
    for count in (1, 2):
        for _ in range(count):
            loop.evaluate(torch.ones(1, 2), copy.deepcopy(loop.model))
        for _ in range(2):
            loop.learn()
            loop.update()
    steps = loop.end()
    assert [step.details.evaluation_ns for step in steps[5:]] == [0, FORWARD, 0, 2 * FORWARD, 0]


def test_a_teachers_pass_before_the_backward_pass_is_no_evaluation(loop):
    for _ in range(5):
        batch = loop.batch()
        loop.evaluate(batch)
        loop.model(batch).sum().backward()
        loop.update()
    step = loop.end()[4]
    assert phases(step) == PLAIN | {"forward": 2 * FORWARD}
    assert not step.details.evaluation_ns


def test_a_checkpoint_is_told_apart_also_after_an_evaluation(loop):
    for _ in range(3):
        loop.learn()
        loop.update()
        loop.evaluate(torch.ones(1, 2))
        torch.save(loop.model.inner.state_dict(), SlowFile())
    step = loop.end()[2]
    assert step.details.checkpoint_ns == SAVE
    assert step.details.evaluation_ns == FORWARD
    assert phases(step) == PLAIN | {"other": SAVE + FORWARD}


def test_a_transform_that_is_a_module_is_part_of_the_wait(loop):
    for _ in range(3):
        loop.recorder.ask()
        loop.model(torch.ones(1, 2))
        loop.recorder.got(torch.ones(4, 2))
        loop.model(torch.ones(4, 2)).sum().backward()
        loop.update()
    assert phases(loop.end()[2]) == PLAIN | {"data_wait": FORWARD}


def test_a_collective_is_told_apart(loop, monkeypatch, tmp_path):
    loop.hooks.remove()
    monkeypatch.setattr(dist, "all_reduce", lambda _: loop.clock.pass_by(5))
    averaged = Loop(loop.clock, tmp_path / "averaged")
    for _ in range(3):
        averaged.learn()
        dist.all_reduce(averaged.model.inner.weight.grad)
        averaged.update()
    assert phases(averaged.end()[1]) == PLAIN | {"all_reduce": 5}


def test_a_pause_and_the_step_after_it_are_in_no_record(loop):
    for number in range(6):
        loop.learn()
        loop.update()
        if number == 2:
            assert loop.recorder.is_at_border
            with loop.recorder.pause():
                loop.clock.pass_by(10_000)
    steps = loop.end()
    assert [phases(step) for step in steps] == [PLAIN] * 5
    assert steps[3].start_ns - steps[2].end_ns == 10_000 + sum(PLAIN.values())


def test_an_exception_in_a_phase_leaves_no_phase_open(loop):
    class Broken(Update):
        def step(self, closure=None):
            raise ValueError("no update")

    for _ in range(3):
        loop.learn()
        loop.update()
        loop.learn()
        with pytest.raises(ValueError, match="no update"):
            Broken(loop.model.parameters(), lr=0.1).step()
    assert phases(loop.end()[1])["forward"] == 2 * FORWARD


def test_passes_in_an_optimisers_closure_are_told_apart(loop):
    class Closing(Update):
        def step(self, closure=None):
            with torch.enable_grad():
                closure()
            return super().step()

    def learn():
        loss = loop.model(batch).sum()
        loop.clock.pass_by(3)
        loss.backward()

    optimizer = Closing(loop.model.parameters(), lr=0.1)
    for _ in range(3):
        batch = loop.batch()
        optimizer.step(learn)
    assert phases(loop.end()[1]) == PLAIN | {"forward": FORWARD + 3}


def test_logging_is_told_apart_and_divides_no_phase(loop):
    class SlowHandler(logging.Handler):
        def emit(self, record):
            loop.clock.pass_by(LOG)

    log = logging.getLogger("test of a watch")
    log.addHandler(SlowHandler())
    for _ in range(3):
        loop.learn()
        log.warning("between backward and update")
        loop.clock.pass_by(3)
        loop.update()
    step = loop.end()[1]
    assert step.details.logging_ns == LOG
    assert phases(step) == PLAIN | {"optimiser": UPDATE + 3, "other": LOG}


def test_only_the_given_optimisers_steps_count(clock, tmp_path):
    loop = Loop(clock, tmp_path, optimizer=(given := torch.optim.SGD([nn.Parameter()], lr=1)))
    for _ in range(4):
        loop.learn()
        loop.update()
    given.step()
    assert len(loop.end()) == 1


def test_a_fault_of_the_recorder_is_a_warning_and_the_training_goes_on(clock, tmp_path):
    (tmp_path / "file").touch()
    loop = Loop(clock, tmp_path / "file")
    before = loop.model.inner.weight.clone()
    with pytest.warns(RuntimeWarning, match="the watch ended, the training goes on: FileExists"):
        for _ in range(3):
            loop.learn()
            loop.update()
    loop.hooks.remove()
    assert not loop.recorder.is_recording
    assert not torch.equal(before, loop.model.inner.weight)


def test_copies_and_pickles_of_the_model_have_no_hooks_of_ours(loop):
    loop.learn()
    copied = copy.deepcopy(loop.model.inner)
    assert loop.model._forward_pre_hooks
    data = pickle.dumps(loop.model._forward_pre_hooks)
    assert b"fuelrail" not in data
    for hook in pickle.loads(data).values():
        assert hook(copied, ()) is None
        assert hook(copied, (), ()) is None


def test_torch_is_left_as_it_was(clock, tmp_path):
    def patched() -> list[object]:
        return [
            torch.autograd.backward,
            torch.save,
            logging.Logger.handle,
            nn.Module.train,
            dist.all_reduce,
            dist.Work.wait,
            torch.utils.data.DataLoader.__iter__,
            torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
            len(torch.nn.modules.module._global_forward_pre_hooks),
            len(_global_optimizer_pre_hooks),
        ]

    before = patched()
    loop = Loop(clock, tmp_path)
    assert all(now != then for now, then in zip(patched(), before, strict=True))
    loop.learn()
    loop.hooks.remove()
    assert patched() == before
    assert not loop.model._forward_pre_hooks
    assert not loop.model._forward_hooks


def test_a_long_run_has_few_records_that_sum_up_all_its_steps(loop, monkeypatch):
    monkeypatch.setattr(module, "_NUM_RECORDS", 8)
    for _ in range(100):
        loop.learn()
        loop.update()
    steps = loop.end()
    # By the number of steps alone: records of all ranks are of the same ones.
    numbers = [step.details.num_steps for step in steps]
    assert numbers == [1] * 8 + [2] * 4 + [4] * 4 + [8] * 4 + [16] * 2 + [4]
    assert [step.step + 1 for step in steps] == list(itertools.accumulate(numbers))
    assert sum(step.forward_ns for step in steps) >= 98 * FORWARD
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(steps))
    for step in steps:
        phases(step)


def test_memory_does_not_grow_where_no_step_is_made(loop):
    for _ in range(2000):
        loop.batch()
    assert len(loop.recorder._marks) <= module._MAX_MARKS


def test_events_are_read_once_the_device_has_passed_them_and_nothing_waits(
    loop, monkeypatch, tmp_path
):
    with FakeCuda(monkeypatch) as fake:

        def refuse(*_):
            raise AssertionError("the watch waits for the device")

        loop.recorder.use_device(torch.device("cuda", 0))
        monkeypatch.setattr(FakeEvent, "synchronize", refuse)
        passed = set()
        monkeypatch.setattr(FakeEvent, "query", lambda event: event in passed)
        monkeypatch.setattr(FakeEvent, "record", lambda event: made.append(event))
        made: list[FakeEvent] = []
        for _ in range(3):
            loop.learn()
            loop.update()
        loop.batch()
        assert not read_rank(rank_path(tmp_path, 0)).steps
        assert fake.copies == []
        passed.update(made)
        loop.learn()
        loop.update()
        steps = loop.end()
    # Between any two events the fake device takes a millisecond.
    assert len(steps) >= 3
    assert steps[1].forward_ns == 2_000_000
    assert steps[1].host_to_device_ns == 1_000_000
    assert steps[1].launch_ns == FORWARD + BACKWARD + UPDATE
    assert phases(steps[1])["data_wait"] == 1_000_000


def test_waits_for_values_of_the_device_are_counted_and_nvml_is_asked(clock, monkeypatch, tmp_path):
    card = types.SimpleNamespace(
        NVML_CLOCK_SM=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda _: 0,
        nvmlDeviceGetUtilizationRates=lambda _: types.SimpleNamespace(gpu=40, memory=10),
        nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(used=2**30),
        nvmlDeviceGetClockInfo=lambda *_: 1500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", card)
    original = torch.Tensor.item
    with FakeCuda(monkeypatch):
        weight = nn.Parameter(torch.ones(1, device="cuda"))
        model = nn.ParameterList([weight])
        loop = Loop(clock, tmp_path, models=[model])
        loop.learn()
        loop.update()
        weight.detach().item()
        torch.ones(1).item()
        loop.learn()
        loop.update()
        loop.learn()
        loop.end()
    log = read_rank(rank_path(tmp_path, 0))
    assert [step.details.sync_ns > 0 for step in log.steps] == [True, False]
    assert (log.gpu.kernels, log.gpu.peak_memory_bytes) == (0.4, 2**30)
    assert torch.Tensor.item is original


def test_rows_are_counted_without_touching_the_batch():
    def never():
        raise AssertionError("read")
        yield

    assert num_rows(torch.ones(3, 2)) == 3
    assert num_rows({"name": "x", "x": torch.ones(5)}) == 5
    assert num_rows([torch.tensor(1.0), torch.ones(7, 1)]) == 7
    assert num_rows(never()) == 0
    assert num_rows(None) == 0
