"""Provokes troubles on a real cluster (three nodes, two of them workers) and records what its API says of them.

usage: KUBECONFIG=... python tests/unit/engines/kubernetes/recorded/record.py IMAGE [NAME...]

IMAGE has sh and python3 and is on the nodes. Each trouble is a function below; it writes NAME.json beside this file.
`node_lost` wants somebody to stop the node of worker 1 meanwhile.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.engines.kubernetes.engine import KubernetesEngine, _remove
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.submit import submit
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL, main_status
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import GONE, Api, RequestRejected, list_pods
from mlbench_cli.kube.objects import collection_path, condition, is_true, object_path
from mlbench_cli.model.spec import KubernetesOptions, RunSpec

NAMESPACE = "recording"
WAIT = ("sh", "-c", "sleep 600")
Object = dict[str, Any]
Change = Callable[[Object], None]
Pods = list[Object]


class Recorder:
    def __init__(self, api: Api, access: Access, image: str) -> None:
        self.api, self.access, self.image = api, access, image

    def record(
        self,
        name: str,
        until: Callable[[Mapping[str, Any], Pods], bool],
        *,
        change: Change | None = None,
        meanwhile: Callable[[Pods], None] | None = None,
        seconds: float = 60,
        settle: float = 1,
        **spec: Any,
    ) -> None:
        """Submit a run with the given changes, and write down Job, pods, events and nodes when `until` says so."""
        options = {"kubernetes": KubernetesOptions()}
        fields = {"argv": WAIT, "workers": 2, "image": self.image, **options, **spec}
        run = RunSpec(
            name=name.replace("_", "-"),
            cluster="c",
            engine="kubernetes",
            task="custom",
            preset="custom",
            backend="gloo",
            **fields,
        )
        documents = KubernetesEngine(self.access).render(run).documents
        if change is not None:
            change(documents[0]["spec"]["template"]["spec"])
        submit(self.api, documents)
        seen: dict[str, Object] = {}
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.5)
                now = {pod["metadata"]["name"]: pod for pod in self._list(run.name)}
                seen = {**{name: {**pod, GONE: True} for name, pod in seen.items()}, **now}
                pods = list(seen.values())
                job = self.api.get(object_path("Job", NAMESPACE, run.name))
                if meanwhile is not None and len(pods) == 2 and all(map(runs, pods)):
                    meanwhile(pods)
                    meanwhile = None
                if until(job, pods):
                    break
            else:
                raise SystemExit(f"{name}: not within {seconds:.0f} s: {json.dumps(pods, indent=1)}")
            time.sleep(settle)
            self._write(name, self.api.get(object_path("Job", NAMESPACE, run.name)), pods)
        finally:
            _remove(self.api, NAMESPACE, run)

    def _list(self, run: str) -> Pods:
        pods = list_pods(self.api, NAMESPACE, f"{RUN_LABEL}={run}")
        return [pod for pod in pods if INDEX_LABEL in pod["metadata"]["labels"]]

    def _write(self, name: str, job: dict[str, Any], pods: Pods) -> None:
        uids = {pod["metadata"]["uid"] for pod in pods} | {job["metadata"]["uid"]}
        events = self.api.get(collection_path("Event", NAMESPACE), fieldSelector="type!=Normal")["items"]
        nodes = self.api.get("/api/v1/nodes")["items"]
        job["spec"]["template"]["spec"]["containers"][0].pop("env")
        job["metadata"].pop("annotations")
        for item in (job, *events, *nodes):
            item["metadata"].pop("managedFields", None)
        facts = {
            "now": time.time(),
            "job": job,
            "pods": sorted(pods, key=lambda pod: str(pod["metadata"]["labels"].get(INDEX_LABEL))),
            "events": [event for event in events if event["involvedObject"].get("uid") in uids],
            "nodes": [
                {
                    "metadata": {key: node["metadata"].get(key, {}) for key in ("name", "labels")},
                    "spec": {"taints": node["spec"].get("taints", [])},
                    "status": {key: node["status"][key] for key in ("allocatable", "conditions")},
                }
                for node in nodes
            ],
        }
        path = Path(__file__).parent / f"{name}.json"
        path.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
        print(name, path.stat().st_size)

    def worker(self, pods: Pods, index: int) -> dict[str, Any]:
        return next(pod for pod in pods if pod["metadata"]["labels"][INDEX_LABEL] == str(index))

    def delete_worker(self, pods: Pods) -> None:
        self.api.delete(object_path("Pod", NAMESPACE, self.worker(pods, 1)["metadata"]["name"]))

    def evict_worker(self, pods: Pods) -> None:
        name = self.worker(pods, 1)["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
        self.api.create(f"{object_path('Pod', NAMESPACE, name)}/eviction", body)

    def outrank(self, pods: Pods) -> None:
        """A pod of higher priority wants the node of worker 1 for itself."""
        high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "recording-high"}}
        make(self.api, "/apis/scheduling.k8s.io/v1/priorityclasses", {**high, "value": 1000})
        make(
            self.api,
            collection_path("Pod", NAMESPACE),
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "important", "labels": {RUN_LABEL: "preempted"}},
                "spec": {
                    "priorityClassName": "recording-high",
                    "terminationGracePeriodSeconds": 1,
                    "nodeSelector": {"kubernetes.io/hostname": self.worker(pods, 1)["spec"]["nodeName"]},
                    "containers": [
                        {
                            "name": "main",
                            "image": self.image,
                            "command": list(WAIT),
                            "resources": {"requests": {"cpu": "1500m"}},
                        }
                    ],
                },
            },
        )


def runs(pod: Mapping[str, Any]) -> bool:
    return "running" in main_status(pod).get("state", {})


def waits(*reasons: str) -> Callable[[Mapping[str, Any], Pods], bool]:
    """All pods wait for one of these reasons."""

    def until(_: Mapping[str, Any], pods: Pods) -> bool:
        states = [main_status(pod).get("state", {}).get("waiting", {}).get("reason") for pod in pods]
        return len(states) == 2 and all(state in reasons for state in states)

    return until


def no_node(_: Mapping[str, Any], pods: Pods) -> bool:
    return any(condition(pod, "PodScheduled").get("reason") == "Unschedulable" for pod in pods)


def has_failed(job: Mapping[str, Any], _: Pods) -> bool:
    return is_true(condition(job, "Failed"))


def make(api: Api, path: str, body: Mapping[str, Any]) -> None:
    try:
        api.create(path, body)
    except RequestRejected as error:
        if error.status != 409:
            raise


def main(image: str, names: list[str]) -> None:
    access = Access.from_kubeconfig(namespace=NAMESPACE)
    api = access.client()
    make(api, "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    recorder = Recorder(api, access, image)

    def container(**changes: Any) -> Change:
        return lambda template: template["containers"][0].update(changes)

    def small_tmp(template: dict[str, Any]) -> None:
        next(volume for volume in template["volumes"] if volume["name"] == "tmp")["emptyDir"] = {"sizeLimit": "4Mi"}

    def on_first_worker(template: dict[str, Any]) -> None:
        template.pop("affinity")
        template["nodeName"] = next(
            node["metadata"]["name"]
            for node in api.get("/api/v1/nodes")["items"]
            if "node-role.kubernetes.io/control-plane" not in node["metadata"]["labels"]
        )

    def label(policy: str) -> None:
        api.patch(
            f"/api/v1/namespaces/{NAMESPACE}", {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": policy}}}
        )

    def is_refused(job: Mapping[str, Any], pods: Pods) -> bool:
        events = api.get(collection_path("Event", NAMESPACE), fieldSelector="reason=FailedCreate")["items"]
        return any(event["involvedObject"]["uid"] == job["metadata"]["uid"] for event in events)

    def pod_security() -> None:
        label("restricted")
        recorder.record(
            "pod_security", is_refused, kubernetes=KubernetesOptions(pod_patch={"spec": {"hostNetwork": True}})
        )
        label("privileged")

    def quota(name: str, hard: Mapping[str, str]) -> None:
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}}
        make(api, f"/api/v1/namespaces/{NAMESPACE}/resourcequotas", body)
        time.sleep(3)
        recorder.record(name, is_refused)
        api.delete(f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/q")

    def limit_range() -> None:
        limits = [{"type": "Container", "max": {"memory": "10Mi"}}]
        body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}, "spec": {"limits": limits}}
        make(api, f"/api/v1/namespaces/{NAMESPACE}/limitranges", body)
        recorder.record("limit_range", is_refused, kubernetes=KubernetesOptions(memory="1Gi"))
        api.delete(f"/api/v1/namespaces/{NAMESPACE}/limitranges/l")

    secret = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "nosuch", "key": "k"}}}
    eat = "x=[]\nwhile True: x.append(bytearray(b'x'*(1<<20)))"
    pulling = waits("ErrImagePull", "ImagePullBackOff")
    troubles: dict[str, Callable[[], None]] = {
        "unschedulable_cpu": lambda: recorder.record("unschedulable_cpu", no_node, cpus=500.0),
        "unschedulable_gpu": lambda: recorder.record("unschedulable_gpu", no_node, gpus_per_worker=1, device="gpu"),
        "too_few_nodes": lambda: recorder.record("too_few_nodes", no_node, workers=3),
        "no_such_label": lambda: recorder.record(
            "no_such_label", no_node, kubernetes=KubernetesOptions(node_selector={"a": "b"})
        ),
        "registry_unreachable": lambda: recorder.record(
            "registry_unreachable", pulling, image="nosuch.invalid/x:1", settle=3
        ),
        "image_name_invalid": lambda: recorder.record("image_name_invalid", waits("InvalidImageName"), image="A b:1"),
        "missing_secret": lambda: recorder.record(
            "missing_secret", waits("CreateContainerConfigError"), change=container(env=[secret])
        ),
        "start_error": lambda: recorder.record("start_error", has_failed, change=container(command=["nosuch"])),
        "out_of_memory": lambda: recorder.record(
            "out_of_memory",
            has_failed,
            change=container(command=["python3", "-c", eat], args=[]),
            kubernetes=KubernetesOptions(memory="64Mi", shm="16Mi"),
        ),
        "evicted": lambda: recorder.record(
            "evicted",
            has_failed,
            argv=("sh", "-c", "head -c 40000000 /dev/zero >/tmp/x; sleep 600"),
            change=small_tmp,
            seconds=150,
        ),
        "crash": lambda: recorder.record("crash", has_failed, argv=("sh", "-c", "echo boom; exit $((RANK ? 3 : 0))")),
        "deadline": lambda: recorder.record(
            "deadline",
            has_failed,
            timeout=1.0,
            seconds=240,
            argv=WAIT,
            change=container(command=["sleep"], args=["600"]),
        ),
        "pod_deleted": lambda: recorder.record("pod_deleted", has_failed, meanwhile=recorder.delete_worker),
        "drained": lambda: recorder.record("drained", has_failed, meanwhile=recorder.evict_worker),
        "preempted": lambda: recorder.record("preempted", has_failed, meanwhile=recorder.outrank, cpus=1.0),
        "device_admission": lambda: recorder.record("device_admission", has_failed, change=on_first_worker, cpus=500.0),
        "node_lost": lambda: recorder.record(
            "node_lost", has_failed, seconds=400, meanwhile=lambda _: print("stop the node now")
        ),
        "pod_security": pod_security,
        "quota_exceeded": lambda: quota("quota_exceeded", {"pods": "1"}),
        "quota_unsaid": lambda: quota("quota_unsaid", {"limits.memory": "1Gi"}),
        "limit_range": limit_range,
    }
    for name in names or [name for name in troubles if name != "node_lost"]:
        troubles[name]()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
