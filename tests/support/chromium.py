"""A headless Chromium, driven over the pipe that its DevTools protocol has: no port and no package is needed.

    with Chromium(executable, profile) as browser:
        browser.open("http://127.0.0.1:8000/")
        browser.evaluate("document.title")

Chromium reads commands from file descriptor 3 and writes answers and events to 4, each a JSON text and a zero byte.
"""

import fcntl
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
]
_FREE = 10  # descriptors from here on are not 3 or 4
_ERRORS = {"error", "assert"}


class PageLeft(Exception):
    """The page that was asked has been left for another."""


class Chromium:
    """One page of a browser of its own. `errors` are what its console and network complained of, in order."""

    def __init__(self, executable: str, profile: Path, timeout: float = 60.0) -> None:
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._timeout = timeout
        self._last_id = 0
        self._pending = b""
        self._in, theirs_out = _pipe()
        theirs_in, self._out = _pipe()
        self._pid = os.posix_spawn(
            executable,
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setpgroup=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (self._in, self._out):
            os.close(fd)
        os.killpg(self._pid, signal.SIGKILL)  # the group that was made for it
        os.waitpid(self._pid, 0)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                if value := self.evaluate(expression):
                    return value
            except PageLeft:
                pass  # the next page is being loaded
            assert time.monotonic() < end, f"{expression} did not come true in {self._timeout} s"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Text into what has the focus, as from a keyboard."""
        self._call("Input.insertText", text=text)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._last_id:
                problem = found.get("error", {}).get("message", "")
                if "navigated" in problem or "context was destroyed" in problem:
                    raise PageLeft(f"{method}: {problem}")
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._note(found.get("method", ""), found.get("params", {}))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._in], [], [], self._timeout)
            assert ready, f"Chromium said nothing for {self._timeout} s"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium ended"
            self._pending += data
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in _ERRORS:
            self.errors.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are neither 3 nor 4."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FREE) for end in ends)
    for end in ends:
        os.close(end)
    return read, write
