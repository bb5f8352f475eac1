"""--pod-patch: what a site wants of pods, merged into the rendered Jobs; what mlbench relies on cannot be changed."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.kubernetes_options import resolve_kubernetes
from mlbench_cli.runs.request import Request
from tests.contract.engines.kubernetes.test_engine import a_run, submit
from tests.fakes.kube_api import KubeApi

PATCH = """
metadata:
  labels: {team: research}
  annotations: {example.org/note: "1"}
spec:
  priorityClassName: high
  schedulerName: mine
  nodeSelector: {zone: a}
  tolerations: [{key: gpu, operator: Exists}]
  securityContext: {runAsUser: null, runAsGroup: null, fsGroup: null}
  containers:
  - name: main
    env: [{name: NCCL_DEBUG, value: INFO}, {name: HOME, value: /work}]
    resources: {limits: {cpu: 4, example.org/card: 1}}
    securityContext: {readOnlyRootFilesystem: false}
    envFrom: [{secretRef: {name: keys}}]
    volumeMounts: [{mountPath: /scratch, name: scratch}]
  - {name: sidecar, image: "example.org/daemon:1"}
  volumes: [{name: scratch, emptyDir: {}}]
"""


def patched(folder: Path, text: str) -> RunSpec:
    (folder / "patch.yaml").write_text(text)
    request = Request(name="r", pod_patch=str(folder / "patch.yaml"), node_selector={"pool": "b"})
    return a_run(folder, kubernetes=resolve_kubernetes(request, Cluster("c", "attached", "ready"))).spec


def test_a_patch_is_merged_into_the_pods(tmp_path: Path) -> None:
    spec = patched(tmp_path, PATCH)
    jobs = {item["metadata"]["name"]: item for item in manifests(spec, "d") if item["kind"] == "Job"}
    template: dict[str, Any] = jobs["r-2"]["spec"]["template"]
    pod = template["spec"]
    assert template["metadata"]["labels"].items() >= {"team": "research", "mlbench/run": "r-2"}.items()
    assert template["metadata"]["annotations"]["example.org/note"] == "1"
    assert (pod["priorityClassName"], pod["schedulerName"]) == ("high", "mine")
    assert pod["nodeSelector"] == {"pool": "b", "zone": "a"}
    assert {"key": "gpu", "operator": "Exists"} in pod["tolerations"]
    assert len(pod["tolerations"]) > 1
    assert "runAsUser" not in pod["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    main, sidecar = pod["containers"]
    variables = [(item["name"], item.get("value")) for item in main["env"]]
    assert ("NCCL_DEBUG", "INFO") in variables
    assert [value for name, value in variables if name == "HOME"] == ["/work"]
    assert main["resources"]["limits"] == {"cpu": 4, "example.org/card": 1}
    assert main["securityContext"]["readOnlyRootFilesystem"] is False
    assert main["securityContext"]["allowPrivilegeEscalation"] is False
    assert main["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert main["command"] == ["sh", "/mlbench/start.sh", "node"]
    assert {"/scratch", "/results"} <= {item["mountPath"] for item in main["volumeMounts"]}
    assert sidecar["name"] == "sidecar"
    assert {"scratch", "results"} <= {item["name"] for item in pod["volumes"]}
    head = jobs["r-2-head"]["spec"]["template"]
    assert head["metadata"]["labels"]["team"] == "research"
    assert head["spec"]["priorityClassName"] == "high"
    assert "runAsUser" not in head["spec"]["securityContext"]
    assert [item["name"] for item in head["spec"]["containers"]] == ["main"]
    assert RunSpec.from_dict(spec.to_dict()) == spec
    assert spec.hash != a_run(tmp_path).spec.hash


def test_a_patch_puts_pods_on_the_network_of_their_nodes(tmp_path: Path) -> None:
    """Then they come from the nodes' addresses, and the head lets them in."""
    spec = patched(tmp_path, "spec: {hostNetwork: true, dnsPolicy: ClusterFirstWithHostNet}")
    job, *others = manifests(spec, "d")
    assert job["spec"]["template"]["spec"]["hostNetwork"] is True
    (policy,) = [item for item in others if item["kind"] == "NetworkPolicy"]
    assert {"ports": [{"protocol": "TCP", "port": 29600}]} in policy["spec"]["ingress"]


@pytest.mark.parametrize("text", ["spec: {container: [{name: main}]}", "spec: {template: {spec: {hostNetwork: true}}}"])
def test_a_field_that_pods_do_not_have_is_refused_and_not_dropped(tmp_path: Path, text: str) -> None:
    spec = patched(tmp_path, text)
    with KubeApi() as server:
        run = replace(a_run(tmp_path), spec=spec)
        with pytest.raises(UsageError, match="unknown field") as caught:
            submit(server, run)
        assert "--pod-patch" in str(caught.value.hint)
        assert not server.objects


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "not a mapping"),
        ("kind: Pod", "not a mapping"),
        ("status: {}", "no part of a pod"),
        ("metadata: {name: x}", "labels and annotations"),
        ("metadata: {labels: {mlbench/run: x}}", "reserved"),
        ("metadata: {labels: {a: 1}}", "in quotes"),
        ("spec: {restartPolicy: Always}", "own"),
        ("spec: {containers: [{name: main, command: [sh]}]}", "own"),
        ("spec: {containers: [{image: x}]}", "each with its name"),
        ("spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 8}}}]}", "--gpus-per-worker"),
        ("spec: {containers: [{name: main, env: [{name: RANK, value: '1'}]}]}", "RANK"),
        ("spec: {containers: [{name: main, env: [{name: API_TOKEN, value: 'x'}]}]}", "secret"),
    ],
)
def test_what_is_not_a_patch_or_mlbenchs_own_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        patched(tmp_path, text)
