"""The gate in front of the workers of a run with a shaped network, as the client that follows the run sees it.

The workers wait (worker.sh) until a client has shaped the network and a probe among their pods has found it to be what
was asked for. How far that is stands in an annotation of the Job, so that another client can continue, or say why it
was refused.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NotRequired, TypedDict, cast

from mlbench_cli.engines.kubernetes.fetch import WORK_DIR
from mlbench_cli.engines.kubernetes.manifests import CHAOS, NETWORK_ANNOTATION, job_name
from mlbench_cli.engines.kubernetes.network import chaos
from mlbench_cli.engines.kubernetes.network.nodes import RunOnNode, shape_links
from mlbench_cli.engines.kubernetes.workers import Pod
from mlbench_cli.errors import CapacityError, MlbenchError, UnreachableError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api, ApiError
from mlbench_cli.kube.execute import execute
from mlbench_cli.kube.objects import object_path
from mlbench_cli.model.network import NOT_AS_ASKED, NetworkMethod, find_deviations, parse_network
from mlbench_cli.model.run import Finding, Run
from task_images import contract

SHAPING, OPEN, REFUSED = "shaping", "open", "refused"
ATTEMPTS = 3  # of the probe: a busy moment of a node is no property of the network
PROBE_SECONDS = 240.0
POLL_SECONDS = 0.5
NOTE_SECONDS = 10.0  # between two notes of the client that shapes
STALE_SECONDS = 40.0  # after which another client takes over
PARALLEL_PODS = 16
EXCESS = 1.1  # of the rate: above it, the link is not limited by it
SURE_EXCESS = 2.0  # of the rate, which no late reader of a busy machine explains
LARGE_BURST_BYTES = 256 << 20
_WRITE_ORDER = f'printf "%s\\n" "$1" >{WORK_DIR}/order.part && mv {WORK_DIR}/order.part {WORK_DIR}/order'


class NetworkState(TypedDict):
    """The value of the annotation. `time` in seconds since 1970; `holder` names the client that shapes."""

    state: str
    time: float
    holder: str
    problem: NotRequired[str]
    report: NotRequired[Mapping[str, Any]]


def read_state(job: Mapping[str, Any] | None) -> NetworkState | None:
    """What the Job says of the run's network; None if nobody has begun to shape it."""
    annotations = ((job or {}).get("metadata") or {}).get("annotations") or {}
    try:
        document = json.loads(annotations[NETWORK_ANNOTATION])
        known = {"state": str(document["state"]), "time": float(document["time"]), "holder": str(document["holder"])}
    except (KeyError, ValueError, TypeError):
        return None
    return cast(NetworkState, {**document, **known})


def network_findings(job: Mapping[str, Any] | None) -> list[Finding]:
    """Why the run's network was refused, if it was."""
    state = read_state(job)
    if state is None or state["state"] != REFUSED:
        return []
    return [
        Finding(
            NOT_AS_ASKED,
            f"The requested network is not available: {state.get('problem')}.",
            hint="Request another network or --network-method, or remove --network to measure only.",
            retryable=True,
            evidence={"report": state.get("report") or {}},
        )
    ]


