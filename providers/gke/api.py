"""Calls of Google's APIs: one client per process, with errors mapped to mlbench's.

Environment variables for tests and proxies: MLBENCH_GKE_ENDPOINT ("HOST:PORT", gRPC without TLS) and
MLBENCH_COMPUTE_ENDPOINT (a URL).
"""

import base64
import calendar
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import quote

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Token
from mlbench_cli.kube.tls import explain_connection_failure
from providers.base import (
    NOT_CONFIGURED,
    BusyError,
    Cause,
    ExistsError,
    NoAnswerError,
    RightsError,
    TransientError,
    call_timeout,
    error_from_causes,
)

# A message of Google's APIs, as accepted by the SDK and returned as JSON.
Message = dict[str, Any]

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
LOGIN = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key file"
SET_CLOCK = "Google rejects signatures that are minutes off: set this machine's clock, then repeat."
SKEWED = ("iat and exp", "reasonable timeframe", "used too early", "Token expired")
UNREACHED = "Check the network (mlbench doctor gke), then repeat the command to resume."
QUOTAS = "https://console.cloud.google.com/iam-admin/quotas?project="
# Messages about a lack of machines in a zone, as opposed to a quota, which can be raised on request.
STOCK_OUT = ("ZONE_RESOURCE_POOL_EXHAUSTED", "GCE_STOCKOUT", "does not have enough resources", "out of resources")
# Rate limits, also called quotas, which reset within a minute. Compute Engine refuses them with 403, as if for lack of
# a right (terraform-provider-google 9207).
TOO_OFTEN = ("RATE_LIMIT", "rateLimitExceeded", "per minute", "Quota exceeded for quota")
# Messages about exceeded quotas or limits of the project. Not the "quota project" of credentials.
QUOTA_REFUSAL = re.compile(
    r"Insufficient (regional|project|global) quota|[Qq]uota '?\w+'? exceeded|QUOTA_EXCEEDED|"
    r"exceeds? (the |its |your )?(\w+ )?quota|cannot create more than \d+ (clusters|nodes)"
)
SHORT_QUOTA = re.compile(  # in both forms found in public reports
    r"resource:? \"(?P<quota>\w+)\"(?::|\. The) request requires '[\d.]+' and is short '(?P<short>[\d.]+)'"
    r"(?:\. (?:project has a quota of|The regional quota is) '(?P<limit>[\d.]+)')?"
)
# Other errors recognized by their message: the error class, and what to do next.
CAUSES: tuple[Cause, ...] = (
    (
        re.compile(r"constraints/compute\.vmExternalIpAccess"),
        UsageError,
        "Use --private-nodes, because the organization forbids public addresses. Images then come from Artifact "
        "Registry, or the network needs Cloud NAT.",
    ),
    (
        re.compile(r"constraints/compute\.requireShieldedVm"),
        UsageError,
        "Use --secure-boot, because the organization requires machines that start only signed code.",
    ),
    (
        re.compile(r"constraints/gcp\.resourceLocations"),
        UsageError,
        "Use a --zone or --region that the organization allows: gcloud resource-manager org-policies describe "
        "gcp.resourceLocations --effective --project PROJECT   lists them",
    ),
    (
        re.compile(r"[Cc]onstraints/[\w.]+|[Oo]rg(anization)? [Pp]olicy"),
        UsageError,
        "A policy of the organization forbids it: ask its administrator for an exception, or choose another place or "
        "project; --tag NAME=VALUE adds a label that it demands. gcloud resource-manager org-policies list --project "
        "PROJECT   lists the policies.",
    ),
    (
        re.compile(
            r"VPC_SERVICE_CONTROLS|vpcServiceControlsUniqueIdentifier|VPC Service Controls|SECURITY_POLICY_VIOLATED"
        ),
        RightsError,
        "A service perimeter (VPC Service Controls) of the organization blocks this: ask its administrator to let you "
        "in with an access level or ingress rule, and name the identifier in the message.",
    ),
    (
        re.compile(r"does not have available private IP space|[Nn]o available (?:private )?IP (?:space|range)"),
        CapacityError,
        "The network has no free range for the control plane or its pods: use another --network and --subnetwork, or "
        "--pods-range and --services-range that it already has.",
    ),
    (
        re.compile(r"hostServiceAgentUser|compute\.subnetworks\.use\b.*projects/"),
        RightsError,
        "The host project's administrator must give this project's GKE access: roles/container.hostServiceAgentUser "
        "there, and roles/compute.networkUser on the subnetwork, for service-NUMBER@container-engine-robot.iam."
        "gserviceaccount.com. gcloud projects describe PROJECT --format='value(projectNumber)'   shows the number.",
    ),
    (
        re.compile(r"compute\.(subnetworks|networks)\.\w+"),
        RightsError,
        "You may not read or use the network: ask for roles/compute.networkUser on it (in a host project, on the "
        "subnetwork there), or leave out --network and --subnetwork.",
    ),
    (
        re.compile(r"IP_SPACE_EXHAUSTED|IP space of .* is exhausted"),
        CapacityError,
        "The subnetwork has no free addresses: use a larger one (--network NAME --subnetwork NAME), another "
        "--pods-range, or fewer workers. gcloud compute networks subnets list   lists them.",
    ),
    (
        re.compile(r"max(imum supported number of)? secondary ranges"),
        CapacityError,
        "The subnetwork has as many ranges as Google allows, two per cluster: use another one (--network NAME "
        "--subnetwork NAME), or ranges that it already has (--pods-range NAME --services-range NAME).",
    ),
    (
        re.compile(r"[Ss]econdary (IP )?range"),
        UsageError,
        "Name ranges of the subnetwork with --pods-range NAME --services-range NAME: gcloud container subnets "
        "list-usable --network-project HOST   lists them.",
    ),
    (
        re.compile(r"[Ss]ervice account .*(does not exist|is disabled|not found|missing)|(?i:gaia) (id not|email)"),
        UsageError,
        "Name an existing account with --service-account NAME@PROJECT.iam.gserviceaccount.com: gcloud iam "
        "service-accounts list",
    ),
    (
        re.compile(
            r"[Nn]etwork .*(does not exist|not found|requires specifying a sub)|no (default network|network named)"
        ),
        UsageError,
        "Name a network of the project with --network NAME --subnetwork NAME: gcloud compute networks subnets list",
    ),
    (
        re.compile(
            r"requires billing to be enabled|billing disabled|(absent|closed|disabled|delinquent) billing account|"
            r"[Bb]illing account .*(disabled|absent|not found)"
        ),
        UsageError,
        "The project has no billing account: gcloud billing accounts list, then gcloud billing projects link PROJECT "
        "--billing-account ACCOUNT",
    ),
    (
        re.compile(r"Permission denied on resource project|CONSUMER_INVALID"),
        RightsError,
        "There is no such project, or you have no role in it: gcloud projects list; --project PROJECT",
    ),
    (
        re.compile(r"requires a quota project|required permission to use project"),
        CredentialError,
        "Let the credentials count requests in a project of yours: gcloud auth application-default set-quota-project "
        "PROJECT   (you need roles/serviceusage.serviceUsageConsumer there)",
    ),
    (
        re.compile(r"should enable service:container|Kubernetes Engine API is not enabled"),
        UsageError,
        "gcloud services enable container.googleapis.com --project PROJECT",
    ),
    (
        re.compile(r"nodes out of \d+ have registered"),
        MlbenchError,
        "The machines started, but cannot reach the control plane: the network needs a route to the internet or "
        "Private Google Access, and no firewall rule that denies egress. gcloud compute instances "
        "get-serial-port-output INSTANCE   shows more. Then repeat the create-cluster command: it removes what failed.",
    ),
)
# A cluster allows only one changing operation at a time.
BUSY = (
    "incompatible operation",
    "operation in progress",
    "is currently",
    "CLUSTER_ALREADY_HAS_OPERATION",
    "conflicting",
)


