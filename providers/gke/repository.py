"""The repository of Artifact Registry that `create-cluster gke --registry auto` makes for a cluster's images.

Source: Artifact Registry's REST reference, as of 2026-11. It is asked by google-auth's session, so that no further
library is needed. MLBENCH_ARTIFACT_ENDPOINT moves the API, for tests and proxies.
"""

import os

from mlbench_cli.errors import NotFoundError
from providers.base import (
    CLUSTER_TAG,
    Readiness,
    Resource,
    ResourceStatus,
    call_timeout,
    ownership_tags,
    reason_to_keep_images,
)
from providers.gke import api
from providers.gke.api import Message, region_of
from providers.gke.resources import ControlPlane

ENDPOINT = "https://artifactregistry.googleapis.com"
USER = "oauth2accesstoken"  # Artifact Registry's user name for access tokens


def repository_id(cluster: str) -> str:
    return f"mlbench-{cluster}"


def registry_of(project: str, location: str, cluster: str) -> str:
    """The prefix of the images' names, for nodes and for `docker push`."""
    return f"{region_of(location)}-docker.pkg.dev/{project}/{repository_id(cluster)}"


class ImageRepository(Resource):
    """A Docker repository in the cluster's region. It is deleted before the cluster, which is how it is found again."""

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
            "labels": ownership_tags(self.plane.cluster),
        }
        self._ask("POST", f"{self._parent}?repositoryId={self.name}", body)

    def poll(self) -> Readiness:
        return Readiness(self.find() is not None, "Google does not show it yet")

    def delete(self) -> None:
        try:
            self._ask("DELETE", f"{self._parent}/{self.name}")
        except NotFoundError:
            return

    def _ask(self, method: str, path: str, body: Message | None = None) -> Message:
        url = f"{os.environ.get('MLBENCH_ARTIFACT_ENDPOINT', ENDPOINT)}{path}"
        what = f"{method.lower()} the image repository {self.name}"
        with api.map_rest_errors("Artifact Registry", what, self.plane.gke.project):
            answer = api.open_session().request(method, url, json=body, timeout=call_timeout())
            api.require_success(answer)
        document: Message = answer.json() if answer.content else {}
        return document
