"""Troubles that can be provoked on a real cluster: how, what they are to be called, and by what its API shows them."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL, has_ended, main_status, terminated_state
from mlbench_cli.kube.api import Api, ApiError
from mlbench_cli.kube.objects import collection_path, condition, is_true, object_path
from mlbench_cli.model.run import Observation, Run
from tests.e2e.runs import Runs, all_run

LOOK_SECONDS = 0.2
Object = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """What the API shows of a run at one moment, by plain lists."""

    job: Object
    pods: list[dict[str, Any]]
    events: list[dict[str, Any]]
    nodes: list[dict[str, Any]]


Known = Callable[[Shown], bool]


@dataclass(frozen=True)
class Trouble:
    """`code` is what the finding is to be called, `known` whether the API shows what it is about.

    before     the same of what it is to be called earlier
    patch      as --pod-patch
    arrange    what must be so while the run is tried
    meanwhile  what is done to the run once all workers run
    """

    code: str
    argv: tuple[str, ...]
    known: Known
    changes: dict[str, Any] = field(default_factory=dict)
    before: tuple[tuple[str, Known], ...] = ()
    patch: Mapping[str, Any] | None = None
    arrange: Callable[[Api, str], AbstractContextManager[Any]] = lambda api, namespace: nullcontext()
    meanwhile: Callable[[Api, str, Run], None] | None = None


def provoke(trouble: Trouble, name: str, runs: Runs, folder: Path) -> tuple[Observation, dict[str, float]]:
    """The first observation that has the trouble's code, or that the run has ended; and by how many seconds each code
    came after the API showed it (0 if it came first: a watch is quicker than a list now and then)."""
    cluster, changes = runs.cluster, dict(trouble.changes)
    stages = {**dict(trouble.before), trouble.code: trouble.known}
    told: dict[str, float] = {}
    if trouble.patch is not None:
        changes["options"] = {**changes.get("options", {}), "pod_patch": {"spec": trouble.patch}}
    with cluster.access.client() as api, trouble.arrange(api, cluster.access.namespace):
        engine, run = runs.start(cluster.spec(name, *trouble.argv, **changes), folder / "run")
        meanwhile = trouble.meanwhile
        with (
            Asking(api, cluster.access.namespace, run, stages) as asking,
            closing(watch(engine, run)) as observations,
        ):
            for seen in observations:
                if meanwhile and all_run(seen):
                    meanwhile(api, cluster.access.namespace, run)
                    meanwhile = None
                for code in {finding.code for finding in seen.findings} & stages.keys() - told.keys():
                    told[code] = time.monotonic()
                if seen.ended or trouble.code in told:
                    break
    return seen, {code: max(0.0, moment - asking.since.get(code, moment)) for code, moment in told.items()}


class Asking:
    """Lists everything again and again, and notes in `since` when the API shows what by the monotonic clock."""

    def __init__(self, api: Api, namespace: str, run: Run, stages: Mapping[str, Known]) -> None:
        self._api, self._namespace, self._run, self._stages = api, namespace, run, stages
        self.since: dict[str, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            with suppress(ApiError):
                shown = self._read_objects()
                for code, known in self._stages.items():
                    if code not in self.since and known(shown):
                        self.since[code] = time.monotonic()

    def _read_objects(self) -> Shown:
        job = self._api.get(object_path("Job", self._namespace, self._run.name))
        pods = self._api.get(collection_path("Pod", self._namespace), labelSelector=f"{RUN_LABEL}={self._run.name}")[
            "items"
        ]
        uids = {item["metadata"]["uid"] for item in (job, *pods)}
        events = self._api.get(collection_path("Event", self._namespace))["items"]
        nodes = self._api.get("/api/v1/nodes")["items"]
        return Shown(job, pods, [event for event in events if event["involvedObject"].get("uid") in uids], nodes)


def worker(api: Api, namespace: str, run: Run, index: int) -> dict[str, Any]:
    selector = f"{RUN_LABEL}={run.name},{INDEX_LABEL}={index}"
    pod: dict[str, Any] = api.get(collection_path("Pod", namespace), labelSelector=selector)["items"][0]
    return pod


# --- what the API shows ---------------------------------------------------------------------------------------------


def unschedulable(shown: Shown) -> bool:
    return any(condition(pod, "PodScheduled").get("reason") == "Unschedulable" for pod in shown.pods)


def waits(*reasons: str) -> Callable[[Shown], bool]:
    def known(shown: Shown) -> bool:
        states = (main_status(pod).get("state", {}).get("waiting", {}).get("reason") for pod in shown.pods)
        return any(state in reasons for state in states)

    return known


def event(reason: str) -> Callable[[Shown], bool]:
    return lambda shown: any(event["reason"] == reason for event in shown.events)


def has_crashed(shown: Shown) -> bool:
    return any(terminated_state(pod).get("exitCode") for pod in shown.pods)


def is_disrupted(shown: Shown) -> bool:
    return any(is_true(condition(pod, "DisruptionTarget")) for pod in shown.pods)


def is_evicted(shown: Shown) -> bool:
    return any(pod["status"].get("reason") == "Evicted" for pod in shown.pods)


def is_deleted(shown: Shown) -> bool:
    going = (pod for pod in shown.pods if "deletionTimestamp" in pod["metadata"])
    return len(shown.pods) < 2 or any(map(has_ended, going))


def node_silent(shown: Shown) -> bool:
    return any(condition(node, "Ready").get("status") == "Unknown" for node in shown.nodes)


# --- what is done ---------------------------------------------------------------------------------------------------


def _there(kind: str, body: dict[str, Any]) -> Callable[[Api, str], AbstractContextManager[Any]]:
    """An object of the namespace that is there meanwhile."""

    @contextmanager
    def arrange(api: Api, namespace: str) -> Iterator[None]:
        path = f"/api/v1/namespaces/{namespace}/{kind}"
        api.create(path, {"apiVersion": "v1", "metadata": {"name": "trouble"}, **body})
        try:
            while kind == "resourcequotas" and not api.get(f"{path}/trouble").get("status", {}).get("hard"):
                time.sleep(0.1)
            yield
        finally:
            api.delete(f"{path}/trouble")

    return arrange


def _delete(api: Api, namespace: str, run: Run) -> None:
    api.delete(object_path("Pod", namespace, worker(api, namespace, run, 1)["metadata"]["name"]))


def _evict(api: Api, namespace: str, run: Run) -> None:
    """What `kubectl drain` does to each pod of a node."""
    name = worker(api, namespace, run, 1)["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    api.create(f"{object_path('Pod', namespace, name)}/eviction", body)


def _pause_node(api: Api, namespace: str, run: Run) -> None:
    node = worker(api, namespace, run, 1)["spec"]["nodeName"]
    subprocess.run(["docker", "pause", node], check=True, capture_output=True)


@contextmanager
def nodes_go_on(api: Api, namespace: str) -> Iterator[None]:
    """Afterwards all nodes run again, and are ready."""
    try:
        yield
    finally:
        names = [node["metadata"]["name"] for node in api.get("/api/v1/nodes")["items"]]
        for name in names:
            subprocess.run(["docker", "unpause", name], check=False, capture_output=True)
        end = time.monotonic() + 120
        while time.monotonic() < end and not all(map(_is_ready, api.get("/api/v1/nodes")["items"])):
            time.sleep(1)


def _is_ready(node: Object) -> bool:
    tainted = any(taint["key"].startswith("node.kubernetes.io/") for taint in node["spec"].get("taints") or ())
    return is_true(condition(node, "Ready")) and not tainted


def nodes_can_be_paused(api: Api) -> bool:
    """Whether the nodes are containers of this machine's Docker."""
    if shutil.which("docker") is None:
        return False
    names = [node["metadata"]["name"] for node in api.get("/api/v1/nodes")["items"]]
    return subprocess.run(["docker", "inspect", *names], check=False, capture_output=True).returncode == 0


