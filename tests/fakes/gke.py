"""Google's side of a GKE cluster as real servers: cluster manager (gRPC), sign-in and Compute Engine (HTTP), and the
Kubernetes API of each cluster (HTTPS with a CA of its own and Google's token).

The rules below are assumptions: what Google's documentation and messages say, not what was seen on a real project.
Operations take time: so many looks, or seconds. `world.trouble` says which requests go wrong, and how.
"""

import base64
import json
import re
import threading
import time
from concurrent import futures
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import grpc
from cryptography.hazmat.primitives.asymmetric import rsa
from google.cloud import container_v1 as g
from google.rpc import status_pb2

from tests.fakes.certificates import private, server_context, write_certificate
from tests.fakes.cloud_double import CloudDouble
from tests.fakes.gke_facts import OPERATION_ERRORS, PROJECT, REGION, VERSIONS, ZONE, ApiError, Code, Status
from tests.fakes.gke_rights import CONTAINER
from tests.fakes.gke_rules import PoolRules
from tests.fakes.gke_web import Kube, Web
from tests.fakes.kube_pods import Node, Object, Pods, held_nodes

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9_-]{0,63}")


@dataclass
class Operation:
    name: str
    cluster: str
    looks: int
    until: float
    finish: Any
    error: tuple[int, str, str] | None = None
    done: bool = False


