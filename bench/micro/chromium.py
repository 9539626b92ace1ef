"""A page in headless Chromium, by the DevTools protocol over two pipes.

::

    with open_page("http://127.0.0.1:8000/", profile) as page:
        page.wait("document.querySelector('img').complete")
        assert not page.complaints
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_LIMIT_S = 60
_CODES = {"Tab": 9, "Enter": 13}
_TEXTS = {"Enter": "\r"}


class Page:
    """One page. ``complaints`` are its console's warnings and errors, exceptions, and refused
    loads.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing
        self._numbers = itertools.count(1)
        self._data = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return what the browser answers to a command of the DevTools protocol."""
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._writing, json.dumps(request).encode() + b"\0")
        answer: dict[str, Any] = {}
        while answer.get("id") != number:
            while b"\0" not in self._data:
                readable, _, _ = select.select([self._reading], [], [], _LIMIT_S)
                assert readable, "chromium does not answer"
                part = os.read(self._reading, 1 << 20)
                assert part, "chromium ended"
                self._data += part
            text, _, self._data = self._data.partition(b"\0")
            answer = json.loads(text)
            event = answer.get("params", {})
            match answer.get("method"):
                case "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(event["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    self.complaints.append(json.dumps(event["args"]))
                case "Log.entryAdded":
                    self.complaints.append(json.dumps(event["entry"])[:500])
                case "Page.javascriptDialogOpening":
                    self.complaints.append("a dialog opened")
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def run(self, expression: str) -> Any:
        """Return the value of an expression, of a promise when it is kept."""
        result = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; fails after a minute."""
        end = time.monotonic() + _LIMIT_S
        while not self.run(condition):
            if time.monotonic() >= end:
                text = self.run("document.body.innerText.slice(0, 500)")
                raise AssertionError(f"waited for {condition}; {self.complaints}; {text}")
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            text = ""
            if kind == "keyDown":
                character = key if len(key) == 1 else ""
                text = _TEXTS.get(key, character)
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=text,
                windowsVirtualKeyCode=_CODES.get(key, 0),
            )

    def resize(self, width: int, height: int) -> None:
        """Make the window this large."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )


@contextlib.contextmanager
def open_page(url: str, profile: Path) -> Iterator[Page]:
    """Chromium with a new profile in this folder, on a page; it has ended when the block ends."""
    assert CHROMIUM is not None
    child_reads, we_write = os.pipe()
    we_read, child_writes = os.pipe()
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$0" "$@" 3<&{child_reads} 4>&{child_writes}', CHROMIUM, *flags],
        pass_fds=(child_reads, child_writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(child_reads)
    os.close(child_writes)
    try:
        page = Page(we_read, we_write)
        page.resize(1400, 900)
        page.call("Page.navigate", url=url)
        yield page
    finally:
        os.close(we_write)
        os.close(we_read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
