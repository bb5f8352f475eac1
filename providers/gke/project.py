"""A Google project: its number, its policy, and what the caller may do in it."""

import os
from collections.abc import Sequence

from providers.gke import api
from providers.gke.api import Gke, Message

ENDPOINT = "https://cloudresourcemanager.googleapis.com"
PERMISSIONS_AT_ONCE = 100  # maximum per request
POLICY_VERSION = 3  # so that conditional bindings are shown


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

    def _ask(self, method: str, path: str, body: Message | None = None) -> Message:
        url = f"{os.environ.get('MLBENCH_RESOURCE_MANAGER_ENDPOINT', ENDPOINT)}{path}"
        what = f"tell or change who may do what in the project {self.name}"
        conflict = f"The policy of {self.name} was changed by someone else; reading it again."
        return api.ask_rest("Google's resource manager", method, url, what, self.name, body, conflict)