class Gke:
    """The clusters of one project in one zone."""

    def __init__(self, project: str, location: str) -> None:
        self.project = project
        self.location = location
        self.parent = f"projects/{project}/locations/{location}"

    def cluster(self, name: str) -> str:
        """The resource path of a cluster in Google's API."""
        return f"{self.parent}/clusters/{name}"

    def call(self, method: str, **request: Any) -> Any:
        """One request without retries: the life-cycle decides about retries. Raises MlbenchError."""
        with map_cloud_errors(f"{method.replace('_', ' ')} in {self.location}", self.project):
            return getattr(client(), method)(request=request, retry=None, timeout=call_timeout())


def _load(name: str) -> Any:
    """A module of Google's libraries. Raises UsageError if they are not installed."""
    return load_library(name, "gke", NOT_CONFIGURED)


@cache
def client() -> Any:
    """A google.cloud.container_v1.ClusterManagerClient. Raises UsageError if the library is not installed."""
    kind = _load("google.cloud.container_v1").ClusterManagerClient
    endpoint = os.environ.get("MLBENCH_GKE_ENDPOINT")
    if endpoint:
        channel = _load("grpc").insecure_channel(endpoint)
        return kind(transport=kind.get_transport_class("grpc")(channel=channel))
    return kind(credentials=credentials()[0])


