"""What AKS refuses: names, pools, quotas, sizes, spot. In the words of public reports."""

import re
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.azure_facts import FAMILIES, PATCHES, REGIONS, SIZES, Message

GROUP = re.compile(r"[-\w._()]{0,89}[-\w_()]")
CLUSTER = re.compile(r"[a-zA-Z0-9]$|[a-zA-Z0-9][-_a-zA-Z0-9]{0,61}[a-zA-Z0-9]")
DNS_PREFIX = re.compile(r"[a-zA-Z0-9]([-a-zA-Z0-9]{0,52}[a-zA-Z0-9])?")
POOL = re.compile(r"[a-z][a-z0-9]{0,11}")
TAG = re.compile(r"[^<>%&\\?/]{1,512}")
MAX_TAGS, MAX_TAG_VALUE = 50, 256
SPOT_TAINT = "kubernetes.azure.com/scalesetpriority=spot:NoSchedule"


class ApiError(Exception):
    """A refusal. `flat`: AKS answers without the "error" around it, unlike the other services."""

    def __init__(self, status: int, code: str, message: str, *, flat: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.flat = status, code, flat

    @property
    def document(self) -> Message:
        error: Message = {"code": self.code, "message": str(self)}
        return {**error, "details": None, "subcode": ""} if self.flat else {"error": error}


@dataclass
class PoolRules:
    """The account's limits, and the checks of what is asked for."""

    limits: dict[str, int] = field(default_factory=lambda: {name.lower(): 1000 for name in FAMILIES})
    cores: int = 2000
    spot_cores: int = 1000
    taken: dict[str, int] = field(default_factory=dict)  # of quotas by others, which the usages show
    hidden: dict[str, int] = field(default_factory=dict)  # taken since the usages were read
    refused_sizes: set[str] = field(default_factory=set)  # NotAvailableForSubscription
    refused_zones: dict[str, list[str]] = field(default_factory=dict)

    def count_used(self) -> dict[str, int]:
        """vCPUs in use by quota, of this double's own pools."""
        raise NotImplementedError

    def list_usages(self) -> list[Message]:
        used = self.count_used()
        limits = {**self.limits, "cores": self.cores, "lowprioritycores": self.spot_cores, "virtualmachines": 25000}
        names = {name.lower(): name for name in (*FAMILIES, "cores", "lowPriorityCores", "virtualMachines")}
        return [
            {
                "unit": "Count",
                "currentValue": used.get(name, 0) + self.taken.get(name, 0),
                "limit": limit,
                "name": {"value": names.get(name, name), "localizedValue": names.get(name, name)},
            }
            for name, limit in limits.items()
        ]

    def check_group(self, name: str, body: Message) -> None:
        if not GROUP.fullmatch(name):
            raise ApiError(400, "InvalidResourceGroup", f"The provided resource group name '{name}' is invalid.")
        self.check_place(body)

    def check_place(self, body: Message) -> None:
        if body.get("location") not in REGIONS:
            words = f"The provided location '{body.get('location')}' is not available for resource group."
            raise ApiError(400, "LocationNotAvailableForResourceType", words)
        tags = body.get("tags") or {}
        if len(tags) > MAX_TAGS or not all(
            TAG.fullmatch(key) and isinstance(value, str) and len(value) <= MAX_TAG_VALUE for key, value in tags.items()
        ):
            raise ApiError(400, "InvalidTag", "The tag names or values are invalid.")

    def check_cluster(self, name: str, body: Message) -> None:
        properties = body["properties"]
        if not CLUSTER.fullmatch(name):
            raise _refuse("InvalidParameter", f"The value of parameter resourceName is invalid: {name}.")
        if not DNS_PREFIX.fullmatch(properties.get("dnsPrefix", "")):
            raise _refuse("InvalidParameter", "The value of parameter dnsPrefix is invalid.")
        if len(properties.get("nodeResourceGroup", "")) > 80:
            raise _refuse("InvalidParameter", "nodeResourceGroup can be at most 80 characters.")
        version = properties.get("kubernetesVersion")
        if version and version not in PATCHES and not any(version in patches for patches in PATCHES.values()):
            words = f"Version {version} is not supported in this region. Please use [az aks get-versions]."
            raise _refuse("K8sVersionNotSupported", words)
        pools = properties.get("agentPoolProfiles") or []
        if not any(pool.get("mode") == "System" for pool in pools):
            raise _refuse("InvalidParameter", "Must have at least one system agent pool.")
        if properties.get("networkProfile", {}).get("networkDataplane") == "cilium" and (
            properties["networkProfile"].get("networkPluginMode") != "overlay"
        ):
            raise _refuse("InvalidParameter", "Cilium dataplane requires overlay or a pod subnet.")
        for pool in pools:
            self.check_pool(pool["name"], pool, body["location"])

    def check_pool(self, name: str, pool: Message, region: str) -> None:
        if not POOL.fullmatch(name):
            words = "Agent pool names must be lower case letters and digits, at most 12, and begin with a letter."
            raise _refuse("InvalidParameter", words)
        self._check_machines(pool, region)
        if pool.get("scaleSetPriority") == "Spot":
            self._check_spot(pool)
        elif "scaleSetEvictionPolicy" in pool or "spotMaxPrice" in pool:
            raise _refuse("InvalidParameter", "scaleSetEvictionPolicy is only for pools of priority Spot.")
        least = 1 if pool.get("mode") == "System" else 0
        if not least <= pool.get("count", 0) <= 1000:
            raise _refuse("InvalidParameter", f"The value of parameter count is invalid: from {least} to 1000.")
        if any(label.split("/")[0].endswith("kubernetes.azure.com") for label in pool.get("nodeLabels") or {}):
            raise _refuse("InvalidParameter", "Labels with the prefix kubernetes.azure.com are reserved.")
        if not 30 <= pool.get("osDiskSizeGB", 128) <= 2048:
            raise _refuse("InvalidParameter", "osDiskSizeGB is from 30 to 2048.")
        zones = pool.get("availabilityZones") or []
        if any(zone not in ("1", "2", "3") for zone in zones):
            raise _refuse("AvailabilityZoneNotSupported", f"The zone(s) {zones} are not supported in {region}.")

    def _check_machines(self, pool: Message, region: str) -> None:
        size = next((item for item in SIZES if item.lower() == str(pool.get("vmSize")).lower()), None)
        if size is None or size in self.refused_sizes:
            words = f"The VM size of {pool.get('vmSize')} is not allowed in your subscription in location '{region}'."
            raise _refuse("BadRequest", words)
        _, vcpus, gpus, _ = SIZES[size]
        if pool.get("mode") == "System" and vcpus < 2:  # it also refuses less than 4 GB; burstable sizes are accepted
            raise _refuse(
                "SystemPoolSkuTooLow", "System node pool must use VM sku with more than 2 cores and 4GB memory."
            )
        if pool.get("gpuProfile") and not gpus:
            raise _refuse("InvalidParameter", "gpuProfile is only for VM sizes with GPUs.")

    def _check_spot(self, pool: Message) -> None:
        if pool.get("mode") == "System":
            words = "Spot agent pool can not be a System pool."
            raise _refuse("SpotPoolCannotBeSystem", words)
        if pool.get("scaleSetEvictionPolicy") not in ("Delete", "Deallocate"):
            raise _refuse("InvalidParameter", "scaleSetEvictionPolicy is none of Delete, Deallocate.")
        price = pool.get("spotMaxPrice", -1)
        if price != -1 and price <= 0:
            raise _refuse("InvalidParameter", "spotMaxPrice is -1 or more than 0.")

    def check_quota(self, pool: Message, region: str, before: int = 0) -> None:
        """AKS counts before it asks for machines; `before` machines of the pool exist already."""
        size = next(item for item in SIZES if item.lower() == str(pool["vmSize"]).lower())
        family, vcpus, _, _ = SIZES[size]
        needed = max(0, pool["count"] - before) * vcpus
        used = self.count_used()
        limits = {**self.limits, "cores": self.cores, "lowprioritycores": self.spot_cores}
        names = ["lowPriorityCores"] if pool.get("scaleSetPriority") == "Spot" else [family, "cores"]
        for name in names:
            key = name.lower()
            left = limits.get(key, 0) - used.get(key, 0) - self.taken.get(key, 0) - self.hidden.get(key, 0)
            if needed > left:
                words = (
                    f"Insufficient vcpu quota requested {needed}, remaining {left} for family {name} for region "
                    f"{region}. Surge nodes would also consume vcpu quota."
                )
                raise _refuse("ErrCode_InsufficientVCPUQuota", words)


def _refuse(code: str, message: str) -> ApiError:
    return ApiError(400, code, message, flat=True)


def quota_names(pool: Message) -> tuple[list[str], int]:
    """The quotas that a pool's machines count against, in lower case, and how many vCPUs they take."""
    found: Any = next((value for size, value in SIZES.items() if size.lower() == str(pool["vmSize"]).lower()), None)
    family, vcpus, _, _ = found
    names = ["lowprioritycores"] if pool.get("scaleSetPriority") == "Spot" else [family.lower(), "cores"]
    return names, vcpus * int(pool.get("count") or 0)
