"""The stage runner: order, bounds, failures, resizing, ending, whatever threads do."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import ChecksumError, StageError
from fuelrail.pipeline.runtime.stages import Pipeline, Stage


def run(source, *stages, **options):
    pipeline = Pipeline(iter(source), stages, name="test", **options)
    try:
        return list(pipeline)
    finally:
        pipeline.close()


def thread_names():
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("test-")
    )


def wait_until(condition):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


def jitter(value):
    time.sleep(Random(value).random() * 1e-3)
    return value


class RefusalError(Exception):
    pass


def refuse(value):
    raise RefusalError(f"not {value}")


class TestOrder:
    @given(
        num_items=st.integers(0, 40),
        threads=st.lists(
            st.tuples(st.integers(1, 5), st.integers(1, 6)),
            min_size=1,
            max_size=4,
        ),
        group=st.none() | st.integers(1, 7),
        in_bursts=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_results_come_in_the_sources_order_under_any_threads_and_capacities(
        self, num_items, threads, group, in_bursts
    ):
        stages = [
            Stage(f"s{n}", jitter, count, capacity, in_bursts=in_bursts)
            for n, (count, capacity) in enumerate(threads)
        ]
        expected = list(range(num_items))
        if group is not None:
            stages.append(Stage("group", list, 1, 1, group=group))
            expected = [expected[first : first + group] for first in range(0, num_items, group)]
        assert run(range(num_items), *stages) == expected
        assert thread_names() == []

    @given(
        changes=st.lists(
            st.tuples(st.integers(1, 6), st.integers(1, 5)),
            min_size=1,
            max_size=12,
        )
    )
    @settings(max_examples=25, deadline=None)
    def test_nor_does_changing_them_while_it_runs(self, changes):
        stages = [
            Stage("a", jitter, 2, 2, in_bursts=True),
            Stage("b", jitter, 1, 3),
        ]
        pipeline = Pipeline(iter(range(60)), stages, name="test")
        got = []
        for value, (threads, capacity) in zip(pipeline, itertools.cycle(changes), strict=False):
            got.append(value)
            pipeline.set_num_threads("a", threads)
            pipeline.set_capacity("a", capacity)
            pipeline.set_capacity("b", threads)
        assert got == list(range(60))
        assert thread_names() == []
        assert pipeline.clocks()[0].items == 60, (
            "every item is counted once, over threads that came and went"
        )

    def test_no_more_is_started_than_the_links_have_room_for(self):
        pulled = []

        def source():
            for number in range(100):
                pulled.append(number)
                yield number

        pipeline = Pipeline(
            source(),
            [Stage("a", int, 3, 2), Stage("b", int, 1, 2)],
            name="test",
        )
        next(pipeline)
        # Behind the one taken: 2 in the last link, 1 at "b", 2 in the first link, 3 at "a".
        wait_until(lambda: len(pulled) == 9)
        time.sleep(0.05)
        assert len(pulled) == 9
        pipeline.close()

    def test_a_thread_that_waited_makes_half_of_what_there_is_room_for_in_a_row(
        self,
    ):
        items = []
        work = [
            Stage(
                "a",
                lambda item: items.append(item) or item,
                1,
                6,
                in_bursts=True,
            )
        ]
        pipeline = Pipeline(iter(range(20)), work, name="test")
        # The one after those that have room is made, too, and waits.
        for num_taken, number in ((0, 7), (2, 7), (3, 10), (5, 10), (6, 13)):
            while pipeline._taken < num_taken:
                next(pipeline)
            wait_until(lambda number=number: len(items) >= number)
            time.sleep(0.02)
            assert len(items) == number
        pipeline.close()


def raise_(error):
    raise error


class TestFailures:
    @pytest.mark.parametrize(
        ("raised", "error", "words"),
        [
            (
                ChecksumError("differs", key="k"),
                ChecksumError,
                "sample k",
            ),  # errors of ours pass as they are
            (SystemExit(3), StageError, "SystemExit"),
            (StopIteration(), StageError, "StopIteration"),
        ],
    )
    def test_whatever_a_stage_raises_ends_the_epoch_with_an_error(self, raised, error, words):
        with pytest.raises(error, match=words):
            run(range(3), Stage("a", lambda _: raise_(raised), 2, 2))

    def test_an_exception_takes_its_items_place_and_tells_stage_item_and_line(
        self,
    ):
        pipeline = Pipeline(
            iter(range(5)),
            [Stage("a", lambda v: refuse(v) if v == 3 else v, 3, 4)],
            name="test",
        )
        got = []
        with pytest.raises(
            StageError,
            match=r"stage 'a' failed on 3: RefusalError: not 3 \(.*test_stages\.py:\d+ in refuse\)",
        ) as caught:
            got.extend(pipeline)
            got += list(pipeline)
        assert isinstance(caught.value.__cause__, RefusalError)
        assert next(pipeline, None) is None
        pipeline.close()
        assert thread_names() == []

    def test_items_before_it_are_handed_out(self):
        pipeline = Pipeline(
            iter(range(9)),
            [Stage("a", lambda v: refuse(v) if v == 3 else v, 3, 9)],
            name="test",
        )
        got = []
        with pytest.raises(StageError):
            for value in pipeline:
                got.append(value)
        assert got == [0, 1, 2]

    def test_a_failing_source(self):
        def source():
            yield 1
            raise RefusalError("no more")

        with pytest.raises(RefusalError, match="no more"):
            run(source(), Stage("a", int, 2, 2))

    def test_a_group_with_a_failure_in_it_fails_as_one(self):
        stages = [
            Stage("a", lambda v: refuse(v) if v == 4 else v, 2, 3),
            Stage("g", list, 1, 2, group=3),
        ]
        pipeline = Pipeline(iter(range(9)), stages, name="test")
        assert next(pipeline) == [0, 1, 2]
        with pytest.raises(StageError, match="on 4"):
            next(pipeline)

    def test_a_failure_waits_neither_for_the_rest_of_its_group_nor_for_what_is_under_way(
        self,
    ):
        reported = threading.Event()
        in_time = []
        stages = [
            Stage(
                "a",
                lambda v: refuse(v) if v == 0 else in_time.append(reported.wait(200)),
                2,
                3,
            ),
            Stage("g", list, 1, 2, group=3),
        ]
        pipeline = Pipeline(iter(range(9)), stages, name="test")
        with pytest.raises(StageError, match="on 0"):
            next(pipeline)
        reported.set()
        assert next(pipeline, None) is None
        pipeline.close()
        assert all(in_time)
        assert thread_names() == []


class TestClocks:
    def test_what_is_under_way_counts(self):
        gate = threading.Event()
        pipeline = Pipeline(
            iter(range(3)),
            [Stage("slow", lambda v: gate.wait(200), 1, 1)],
            name="test",
        )
        wait_until(lambda: pipeline.clocks()[0].busy_s > 0.01)
        first = pipeline.clocks()[0]
        second = pipeline.clocks()[0]
        assert first.items == 0
        assert second.busy_s > first.busy_s
        gate.set()
        pipeline.close()
        assert pipeline.clocks()[0].busy_s == pipeline.clocks()[0].busy_s, (
            "a closed pipeline's clocks stand still"
        )

    def test_starved_blocked_and_waited(self):
        def late():
            time.sleep(0.05)
            yield from range(3)

        pipeline = Pipeline(late(), [Stage("a", int, 1, 1)], name="test")
        next(pipeline)
        assert pipeline.waited_s > 0.03
        wait_until(lambda: pipeline.clocks()[0].blocked_s > 0.01)
        assert pipeline.clocks()[0].starved_s > 0.03
        pipeline.close()

    def test_the_observer_sees_every_item_with_the_batch_it_becomes_a_part_of(
        self,
    ):
        reports = []
        stages = [
            Stage("a", int, 3, 4),
            Stage("g", list, 1, 2, group=4),
            Stage("t", list, 1, 2),
        ]
        run(
            range(10),
            *stages,
            observer=lambda *reported: reports.append(reported),
        )
        assert all(begin <= end for _, _, _, begin, end in reports)
        assert sorted((stage, item, batch) for stage, item, batch, _, _ in reports) == sorted(
            [("a", n, n // 4) for n in range(10)]
            + [(stage, n, n) for stage in ("g", "t", "wait") for n in range(3)]
        )


class TestEnding:
    def test_close_in_the_middle_is_prompt_and_may_be_repeated(self):
        pipeline = Pipeline(
            itertools.count(),
            [Stage("a", jitter, 3, 2), Stage("b", jitter, 2, 2)],
            name="test",
        )
        next(pipeline)
        assert len(thread_names()) == 5
        pipeline.close()
        pipeline.close()
        assert thread_names() == []
        with pytest.raises(StopIteration):
            next(pipeline)
        pipeline.set_num_threads("a", 4)
        assert thread_names() == [], "no thread starts after the end"

    def test_dropping_it_ends_its_threads(self):
        pipeline = Pipeline(itertools.count(), [Stage("a", int, 2, 2)], name="test")
        next(pipeline)
        del pipeline
        gc.collect()
        assert thread_names() == []

    def test_collected_on_one_of_its_own_threads_it_ends_too(self):
        """Garbage collection runs wherever it likes; joining itself, or waiting for a lock it holds, would hang."""
        dropped = threading.Event()
        ran_on = []

        def collect(value):
            dropped.wait(200)
            gc.collect()
            return value

        pipeline = Pipeline(itertools.count(), [Stage("a", collect, 1, 2)], name="test")
        weakref.finalize(pipeline, lambda: ran_on.append(threading.current_thread().name))
        gc.disable()
        try:
            pipeline.myself = pipeline
            del pipeline
            dropped.set()
            wait_until(lambda: not thread_names())
        finally:
            gc.enable()
        assert ran_on == ["test-a-0"]

    def test_a_thread_that_does_not_end_is_named_in_the_log(self, monkeypatch, caplog):
        monkeypatch.setattr("fuelrail.pipeline.runtime.stages._JOIN_TIMEOUT_S", 0.05)
        gate = threading.Event()
        pipeline = Pipeline(
            iter(range(3)),
            [Stage("a", lambda v: gate.wait(200), 1, 1)],
            name="test",
        )
        wait_until(lambda: pipeline.clocks()[0].busy_s > 0)
        pipeline.close()
        assert "test-a-0" in caplog.text
        gate.set()
        wait_until(lambda: not thread_names())

    def test_results_and_items_are_not_kept_alive(self):
        class Thing:
            pass

        pipeline = Pipeline(iter(range(3)), [Stage("a", lambda v: Thing(), 1, 1)], name="test")
        alive = weakref.ref(next(pipeline))
        gc.collect()
        assert alive() is None
        pipeline.close()


def _python(code):
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


SETUP = """
import itertools, os, sys, time
from fuelrail.pipeline.errors import StageError
from fuelrail.pipeline.runtime.stages import Pipeline, Stage
pipeline = Pipeline(itertools.count(), [Stage("a", int, 3, 2), Stage("b", int, 2, 2)], name="test")
next(pipeline)
"""


class TestProcess:
    @pytest.mark.process
    def test_a_fork_says_what_is_wrong_and_both_interpreters_exit_while_it_runs(
        self,
    ):
        done = _python(
            SETUP
            + """
