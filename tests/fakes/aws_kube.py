"""The Kubernetes API of each cluster of the AWS double: nodes, one DaemonSet, and EKS' own kind of token."""

import base64
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.aws_answers import Answer, json_answer

if TYPE_CHECKING:
    from tests.fakes.aws import AwsDouble

GPUS = {"g4dn.xlarge": 1, "g5.xlarge": 1, "g4dn.12xlarge": 4, "p4d.24xlarge": 8}
DAEMON_SETS = "/apis/apps/v1/namespaces/kube-system/daemonsets/"


class KubeSide:
    def __init__(self, double: "AwsDouble") -> None:
        self.double = double
        self.daemon_sets: dict[str, dict[str, Any]] = {}  # by cluster and name

    def answer(self, environ: dict[str, Any]) -> Answer:
        _, _, region, name, path = environ["PATH_INFO"].split("/", 4)
        path = f"/{path}"
        cluster = self.double._eks(region).clusters.get(name)
        if cluster is None or cluster.status == "DELETING":
            return _status(503, "no such cluster")
        if refusal := refusal_of(environ.get("HTTP_AUTHORIZATION", ""), name):
            return _status(401, refusal)
        if path == "/api/v1/nodes":
            return json_answer({"items": self._nodes(cluster, environ["QUERY_STRING"])})
        key = f"{name} {path.removeprefix(DAEMON_SETS)}"
        if environ["REQUEST_METHOD"] == "PATCH":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self.daemon_sets[key] = json.loads(body)
        if key not in self.daemon_sets:
            return _status(404, f"{path} not found")
        return json_answer(self.daemon_sets[key])

    def forget(self, name: str) -> None:
        for key in [key for key in self.daemon_sets if key.startswith(f"{name} ")]:
            del self.daemon_sets[key]

    def _nodes(self, cluster: Any, query: str) -> list[dict[str, Any]]:
        """A machine shows its GPUs only where the device plugin may run on it."""
        key, _, value = parse_qs(query).get("labelSelector", [""])[0].partition("=")
        plugins = [item for name, item in self.daemon_sets.items() if name.startswith(f"{cluster.name} ")]
        nodes = []
        for group in cluster.nodegroups.values():
            if key and group.labels.get(key) != value:
                continue
            shown = group.status == "ACTIVE" and any(_may_run(plugin, group) for plugin in plugins)
            gpus = GPUS.get(group.instance_types[0], 0)
            allocatable = {"cpu": "3920m", **({"nvidia.com/gpu": str(gpus)} if gpus and shown else {})}
            for number in range(group.scaling_config["desiredSize"]):
                metadata = {"name": f"{group.nodegroup_name}-{number}", "labels": group.labels}
                nodes.append({"metadata": metadata, "status": {"allocatable": allocatable}})
        return nodes


def refusal_of(authorization: str, cluster: str) -> str | None:
    """What is wrong with a token, as far as it can be told without asking STS; None where nothing is."""
    token = authorization.removeprefix("Bearer ")
    if not token.startswith("k8s-aws-v1."):
        return "the token is not one of EKS"
    text = token.removeprefix("k8s-aws-v1.")
    url = urlsplit(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode())
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    if query.get("Action") != "GetCallerIdentity" or query.get("X-Amz-SignedHeaders") != "host;x-k8s-aws-id":
        return "the token is not a signed question for the caller's identity"
    signed = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    return None if time.time() - signed < 900 else "the token has expired"


def _may_run(plugin: dict[str, Any], group: Any) -> bool:
    pod = plugin["spec"]["template"]["spec"]
    tolerated = {item["key"] for item in pod["tolerations"]}
    chosen = pod["nodeSelector"].items() <= group.labels.items()
    return chosen and {taint["key"] for taint in group.taints} <= tolerated


def _status(code: int, message: str) -> Answer:
    return json_answer({"kind": "Status", "code": code, "message": message}, code)
