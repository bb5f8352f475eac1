"""A real browser for tests: Debian's chromium, driven through chromedriver by the standard library alone."""

import atexit
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

from tests.needs import missing

PATIENCE = 150.0  # seconds; only a broken page needs them
MISSING = "needs Debian's chromium and chromium-driver: apt-get install chromium chromium-driver"


def find_tools() -> tuple[str, str] | None:
    """Paths of browser and driver; None if one is missing."""
    browser, driver = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One session of a browser."""

    def __init__(self, port: int, binary: str, profile: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {
            "binary": binary,
            "args": [
                *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
                f"--user-data-dir={profile}",
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

    def print_pdf(self) -> bytes:
        """The page as printed on A4."""
        body = {"page": {"width": 21.0, "height": 29.7}, "background": True}
        return base64.b64decode(self._call("POST", f"{self._session}/print", body))

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
        self._command("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str, media: str = "") -> None:
        """Have pages believe that the system is "light" or "dark", or that they are for another medium, "print"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", media=media, features=features)

    def reset(self, width: int, height: int) -> None:
        """Forget what the last test has left: its page, cookies, messages, screen and medium."""
        self.open("about:blank")
        self._command("Network.clearBrowserCookies")
        self._command("Network.clearBrowserCache")
        self._command("Emulation.clearDeviceMetricsOverride")
        self._command("Emulation.setEmulatedMedia", media="", features=[])
        self.resize(width, height)
        self.console()

    def _command(self, name: str, **parameters: Any) -> None:
        """A command of the browser's own protocol."""
        self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        self._call("POST", f"{self._session}/window/rect", {"width": width, "height": height})

    def close(self) -> None:
        self._call("DELETE", self._session)


class Program:
    """Driver and browser of this process: starting both takes longer than most tests do."""

    def __init__(self) -> None:
        tools = find_tools()
        if tools is None:
            missing(MISSING)
        binary, driver = tools
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver, port = _start_driver(driver)
        try:
            self.browser = Browser(port, binary, self._profile.name)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(PATIENCE)
        self._profile.cleanup()

    def close(self) -> None:
        try:
            self.browser.close()
        finally:
            self._stop()


_programs: list[Program] = []  # none or one


@contextmanager
def open_browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser without cookies, at an empty page. Skips the test if there is none."""
    if not _programs:
        _programs.append(Program())
        atexit.register(close_browser)
    browser = _programs[0].browser
    try:
        browser.reset(width, height)
        yield browser
    except BaseException:
        close_browser()
        raise


def close_browser() -> None:
    """End the browser of this process, if there is one."""
    while _programs:
        _programs.pop().close()


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
