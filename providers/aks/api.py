"""Calls of Azure Resource Manager (ARM) by its REST API: one client per process, with errors mapped to mlbench's.

One client serves all services: groups, clusters, quotas, identities, registries. It needs only azure-core and azure-
identity. MLBENCH_AZURE_ENDPOINT sets the API's address, for tests and proxies; AZURE_AUTHORITY_HOST sets the sign-in,
as for all Azure libraries."""

import base64
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Credential, CredentialSource
from mlbench_cli.kube.tls import explain_connection_failure
from providers.base import (
    NOT_CONFIGURED,
    BusyError,
    Cause,
    NoAnswerError,
    RightsError,
    TransientError,
    call_timeout,
    error_from_causes,
)

# A JSON document of Azure.
Message = dict[str, Any]

ENDPOINT = "https://management.azure.com"
SCOPE = "https://management.azure.com/.default"
# API version per service. "": subscriptions and resource groups.
VERSIONS = {
    "": "2022-12-01",
    "resourcegroups": "2021-04-01",
    "Microsoft.ContainerService": "2025-10-01",
    "Microsoft.Compute": "2024-07-01",
    "Microsoft.Compute/skus": "2021-07-01",
    "Microsoft.ManagedIdentity": "2023-01-31",
    "Microsoft.Network": "2024-05-01",
    "Microsoft.Authorization": "2022-04-01",
    "Microsoft.ContainerRegistry": "2023-07-01",
}
SUBSCRIPTION = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
# The public clouds of azure-identity; any other authority is a private cloud, or a test.
KNOWN_AUTHORITIES = ("login.microsoftonline.com", "login.microsoftonline.us", "login.chinacloudapi.cn")
MANAGED_HINTS = ("AZURE_SUBSCRIPTION_ID", "AZURE_TOKEN_CREDENTIALS", "IDENTITY_ENDPOINT", "MSI_ENDPOINT")
MAX_RETRY_AFTER = 30.0  # seconds; ARM asks for 10 to 30


@dataclass
class Operation:
    """An asynchronous operation: its URL, and when to poll next."""

    url: str
    next_time: float = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the requested waiting time has passed."""
        return time.monotonic() >= self.next_time


class Azure:
    """One subscription, in one region."""

    def __init__(self, subscription: str, location: str) -> None:
        self.subscription = subscription
        self.location = location
        self.root = f"/subscriptions/{subscription}"
        self.date: str | None = None  # the time in the last response, and when it arrived
        self.asked = 0.0
        self._status = 0  # of the last answer

    def group(self, name: str) -> str:
        """The path of a resource group."""
        return f"{self.root}/resourcegroups/{name}"

    def get(self, path: str, what: str) -> Message:
        """The response for a path. Raises NotFoundError, and mapped errors."""
        return self.send("GET", path, what)[0]

    def list_all(self, path: str, what: str) -> list[Message]:
        """All items of a list, from all pages."""
        found: list[Message] = []
        url: str | None = path
        while url:
            page, _ = self.send("GET", url, what)
            found += page.get("value") or []
            url = page.get("nextLink")
        return found

    def change(self, method: str, path: str, what: str, body: Message | None = None) -> Operation | None:
        """Request a change. Returns the operation to poll, or None."""
        return self.send(method, path, what, body)[1]

    def send(self, method: str, path: str, what: str, body: Message | None = None) -> tuple[Message, Operation | None]:
        """One request without retries: the life-cycle decides about retries. Raises MlbenchError."""
        request = new_request(method, _url_of(path), json=body)
        with map_cloud_errors():
            answer = client().send_request(request, **_timeouts())
        self.date, self.asked, self._status = answer.headers.get("Date"), time.time(), answer.status_code
        document = _parse(answer)
        if answer.status_code >= 400:
            raise error_from_answer(what, answer.status_code, document, self.subscription)
        return document, _operation_of(answer)

    def poll(self, operation: Operation | None, what: str) -> bool:
        """Whether an operation is done. Raises with Azure's message if it failed.

        Respects Azure's polling interval. An operation that no longer exists counts as done, because the resource has
        its own state.
        """
        if operation is None:
            return True
        if not operation.is_due:
            return False
        try:
            document, later = self.send("GET", operation.url, f"tell about: {what}")
        except NotFoundError:
            return True
        operation.next_time = later.next_time if later else 0.0
        if self._status == 202:  # a Location URL returns no document until the operation is done
            return False
        state = str(document.get("status", "Succeeded"))
        if state in ("Failed", "Canceled"):
            raise error_from_answer(what, 0, document.get("error") or {"code": state}, self.subscription)
        return state == "Succeeded"


def _url_of(path: str) -> str:
    """The URL of a path, with its service's API version; links from Azure are returned unchanged."""
    if path.startswith("https://"):
        return path
    url = f"{os.environ.get('MLBENCH_AZURE_ENDPOINT', ENDPOINT)}{path}"
    if "api-version=" in url:
        return url
    found = re.findall(r"/providers/(Microsoft\.\w+)(?:/(\w+))?", path)
    service, kind = found[-1] if found else ("", "")
    key = service or ("resourcegroups" if "/resourcegroups" in path.lower() else "")
    version = VERSIONS.get(f"{service}/{kind}") or VERSIONS[key]
    return f"{url}{'&' if '?' in url else '?'}api-version={version}"


