"""What the Azure double knows of regions, VM sizes, quotas and prices. Sources: docs/development."""

from tests.fakes.kube_pods import Object

Message = Object

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
TENANT = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
REGION, OTHER_REGION = "eastus", "westeurope"
REGIONS = (REGION, OTHER_REGION, "eastus2")
PATCHES = {"1.36": ("1.36.2", "1.36.1"), "1.35": ("1.35.5",)}
# Size: family (name of its quota), vCPUs, GPUs, whether it is sold as spot. Spelling of families: Microsoft's page on
# quotas; capitals differ between services, so that names are compared without them.
SIZES: dict[str, tuple[str, int, int, bool]] = {
    "Standard_D2s_v5": ("standardDSv5Family", 2, 0, True),
    "Standard_D4s_v5": ("standardDSv5Family", 4, 0, True),
    "Standard_D8s_v5": ("standardDSv5Family", 8, 0, True),
    "Standard_D4as_v5": ("standardDASv5Family", 4, 0, True),
    "Standard_B2s": ("standardBSFamily", 2, 0, False),
    "Standard_D1_v2": ("standardDv2Family", 1, 0, True),
    "Standard_NC4as_T4_v3": ("Standard NCASv3_T4 Family", 4, 1, True),
    "Standard_NC8as_T4_v3": ("Standard NCASv3_T4 Family", 8, 1, True),
    "Standard_NC16as_T4_v3": ("Standard NCASv3_T4 Family", 16, 1, True),
    "Standard_NC64as_T4_v3": ("Standard NCASv3_T4 Family", 64, 4, True),
    "Standard_NV36ads_A10_v5": ("StandardNVADSA10v5Family", 36, 1, True),
    "Standard_NV72ads_A10_v5": ("StandardNVADSA10v5Family", 72, 2, True),
    "Standard_NC24ads_A100_v4": ("StandardNCADSA100v4Family", 24, 1, True),
    "Standard_NC48ads_A100_v4": ("StandardNCADSA100v4Family", 48, 2, True),
    "Standard_NC96ads_A100_v4": ("StandardNCADSA100v4Family", 96, 4, True),
    "Standard_ND96asr_v4": ("Standard NDASv4_A100 Family", 96, 8, True),
    "Standard_ND96amsr_A100_v4": ("Standard NDAMSv4_A100Family", 96, 8, True),
    "Standard_NC40ads_H100_v5": ("StandardNCadsH100v5Family", 40, 1, True),
    "Standard_NC80adis_H100_v5": ("StandardNCadsH100v5Family", 80, 2, True),
    "Standard_ND96isr_H100_v5": ("standardNDSH100v5Family", 96, 8, True),
    "Standard_ND96isr_H200_v5": ("standardNDISRH200V5Family", 96, 8, True),
    "Standard_NC144lds_xl_RTXPRO6000BSE_v6": ("StandardNCRTXPRO6000BSEv6Family", 144, 1, True),
    "Standard_NC288ds_xl_RTXPRO6000BSE_v6": ("StandardNCRTXPRO6000BSEv6Family", 288, 2, True),
    "Standard_ND128isr_NDR_GB200_v6": ("StandardNDGB200v6Family", 128, 4, False),
    "Standard_ND128isr_GB300_v6": ("StandardNDGB300v6Family", 128, 4, False),
}
ARM = ("GB200", "GB300")
FAMILIES = tuple(dict.fromkeys(family for family, *_ in SIZES.values()))
# Accepted versions of each service's API; another is refused.
API_VERSIONS = {
    "": "2022-12-01",
    "resourcegroups": "2021-04-01",
    "microsoft.containerservice": "2025-10-01",
    "microsoft.compute": "2024-07-01",
    "microsoft.compute/skus": "2021-07-01",
    "microsoft.managedidentity": "2023-01-31",
    "microsoft.network": "2024-05-01",
    "microsoft.authorization": "2022-04-01",
    "microsoft.containerregistry": "2023-07-01",
}
# Errors of operations: code and message, in the words of public reports.
OPERATION_ERRORS = {
    "stockout": (
        "AllocationFailed",
        "Allocation failed. We do not have sufficient capacity for the requested VM size in this region. Read more "
        "about improving likelihood of allocation success at http://aka.ms/allocation-guidance",
    ),
    "zone": (
        "ZonalAllocationFailed",
        "Allocation failed. We do not have sufficient capacity for the requested VM size in this zone.",
    ),
    "placement": (
        "OverconstrainedAllocationRequest",
        "Allocation failed. VM(s) with the following constraints cannot be allocated, because the condition is too "
        "restrictive. Constraints applied are: Proximity Placement Group.",
    ),
    "quota": (
        "QuotaExceeded",
        "Operation could not be completed as it results in exceeding approved standardNCASv3_T4Family Cores quota. "
        "Additional details - Deployment Model: Resource Manager, Location: eastus, Current Limit: 8, Current Usage: "
        "8, Additional Required: 8, (Minimum) New Limit Required: 16.",
    ),
    # Source: Azure-Terraform/terraform-azurerm-kubernetes 26.
    "policy": (
        "PreconditionFailed",
        "Provisioning of resource(s) for container service x in resource group y failed. Message: The template "
        r"deployment failed with multiple errors. Details: [{\"code\":\"RequestDisallowedByPolicy\",\"message\":\""
        r"Resource 'aks-vnet-13849498' was disallowed by policy. Policy identifiers: '[{\\\"policyAssignment\\\":"
        r"{\\\"name\\\":\\\"Sandbox Restrictions - No Public Interfaces\\\",\\\"id\\\":\\\"/subscriptions/s/providers/"
        r"Microsoft.Authorization/policyAssignments/custom-sandbox-policy\\\"}}]'\"}]",
    ),
    # Source: bicep-registry-modules 1607.
    "blocked": (
        "ResourceGroupDeletionBlocked",
        "Deletion of resource group 'g' failed as resources with identifiers 'Microsoft.Network/publicIPAddresses/p' "
        "could not be deleted. The provisioning state of the resource group will be rolled back.",
    ),
    # Source: dotnet/core 3776.
    "unregistered": (
        "ReconcileStandardLoadBalancerError",
        'Reconcile standard load balancer failed. Details: standardLoadBalancerReconciler retry failed: Code="'
        'MissingSubscriptionRegistration" Message="The subscription is not registered to use namespace '
        "'Microsoft.Network'. See https://aka.ms/rps-not-found for how to register subscriptions.\"",
    ),
    "internal": ("InternalOperationError", "Internal server error"),
}


