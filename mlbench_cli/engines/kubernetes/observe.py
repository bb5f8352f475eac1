"""One observation of a run on a cluster: Job, pods, events and nodes, and what the agents say -> Observation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlbench_cli.engines.crashes import last_lines
from mlbench_cli.engines.diagnosis import read_last_lines
from mlbench_cli.engines.kubernetes.diagnosis.diagnose import diagnose, explain_head
from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts
from mlbench_cli.engines.kubernetes.diagnosis.failures import deadline, start_timeout
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import NORMAL_EVENTS
from mlbench_cli.engines.kubernetes.ending import decide_ending, is_suspended, start_limit, stopped_as
from mlbench_cli.engines.kubernetes.manifests import head_name
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import NameTaken, find_job, pods_of
from mlbench_cli.engines.kubernetes.workers import (
    Known,
    Pod,
    by_worker,
    find_end,
    first_failed,
    has_ended,
    has_started,
    is_cut_off,
    is_on_silent_node,
    main_status,
    worker_state,
    worker_states,
)
from mlbench_cli.engines.observe import NodeReport, Snapshot, observe
from mlbench_cli.engines.placement import share_nodes
from mlbench_cli.errors import MlbenchError
from mlbench_cli.kube.api import GONE, AccessDenied, Api, ApiError, list_pods, read_log
from mlbench_cli.kube.objects import collection_path, condition, object_path
from mlbench_cli.kube.official import official
from mlbench_cli.model.run import Ending, Finding, Observation, Phase, Run, WorkerState
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.files import read_end
from mlbench_cli.util.text import list_some

CONFIRM_SECONDS = 15.0  # that a problem must last before it counts as permanent
# An autoscaler may need this long to say that it is there, and the pods of another run to free resources.
CONFIRM_UNSCHEDULABLE_SECONDS = 60.0
CONFIRM_CONTAINER_SECONDS = 180.0  # a busy node's runtime may take several attempts
HEAD_SECONDS = 30.0  # in which a head starts after the first worker, if nothing is wrong
UNHEARD_SECONDS = 60.0  # after which it is told that a worker has not reached the head
QUICK_POLL = 2.0  # seconds between two looks at Job, pods and events while workers are not yet running
SLOW_POLL = 10.0
# Findings on a pod that say no more than its exit code, or that it was told to end.
GENERAL = ("rank_crashed", "pod_deleted", "retryable", "usage", "bad_environment", "wrong_result", "command_not_found")
# Findings on what was done to a worker from outside.
OUTSIDE = (
    *("evicted", "preempted", "spot_lost", "node_lost", "drained", "node_shut_down", "out_of_memory"),
    *("container_lost", "device_admission"),
)
TAILS = 3  # failed workers whose last lines are looked at
TAIL_LINES = 40


class RunObserver:
    """Observes one run repeatedly through `api`, with as few requests as possible."""

    def __init__(self, api: Api, namespace: str, run: Run) -> None:
        self._api = api
        self._namespace = namespace
        self._run = run
        self._pods: dict[int, Pod] = {}  # the last state of each worker's
        self._had_ended: set[int] = set()
        self._looked = self._next_look = 0.0
        self._events: list[dict[str, Any]] = []
        self._nodes: list[dict[str, Any]] = []
        self._booking: dict[str, Any] = {}  # what books the run's machines, while they have not come
        self._denied: set[str] = set()
        self._groups: frozenset[str] | None = None  # of the cluster's API; asked for once a pod has no node
        self._since: dict[str, float] = {}  # finding's code -> when it was seen first
        self._tails: dict[int, str] = {}
        self._state_of = Known(worker_state)
        self._failing_since: float | None = None
        self.job: dict[str, Any] | None = None

    def close(self) -> None:
        """Drop the connections."""
        self._api.close()

    def observe(self, snapshot: Snapshot) -> Observation:
        """The run now: `snapshot` is what its agents say. Raises ApiError."""
        # Known before the head was asked: what these pods had to say is in the snapshot.
        self._had_ended = {worker for worker, pod in self._pods.items() if has_ended(pod)}
        if any(
            report.state is not None and report.state["ended"] == Ending.CANCELED for report in snapshot.nodes.values()
        ):
            self._next_look = min(self._next_look, self._looked + QUICK_POLL)  # a pod that is taken away is soon gone
        if time.monotonic() >= self._next_look:
            self.refresh()
        seen = self.observation(snapshot)
        if seen.ended:
            self.refresh()  # the cluster may know more of its end
            seen = self.observation(snapshot)
        return seen

    def expire(self) -> None:
        """Ask the cluster at the next observation, however recent the last answer is."""
        self._next_look = 0.0

    def refresh(self) -> None:
        """Read Job and pods, and events and nodes if they can be relevant."""
        listed: Sequence[Pod] = list_pods(self._api, self._namespace, f"{RUN_LABEL}={self._run.name}")
        try:
            self.job = find_job(self._api, self._namespace, self._run)
        except NameTaken:
            self.job, listed = None, ()
        found = by_worker(listed if self.job is None else pods_of(self.job, listed))
        self._pods = {**{worker: {**pod, GONE: True} for worker, pod in self._pods.items()}, **found}
        pods = self._pods
        if self.job is None:
            return
        is_running = len(pods) == self._run.spec.workers and all(
            pod.get("status", {}).get("phase") == "Running" for pod in pods.values()
        )
        self._looked = time.monotonic()
        self._next_look = self._looked + (SLOW_POLL if is_running else QUICK_POLL)
        waiting = len(pods) < self._run.spec.workers or not all(has_started(pod) for pod in pods.values())
        without_node = any(not pod.get("spec", {}).get("nodeName") for pod in pods.values())
        failed = any(pod.get("status", {}).get("phase") == "Failed" for pod in pods.values())
        self._events = self._ask_events(without_node) + self._ask_pull(found) if waiting else []
        # A node that falls silent makes its pods unready.
        silent = any(condition(pod, "Ready").get("status") == "False" for pod in pods.values())
        if without_node and self._groups is None:
            self._groups = frozenset(group["name"] for group in self._ask_groups())
        self._booking = self._ask_booking() if without_node or is_suspended(self.job) else {}
        wanted = waiting or without_node or failed or silent
        self._nodes = self._ask("nodes", "/api/v1/nodes") if wanted else []

    def explain_head(self, seen: Observation, pods: Sequence[Pod]) -> Finding | None:
        """Why the run's head, whose pods these are, does not run although workers have for a while."""
        now = time.time() + self._api.server_ahead
        started = [worker.started for worker in seen.workers if worker.started is not None]
        if seen.ended or not started or now - min(started) < HEAD_SECONDS:
            return None
        try:
            job = self._api.get(object_path("Job", self._namespace, head_name(self._run.name)))
        except ApiError:
            return None
        return explain_head(job, pods, self._ask_events(without_node=False), now=now)

    def observation(self, snapshot: Snapshot) -> Observation:
        """Derive an observation from what the agents say now, and from Job, pods, events and nodes as last read.

        Times are seconds since 1970 by the server's clock. Nothing is asked of the cluster.
        """
        now, spec, job, pods = time.time() + self._api.server_ahead, self._run.spec, self.job or {}, self._pods
        ends = {worker: end for worker, report in snapshot.nodes.items() if (end := find_end(report)) is not None}
        states = worker_states(spec.workers, pods, ends, spec.run_on_all, self._state_of)
        first = first_failed(job, states, pods, ends)
        if first is not None:
            self._failing_since = min(self._failing_since or now, states[first].finished or now)
        stopped = stopped_as(job)
        found = (
            []
            if stopped not in ("", Ending.FAILED)
            else diagnose(
                job,
                pods.values(),
                self._events,
                self._nodes,
                now=now,
                ends=ends,
                logs=self._last_lines(states, first, snapshot),
                states=states,
                groups=self._groups or frozenset(),
                booking=self._booking,
                is_begun=snapshot.is_begun,
            )
        )
        if stopped:  # how the others ended says nothing, but what another client has stopped them for counts
            found = [finding for finding in found if finding.code in OUTSIDE]
        ended = decide_ending(spec, job, states, pods, ends, now, self._failing_since)
        codes = {finding.code for finding in found}
        if ended is Ending.NEVER_STARTED:
            found.insert(0, start_timeout(spec.pods.start_timeout, states, found))
        elif ended is Ending.DEADLINE and "deadline" not in codes:
            found.append(deadline(Facts(job, pods, (), (), now, ends)))
        elif ended is None and found and (limit := start_limit(spec, job, states)) is not None:
            found[0] = _with_limit(found[0], limit, spec.pods.start_timeout)
        if ended is None:
            found += self._find_unheard(states, snapshot, now)
        agents = self._observe_agents(snapshot)
        first_rank = None if first is None else spec.ranks_of(first)[0]
        if agents is not None and not stopped:
            if agents.ended is not Ending.CANCELED:  # they got SIGTERM; the pods say what from
                ended = agents.ended or ended
            if ended is Ending.LOST and any(finding.code in OUTSIDE for finding in found):
                ended = Ending.FAILED  # it is known what became of the machine
            if ended is not Ending.FAILED or agents.first_failed is not None:
                first_rank = agents.first_failed
            found = _join_findings(found, agents.findings)
        return Observation(
            time=time.time(),
            workers=tuple(sorted(self._ranks(states, agents), key=lambda state: state.rank)),
            findings=tuple(self._confirm_lasting(found, now)),
            ended=ended,
            first_failed=first_rank,
            seconds=agents.seconds if agents is not None and ended else None,
            clocks=agents.clocks if agents is not None else (),
        )

    def _find_unheard(self, states: Sequence[WorkerState], snapshot: Snapshot, now: float) -> Iterator[Finding]:
        """The finding on workers that run, but whose agents have not reached the head."""
        unheard = [
            state.rank
            for state in states
            if state.phase == Phase.RUNNING
            and now - (state.started or now) >= UNHEARD_SECONDS
            and snapshot.nodes.get(state.rank, NodeReport()).state is None
        ]
        if snapshot.is_served and unheard:
            yield Finding(
                "head_not_reached",
                "These workers run, but have not reached the run's head "
                f"{head_name(self._run.name)}: {list_some(list(map(str, unheard)), 8)} (of {len(states)}).",
                hint="Does a NetworkPolicy of the namespace deny pods each other, or DNS? kubectl get networkpolicy "
                f"-n {self._namespace}",
                retryable=True,
            )

    def _observe_agents(self, snapshot: Snapshot) -> Observation | None:
        """The observation from the agents alone; None before any has started. A pod that has ended no longer has an
        agent."""
        if not snapshot.is_begun:
            return None
        ended = self._had_ended if snapshot.is_served else ()
        nodes = {
            worker: replace(report, alive=False) if worker in ended else report
            for worker, report in snapshot.nodes.items()
        }
        folder = RunFolder(self._run.folder)
        return observe(
            self._run.spec, (), replace(snapshot, nodes=nodes), lambda rank: read_last_lines(folder.log(rank))
        )

    def _ranks(self, states: Sequence[WorkerState], agents: Observation | None) -> Iterator[WorkerState]:
        """The state of each rank and parameter server: what its agent says of it, and what the pod says of both."""
        for node, state in zip(share_nodes(self._run.spec), states, strict=True):
            for rank in node.ranks(self._run.spec):
                own = agents.workers[rank] if agents is not None else WorkerState(rank)
                if own.phase in (Phase.PENDING, Phase.STARTING) and own.started is None:
                    waits = own.phase == Phase.STARTING and state.phase == Phase.RUNNING
                    seen = replace(state, phase=own.phase, reason=own.reason) if waits else state
                    yield replace(seen, rank=rank)
                    continue
                is_over = Phase(own.phase).is_final
                known = own if is_over or not Phase(state.phase).is_final else state
                yield replace(
                    own,
                    phase=known.phase,
                    reason=(state.reason or own.reason) if known.phase == Phase.LOST else own.reason or state.reason,
                    exit_code=known.exit_code,
                    finished=known.finished,
                    node=state.node or own.node,
                    restarts=own.restarts or state.restarts,
                    image_digest=state.image_digest,
                )

    def _confirm_lasting(self, found: Sequence[Finding], now: float) -> list[Finding]:
        """The findings, permanent only if they have lasted long enough."""
        self._since = {finding.code: self._since.get(finding.code, now) for finding in found}
        return [replace(finding, permanent=finding.permanent and self._lasts(finding, now)) for finding in found]

    def _lasts(self, finding: Finding, now: float) -> bool:
        special = {
            "unschedulable": CONFIRM_UNSCHEDULABLE_SECONDS,
            "container_not_created": CONFIRM_CONTAINER_SECONDS,
        }
        return now - self._since[finding.code] >= special.get(finding.code, CONFIRM_SECONDS)

    def _last_lines(self, states: Sequence[WorkerState], first: int | None, snapshot: Snapshot) -> Mapping[int, str]:
        """The ends of the logs of workers that failed, the first one's among them."""
        failed = [state.rank for state in states if state.phase == "failed"]
        chosen = [worker for worker in (first, *failed) if worker is not None][: TAILS + 1]
        for worker in dict.fromkeys(chosen):
            if not self._tails.get(worker):
                state = snapshot.nodes.get(worker, NodeReport()).state
                first_failed = None if state is None else state["first_failed"]
                rank = self._run.spec.ranks_of(worker)[0] if first_failed is None else int(first_failed)
                said = [facts["start_error"] for facts in (state or {}).get("ranks", ()) if facts["start_error"]]
                text = read_end(RunFolder(self._run.folder).log(rank)).decode("utf-8", "replace")
                lines = [*last_lines(text, TAIL_LINES), *said]
                self._tails[worker] = "\n".join(lines) or self._tail(self._pods.get(worker), TAIL_LINES)
        return self._tails

    def _tail(self, pod: Pod | None, lines: int) -> str:
        if pod is None or is_cut_off(pod) or is_on_silent_node(pod):  # waiting for it would be pointless
            return ""
        path = object_path("Pod", self._namespace, pod["metadata"]["name"])
        try:
            return read_log(self._api, path, 10, tailLines=lines, limitBytes=1 << 16).decode("utf-8", "replace")
        except (MlbenchError, OSError, official().urllib3.exceptions.HTTPError):
            return ""

    def _ask_events(self, without_node: bool) -> list[dict[str, Any]]:
        path = collection_path("Event", self._namespace)
        found = self._ask("events", path, fieldSelector="type!=Normal")
        for reason in NORMAL_EVENTS if without_node else ():
            found += self._ask("events", path, fieldSelector=f"reason={reason}")
        return found

    def _ask_pull(self, pods: Mapping[int, Pod]) -> list[dict[str, Any]]:
        """The events about the pull of one worker's image, for the first that has a node and no container yet."""
        creating = (
            pod["metadata"]["uid"]
            for pod in pods.values()
            if (main_status(pod).get("state", {}).get("waiting") or {}).get("reason") == "ContainerCreating"
        )
        if (uid := next(creating, None)) is None:
            return []
        query = f"reason=Pulling,involvedObject.uid={uid}"
        return self._ask("events", collection_path("Event", self._namespace), fieldSelector=query)

    def _ask_booking(self) -> dict[str, Any]:
        """The run's own request for machines, or the Workload by which Kueue queues it; empty without either."""
        options = self._run.spec.pods
        try:
            if options.queue is not None:
                version = self._api.get("/apis/kueue.x-k8s.io")["preferredVersion"]["groupVersion"]
                label = f"kueue.x-k8s.io/job-uid={(self.job or {})['metadata']['uid']}"
                path = f"/apis/{version}/namespaces/{self._namespace}/workloads"
                return next(iter(self._ask("workloads", path, labelSelector=label)), {})
            if options.provisioning_class is not None:
                return self._api.get(object_path("ProvisioningRequest", self._namespace, self._run.name))
        except ApiError:
            pass
        return {}

    def _ask_groups(self) -> list[dict[str, Any]]:
        try:
            groups: list[dict[str, Any]] = self._api.get("/apis").get("groups", [])
        except ApiError:
            return []
        return groups

    def _ask(self, what: str, path: str, **selectors: str) -> list[dict[str, Any]]:
        """A list of objects that only the diagnosis uses; empty if it cannot be read."""
        if what in self._denied:
            return []
        try:
            items: list[dict[str, Any]] = self._api.get(path, **selectors).get("items", [])
        except AccessDenied:
            self._denied.add(what)
            return []
        except ApiError:
            return []
        return items


def _with_limit(finding: Finding, limit: float, seconds: float) -> Finding:
    """The finding on what the workers wait for, with the end of the wait."""
    if finding.permanent:
        return finding
    until = time.strftime("%Y-%m-%d %H:%M UTC" if seconds > 86400 else "%H:%M UTC", time.gmtime(limit))
    return replace(finding, summary=f"{finding.summary.rstrip('.')}. The run waits until {until} (--start-timeout).")


def _join_findings(pods: Sequence[Finding], agents: Sequence[Finding]) -> list[Finding]:
    """Merge the cluster's findings on pods with the agents' findings on ranks; of two on one failure, keep the more
    specific one."""
    special = [finding for finding in pods if finding.code not in GENERAL]
    known = {finding.code for finding in special} | ({"rank_crashed", "node_lost"} if special else set())
    known |= {"canceled_by_other"} if pods else set()  # by whoever took the pod away
    return [*special, *(finding for finding in agents if finding.code not in known)] or list(pods)