@cache
def credentials() -> tuple[Any, str | None]:
    """The machine's google.auth.credentials.Credentials and their project. Raises CredentialError."""
    library = _load("google.auth")
    try:
        found: tuple[Any, str | None] = library.default(scopes=[SCOPE])
    except library.exceptions.DefaultCredentialsError as error:
        if "default credentials were not found" in str(error):
            raise CredentialError(
                f"There are no Google credentials on this machine: {error}", hint=LOGIN, details=NOT_CONFIGURED
            ) from None
        raise CredentialError(f"The Google credentials cannot be used: {error}", hint=LOGIN) from None
    return found


def project_of(given: str | None) -> str:
    """The project: the given one, else that of the credentials."""
    project = given or os.environ.get("GOOGLE_CLOUD_PROJECT") or credentials()[1]
    if not project:
        raise UsageError(
            "No Google project given, and the credentials have none.",
            hint="Add --project PROJECT, or: gcloud config set project PROJECT",
        )
    return project


@cache
def token() -> Token:
    """This process's access token, renewed before it expires."""
    return Token(_refresh_token)


def _refresh_token() -> tuple[str, float | None]:
    """A new access token, and when it expires. Raises CredentialError."""
    found, _ = credentials()
    with map_cloud_errors("get an access token", ""):
        found.refresh(sign_in())
    return str(found.token), float(calendar.timegm(found.expiry.utctimetuple())) if found.expiry else None


def sign_in() -> Any:
    """The transport of google-auth for tokens; its default one has a timeout of two minutes."""

    class Impatient(_load("google.auth.transport.requests").Request):  # type: ignore[misc]
        def __call__(self, *words: Any, **named: Any) -> Any:
            return super().__call__(*words, **{**named, "timeout": call_timeout()})

    return Impatient()


def open_session() -> Any:
    """A session for Google's REST APIs with this machine's credentials. Raises CredentialError if there are none."""
    return _load("google.auth.transport.requests").AuthorizedSession(credentials()[0], auth_request=sign_in())


def region_of(place: str) -> str:
    """The region of a zone; regions are returned unchanged."""
    return place.rpartition("-")[0] if place.count("-") == 2 else place


@contextmanager
def map_cloud_errors(what: str, project: str) -> Iterator[None]:
    """Map Google's exceptions in the block to mlbench's, with Google's message."""
    api, auth = _load("google.api_core.exceptions"), _load("google.auth.exceptions")
    try:
        yield
    except auth.RefreshError as error:
        words = _words(error)
        hint = SET_CLOCK if any(phrase in words for phrase in SKEWED) else LOGIN
        raise CredentialError(f"Google rejected the credentials: {words}", hint=hint) from None
    except auth.TransportError as error:
        words = _words(error)
        hint = explain_connection_failure(words) or UNREACHED
        raise NoAnswerError(f"Google's sign-in cannot be reached: {words}", hint=hint) from None
    except auth.GoogleAuthError as error:
        raise CredentialError(f"The Google credentials cannot be used: {_words(error)}", hint=LOGIN) from None
    except api.GoogleAPICallError as error:
        raise error_from_exception(error, what, project) from None


