"""The resources of an AKS cluster: a resource group, the cluster with a system pool, the worker pool, and their parts.

Everything is in the group, and AKS deletes its own group for the machines with the cluster, so deleting the group
deletes everything. AKS allows one operation at a time on a cluster and rejects others: mlbench waits for these.

They are no ARM template: the expiry timer is made in Kubernetes between cluster and pool, a pool that gets no machines
is replaced by one in another zone, a role on a subnet is in somebody else's group, and a failed deployment leaves what
it has made. So each part would be looked for, polled and deleted by itself all the same.
"""

import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Network
from urllib.parse import urlencode

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.cluster_details import NVIDIA_GPU, ClusterDetails
from mlbench_cli.model.run import Cluster
from providers.aks import api
from providers.aks.api import AGAIN, Azure, Message, Operation, access_to
from providers.aks.options import AksOptions, Machine
from providers.base import (
    CLUSTER_TAG,
    KEPT_TAG,
    OWNER_TAG,
    ROLE_LABEL,
    WORKER,
    BusyError,
    NoAnswerError,
    Readiness,
    Resource,
    ResourceStatus,
    RightsError,
    TransientError,
    describe_differences,
    ownership_tags,
)
from providers.cluster_end import EndMark, WorkerHold
from providers.kubernetes_calls import list_ready_workers

SYSTEM_POOL = "system"
WORKER_POOL = "workers"  # pool names: at most 12 lowercase letters and digits
GPU_LABEL = f"{NVIDIA_GPU}.present"
GPU_TAINT = f"{NVIDIA_GPU}=present:NoSchedule"
# AKS itself taints the machines of spot pools.
SPOT_TOLERATION = "kubernetes.azure.com/scalesetpriority=spot:NoSchedule"
SPOT = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Exists", "effect": "NoSchedule"}
CREATED_TAG = "mlbench-created"  # seconds since 1970; Azure does not report when groups were created
# The system pool has no taint, so that Helm charts and controllers can run there. Two machines, so that DNS survives
# the loss of one.
SYSTEM_NODES = 2
SYSTEM_DISK = 128  # GB
READY, FAILED = ("Succeeded",), ("Failed", "Canceled")


def network_identity_of(group: "ResourceGroup") -> str:
    """The path of a cluster's identity for an existing subnet."""
    return f"{group.path}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/mlbench-network"


def group_of(name: str, location: str) -> str:
    """The resource group of a cluster. Group names are unique per subscription, cluster names per region."""
    return f"mlbench-{name}-{location}"


class AzureResource(Resource):
    """A resource that Azure creates by an operation: identified by its path, with a provisioning state."""

    def __init__(self, azure: Azure, name: str, path: str) -> None:
        self.azure = azure
        self.name = name
        self.path = path
        self.operation: Operation | None = None

    def find_raw(self) -> Message | None:
        """Read the resource; None if it does not exist."""
        try:
            return self.azure.get(self.path, f"show the {self.kind} {self.name}")
        except NotFoundError:
            return None

    @abstractmethod
    def request(self) -> Message:
        """The body of the create request."""

    def find(self) -> ResourceStatus | None:
        """The status from the provisioning state."""
        found = self.find_raw()
        if found is None:
            return None
        state = state_of(found)
        broken = f"it is in the state {state}" if state in FAILED else None
        differs = None if broken else self.find_difference(found)
        return ResourceStatus(state, deleting=state == "Deleting", broken=broken, differs=differs)

    def find_difference(self, found: Message) -> str | None:
        """How the resource differs from the request; None if it does not."""
        return None

    def create(self) -> None:
        """Request it, and store the operation to poll."""
        what, body = f"create the {self.kind} {self.name}", self.request()
        try:
            self.operation = self.azure.change("PUT", self.path, what, body)
        except NotFoundError as error:
            raise _not_everywhere(error.message) from None

    def poll(self) -> Readiness:
        """Ready when the creating operation is done. Raises with Azure's own words if it has failed."""
        return self.poll_operation("created")

    def poll_operation(self, doing: str) -> Readiness:
        """The progress of the operation on it. Raises with Azure's message if the operation or the resource has
        failed."""
        what = f'The {self.kind} "{self.name}" was not {doing}'
        if self.operation is not None and not self.operation.is_due:
            return Readiness(False, "Azure is working on it")
        if not self.azure.poll(self.operation, what):
            return Readiness(False, "Azure is working on it")
        found = self.find_raw()
        if found is None:
            raise _not_everywhere(f'The {self.kind} "{self.name}" disappeared while it was being {doing}.')
        state = state_of(found)
        if state in FAILED:
            # Another process requested it, and only that process can read why it failed.
            raise MlbenchError(f"{what}: it is in the state {state}.", hint=AGAIN)
        return Readiness(state in READY, f"it is {state}")

    def delete(self) -> None:
        """Request the deletion. Absent is success."""
        with suppress(NotFoundError):
            self.azure.change("DELETE", self.path, f"delete the {self.kind} {self.name}")


