"""One observation of a run on a cluster: Job, pods, events and nodes -> Observation."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlbench_cli.engines.kubernetes.diagnosis.diagnose import diagnose
from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts
from mlbench_cli.engines.kubernetes.diagnosis.failures import deadline, start_timeout
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import NORMAL_EVENTS
from mlbench_cli.engines.kubernetes.ending import decide_ending, is_over, is_stopped, start_limit
from mlbench_cli.engines.kubernetes.keeper import Keeper
from mlbench_cli.engines.kubernetes.logs import (
    MARKER,
    last_lines,
    log_gap,
    position_file,
    read_position,
    without_stamps,
)
from mlbench_cli.engines.kubernetes.manifests import holders
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import read_job
from mlbench_cli.engines.kubernetes.topology import find_topology
from mlbench_cli.engines.kubernetes.workers import (
    Known,
    Pod,
    Summary,
    by_worker,
    first_failed,
    has_started,
    is_cut_off,
    is_on_silent_node,
    last_words,
    worker_state,
    worker_states,
)
from mlbench_cli.errors import MlbenchError
from mlbench_cli.kube.api import AccessDenied, Api, ApiError, ObjectNotFound
from mlbench_cli.kube.objects import collection_path, condition, object_path
from mlbench_cli.kube.watch import GONE, list_pods
from mlbench_cli.model.run import Ending, Finding, Observation, Run, WorkerState

CONFIRM_SECONDS = 15.0  # that a problem must last before it counts as permanent
# An autoscaler may need this long to say that it is there, and the pods of another run to free resources.
CONFIRM_UNSCHEDULABLE_SECONDS = 60.0
PROBED = 16  # holding workers that one look asks for their last word
TAILS = 3  # failed workers whose last lines are looked at
TAIL_LINES = 40


class RunObserver:
    """Observes one run repeatedly. `ranks[i]` is the first rank of worker i."""

    def __init__(self, api: Api, namespace: str, run: Run, ranks: Sequence[int], keeper: Keeper | None = None) -> None:
        self._api = api
        self._keeper = keeper
        self._namespace = namespace
        self._run = run
        self._ranks = ranks
        self._events: list[dict[str, Any]] = []
        self._nodes: list[dict[str, Any]] = []
        self._denied: set[str] = set()
        self._groups: frozenset[str] | None = None  # of the cluster's API; asked for once a pod has no node
        self._topology: dict[str, dict[str, str]] = {}  # of all nodes that were listed, by name
        self._topology_asked = False
        self._since: dict[str, float] = {}  # finding's code -> when it was seen first
        self._tails: dict[int, str] = {}
        self._state_of = Known(worker_state)
        self._failing_since: float | None = None
        self.job: dict[str, Any] | None = None

    def refresh(self, pods: Mapping[int, Pod]) -> None:
        """Read the Job, and events and nodes if they can be relevant."""
        try:
            self.job = read_job(self._api, self._namespace, self._run.spec)
        except ObjectNotFound:
            self.job = None
            return
        waiting = len(pods) < self._run.spec.unit_count or not all(has_started(pod) for pod in pods.values())
        without_node = any(not pod.get("spec", {}).get("nodeName") for pod in pods.values())
        failed = any(pod.get("status", {}).get("phase") == "Failed" for pod in pods.values())
        self._events = self._ask_events(without_node) if waiting else []
        # A node that falls silent makes its pods unready.
        silent = any(condition(pod, "Ready").get("status") == "False" for pod in pods.values())
        if without_node and self._groups is None:
            self._groups = frozenset(group["name"] for group in self._ask_groups())
        unknown = {pod.get("spec", {}).get("nodeName") for pod in pods.values()} - {None} - set(self._topology)
        wanted = waiting or without_node or failed or silent or (unknown and not self._topology_asked)
        self._nodes = self._ask("nodes", "/api/v1/nodes") if wanted else []
        self._topology |= find_topology(self._nodes)
        self._topology_asked = not waiting  # once for all when the last worker has a node

    def pods(self) -> dict[int, Pod]:
        """The pods as they are now, by worker."""
        return by_worker(list_pods(self._api, self._namespace, f"{RUN_LABEL}={self._run.name}"))

    def probe(self, pods: Mapping[int, Pod], summaries: Mapping[int, Summary]) -> dict[int, Summary]:
        """The last words of running workers that may hold their results, from their logs' last lines; of workers whose
        pods are gone, from the keeper.
        """
        found = {}
        running = [
            worker
            for worker in holders(self._run.spec)
            if worker not in summaries and worker in pods and pods[worker].get("status", {}).get("phase") == "Running"
        ]
        for worker in running[:PROBED]:
            summary = _parse_marker(self._tail(pods[worker], 1), worker)
            if summary is not None:
                found[worker] = summary
        return found | self._kept_summaries(pods, summaries)

    def _kept_summaries(self, pods: Mapping[int, Pod], summaries: Mapping[int, Summary]) -> dict[int, Summary]:
        gone = [
            worker
            for worker in range(self._run.spec.unit_count)
            if worker not in summaries and (worker not in pods or pods[worker].get(GONE))
        ]
        if not gone or not self._keeper or not self.job or not (is_over(self.job) or is_stopped(self.job)):
            return {}
        try:
            results = self._keeper.read(patience=0)
        except ApiError:
            return {}  # the next observation may succeed
        kept = results.workers if results else {}
        known = {worker: kept[worker].summary for worker in gone if worker in kept}
        return {worker: summary for worker, summary in known.items() if "exit_code" in summary}

    def observation(self, pods: Mapping[int, Pod], summaries: Mapping[int, Summary]) -> Observation:
        """Derive an observation from the pods and last words now, and from the Job, events and nodes as last read.

        Times are seconds since 1970 by the server's clock. Nothing is asked of the cluster.
        """
        now, spec, job = time.time() + self._api.server_ahead, self._run.spec, self.job or {}
        summaries = last_words(pods, summaries)
        states = worker_states(spec.unit_count, pods, summaries, spec.run_on_all, self._state_of)
        first = first_failed(job, states, pods, summaries)
        if first is not None:
            self._failing_since = min(self._failing_since or now, states[first].finished or now)
        found = (
            []
            if is_stopped(job)
            else diagnose(
                job,
                pods.values(),
                self._events,
                self._nodes,
                now=now,
                summaries=summaries,
                logs=self._last_lines(states, first, pods),
                states=states,
                groups=self._groups or frozenset(),
            )
        )
        word = decide_ending(spec, job, states, pods, summaries, now, self._failing_since)
        codes = {finding.code for finding in found}
        if word == Ending.NEVER_STARTED:
            found.insert(0, start_timeout(spec.kubernetes.start_timeout, states, found))
        elif word == "deadline" and "deadline" not in codes:
            found.append(deadline(Facts(job, pods, (), (), now, summaries)))
        elif word is None and found and (limit := start_limit(spec, job, states)) is not None:
            found[0] = _with_limit(found[0], limit, spec.kubernetes.start_timeout)
        return Observation(
            time=time.time(),
            workers=tuple(replace(state, rank=self._ranks[state.rank]) for state in states),
            findings=tuple(self._confirm_lasting(found, now)),
            ended=None if word is None else Ending(word),
            first_failed=None if first is None else self._ranks[first],
            topology={
                state.node: place for state in states if state.node and (place := self._topology.get(state.node))
            },
        )

    def _confirm_lasting(self, found: Sequence[Finding], now: float) -> list[Finding]:
        """The findings, permanent only if they have lasted long enough."""
        self._since = {finding.code: self._since.get(finding.code, now) for finding in found}
        return [replace(finding, permanent=finding.permanent and self._lasts(finding, now)) for finding in found]

    def _lasts(self, finding: Finding, now: float) -> bool:
        needed = CONFIRM_UNSCHEDULABLE_SECONDS if finding.code == "unschedulable" else CONFIRM_SECONDS
        return now - self._since[finding.code] >= needed

    def _last_lines(
        self, states: Sequence[WorkerState], first: int | None, pods: Mapping[int, Pod]
    ) -> Mapping[int, str]:
        """The ends of the logs of workers that failed, the first one's among them."""
        failed = [state.rank for state in states if state.phase == "failed"]
        chosen = [worker for worker in (first, *failed) if worker is not None][: TAILS + 1]
        for worker in dict.fromkeys(chosen):
            if not self._tails.get(worker):
                path = self._run.folder / "logs" / f"rank-{self._ranks[worker]}.log"
                self._tails[worker] = last_lines(path) or self._tail(pods.get(worker), TAIL_LINES)
        return self._tails

    def _tail(self, pod: Pod | None, lines: int) -> str:
        if pod is None or is_cut_off(pod) or is_on_silent_node(pod):  # waiting for it would be pointless
            return ""
        path = f"{object_path('Pod', self._namespace, pod['metadata']['name'])}/log"
        try:
            query = {"container": "main", "timestamps": True, "tailLines": lines, "limitBytes": 1 << 16}
            answer = self._api.stream(path, read_seconds=10, **query)
            with answer:
                return without_stamps(answer.read().decode("utf-8", "replace"))
        except (MlbenchError, OSError):
            return ""
        except Exception as error:
            import urllib3

            if isinstance(error, urllib3.exceptions.HTTPError):
                return ""
            raise

    def _ask_events(self, without_node: bool) -> list[dict[str, Any]]:
        path = collection_path("Event", self._namespace)
        found = self._ask("events", path, "type!=Normal")
        for reason in NORMAL_EVENTS if without_node else ():
            found += self._ask("events", path, f"reason={reason}")
        return found

    def _ask_groups(self) -> list[dict[str, Any]]:
        try:
            groups: list[dict[str, Any]] = self._api.get("/apis").get("groups", [])
        except ApiError:
            return []
        return groups

    def _ask(self, what: str, path: str, selector: str | None = None) -> list[dict[str, Any]]:
        """An optional list that helps to diagnose."""
        if what in self._denied:
            return []
        try:
            items: list[dict[str, Any]] = self._api.get(path, fieldSelector=selector).get("items", [])
        except AccessDenied:
            self._denied.add(what)
            return []
        except ApiError:
            return []
        return items


