"""The resources of a KIND cluster. All are found by names and labels in Docker, from any data folder."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.base import (
    CLUSTER_TAG,
    OWNER_TAG,
    Part,
    Readiness,
    Resource,
    ResourceStatus,
    TransientError,
    ownership_tags,
)
from providers.kind.api import KIND_LABEL, call, container_program, creation_lock, inspect, lines, succeeds
from templates import render

NODES_LABEL = "mlbench-nodes"
REGISTRY_LABEL = "mlbench-registry"
CREATE_SECONDS = 900.0  # of which most may be the pull of the node image
LOAD_SECONDS = 900.0
KUBECTL = "kubectl --kubeconfig=/etc/kubernetes/admin.conf --request-timeout=10s"
# Exit code 44 if kubeadm has not come far enough to leave an admin.conf.
ASK_NODES = f"test -f /etc/kubernetes/admin.conf || exit 44; {KUBECTL} get nodes --no-headers"
ASK_DNS = f"{KUBECTL} -n kube-system get deployment coredns -o 'jsonpath={{.status.readyReplicas}}'"
REGISTRY_PORT = 5000  # inside the registry's container


class MarkerVolume(Resource):
    """An empty Docker volume with our tags, because kind does not put labels of ours on nodes.

    It is created first and deleted last: nodes without it belong to somebody else. With it goes `folder`, the cluster's
    own in the data folder.
    """

    kind = "Docker volume"
    create_seconds = delete_seconds = 120.0

    def __init__(self, cluster: Cluster, folder: Path, registry: str | None = None) -> None:
        self.cluster = cluster
        self.folder = folder
        self.name = volume_of(cluster.name)
        self.labels = {**ownership_tags(cluster), NODES_LABEL: str(nodes_in(cluster))}
        if registry:
            self.labels[REGISTRY_LABEL] = registry
        self.remove_command = f"docker volume rm {self.name}"

    def find(self) -> ResourceStatus | None:
        """Inspect the volume; nodes without it make the name foreign, so that nothing of it is touched."""
        volume: Any = inspect("volume", self.name)
        if volume is None:
            # Without the volume, a cluster of this name is not ours, and creating the volume must not make it ours.
            return ResourceStatus("running", ours=False) if nodes_of(self.cluster.name) else None
        found = volume.get("Labels") or {}
        asked, has = self.labels[NODES_LABEL], found.get(NODES_LABEL)
        return ResourceStatus(
            "there",
            ours=found.get(CLUSTER_TAG) == self.cluster.name,
            owner=found.get(OWNER_TAG),
            differs=f"{has} nodes, the control plane among them, instead of {asked}" if has != asked else None,
        )

    def create(self) -> None:
        """Create the volume with the ownership tags as labels."""
        flags = [part for key, value in self.labels.items() for part in ("--label", f"{key}={value}")]
        call(["docker", "volume", "create", *flags, self.name])

    def poll(self) -> Readiness:
        """Ready when Docker shows it."""
        return Readiness(self.find() is not None)

    def delete(self) -> None:
        """Remove the folder, then the volume. Absent is success."""
        shutil.rmtree(self.folder, ignore_errors=True)
        call(["docker", "volume", "rm", "--force", self.name])


class KindCluster(Resource):
    """The nodes: containers that kind creates."""

    kind = "KIND cluster"
    create_seconds = CREATE_SECONDS
    # Long enough for a `kind create` whose client was killed.
    delete_seconds = CREATE_SECONDS

    def __init__(
        self, cluster: Cluster, mark: MarkerVolume, kubeconfig: Path, image: str | None = None, reserved_cpus: int = 0
    ) -> None:
        self.name = cluster.name
        self.nodes = nodes_in(cluster)
        self.mark = mark
        self.needs = (mark,)
        self.kubeconfig = kubeconfig
        self.image = image
        self.reserved_cpus = reserved_cpus
        self.remove_command = f"kind delete cluster --name {self.name}"

    def find(self) -> ResourceStatus | None:
        """Look at the node containers.

        Busy while another process creates or deletes them, broken if some are missing.
        """
        with creation_lock(self.name, shared=True) as lock:
            nodes = nodes_of(self.name)  # with the lock: before, its holder may have been about to end
        ours = inspect("volume", self.mark.name) is not None
        if not nodes and (lock is not None or not ours):
            return None
        if lock is None:
            return ResourceStatus("being made", ours=ours, busy="another process is still creating or deleting it")
        stopped = sorted(name for name, state in nodes.items() if state != "running")
        if stopped:
            return ResourceStatus("stopped", ours=ours, differs=f"nodes are stopped (docker start {' '.join(stopped)})")
        return ResourceStatus("running", ours=ours, broken=self._missing(nodes))

    def create(self) -> None:
        """Run `kind create cluster` under a lock that survives this process.

        Raises TransientError while another process works on the same cluster.
        """
        values = {"name": self.name, "workers": self.nodes - 1, "reserved_cpus": self.reserved_cpus}
        config = render("kind/cluster.yaml.j2", values)
        command = ["kind", "create", "cluster", "--name", self.name, "--config", "-"]
        command += ["--kubeconfig", str(self.kubeconfig)]
        if self.image:
            command += ["--image", self.image]
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with creation_lock(self.name) as lock:
            if lock is None:
                raise TransientError(f'Another process is still working on the KIND cluster "{self.name}".')
            # Entries of an earlier cluster must not be merged into this one's kubeconfig.
            self.kubeconfig.unlink(missing_ok=True)
            call(command, seconds=CREATE_SECONDS, text=config, keep_open=[lock])

    def poll(self) -> Readiness:
        """Ready when all nodes are Ready and DNS answers. Raises MlbenchError if the containers have gone."""
        with creation_lock(self.name, shared=True) as lock:
            if lock is None:
                return Readiness(False, "another process is still creating it")
            nodes = nodes_of(self.name)
        if not nodes:
            raise MlbenchError(f'The containers of the KIND cluster "{self.name}" are gone.')
        if (missing := self._missing(nodes)) is not None:
            return Readiness(False, missing, broken=True)
        try:
            listed = [line.split() for line in lines(self._exec(ASK_NODES))]
        except UsageError:
            raise
        except MlbenchError as error:
            return Readiness(False, f"the API server does not respond: {error.message}")
        ready = sum(1 for node in listed if len(node) > 1 and node[1] == "Ready")
        if ready < self.nodes:
            return Readiness(False, f"{ready} of {self.nodes} nodes are ready")
        return Readiness(call(self._exec(ASK_DNS)).strip() not in ("", "0"), "DNS is starting")

    def delete(self) -> None:
        """Run `kind delete cluster` and remove the kubeconfig. Nothing happens while another process works on it."""
        with creation_lock(self.name) as lock:
            if lock is None:
                return  # find() calls it busy until it is not
            command = ["kind", "delete", "cluster", "--name", self.name, "--kubeconfig", str(self.kubeconfig)]
            call(command, keep_open=[lock])
            self.kubeconfig.unlink(missing_ok=True)

    def _missing(self, nodes: dict[str, str]) -> str | None:
        """Why this cluster will never be complete although no process works on it; None if it looks complete."""
        if len(nodes) < self.nodes:
            return f"{len(nodes)} of {self.nodes} nodes were created"
        try:
            joined = len(lines(self._exec(ASK_NODES)))
        except MlbenchError as error:
            # An API server that does not answer proves nothing: the machine may be busy.
            return "the control plane was never finished" if "exit code 44" in error.message else None
        return f"{joined} of {self.nodes} nodes have joined" if joined < self.nodes else None

    def _exec(self, script: str) -> list[str]:
        return ["docker", "exec", control_plane_of(self.name), "sh", "-c", script]


class Registry(Resource):
    """A container registry for all KIND clusters of this machine. A user's own registry is used unchanged."""

    kind = "registry"
    create_seconds = 600.0
    delete_seconds = 120.0

    def __init__(self, cluster: Cluster, mark: MarkerVolume, name: str, port: int, image: str) -> None:
        self.cluster = cluster
        self.needs = (mark,)
        self.name = name
        self.port = port
        self.image = image
        self.remove_command = f"docker rm -f -v {name}"

    def find(self) -> ResourceStatus | None:
        """Inspect the container; names the port or state in which a registry differs from what was asked for."""
        container: Any = inspect("container", self.name)
        if container is None:
            return None
        state = container["State"]["Status"]
        bindings = (container["HostConfig"].get("PortBindings") or {}).get(f"{REGISTRY_PORT}/tcp") or []
        ports = [binding["HostPort"] for binding in bindings]
        ours = REGISTRY_LABEL in (container["Config"].get("Labels") or {})
        return ResourceStatus(
            state,
            broken="it is stopped" if ours and state != "running" else None,
            differs=self._difference(state, ports, ours),
            kept=self._reason_to_keep(ours),
        )

    def create(self) -> None:
        """Start the registry's container, reachable from this machine only."""
        publish = f"127.0.0.1:{self.port}:{REGISTRY_PORT}"
        options = ["--detach", "--restart", "always", "--publish", publish, "--label", f"{REGISTRY_LABEL}={self.name}"]
        call(["docker", "run", *options, "--name", self.name, self.image], seconds=self.create_seconds)

    def poll(self) -> Readiness:
        """Ready when Docker shows the container."""
        return Readiness(self.find() is not None)

    def delete(self) -> None:
        """Remove the container with its images. Absent is success."""
        call(["docker", "rm", "--force", "--volumes", self.name])

    def _difference(self, state: str, ports: list[str], ours: bool) -> str | None:
        if not ours and state != "running":
            return f"it is stopped (docker start {self.name})"
        if str(self.port) not in ports:
            return f"it is published on port {', '.join(ports) or 'none'} instead of {self.port}"
        return None

    def _reason_to_keep(self, ours: bool) -> str | None:
        if not ours:
            return "it was not created by mlbench"
        others = [name for name in list_owned_clusters(f"{REGISTRY_LABEL}={self.name}") if name != self.cluster.name]
        return f"used by {', '.join(others)}" if others else None


