"""Requests under faults: hedged, retried, bounded in number, on an event loop whose clock moves only by waiting."""

from __future__ import annotations

import asyncio
import functools
import selectors

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.loaders.storage.requests import (
    FetchFailedError,
    Latencies,
    Requester,
)
from fuelrail.pipeline.storage.retry import RetryPolicy

RETRY = RetryPolicy(deadline_s=5.0, attempt_timeout_s=2.0, first_delay_s=0.001, max_delay_s=0.01)
PATIENT = RetryPolicy(deadline_s=100.0, attempt_timeout_s=2.0, first_delay_s=1e9, max_delay_s=1e9)
NEVER = float("inf")
DATA = b"12345678"


class Loop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: where it would, its clock has moved on by that. No machine is too slow."""

    def __init__(self):
        self.now_s = 0.0
        super().__init__(selectors.DefaultSelector())
        select = self._selector.select

        def advance(timeout=None):
            self.now_s += timeout or 0.0
            return select(0)

        self._selector.select = advance

    def time(self):
        return self.now_s


def run(work):
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)


def on_that_loop(test):
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def run_it(*arguments):
        run(test(*arguments))

    return run_it


def requester(retry=RETRY, min_hedge_s=0.01, **options):
    return Requester(retry, min_hedge_s=min_hedge_s, **options)


class Server:
    """Answers after the given delays in turn, then at once; an exception stands for a fault, None for a stall."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = self.cancelled = self.at_once = self.most_at_once = 0

    async def get(self):
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = self.answers.pop(0) if self.answers else 0.0
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, bytes):
                return answer
            await asyncio.sleep(60.0 if answer is None else answer)
            return DATA
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1

    async def fetched(self, client):
        return bytes(await client.fetch(self.get, len(DATA)))


def fetch(client, server, count=1):
    async def work():
        return await asyncio.gather(
            *(server.fetched(client) for _ in range(count)),
            return_exceptions=True,
        )

    return run(work())


async def get_used_to(client):
    """Let a requester know what is usual: answers at once."""
    for _ in range(30):
        await Server().fetched(client)


@given(st.lists(st.floats(0, 100), max_size=500), st.floats(0, 1, exclude_max=True))
def test_quantiles_are_those_of_the_recent_latencies(latencies, part):
    recorder = Latencies()
    for latency in latencies:
        recorder.add(latency)
    recent = sorted(latencies[-200:])
    expected = None if len(recent) < 20 else recent[min(len(recent) - 1, int(part * len(recent)))]
    assert recorder.quantile(part) == expected


class TestRetries:
    def test_faults_are_tried_again_and_counted(self):
        client = requester()
        server = Server(OSError("a"), TimeoutError(), ConnectionResetError())
        assert fetch(client, server) == [DATA]
        assert (client.requests, client.request_bytes, client.retries) == (
            1,
            len(DATA),
            3,
        )

    def test_what_is_final_is_not(self):
        server = Server(PermissionError("no"))
        (error,) = fetch(requester(), server)
        assert isinstance(error, FetchFailedError)
        assert (error.fault.kind, error.num_attempts, server.calls) == (
            "refused",
            1,
            1,
        )

    def test_the_deadline_holds(self):
        client = requester(RetryPolicy(deadline_s=0.2, first_delay_s=0.001, max_delay_s=0.01))
        (error,) = fetch(client, Server(*[OSError("down")] * 10_000))
        assert isinstance(error, FetchFailedError)
        assert error.fault.kind == "transient"
        assert error.num_attempts > 5

    def test_waiting_for_ones_turn_does_not_count(self):
        retry = RetryPolicy(
            deadline_s=0.1,
            attempt_timeout_s=2.0,
            first_delay_s=0.001,
            max_delay_s=0.01,
        )
        server = Server(*[0.06] * 5, OSError("x"))
        answers = fetch(requester(retry, min_hedge_s=NEVER, places=1), server, 6)
        assert answers == [DATA] * 6

    def test_the_first_retry_is_at_once_and_the_next_are_not(self):
        client = requester(PATIENT)
        server = Server(OSError("x"))
        assert fetch(client, server) == [DATA]
        (error,) = fetch(client, Server(OSError("x"), OSError("y")))
        assert error.num_attempts == 2

    def test_when_many_fail_only_a_few_come_back_at_once(self):
        answers = fetch(requester(PATIENT, places=64), Server(*[OSError("down")] * 50), 50)
        assert 10 <= sum(isinstance(answer, bytes) for answer in answers) <= 15

    @on_that_loop
    async def test_a_retry_keeps_its_place(self):
        client = requester(places=1)
        answered = []

        async def fetch_and_note(name, server):
            await server.fetched(client)
            answered.append(name)

        servers = [Server(OSError("x")), *(Server(0.001) for _ in range(5))]
        await asyncio.gather(*(fetch_and_note(*pair) for pair in enumerate(servers)))
        assert answered[0] == 0

    def test_a_stall_ends_with_the_attempts_time(self):
        client = requester(
            RetryPolicy(deadline_s=5.0, attempt_timeout_s=0.05, first_delay_s=0.001),
            min_hedge_s=NEVER,
        )
        server = Server(None, None)
        assert fetch(client, server) == [DATA]
        assert (server.calls, server.cancelled, client.retries) == (3, 2, 2)

    def test_short_answers_are_tried_again_and_then_mean_a_cut_file(self):
        assert fetch(requester(), Server(b"1", b"12")) == [DATA]
        (error,) = fetch(requester(), Server(*[b"1"] * 5))
        assert error.fault.kind == "cut"
        assert error.num_attempts == 3

    def test_too_long_an_answer_means_a_server_without_ranges(self):
        (error,) = fetch(requester(), Server(DATA * 2))
        assert error.fault.kind == "invalid"