class ResourceGroup(AzureResource):
    """The group of everything that belongs to the cluster. It is found by its tags, and deleted with its contents."""

    kind = "resource group"
    create_seconds = 300.0
    delete_seconds = 3600.0  # includes the cluster and its machines

    def __init__(self, cluster: Cluster, azure: Azure) -> None:
        name = group_of(cluster.name, azure.location)
        super().__init__(azure, name, azure.group(name))
        self.cluster = cluster
        self.remove_command = f"az group delete --name {name} --subscription {azure.subscription}"
        self._removal: Operation | None = None
        self._stays_because = ""

    def find(self) -> ResourceStatus | None:
        """The status from state and tags, with the reason for which Azure has given up a deletion."""
        found = self.find_raw()
        if found is None:
            return None
        state = state_of(found)
        tags = found.get("tags") or {}
        ours = tags.get(CLUSTER_TAG) == self.cluster.name
        is_deleting = state == "Deleting"
        if not is_deleting:
            self._read_removal()
        owner = tags.get(OWNER_TAG)
        return ResourceStatus(f"{state}{self._stays_because}", ours=ours, deleting=is_deleting, owner=owner)

    def delete(self) -> None:
        """Request the deletion. Absent is success."""
        with suppress(NotFoundError):
            self._removal = self.azure.change("DELETE", self.path, f"delete the {self.kind} {self.name}")

    def _read_removal(self) -> None:
        """Azure shows a group whose deletion has failed as if nothing had been: only the operation tells why."""
        try:
            self.azure.poll(self._removal, "an earlier deletion failed")
        except NoAnswerError:
            raise
        except MlbenchError as error:
            self._stays_because, self._removal = f"; {error.message}", None

    def request(self) -> Message:
        """Region and tags."""
        tags = {**ownership_tags(self.cluster), CREATED_TAG: str(int(time.time()))}
        return {"location": self.azure.location, "tags": tags}


class ControlPlane(AzureResource):
    """The cluster with its system pool."""

    kind = "AKS cluster"
    create_seconds = 1800.0
    delete_seconds = 3600.0

    def __init__(self, group: ResourceGroup, options: AksOptions) -> None:
        service = f"{group.path}/providers/Microsoft.ContainerService"
        super().__init__(group.azure, group.cluster.name, f"{service}/managedClusters/{group.cluster.name}")
        self.group = group
        self.cluster = group.cluster
        self.options = options
        self.needs = (group,)
        # Why it cannot be requested yet. What it waits for is no need: it is deleted before the group that this is in.
        self.obstacles: list[Callable[[], str | None]] = []
        self.goes_with = group
        self.remove_command = (
            f"az aks delete --name {self.name} --resource-group {group.name} --subscription {self.azure.subscription}"
        )

    def find(self) -> ResourceStatus | None:
        """Like other resources. Raises BusyError while it does not exist and cannot be requested yet."""
        found = super().find()
        if found is None and (reason := next(filter(None, (ask() for ask in self.obstacles)), None)):
            raise BusyError(reason)
        return found

    def require_raw(self) -> Message:
        """Read the cluster. Raises NotFoundError if it does not exist."""
        found = self.find_raw()
        if found is None:
            raise NotFoundError(f'There is no AKS cluster "{self.name}".')
        return found

    def access(self) -> Access:
        """Connect to the cluster's API. Raises NotFoundError if the cluster does not exist."""
        return access_to(self.azure, self.path)

    def _identity(self) -> Message:
        """The identity used by AKS: the given one, its own, or one with a role on the given subnet."""
        path = self.options.identity or (network_identity_of(self.group) if self.options.subnet else None)
        return {"type": "UserAssigned", "userAssignedIdentities": {path: {}}} if path else {"type": "SystemAssigned"}

    def request(self) -> Message:
        """The create request of the cluster."""
        options, tags = self.options, ownership_tags(self.cluster)
        properties: Message = {
            "dnsPrefix": self.name,
            "nodeResourceGroup": f"{self.group.name}-nodes",
            "enableRBAC": True,
            "agentPoolProfiles": [
                {
                    "name": SYSTEM_POOL,
                    "mode": "System",
                    "count": SYSTEM_NODES,
                    "vmSize": options.system_machine_type,
                    "osDiskSizeGB": SYSTEM_DISK,
                    "nodeLabels": {ROLE_LABEL: SYSTEM_POOL},
                    **_pool(options, tags),
                }
            ],
            "networkProfile": {
                "networkPlugin": "azure",
                "networkPluginMode": "overlay",
                "networkDataplane": "cilium",
                "networkPolicy": "cilium",
                "loadBalancerSku": "standard",
                "outboundType": "loadBalancer",
                **choose_ranges(read_network(self.azure, options.subnet) if options.subnet else ()),
            },
            "oidcIssuerProfile": {"enabled": True},
            # Upgrading a machine would fail its run.
            "autoUpgradeProfile": {"upgradeChannel": "none", "nodeOSUpgradeChannel": "None"},
        }
        if options.kubernetes_version:
            properties["kubernetesVersion"] = options.kubernetes_version
        if options.aad:
            properties["aadProfile"] = {"managed": True, "adminGroupObjectIDs": [options.aad]}
            properties["disableLocalAccounts"] = True
        if options.allow_from:
            properties["apiServerAccessProfile"] = {"authorizedIPRanges": list(options.allow_from)}
        return {
            "location": self.azure.location,
            "tags": tags,
            "sku": {"name": "Base", "tier": options.tier.capitalize()},
            "identity": self._identity(),
            "properties": properties,
        }


