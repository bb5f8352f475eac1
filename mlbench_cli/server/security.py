"""Checks of every request: token, origin, host name and size.

Other websites in the same browser must not be able to read or change anything. All rules apply to all methods, a
lesson from Ray's dashboard (CVE-2023-48022: no authentication; CVE-2025-62593: DNS rebinding; CVE-2026-27482:
unguarded DELETE).
"""

import base64
import binascii
import json
from collections.abc import Mapping
from html import escape
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlbench_cli.server.config import ServerConfig

MAX_BODY_BYTES = 64 * 1024
MAX_QUERY_BYTES = 4096
ACTION_HEADER = "x-mlbench-action"
READING = ("GET", "HEAD")

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": CONTENT_POLICY,
}


class Refusal(Exception):
    """A rejected request."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


class Guard:
    """ASGI middleware that rejects bad requests and adds headers to every response."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        guarded = _adding_headers(send)
        try:
            self._admit(scope)
        except Refusal as refusal:
            await _answer(guarded, scope, refusal)
            return
        await self._app(scope, _limit_body(receive), guarded)

    def _admit(self, scope: Scope) -> None:
        """Check a request. Raises Refusal."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        self._check_origin(headers)
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            raise Refusal(414, "The query is too long.")
        for length in headers.get("content-length", []):
            if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                raise Refusal(413, f"The request is larger than {MAX_BODY_BYTES} bytes.")
        is_ambient = self._authenticate(scope, headers)
        self._check_method(scope["method"], headers, is_ambient)

    def _check_origin(self, headers: Mapping[str, list[str]]) -> None:
        """Require exactly one Host header, one of ours (DNS rebinding), and our own Origin and Sec-Fetch-Site, if
        present."""
        hosts = headers.get("host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self._config.hosts:
            raise Refusal(421, "The dashboard is not served under this host name.")
        for origin in headers.get("origin", []):
            if origin.lower() not in self._config.origins:
                raise Refusal(403, "Requests from other sites are not allowed.")
        for site in headers.get("sec-fetch-site", []):
            if site not in ("none", "same-origin"):
                raise Refusal(403, "Requests from other sites are not allowed.")

    def _authenticate(self, scope: Scope, headers: Mapping[str, list[str]]) -> bool:
        """Require the token. Returns whether a browser sends these credentials by itself."""
        if scope["path"] == "/" and (given := parse_qs(scope["query_string"].decode("latin-1")).get("token")):
            self._by_link(given[0], headers["host"][0])
        kind, _, value = " ".join(headers.get("authorization", [])).partition(" ")
        if kind.lower() == "bearer":
            self._require(value.strip())
            return False
        if kind.lower() == "basic":
            self._require(_password(value))
            return "sec-fetch-site" in headers
        self._require(_cookie(headers, self._config.cookie))
        return True

    def _by_link(self, given: str, host: str) -> None:
        """The printed address: exchange its token for a cookie and remove it from the URL."""
        if not self._config.is_valid(given):
            raise Refusal(401, EXPIRED)
        flags = "HttpOnly; SameSite=Strict; Path=/" + ("; Secure" if self._config.is_secure(host) else "")
        cookie = f"{self._config.cookie}={given}; {flags}"
        raise Refusal(303, "Go on.", {"location": "/", "set-cookie": cookie})

    def _require(self, given: str) -> None:
        if not self._config.is_valid(given):
            raise Refusal(401, EXPIRED if given else MISSING, {"www-authenticate": "Bearer"})

    def _check_method(self, method: str, headers: Mapping[str, list[str]], is_ambient: bool) -> None:
        if method in READING:
            return
        if method not in ("POST", "DELETE"):
            raise Refusal(405, f"{method} is not supported here.")
        if not self._config.allows_actions:
            raise Refusal(405, "This dashboard is read-only. Start it with --allow-actions.")
        if is_ambient and ACTION_HEADER not in headers:
            raise Refusal(403, f"An action needs the header {ACTION_HEADER}.")


MISSING = "A token is required. Open the URL that mlbench serve printed, or run: mlbench get-dashboard-url"
EXPIRED = (
    "This token is not valid, or has expired: every start of the dashboard creates a new one. "
    "To print the current URL: mlbench get-dashboard-url"
)


# --- credentials ----------------------------------------------------------------------------------------------------


def _password(value: str) -> str:
    """The password, or the user name without one, of Basic credentials."""
    try:
        user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
    return password or user


def _cookie(headers: Mapping[str, list[str]], name: str) -> str:
    for header in headers.get("cookie", []):
        try:
            found = SimpleCookie(header).get(name)
        except CookieError:
            continue
        if found is not None:
            return found.value
    return ""


# --- limits ---------------------------------------------------------------------------------------------------------


class BodyTooLong(Exception):
    """A request without Content-Length exceeded the limit."""


def _limit_body(receive: Receive) -> Receive:
    taken = 0

    async def read() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise BodyTooLong
        return message

    return read


# --- answers --------------------------------------------------------------------------------------------------------


def _adding_headers(send: Send) -> Send:
    """Add default headers to a response."""

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return forward


async def _answer(send: Send, scope: Scope, refusal: Refusal) -> None:
    """JSON for programs; for a browser's page a sentence."""
    wants_page = any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
    if wants_page:
        kind = "text/html; charset=utf-8"
        text = escape(refusal.message)
        body = f'<!doctype html><html lang="en"><title>mlbench</title><h1>mlbench</h1><p>{text}</p></html>'
    else:
        kind, body = "application/json", json.dumps({"message": refusal.message, "hint": None})
    headers = {"content-type": kind, "content-length": str(len(body.encode())), **refusal.headers}
    listed = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": listed})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body.encode()})