@contextmanager
def map_rest_errors(service: str, what: str, project: str) -> Iterator[None]:
    """Like `map_cloud_errors`, for requests of a session: failed connections are transient."""
    http = _load("requests.exceptions")
    with map_cloud_errors(what, project):
        try:
            yield
        except http.RequestException as error:
            hint = explain_connection_failure(str(error)) or UNREACHED
            raise NoAnswerError(f"{service} cannot be reached: {error}", hint=hint) from None


def ask_rest(
    service: str, method: str, url: str, what: str, project: str, body: Message | None = None, conflict: str = ""
) -> Message:
    """The document that one of Google's REST APIs answers; empty without one. `what` is done, for errors.

    Raises TransientError with the text `conflict`, if given, for a change that somebody else's change has overtaken.
    """
    with map_rest_errors(service, what, project):
        answer = open_session().request(method, url, json=body, timeout=call_timeout())
        if conflict and answer.status_code == 409:
            raise TransientError(conflict)
        require_success(answer)
    document: Message = answer.json() if answer.content else {}
    return document


def read_pages(read: Callable[[str], Message], path: str) -> Iterator[Message]:
    """All pages of a list of Google's REST APIs, each as `read` gets it. One may be empty although more follow."""
    page = read(path)
    yield page
    while token := page.get("nextPageToken"):
        page = read(f"{path}{'&' if '?' in path else '?'}pageToken={quote(str(token), safe='')}")
        yield page


def require_success(answer: Any) -> None:
    """Raise Google's exception for an error response of a session, to be mapped by `map_rest_errors`."""
    if answer.status_code >= 400:
        raise _load("google.api_core.exceptions").from_http_response(answer)


def error_from_exception(error: Any, what: str, project: str) -> MlbenchError:
    """The error for a rejected call."""
    api = _load("google.api_core.exceptions")
    message = f'Google refused to {what}: "{_words(error)}"'
    # Check the message before the class: GKE reports exceeded quotas as PERMISSION_DENIED (kubeflow/examples 597).
    if known := error_from_words(message, str(error), project):
        return known
    passing = (api.ServerError, api.TooManyRequests, api.Aborted, api.Cancelled, api.Unknown, api.RetryError)
    if _says(error, TOO_OFTEN):
        return TransientError(message)
    if isinstance(error, api.NotFound):
        return NotFoundError(message)
    if isinstance(error, api.Unauthenticated):
        return CredentialError(message, hint=LOGIN)
    if isinstance(error, api.Forbidden):
        return RightsError(message, hint=_permission_hint(str(error), project))
    if isinstance(error, api.ResourceExhausted):
        return capacity_error(message, project)
    if isinstance(error, api.FailedPrecondition | api.Aborted) and _says(error, BUSY):
        return BusyError(message)
    if isinstance(error, passing):
        unreached = isinstance(error, api.ServiceUnavailable | api.GatewayTimeout)
        hint = explain_connection_failure(message)
        return NoAnswerError(message, hint=hint or UNREACHED) if unreached else TransientError(message, hint=hint)
    if isinstance(error, api.InvalidArgument) and re.search(r'\b[Ll]ocation "', str(error)):
        return UsageError(message, hint="gcloud compute zones list, or regions list")
    if isinstance(error, api.AlreadyExists):
        return ExistsError(message)
    if isinstance(error, api.InvalidArgument | api.FailedPrecondition | api.OutOfRange):
        return UsageError(message)
    return MlbenchError(message)