class RegistryEntry(Part):
    """What makes the registry known to nodes and tools: containerd's certs.d, the network, a ConfigMap."""

    kind = "registry entry"
    create_seconds = 120.0

    def __init__(self, nodes: KindCluster, registry: Registry) -> None:
        self.name = f"{nodes.name}/localhost:{registry.port}"
        self.goes_with = nodes
        self.needs = (nodes, registry)
        self.nodes = nodes
        self.registry = registry
        self.network = os.environ.get("KIND_EXPERIMENTAL_DOCKER_NETWORK", "kind")
        self.file = f"/etc/containerd/certs.d/localhost:{registry.port}/hosts.toml"
        self.text = f'[host."http://{registry.name}:{REGISTRY_PORT}"]\n'

    def find(self) -> ResourceStatus | None:
        """Look for the network connection and for the entry on every node; None if one is missing."""
        nodes = nodes_of(self.nodes.name)
        if not nodes or not self._is_connected():
            return None
        written = [succeeds(["docker", "exec", node, "grep", "-qxF", self.text.strip(), self.file]) for node in nodes]
        return ResourceStatus("there") if all(written) else None

    def create(self) -> None:
        """Connect the registry's network, write the entry on every node, and apply KIND's ConfigMap about it."""
        if not self._is_connected():
            call(["docker", "network", "connect", self.network, self.registry.name])
        for node in nodes_of(self.nodes.name):
            script = f"mkdir -p '{os.path.dirname(self.file)}' && cat >'{self.file}'"
            call(["docker", "exec", "--interactive", node, "sh", "-c", script], text=self.text)
        hosting = render("kind/registry-hosting.yaml.j2", {"host": f"localhost:{self.registry.port}"})
        apply = ["docker", "exec", "--interactive", control_plane_of(self.nodes.name), "sh", "-c"]
        call([*apply, f"{KUBECTL} apply -f -"], text=hosting)

    def _is_connected(self) -> bool:
        container: Any = inspect("container", self.registry.name)
        return container is not None and self.network in container["NetworkSettings"]["Networks"]