class TestHedging:
    @on_that_loop
    async def test_a_stalled_request_is_overtaken_by_a_second_one(self):
        client = requester()
        await get_used_to(client)
        server = Server(None)
        assert await server.fetched(client) == DATA
        await asyncio.sleep(0)
        assert (server.calls, server.cancelled) == (2, 1)
        assert (client.hedges, client.hedges_won, client.retries) == (1, 1, 0)

    @on_that_loop
    async def test_a_first_that_comes_after_all_counts_and_ends_the_second(
        self,
    ):
        client = requester(min_hedge_s=0.1)
        await get_used_to(client)
        server = Server(0.2, None)
        await server.fetched(client)
        await asyncio.sleep(0)
        assert (server.calls, server.cancelled, server.at_once) == (2, 1, 0)
        assert (client.hedges, client.hedges_won) == (1, 0)

    @on_that_loop
    async def test_a_storage_that_is_slow_as_a_whole_is_not_asked_twice_as_much(
        self,
    ):
        client = requester(places=64)
        await get_used_to(client)
        slow = Server(*[0.05] * 2000)
        await asyncio.gather(*(slow.fetched(client) for _ in range(200)))
        assert client.hedges <= 10 + 0.1 * 231
        assert slow.calls <= 200 + client.hedges

    @on_that_loop
    async def test_a_hedge_can_stall_too(self):
        client = requester()
        await get_used_to(client)
        assert await Server(None, None, None).fetched(client) == DATA
        assert (client.hedges, client.hedges_won, client.retries) == (3, 1, 0)

    @on_that_loop
    async def test_without_budget_it_waits_for_the_others_to_be_done(self):
        client = requester(places=8)
        client._extra = -1e9
        await get_used_to(client)
        stalled = Server(None)
        busy = Server(*[0.1] * 7)
        task = asyncio.create_task(stalled.fetched(client))
        await asyncio.gather(*(busy.fetched(client) for _ in range(7)))
        calls = stalled.calls
        await task
        assert (calls, busy.calls) == (1, 7)
        assert (client.hedges, client.hedges_won) == (1, 1)

    @on_that_loop
    async def test_a_stall_at_the_start_is_seen_as_soon_as_it_is_known_what_is_usual(
        self,
    ):
        client = requester(RetryPolicy(deadline_s=5.0, attempt_timeout_s=2.0))
        stalled = asyncio.create_task(Server(None).fetched(client))
        await get_used_to(client)
        await stalled
        assert (client.hedges, client.hedges_won, client.retries) == (1, 1, 0)

    def test_a_fault_does_not_wait_for_the_hedge(self):
        server = Server(OSError("x"))
        client = requester(min_hedge_s=30.0)
        fetch(client, server)
        assert (server.calls, client.hedges) == (2, 0)


def slow_down():
    error = OSError("slow down")
    error.status = 503
    return error


class TestLimit:
    def test_no_more_at_once_than_there_are_places(self):
        client = requester(min_hedge_s=NEVER, places=3)
        server = Server(*[0.002] * 40)
        assert len(fetch(client, server, 40)) == 40
        assert server.most_at_once == 3

    def test_it_narrows_when_asked_to_slow_down_and_widens_again(self):
        patient = RetryPolicy(
            deadline_s=1e9,
            attempt_timeout_s=2.0,
            first_delay_s=0.001,
            max_delay_s=0.01,
        )
        client = requester(patient, min_hedge_s=NEVER, places=32)
        fetch(client, Server(*[slow_down() for _ in range(32)]), 32)
        assert client.width < 32
        fetch(client, Server(*[slow_down() for _ in range(500)]), 1)
        assert client.width == 1
        server = Server(*[0.002] * 2000)
        fetch(client, server, 2000)
        assert (client.width, server.most_at_once) == (32, 32)

    def test_a_few_busy_answers_change_nothing(self):
        client = requester(min_hedge_s=NEVER, places=16)
        fetch(
            client,
            Server(*[0.001 if number % 50 else slow_down() for number in range(1000)]),
            980,
        )
        assert client.width == 16

    @on_that_loop
    async def test_who_gives_up_waiting_leaves_no_hole(self):
        client = requester(min_hedge_s=NEVER, places=1)
        first = asyncio.create_task(Server(0.02).fetched(client))
        await asyncio.sleep(0)
        servers = [Server() for _ in range(4)]
        waiting = [asyncio.create_task(server.fetched(client)) for server in servers]
        await asyncio.sleep(0)
        waiting[1].cancel()
        waiting[3].cancel()
        await asyncio.gather(first, *waiting, return_exceptions=True)
        assert [server.calls for server in servers] == [1, 0, 1, 0]
        assert await Server().fetched(client) == DATA


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_what_is_not_a_fault_of_storage_is_reported_at_once(kind):
    (error,) = fetch(requester(), Server(kind("bug")))
    assert isinstance(error, FetchFailedError)
    assert error.fault.kind == "invalid"
    assert "bug" in error.fault.text
