"""The Kubernetes API of each cluster of the AWS double: nodes, one DaemonSet, and EKS' own kind of token."""

import base64
import hashlib
import hmac
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

from tests.fakes.aws_answers import Answer, json_answer
from tests.fakes.kube_pods import Node, Object, Pods

if TYPE_CHECKING:
    from tests.fakes.aws import AwsDouble
    from tests.fakes.aws_instances import Instance

EFA_CARDS = {"g4dn.8xlarge": 1, "p4d.24xlarge": 4, "p6-b300.48xlarge": 16}
GPUS = {"g4dn.8xlarge": 1, "g4dn.xlarge": 1, "g5.xlarge": 1, "g4dn.12xlarge": 4, "p4d.24xlarge": 8,
        "p6-b300.48xlarge": 8}  # fmt: skip
SECRET = "not-a-secret"  # of every client of the double
PODS = "/api/v1/namespaces/default/pods"
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets/"


class KubeSide:
    def __init__(self, double: "AwsDouble") -> None:
        self.double = double
        self.daemon_sets: dict[str, Object] = {}  # by cluster and name
        self.pods: dict[str, Pods] = {}  # by cluster
        self.labels: dict[tuple[str, str], dict[str, str]] = {}  # that somebody has put on nodes, by cluster and node

    def answer(self, environ: Object) -> Answer:
        _, _, region, name, path = environ["PATH_INFO"].split("/", 4)
        path = f"/{path}"
        cluster = self.double._eks(region).clusters.get(name)
        if cluster is None or cluster.status == "DELETING":
            return _status(503, "no such cluster")
        if refusal := refusal_of(environ.get("HTTP_AUTHORIZATION", ""), name):
            return _status(401, refusal)
        if path == "/api/v1/nodes":
            return json_answer({"items": self._nodes(region, cluster, environ["QUERY_STRING"])})
        if path.startswith("/api/v1/nodes/"):
            body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            self.labels.setdefault((name, path.rpartition("/")[2]), {}).update(body["metadata"]["labels"])
            return json_answer(body)
        if path.startswith(PODS):
            length = int(environ.get("CONTENT_LENGTH") or 0)
            given = json.loads(environ["wsgi.input"].read(length)) if length else None
            pods = self.pods.setdefault(name, Pods(torch=bool(self.double.rules.get("torch_in_images"))))
            method = environ["REQUEST_METHOD"]
            code, document = pods.answer(method, path.removeprefix(PODS).strip("/"), given, self._machines(cluster))
            return json_answer(document, code)
        key = f"{name} {path.removeprefix(DAEMON_SETS)}"
        if environ["REQUEST_METHOD"] == "PATCH":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self.daemon_sets[key] = json.loads(body)
        if key not in self.daemon_sets:
            return _status(404, f"{path} not found")
        return json_answer(self.daemon_sets[key])

    def _machines(self, cluster: Any) -> list[Node]:
        """The machines as containers on them see them: NVIDIA's runtime shows a driver that the image holds."""
        plugins = self._plugins(cluster)
        return [
            Node(
                dict(group.labels),
                tuple(taint["key"] for taint in group.taints),
                int(_devices(group, plugins).get("nvidia.com/gpu", 0)) if "NVIDIA" in group.ami_type else 0,
                mounted=False,
            )
            for group in cluster.nodegroups.values()
            for _ in range(group.scaling_config["desiredSize"])
        ]

    def _plugins(self, cluster: Any) -> list[Object]:
        applied = [item for name, item in self.daemon_sets.items() if name.startswith(f"{cluster.name} ")]
        return [item for item in applied if item["kind"] == "DaemonSet"]

    def forget(self, name: str) -> None:
        self.pods.pop(name, None)
        for pair in [pair for pair in self.labels if pair[0] == name]:
            del self.labels[pair]
        for key in [key for key in self.daemon_sets if key.startswith(f"{name} ")]:
            del self.daemon_sets[key]

    def _nodes(self, region: str, cluster: Any, query: str) -> list[Object]:
        """A machine shows its devices only if their plugin may run on it, or its image has one."""
        key, _, value = parse_qs(query).get("labelSelector", [""])[0].partition("=")
        plugins = self._plugins(cluster)
        groups = {group.nodegroup_name: group for group in cluster.nodegroups.values()}
        nodes = []
        for instance in self.double.instances_of(region, cluster):
            if key and instance.labels.get(key) != value:
                continue
            group = groups[instance.node.rpartition("-")[0]]
            allocatable = {"cpu": "3920m", **_devices(group, plugins)}
            nodes.append(
                {
                    "metadata": {"name": instance.node, "labels": self._labels_of(cluster.name, instance)},
                    "spec": {"providerID": f"aws:///{instance.zone}/{instance.identifier}"},
                    "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
                }
            )
        return nodes

    def _labels_of(self, cluster: str, instance: "Instance") -> dict[str, str]:
        """Those of its group, of AWS' cloud controller, and of who has labeled the node."""
        own = {**instance.labels, "topology.kubernetes.io/zone": instance.zone}
        return own | self.labels.get((cluster, instance.node), {})


