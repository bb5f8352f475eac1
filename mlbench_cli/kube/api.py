"""The Kubernetes API as plain JSON over HTTPS: one method to ask, one to stream, one for a websocket.

Objects are dictionaries, as the server sends them. What may pass (429, 5xx, cut connections, one refused token) is
tried again here; everything else becomes an error of mlbench's tree that quotes the server's own words.
"""

import contextlib
import json
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access

if TYPE_CHECKING:
    import urllib3
    import websocket

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
RETRY_SECONDS = 15.0  # how long a request is repeated before it fails
PASSING = frozenset({429, 500, 502, 503, 504})
MISSING_LIBRARY = 'pip install "mlbench[k8s]"'

CLOCK_SECONDS = 5.0

MERGE_PATCH = "application/merge-patch+json"


class ApiError(MlbenchError):
    """The API server refused, or no answer came (`status` 0, else HTTP's). `reason` is Kubernetes' word for it."""

    code = "kubernetes_api"

    def __init__(self, message: str, *, status: int = 0, reason: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint, details={"status": status, "reason": reason})
        self.status = status
        self.reason = reason


class AccessDenied(ApiError, CredentialError):
    code = CredentialError.code
    exit_code = CredentialError.exit_code


class ObjectNotFound(ApiError, NotFoundError):
    code = NotFoundError.code
    exit_code = NotFoundError.exit_code


class QuotaExceeded(ApiError, CapacityError):
    code = CapacityError.code
    exit_code = CapacityError.exit_code


class Refused(ApiError, UsageError):
    """The object is invalid, or is there already."""

    code = UsageError.code
    exit_code = UsageError.exit_code


class Expired(ApiError):
    """410: the resource version is too old, list again."""


class Api:
    """A client of one cluster. Safe for many threads; close it to drop its connections."""

    def __init__(self, access: Access) -> None:
        try:
            import urllib3
        except ImportError:
            raise UsageError(
                "Kubernetes clusters need packages that are not installed.", hint=MISSING_LIBRARY
            ) from None
        self.access = access
        self._tls = access.ssl_context()
        parts = urlsplit(access.server)
        self._prefix = parts.path.rstrip("/")
        proxy = _proxy(access)
        options: dict[str, Any] = {"maxsize": 8, "retries": False}
        if self._tls:
            options["ssl_context"] = self._tls
        if access.server_name:
            options.update(server_hostname=access.server_name, assert_hostname=access.server_name)
        self._pool: urllib3.PoolManager = (
            urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
        )
        self._ahead = 0.0
        self._base = f"{parts.scheme}://{parts.netloc}{self._prefix}"

    def close(self) -> None:
        self._pool.clear()

    @property
    def server_ahead(self) -> float:
        """By how many seconds the server's clock is ahead of this machine's; 0 where they nearly agree."""
        return self._ahead if abs(self._ahead) > CLOCK_SECONDS else 0.0

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- ask ------------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        return self.request("GET", path, params=params)

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.request("POST", path, body=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `body` into the object."""
        return self.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    def delete(self, path: str, grace: int | None = None, propagation: str = "Background", **params: Any) -> bool:
        """Delete an object, or a collection; absent is done. True where there was something to delete."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", path, params=params, body=options)
        except ObjectNotFound:
            return False
        return True

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        retry_seconds: float = RETRY_SECONDS,
    ) -> dict[str, Any]:
        """The server's JSON. Repeated while the trouble may pass, whatever the method: all we write is idempotent.

        Raises ApiError or one of its kinds.
        """
        import urllib3

        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Content-Type": content_type} if data is not None else {}
        patience = _Patience(retry_seconds)
        while True:
            try:
                answer = self._send(method, self._url(path, params), data, headers, READ_SECONDS)
                content = answer.data
            except urllib3.exceptions.HTTPError as error:
                if not patience.wait():
                    raise self._unreachable(error) from None
                continue
            self._note_clock(answer.headers.get("Date"))
            if answer.status < 300:
                return _parse(content)
            if answer.status in PASSING and patience.wait(_seconds(answer.headers.get("Retry-After"))):
                continue
            raise error_of(answer.status, content, f"{method} {path}")

    # --- stream ---------------------------------------------------------------------------------------------------

    def stream(self, path: str, read_seconds: float, **params: Any) -> "urllib3.BaseHTTPResponse":
        """An open answer to read from piece by piece; `close` it. Not repeated: the caller knows where to go on.

        Raises ApiError for a refusal, and for a connection that cannot be made.
        """
        import urllib3

        try:
            answer = self._send("GET", self._url(path, params), None, {}, read_seconds, preload=False)
            if answer.status < 300:
                return answer
            content = answer.read()
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from None
        raise error_of(answer.status, content, f"GET {path}", _seconds(answer.headers.get("Retry-After")))

    def websocket(self, path: str, query: list[tuple[str, str]], protocols: list[str]) -> "websocket.WebSocket":
        """A connected websocket. Raises ApiError."""
        try:
            import websocket
        except ImportError:
            raise UsageError(
                "Kubernetes clusters need packages that are not installed.", hint=MISSING_LIBRARY
            ) from None

        for renewed in (False, True):
            token = self._token()
            options: dict[str, Any] = {}
            if self._tls:
                options["sslopt"] = {"context": self._tls}
                if self.access.server_name:
                    options["sslopt"]["server_hostname"] = self.access.server_name
            if self.access.proxy:
                proxy = urlsplit(self.access.proxy)
                options.update(http_proxy_host=proxy.hostname, http_proxy_port=proxy.port, proxy_type="http")
            try:
                return websocket.create_connection(
                    f"{self._base.replace('http', 'ws', 1)}{path}?{urlencode(query)}",
                    timeout=READ_SECONDS,
                    subprotocols=protocols,
                    header=[f"Authorization: Bearer {token}"] if token else [],
                    suppress_origin=True,
                    enable_multithread=False,
                    skip_utf8_validation=True,
                    **options,
                )
            except websocket.WebSocketBadStatusException as error:
                if error.status_code == 401 and token and not renewed:
                    self._refuse(token)
                    continue
                raise error_of(error.status_code, error.resp_body or b"", f"exec {path}") from None
            except (websocket.WebSocketException, OSError) as error:
                raise self._unreachable(error) from None
        raise AssertionError("not reached")

    # --- plumbing -------------------------------------------------------------------------------------------------

    def _send(
        self, method: str, url: str, data: bytes | None, headers: dict[str, str], read: float, preload: bool = True
    ) -> "urllib3.BaseHTTPResponse":
        """One request; where the server refuses the token, one more with a new one."""
        import urllib3

        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=read)
        for renewed in (False, True):
            token = self._token()
            authorization = {"Authorization": f"Bearer {token}"} if token else {}
            answer = self._pool.request(
                method,
                url,
                body=data,
                headers={"Accept": "application/json", "User-Agent": "mlbench", **headers, **authorization},
                timeout=timeout,
                preload_content=preload,
            )
            if answer.status != 401 or not token or renewed:
                return answer
            answer.drain_conn()
            self._refuse(token)
        raise AssertionError("not reached")

    def _url(self, path: str, params: Mapping[str, Any] | None) -> str:
        given = {key: value for key, value in (params or {}).items() if value is not None}
        query = {key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}
        return f"{self._base}{path}" + (f"?{urlencode(query)}" if query else "")

    def _note_clock(self, date: str | None) -> None:
        with contextlib.suppress(ValueError, TypeError):
            self._ahead = parsedate_to_datetime(date or "").timestamp() - time.time()

    def _token(self) -> str | None:
        return self.access.token() if self.access.token else None

    def _refuse(self, token: str) -> None:
        if self.access.token:
            self.access.token.refused(token)

    def _unreachable(self, error: Exception) -> ApiError:
        words = str(getattr(error, "reason", None) or error)
        return ApiError(
            f"The cluster at {self.access.server} does not answer: {words[:300]}",
            reason="Unreachable",
            hint="Is the cluster running, and is this machine allowed to reach it?",
        )


