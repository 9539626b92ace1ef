"""Requests to a storage that sometimes fails or stalls: retried, hedged, limited in number.

::

    acquire a place --> attempt --> answer
                        |  no answer within the p95 of recent ones: a second, equal request;
                        |  the first answer counts
                        |  fault or time-out: wait in its place (backoff, jitter), again until the
                        |  deadline

*Hedging* (Dean and Barroso, "The Tail at Scale", CACM 2013) takes the tail off at the cost of a few
per cent more requests. A budget keeps it at that: when all of storage is slow, second requests
would only make it slower. From the same budget comes the first retry of a request, at once: one
fault says nothing of the next request. When many fail the budget is spent, and they back off.

The number of requests in flight is limited. The limit decreases by 30 % while more than a fifth of
the answers are "slow down", and increases again by an eighth in each round with fewer of them. A
request that waits to be tried again keeps its place: somebody waits for it already.

Everything here runs on one event loop and needs no locks.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

from fuelrail.pipeline.storage.retry import (
    Fault,
    FaultKind,
    RetryPolicy,
    fault_of,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

_RECENT: Final = 200
_ENOUGH: Final = 20
"""Number of answers from which the usual time is estimated."""
_EXTRA_REQUESTS: Final = 10.0
"""Hedges and immediate retries that may come together after a quiet time."""
_EXTRA_PART: Final = 0.1
"""Extra requests for each request, not counting those made while few others are in flight."""
_USUAL: Final = 0.95
"""The share of recent answers that took no longer than the usual time."""
_FIRST_HEDGE_S: Final = 1.0
"""The time before a hedge until enough answers show what is usual."""
_LOOK_AGAIN_S: Final = 0.1
"""How long an estimate of the usual time holds."""
_SHORT_ANSWERS: Final = 3
"""This many short answers in a row mean that the file ends there."""


class FetchFailedError(Exception):
    """A request that failed after all retries, because of ``fault``; the caller adds shard,
    offset and key.
    """

    def __init__(
        self,
        fault: Fault,
        num_attempts: int,
        elapsed_s: float,
    ) -> None:
        super().__init__(fault.text)
        self.fault = fault
        self.num_attempts = num_attempts
        self.elapsed_s = elapsed_s


class Latencies:
    """The last 200 latencies, sorted too, for quantiles at the price of two bisections."""

    def __init__(self) -> None:
        self._recent: collections.deque[float] = collections.deque()
        self._sorted: list[float] = []

    def add(self, latency_s: float) -> None:
        """Count one more."""
        if len(self._recent) == _RECENT:
            oldest_s = self._recent.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest_s)]
        self._recent.append(latency_s)
        bisect.insort(self._sorted, latency_s)

    def quantile(self, part: float) -> float | None:
        """Return the latency that ``part`` of the recent ones did not exceed; None before there
        are enough of them.
        """
        if len(self._sorted) < _ENOUGH:
            return None
        number = int(part * len(self._sorted))
        return self._sorted[min(number, len(self._sorted) - 1)]


class Requester:
    """Makes requests, at most ``places`` at a time, and a second one after ``min_hedge_s`` at the
    earliest.

    Counters: ``requests`` answered and their ``request_bytes``, ``retries``, ``hedges``,
    ``hedges_won``.
    """

    def __init__(
        self,
        retry: RetryPolicy,
        storage_options: Mapping[str, Any] | None = None,
        on_fault: Callable[[Fault], None] | None = None,
        *,
        places: int = 64,
        min_hedge_s: float = 0.02,
    ) -> None:
        self._retry = retry
        self._min_hedge_s = min_hedge_s
        self._options = storage_options
        self._on_fault = on_fault
        self._place = asyncio.Semaphore(places)
        self._num_places = places
        self._num_taken = 0
        self.width = places
        self._surplus = 0
        """Requests that may be in flight, and places that are too many for that and still taken."""
        self._answers = self._throttles = 0  # of this round
        self._latencies = Latencies()
        self._extra = _EXTRA_REQUESTS
        self.requests = self.request_bytes = self.retries = self.hedges = self.hedges_won = 0

    async def fetch(
        self, get: Callable[[], Coroutine[Any, Any, Buffer]], length: int
    ) -> memoryview:
        """Return the ``length`` bytes that ``get()`` brings. Raise FetchFailedError."""
        loop = asyncio.get_running_loop()
        await self._place.acquire()
        self._num_taken += 1
        started = loop.time()  # the deadline is for storage, not for the queue in front of it
        failures = 0
        num_short = 0
        try:
            while True:
                try:
                    data = await self._attempt(get, started + self._retry.deadline_s)
                    view = memoryview(data).cast("B")
                    if len(view) == length:
                        self.requests += 1
                        self.request_bytes += length
                        self._count()
                        return view
                    if len(view) > length:
                        text = f"the server sent {len(view)} bytes for a range of {length}"
                        fault = Fault("invalid", f"{text}: it does not serve byte ranges")
                    else:
                        num_short += 1
                        kind: FaultKind = "transient" if num_short < _SHORT_ANSWERS else "cut"
                        text = f"the answer came short: {len(view)} of {length} bytes"
                        fault = Fault(kind, text)
                except Exception as error:  # noqa: BLE001 - any library's; fault_of classifies them
                    fault = fault_of(error, self._options)
                failures += 1
                if fault.kind == "throttled":
                    self._count(throttled=True)
                at_once = failures == 1 and not fault.is_final and self._may_ask_once_more()
                pause_s = 0.0 if at_once else self._retry.delay_s(failures, random.random())
                elapsed_s = loop.time() - started
                if fault.is_final or elapsed_s + pause_s >= self._retry.deadline_s:
                    raise FetchFailedError(fault, failures, elapsed_s)
                self.retries += 1
                if self._on_fault is not None:
                    self._on_fault(fault)
                await asyncio.sleep(pause_s)
        finally:
            self._num_taken -= 1
            self._give_back(1)

    async def _attempt(
        self, get: Callable[[], Coroutine[Any, Any, Buffer]], deadline: float
    ) -> Buffer:
        """Make one request and perhaps its hedges; the first answer counts, the others are given
        up.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        # Ten times the usual time, at least 2 s, within the policy's limit.
        limit_s = self._retry.attempt_timeout_s
        usual_s = self._latencies.quantile(_USUAL)
        if usual_s is not None:
            limit_s = min(limit_s, max(2.0, 10 * usual_s))
        end = min(deadline, began + limit_s)
        self._extra = min(_EXTRA_REQUESTS, self._extra + _EXTRA_PART)
        tasks = {loop.create_task(get())}
        first = next(iter(tasks))
        num_sent = 1
        sent_at = began
        error: BaseException = TimeoutError(f"no answer within {end - began:.1f} s")
        try:
            while tasks:
                now = loop.time()
                if now >= end:
                    self._latencies.add(end - began)  # at least that long
                    break
                usual_s = self._latencies.quantile(_USUAL)
                hedge_s = max(_FIRST_HEDGE_S if usual_s is None else usual_s, self._min_hedge_s)
                look_at = sent_at + 2 ** (num_sent - 1) * hedge_s  # a hedge can stall too
                if now >= look_at:
                    if self._num_taken * 4 <= self.width or self._may_ask_once_more():
                        self.hedges += 1
                        num_sent += 1
                        sent_at = now
                        tasks.add(loop.create_task(get()))
                        continue
                    look_at = now + hedge_s
                # By then more may be known of what is usual.
                timeout_s = min(look_at, end, now + _LOOK_AGAIN_S) - now
                done, _ = await asyncio.wait(
                    tasks,
                    timeout=timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    tasks.discard(task)
                    if task.exception() is None:
                        self._latencies.add(loop.time() - began)
                        self.hedges_won += task is not first
                        return task.result()
                    error = task.exception() or error
            raise error
        finally:
            for task in tasks:
                task.cancel()
                # Read an abandoned request's outcome, or asyncio warns that nobody retrieved it.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _count(self, *, throttled: bool = False) -> None:
        """Count an answer or a "slow down"; change the limit after a round of as many as there
        are places, or 16.
        """
        self._answers += 1
        self._throttles += throttled
        if self._answers < max(16, self.width):
            return
        if self._throttles * 5 > self._answers:
            narrower = max(1, int(self.width * 0.7))
            self._surplus += self.width - narrower
            self.width = narrower
        else:
            wider = min(self.width + max(1, self.width // 8), self._num_places)
            self._give_back(wider - self.width)
            self.width = wider
        self._answers = self._throttles = 0

    def _give_back(self, places: int) -> None:
        """Free places, but for those that are too many."""
        gone = min(places, self._surplus)
        self._surplus -= gone
        for _ in range(places - gone):
            self._place.release()

    def _may_ask_once_more(self) -> bool:
        """Take one request out of the budget of extra ones, if there is one."""
        if self._extra < 1.0:
            return False
        self._extra -= 1.0
        return True