class Placement(AzureResource):
    """The proximity placement group of the workers: machines in one data center."""

    kind = "proximity placement group"
    create_seconds = delete_seconds = 300.0

    def __init__(self, group: ResourceGroup) -> None:
        path = f"{group.path}/providers/Microsoft.Compute/proximityPlacementGroups/{WORKER_POOL}"
        super().__init__(group.azure, f"{group.name}/{WORKER_POOL}", path)
        self.group = group
        self.needs = (group,)
        self.goes_with = group

    def request(self) -> Message:
        """Region and tags."""
        return {
            "location": self.azure.location,
            "tags": ownership_tags(self.group.cluster),
            "properties": {"proximityPlacementGroupType": "Standard"},
        }


class WorkerPool(AzureResource):
    """The machines for runs, all of one size."""

    kind = "node pool"
    create_seconds = 2400.0

    def __init__(
        self, plane: ControlPlane, machine: Machine, count: int, placement: Placement | None, needs: Sequence[Resource]
    ) -> None:
        super().__init__(plane.azure, f"{plane.name}/{WORKER_POOL}", f"{plane.path}/agentPools/{WORKER_POOL}")
        self.plane = plane
        self.machine = machine
        self.count = count
        self.placement = placement
        self.needs = tuple(needs)
        self.goes_with = plane.group
        self.remove_command = (
            f"az aks nodepool delete --name {WORKER_POOL} --cluster-name {plane.name} "
            f"--resource-group {plane.group.name} --subscription {self.azure.subscription}"
        )

    def poll(self) -> Readiness:
        """Like other resources; if the pool failed, reports machines that are running and cost money."""
        try:
            return super().poll()
        except CapacityError as error:
            if here := self._describe_machines():
                raise CapacityError(f"{error.message} {here}", hint=error.hint, details=error.details) from None
            raise

    def _describe_machines(self) -> str | None:
        try:
            running = len(list_ready_workers(self.plane.access))
        except MlbenchError:  # the reason of the failure is more important
            return None
        return f"{running} of {self.count} machines are running and cost money." if running else None

    def request(self) -> Message:
        """The create request: machines, disks, GPUs with their driver, zones, labels, taints."""
        options, machine = self.plane.options, self.machine
        properties: Message = {
            "mode": "User",
            "count": self.count,
            "vmSize": machine.name,
            "osDiskSizeGB": options.disk_size,
            "nodeLabels": {ROLE_LABEL: WORKER},
            **_pool(options, ownership_tags(self.plane.cluster)),
        }
        if machine.gpus:
            properties["gpuProfile"] = {"driver": "Install"}
            properties["nodeLabels"][GPU_LABEL] = "true"  # the device plugin runs there
            properties["nodeTaints"] = [GPU_TAINT]
        if ClusterDetails.of(self.plane.cluster).expires is not None and self.count:
            properties |= shrinkable(self.count)
        if options.spot:
            properties |= {"scaleSetPriority": "Spot", "scaleSetEvictionPolicy": "Delete", "spotMaxPrice": -1}
        if zone := zone_of(self.plane.cluster):
            properties["availabilityZones"] = [zone]
        if self.placement is not None:
            properties["proximityPlacementGroupID"] = self.placement.path
        return {"properties": properties}

    def find_difference(self, found: Message) -> str | None:
        """VM size and priority, if they are not those requested."""
        has, spot = found["properties"], bool(self.plane.options.spot)
        return describe_differences(
            {
                "VM size": (str(has.get("vmSize")).lower(), self.machine.name.lower()),
                "spot": (has.get("scaleSetPriority") == "Spot", spot),
            }
        )


