"""The end timer of a GKE cluster: a CronJob in the cluster that asks Google to delete it.

GKE has no such timer: machines that exceed their maximum run time (`max_run_duration`) are recreated, and changing it
recreates every machine. So a CronJob on the system's machines deletes the whole cluster. Its Kubernetes service account
is bound to the role container.clusterAdmin (with Workload Identity Federation, which needs no Google service account).
Users who may not change the project's policy get a cluster without a timer, and a warning. Sources:
docs/clouds-assumptions.md.
"""

import os
import re
from collections.abc import Mapping, Sequence

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError
from providers.base import Readiness, ResourceStatus
from providers.cluster_end import NAME, EndIdentity, EndMark, EndTimer, WorkerHold
from providers.gke import api
from providers.gke.api import Gke, Message
from providers.gke.resources import ControlPlane, WorkerPool

ENDPOINT = "https://cloudresourcemanager.googleapis.com"
ROLE = "roles/container.clusterAdmin"
# Google's mirror of the Python image, which machines reach without public addresses.
IMAGE = "mirror.gcr.io/library/python:3.12-slim-bookworm"
# Waits for a signal. GKE's machines already have it for their own pods.
PAUSE = "gke.gcr.io/pause:3.8@sha256:880e63f94b145e46f1b1082bb71b85e21f16b99b180b9996407d61240ceb9830"
PERMISSIONS_AT_ONCE = 100  # maximum per request
BINDING = ("resourcemanager.projects.getIamPolicy", "resourcemanager.projects.setIamPolicy")
BOUND = re.compile(rf"/subject/ns/mlbench-end-(.+)/sa/{NAME}$")
POLICY_VERSION = 3  # so that conditional bindings of others are preserved


def namespace_of(cluster: str) -> str:
    """A namespace unique to the cluster: IAM identifies accounts by namespace and name, across all clusters of a
    project."""
    return f"mlbench-end-{cluster}"


class GkeEndIdentity(EndIdentity):
    """The binding in the project's policy that allows the CronJob's account to delete clusters."""

    # Does not need the cluster and is deleted after it: a binding to a deleted account is free and grants nothing.
    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.name = f"{plane.name}/{NAME}"
        self._stays: str | None = None  # why removal failed
        self._project = Project(plane.gke)

    def find(self) -> ResourceStatus | None:
        """Also None for users who may not read the policy: a binding to a deleted account is free."""
        try:
            member = self._member()
            policy = self._project.read_policy()
        except (CredentialError, NotFoundError):
            return None
        return ResourceStatus("bound", kept=self._stays) if member in _members(policy) else None

    def grant(self) -> None:
        member = self._member()
        policy = self._project.read_policy()
        policy.setdefault("bindings", []).append({"role": ROLE, "members": [member]})
        self._project.write_policy(policy)

    def delete(self) -> None:
        member = self._member()
        policy = self._project.read_policy()
        for binding in policy.get("bindings", []):
            if binding["role"] == ROLE and not binding.get("condition"):
                binding["members"] = [item for item in binding["members"] if item != member]
        policy["bindings"] = [binding for binding in policy.get("bindings", []) if binding["members"]]
        try:
            self._project.write_policy(policy)
        except CredentialError as error:  # the cluster, which costs money, must not wait for it
            self._stays = f"{error.message} It costs nothing."

    def _member(self) -> str:
        pool = f"projects/{self._project.number()}/locations/global/workloadIdentityPools"
        subject = f"subject/ns/{namespace_of(self.plane.name)}/sa/{NAME}"
        return f"principal://iam.googleapis.com/{pool}/{self.plane.gke.project}.svc.id.goog/{subject}"


class GkeEndTimer(EndTimer):
    """The CronJob that asks Google to delete the cluster."""

    image, script = IMAGE, "gke_end.py"

    def __init__(self, plane: ControlPlane, identity: GkeEndIdentity | None = None) -> None:
        super().__init__(plane.cluster, plane.access, namespace_of(plane.name), identity, (plane,), plane)
        self.plane = plane

    def environment(self) -> Mapping[str, str]:
        return {"MLBENCH_CLUSTER_PATH": self.plane.path}