def error_from_words(message: str, said: str, project: str) -> MlbenchError | None:
    """The error for a message with a known cause, independent of class and code; None for other messages."""
    if QUOTA_REFUSAL.search(said) and "quota project" not in said:
        return capacity_error(message, project, said)
    return error_from_causes(CAUSES, message, said)


def raise_quota(project: str, quota: str, value: float | None, region: str | None) -> str:
    """The hint for an exceeded quota: the command that requests `value`, and the console page."""
    page = f"{QUOTAS}{project}"
    everywhere = quota.endswith("_ALL_REGIONS")
    less = "--private-nodes, or fewer machines" if quota == "IN_USE_ADDRESSES" else "fewer or other machines"
    if value is None or not re.fullmatch(r"[A-Z0-9_]+", quota) or not (everywhere or region):
        return f"Ask for more of {quota} at {page}, or use {less}."
    where = "-per-project" if everywhere else "-per-project-region"
    return (
        "gcloud beta quotas preferences create --service compute.googleapis.com --project "
        f"{project} --quota-id {quota.replace('_', '-')}{where} --preferred-value {value:.0f}"
        f"{'' if everywhere else f' --dimensions region={region}'}   asks for more, as does {page}; "
        f"or use {less}"
    )


def capacity_error(message: str, project: str, said: str = "") -> CapacityError:
    """The error for exceeded quotas, which can be raised, or for stock-outs, which cannot, decided by the message and
    `said`."""
    if any(phrase in f"{message} {said}" for phrase in STOCK_OUT):
        return CapacityError(
            message,
            hint="The zone has no capacity: repeat with --zones a,b,c, without --spot, or later.",
            details={"reason": "stock_out"},
        )
    if short := SHORT_QUOTA.search(f"{message} {said}"):
        place = re.search(r" in ([a-z]+-[a-z]+\d+)", message)
        value = float(short["limit"]) + float(short["short"]) if short["limit"] else None
        return CapacityError(
            message,
            hint=raise_quota(project, short["quota"], value, place[1] if place else None),
            details={"reason": "quota", "quota": short["quota"]},
        )
    return CapacityError(
        message,
        hint=f"Request more at {QUOTAS}{project}, or use fewer or other machines.",
        details={"reason": "quota"},
    )


def _permission_hint(words: str, project: str) -> str:
    if is_api_off(words):
        named = re.search(r"(?:apis/api/|service['\": ]+|\[)([a-z]+\.googleapis\.com)", words) or re.search(
            r"\b([a-z]+\.googleapis\.com)", words
        )
        return (
            f"gcloud services enable {named[1] if named else 'container.googleapis.com'} --project {project}   "
            "switches the API on; it takes a few minutes"
        )
    return (
        f"You need the roles container.admin and iam.serviceAccountUser in {project}: "
        f"gcloud projects get-iam-policy {project}"
    )


def is_api_off(words: str) -> bool:
    """Whether Google's message says that the project has not enabled an API."""
    return "SERVICE_DISABLED" in words or "has not been used in project" in words


def _says(error: Any, phrases: tuple[str, ...]) -> bool:
    text = f"{error} {getattr(error, 'reason', '')} {getattr(error, 'errors', '')}"
    return any(phrase in text for phrase in phrases)


def _words(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", None) or error).split())[:1500]


# --- a project: its number, its policy, and what the caller may do in it --------------------------------------------


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
        return ask_rest("Google's resource manager", method, url, what, self.name, body, conflict)


# --- access to a cluster's Kubernetes API -----------------------------------------------------------------------------


def access_to(found: Any) -> Access:
    """Access to a cluster's Kubernetes API: by DNS name if enabled, else by IP address."""
    dns = found.control_plane_endpoints_config.dns_endpoint_config
    signed = token()
    if dns.endpoint and dns.allow_external_traffic:
        return Access(f"https://{dns.endpoint}", token=signed)
    if not found.endpoint:
        raise UsageError(f'The GKE cluster "{found.name}" has no address yet: it is {found.status.name}.')
    return Access(
        f"https://{found.endpoint}", ca=base64.b64decode(found.master_auth.cluster_ca_certificate), token=signed
    )