def _not_everywhere(message: str) -> TransientError:
    """The error for something that exists, which Azure does not show: it copies what it knows from region to region,
    and may answer from another one than that which it was made in (terraform-provider-azurerm 18268, 25758)."""
    return TransientError(message, hint=AGAIN)


def shrinkable(most: int) -> Message:
    """Limits of a pool that the autoscaler may shrink to nothing."""
    return {"enableAutoScaling": True, "minCount": 0, "maxCount": max(1, most)}


def state_of(found: Message) -> str:
    """The provisioning state in a document."""
    return str((found.get("properties") or {}).get("provisioningState") or "Succeeded")


def zone_of(cluster: Cluster) -> str | None:
    """The number of the workers' zone; None if Azure chooses."""
    location = ClusterDetails.of(cluster).location or ""
    region, _, zone = location.rpartition("-")
    return zone if region and zone.isdecimal() else None


def azure_of(cluster: Cluster, subscription: str | None, region: str) -> Azure:
    """Subscription and region of a cluster."""
    return Azure(cluster.account or subscription or api.subscription_of(None), cluster.location or region)


def _pool(options: AksOptions, tags: dict[str, str]) -> Message:
    """The common properties of all pools."""
    pool: Message = {
        "type": "VirtualMachineScaleSets",
        "osType": "Linux",
        "osDiskType": "Managed",
        "enableUltraSSD": False,
        "tags": tags,
    }
    return {**pool, "vnetSubnetID": options.subnet} if options.subnet else pool


# --- the cluster's own ranges of addresses ----------------------------------------------------------------------------

# Those of Services and pods must not overlap with the network of the machines: AKS' own choice for Services is the
# range of many networks, too (ServiceCidrOverlapExistingSubnetsCidr: Azure/AKS 1117, 3551). A machine takes a /24
# for its pods, so AKS' own choice for pods, a /16, ends at 256. AKS makes networks in 10.224.0.0/12, and allows neither
# 172.30.0.0/16 nor 172.31.0.0/16. Sources: AKS' pages on network plugins and on overlay networks.
SERVICE_RANGES = ("10.0.0.0/16", "172.16.0.0/16", "100.64.0.0/16")
POD_RANGES = ("10.244.0.0/14", "172.24.0.0/14", "100.68.0.0/14")


def read_network(azure: Azure, subnet: str) -> list[IPv4Network]:
    """The ranges of a subnet's network; none without the right to read it. Raises UsageError if it does not exist."""
    try:
        found = azure.get(subnet.partition("/subnets/")[0], "show the network of --subnet")
    except RightsError:
        return []
    except NotFoundError as error:
        raise UsageError(error.message, hint="az network vnet list --query [].id   lists those there are") from None
    space = (found.get("properties") or {}).get("addressSpace") or {}
    return [IPv4Network(text) for text in space.get("addressPrefixes") or () if ":" not in text]


def choose_ranges(taken: Sequence[IPv4Network]) -> Message:
    """The ranges of Services and pods, and the address of the cluster's DNS, beside the machines' network."""
    services, pods = (
        next((item for item in map(IPv4Network, texts) if not any(map(item.overlaps, taken))), IPv4Network(texts[0]))
        for texts in (SERVICE_RANGES, POD_RANGES)
    )
    return {"serviceCidr": str(services), "dnsServiceIP": str(services[10]), "podCidr": str(pods)}


# --- managed identities and their built-in roles --------------------------------------------------------------------


def make_identity(group: ResourceGroup, path: str, what: str) -> str:
    """Create the identity `path` in the cluster's group; returns its principal ID."""
    body: Message = {"location": group.azure.location, "tags": ownership_tags(group.cluster)}
    made, _ = group.azure.send("PUT", path, what, body)
    return str(made["properties"]["principalId"])


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


# --- permission to use an existing subnet -----------------------------------------------------------------------------

# AKS creates network cards and load balancers in the subnet (`--subnet`) with the cluster's identity. An identity that
# AKS creates with the cluster would have no role there, and creation would fail, so the identity is created first.
# Sources: docs/development/clouds-assumptions.md.

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