class LoadedImage(Part):
    """An image of this machine's Docker on every node that takes runs."""

    kind = "image"
    create_seconds = LOAD_SECONDS

    def __init__(self, nodes: KindCluster, image: str, needs: tuple[Resource, ...] = ()) -> None:
        self.name = image
        self.goes_with = nodes
        # One at a time, since all go through the same disk.
        self.needs = (nodes, *needs)
        self.nodes = nodes

    def find(self) -> ResourceStatus | None:
        """Compare the image's ID with those on the nodes, so that a rebuilt image is loaded again."""
        nodes = workers_of(self.nodes.name)
        image: Any = inspect("image", self.name)
        if not nodes or image is None:
            return None
        # Compare the image's ID, so that an image rebuilt under the same name is loaded again.
        return ResourceStatus("there") if all(self._on(node, image["Id"]) for node in nodes) else None

    def create(self) -> None:
        """Load an archive, because `kind load docker-image` fails if Docker keeps images in containerd's store.

        It lies in the cluster's folder: were this process killed, gigabytes would stay in that of temporary files.
        """
        parent = self.nodes.mark.folder
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix="image-", dir=parent) as folder:
            archive = str(Path(folder) / "image.tar")
            save = ["docker", "save", "--output", archive]
            if keeps_images_in_containerd():
                # Of a multi-platform image only this machine's platform is present, so it must be named for the save.
                save += ["--platform", platform_of(self.name)]
            call([*save, self.name], seconds=LOAD_SECONDS)
            load = ["kind", "load", "image-archive", archive, "--name", self.nodes.name]
            call([*load, "--nodes", ",".join(workers_of(self.nodes.name))], seconds=LOAD_SECONDS)

    def poll(self) -> Readiness:
        """Ready when every node has the image."""
        nodes = workers_of(self.nodes.name)
        missing = [node for node in nodes if not self._on(node, self.name)]
        return Readiness(not missing, f"it is not yet on {', '.join(missing)}")

    def _on(self, node: str, image: str) -> bool:
        return succeeds(["docker", "exec", node, "crictl", "inspecti", image])