class GkeHold(WorkerHold):
    """The worker hold of a node pool, for callers who may not change the project's policy."""

    image = PAUSE

    def __init__(self, pool: WorkerPool, identity: GkeEndIdentity | None = None) -> None:
        plane = pool.plane
        needs = (identity, pool) if identity else ()
        super().__init__(plane.cluster, plane.access, namespace_of(plane.name), pool.count, identity, needs, plane)
        self.pool = pool
        self.operation: str | None = None

    def let_shrink(self) -> None:
        """Enable autoscaling of the pool; its limits are per zone."""
        found = self.pool.find_raw()
        zones = len(found.locations) if found is not None else 1
        limits = {"enabled": True, "min_node_count": 0, "max_node_count": max(1, -(-self.pool.count // zones))}
        gke = self.pool.plane.gke
        self.operation = gke.call("set_node_pool_autoscaling", name=self.pool.path, autoscaling=limits).name

    def poll_shrinking(self) -> Readiness:
        return self.pool.poll_operation(self.operation, "scaled down automatically")


class EndLabel(EndMark):
    """The cluster's labels."""

    kind = "label of the end"

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane.cluster, plane)
        self.plane = plane

    def read(self) -> Mapping[str, str]:
        return dict(self.plane.require_raw().resource_labels)

    def write(self, tags: Mapping[str, str]) -> None:
        found = self.plane.require_raw()
        labels = {**dict(found.resource_labels), **tags}
        fingerprint = found.label_fingerprint
        self.plane.gke.call("set_labels", name=self.plane.path, resource_labels=labels, label_fingerprint=fingerprint)


class Project:
    """A Google project: its number and its policy, by the REST API."""

    def __init__(self, gke: Gke) -> None:
        self.name = gke.project
        self._number: str | None = None

    def number(self) -> str:
        if self._number is None:
            self._number = str(self._ask("GET", f"/v1/projects/{self.name}")["projectNumber"])
        return self._number

    def read_policy(self) -> Message:
        options = {"options": {"requestedPolicyVersion": POLICY_VERSION}}
        return self._ask("POST", f"/v1/projects/{self.name}:getIamPolicy", options)

    def list_granted(self, permissions: Sequence[str]) -> set[str]:
        """The subset of `permissions` that the caller has in the project. Needs no permission itself."""
        granted: set[str] = set()
        for start in range(0, len(permissions), PERMISSIONS_AT_ONCE):
            asked = {"permissions": list(permissions[start : start + PERMISSIONS_AT_ONCE])}
            answer = self._ask("POST", f"/v1/projects/{self.name}:testIamPermissions", asked)
            granted |= set(answer.get("permissions") or ())
        return granted

    def write_policy(self, policy: Message) -> None:
        """Write the policy. Raises TransientError if it has changed since it was read, according to its etag."""
        body = {"policy": {**policy, "version": POLICY_VERSION}}
        self._ask("POST", f"/v1/projects/{self.name}:setIamPolicy", body)

    def _ask(self, method: str, path: str, body: Message | None = None) -> Message:
        url = f"{os.environ.get('MLBENCH_RESOURCE_MANAGER_ENDPOINT', ENDPOINT)}{path}"
        what = f"tell or change who may do what in the project {self.name}"
        conflict = f"The policy of {self.name} was changed by someone else; reading it again."
        return api.ask_rest("Google's resource manager", method, url, what, self.name, body, conflict)


def can_bind(gke: Gke) -> bool | None:
    """Whether the caller may bind the end timer's role; None if unknown, e.g. without credentials."""
    try:
        return set(BINDING) <= Project(gke).list_granted(BINDING)
    except MlbenchError:
        return None


def find_ended(gke: Gke) -> set[str]:
    """Names of clusters that the policy allows to delete themselves; empty if the caller may not read it.

    A binding outlives its cluster, and shows that disks with the cluster's name are mlbench's.
    """
    try:
        policy = Project(gke).read_policy()
    except (CredentialError, NotFoundError):
        return set()
    return {match[1] for member in _members(policy) if (match := BOUND.search(member))}


def _members(policy: Message) -> set[str]:
    """Members that have the role without a condition."""
    bindings = [item for item in policy.get("bindings", []) if item["role"] == ROLE and not item.get("condition")]
    return {member for binding in bindings for member in binding["members"]}