def sku(name: str, refused: bool, refused_zones: list[str], region: str) -> Message:
    """One VM size as Microsoft.Compute/skus lists it."""
    family, vcpus, gpus, spot = SIZES[name]
    restrictions = []
    info: Message = {"locations": [region]}
    if refused:
        values: Message = {"type": "Location", "values": [region], "restrictionInfo": info}
        restrictions.append({**values, "reasonCode": "NotAvailableForSubscription"})
    if refused_zones:
        values = {"type": "Zone", "values": [region], "restrictionInfo": {**info, "zones": refused_zones}}
        restrictions.append({**values, "reasonCode": "NotAvailableForSubscription"})
    architecture = "Arm64" if any(word in name for word in ARM) else "x64"
    capabilities = {
        "CpuArchitectureType": architecture,
        "vCPUs": vcpus,
        "LowPriorityCapable": spot,
        **({"GPUs": gpus} if gpus else {}),
    }
    return {
        "resourceType": "virtualMachines",
        "name": name,
        "family": family,
        "locations": [region],
        "locationInfo": [{"location": region, "zones": ["2", "1", "3"]}],
        "capabilities": [{"name": key, "value": str(value)} for key, value in capabilities.items()],
        "restrictions": restrictions,
    }


def price(size: str, amount: float, way: str = "", product: str = "", kind: str = "Consumption") -> Message:
    """One item of the retail price list, as prices.azure.com answers it."""
    words = size.removeprefix("Standard_").replace("_", " ")
    return {
        "currencyCode": "USD",
        "tierMinimumUnits": 0.0,
        "retailPrice": amount,
        "unitPrice": amount,
        "armRegionName": REGION,
        "location": "US East",
        "effectiveStartDate": "2026-06-01T00:00:00Z",
        "meterName": f"{words}{way}",
        "productName": product or "Virtual Machines NCasT4 v3 Series",
        "skuName": f"{words}{way}",
        "serviceName": "Virtual Machines",
        "serviceFamily": "Compute",
        "unitOfMeasure": "1 Hour",
        "type": kind,
        "isPrimaryMeterRegion": True,
        "armSkuName": size,
    }


PRICES = [
    price("Standard_D4s_v5", 0.192, product="Virtual Machines Dsv5 Series"),
    price("Standard_D4s_v5", 0.376, product="Virtual Machines Dsv5 Series Windows"),
    price("Standard_D4s_v5", 0.245, product="Dsv5 Series Cloud Services"),
    price("Standard_D4s_v5", 0.0384, " Spot", "Virtual Machines Dsv5 Series"),
    price("Standard_D4s_v5", 0.0192, " Low Priority", "Virtual Machines Dsv5 Series"),
    price("Standard_NC4as_T4_v3", 0.526),
    price("Standard_NC4as_T4_v3", 0.21, kind="DevTestConsumption"),
    price("Standard_NC4as_T4_v3", 0.1052, " Spot"),
    price("Standard_ND96isr_H100_v5", 98.32, product="Virtual Machines NDsr H100 v5 Series"),
    price("Standard_ND96isr_H100_v5", 19.66, " Spot", "Virtual Machines NDsr H100 v5 Series"),
]
