"""The actions of Azure's role-based access that commands need, as a custom role for an administrator."""

import fnmatch
from collections.abc import Sequence
from typing import TypedDict

from providers.aks.errors import Message
from providers.rights import list_rights


class Role(TypedDict):
    """A custom role, as `az role definition create --role-definition FILE` takes it."""

    Name: str
    Description: str
    AssignableScopes: list[str]
    Actions: list[str]


def role_of(command: str | None) -> Role:
    """The role for one command, or without one for all. Raises UsageError for one that asks nothing of Azure."""
    return {
        "Name": f"mlbench {command}" if command else "mlbench",
        "Description": f"What mlbench {command} needs" if command else "What all commands of mlbench need",
        "AssignableScopes": ["/subscriptions/SUBSCRIPTION"],
        "Actions": list_rights("aks", command, "rights at Azure"),
    }


def list_denied(wanted: Sequence[str], granted: Sequence[Message]) -> list[str]:
    """Those of the actions that none of the granted permissions (with `actions` and `notActions`) allows."""
    return [name for name in wanted if not any(_allows(permission, name) for permission in granted)]


def _allows(permission: Message, action: str) -> bool:
    def is_among(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

    return is_among(permission.get("actions") or ()) and not is_among(permission.get("notActions") or ())