class NetworkGate:
    """Shapes and proves the network of one run in a separate thread, once all its pods run."""

    def __init__(
        self,
        access: Access,
        namespace: str,
        run: Run,
        documents: Sequence[Mapping[str, Any]],
        run_on_node: RunOnNode | None,
    ) -> None:
        self._access = access
        self._namespace = namespace
        self._run = run
        self._chaos = [document for document in documents if document["kind"] == CHAOS]
        self._run_on_node = run_on_node
        self._shape = parse_network(run.spec.network or "")
        self._method = NetworkMethod(run.spec.kubernetes.network_method or NetworkMethod.NSENTER)
        self._holder = f"{socket.gethostname()}/{os.getpid()}/{id(self)}"
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._noted = float("-inf")
        self.is_open = False
        self.is_refused = False
        self.failure: MlbenchError | None = None  # of the way to the cluster: another client may continue

    def advance(self, job: Mapping[str, Any] | None, pods: Mapping[int, Pod], server_time: float) -> None:
        """Begin if all pods run and nobody else has begun. Raises what kept this client from going on."""
        if self.failure is not None:
            raise self.failure
        state = read_state(job)
        self.is_open |= state is not None and state["state"] == OPEN
        self.is_refused |= state is not None and state["state"] == REFUSED
        if self.is_open or self.is_refused or self._thread is not None or job is None:
            return
        if state is not None and server_time - state["time"] < STALE_SECONDS:
            return  # another client is at it
        if len(pods) == self._run.spec.unit_count and all(_runs(pod) for pod in pods.values()):
            arguments = (job, dict(pods), server_time - time.time())
            self._thread = threading.Thread(target=self._work, args=arguments, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread at its next step."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(POLL_SECONDS * 4)

    def _work(self, job: Mapping[str, Any], pods: Mapping[int, Pod], ahead: float) -> None:
        try:
            with self._access.client() as api:
                self._shape_and_prove(api, job, pods, ahead)
        except MlbenchError as error:
            if isinstance(error, ApiError) and error.status in (400, 404):
                return  # a container has ended: the observer says why
            self.failure = error

    def _shape_and_prove(self, api: Api, job: Mapping[str, Any], pods: Mapping[int, Pod], ahead: float) -> None:
        self._note(api, SHAPING, ahead)
        report: Mapping[str, Any] = {}
        try:
            setup = self._make(api, job, pods)
            number, report, problems = self._prove(api, pods, ahead)
        except UnreachableError:
            raise
        except (ApiError, CapacityError) as error:
            if isinstance(error, ApiError) and error.status in (0, 400, 401, 404):
                raise
            problems = [error.message.rstrip(".")]
        if problems:
            self._note(api, REFUSED, ahead, problem=self._explain(report, problems), report=report)
            self.is_refused = True
            return
        event = {"event": "network", "rank": 0, "time": round(time.time() + ahead, 3), "stage": "setup", "setup": setup}
        self._order(pods, f"go {number} {contract.format_event({'v': contract.VERSION, **event})}")
        self._note(api, OPEN, ahead)
        self.is_open = True

    def _make(self, api: Api, job: Mapping[str, Any], pods: Mapping[int, Pod]) -> Mapping[str, object]:
        """Have the network shaped; what was done, for the archive."""
        facts: dict[str, object] = {"method": str(self._method)}
        if self._method is NetworkMethod.CHAOS_MESH:
            return {**facts, "objects": chaos.inject(api, self._chaos, job)}
        if self._method is NetworkMethod.ANNOTATION:
            return facts  # the pods have had theirs since they were made
        if self._run_on_node is None:
            raise CapacityError("this client cannot reach the containers of the nodes")
        links = shape_links(self._run_on_node, pods, self._shape)
        kinds = sorted({link["discipline"] for link in links})
        return {**facts, "discipline": ", ".join(kinds), "links": len(links), "first": links[0]}

    def _prove(self, api: Api, pods: Mapping[int, Pod], ahead: float) -> tuple[str, Mapping[str, Any], list[str]]:
        """Number and report of the first probe that shows the network that was asked for, or of the last one."""
        for _ in range(ATTEMPTS):
            number = str(time.time_ns() // 1_000_000)
            self._order(pods, f"probe {number}")
            report = self._await_report(api, pods[0], number, ahead)
            problems = find_deviations(self._shape, report)
            if not problems or self._is_faster(report):
                break
        return number, report, problems

    def _is_faster(self, report: Mapping[str, Any]) -> bool:
        """Whether a link carries so much more than was asked for that another probe would show the same."""
        names = ("alone_bits_per_second", "together_bits_per_second", "first_bits_per_second")
        rates = [float(link[name]) for link in report.get("links") or () for name in names if name in link]
        return max(rates, default=0.0) > SURE_EXCESS * self._shape.rate

    def _await_report(self, api: Api, pod: Pod, number: str, ahead: float) -> Mapping[str, Any]:
        deadline = time.monotonic() + PROBE_SECONDS
        command = ["cat", f"{WORK_DIR}/probe-{number}"]
        while time.monotonic() < deadline and not self._closed.wait(POLL_SECONDS):
            done = execute(self._access, self._namespace, pod["metadata"]["name"], command)
            if done.code == 0:
                return contract.parse_event(done.stdout) or {"error": "the probe's report cannot be read"}
            if time.monotonic() > self._noted + NOTE_SECONDS:
                self._note(api, SHAPING, ahead)
        if self._closed.is_set():
            raise UnreachableError("The client stopped following the run.", hint=f"mlbench wait {self._run.name}")
        return {"error": f"the probe gave no report within {PROBE_SECONDS:g} s"}

    def _order(self, pods: Mapping[int, Pod], text: str) -> None:
        """Hand an order to all workers. Raises ApiError; CapacityError if a worker cannot write it down."""

        def write(pod: Pod) -> None:
            name = pod["metadata"]["name"]
            done = execute(self._access, self._namespace, name, ["sh", "-c", _WRITE_ORDER, "sh", text])
            if done.code:
                raise CapacityError(f"the pod {name} does not accept commands: {done.stderr[:200]}")

        with ThreadPoolExecutor(PARALLEL_PODS) as pool:
            list(pool.map(write, pods.values()))

    def _explain(self, report: Mapping[str, Any], problems: Sequence[str]) -> str:
        """The problems in one sentence without its stop, with the usual reason if one is known."""
        text = "; ".join(problems)
        if self._method is not NetworkMethod.ANNOTATION or not report.get("links"):
            return text
        if report.get("drained_bits_per_second", 0) > EXCESS * self._shape.rate:
            return f"{text}: the cluster's network plugin does not limit pods by their annotations"
        if report.get("drained_bytes", 0) >= LARGE_BURST_BYTES:
            return f"{text}, from a token bucket of about 512 MiB, containerd's default, which training does not empty"
        return text

    def _note(self, api: Api, state: str, ahead: float, **more: Any) -> None:
        document = {"state": state, "time": round(time.time() + ahead, 3), "holder": self._holder, **more}
        path = object_path("Job", self._namespace, job_name(self._run.spec))
        api.patch(path, {"metadata": {"annotations": {NETWORK_ANNOTATION: json.dumps(document)}}})
        self._noted = time.monotonic()


def _runs(pod: Pod) -> bool:
    status = pod.get("status", {})
    return status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
