"""The registry that `create-cluster aks --registry auto` creates for a cluster's images, in its own resource group.

This way it can outlive the cluster (--keep-images). It is deleted before the cluster's group, by which the cluster is
found. Sources: Azure Container Registry's REST reference and its page on authentication, as of 2026-11.
MLBENCH_ACR_ENDPOINT sets the address of the registry's sign-in, for tests and proxies.
"""

import os
import uuid
from dataclasses import replace
from urllib.parse import urlencode

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError
from providers.aks import api
from providers.aks.errors import Message
from providers.aks.resources import AzureResource, ControlPlane, ResourceGroup, assign_role, name_assignment
from providers.base import (
    KEPT_TAG,
    Readiness,
    ResourceStatus,
    TransientError,
    ownership_tags,
    reason_to_keep_images,
)

USER = "00000000-0000-0000-0000-000000000000"  # the registry's user name for tokens
IMAGES_SUFFIX = "-images"  # suffix of the group's name
FOLDER = "mlbench"  # a name without a folder would refer to Docker Hub
PULL = "7f951dda-4ed3-4680-a7ca-43fe172d538d"  # the built-in role AcrPull, the same everywhere


def registry_name(subscription: str, region: str, cluster: str) -> str:
    """A globally unique name of letters and digits, derived from the cluster's name."""
    return f"mlbench{uuid.uuid5(uuid.NAMESPACE_URL, f'{subscription}/{region}/{cluster}'.lower()).hex[:20]}"


def registry_of(subscription: str, region: str, cluster: str) -> str:
    """The prefix of image names, for nodes and `docker push`."""
    return f"{registry_name(subscription, region, cluster)}.azurecr.io/{FOLDER}"


class ImageGroup(ResourceGroup):
    """The resource group of the registry."""

    kind = "group of the image registry"

    def __init__(self, group: ResourceGroup) -> None:
        super().__init__(group.cluster, group.azure)
        self.name = f"{group.name}{IMAGES_SUFFIX}"
        self.path = group.azure.group(self.name)
        self.needs = (group,)
        self.remove_command = f"az group delete --name {self.name} --subscription {self.azure.subscription}"

    def find(self) -> ResourceStatus | None:
        """Like the cluster's own group; kept if the images are kept."""
        found = super().find()
        kept = reason_to_keep_images(self.cluster, self.remove_command)
        return replace(found, kept=kept) if found else None

    def keep(self) -> None:
        """Mark it, so that gc keeps it after its cluster is deleted."""
        found = self.find_raw() or {}
        tags = {**(found.get("tags") or {}), KEPT_TAG: "true"}
        self.azure.change("PATCH", self.path, f"mark the group {self.name}", {"tags": tags})


class ImageRegistry(AzureResource):
    """The registry, and the permission of the cluster's machines to pull from it."""

    kind = "image registry"
    create_seconds = delete_seconds = 600.0

    def __init__(self, group: ImageGroup, plane: ControlPlane) -> None:
        azure = group.azure
        name = registry_name(azure.subscription, azure.location, plane.name)
        super().__init__(azure, name, f"{group.path}/providers/Microsoft.ContainerRegistry/registries/{name}")
        self.plane = plane
        self.needs = (group, plane)
        self.goes_with = group
        self.remove_command = f"az acr delete --name {name} --subscription {azure.subscription}"

    def find(self) -> ResourceStatus | None:
        """Like other resources; kept with its group."""
        found = super().find()
        kept = reason_to_keep_images(self.plane.cluster, self.remove_command)
        return replace(found, kept=kept) if found else None

    def request(self) -> Message:
        """The cheapest tier, without the shared admin user."""
        return {
            "location": self.azure.location,
            "tags": ownership_tags(self.plane.cluster),
            "sku": {"name": "Basic"},
            "properties": {"adminUserEnabled": False},
        }

    def poll(self) -> Readiness:
        """Ready when the machines may pull. Raises CredentialError if the caller may not grant this."""
        progress = super().poll()
        if not progress.ready:
            return progress
        machines = self._find_machines()
        assignment = name_assignment(self.path, f"{self.path}/{machines}")
        try:
            self.azure.get(assignment, "show the role of the machines")
        except NotFoundError:
            try:
                assign_role(self.azure, assignment, PULL, machines, "let the machines pull images")
            except CredentialError as error:
                hint = "Ask for a role that can assign roles, or use your own registry: --registry PREFIX"
                raise CredentialError(error.message, hint=hint) from None
            return Readiness(False, "Azure does not show the machines' role yet")
        found = self.find_raw() or {}
        server = (found.get("properties") or {}).get("loginServer")
        return Readiness(True, facts={"registry": f"{server}/{FOLDER}"} if server else {})

    def _find_machines(self) -> str:
        """The identity with which the machines pull images."""
        profile = self.plane.require_raw()["properties"].get("identityProfile") or {}
        machines = (profile.get("kubeletidentity") or {}).get("objectId")
        if not machines:
            raise TransientError("AKS does not show the identity of the machines yet.")
        return str(machines)


def fetch_login(registry: str) -> tuple[str, str]:
    """User and password of a registry: its own token, exchanged for an Azure token."""
    from azure.core.rest import HttpRequest

    host = registry.partition("/")[0]
    url = f"{os.environ.get('MLBENCH_ACR_ENDPOINT', f'https://{host}')}/oauth2/exchange"
    form = {"grant_type": "access_token", "service": host, "access_token": api.get_token()}
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    request = HttpRequest("POST", url, content=urlencode(form), headers=headers)
    answer = api.send_unsigned(request, f"The registry {host}")
    if answer.status_code in (401, 403):
        raise CredentialError(f"The registry {host} rejected the credentials: {answer.text()[:300]}")
    if answer.status_code >= 400:
        raise MlbenchError(f"The registry {host} answered with status {answer.status_code}: {answer.text()[:300]}")
    return USER, str(answer.json()["refresh_token"])