def known_summaries(run: Run, ranks: Sequence[int]) -> dict[int, Summary]:
    """The workers' last words, as far as their logs were copied into the run's folder."""
    positions = ((worker, read_position(position_file(run.folder, rank))) for worker, rank in enumerate(ranks))
    return {worker: position.summary for worker, position in positions if position and position.summary}


def known_gaps(run: Run, ranks: Sequence[int]) -> list[Finding]:
    """Known gaps in the logs in the run's folder."""
    positions = {worker: read_position(position_file(run.folder, rank)) for worker, rank in enumerate(ranks)}
    found = {worker: position for worker, position in positions.items() if position and position.gaps}
    refusals = {worker: position.refusal for worker, position in found.items() if position.refusal}
    return log_gap({worker: position.gaps for worker, position in found.items()}, ranks, refusals=refusals)


def _with_limit(finding: Finding, limit: float, seconds: float) -> Finding:
    """The finding on what the workers wait for, with the end of the wait."""
    if finding.permanent:
        return finding
    until = time.strftime("%Y-%m-%d %H:%M UTC" if seconds > 86400 else "%H:%M UTC", time.gmtime(limit))
    return replace(finding, summary=f"{finding.summary.rstrip('.')}. The run waits until {until} (--start-timeout).")


def _parse_marker(text: str, worker: int) -> Summary | None:
    """The last word of that worker in the end of its log."""
    match = re.search(re.escape(MARKER.decode()) + ".*", text)
    if match is None:
        return None
    try:
        summary = json.loads(match[0].removeprefix(MARKER.decode()[:-1]))
    except ValueError:
        return None
    ours = isinstance(summary, dict) and summary.get("worker") == worker and "exit_code" in summary
    return summary if ours else None
