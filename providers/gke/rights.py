"""The IAM permissions that commands need, as a custom role for administrators."""

from typing import TypedDict

from providers.rights import list_rights


class Role(TypedDict):
    """A custom role for `gcloud iam roles create mlbench --project PROJECT --file FILE`."""

    title: str
    description: str
    stage: str
    includedPermissions: list[str]


def role_of(command: str | None) -> Role:
    """The role for one command, or for all without a command. Raises UsageError for commands that do not use Google
    Cloud."""
    return {
        "title": f"mlbench {command}" if command else "mlbench",
        "description": f"What mlbench {command} needs" if command else "What all commands of mlbench need",
        "stage": "GA",
        "includedPermissions": list_rights("gke", command, "permissions of Google"),
    }