def _parse(answer: Any) -> Message:
    try:
        document = json.loads(answer.content or b"{}")
    except ValueError:  # from something else, such as a proxy
        return {"code": "", "message": str(answer.text())[:300]}
    return document if isinstance(document, dict) else {"value": document}


def _operation_of(answer: Any) -> Operation | None:
    """The operation in a response's headers, or None."""
    url = answer.headers.get("Azure-AsyncOperation") or answer.headers.get("Location")
    wait = answer.headers.get("Retry-After", "")
    if not url and not wait:
        return None
    seconds = min(float(wait), MAX_RETRY_AFTER) if wait.isdecimal() else 0.0
    return Operation(url or "", time.monotonic() + seconds)


def _timeouts() -> dict[str, float]:
    return {"connection_timeout": call_timeout(), "read_timeout": call_timeout()}


def _load(name: str) -> Any:
    """A module of Azure's libraries. Raises UsageError if they are not installed."""
    return load_library(name, "aks", NOT_CONFIGURED)


def new_request(method: str, url: str, **content: Any) -> Any:
    """An azure.core.rest.HttpRequest. Raises UsageError if Azure's libraries are not installed."""
    return _load("azure.core.rest").HttpRequest(method, url, **content)


@cache
def client() -> Any:
    """An azure.core.PipelineClient for Azure's APIs, which signs in automatically."""
    policies = _load("azure.core.pipeline.policies")
    signs_in = policies.BearerTokenCredentialPolicy(credentials(), SCOPE)
    return _load("azure.core").PipelineClient(ENDPOINT, policies=[policies.UserAgentPolicy("mlbench"), signs_in])


def send_unsigned(request: Any, server: str) -> Any:
    """The response to a request without Azure's sign-in. Raises NoAnswerError if `server` cannot be reached."""
    unsigned = _load("azure.core").PipelineClient(ENDPOINT, policies=[])
    try:
        return unsigned.send_request(request, **_timeouts())
    except _load("azure.core.exceptions").AzureError as error:
        hint = explain_connection_failure(str(error)) or UNREACHED
        raise NoAnswerError(f"{server} cannot be reached: {error}", hint=hint) from None


@cache
def credentials() -> Any:
    """This machine's credentials: a service principal's, a workload's, the Azure CLI's, a virtual machine's."""
    # It would print errors to stderr that mlbench reports itself.
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    authority = os.environ.get("AZURE_AUTHORITY_HOST", KNOWN_AUTHORITIES[0])
    return _load("azure.identity").DefaultAzureCredential(
        exclude_developer_cli_credential=True,
        exclude_powershell_credential=True,
        exclude_visual_studio_code_credential=True,
        exclude_shared_token_cache_credential=True,
        # Detecting a managed identity needs a network request, so it is made only if something hints at one.
        exclude_managed_identity_credential=not any(os.environ.get(name) for name in MANAGED_HINTS),
        disable_instance_discovery=not any(name in authority for name in KNOWN_AUTHORITIES),
        process_timeout=int(call_timeout()) or 1,
        retry_total=0,
        **_timeouts(),
    )


