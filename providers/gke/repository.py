"""The Artifact Registry repository that `create-cluster gke --registry auto` creates for a cluster's images.

Source: Artifact Registry's REST reference, as of 2026-11. Uses google-auth's session, so no other library is needed.
MLBENCH_ARTIFACT_ENDPOINT sets the API's address, for tests and proxies.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from mlbench_cli.errors import CredentialError, NotFoundError
from providers.base import (
    CLUSTER_TAG,
    KEPT_TAG,
    Readiness,
    Resource,
    ResourceStatus,
    TransientError,
    ownership_tags,
    reason_to_keep_images,
)
from providers.gke import api
from providers.gke.api import Gke, Message, Project, region_of
from providers.gke.fabric import LOCATION_TAG
from providers.gke.resources import ControlPlane

ENDPOINT = "https://artifactregistry.googleapis.com"
AT_ONCE = 16  # concurrent requests for regions
RETRY_WAITS = (0.5, 2.0)  # seconds before retries after transient errors
READER = "roles/artifactregistry.reader"
USER = "oauth2accesstoken"  # Artifact Registry's user name for access tokens


def repository_id(cluster: str) -> str:
    return f"mlbench-{cluster}"


def registry_of(project: str, location: str, cluster: str) -> str:
    """The prefix of image names, for nodes and `docker push`."""
    return f"{region_of(location)}-docker.pkg.dev/{project}/{repository_id(cluster)}"


def node_account(gke: Gke, given: str | None) -> str:
    """The service account of a cluster's machines: the given one, else the project's Compute Engine default."""
    return given or f"{Project(gke).number()}-compute@developer.gserviceaccount.com"


class ImageRepository(Resource):
    """A Docker repository in the cluster's region. It is deleted before the cluster, by which it is found."""

    kind = "image repository"
    create_seconds = delete_seconds = 300.0

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.name = repository_id(plane.name)
        self.needs = (plane,)
        gke = plane.gke
        self.region = region_of(gke.location)
        self._parent = f"/v1/projects/{gke.project}/locations/{self.region}/repositories"
        self.remove_command = (
            f"gcloud artifacts repositories delete {self.name} --location {self.region} --project {gke.project}"
        )

    def find(self) -> ResourceStatus | None:
        try:
            found = self._ask("GET", f"{self._parent}/{self.name}")
        except NotFoundError:
            return None
        ours = (found.get("labels") or {}).get(CLUSTER_TAG) == self.plane.name
        return ResourceStatus("there", ours=ours, kept=reason_to_keep_images(self.plane.cluster, self.remove_command))

    def create(self) -> None:
        body = {
            "format": "DOCKER",
            "description": f"images of the mlbench cluster {self.plane.name}",
            "labels": {**ownership_tags(self.plane.cluster), LOCATION_TAG: self.plane.gke.location},
        }
        self._ask("POST", f"{self._parent}?repositoryId={self.name}", body)

    def poll(self) -> Readiness:
        """Ready when it exists and the machines' account may read it; if that cannot be granted, the record says so."""
        if self.find() is None:
            return Readiness(False, "Google does not show it yet")
        try:
            self._let_machines_read()
        except CredentialError as error:
            account = self.plane.options.service_account or "the machines' service account"
            problem = (
                f"{error.message} Unless {account} has the role {READER}, pods cannot pull: gcloud artifacts "
                f"repositories add-iam-policy-binding {self.name} --location {self.region} --project "
                f"{self.plane.gke.project} --role {READER} --member serviceAccount:ACCOUNT"
            )
            return Readiness(True, facts={"registry_problem": problem})
        return Readiness(True, facts={"registry_problem": None})

    def keep(self) -> None:
        """Mark it, so that gc keeps it after its cluster is deleted."""
        found = self._ask("GET", f"{self._parent}/{self.name}")
        labels = {**(found.get("labels") or {}), KEPT_TAG: "true"}
        self._ask("PATCH", f"{self._parent}/{self.name}?updateMask=labels", {"labels": labels})

    def _let_machines_read(self) -> None:
        """Bind the reader role to the machines' account, only on this repository.

        In organizations created since May 2024, the project's default account has no roles
        (iam.automaticIamGrantsForDefaultServiceAccounts).
        """
        member = f"serviceAccount:{node_account(self.plane.gke, self.plane.options.service_account)}"
        policy = self._ask("GET", f"{self._parent}/{self.name}:getIamPolicy")
        bindings = policy.setdefault("bindings", [])
        if any(item["role"] == READER and member in item["members"] for item in bindings):
            return
        bindings.append({"role": READER, "members": [member]})
        self._ask("POST", f"{self._parent}/{self.name}:setIamPolicy", {"policy": policy})

    def delete(self) -> None:
        with suppress(NotFoundError):
            self._ask("DELETE", f"{self._parent}/{self.name}")

    def _ask(self, method: str, path: str, body: Message | None = None) -> Message:
        return _ask(self.plane.gke.project, method, path, f"{method.lower()} the image repository {self.name}", body)


def list_repositories(project: str) -> list[Message]:
    """The project's repositories with mlbench's label, in all regions, except those kept by --keep-images.

    Empty if the API is disabled. Raises MlbenchError if Google cannot be asked.
    """
    try:
        answer = _list(project, f"/v1/projects/{project}/locations?pageSize=500", "list regions of repositories")
    except CredentialError as error:
        if api.is_api_off(error.message):
            return []
        raise
    parents = [f"/v1/{item['name']}/repositories?pageSize=500" for item in answer.get("locations") or ()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda parent: _list(project, parent, "list image repositories"), parents)
        listed = [item for part in found for item in part.get("repositories") or ()]
    labels = [(item, item.get("labels") or {}) for item in listed]
    return [item for item, marks in labels if CLUSTER_TAG in marks and KEPT_TAG not in marks]


def require_api(project: str) -> None:
    """Raise CredentialError with the command that enables Artifact Registry's API if the project has not: before
    anything that costs money is made."""
    _list(project, f"/v1/projects/{project}/locations?pageSize=1", "list regions of repositories")


def _list(project: str, path: str, what: str) -> Message:
    """The response of a list request. With many regions a transient error is likely, so it is retried."""
    for wait in RETRY_WAITS:
        try:
            return _ask(project, "GET", path, what)
        except TransientError:
            time.sleep(wait)
    return _ask(project, "GET", path, what)


def _ask(project: str, method: str, path: str, what: str, body: Message | None = None) -> Message:
    url = f"{os.environ.get('MLBENCH_ARTIFACT_ENDPOINT', ENDPOINT)}{path}"
    return api.ask_rest("Artifact Registry", method, url, what, project, body)
