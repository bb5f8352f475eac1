"""A cluster's permission to use an existing subnet (`--subnet`): an identity with a role only on it.

AKS creates network cards and load balancers in the subnet with the cluster's identity. An identity that AKS creates
with the cluster would have no role there, and creation would fail, so the identity is created first. Sources:
docs/clouds-assumptions.md.
"""

from contextlib import suppress

from mlbench_cli.errors import CredentialError, NotFoundError
from providers.aks.resources import ResourceGroup, assign_role, make_identity, name_assignment, network_identity_of
from providers.base import Readiness, Resource, ResourceStatus

NETWORK_CONTRIBUTOR = "4d97b98b-1d4f-4787-a291-c67834d212e7"  # the built-in role's ID, the same everywhere


class SubnetAccess(Resource):
    """The identity in the cluster's group, and its role on the subnet, which is removed before the group."""

    kind = "access to the subnet"
    create_seconds = delete_seconds = 600.0

    def __init__(self, group: ResourceGroup, subnet: str) -> None:
        self.group = group
        self.name = f"{group.name}/{subnet.rpartition('/')[2]}"
        self.needs = (group,)
        self._identity = network_identity_of(group)
        self._assignment = name_assignment(subnet, f"{self._identity}{subnet}")
        self._is_being_made = False
        self.remove_command = f"az role assignment delete --ids {self._assignment}"

    def find(self) -> ResourceStatus | None:
        """None until the identity has its role."""
        try:
            self.group.azure.get(self._assignment, "show the role on the subnet")
        except NotFoundError:
            return None
        return ResourceStatus("has its role")

    def create(self) -> None:
        """Create the identity and assign its role. Raises CredentialError if the caller may not assign it."""
        self._is_being_made = True
        principal = make_identity(self.group, self._identity, "create the cluster's identity")
        try:
            what = "give the cluster a role on the subnet"
            assign_role(self.group.azure, self._assignment, NETWORK_CONTRIBUTOR, principal, what)
        except CredentialError as error:
            raise CredentialError(
                error.message,
                hint="With --subnet the cluster needs the role Network Contributor on the subnet, which its owner may "
                "let you assign; or leave out --subnet",
                details=error.details,
            ) from None

    def poll(self) -> Readiness:
        """Ready when Azure shows the role."""
        return Readiness(self.find() is not None, "Azure does not show its role yet")

    def describe_wait(self) -> str | None:
        """What the cluster must wait for while this is being created; None otherwise, also during deletion."""
        if self._is_being_made and self.find() is None:
            return "its identity has no role on the subnet yet"
        return None

    def delete(self) -> None:
        """Take the role away; the identity goes with the group."""
        with suppress(NotFoundError):
            self.group.azure.change("DELETE", self._assignment, "remove the role on the subnet")