child = os.fork()
if child == 0:
    try:
        next(pipeline)
    except StageError as error:
        print(error, flush=True)
    pipeline.close()
    del pipeline  # and the interpreter's own exit, with its finalisers, follows
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), next(pipeline))
"""
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "was forked from it without its threads" in done.stdout
        assert done.stdout.splitlines()[-1] == "5 1", "the parent continues"

    @pytest.mark.process
    def test_threads_that_a_lost_finalizer_left_are_waited_for(self):
        """As after a Ctrl-C in the middle of closing: no thread may outlive the interpreter, it may be in C++ code."""
        done = _python(
            """
import threading, time
from fuelrail.pipeline.runtime.stages import Pipeline, Stage
entered = threading.Event()

def work(item):
    entered.set()
    time.sleep(0.3)
    print("done", flush=True)

pipeline = Pipeline(iter([1]), [Stage("a", work, 1, 1)], name="test")
entered.wait()
pipeline._finalizer.detach()
"""
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

    @pytest.mark.process
    def test_ctrl_c_reaches_a_consumer_that_waits(self):
        code = """
import sys, threading
from fuelrail.pipeline.runtime.stages import Pipeline, Stage
gate = threading.Event()
pipeline = Pipeline(iter([1]), [Stage("a", lambda v: gate.wait(0.5) or gate.wait(60), 1, 1)], name="test")
try:
    print("ready", flush=True)
    next(pipeline)
