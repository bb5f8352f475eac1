"""Managed identities of a cluster, and the built-in roles that they get."""

import uuid

from providers.aks.api import Azure
from providers.aks.errors import Message
from providers.aks.resources import ResourceGroup
from providers.base import ownership_tags


def make_identity(group: ResourceGroup, path: str, what: str) -> str:
    """Make the identity `path` in the cluster's group; the ID by which roles name it."""
    azure = group.azure
    body: Message = {"location": azure.location, "tags": ownership_tags(group.cluster)}
    azure.change("PUT", path, what, body)
    return str(azure.get(path, what)["properties"]["principalId"])


def name_assignment(scope: str, seed: str) -> str:
    """The path of a role assignment on `scope`. A GUID names it, derived from `seed` so that a repetition finds it."""
    guid = uuid.uuid5(uuid.NAMESPACE_URL, seed.lower())
    return f"{scope}/providers/Microsoft.Authorization/roleAssignments/{guid}"


def assign_role(azure: Azure, assignment: str, role: str, principal: str, what: str) -> None:
    """Give an identity the built-in role with the ID `role`. Raises CredentialError if the caller may not give it."""
    properties = {
        "roleDefinitionId": f"{azure.root}/providers/Microsoft.Authorization/roleDefinitions/{role}",
        "principalId": principal,
        "principalType": "ServicePrincipal",
    }
    azure.change("PUT", assignment, what, {"properties": properties})
