"""A headless Chromium, driven by its DevTools protocol: pages, clicks, keys, what they log."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
_LONGEST = 30.0  # seconds that anything may take


class Page:
    """A tab. `problems` has what the page logged as errors, and exceptions that nobody caught."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect

        self.socket = connect(address, max_size=None, open_timeout=_LONGEST)
        self.asked, self.problems, self.requests = 0, [], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; its result."""
        self.asked += 1
        self.socket.send(json.dumps({"id": self.asked, "method": method, "params": parameters}))
        while (told := json.loads(self.socket.recv(_LONGEST))).get("id") != self.asked:
            self._note(told)
        assert "error" not in told, f"{method}: {told['error']}"
        return told["result"]

    def _note(self, told: dict[str, Any]) -> None:
        about = told.get("params", {})
        if told["method"] == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", "exception"))
        elif told["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.problems.append(str([a.get("description", a.get("value")) for a in about["args"]]))
        elif told["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif told["method"] == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(self, path: Path, width: int = 1280, height: int = 900) -> Page:
        """Load a file, and wait until its charts are drawn."""
        self.resize(width, height)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")
        drawn = "(figure) => figure.querySelector('.plotted > svg')"
        self.wait(f"[...document.querySelectorAll('figure.live')].every({drawn})")
        return self

    def resize(self, width: int, height: int = 900) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip

    def media(self, kind: str = "", **features: str) -> None:
        """The kind of medium, such as print, and features, such as prefers_color_scheme="dark"."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.ask("Emulation.setEmulatedMedia", media=kind, features=named)

    def run(self, code: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, code: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + _LONGEST
        while not self.run(code):
            assert time.monotonic() < end, f"{code} did not become true"
            time.sleep(0.02)

    def key(self, name: str) -> None:
        """Press a key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        about: dict[str, Any] = {"key": name, "windowsVirtualKeyCode": codes[name]}
        text = {"Enter": "\r", " ": " "}.get(name)
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.ask("Input.dispatchKeyEvent", **down, **about)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **about)

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, element: str) -> None:
        """Click into the middle of an element, which is an expression of JavaScript."""
        box = self.run(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        made = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def chromium(*flags: str) -> Iterator[Page]:
    """A browser with one tab, for as long as the context lasts; skips the test without Chromium."""
    program = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    if program is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [program, *_FLAGS, *flags, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield Page(_address(Path(folder), process))
        finally:
            process.terminate()
            process.wait(_LONGEST)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the first tab listens: the browser writes its port to a file."""
    import urllib.request

    end = time.monotonic() + _LONGEST
    while time.monotonic() < end and process.poll() is None:
        file = folder / "DevToolsActivePort"
        if (
            file.exists()
            and (lines := file.read_text().split("\n"))[0].isdigit()
            and len(lines) > 1
        ):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = [t for t in json.load(answer) if t["type"] == "page"]
            if tabs:
                return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    pytest.skip("Chromium did not start")
