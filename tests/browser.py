"""A real Chromium without a window, spoken to through its debugging pipe: one start for many checks."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The browser reads commands from descriptor 3 and writes to 4; both may be taken where this starts.
START = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """Return where the browser is, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page: what it says to the console, what it asks the network for, and what it answers."""

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive, self._last = send, receive, 0
        self.said: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command of the browser's protocol, and note what is said meanwhile."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        self._send(command)
        while (message := self._receive()).get("id") != self._last:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, path: Path) -> None:
        """Load a page and wait until its charts are drawn."""
        self.said.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.settle("document.readyState === 'complete' && Boolean(document.documentElement.dataset.charts)")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self, condition: str) -> None:
        """Wait until a condition holds in the page, at most 30 seconds."""
        wait = "new Promise((done) => { const started = Date.now(); const look = () => "
        body = f"({condition}) || Date.now() - started > 30000 ? done({condition}) : setTimeout(look, 20); look(); }})"
        assert self.ask(wait + body), condition

    def view(self, width: int, *, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """Look at the page in a window of that size, with a colour scheme, on a screen or on paper."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.ask("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 150)))")

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)["data"])

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.said.append(" ".join(str(value.get("value")) for value in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.said.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """Start the browser, yield an empty page, and end the browser."""
    path = chromium()
    assert path
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}")  # fmt: skip
        running = subprocess.Popen(
            [sys.executable, "-c", START, str(from_us), str(to_us), path, *flags],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        with open(to_browser, "wb", buffering=0) as commands, open(from_browser, "rb") as answers:
            buffer = bytearray()

            def send(command: dict[str, Any]) -> None:
                commands.write(json.dumps(command).encode() + b"\0")

            def receive() -> dict[str, Any]:
                while b"\0" not in buffer:
                    read = answers.read1(1 << 16)
                    assert read, "the browser went away"
                    buffer.extend(read)
                message, _, rest = bytes(buffer).partition(b"\0")
                buffer[:] = rest
                return json.loads(message)

            try:
                yield Tab(send, receive)
            finally:
                running.terminate()
                running.wait(timeout=30)
