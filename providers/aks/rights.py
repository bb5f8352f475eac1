"""The Azure RBAC actions that commands need, as a custom role for administrators."""

import fnmatch
from collections.abc import Sequence
from typing import TypedDict

from providers.aks.errors import Message
from providers.rights import list_rights


class Role(TypedDict):
    """A custom role for `az role definition create --role-definition FILE`."""

    Name: str
    Description: str
    AssignableScopes: list[str]
    Actions: list[str]


def role_of(command: str | None) -> Role:
    """The role for one command, or for all without a command. Raises UsageError for commands that do not use Azure."""
    return {
        "Name": f"mlbench {command}" if command else "mlbench",
        "Description": f"What mlbench {command} needs" if command else "What all commands of mlbench need",
        "AssignableScopes": ["/subscriptions/SUBSCRIPTION"],
        "Actions": list_rights("aks", command, "rights at Azure"),
    }


def list_denied(wanted: Sequence[str], granted: Sequence[Message]) -> list[str]:
    """The actions that are not allowed by any of the granted permissions (with `actions` and `notActions`)."""
    return [name for name in wanted if not any(_allows(permission, name) for permission in granted)]


def _allows(permission: Message, action: str) -> bool:
    def is_among(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(action.lower(), pattern.lower()) for pattern in patterns)

    return is_among(permission.get("actions") or ()) and not is_among(permission.get("notActions") or ())
