"""A run's keeper from outside: what it has, until when, how it is let go.

What runs inside its pod is templates/kubernetes/keeper.py.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_cli.engines.kubernetes.fetch import WORK_DIR, HeldArchive
from mlbench_cli.engines.kubernetes.manifests import keeper_name
from mlbench_cli.engines.kubernetes.pods import KEEPER, ROLE_LABEL, RUN_LABEL
from mlbench_cli.engines.kubernetes.workers import (
    Pod,
    Summary,
    has_ended,
    is_on_silent_node,
    reason,
    terminated_state,
)
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError, NodeUnreachable
from mlbench_cli.kube.execute import execute
from mlbench_cli.kube.objects import object_path
from mlbench_cli.kube.watch import list_pods

FRESH_SECONDS = 0.3  # for which an answer of the keeper is cached
PATIENCE_SECONDS = 60.0  # timeout for an answer of a running keeper
# A silent node may come back until the cluster gives its pods up, after five minutes by default. What a run that has
# lost a worker left with its keeper is only a part, and worth less patience.
NODE_PATIENCE_SECONDS, LOST_PATIENCE_SECONDS = 600.0, 30.0
PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class KeptWorker:
    """One worker's results on the keeper, verified on arrival. `truncated`: the log's end is missing."""

    summary: Summary
    archive: HeldArchive | None = None
    log: HeldArchive | None = None
    samples: HeldArchive | None = None
    truncated: bool = False


@dataclass(frozen=True)
class KeptResults:
    """The keeper's index: `until` in seconds since 1970, None while nobody has handed over; the pod that has them."""

    pod: str
    until: float | None
    workers: Mapping[int, KeptWorker]


class Keeper:
    """Asks the keeper of one run. Safe for several threads."""

    def __init__(self, access: Access, api: Api, namespace: str, run_name: str, *, is_lost: bool = False) -> None:
        """`is_lost`: the run has lost a worker with its node."""
        self._access = access
        self._api = api
        self._namespace = namespace
        self._run_name = run_name
        self._lock = threading.Lock()
        self._node_patience = LOST_PATIENCE_SECONDS if is_lost else NODE_PATIENCE_SECONDS
        self._given_up: str | None = None  # uid of a pod whose node is silent
        self._known: KeptResults | None = None
        self._asked = float("-inf")

    def read(self, after: float | None = None, patience: float = PATIENCE_SECONDS) -> KeptResults | None:
        """The index, at most FRESH_SECONDS old, or read after that moment of the monotonic clock.

        None if the keeper is gone, or has not started, or its node stays silent. Raises ApiError if it runs and does
        not answer for `patience` seconds: then nothing is lost.
        """
        with self._lock:
            if self._asked < (time.monotonic() - FRESH_SECONDS if after is None else after):
                asked = time.monotonic()
                self._known = self._read(asked, patience)
                self._asked = asked
            return self._known

    @property
    def is_given_up(self) -> bool:
        """Whether the keeper may have results, on a node that has been silent for too long."""
        return self._given_up is not None

    def pods(self) -> list[Pod]:
        """The keeper's pods, also those that have ended, oldest first."""
        selector = f"{RUN_LABEL}={self._run_name},{ROLE_LABEL}={KEEPER}"
        pods = list_pods(self._api, self._namespace, selector)
        return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def release(self) -> None:
        """Delete the keeper and its contents."""
        self._api.delete(object_path("Job", self._namespace, keeper_name(self._run_name)))

    def _read(self, begun: float, patience: float) -> KeptResults | None:
        while True:
            pod = next((pod for pod in reversed(self.pods()) if _runs(pod)), None)
            if pod is None:
                return None
            name, is_silent = pod["metadata"]["name"], is_on_silent_node(pod)
            if is_silent and self._given_up == pod["metadata"]["uid"]:
                return None
            try:
                if is_silent and not patience:
                    raise NodeUnreachable(f"The node of the keeper {name} is not responding.")
                done = execute(self._access, self._namespace, name, ["cat", f"{WORK_DIR}/index.json"])
                found = _parse(name, done.stdout) if done.code == 0 else None
                trouble = ApiError(f"The keeper {name} does not list its contents: {done.stderr or 'no index'}")
            except ApiError as error:
                if error.status in (401, 403):
                    raise
                found, trouble = None, error
            if found is not None:
                return found
            waited = time.monotonic() - begun
            if is_silent and patience and waited >= self._node_patience:
                self._given_up = pod["metadata"]["uid"]
                return None
            if waited >= patience and not (is_silent and patience):
                raise trouble
            time.sleep(PAUSE_SECONDS)


def _runs(pod: Pod) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and not has_ended(pod)


def kept_file(worker: int, name: str) -> str:
    """The path of a worker's file on the keeper."""
    return f"{WORK_DIR}/{worker}/{name}"


def why_gone(pods: Sequence[Pod]) -> str:
    """How the keeper's last pod ended, or why there is none, as part of a sentence."""
    if not pods:
        return "its pod is gone"
    pod = pods[-1]
    if is_on_silent_node(pod):
        return f"its node {pod.get('spec', {}).get('nodeName')} does not answer"
    message = str(terminated_state(pod).get("message") or pod.get("status", {}).get("message") or "").strip()
    if pod.get("status", {}).get("phase") == "Succeeded":
        return message.rstrip(".") or "it had expired"
    return f"{reason(pod) or pod.get('status', {}).get('phase') or 'unknown'}{': ' + message if message else ''}"


def _parse(pod: str, data: bytes) -> KeptResults | None:
    try:
        document = json.loads(data)
        workers = {int(number): _worker(entry) for number, entry in document["workers"].items()}
        until = document["until"]
        return KeptResults(pod, None if until is None else float(until), workers)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _worker(entry: Mapping[str, Any]) -> KeptWorker:
    log = entry.get("log") or {}
    summary = entry.get("summary")
    return KeptWorker(
        summary if isinstance(summary, dict) else {},
        _parse_kept_archive(entry.get("archive")),
        _parse_kept_archive(entry.get("log")),
        _parse_kept_archive(entry.get("samples")),
        bool(log.get("truncated")),
    )


def _parse_kept_archive(facts: Any) -> HeldArchive | None:
    return HeldArchive(int(facts["size"]), str(facts["sha256"])) if isinstance(facts, dict) else None