def get_token(scope: str = SCOPE) -> str:
    """An access token. Raises CredentialError."""
    with map_cloud_errors():
        return str(credentials().get_token(scope).token)


@contextmanager
def map_cloud_errors() -> Iterator[None]:
    """Map exceptions of Azure's libraries in the block to mlbench's, with their messages."""
    core, identity = _load("azure.core.exceptions"), _load("azure.identity")
    try:
        yield
    except identity.CredentialUnavailableError as error:
        raise CredentialError(
            f"There are no Azure credentials on this machine: {_words(error)}", hint=LOGIN, details=NOT_CONFIGURED
        ) from None
    except core.ClientAuthenticationError as error:
        words = _words(error)
        if "failed to retrieve a token from the included credentials" in words:
            raise _no_token_error(words) from None
        raise CredentialError(f"Azure rejected the credentials: {words}", hint=LOGIN) from None
    except core.AzureError as error:
        words = _words(error)
        hint = explain_connection_failure(words) or UNREACHED
        raise NoAnswerError(f"Azure cannot be reached: {words}", hint=hint) from None
    except ValueError as error:  # from the sign-in, for an unknown tenant or authority
        raise CredentialError(f"The Azure credentials cannot be used: {_words(error)}", hint=LOGIN) from None


def _no_token_error(words: str) -> CredentialError:
    """The error if no source has a token, because nobody has signed in, or a configured source was rejected: Entra's
    refusals have a number, also that of a sign-in that has expired."""
    if "AADSTS" in words or "Authentication failed" in words or os.environ.get("AZURE_CLIENT_ID"):
        return CredentialError(f"Azure rejected the credentials: {words}", hint=LOGIN)
    cli = re.search(r"AzureCliCredential: (.*?)(?: \w+Credential: | To mitigate|$)", words)
    reason = f"none in the environment, and the Azure CLI has none ({cli[1]})" if cli else words
    return CredentialError(
        f"There are no Azure credentials on this machine: {reason}", hint=LOGIN, details=NOT_CONFIGURED
    )


def subscription_of(given: str | None) -> str:
    """The subscription: the given one, else that of the environment, the Azure CLI's, or the only one.

    Raises UsageError if there is none, or several.
    """
    named = given or os.environ.get("AZURE_SUBSCRIPTION_ID") or _subscription_of_cli()
    if named:
        if not SUBSCRIPTION.fullmatch(named):
            raise UsageError(
                f'--subscription "{named}" is not the ID of a subscription.',
                hint="az account list -o table   shows yours: the ID has the form 00000000-0000-0000-0000-000000000000",
            )
        return named.lower()
    found = [item for item in Azure("", "").list_all("/subscriptions", "list your subscriptions") if _is_enabled(item)]
    if len(found) == 1:
        return str(found[0]["subscriptionId"])
    listed = "\n".join(f"  --subscription {item['subscriptionId']}   {item.get('displayName')}" for item in found)
    raise UsageError(
        f"The credentials have {len(found)} subscriptions, but none is selected.",
        hint=f"Add one:\n{listed}" if found else "Ask for a role in a subscription, then: az login",
    )


def _is_enabled(subscription: Message) -> bool:
    return subscription.get("state", "Enabled") in ("Enabled", "Warned", "PastDue")


def _subscription_of_cli() -> str | None:
    """The subscription selected by `az account set`, from the CLI's file."""
    folder = os.environ.get("AZURE_CONFIG_DIR")
    file = (Path(folder) if folder else Path(os.path.expanduser("~/.azure"))) / "azureProfile.json"
    try:
        profile = json.loads(file.read_text("utf-8-sig"))
        chosen = [item["id"] for item in profile["subscriptions"] if item.get("isDefault")]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return str(chosen[0]) if chosen else None


