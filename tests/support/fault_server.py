"""An HTTP file server on loopback that fails on request: latency, errors, stalls, cuts, wrong bytes, absence.

It serves the files of one folder with byte ranges and keep-alive, and asks its ``misbehave`` function about each
request what is to go wrong. It runs on an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

_REASONS = {
    200: "OK",
    206: "Partial Content",
    403: "Forbidden",
    404: "Not Found",
    416: "Range Not Satisfiable",
}


class Request(NamedTuple):
    """What the client wants: file name, first and last+1 byte (None: all), how many requests there were before."""

    name: str
    start: int | None
    end: int | None
    number: int
    headers: dict[str, str]


class Misbehaviour(NamedTuple):
    """What goes wrong with one answer; the default is nothing."""

    latency_s: float = 0.0
    status: int | None = None
    """Answer with this status and nothing else."""
    stall_s: float = 0.0
    """Send headers and half of the bytes, then pause."""
    hang_up: bool = False
    """Close the connection in place of an answer."""
    cut: bool = False
    """Promise all bytes, send half, close."""
    short: bool = False
    """Promise and send one byte less than asked for."""
    flip: bool = False
    """Change one byte: another one in each answer."""
    ignore_range: bool = False
    """Answer with the whole file."""


GOOD = Misbehaviour()


def well_behaved(_request: Request) -> Misbehaviour:
    """Nothing goes wrong."""
    return GOOD


def faulty(
    latency_s: float, part: float, seed: int, stall_s: float = 60.0
) -> Callable[[Request], Misbehaviour]:
    """``part`` of the requests fail: 503, a hang-up, a cut answer or a stall, at random; all wait first."""
    draw = random.Random(seed)
    kinds = (
        Misbehaviour(latency_s, status=503),
        Misbehaviour(latency_s, hang_up=True),
        Misbehaviour(latency_s, cut=True),
        Misbehaviour(latency_s, stall_s=stall_s),
    )
    good = Misbehaviour(latency_s)

    def misbehave(_request: Request) -> Misbehaviour:
        return draw.choice(kinds) if draw.random() < part else good

    return misbehave


class FaultServer:
    """The server, in a thread; use as a context manager.

    ``misbehave`` may be exchanged at any time. ``requests`` lists what was asked for so far.
    """

    def __init__(
        self,
        folder: Path,
        misbehave: Callable[[Request], Misbehaviour] = well_behaved,
        port: int = 0,
    ) -> None:
        self.folder = folder
        self.misbehave = misbehave
        self.port = port
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-server", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the folder is served."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.come_up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.go_down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def come_up(self) -> None:
        """Listen, on the same port as before."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def go_down(self) -> None:
        """Stop listening and drop all connections: the port refuses."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    def serve(self) -> None:
        """Serve in this thread until interrupted, telling the port on standard output."""
        self._loop.run_until_complete(self._listen())
        print(self.port, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            self._loop.run_forever()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        # Nothing is accepted from now on; what was just now gets some turns of the loop until it is served. asyncio
        # closes nothing of a connection whose server is closed, or whose task is cancelled, before it began.
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        for _ in range(10):
            await asyncio.sleep(0)
        self._server.close()
        # Connections being served, and those that were accepted just now: on this loop there are no other tasks.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.005)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.CancelledError,
        ):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is to end."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return False
        line, *fields = head.rstrip().split("\r\n")
        method, path, _ = line.split(" ", 2)
        headers = {
            k.strip().lower(): v.strip() for k, _, v in (field.partition(":") for field in fields)
        }
        match = re.match(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        start = int(match[1]) if match else None
        end = int(match[2]) + 1 if match and match[2] else None
        request = Request(
            name=path.partition("?")[0].lstrip("/"),
            start=start,
            end=end,
            number=len(self.requests),
            headers=headers,
        )
        self.requests.append(request)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._respond(
                request,
                self.misbehave(request),
                writer,
                wants_body=method == "GET",
            )
        finally:
            self._at_once -= 1

    async def _respond(
        self,
        request: Request,
        how: Misbehaviour,
        writer: asyncio.StreamWriter,
        *,
        wants_body: bool,
    ) -> bool:
        await asyncio.sleep(how.latency_s)
        if how.hang_up:
            return False
        file = self.folder / request.name
        if how.status is not None or not file.is_file():
            return await self._send(writer, how.status or 404, b"", 0)
        size = file.stat().st_size
        ranged = request.start is not None and not how.ignore_range
        start = request.start or 0 if ranged else 0
        end = min(size, request.end or size) if ranged else size
        if start >= size > 0:
            return await self._send(writer, 416, b"", 0)
        if how.short:
            end -= 1
        with file.open("rb") as stream:
            stream.seek(start)
            body = bytearray(stream.read(end - start)) if wants_body else bytearray()
        if how.flip:
            body[(len(body) // 2 + request.number) % len(body)] ^= 0xFF
        status = 206 if ranged else 200
        extra = f"Content-Range: bytes {start}-{end - 1}/{size}\r\n" if ranged else ""
        if how.cut or how.stall_s:
            half = memoryview(body)[: len(body) // 2]
            await self._send(writer, status, half, end - start, extra)
            await asyncio.sleep(how.stall_s)
            if how.cut:
                return False
            writer.write(memoryview(body)[len(body) // 2 :])
            await writer.drain()
            return True
        return await self._send(writer, status, body, end - start, extra)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes | bytearray | memoryview,
        length: int,
        extra: str = "",
    ) -> bool:
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\nContent-Length: {length}\r\n"
            f"Accept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\n{extra}\r\n"
        )
        writer.write(head.encode("latin-1"))
        if len(body):
            writer.write(body)
        await writer.drain()
        return True
