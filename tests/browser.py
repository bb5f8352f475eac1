"""A real browser for tests: Debian's chromium, driven through chromedriver by the standard library alone."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0  # seconds; only a broken page needs them
MISSING = "needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver"


def find_tools() -> tuple[str, str] | None:
    """Paths of browser and driver; None if one is missing."""
    browser, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One session of a browser."""

    def __init__(self, port: int, binary: str, profile: str, width: int, height: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {
            "binary": binary,
            "args": [
                *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", f"--window-size={width},{height}"),
                "--host-resolver-rules=MAP rebound.example 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
            ],
            "prefs": {"download.default_directory": profile},
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from None

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments: Any, seconds: float = PATIENCE) -> Any:
        """The first true value of a script. Raises AssertionError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script, *arguments):
                return value
            time.sleep(0.1)
        raise AssertionError(f"it did not become true: {script}\n{self.text()[:2000]}")

    def text(self) -> str:
        return str(self.run("return document.body ? document.body.innerText : ''"))

    def press(self, *keys: str) -> None:
        """Type keys into whatever has the focus."""
        actions = [
            each for key in keys for each in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._call("POST", f"{self._session}/actions", body)

    def console(self) -> list[str]:
        """Messages of the console since the last call."""
        return [entry["message"] for entry in self._call("POST", f"{self._session}/se/log", {"type": "browser"})]

    def foreign_requests(self) -> list[str]:
        """What the page has asked other hosts for."""
        return list(
            self.run(
                "return performance.getEntriesByType('resource').map(e => e.name)"
                ".filter(n => !n.startsWith(location.origin) && !n.startsWith('data:'))"
            )
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def type(self, text: str) -> None:
        """Type a text into whatever has the focus."""
        self.press(*text)

    def accept(self, seconds: float = PATIENCE) -> str:
        """Answer the question of a page with yes; its text."""
        end = time.monotonic() + seconds
        while True:
            try:
                text = str(self._call("GET", f"{self._session}/alert/text"))
                break
            except AssertionError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.1)
        self._call("POST", f"{self._session}/alert/accept")
        return text

    def emulate(self, width: int, height: int = 800) -> None:
        """Have the page as wide as a phone's screen, which a window cannot be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def prefer(self, scheme: str, media: str = "") -> None:
        """Have pages believe that the system is "light" or "dark", or that they are for another medium, "print"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"media": media, "features": features}}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def resize(self, width: int, height: int) -> None:
        self._call("POST", f"{self._session}/window/rect", {"width": width, "height": height})

    def close(self) -> None:
        self._call("DELETE", self._session)


@contextmanager
def open_browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with an empty profile. Skips the test if there is none."""
    tools = find_tools()
    if tools is None:
        pytest.skip(MISSING)
    binary, driver = tools
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process, port = _start_driver(driver)
        try:
            browser = Browser(port, binary, profile, width, height)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _start_driver(driver: str) -> tuple[subprocess.Popen[str], int]:
    """A driver and its port. It takes one port for IPv4 and for IPv6, and gives up if another program has it there."""
    for _ in range(5):
        process = subprocess.Popen([driver, "--port=0", "--log-level=SEVERE"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = next((line for line in process.stdout if "successfully on port" in line), None)
        if line is not None:
            return process, int(line.strip().rstrip(".").rsplit(" ", 1)[1])
        process.wait(PATIENCE)
    raise AssertionError("chromedriver found no free port")
