"""The permissions of Google's IAM that commands need, as a custom role for an administrator."""

from typing import TypedDict

from providers.rights import list_rights


class Role(TypedDict):
    """A custom role, as `gcloud iam roles create mlbench --project PROJECT --file FILE` takes it."""

    title: str
    description: str
    stage: str
    includedPermissions: list[str]


def role_of(command: str | None) -> Role:
    """The role for one command, or without one for all. Raises UsageError for one that asks nothing of Google."""
    return {
        "title": f"mlbench {command}" if command else "mlbench",
        "description": f"What mlbench {command} needs" if command else "What all commands of mlbench need",
        "stage": "GA",
        "includedPermissions": list_rights("gke", command, "permissions of Google"),
    }
