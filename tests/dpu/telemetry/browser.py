"""A real browser without a window, driven through pipes: a few calls of the DevTools protocol.

See https://chromedevtools.github.io/devtools-protocol/. With ``--remote-debugging-pipe`` messages are JSON that end
with a NUL byte: they come to its file descriptor 3, and it answers at 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
"""The first is the package of that name of Debian."""

ANSWER_S = 60.0


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. ``complaints``: errors of the console, what was not allowed to load, and exceptions."""

    def __init__(self, program: str, folder: Path, *, width_px: int = 1200, height_px: int = 900) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        command = [
            *(program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}/profile"),
            *(f"--window-size={width_px},{height_px}", "about:blank"),
        ]
        # The shell puts the pipes where the browser looks for them; the numbers that they have may be 3 or 4.
        place = f'exec 8<&{to_child} 9>&{from_child}; exec 3<&8 4>&9 8<&- 9>&-; exec "$@"'
        self._log = (folder / "browser.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", place, "browser", *command],
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(to_child)
        os.close(from_child)
        self._received = b""
        self._last_id = 0
        self._session = ""
        self.complaints: list[str] = []
        (target,) = [t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._write)  # then it ends
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._log.close()

    def open(self, url: str) -> None:
        """Until all of the page is there."""
        assert "errorText" not in self._call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, deadline_s: float = 30.0) -> None:
        """Until it is true in the page."""
        end_s = time.monotonic() + deadline_s
        while not self.evaluate(expression):
            assert time.monotonic() < end_s, f"not within {deadline_s} s: {expression}"
            time.sleep(0.05)

    def screen(self, *, width_px: int, height_px: int, is_phone: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width_px, height=height_px, deviceScaleFactor=1, mobile=is_phone,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """``scheme``: "light" or "dark"."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """All of the page, as PNG."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(end_s)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 16)
            assert part, f"the browser has ended: see {self._log.name}"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.complaints.append(json.dumps(parameters["args"]))