# --- the end of a cluster ---------------------------------------------------------------------------------------------

# Waits for a signal. AKS' machines already have it for their own pods.
PAUSE = "mcr.microsoft.com/oss/kubernetes/pause:3.6"


class AksHold(WorkerHold):
    """The hold on the workers of a node pool."""

    image = PAUSE

    def __init__(self, pool: WorkerPool, needs: Sequence[Resource] = ()) -> None:
        plane = pool.plane
        super().__init__(plane.cluster, plane.access, pool.count, needs, plane.group)
        self.pool = pool

    def let_shrink(self) -> None:
        """Enable autoscaling of the pool. A PUT resets omitted properties to their defaults. One that has failed is
        created again, with autoscaling."""
        found = self.pool.find_raw()
        if found is None or state_of(found) in FAILED:
            return
        properties = found["properties"]
        body = {"properties": {**properties, **shrinkable(max(self.pool.count, int(properties["count"])))}}
        what = f"let the {self.pool.kind} {self.pool.name} shrink"
        self.pool.operation = self.pool.azure.change("PUT", self.pool.path, what, body)

    def may_shrink(self) -> bool:
        found = self.pool.find_raw()
        return found is None or bool(found["properties"].get("enableAutoScaling"))

    def poll_shrinking(self) -> Readiness:
        if self.pool.operation is None:
            return Readiness(True)
        return self.pool.poll_operation("scaled down automatically")


class EndTags(EndMark):
    """The expiry in the tags of the cluster's group."""

    kind = "expiry tag"

    def __init__(self, group: ResourceGroup) -> None:
        super().__init__(group.cluster, group)
        self.group = group

    def read(self) -> Mapping[str, str]:
        found = self.group.find_raw()
        if found is None:
            raise NotFoundError(f'There is no resource group "{self.group.name}".')
        return dict(found.get("tags") or {})

    def write(self, tags: Mapping[str, str]) -> None:
        body = {"tags": {**self.read(), **tags}}
        self.group.azure.change("PATCH", self.group.path, f"tag the group {self.group.name}", body)


# --- the image registry of --registry auto ----------------------------------------------------------------------------

# It is in its own resource group, so that it can outlive the cluster (--keep-images). It is deleted before the
# cluster's group, by which the cluster is found. Sources: Azure Container Registry's REST reference and its page on
# authentication, as of 2026-11. MLBENCH_ACR_ENDPOINT sets the address of the registry's sign-in, for tests and proxies.

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
    holds_images = True

    def __init__(self, group: ResourceGroup) -> None:
        super().__init__(group.cluster, group.azure)
        self.name = f"{group.name}{IMAGES_SUFFIX}"
        self.path = group.azure.group(self.name)
        self.needs = (group,)
        self.remove_command = f"az group delete --name {self.name} --subscription {self.azure.subscription}"

    def keep(self) -> None:
        """Mark it, so that gc keeps it after its cluster is deleted."""
        found = self.find_raw() or {}
        tags = {**(found.get("tags") or {}), KEPT_TAG: "true"}
        self.azure.change("PATCH", self.path, f"mark the group {self.name}", {"tags": tags})


class ImageRegistry(AzureResource):
    """The registry, and the permission of the cluster's machines to pull from it."""

    kind = "image registry"
    create_seconds = delete_seconds = 600.0
    holds_images = True

    def __init__(self, group: ImageGroup, plane: ControlPlane) -> None:
        azure = group.azure
        name = registry_name(azure.subscription, azure.location, plane.name)
        super().__init__(azure, name, f"{group.path}/providers/Microsoft.ContainerRegistry/registries/{name}")
        self.plane = plane
        self.needs = (group, plane)
        self.goes_with = group
        self.remove_command = f"az acr delete --name {name} --subscription {azure.subscription}"

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
    host = registry.partition("/")[0]
    url = f"{os.environ.get('MLBENCH_ACR_ENDPOINT', f'https://{host}')}/oauth2/exchange"
    form = {"grant_type": "access_token", "service": host, "access_token": api.get_token()}
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    request = api.new_request("POST", url, content=urlencode(form), headers=headers)
    answer = api.send_unsigned(request, f"The registry {host}")
    if answer.status_code in (401, 403):
        raise CredentialError(f"The registry {host} rejected the credentials: {answer.text()[:300]}")
    if answer.status_code >= 400:
        raise MlbenchError(f"The registry {host} answered with status {answer.status_code}: {answer.text()[:300]}")
    return USER, str(answer.json()["refresh_token"])
