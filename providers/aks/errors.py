"""Maps Azure's errors to mlbench's, with hints for each code.

Sources: Azure's page on common deployment errors, karpenter-provider-azure `offerings`, issues of AKS, azure-cli and
cilium that quote the answers; docs/clouds-assumptions.md.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.tls import explain_connection_failure
from providers.base import BusyError, Cause, TransientError, error_from_causes

# A JSON document of Azure.
Message = dict[str, Any]

LOGIN = "az login, or set AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET of a service principal"
UNREACHED = "Check the network (mlbench doctor aks), then repeat the command to resume."
QUOTAS = "https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade/~/myQuotas"
AGAIN = "Repeat the create-cluster command: it removes the failed resource and tries again."
STOCK_OUT = frozenset(
    {
        "skunotavailable",
        "allocationfailed",
        "zonalallocationfailed",
        "overconstrainedallocationrequest",
        "overconstrainedzonalallocationrequest",
    }
)
QUOTA = frozenset({"quotaexceeded", "errcode_insufficientvcpuquota", "insufficientvcpuquota", "insufficientquota"})
QUOTA_WORDS = ("exceeding approved", "Insufficient vcpu quota", "exceeding quota")
# Something else must end first. A cluster allows one operation at a time; a group in deletion none.
BUSY_WORDS = ("in progress", "is being deleted", "deprovisioning state")
# PrincipalNotFound: a new identity is not yet visible everywhere in Entra.
BUSY = frozenset({"resourcegroupbeingdeleted", "etagmismatch", "conflictingserveroperation", "principalnotfound"})
NO_SUBSCRIPTION = frozenset({"subscriptionnotfound", "invalidsubscriptionid", "missingsubscription"})
# The code may be in the message: AKS wraps it in PreconditionFailed or ReconcileResourceGroupError, also with 400, and
# operations fail with it later (Azure/AKS 211 and 4308, dotnet/core 3612, MicrosoftDocs/azure-docs 99846).
POLICY = re.compile(r"RequestDisallowedByPolicy|was disallowed by policy", re.IGNORECASE)
ASSIGNMENT = re.compile(r'policyAssignment\W+name\W+([^"\\]+)|policyAssignments/([^"\\]+)')
# Other errors recognized by their message: the error class, and what to do next.
CAUSES: tuple[Cause, ...] = (
    (
        re.compile(r"ScopeLocked|scope\(s\) are locked|cannot (?:perform|be) .*lock"),
        UsageError,
        "A lock forbids it: az lock list -o table   shows it; its owner removes it with az lock delete --ids ID, then "
        "repeat the command.",
    ),
    (
        re.compile(r"K8sVersionNotSupported"),
        UsageError,
        "Choose a version that Azure offers there: az aks get-versions --location REGION -o table; "
        "--kubernetes-version VERSION",
    ),
    (
        re.compile(r"AvailabilityZoneNotSupported"),
        UsageError,
        "The machines are not in that zone: leave out --zones, or az vm list-skus --location REGION --size TYPE --zone",
    ),
    (
        re.compile(r"VMSizeNotSupported|SkuNotAvailable.*not available for subscription"),
        UsageError,
        "The subscription may not use these machines there: az vm list-skus --location REGION --size TYPE -o table; "
        "choose another --machine-type or --region",
    ),
    (
        re.compile(r"RequestDisallowedByAzure|best available regions"),
        UsageError,
        "Use a --region that Azure allows for the subscription; trial and student subscriptions have few: "
        "az policy assignment list "
        "--query \"[?name=='sys.regionrestriction'].parameters\"   lists them",
    ),
    (
        re.compile(r"VM size of .* is not allowed in your subscription|SkuNotAvailableForSubscription"),
        CapacityError,
        "AKS does not offer this size to the subscription there: use another --region or --machine-type, or open a "
        "support request (https://aka.ms/aks/quotas-skus-regions)",
    ),
    (
        re.compile(r"InsufficientSubnetSize|SubnetIsFull|enough capacity for \d+ IP addresses"),
        CapacityError,
        "The subnet has too few free addresses: use a larger one (--subnet ID), or fewer workers.",
    ),
    (
        re.compile(r"outbound connection from agents|VMExtensionProvisioningError|VMExtensionError|vmssCSE"),
        MlbenchError,
        "The machines started, but could not reach what they need: the firewall, routes and security group of "
        f"--subnet must allow the traffic listed at https://aka.ms/aks-required-ports-and-addresses. {AGAIN}",
    ),
)
NOT_REGISTERED = "missingsubscriptionregistration"
DISABLED = frozenset({"readonlydisabledsubscription", "subscriptionnotactive", "disallowedprovider"})
PLACE = frozenset({"locationnotavailableforresourcetype", "noregisteredproviderfound", "invalidlocation"})


def error_from_answer(what: str, status: int, document: object, subscription: str) -> MlbenchError:
    """The error for an error response. `status` is the HTTP status, or 0 for an operation that failed later."""
    found = list(_walk(document))
    codes = {code.lower() for code, _ in found}
    words = _join(found) or f"status {status}"
    message = f'Azure refused to {what}: "{words}"' if status else f'{what}: "{words}"'
    if POLICY.search(words):
        # The hint names the policy's assignment, and the option that avoids what it forbids, if there is one.
        match = ASSIGNMENT.search(words)
        name = f'the policy assignment "{match[1] or match[2]}"' if match else "a policy of the organization"
        ask = f"ask the subscription's administrator for an exemption from {name}: az policy assignment list -o table"
        if re.search(r"local accounts", words, re.IGNORECASE):
            return UsageError(message, hint=f"disable local accounts with --aad GROUP (an Entra group), or {ask}")
        if re.search(r"\btags?\b", words, re.IGNORECASE):
            return UsageError(message, hint=f"add the required tag with --tag NAME=VALUE, or {ask}")
        if re.search(r"location|region", words, re.IGNORECASE):
            return UsageError(message, hint=f"use an allowed --region, or {ask}")
        if re.search(
            r"virtual ?network|vnet|subnet|nsg|route ?table|public ?ip|network interface", words, re.IGNORECASE
        ):
            return UsageError(message, hint=f"use a network that complies (--subnet ID), or {ask}")
        return UsageError(message, hint=ask[0].upper() + ask[1:])
    if known := error_from_causes(CAUSES, message, words):
        return known
    if capacity := capacity_error(message, codes):
        return capacity
    if codes & BUSY or (status in (0, 409) and any(word in words for word in BUSY_WORDS)):
        return BusyError(message)
    if status == 429 or status >= 500:
        return TransientError(message, hint=explain_connection_failure(words))
    return _lasting_error(message, words, codes, status, subscription)


def _lasting_error(message: str, words: str, codes: set[str], status: int, subscription: str) -> MlbenchError:
    if codes & NO_SUBSCRIPTION or (status == 404 and "ubscription" in words and "resource" not in words.lower()):
        return UsageError(message, hint="az account list -o table   shows yours; --subscription ID chooses one")
    if NOT_REGISTERED in codes:
        return UsageError(message, hint=register_command(words, subscription))
    if codes & DISABLED:
        return UsageError(message, hint="az account list -o table   shows the state of your subscriptions")
    if "linkedauthorizationfailed" in codes:
        return CredentialError(
            message,
            hint="Give the identity of the cluster Network Contributor on the subnet, and yourself Managed Identity "
            "Operator on an --identity: az role assignment create --assignee PRINCIPAL --role ROLE --scope ID",
        )
    if codes & PLACE:
        return UsageError(message, hint="az account list-locations -o table; --region REGION")
    if status == 404:
        return NotFoundError(message)
    if status == 401:
        return CredentialError(message, hint=LOGIN)
    if status == 403:
        return CredentialError(message, hint=rights_hint(subscription))
    if status in (400, 409):
        return UsageError(message)
    return MlbenchError(message, hint=AGAIN if status == 0 else None)


def capacity_error(message: str, codes: set[str]) -> CapacityError | None:
    """The error for exceeded quotas, which can be raised, or stock-outs, which cannot; None for other errors."""
    if codes & QUOTA or any(phrase in message for phrase in QUOTA_WORDS):
        return CapacityError(
            message,
            hint=f"Request more at {QUOTAS}, or use fewer or other machines, or another --region.",
            details={"reason": "quota"},
        )
    if codes & STOCK_OUT or any(code in message.lower() for code in STOCK_OUT):
        return CapacityError(
            message,
            hint="Azure has no capacity there: repeat with --zones 1,2,3, without --compact-placement, in another "
            "--region, or later.",
            details={"reason": "stock_out"},
        )
    return None


def register_command(words: str, subscription: str) -> str:
    """The command that registers the provider named in an error."""
    start = words.find("Microsoft.")
    name = words[start:].split("'")[0].split()[0].rstrip(".") if start >= 0 else "Microsoft.ContainerService"
    return f"az provider register --namespace {name.partition('/')[0]} --wait --subscription {subscription}"


def rights_hint(subscription: str) -> str:
    """The hint about the required role."""
    return (
        f"You need the role Contributor on the subscription {subscription}: mlbench doctor aks   prints a narrower one"
    )


def _walk(document: object) -> Iterator[tuple[str, str]]:
    """Codes and messages of an error and its details, in the form {"error": {...}} of ARM, or the bare error of AKS."""
    if not isinstance(document, Mapping):
        return
    error = document.get("error", document)
    if not isinstance(error, Mapping):
        return
    code, message = str(error.get("code") or ""), str(error.get("message") or "")
    if code or message:
        yield code, message
    for item in error.get("details") or ():
        yield from _walk(item)


def _join(found: list[tuple[str, str]]) -> str:
    texts = [f"{code}: {message}" if code and message else code or message for code, message in found]
    return " ".join("; ".join(dict.fromkeys(texts)).split())[:1500]