class _Patience:
    """Waits between tries: exponential with jitter, or as long as the server asks; until `seconds` have passed."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._next = 0.2

    def wait(self, asked: float | None = None) -> bool:
        """Sleep, and say whether to try again."""
        pause = asked if asked is not None else self._next * random.uniform(0.5, 1.5)
        self._next = min(self._next * 2, 5.0)
        if time.monotonic() + pause > self._end:
            return False
        time.sleep(pause)
        return True


def error_of(status: int, content: bytes | str, request: str, retry_after: float | None = None) -> ApiError:
    """The error of mlbench's tree for a refusal; `content` is usually a Kubernetes Status object."""
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    try:
        document = json.loads(text)
        message, reason = str(document["message"]), str(document.get("reason") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, reason = " ".join(text.split())[:300], ""
    words = f'The cluster refused {request}: "{message}" ({status}{f" {reason}" if reason else ""}).'
    if status == 401:
        return AccessDenied(words, status=status, reason=reason, hint="Log in to the cluster again.")
    if status == 403 and "exceeded quota" in message:
        return QuotaExceeded(words, status=status, reason=reason, hint="kubectl describe resourcequota")
    if status == 403:
        return AccessDenied(
            words, status=status, reason=reason, hint="mlbench doctor lists the rights that are needed."
        )
    if status == 404:
        return ObjectNotFound(words, status=status, reason=reason)
    if status in (400, 409, 422):
        return Refused(words, status=status, reason=reason)
    kind = Expired if status == 410 else ApiError
    error = kind(words, status=status, reason=reason)
    error.details["retry_after"] = retry_after
    return error


def _parse(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content) if content else {}
    except ValueError:
        raise ApiError(f"The cluster answered something else than JSON: {content[:100]!r}") from None
    return document if isinstance(document, dict) else {}


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


def _proxy(access: Access) -> str | None:
    if access.proxy:
        return access.proxy
    parts = urlsplit(access.server)
    if proxy_bypass(parts.netloc):
        return None
    found = getproxies()
    return found.get(parts.scheme) or found.get("all")
