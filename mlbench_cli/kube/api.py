"""The Kubernetes API as plain JSON: requests, streams and websockets.

The official client provides connections, TLS, proxies and authentication. This adds back-off (429, 5xx, cut
connections), one renewal of a rejected credential, and mlbench's errors that quote the server. Objects stay
dictionaries, because building models of thousands of pods would take seconds.
"""

import contextlib
import json
import random
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlencode, urlsplit

from mlbench_cli.errors import (
    CapacityError,
    CredentialError,
    MlbenchError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from mlbench_cli.kube.credentials import CredentialSource
from mlbench_cli.kube.official import call_with_deadline, official
from mlbench_cli.kube.tls import create_context, explain_connection_failure

if TYPE_CHECKING:  # types of optional libraries
    import urllib3
    import websocket

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
RETRY_SECONDS = 15.0  # how long a request is retried before it fails
TRANSIENT_STATUSES = frozenset({429, 500, 502, 503, 504})
UNAVAILABLE_STATUSES = frozenset({429, 502, 503, 504})
# Messages of a 500 by which the cluster says that a part of it does not answer.
SILENT_PART = re.compile(
    r"etcdserver|leader changed|apiserver (not ready|is shutting down)|failed calling webhook", re.IGNORECASE
)
# Requests that the API server forwards to a kubelet, and its messages if it cannot.
PROXIED = re.compile(r"/pods/[^/]+/(exec|log)(\?|$)")
KUBELET = re.compile(r"error dialing backend|:10250\b|No agent available|error trying to reach service")
# What a kubelet that cannot read a log, or the rest of it, writes into it instead.
UNREAD = re.compile(
    rb"^((?:unable to retrieve container logs|failed to (?:try resolving symlinks|create fsnotify|open log file))"
    rb"\b[^\n]*)\n?\Z",
    re.MULTILINE,
)
# Of admission plugins and webhooks; what a user lacks a right for begins with the user's name.
POLICY = re.compile(r"is forbidden: (?!User\b)|denied (?:the )?request")
ANONYMOUS = 'User "system:anonymous"'  # of a request without a login
NAMESPACED = re.compile(r"/namespaces/([^/?]+)/")
INSIDE = re.compile(r"HTTPS?Connection(Pool)?\(host=[^)]*\): ")  # objects of urllib3 in its messages
VERSION_SECONDS = 5.0
# The first in which success policies of Jobs are on by default (KEP-3998); failure policies were before (KEP-3329).
MIN_VERSION = (1, 31)
CLOCK_SECONDS = 5.0

MERGE_PATCH = "application/merge-patch+json"
# Request body: an object, or the operations of a JSON patch.
Body = Mapping[str, Any] | list[dict[str, str]]
POD_PAGE = 100  # pods per answer: 250 complete pods take 15 MB
GONE = "mlbenchGone"  # set in a pod that was there, and has been deleted
KEPT_METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")


class ApiError(MlbenchError):
    """The API server rejected a request or did not answer (`status`: HTTP, or 0). `reason` is from Kubernetes'
    Status."""

    code = "kubernetes_api"

    def __init__(self, message: str, *, status: int = 0, reason: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint, details={"status": status, "reason": reason})
        self.status = status
        self.reason = reason


class AccessDenied(CredentialError, ApiError):
    """401 or 403 of the API server."""


class ObjectNotFound(NotFoundError, ApiError):
    """404 of the API server."""


class QuotaExceeded(CapacityError, ApiError):
    """A ResourceQuota of the namespace refuses the object."""


class RequestRejected(UsageError, ApiError):
    """The object is invalid, or exists already."""


class ServerUnreachable(UnreachableError, ApiError):
    """The API server does not answer, or is temporarily unavailable (429, 502, 503, 504, no etcd)."""


class NodeUnreachable(ApiError):
    """The API server answers, but the node to which it forwards this request (log, exec) does not."""

    code = "node_unreachable"
    exit_code = UnreachableError.exit_code


class Expired(ApiError):
    """410: the resource version is too old; list again."""


class Endpoint(Protocol):
    """What a client needs to know about a cluster; implemented by `access.Access`."""

    @property
    def server(self) -> str:
        """The address of the API server, with its scheme."""

    @property
    def token(self) -> CredentialSource | None:
        """The source of the bearer token; None for client certificates or no authentication."""

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of all requests besides the login."""

    def configuration(self) -> Any:
        """A `kubernetes.client.Configuration` whose credential is current before each request."""


class Api:
    """A client of one cluster. Safe for many threads; close it to drop its connections."""

    def __init__(self, endpoint: Endpoint, retry_seconds: float | None = None) -> None:
        self._endpoint = endpoint
        self._retry_seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds
        self._lock = threading.Lock()
        self._settings: Any = None
        self._clients: dict[str | None, Any] = {}  # RESTClientObject by the file of its client certificate
        self._ahead = 0.0

    def close(self) -> None:
        """Drop all connections. A later request opens new ones."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    @property
    def server_ahead(self) -> float:
        """Seconds by which the server's clock is ahead of this machine's; 0 if they nearly agree."""
        return self._ahead if abs(self._ahead) > CLOCK_SECONDS else 0.0

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests -------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """GET an object or a list. Raises ApiError or a subclass."""
        return self.request("GET", path, params=params)

    def create(self, path: str, body: Mapping[str, Any], **params: Any) -> dict[str, Any]:
        """POST an object and return it as created by the server.

        Raises ApiError or a subclass.
        """
        return self.request("POST", path, params=params, body=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `body` into the object."""
        return self.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    def delete(self, path: str, grace: int | None = None, uid: str | None = None, **params: Any) -> bool:
        """Delete an object, only if it has this `uid`, or a collection. False if it did not exist."""
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self.request("DELETE", path, params=params, body=options)
        except ObjectNotFound:
            return False
        except RequestRejected as error:
            if uid is None or error.status != 409:
                raise
            return False
        return True

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Body | None = None,
        content_type: str = "application/json",
        retry_seconds: float | None = None,
    ) -> dict[str, Any]:
        """The server's JSON. Temporary failures are retried for all methods, because all writes of mlbench are
        idempotent.

        Raises ApiError or a subclass.
        """
        backoff = _Backoff(self._retry_seconds if retry_seconds is None else retry_seconds)
        while True:
            try:
                answer = self._send(method, _url(path, params), body, content_type, READ_SECONDS)
                content = answer.data
            except official().urllib3.exceptions.HTTPError as error:
                if not backoff.wait():
                    raise self._unreachable(error, path) from None
                continue
            with contextlib.suppress(ValueError, TypeError):
                self._ahead = parsedate_to_datetime(answer.headers.get("Date") or "").timestamp() - time.time()
            if answer.status < 300:
                return _parse(content)
            if answer.status in TRANSIENT_STATUSES and backoff.wait(_seconds(answer.headers.get("Retry-After"))):
                continue
            raise error_of(answer.status, content, f"{method} {path}")

    # --- stream ---------------------------------------------------------------------------------------------------

    def stream(self, path: str, read_seconds: float, **params: Any) -> "urllib3.BaseHTTPResponse":
        """An open response for reading in chunks; the caller closes it. Not retried: only the caller knows where to
        resume.

        Raises ApiError if the server rejects it or cannot be reached.
        """
        try:
            answer = self._send("GET", _url(path, params), None, None, read_seconds)
            if answer.status < 300:
                return answer
            content = answer.data
        except official().urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error, path) from None
        raise error_of(answer.status, content, f"GET {path}", _seconds(answer.headers.get("Retry-After")))

    def open_websocket(self, path: str, query: list[tuple[str, str]], protocols: list[str]) -> "websocket.WebSocket":
        """A connected websocket. Raises ApiError."""
        libraries = official()
        for renewed in (False, True):
            configuration, authorization = self._authenticate()
            headers = [("sec-websocket-protocol", ",".join(protocols)), *self._endpoint.headers]
            if authorization:
                headers.append(("authorization", authorization))
            address = libraries.kubernetes.stream.ws_client.get_websocket_url(self._endpoint.server + path, query)
            try:
                return _connect_websocket(configuration, address, headers)
            except libraries.websocket.WebSocketBadStatusException as error:
                if error.status_code == 401 and not renewed and self._discard(authorization, configuration.cert_file):
                    continue
                raise error_of(error.status_code, error.resp_body or b"", f"GET {path}") from None
            except (libraries.websocket.WebSocketException, OSError) as error:
                raise self._unreachable(error, path) from None
        raise AssertionError("not reached")

    # --- plumbing -------------------------------------------------------------------------------------------------

    def _send(
        self, method: str, url: str, body: Body | None, content_type: str | None, read_seconds: float
    ) -> "urllib3.BaseHTTPResponse":
        """One request, repeated once with a renewed credential if the server rejects the first. The body is not read.

        Raises urllib3's HTTPError for connections that fail.
        """
        libraries = official()
        headers = libraries.urllib3.HTTPHeaderDict({"Accept": "application/json", "User-Agent": "mlbench"})
        for name, value in self._endpoint.headers:
            headers.add(name, value)
        if body is not None and content_type is not None:
            headers["Content-Type"] = content_type
        for renewed in (False, True):
            configuration, authorization = self._authenticate()
            certificate = configuration.cert_file
            if authorization:
                headers["authorization"] = authorization
            try:
                answer: urllib3.BaseHTTPResponse = (
                    self._client(configuration, certificate)
                    .request(
                        method,
                        self._endpoint.server + url,
                        headers=headers.copy(),
                        body=body,
                        _request_timeout=(CONNECT_SECONDS, read_seconds),
                    )
                    .response
                )
            except libraries.kubernetes.client.ApiException as error:  # TLS errors, e.g. an expired client certificate
                if not renewed and self._discard(None, certificate):
                    continue
                raise libraries.urllib3.exceptions.SSLError(str(error.reason).replace("SSLError\n", "")) from None
            if answer.status != 401 or renewed or not self._discard(authorization, certificate):
                return answer
            answer.drain_conn()
        raise AssertionError("not reached")

    def _authenticate(self) -> tuple[Any, str | None]:
        """The configuration with a current credential, and the Authorization header of a token."""
        with self._lock:
            if self._settings is None:
                self._settings = self._endpoint.configuration()
                return self._settings, self._settings.api_key.get("BearerToken")
        return self._settings, self._settings.get_api_key_with_prefix("BearerToken")

    def _client(self, configuration: Any, certificate: str | None) -> Any:
        """The connection pool for a client certificate; connections cannot switch certificates."""
        libraries = official()
        with self._lock:
            if certificate not in self._clients:
                if not configuration.verify_ssl:  # as the kubeconfig asks for; else urllib3 warns at each request
                    libraries.urllib3.disable_warnings(libraries.urllib3.exceptions.InsecureRequestWarning)
                client = libraries.kubernetes.client.rest.RESTClientObject(configuration)
                client.pool_manager.connection_pool_kw["ssl_context"] = create_context(configuration)
                self._clients[certificate] = client
            return self._clients[certificate]

    def _discard(self, authorization: str | None, certificate: str | None) -> bool:
        """Have a rejected credential renewed. False if it cannot be renewed."""
        source = self._endpoint.token
        if source is None or not (authorization or certificate):
            return False
        if authorization:
            source.discard(authorization.partition(" ")[2])
        if certificate:
            source.discard(Path(certificate).read_bytes())
        return True

    def _unreachable(self, error: Exception, path: str) -> ApiError:
        reason = getattr(error, "reason", None) or error
        words = INSIDE.sub("", str(getattr(reason, "original_error", reason)))
        if PROXIED.search(path) and self._answers():
            return NodeUnreachable(
                f"The node of {path.split('/pods/')[1].split('/')[0]} does not answer: {words[:300]}",
                reason="NodeUnreachable",
                hint="kubectl get nodes",
            )
        proxy = urlsplit(getattr(self._settings, "proxy", None) or "").netloc.rpartition("@")[2]
        way = f" through the proxy {proxy}" if proxy else ""
        return ServerUnreachable(
            f"The cluster at {self._endpoint.server} does not answer{way}: {words[:300]}",
            reason="Unreachable",
            hint=explain_connection_failure(f"{words} {error!r}")
            or "Is the cluster running, and is this machine allowed to reach it?",
        )

    def _answers(self) -> bool:
        """Whether the API server answers a request that it does not forward, with any status."""
        try:
            self._send("GET", "/version", None, None, VERSION_SECONDS).drain_conn()
        except (official().urllib3.exceptions.HTTPError, MlbenchError):
            return False
        return True


class _Backoff:
    """Pauses between retries: exponential with jitter, or the server's Retry-After, until `seconds` have passed."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._next = 0.2

    def wait(self, retry_after: float | None = None) -> bool:
        """Sleep; returns False immediately if the time for retries would be exceeded."""
        pause = retry_after if retry_after is not None else self._next * random.uniform(0.5, 1.5)
        self._next = min(self._next * 2, 5.0)
        if time.monotonic() + pause > self._end:
            return False
        time.sleep(pause)
        return True


def is_policy(message: str) -> bool:
    """Whether an admission plugin or webhook has refused a request, whoever made it."""
    return POLICY.search(message) is not None


def error_of(status: int, content: bytes | str, request: str, retry_after: float | None = None) -> ApiError:
    """The error for a rejected request; `content` is usually a Kubernetes Status object."""
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    try:
        document = json.loads(text)
        message, reason = str(document["message"]), str(document.get("reason") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, reason = " ".join(text.split())[:300], ""
    words = f'The cluster refused {request}: "{message}" ({status}{f" {reason}" if reason else ""}).'
    namespace = NAMESPACED.search(request)
    where = f" -n {namespace[1]}" if namespace else ""
    if status == 401 or ANONYMOUS in message:
        return AccessDenied(words, status=status, reason=reason, hint="Log in to the cluster again.")
    if status == 403 and "exceeded quota" in message:
        hint = f"kubectl describe resourcequota{where}   (mlbench delete NAME frees what ended runs still hold)"
        return QuotaExceeded(words, status=status, reason=reason, hint=hint)
    if status in (400, 403, 422) and is_policy(message):
        hint = "Whoever asks, a policy of the cluster forbids it. Ask its administrator, or use another namespace."
        return AccessDenied(words, status=status, reason=reason, hint=hint)
    if status == 403:
        hint = f"Ask for the Role that this prints: mlbench attach-cluster NAME{where} --role"
        return AccessDenied(words, status=status, reason=reason, hint=hint)
    if status == 404:
        return ObjectNotFound(words, status=status, reason=reason)
    if status in (400, 409, 422):
        return RequestRejected(words, status=status, reason=reason)
    kind: type[ApiError] = ApiError
    if status == 410:
        kind = Expired
    elif PROXIED.search(request) and (KUBELET.search(message) or status in (502, 504)):
        kind = NodeUnreachable
    elif status in UNAVAILABLE_STATUSES or (status == 500 and SILENT_PART.search(message)):
        kind = ServerUnreachable
    error = kind(words, status=status, reason=reason)
    error.details["retry_after"] = retry_after
    return error


def _shut_down(connection: "websocket.WebSocket") -> None:
    connection.shutdown()  # type: ignore[no-untyped-call]


def _connect_websocket(configuration: Any, url: str, headers: Sequence[tuple[str, str]]) -> "websocket.WebSocket":
    """Open a websocket with timeouts. The official client's function waits forever for a silent server, and sends no
    headers but the login."""
    tls: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE}
    if url.startswith("wss://") and configuration.verify_ssl:
        tls = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": configuration.ssl_ca_cert}
    for key, value in (
        ("certfile", configuration.cert_file),
        ("keyfile", configuration.key_file),
        ("server_hostname", configuration.tls_server_name),
    ):
        if value:
            tls[key] = value
    # The library reads the environment's proxies by rules of its own unless it is given a proxy and exceptions to it.
    proxy = urlsplit(configuration.proxy or "http://unused:1")
    options: dict[str, Any] = {
        "header": [f"{name}: {value}" for name, value in headers],
        "proxy_type": proxy.scheme.replace("https", "http"),
        "http_proxy_host": proxy.hostname,
        "http_proxy_port": proxy.port or 80,
        "http_no_proxy": ["none.invalid"] if configuration.proxy else ["*"],
    }
    if proxy.username:
        options["http_proxy_auth"] = (unquote(proxy.username), unquote(proxy.password or ""))

    def connect() -> "websocket.WebSocket":
        connection: websocket.WebSocket = official().websocket.WebSocket(sslopt=tls, skip_utf8_validation=False)
        connection.connect(url, **options)  # type: ignore[no-untyped-call]
        return connection

    return call_with_deadline(connect, READ_SECONDS, discard=_shut_down)


def _url(path: str, params: Mapping[str, Any] | None) -> str:
    given = {key: value for key, value in (params or {}).items() if value is not None}
    query = {key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}
    return path + (f"?{urlencode(query)}" if query else "")


def _parse(content: bytes) -> dict[str, object]:
    try:
        document = json.loads(content) if content else {}
    except ValueError:
        raise ApiError(f"The cluster answered with something other than JSON: {content[:100]!r}") from None
    return document if isinstance(document, dict) else {}


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


# --- pods -------------------------------------------------------------------------------------------------------


def require_version(api: Api) -> str:
    """The version of the API server, "" if it does not tell.

    Raises UsageError for one that drops fields that runs depend on, without a word.
    """
    try:
        found = api.get("/version")
    except (AccessDenied, ObjectNotFound):
        return ""
    numbers = [re.match(r"\d+", str(found.get(key))) for key in ("major", "minor")]
    version = tuple(int(match[0]) for match in numbers if match)
    if len(version) == 2 and version < MIN_VERSION:
        raise UsageError(
            f"The cluster runs Kubernetes {version[0]}.{version[1]}; runs need {MIN_VERSION[0]}.{MIN_VERSION[1]} or "
            "later, where Jobs have success policies.",
            hint="Ask for an upgrade of the cluster, or choose another one.",
        )
    return str(found.get("gitVersion") or "")


def read_log(api: Api, path: str, read_seconds: float, **query: object) -> bytes:
    """What the main container of the pod at `path` has printed. Raises ApiError, e.g. if its node has nothing of it."""
    with api.stream(f"{path}/log", read_seconds=read_seconds, container="main", **query) as answer:
        data = bytes(answer.read())
    if (unread := UNREAD.search(data, max(0, len(data) - 4096))) is None:
        return data
    if unread.start() == 0:
        words = unread[1].decode("utf-8", "replace")
        raise NodeUnreachable(f"The node could not give the log: {words[:300]}", status=200)
    return data[: unread.start()]


def list_pods(api: Api, namespace: str, selector: str) -> list[dict[str, Any]]:
    """List the pods with `selector` once, page by page, because 1,000 complete pods take 50 MB."""
    found: list[dict[str, Any]] = []
    token: str | None = ""
    while token is not None:
        params = {"labelSelector": selector, "limit": POD_PAGE, "continue": token or None}
        page = api.request("GET", f"/api/v1/namespaces/{namespace}/pods", params=params)
        found += [_trim(item) for item in page.get("items", ())]
        token = page.get("metadata", {}).get("continue") or None
    return found


def _trim(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the fields needed for diagnosis, about a fifth of a pod."""
    metadata, spec = pod.get("metadata", {}), pod.get("spec", {})
    return {
        "metadata": {key: metadata[key] for key in KEPT_METADATA if key in metadata},
        "spec": {key: spec[key] for key in ("nodeName",) if key in spec},
        "status": {key: value for key, value in pod.get("status", {}).items() if key not in ("podIPs", "hostIPs")},
    }
