"""Track the pods of one run: LIST, then WATCH for a while, then LIST again.

The list is authoritative and the watch only reduces latency: events lost by a cut or half-open connection or an
expired resource version come with the next list. One connection serves any number of pods. The official client's Watch
does not list again after a 410, and waits forever on a half-open connection.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError, ServerUnreachable
from mlbench_cli.model.silence import STARTING_SECONDS

if TYPE_CHECKING:
    import urllib3

PERIOD_SECONDS = 15.0  # seconds between lists of up to PERIOD_PODS pods; longer for more pods
PERIOD_PODS = 250
PAGE = 100  # pods per answer: 250 complete pods take 15 MB
SLACK_SECONDS = 5.0  # the server ends a watch after the period; a connection silent for longer is broken
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0  # between retries
FATAL_STATUSES = frozenset({400, 401, 403, 404, 405, 422})
GONE = "mlbenchGone"  # set in a pod that has been deleted

KEPT_METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")


class PodWatch:
    """A thread that follows the pods with `selector`. `pods()` includes the last state of deleted pods."""

    def __init__(self, access: Access, namespace: str, selector: str, period: float = PERIOD_SECONDS) -> None:
        self._api = access.client()
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = selector
        self._period = period
        self._pods: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._version = 0
        self.listed = float("-inf")  # monotonic time of the request for the last complete list
        self._closed = False
        self._relist = False
        self._answer: urllib3.BaseHTTPResponse | None = None
        self._failure: ApiError | None = None
        self.silent_since: float | None = None  # monotonic time since which the cluster does not answer
        self.trouble: ApiError | None = None  # error of the last attempt
        self._thread = threading.Thread(target=self._run, name=f"watch {selector}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, waiting at most 5 s for it, and drop the connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.relist()  # wakes the thread
        self._thread.join(5)
        self._api.close()

    def relist(self) -> None:
        """Start a new list now."""
        with self._changed:
            self._relist = True
            answer = self._answer
        if answer is not None:
            with contextlib.suppress(ValueError, OSError):
                answer.shutdown()

    def pods(self) -> list[dict[str, Any]]:
        """The last known state of all pods, including deleted ones."""
        with self._changed:
            return list(self._pods.values())

    @property
    def version(self) -> int:
        """Increases with every change; 0 until the first list is complete."""
        return self._version

    def wait(self, version: int, timeout: float) -> int:
        """Wait for a change since `version`. Raises ApiError if watching failed permanently."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version or self._failure or self._closed, timeout)
            if self._failure:
                raise self._failure
            return self._version

    def _run(self) -> None:
        pause, refused_until = MIN_PAUSE_SECONDS, 0.0
        while not self._closed:
            try:
                self._watch(self._list())
                pause = MIN_PAUSE_SECONDS
                continue
            except ApiError as error:
                is_starting = error.status in (401, 403) and time.monotonic() < refused_until
                if error.status in FATAL_STATUSES and not is_starting:
                    self._fail(error)
                    return
                if isinstance(error, ServerUnreachable):
                    self._note_silence(error)
                    refused_until = time.monotonic() + STARTING_SECONDS
                retry_after = error.details.get("retry_after")
            except Exception as error:  # a broken connection can garble the stream
                if not _is_broken_stream(error):
                    self._fail(ApiError(f"Watching the pods failed: {error!r}"))
                    return
                refused_until = time.monotonic() + STARTING_SECONDS
                retry_after = None
            self._sleep(retry_after if retry_after is not None else pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    def _list(self) -> str:
        """List all pods, page by page. Returns the resource version to watch from."""
        pods: dict[str, dict[str, Any]] = {}
        asked = time.monotonic()
        self._relist = False
        for page in _pages(self._api, self._path, self._selector, retry_seconds=0):
            pods.update((item["metadata"]["name"], _trim(item)) for item in page.get("items", ()))
        with self._changed:
            self.listed = asked
            self.silent_since = self.trouble = None
            for name in self._pods.keys() - pods.keys():
                pods[name] = {**self._pods[name], GONE: True}
            if pods != self._pods or not self._version:
                self._pods = pods
                self._notify()
        return str(page.get("metadata", {}).get("resourceVersion", ""))

    def _watch(self, version: str) -> None:
        """Apply events until the server ends the watch."""
        period = self._period * max(1.0, len(self._pods) / PERIOD_PODS)
        answer = self._api.stream(
            self._path,
            read_seconds=period + min(SLACK_SECONDS, period),
            labelSelector=self._selector,
            watch=True,
            resourceVersion=version,
            timeoutSeconds=max(1, int(period)),
            allowWatchBookmarks=True,
        )
        with self._changed:
            self._answer = answer
        try:
            if self._relist:
                return
            for line in split_lines(answer.stream(1 << 16)):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiError(str(status.get("message")), status=int(status.get("code") or 500))
                if event["type"] != "BOOKMARK":
                    self._apply(event["type"], _trim(event["object"]))
                if self._closed:
                    return
        finally:
            with self._changed:
                self._answer = None
            answer.close()

    def _apply(self, kind: str, pod: dict[str, Any]) -> None:
        with self._changed:
            self._pods[pod["metadata"]["name"]] = {**pod, GONE: True} if kind == "DELETED" else pod
            self._notify()

    def _notify(self) -> None:
        self._version += 1
        self._changed.notify_all()

    def _note_silence(self, error: ApiError) -> None:
        with self._changed:
            self.silent_since = self.silent_since or time.monotonic()
            self.trouble = error

    def _fail(self, error: ApiError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split a stream into complete lines without newlines. An incomplete last line is dropped."""
    rest = b""
    for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        yield from lines


def list_pods(api: Api, namespace: str, selector: str) -> list[dict[str, Any]]:
    """List the pods with `selector` once, page by page, because 1,000 complete pods take 50 MB."""
    pages = _pages(api, f"/api/v1/namespaces/{namespace}/pods", selector)
    return [_trim(item) for page in pages for item in page.get("items", ())]


def _pages(api: Api, path: str, selector: str, retry_seconds: float | None = None) -> Iterator[dict[str, Any]]:
    token: str | None = ""
    while token is not None:
        params = {"labelSelector": selector, "limit": PAGE, "continue": token or None}
        page = api.request("GET", path, params=params, retry_seconds=retry_seconds)
        yield page
        token = page.get("metadata", {}).get("continue") or None


def _trim(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the fields needed for diagnosis, about a fifth of a pod."""
    metadata, spec = pod.get("metadata", {}), pod.get("spec", {})
    return {
        "metadata": {key: metadata[key] for key in KEPT_METADATA if key in metadata},
        "spec": {key: spec[key] for key in ("nodeName",) if key in spec},
        "status": {key: value for key, value in pod.get("status", {}).items() if key not in ("podIPs", "hostIPs")},
    }


def _is_broken_stream(error: Exception) -> bool:
    import urllib3

    return isinstance(error, urllib3.exceptions.HTTPError | OSError | ValueError | KeyError)