EAT = "x = []\nwhile True: x.append(bytearray(b'x' * (1 << 20)))"
SLEEP = ("sleep", "100")
PULL = waits("ErrImagePull", "ImagePullBackOff")
SMALL_TMP = {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "4Mi"}}]}
TROUBLES: dict[str, Trouble] = {
    "cpu": Trouble("unschedulable", ("true",), unschedulable, {"cpus": 500.0}),
    "gpu": Trouble("unschedulable", ("true",), unschedulable, {"gpus_per_worker": 1, "device": "gpu"}),
    "nodes": Trouble("unschedulable", SLEEP, unschedulable, {"workers": 3}),
    "node-selector": Trouble("unschedulable", ("true",), unschedulable, {"options": {"node_selector": {"no": "such"}}}),
    "image": Trouble("image_pull", ("true",), PULL, {"image": "nosuch.invalid/x:1"}),
    "image-absent": Trouble(
        "image_not_found", ("true",), waits("ErrImageNeverPull"), {"image": "nosuch.invalid/x:1"},
        patch={"containers": [{"name": "main", "imagePullPolicy": "Never"}]},
    ),
    "image-name": Trouble("image_name_invalid", ("true",), waits("InvalidImageName"), {"image": "A b:1"}),
    "secret": Trouble(
        "config_error", ("true",), waits("CreateContainerConfigError"),
        patch={"containers": [{"name": "main", "envFrom": [{"secretRef": {"name": "nosuch"}}]}]},
    ),
    "quota": Trouble(
        "quota_exceeded", ("true",), event("FailedCreate"),
        arrange=_there("resourcequotas", {"kind": "ResourceQuota", "spec": {"hard": {"pods": "1"}}}),
    ),
    "limits": Trouble(
        "admission_denied", ("true",), event("FailedCreate"), {"options": {"memory": "1Gi"}},
        arrange=_there(
            "limitranges",
            {"kind": "LimitRange", "spec": {"limits": [{"type": "Container", "max": {"memory": "10Mi"}}]}},
        ),
    ),
    "host-network": Trouble("pod_security", ("true",), event("FailedCreate"), patch={"hostNetwork": True}),
    "command": Trouble("command_not_found", ("no-such-command",), has_crashed),
    "memory": Trouble(
        "out_of_memory", ("python3", "-c", EAT), has_crashed, {"options": {"memory": "64Mi", "shm": "16Mi"}}
    ),
    "disk": Trouble(
        "evicted", ("sh", "-c", "head -c 40000000 /dev/zero >/tmp/x; sleep 300"), is_evicted, patch=SMALL_TMP
    ),
    "deadline": Trouble("deadline", SLEEP, has_crashed, {"timeout": 2.0}),
    "exit-64": Trouble("usage", ("sh", "-c", "exit 64"), has_crashed),
    "exit-70": Trouble("wrong_result", ("sh", "-c", "exit 70"), has_crashed),
    "exit-75": Trouble("retryable", ("sh", "-c", "exit 75"), has_crashed),
    "exit-78": Trouble("bad_environment", ("sh", "-c", "exit 78"), has_crashed),
    "crash": Trouble("rank_crashed", ("sh", "-c", '[ "$RANK" = 0 ] || exit 3; sleep 100'), has_crashed),
    "segv": Trouble("rank_crashed", ("sh", "-c", "kill -SEGV $$"), has_crashed),
    "shm": Trouble("shm_exhausted", ("sh", "-c", "kill -BUS $$"), has_crashed),
    "deleted": Trouble("pod_deleted", SLEEP, is_deleted, meanwhile=_delete),
    "drained": Trouble("drained", SLEEP, is_disrupted, meanwhile=_evict),
    "node": Trouble(
        "node_lost", ("sleep", "300"), is_disrupted, before=(("node_unreachable", node_silent),),
        arrange=nodes_go_on, meanwhile=_pause_node,
    ),
}  # fmt: skip
WANTS_DOCKER = frozenset({"node"})