def _words(error: BaseException) -> str:
    return " ".join(str(getattr(error, "message", None) or error).split())[:1500]


# --- errors in Azure's words ------------------------------------------------------------------------------------------

# Sources: Azure's page on common deployment errors, karpenter-provider-azure `offerings`, issues of AKS, azure-cli and
# cilium that quote the answers; docs/development/clouds-assumptions.md.


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
QUOTA_WORDS = ("exceeding approved", "Insufficient vcpu quota", "exceeding quota", "PublicIPCountLimitReached")
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
        re.compile(r"AKSCapacity|cluster is unavailable at this time", re.IGNORECASE),
        CapacityError,
        "AKS makes no such clusters there at the moment: --tier standard, which is paid, another --region, or later.",
    ),
    (
        re.compile(r"InvalidAuthenticationTokenTenant"),
        CredentialError,
        "The subscription is of another tenant, which the message says must match: az login --tenant TENANT; az "
        "account set --subscription ID",
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
# Also in the words of an operation of AKS that failed later (dotnet/core 3276 and 3776).
NOT_REGISTERED = re.compile(r"not registered to use namespace '?([\w.]+\w)")
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
    if named := NOT_REGISTERED.search(words):
        return UsageError(message, hint=register_command(named[1], subscription))
    if codes & DISABLED:
        return UsageError(message, hint="az account list -o table   shows the state of your subscriptions")
    if "linkedauthorizationfailed" in codes:
        return RightsError(
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
        return RightsError(message, hint=rights_hint(subscription))
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


def register_command(service: str, subscription: str) -> str:
    """The command that registers a service."""
    return f"az provider register --namespace {service} --wait --subscription {subscription}"


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


# --- access to a cluster's Kubernetes API -----------------------------------------------------------------------------

AKS_SERVER = "6dae42f8-4368-4678-94ff-3960e28e3630"  # in Entra, as kubelogin's documentation has it


def access_to(azure: Azure, path: str) -> Access:
    """Server, CA and credentials of the cluster at `path`. Raises NotFoundError if it does not exist."""
    first = [_read_kubeconfig(azure, path)]
    cluster = first[0]["clusters"][0]["cluster"]
    ca = base64.b64decode(cluster["certificate-authority-data"])

    def fetch() -> Credential:
        document = first.pop() if first else _read_kubeconfig(azure, path)
        # A client certificate, a token, or both; without local accounts, a program that asks Entra for a token.
        user = document["users"][0]["user"]
        certificate, key, token = (user.get(name) for name in ("client-certificate-data", "client-key-data", "token"))
        if not token and not certificate and user.get("exec"):
            token = get_token(f"{_entra_server(user['exec'].get('args') or [])}/.default")
        if not token and not certificate:
            raise CredentialError(
                "The cluster's kubeconfig has neither a certificate nor a token: its local accounts are disabled.",
                hint="mlbench create-cluster aks ... --aad GROUP   makes one that members of an Entra group log in to",
            )
        return Credential(
            token=token or None,
            certificate=base64.b64decode(certificate) if certificate else None,
            key=base64.b64decode(key) if key else None,
        )

    return Access(cluster["server"], ca=ca, token=CredentialSource(fetch))


def _entra_server(args: Sequence[str]) -> str:
    """The application that tokens are for: what kubelogin is told, and the same for all AKS clusters."""
    return next((after for word, after in pairwise(args) if word == "--server-id"), AKS_SERVER)


def _read_kubeconfig(azure: Azure, path: str) -> Any:
    what = "give out the cluster's kubeconfig"
    answer, _ = azure.send("POST", f"{path}/listClusterUserCredential", what)
    given = answer.get("kubeconfigs") or []
    if not given:
        raise NotFoundError("Azure returned no kubeconfig for the cluster.")
    try:
        document = yaml.safe_load(base64.b64decode(given[0]["value"]))
        document["clusters"][0]["cluster"]["certificate-authority-data"]
        document["users"][0]["user"]
    except (ValueError, KeyError, IndexError, TypeError, yaml.YAMLError):
        raise TransientError("Azure's kubeconfig of the cluster is not complete yet.") from None
    return document