def nodes_in(cluster: Cluster) -> int:
    """The number of node containers: workers and control plane."""
    return (ClusterDetails.of(cluster).nodes or 0) + 1


def volume_of(cluster: str) -> str:
    """The name of a cluster's marker volume."""
    return f"mlbench-{cluster}"


def control_plane_of(cluster: str) -> str:
    """The name of a cluster's control-plane container, as kind chooses it."""
    return f"{cluster}-control-plane"


def nodes_of(cluster: str) -> dict[str, str]:
    """The node containers of a KIND cluster, with their states."""
    found = {}
    form = "{{.Names}}\t{{.State}}"
    for line in lines(["docker", "ps", "--all", "--filter", f"label={KIND_LABEL}={cluster}", "--format", form]):
        name, state = line.split("\t")
        found[name] = state
    return found


def count_running_nodes() -> int:
    """The number of running nodes of all KIND clusters on this machine."""
    return len(lines(["docker", "ps", "--filter", f"label={KIND_LABEL}", "--format", "{{.Names}}"]))


def workers_of(cluster: str) -> list[str]:
    """The node containers for runs: the workers, or the control plane if it is alone."""
    control_plane = control_plane_of(cluster)
    nodes = nodes_of(cluster)
    return sorted(nodes.keys() - {control_plane}) or list(nodes)


def list_owned_clusters(label: str = CLUSTER_TAG) -> dict[str, dict[str, str]]:
    """The labels of every mark that has `label`, by cluster."""
    names = lines(["docker", "volume", "ls", "--quiet", "--filter", f"label={label}"])
    if not names:
        return {}
    volumes = json.loads(call(["docker", "volume", "inspect", *names]))
    found = {volume["Labels"].get(CLUSTER_TAG): volume for volume in volumes}
    return {name: {**volume["Labels"], "created": volume["CreatedAt"]} for name, volume in found.items() if name}


def keeps_images_in_containerd() -> bool:
    """Whether Docker uses containerd's image store (the default since Docker 29)."""
    return container_program() == "docker" and "io.containerd.snapshotter" in call(
        ["docker", "info", "--format", "{{json .DriverStatus}}"]
    )


def platform_of(image: str) -> str:
    """ "linux/amd64" of an image of this machine's Docker. Raises UsageError if there is no such image."""
    found: Any = inspect("image", image)
    if found is None:
        raise UsageError(
            f'Docker has no image "{image}" on this machine.', hint=f"docker pull {image}   or build it, then repeat"
        )
    return f"{found['Os']}/{found['Architecture']}"