def refusal_of(authorization: str, cluster: str, secret: str = SECRET) -> str | None:
    """What is wrong with a token for `cluster`: what AWS' authenticator and STS would say. None if nothing is."""
    token = authorization.removeprefix("Bearer ")
    if not token.startswith("k8s-aws-v1."):
        return "the token is not one of EKS"
    text = token.removeprefix("k8s-aws-v1.")
    url = urlsplit(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode())
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    if query.get("Action") != "GetCallerIdentity" or query.get("X-Amz-SignedHeaders") != "host;x-k8s-aws-id":
        return "the token is not a signed question for the caller's identity"
    signed = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    if time.time() - signed >= 900:
        return "the token has expired"
    proper = _signature(url.netloc, query, cluster, secret)
    return None if hmac.compare_digest(proper, query["X-Amz-Signature"]) else "the token's signature is wrong"


def _signature(host: str, query: dict[str, str], cluster: str, secret: str) -> str:
    """Signature version 4 of the question that the token is, as AWS' documentation defines it."""
    asked = sorted((quote(key, safe="-_.~"), quote(value, safe="-_.~")) for key, value in query.items())
    line = "&".join(f"{key}={value}" for key, value in asked if key != "X-Amz-Signature")
    headers = f"host:{host}\nx-k8s-aws-id:{cluster}\n\nhost;x-k8s-aws-id"
    request = f"GET\n/\n{line}\n{headers}\n{hashlib.sha256(b'').hexdigest()}"
    scope = query["X-Amz-Credential"].split("/", 1)[1]
    text = f"AWS4-HMAC-SHA256\n{query['X-Amz-Date']}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _devices(group: Any, plugins: list[Object]) -> dict[str, str]:
    running = {plugin["metadata"]["name"] for plugin in plugins if _may_run(plugin, group)}
    machine, shown = next(iter(group.instance_types), getattr(group, "template_type", "")), {}
    if group.status != "ACTIVE":
        return {}
    if "mlbench-nvidia-device-plugin" in running or group.ami_type == "BOTTLEROCKET_x86_64_NVIDIA":
        shown["nvidia.com/gpu"] = GPUS.get(machine, 0)
    if "mlbench-efa-device-plugin" in running and group.has_efa:
        shown["vpc.amazonaws.com/efa"] = EFA_CARDS.get(machine, 0)
    return {name: str(count) for name, count in shown.items() if count}


def _may_run(plugin: Object, group: Any) -> bool:
    pod = plugin["spec"]["template"]["spec"]
    tolerated = {item["key"] for item in pod["tolerations"]}
    chosen = pod["nodeSelector"].items() <= group.labels.items()
    return chosen and {taint["key"] for taint in group.taints} <= tolerated


def _status(code: int, message: str) -> Answer:
    return json_answer({"kind": "Status", "code": code, "message": message}, code)