except KeyboardInterrupt:
    gate.set()
    pipeline.close()
    print(threading.active_count())
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=280)
        assert (process.returncode, output) == (0, "1\n")


class TestForeignCode:
    """Whatever raises in a thread, the consumer hears of it: a thread that died would leave it waiting for ever."""

    def test_an_observer_that_fails(self):
        def observer(stage, item, batch, begin_s, end_s):
            if stage == "double" and item == 2:
                raise RefusalError("full disk")

        stages = [
            Stage("double", lambda value: 2 * value, 2, 2),
            Stage("pass", lambda value: value, 1, 1),
        ]
        pipeline = Pipeline(iter(range(5)), stages, name="test", observer=observer)
        assert [next(pipeline), next(pipeline)] == [0, 2]
        with pytest.raises(
            StageError,
            match="the observer failed at stage 'double': RefusalError: full disk",
        ) as caught:
            next(pipeline)
        assert isinstance(caught.value.__cause__, RefusalError)
        assert next(pipeline, None) is None
        pipeline.close()
        assert thread_names() == []

    def test_an_observer_that_fails_does_not_hide_the_stages_own_failure(self):
        def observer(*reported):
            raise RefusalError("observer")

        with pytest.raises(StageError, match="stage 'refuse' failed on 0: RefusalError: not 0"):
            run(range(3), Stage("refuse", refuse, 1, 1), observer=observer)

    def test_an_observer_that_fails_on_the_consumers_thread(self):
        def observer(stage, *reported):
            if stage == "wait":
                raise RefusalError("here")

        with pytest.raises(
            StageError,
            match="the observer failed at stage 'wait': RefusalError: here",
        ):
            run(
                range(3),
                Stage("pass", lambda value: value, 1, 1),
                observer=observer,
            )
        assert thread_names() == []

    @pytest.mark.parametrize("group", [None, 2])
    def test_items_and_errors_without_a_text(self, group):
        class Mute(Exception):  # noqa: N818
            def __str__(self):
                raise ValueError("no text")

        def fail(item):
            raise Mute

        with pytest.raises(
            StageError,
            match=r"failed on a Mute without a text.*: Mute: a Mute without a text",
        ):
            run(
                [Mute(), Mute()],
                Stage(
                    name="fail",
                    work=fail,
                    num_threads=1,
                    capacity=1,
                    group=group,
                ),
            )