@dataclass
class World(CloudDouble, PoolRules):
    """What exists, what was asked, and what is to go wrong."""

    looks: int = 2  # at anything of its cluster until an operation is done
    seconds: float = 0.0  # that an operation takes besides
    clusters: dict[str, g.Cluster] = field(default_factory=dict)  # by projects/P/locations/L/clusters/NAME
    operations: dict[str, Operation] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    # By request number or method: kill-before kill-after, or CODE-before CODE-after; a gRPC status code or THROTTLED.
    trouble: dict[int | str, str] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)  # method of an operation: key of OPERATION_ERRORS
    empty_zones: set[str] = field(default_factory=set)  # that have no machine left for a new pool
    missing_zones: list[str] = field(default_factory=list)
    # Looks that an upgrade takes which GKE starts by itself, just before the next change that is asked for.
    own_upgrade: int = 0
    hides_accelerators: bool = False  # Compute Engine does not tell the GPUs of its machine types
    repository_policies: dict[str, Object] = field(default_factory=dict)  # by the repository's path
    repository_policy_denied: bool = False
    max_clusters: int | None = None  # a limit of the project, which no quota shows
    lacking: int = 0  # machines of a new pool that are not Ready until its operation ends
    pidfile: Path | None = None
    tokens: int = 0
    token_answer: dict[str, object] | None = None
    lock: Any = field(default_factory=threading.RLock)
    certificate: bytes = b""
    kube_port: int = 0
    pods: dict[str, Pods] = field(default_factory=dict)  # by cluster's name
    # GKE's own driver and the newest. ASSUMED: 535 was the default in 2026-02 (rapidsai/deployment#656).
    drivers: dict[str, str] = field(default_factory=lambda: {"DEFAULT": "535.274.02", "LATEST": "580.159.03"})
    torch_in_images: bool = False
    gpus_taken: bool = False  # by pods of others, so that no further pod gets one
    unpullable: dict[str, str] = field(default_factory=dict)  # images, with the kubelet's words
    # The project's policy, which only who may administer it reads and writes; and what runs in the cluster.
    policy: Object = field(default_factory=lambda: {"bindings": [], "etag": "1"})
    policy_denied: bool = False
    unknown_looks: int = 0  # so many requests to Kubernetes come before it knows the caller's rights
    objects: dict[str, Object] = field(default_factory=dict)  # of Kubernetes, by path
    repositories: dict[str, Object] = field(default_factory=dict)  # of Artifact Registry, by path
    outside: set[str] = field(default_factory=set)  # disks' handles and load balancers' addresses
    balancers: set[str] = field(default_factory=set)  # forwarding rules that Services have left
    claimant: str = "rel-2"  # the cluster whose claims all disks are of
    permissions: set[str] = field(default_factory=set)  # of IAM, that the requests so far have wanted
    denied: set[str] = field(default_factory=set)  # permissions that the caller does not have, if asked for them

    def serve(self, method: str, request: Any) -> Any:
        self.permissions.add(CONTAINER[method])
        return self.serve_logged(
            method, f"{method} {_subject(request)}", lambda: getattr(self, f"do_{method}")(request)
        )

    def strike(self, kind: str) -> NoReturn:
        """Raise the gRPC error of this kind of trouble."""
        if kind == "kill":
            self.kill_client()
        if kind == "THROTTLED":
            raise ApiError(Code.RESOURCE_EXHAUSTED, "Quota exceeded for quota metric 'Requests', requests per minute")
        if kind == "DISABLED":
            raise ApiError(Code.PERMISSION_DENIED, "API has not been used in project 1 before: SERVICE_DISABLED")
        raise ApiError(getattr(Code, "UNAVAILABLE" if kind == "kill" else kind), f"{kind}: the test said so")

    # --- questions ----------------------------------------------------------------------------------------------

    def do_GetServerConfig(self, request: Any) -> g.ServerConfig:
        _, project, _, place = request.name.split("/")
        if project != PROJECT:
            raise ApiError(Code.PERMISSION_DENIED, f"Permission denied on resource project {project}.")
        if place not in (ZONE, REGION):
            raise ApiError(Code.INVALID_ARGUMENT, f'Location "{place}" does not exist.')
        channel = {"channel": "REGULAR", "valid_versions": list(VERSIONS), "default_version": VERSIONS[1]}
        return g.ServerConfig({"valid_master_versions": list(VERSIONS), "channels": [channel]})

    def do_GetCluster(self, request: Any) -> g.Cluster:
        return self._cluster(request.name, look=True)

    def do_GetNodePool(self, request: Any) -> g.NodePool:
        return self._pool(request.name, look=True)

    def do_GetOperation(self, request: Any) -> g.Operation:
        operation = self.operations.get(request.name.split("/")[-1])
        if operation is None:
            raise ApiError(Code.NOT_FOUND, f"Not found: {request.name}.")
        answer = g.Operation({"name": operation.name, "status": "DONE" if operation.done else "RUNNING"})
        if operation.done and operation.error:
            code, condition, message = operation.error
            answer.error = status_pb2.Status(code=code, message=message)
            answer.nodepool_conditions = [g.StatusCondition({"code": condition, "message": message})]
        return answer

    def do_ListClusters(self, request: Any) -> g.ListClustersResponse:
        location = request.parent.split("/")[3]
        project = request.parent.split("/")[1]
        found = [
            cluster
            for path, cluster in self.clusters.items()
            if path.split("/")[1] == project and location in ("-", cluster.location)
        ]
        for cluster in found:
            running = (pool for pool in cluster.node_pools if pool.status == g.NodePool.Status.RUNNING)
            cluster.current_node_count = sum(pool.initial_node_count * (len(pool.locations) or 1) for pool in running)
        return g.ListClustersResponse({"clusters": found, "missing_zones": self.missing_zones})

    # --- changes ------------------------------------------------------------------------------------------------

    def do_CreateCluster(self, request: Any) -> g.Operation:
        asked = request.cluster
        if not NAME.fullmatch(asked.name):
            raise ApiError(Code.INVALID_ARGUMENT, f'Invalid value for field "cluster.name": "{asked.name}".')
        if not all(LABEL.fullmatch(value) for value in asked.resource_labels.values()):
            raise ApiError(Code.INVALID_ARGUMENT, "Invalid value for field resource_labels.")
        if asked.initial_node_count and asked.node_pools:
            raise ApiError(Code.INVALID_ARGUMENT, "initial_node_count and node_pools exclude each other.")
        path = f"{request.parent}/clusters/{asked.name}"
        if path in self.clusters:
            raise ApiError(Code.ALREADY_EXISTS, f"Already exists: {path}.")
        self.check_exclusions(asked)
        self.check_policy("CreateCluster")
        self.check_shared_network(asked, request.parent.split("/")[1])
        if self.max_clusters is not None and len(self.clusters) >= self.max_clusters:
            zone = request.parent.split("/")[3]
            raise ApiError(
                Code.PERMISSION_DENIED, f"You cannot create more than {self.max_clusters} clusters in {zone}."
            )
        for pool in asked.node_pools:
            self.check_machine(pool)
            self.check_quota(pool, asked.locations, asked)
        self.check_zones(asked.locations, request.parent.split("/")[3])
        made = g.Cluster(asked)
        made.status, made.location = Status.PROVISIONING, request.parent.split("/")[3]
        made.create_time = datetime.now(UTC).isoformat(timespec="seconds")
        self.clusters[path] = made

        def finish(failed: bool) -> None:
            made.status = Status.ERROR if failed else Status.RUNNING
            made.endpoint = f"127.0.0.1:{self.kube_port}"
            made.master_auth = g.MasterAuth({"cluster_ca_certificate": base64.b64encode(self.certificate).decode()})
            for pool in made.node_pools:
                pool.status = g.NodePool.Status.RUNNING

        return self._begin("CreateCluster", path, finish)

    def do_DeleteCluster(self, request: Any) -> g.Operation:
        cluster, path = self._cluster(request.name), _cluster_path(request.name)
        self._alone(path)
        cluster.status = Status.STOPPING

        def finish(failed: bool) -> None:
            self.clusters.pop(path)
            self.networks.detach(path)
            self.pods.clear()
            self.objects.clear()

        return self._begin("DeleteCluster", path, finish)

    def do_SetLabels(self, request: Any) -> g.Operation:
        cluster, path = self._cluster(request.name), _cluster_path(request.name)
        self._alone(path)
        cluster.resource_labels = dict(request.resource_labels)
        return self._begin("SetLabels", path, lambda failed: None)

    def do_CreateNodePool(self, request: Any) -> g.Operation:
        cluster, asked = self._cluster(request.parent), request.node_pool
        self._alone(_cluster_path(request.parent))
        if any(pool.name == asked.name for pool in cluster.node_pools):
            raise ApiError(Code.ALREADY_EXISTS, f"Already exists: {request.parent}/nodePools/{asked.name}.")
        self.check_machine(asked)
        self.check_zones(asked.locations, cluster.location)
        self.check_policy("CreateNodePool")
        self.check_quota(asked, asked.locations, cluster)
        self.check_networks(asked, cluster)
        self.networks.attach(_cluster_path(request.parent), asked.network_config.additional_node_network_configs)
        if asked.network_config.accelerator_network_profile:
            self.networks.make_rdma(_cluster_path(request.parent))
        asked.status = g.NodePool.Status.PROVISIONING
        cluster.node_pools.append(asked)
        if set(asked.locations) & self.empty_zones:
            return self._change("CreateNodePool", _cluster_path(request.parent), asked.name, "stockout")
        return self._change("CreateNodePool", _cluster_path(request.parent), asked.name)

    def do_SetNodePoolAutoscaling(self, request: Any) -> g.Operation:
        pool = self._pool(request.name)
        self._alone(_cluster_path(request.name))
        if request.autoscaling.enabled and request.autoscaling.max_node_count < max(
            1, request.autoscaling.min_node_count
        ):
            raise ApiError(Code.INVALID_ARGUMENT, "max_node_count must be >= min_node_count and > 0.")
        pool.autoscaling = request.autoscaling
        pool.status = g.NodePool.Status.RECONCILING
        return self._change("SetNodePoolAutoscaling", _cluster_path(request.name), pool.name)

    def do_DeleteNodePool(self, request: Any) -> g.Operation:
        cluster, pool = self._cluster(request.name), self._pool(request.name)
        self._alone(_cluster_path(request.name))
        pool.status = g.NodePool.Status.STOPPING

        def finish(failed: bool) -> None:
            cluster.node_pools = [other for other in cluster.node_pools if other.name != pool.name]
            self.networks.detach(_cluster_path(request.name))
            cluster.status = Status.RUNNING

        cluster.status = Status.RECONCILING
        return self._begin("DeleteNodePool", _cluster_path(request.name), finish)

    # --- rules --------------------------------------------------------------------------------------------------

    def _change(self, method: str, path: str, name: str, failure: str | None = None) -> g.Operation:
        cluster, failure = self.clusters[path], failure or self.failing.get(method)

        def finish(failed: bool) -> None:
            cluster.status = Status.RUNNING
            pool = next(pool for pool in cluster.node_pools if pool.name == name)
            pool.status = g.NodePool.Status.ERROR if failed else g.NodePool.Status.RUNNING
            if failed:
                _, code, message = OPERATION_ERRORS[failure or "stockout"]
                pool.conditions = [g.StatusCondition({"code": code, "message": message})]

        cluster.status = Status.RECONCILING
        return self._begin(method, path, finish, failure)

    def _begin(self, method: str, cluster: str, finish: Any, failure: str | None = None) -> g.Operation:
        failure = failure or self.failing.get(method)
        error = OPERATION_ERRORS[failure] if failure else None
        name = f"operation-{len(self.operations)}"
        operation = Operation(name, cluster, self.looks, time.monotonic() + self.seconds, finish, error)
        self.operations[name] = operation
        return g.Operation({"name": name, "status": "RUNNING"})

    def _look(self, cluster: str) -> None:
        for operation in list(self.operations.values()):
            if operation.cluster == cluster and not operation.done:
                operation.looks -= 1
                if operation.looks <= 0 and time.monotonic() >= operation.until:
                    operation.done = True
                    operation.finish(operation.error is not None)

    def _alone(self, path: str) -> None:
        if self.own_upgrade:
            cluster, self.own_upgrade, looks = self.clusters[path], 0, self.own_upgrade
            self._begin("UpgradeMaster", path, lambda failed: setattr(cluster, "status", Status.RUNNING))
            self.operations[f"operation-{len(self.operations) - 1}"].looks = looks
            cluster.status = Status.RECONCILING
        for operation in self.operations.values():
            if operation.cluster == path and not operation.done:
                raise ApiError(Code.FAILED_PRECONDITION, f"Cluster is running incompatible operation {operation.name}.")

    def _cluster(self, path: str, look: bool = False) -> g.Cluster:
        key = _cluster_path(path)
        if look:
            self._look(key)
        if key not in self.clusters:
            raise ApiError(Code.NOT_FOUND, f"Not found: {path}.")
        return self.clusters[key]

    def find_cluster(self, name: str) -> g.Cluster:
        """The only cluster of that name."""
        (found,) = [cluster for cluster in self.clusters.values() if cluster.name == name]
        return found

    def _pool(self, path: str, look: bool = False) -> g.NodePool:
        for pool in self._cluster(path, look).node_pools:
            if pool.name == path.split("/")[7]:
                return pool
        raise ApiError(Code.NOT_FOUND, f"Not found: {path}.")

    # --- the Kubernetes side ------------------------------------------------------------------------------------

    def knows(self, authorization: str) -> bool:
        """Whether it is a token that was given out here."""
        return authorization in {f"Bearer token-{number + 1}" for number in range(self.tokens)}

    def nodes(self, role: str) -> list[dict[str, Any]]:
        found = []
        for cluster in self.clusters.values():
            for pool in cluster.node_pools:
                provisioning = bool(self.lacking) and pool.status == g.NodePool.Status.PROVISIONING
                running = pool.status == g.NodePool.Status.RUNNING
                if pool.config.labels.get("mlbench-role") != role or not (running or provisioning):
                    continue
                gpus = sum(item.accelerator_count for item in pool.config.accelerators)
                for number in range(pool.initial_node_count * len(pool.locations)):
                    is_ready = not provisioning or number >= self.lacking
                    status = {
                        "conditions": [{"type": "Ready", "status": str(is_ready)}],
                        "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {},
                    }
                    found.append({"metadata": {"name": f"{pool.name}-{number}"}, "status": status})
        return found

    def autoscale(self, now: float) -> None:
        """What the cluster's autoscaler makes of idle pools by then: it removes machines that no pod holds."""
        jobs = [item for path, item in self.objects.items() if "/jobs/" in path]
        for cluster in self.clusters.values():
            for pool in cluster.node_pools:
                if pool.autoscaling.enabled:
                    held = -(-held_nodes(jobs, pool.config.labels, now) // len(pool.locations))
                    most, least = pool.autoscaling.max_node_count, pool.autoscaling.min_node_count
                    pool.initial_node_count = max(least, min(most, held))

    def machines(self) -> list[Node]:
        """The machines as containers on them see them."""
        found = []
        for cluster in self.clusters.values():
            for pool in cluster.node_pools:
                gpus = sum(item.accelerator_count for item in pool.config.accelerators)
                driver = ""
                for item in pool.config.accelerators:
                    asked = item.gpu_driver_installation_config.gpu_driver_version.name
                    driver = self.drivers.get(asked, "")  # none is installed unless asked for
                node = Node(
                    dict(pool.config.labels),
                    tuple(taint.key for taint in pool.config.taints),
                    gpus if driver and not self.gpus_taken else 0,
                    driver=driver,
                )
                found += [node] * (pool.initial_node_count * len(pool.locations))
        return found

    def pods_of(self, cluster: str) -> Pods:
        found = self.pods.setdefault(cluster, Pods(torch=self.torch_in_images, images=self.unpullable))
        found.refuse_pull = self.refuse_pull
        return found

    def refuse_pull(self, image: str) -> str | None:
        """Why the machines may not pull an image: the repository does not let their account read.

        Source: Google's page on the organization policy iam.automaticIamGrantsForDefaultServiceAccounts, on by default
        in organizations since 2024-05-03: the default account has no role. The words are those of reports.
        """
        for path in self.repositories:
            _, project, _, region, _, name = path.split("/")
            if not image.startswith(f"{region}-docker.pkg.dev/{project}/{name}/"):
                continue
            bindings = self.repository_policies.get(path, {}).get("bindings", [])
            member = "serviceAccount:123456789-compute@developer.gserviceaccount.com"
            if not any(member in item["members"] for item in bindings):
                return f'failed to pull and unpack image "{image}": unexpected status: 403 Forbidden'
        return None


def _cluster_path(path: str) -> str:
    """projects/P/locations/L/clusters/NAME of a path to a cluster or below it."""
    return "/".join(path.split("/")[:6])


def _subject(request: Any) -> str:
    path = getattr(request, "name", "") or getattr(request, "parent", "")
    made = getattr(request, "cluster", None) or getattr(request, "node_pool", None)
    return "/".join(path.split("/")[4:]) + (f" {made.name}" if made else "")


METHODS: dict[str, tuple[type[Any], type[Any]]] = {
    "GetServerConfig": (g.GetServerConfigRequest, g.ServerConfig),
    "GetCluster": (g.GetClusterRequest, g.Cluster),
    "GetNodePool": (g.GetNodePoolRequest, g.NodePool),
    "GetOperation": (g.GetOperationRequest, g.Operation),
    "ListClusters": (g.ListClustersRequest, g.ListClustersResponse),
    "CreateCluster": (g.CreateClusterRequest, g.Operation),
    "DeleteCluster": (g.DeleteClusterRequest, g.Operation),
    "SetLabels": (g.SetLabelsRequest, g.Operation),
    "CreateNodePool": (g.CreateNodePoolRequest, g.Operation),
    "SetNodePoolAutoscaling": (g.SetNodePoolAutoscalingRequest, g.Operation),
    "DeleteNodePool": (g.DeleteNodePoolRequest, g.Operation),
}


class Google:
    """The servers. `environment` is what points a client at them; `world` is replaced by `reset`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.grpc = grpc.server(futures.ThreadPoolExecutor(4))
        self.grpc.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", self._handlers()),)
        )
        port = self.grpc.add_insecure_port("127.0.0.1:0")
        self.grpc.start()
        self.http = self._http(Web)
        self.kube = self._http(Kube)
        self.pem = folder / "server.pem"
        self.certificate = write_certificate(self.pem, "gke double")
        self.kube.socket = server_context(self.pem).wrap_socket(self.kube.socket, server_side=True)
        url = f"http://127.0.0.1:{self.http.server_port}"
        self.environment = {
            "MLBENCH_GKE_ENDPOINT": f"127.0.0.1:{port}",
            "MLBENCH_COMPUTE_ENDPOINT": url,
            "MLBENCH_ARTIFACT_ENDPOINT": url,
            "MLBENCH_RESOURCE_MANAGER_ENDPOINT": url,
            "GOOGLE_APPLICATION_CREDENTIALS": str(_key_file(folder, url)),
            "NO_PROXY": "127.0.0.1",
        }
        self.reset()

    def reset(self, **values: Any) -> World:
        self.world = World(certificate=self.certificate, kube_port=self.kube.server_port, **values)
        self.world.pidfile = self.folder / "client.pid"
        self.http.world = self.kube.world = self.world  # type: ignore[attr-defined]
        return self.world

    def close(self) -> None:
        self.grpc.stop(0)
        for server in (self.http, self.kube):
            server.shutdown()
            server.server_close()

    def _http(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    def _handlers(self) -> dict[str, object]:
        def handler(method: str) -> Any:
            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                try:
                    return self.world.serve(method, request)
                except ApiError as refusal:
                    context.abort(refusal.code, str(refusal))

            asked, told = METHODS[method]
            return grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=asked.deserialize, response_serializer=told.serialize
            )

        return {method: handler(method) for method in METHODS}


def _key_file(folder: Path, url: str) -> Path:
    """A service account's key file that signs in at our own server."""
    # Google's are of 2048 bits, and every command that reads one checks it for 37 ms; 5 ms with half of the bits.
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    document = {
        "type": "service_account",
        "project_id": PROJECT,
        "client_email": f"tester@{PROJECT}.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": private(key).decode(),
        "token_uri": f"{url}/token",
    }
    file = folder / "key.json"
    file.write_text(json.dumps(document))
    return file
