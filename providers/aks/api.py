"""Calls of Azure Resource Manager (ARM) by its REST API: one client per process, with errors mapped to mlbench's.

One client serves all services: groups, clusters, quotas, identities, registries. It needs only azure-core and azure-
identity. MLBENCH_AZURE_ENDPOINT sets the API's address, for tests and proxies; AZURE_AUTHORITY_HOST sets the sign-in,
as for all Azure libraries.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import CredentialError, NotFoundError, UsageError
from mlbench_cli.kube.tls import explain_connection_failure
from providers.aks.errors import LOGIN, UNREACHED, Message, error_from_answer
from providers.base import NOT_CONFIGURED, TransientError, call_timeout

if TYPE_CHECKING:
    from azure.core import PipelineClient
    from azure.core.credentials import TokenCredential

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
        from azure.core.rest import HttpRequest

        request = HttpRequest(method, _url_of(path), json=body)
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


@cache
def client() -> "PipelineClient[Any, Any]":
    """A client of Azure's APIs that signs in automatically. Raises UsageError with the install command if libraries are
    missing."""
    credential = credentials()
    from azure.core import PipelineClient
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy, UserAgentPolicy

    policies = [UserAgentPolicy("mlbench"), BearerTokenCredentialPolicy(credential, SCOPE)]
    return PipelineClient(ENDPOINT, policies=policies)


def send_unsigned(request: Any, server: str) -> Any:
    """The response to a request without Azure's sign-in. Raises TransientError if `server` cannot be reached."""
    from azure.core import PipelineClient
    from azure.core.exceptions import AzureError

    unsigned: PipelineClient[Any, Any] = PipelineClient(ENDPOINT, policies=[])
    try:
        return unsigned.send_request(request, **_timeouts())
    except AzureError as error:
        hint = explain_connection_failure(str(error)) or UNREACHED
        raise TransientError(f"{server} cannot be reached: {error}", hint=hint) from None


@cache
def credentials() -> "TokenCredential":
    """This machine's credentials: a service principal's, a workload's, the Azure CLI's, a virtual machine's."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise UsageError(
            "Clusters on AKS need azure-identity, which is not installed.",
            hint=install_hint("aks"),
            details=NOT_CONFIGURED,
        ) from None
    # It would print errors to stderr that mlbench reports itself.
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    authority = os.environ.get("AZURE_AUTHORITY_HOST", KNOWN_AUTHORITIES[0])
    return DefaultAzureCredential(
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
    from azure.core import exceptions as core
    from azure.identity import CredentialUnavailableError

    try:
        yield
    except CredentialUnavailableError as error:
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
        raise TransientError(f"Azure cannot be reached: {words}", hint=hint) from None
    except ValueError as error:  # from the sign-in, for an unknown tenant or authority
        raise CredentialError(f"The Azure credentials cannot be used: {_words(error)}", hint=LOGIN) from None


def _no_token_error(words: str) -> CredentialError:
    """The error if no source has a token, because nobody has signed in, or a configured source was rejected."""
    if "EnvironmentCredential: Authentication failed" in words or os.environ.get("AZURE_CLIENT_ID"):
        return CredentialError(f"Azure rejected the credentials: {words}", hint=LOGIN)
    cli = re.search(r"AzureCliCredential: (.*?)(?: \w+Credential: | To mitigate|$)", words)
    reason = f"none in the environment, and of the Azure CLI: {cli[1]}" if cli else words
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
    file = (Path(folder) if folder else Path.home() / ".azure") / "azureProfile.json"
    try:
        profile = json.loads(file.read_text("utf-8-sig"))
        chosen = [item["id"] for item in profile["subscriptions"] if item.get("isDefault")]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return str(chosen[0]) if chosen else None


def _words(error: BaseException) -> str:
    return " ".join(str(getattr(error, "message", None) or error).split())[:1500]
