"""Managed identities of a cluster, and their built-in roles."""

import uuid

from providers.aks.api import Azure
from providers.aks.errors import Message
from providers.aks.resources import ResourceGroup
from providers.base import ownership_tags


def make_identity(group: ResourceGroup, path: str, what: str) -> str:
    """Create the identity `path` in the cluster's group; returns its principal ID."""
    azure = group.azure
    body: Message = {"location": azure.location, "tags": ownership_tags(group.cluster)}
    azure.change("PUT", path, what, body)
    return str(azure.get(path, what)["properties"]["principalId"])


def name_assignment(scope: str, seed: str) -> str:
    """The path of a role assignment on `scope`, whose GUID is derived from `seed`, so that it is found again."""
    guid = uuid.uuid5(uuid.NAMESPACE_URL, seed.lower())
    return f"{scope}/providers/Microsoft.Authorization/roleAssignments/{guid}"


def assign_role(azure: Azure, assignment: str, role: str, principal: str, what: str) -> None:
    """Assign the built-in role `role` (ID) to an identity. Raises CredentialError if the caller may not assign it."""
    properties = {
        "roleDefinitionId": f"{azure.root}/providers/Microsoft.Authorization/roleDefinitions/{role}",
        "principalId": principal,
        "principalType": "ServicePrincipal",
    }
    azure.change("PUT", assignment, what, {"properties": properties})
