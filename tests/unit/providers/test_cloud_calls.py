"""What Google's and Azure's libraries raise, and what that means: the error's class, its words and the next step."""

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import requests
from azure.core import exceptions as azure_errors
from azure.identity import CredentialUnavailableError
from google.api_core import exceptions as google_errors
from google.auth import exceptions as auth_errors

from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, NotFoundError, UsageError
from providers.aks import api as aks
from providers.aks.errors import LOGIN, UNREACHED
from providers.base import BusyError, TransientError
from providers.gke import api as gke
from providers.gke import compute
from providers.gke.compute import Demand, Purchase
from providers.gke.machines import Machine

# --- Google: answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "hint"),
    [
        (google_errors.NotFound("x"), NotFoundError, None),
        (google_errors.Unauthenticated("x"), CredentialError, "application-default login"),
        (google_errors.Forbidden("x"), CredentialError, "roles container.admin and iam.serviceAccountUser in demo"),
        (
            google_errors.PermissionDenied("SERVICE_DISABLED"),
            CredentialError,
            "services enable container.googleapis.com",
        ),
        (
            google_errors.Forbidden("Kubernetes has not been used in project 12 before"),
            CredentialError,
            "services enable container.googleapis.com --project demo",
        ),
        (google_errors.InternalServerError("x"), TransientError, None),
        (google_errors.ServiceUnavailable("x"), TransientError, "Check the network"),
        (google_errors.GatewayTimeout("x"), TransientError, "Check the network"),
        (google_errors.TooManyRequests("x"), TransientError, None),
        (google_errors.Cancelled("x"), TransientError, None),
        (google_errors.Unknown("x"), TransientError, None),
        (google_errors.InvalidArgument('Location "us-nowhere1" does not exist'), UsageError, "compute zones list"),
        (google_errors.InvalidArgument("al-location failed"), UsageError, None),
        (google_errors.AlreadyExists("x"), UsageError, None),
        (google_errors.OutOfRange("x"), UsageError, None),
        (google_errors.MethodNotAllowed("x"), MlbenchError, None),
    ],
)
def test_a_class_of_google_is_an_error_with_its_next_step(
    error: Exception, kind: type[MlbenchError], hint: str | None
) -> None:
    found = gke.error_from_exception(error, "create cluster", "demo")
    assert type(found) is kind
    assert found.message.startswith('Google refused to create cluster: "')
    assert (found.hint is None) if hint is None else hint in str(found.hint)


@pytest.mark.parametrize(
    ("said", "kind", "hint"),
    [
        ("Insufficient regional quota to satisfy request: SSD_TOTAL_GB", CapacityError, "quotas?project=demo"),
        ("Quota 'GPUS_ALL_REGIONS' exceeded. Limit: 0.0 globally.", CapacityError, "quotas?project=demo"),
        ("You cannot create more than 3 clusters in this zone.", CapacityError, "quotas?project=demo"),
        ("exceeds its regional quota", CapacityError, "quotas?project=demo"),
        ("requires a quota project, Quota 'X' exceeded is not it", CredentialError, "container.admin"),
        ("Constraint constraints/compute.vmExternalIpAccess violated", UsageError, "--private-nodes"),
        ("Constraint constraints/compute.requireShieldedVm violated", UsageError, "--secure-boot"),
        ("violates constraints/gcp.resourceLocations", UsageError, "--zone or --region that the organization allows"),
        ("violates constraints/compute.other", UsageError, "org-policies list"),
        ("Organization Policy forbids it", UsageError, "org-policies list"),
        ("hostServiceAgentUser is missing", CredentialError, "compute.networkUser"),
        ("compute.subnetworks.use permission for projects/host/x", CredentialError, "compute.networkUser"),
        ("IP_SPACE_EXHAUSTED: IP space of s is exhausted", CapacityError, "no free addresses"),
        ("maximum supported number of secondary ranges", CapacityError, "two per cluster"),
        ("Secondary IP range x does not exist", UsageError, "--pods-range NAME"),
        ("Service account x does not exist", UsageError, "--service-account NAME"),
        ("Gaia id not found", UsageError, "--service-account NAME"),
        ("Network default does not exist", UsageError, "--network NAME"),
        ("Project has no default network", UsageError, "--network NAME"),
        ("This API method requires billing to be enabled", UsageError, "gcloud billing projects link"),
        ("should enable service:container.googleapis.com", UsageError, "services enable container"),
        ("only 1 nodes out of 3 have registered", MlbenchError, "cannot reach the control plane"),
    ],
)
def test_the_words_of_google_tell_the_cause_whatever_the_class(said: str, kind: type[MlbenchError], hint: str) -> None:
    """Google answers with PermissionDenied to all kinds of refusals (kubeflow/examples 597)."""
    found = gke.error_from_exception(google_errors.PermissionDenied(said), "create cluster", "demo")
    assert type(found) is kind
    assert hint in str(found.hint)


@pytest.mark.parametrize("words", gke.BUSY)
def test_another_operation_on_the_cluster_is_waited_for(words: str) -> None:
    for kind in (google_errors.FailedPrecondition, google_errors.Aborted):
        assert type(gke.error_from_exception(kind(f"it {words} now"), "x", "demo")) is BusyError
    assert type(gke.error_from_exception(google_errors.InvalidArgument(f"it {words}"), "x", "demo")) is UsageError


@pytest.mark.parametrize("words", gke.STOCK_OUT)
def test_a_lack_of_machines_is_no_lack_of_quota(words: str) -> None:
    found = gke.capacity_error(f"The zone: {words}", "demo")
    assert found.details == {"reason": "stock_out"}
    assert "--zones a,b,c" in str(found.hint)
    assert gke.capacity_error("refused", "demo", words).details == {"reason": "stock_out"}
    assert gke.capacity_error("refused", "demo").details == {"reason": "quota"}


SHORT = "resource \"CPUS\": request requires '16.0' and is short '4.0'"


@pytest.mark.parametrize(
    ("said", "quota", "hint"),
    [
        (f"{SHORT}. project has a quota of '12.0'", "CPUS", "--quota-id CPUS-per-project-region --preferred-value 16"),
        (f"{SHORT}. The regional quota is '12.0'", "CPUS", "--dimensions region=us-east1"),
        (SHORT, "CPUS", "Ask for more of CPUS at"),
        (
            "resource \"CPUS_ALL_REGIONS\". The request requires '16.0' and is short '4.0'. "
            "project has a quota of '12.0'",
            "CPUS_ALL_REGIONS",
            "--quota-id CPUS-ALL-REGIONS-per-project --preferred-value 16",
        ),
    ],
)
def test_a_quota_that_is_short_is_asked_for_by_a_command(said: str, quota: str, hint: str) -> None:
    found = gke.capacity_error(f"refused in us-east1: {said}", "demo")
    assert found.details == {"reason": "quota", "quota": quota}
    assert hint in str(found.hint)


@pytest.mark.parametrize(
    ("quota", "value", "region", "is_command"),
    [
        ("CPUS", 16.4, "us-east1", True),
        ("CPUS", None, "us-east1", False),
        ("CPUS", 16.0, None, False),
        ("GPUS_ALL_REGIONS", 4.0, None, True),
        ("GPU_FAMILY:NVIDIA_H100", 8.0, "us-east1", False),
    ],
)
def test_a_quota_without_a_place_or_a_value_is_asked_for_on_a_page(
    quota: str, value: float | None, region: str | None, is_command: bool
) -> None:
    hint = gke.raise_quota("demo", quota, value, region)
    assert hint.startswith("gcloud beta quotas preferences create") is is_command
    assert "quotas?project=demo" in hint


@pytest.mark.parametrize(
    ("error", "kind", "says", "hint"),
    [
        (auth_errors.RefreshError("Token expired"), CredentialError, "rejected the credentials", gke.SET_CLOCK),
        (auth_errors.RefreshError("invalid_grant"), CredentialError, "rejected the credentials", gke.LOGIN),
        (auth_errors.TransportError("refused"), TransientError, "sign-in cannot be reached", gke.UNREACHED),
        (auth_errors.MalformedError("bad key"), CredentialError, "cannot be used: bad key", gke.LOGIN),
        (google_errors.NotFound("no such"), NotFoundError, "Google refused to look", None),
        (
            requests.ConnectionError("no route"),
            TransientError,
            "The service cannot be reached: no route",
            gke.UNREACHED,
        ),
        (requests.Timeout("late"), TransientError, "The service cannot be reached: late", gke.UNREACHED),
    ],
)
def test_what_googles_libraries_raise_is_an_error_of_mlbench(
    error: Exception, kind: type[MlbenchError], says: str, hint: str | None
) -> None:
    with pytest.raises(MlbenchError, match=says) as caught, gke.map_rest_errors("The service", "look", "demo"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.hint == hint
    with pytest.raises(ZeroDivisionError), gke.map_rest_errors("The service", "look", "demo"):
        raise ZeroDivisionError


class Session:
    """A session of google-auth with one answer."""

    def __init__(self, status: int, document: Any = None) -> None:
        self.status, self.content = status, b"" if document is None else json.dumps(document).encode()
        self.asked: list[Any] = []

    def request(self, method: str, url: str, **options: Any) -> Any:
        self.asked.append((method, url, options["json"], options["timeout"]))
        answer = requests.Response()
        answer.status_code, answer._content = self.status, self.content
        answer.request = requests.Request(method, url).prepare()
        return answer


@pytest.mark.parametrize(
    ("status", "document", "conflict", "found"),
    [
        (200, {"a": 1}, "", {"a": 1}),
        (204, None, "", {}),
        (399, {"a": 1}, "", {"a": 1}),
        (409, {"error": {"message": "etag"}}, "changed by someone else", TransientError),
        (409, {"error": {"message": "etag"}}, "", MlbenchError),
        (404, {"error": {"message": "none"}}, "x", NotFoundError),
        (503, {"error": {"message": "busy"}}, "x", TransientError),
    ],
)
def test_a_document_of_googles_rest_apis(
    monkeypatch: pytest.MonkeyPatch, status: int, document: Any, conflict: str, found: Any
) -> None:
    session = Session(status, document)
    monkeypatch.setattr(gke, "open_session", lambda: session)
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "7")
    asking = ("The service", "POST", "https://example.org/x", "look", "demo", {"b": 2}, conflict)
    if isinstance(found, dict):
        assert gke.ask_rest(*asking) == found
    else:
        with pytest.raises(found) as caught:
            gke.ask_rest(*asking)
        assert (caught.value.message == conflict) is (status == 409 and bool(conflict))
    assert session.asked == [("POST", "https://example.org/x", {"b": 2}, 7.0)]


# --- Google: who one is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environment", "own", "project"),
    [
        ("given", "env", "own", "given"),
        (None, "env", "own", "env"),
        (None, "", "own", "own"),
        (None, "", None, None),
    ],
)
def test_a_project_is_given_or_that_of_the_environment_or_of_the_credentials(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: str, own: str | None, project: str | None
) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", environment)
    monkeypatch.setattr(gke, "credentials", lambda: (None, own))
    if project is not None:
        assert gke.project_of(given) == project
        return
    with pytest.raises(UsageError, match="No Google project given"):
        gke.project_of(given)


@pytest.mark.parametrize(
    ("place", "region"),
    [("us-east1-b", "us-east1"), ("us-east1", "us-east1"), ("-", "-"), ("europe-west4-a", "europe-west4")],
)
def test_a_place_of_google_is_in_a_region(place: str, region: str) -> None:
    assert gke.region_of(place) == region


def test_a_token_of_google_expires_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """google-auth has times without a zone, which are UTC."""
    refreshed: list[Any] = []
    moment = datetime.datetime(2026, 11, 21, 12)
    found = SimpleNamespace(token="t", expiry=moment, refresh=refreshed.append)
    monkeypatch.setattr(gke, "credentials", lambda: (found, None))
    assert gke._refresh_token() == ("t", 1_795_262_400.0)
    assert len(refreshed) == 1
    found.expiry = None
    assert gke._refresh_token() == ("t", None)


def test_the_sign_in_at_google_has_the_timeout_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []

    def send(session: Any, method: str, url: str, **options: Any) -> Any:
        timeouts.append(options["timeout"])
        return requests.Response()

    monkeypatch.setattr(requests.Session, "request", send)
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "7")
    gke.sign_in()("https://example.org/token", timeout=120)
    assert timeouts == [7.0]


# --- Azure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "says", "hint"),
    [
        (
            CredentialUnavailableError("no CLI"),
            CredentialError,
            "no Azure credentials on this machine: no CLI",
            LOGIN,
        ),
        (azure_errors.ClientAuthenticationError("bad secret"), CredentialError, "rejected the credentials", LOGIN),
        (
            azure_errors.ServiceRequestError("no route"),
            TransientError,
            "Azure cannot be reached: no route",
            UNREACHED,
        ),
        (azure_errors.ServiceResponseError("late"), TransientError, "Azure cannot be reached: late", UNREACHED),
        (ValueError("unknown tenant"), CredentialError, "cannot be used: unknown tenant", LOGIN),
    ],
)
def test_what_azures_libraries_raise_is_an_error_of_mlbench(
    error: Exception, kind: type[MlbenchError], says: str, hint: str
) -> None:
    with pytest.raises(MlbenchError, match=says) as caught, aks.map_cloud_errors():
        raise error
    assert type(caught.value) is kind
    assert caught.value.hint == hint
    assert (caught.value.details == {"configured": False}) is isinstance(error, CredentialUnavailableError)


ALL_FAILED = (
    "DefaultAzureCredential failed to retrieve a token from the included credentials. Attempted credentials: "
    "EnvironmentCredential: EnvironmentCredential authentication unavailable. AzureCliCredential: Please run 'az "
    "login' to set up an account WorkloadIdentityCredential: no To mitigate this issue, see the guide"
)


@pytest.mark.parametrize(
    ("words", "client", "says", "is_configured"),
    [
        (ALL_FAILED, "", "of the Azure CLI: Please run 'az login' to set up an account$", False),
        (ALL_FAILED, "id", "Azure rejected the credentials: DefaultAzureCredential", True),
        (
            ALL_FAILED.replace("EnvironmentCredential authentication unavailable", "Authentication failed: secret"),
            "",
            "Azure rejected the credentials: DefaultAzureCredential",
            True,
        ),
        (
            ALL_FAILED.replace("AzureCliCredential", "Other"),
            "",
            "on this machine: DefaultAzureCredential failed",
            False,
        ),
    ],
)
def test_nobody_signed_in_is_told_from_credentials_that_are_rejected(
    monkeypatch: pytest.MonkeyPatch, words: str, client: str, says: str, is_configured: bool
) -> None:
    monkeypatch.setenv("AZURE_CLIENT_ID", client)
    with pytest.raises(CredentialError, match=says) as caught, aks.map_cloud_errors():
        raise azure_errors.ClientAuthenticationError(words)
    assert caught.value.details == ({} if is_configured else {"configured": False})
    assert caught.value.hint == LOGIN


ID = "11111111-2222-3333-4444-55555555555A"


@pytest.fixture
def subscriptions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The subscriptions of the credentials; no other source names one."""
    listed: list[Any] = []

    def list_all(self: aks.Azure, path: str, what: str) -> list[Any]:
        assert path == "/subscriptions"
        return listed

    monkeypatch.setattr(aks.Azure, "list_all", list_all)
    monkeypatch.delenv("AZURE_SUBSCRIPTION_ID", raising=False)
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(tmp_path))
    return listed


def test_a_subscription_is_given_or_in_the_environment_or_chosen_in_the_cli(
    monkeypatch: pytest.MonkeyPatch, subscriptions: list[Any], tmp_path: Path
) -> None:
    profile = {"subscriptions": [{"id": "other"}, {"id": f"{ID[:-1]}b", "isDefault": True}]}
    (tmp_path / "azureProfile.json").write_text(json.dumps(profile), "utf-8-sig")
    assert aks.subscription_of(None) == f"{ID[:-1]}b"
    monkeypatch.setenv("AZURE_SUBSCRIPTION_ID", f"{ID[:-1]}c")
    assert aks.subscription_of(None) == f"{ID[:-1]}c"
    assert aks.subscription_of(ID) == ID.lower()
    with pytest.raises(UsageError, match='--subscription "My Subscription" is not the ID'):
        aks.subscription_of("My Subscription")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"subscriptions": [{}]}', '{"subscriptions": [{"isDefault": true}]}']
)
def test_a_profile_of_the_cli_that_names_none_is_no_choice(subscriptions: list[Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "azureProfile.json").write_text(text)
    subscriptions.append({"subscriptionId": "only"})
    assert aks.subscription_of(None) == "only"


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        (["Enabled"], "0"),
        (["Disabled", "Warned"], "1"),
        (["PastDue", "Deleted"], "0"),
        (["Enabled", "Enabled"], None),
        (["Disabled"], None),
        ([], None),
    ],
)
def test_the_only_subscription_that_works_is_taken(
    subscriptions: list[Any], states: list[str], chosen: str | None
) -> None:
    subscriptions += [
        {"subscriptionId": str(number), "state": state, "displayName": f"name {number}"}
        for number, state in enumerate(states)
    ]
    if chosen is not None:
        assert aks.subscription_of(None) == chosen
        return
    count = states.count("Enabled")
    with pytest.raises(UsageError, match=f"have {count} subscriptions") as caught:
        aks.subscription_of(None)
    listed = "Add one:\n  --subscription 0   name 0\n  --subscription 1   name 1"
    assert caught.value.hint == (listed if count else "Ask for a role in a subscription, then: az login")


def test_a_list_of_azure_is_read_to_its_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: dict[str, Any] = {
        "/x": {"value": [1, 2], "nextLink": "https://x/2"},
        "https://x/2": {"value": None, "nextLink": "https://x/3"},
    }
    asked: list[str] = []

    def send(self: aks.Azure, method: str, path: str, what: str) -> Any:
        asked.append(f"{method} {path}")
        return pages.get(path, {"value": [3]}), None

    monkeypatch.setattr(aks.Azure, "send", send)
    found: list[Any] = aks.Azure("s", "eastus").list_all("/x", "list")
    assert found == [1, 2, 3]
    assert asked == ["GET /x", "GET https://x/2", "GET https://x/3"]


def test_an_answer_of_azure_tells_its_time_and_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    answer = SimpleNamespace(status_code=399, headers={"Date": "today"}, content=b'{"a": 1}')

    def send_request(request: Any, **options: Any) -> Any:
        sent.append((request.method, request.url, request.content, options))
        return answer

    monkeypatch.setattr(aks, "client", lambda: SimpleNamespace(send_request=send_request))
    monkeypatch.setattr("time.time", lambda: 5.0)
    monkeypatch.delenv("MLBENCH_AZURE_ENDPOINT", raising=False)
    monkeypatch.setenv("MLBENCH_CALL_SECONDS", "7")
    azure = aks.Azure("s", "eastus")
    assert azure.get("/subscriptions/s/resourcegroups/g", "show it") == {"a": 1}
    assert (azure.date, azure.asked) == ("today", 5.0)
    url = "https://management.azure.com/subscriptions/s/resourcegroups/g?api-version=2021-04-01"
    assert sent == [("GET", url, None, {"connection_timeout": 7.0, "read_timeout": 7.0})]
    answer.status_code, answer.content = 404, b'{"error": {"code": "ResourceNotFound", "message": "none"}}'
    with pytest.raises(NotFoundError, match='Azure refused to show it: "ResourceNotFound: none"'):
        azure.get("/subscriptions/s/resourcegroups/g", "show it")


# --- Google: machines and quotas ------------------------------------------------------------------------------------


class Offers:
    """A Compute Engine that has every machine with four vCPUs, or fails."""

    fails: Exception | None = None
    asked: ClassVar[list[Any]] = []

    def __init__(self, project: str) -> None:
        assert project == "demo"

    def check_offer(self, zone: str, machine: Machine) -> int:
        self.asked.append((zone, machine.name))
        if self.fails is not None:
            raise self.fails
        return 4

    def check_quotas(self, region: str, demands: Any, cpus: Any, others: Any, *, public_addresses: bool) -> list[str]:
        self.asked.append((region, list(cpus), dict(others), public_addresses))
        return ["a warning"]


DEMANDS = (Demand(Machine("e2-standard-2"), 2, 50, None), Demand(Machine("n1-standard-8"), 4, 100, None))


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> type[Offers]:
    kind = type("Offers", (Offers,), {"asked": []})
    monkeypatch.setattr(compute, "Compute", kind)
    return kind


def test_workers_are_looked_for_in_all_their_zones_and_system_machines_in_the_first(offers: type[Offers]) -> None:
    zones = ["us-east1-b", "us-east1-c"]
    assert compute.check_machines("demo", zones, DEMANDS, public_addresses=True) == ["a warning"]
    assert offers.asked == [
        ("us-east1-b", "e2-standard-2"),
        ("us-east1-b", "n1-standard-8"),
        ("us-east1-c", "n1-standard-8"),
        ("us-east1", [4, 4], {"NETWORKS": 0, "SUBNETWORKS": 0, "FIREWALLS": 0}, True),
    ]
    offers.asked.clear()
    compute.check_machines("demo", zones[:1], DEMANDS, public_addresses=False, networks=8)
    assert offers.asked[-1] == ("us-east1", [4, 4], {"NETWORKS": 8, "SUBNETWORKS": 8, "FIREWALLS": 8}, False)


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (UsageError("x"), True),
        (CapacityError("x"), True),
        (NotFoundError("x"), True),
        (TransientError("x"), True),
        (CredentialError("x", hint=gke.LOGIN), True),
        (CredentialError("x", hint=gke.SET_CLOCK), True),
        (CredentialError("x", hint="ask for the role"), False),
        (MlbenchError("x"), False),
    ],
)
def test_machines_that_may_not_be_looked_up_are_a_warning(
    offers: type[Offers], error: MlbenchError, is_raised: bool
) -> None:
    offers.fails = error
    zones = ["us-east1-b", "us-east1-c"]
    if is_raised:
        with pytest.raises(type(error)):
            compute.check_machines("demo", zones, DEMANDS, public_addresses=True)
        return
    assert compute.check_machines("demo", zones, DEMANDS, public_addresses=True) == [
        "Whether us-east1-b, us-east1-c has the machines and the quota allows them could not be checked: x"
    ]


@pytest.mark.parametrize(
    ("purchase", "limits", "names"),
    [
        (Purchase.ON_DEMAND, {"PREEMPTIBLE_CPUS": 9.0}, ("CPUS",)),
        (Purchase.SPOT, {"PREEMPTIBLE_CPUS": 9.0}, ("PREEMPTIBLE_CPUS",)),
        (Purchase.SPOT, {"PREEMPTIBLE_CPUS": 0.0}, ("CPUS",)),
        (Purchase.SPOT, {}, ("CPUS",)),
        (Purchase.FLEX_START, {"PREEMPTIBLE_CPUS": 0.0}, ("PREEMPTIBLE_CPUS",)),
        (Purchase.FLEX_START, {}, ("CPUS",)),
    ],
)
def test_the_quota_of_a_way_of_buying_is_googles(
    purchase: Purchase, limits: dict[str, float], names: tuple[str, ...]
) -> None:
    """Compute Engine's page on allocation quotas: spot machines use the standard quota without a preemptible one."""
    assert purchase.order_quotas("CPUS", limits) == names


def quotas_of(**items: tuple[float, float]) -> Any:
    """A Compute Engine with these quotas: limit and usage."""
    found = object.__new__(compute.Compute)
    found.project = "demo"
    listed = {name: {"metric": name, "limit": limit, "usage": usage} for name, (limit, usage) in items.items()}
    found.quotas = lambda region: listed  # type: ignore[method-assign]
    return found


def test_what_is_short_is_asked_for_on_top_of_the_limit() -> None:
    """With 20 of 24 CPUs in use, 16 more need a quota of 36."""
    found = quotas_of(CPUS=(24.0, 20.0), INSTANCES=(10.0, 9.0))
    demands = [Demand(Machine("n1-standard-8"), 2, 100, None)]
    with pytest.raises(CapacityError, match="CPUS has 4 of 24 left, 16 needed; INSTANCES has 1 of 10 left") as caught:
        found.check_quotas("us-east1", demands, [8], {}, public_addresses=False)
    assert "--quota-id CPUS-per-project-region --preferred-value 36" in str(caught.value.hint)
    assert "region=us-east1" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("demand", "quotas", "lacks"),
    [
        (Demand(Machine("n1-standard-8"), 2, 100, "pd-balanced"), {"SSD_TOTAL_GB": (199.0, 0.0)}, "SSD_TOTAL_GB"),
        (Demand(Machine("n1-standard-8"), 2, 100, "pd-balanced"), {"SSD_TOTAL_GB": (200.0, 0.0)}, None),
        (
            Demand(Machine("n4-standard-8"), 2, 100, "hyperdisk-balanced"),
            {"HDB_TOTAL_GB": (199.0, 0.0)},
            "HDB_TOTAL_GB",
        ),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"SSD_TOTAL_GB": (0.0, 0.0)}, None),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"IN_USE_ADDRESSES": (1.0, 0.0)}, "IN_USE_ADDRESSES"),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"INSTANCES": (1.0, 0.0)}, "INSTANCES"),
        (Demand(Machine("n1-standard-8"), 2, 100, None), {"CPUS_ALL_REGIONS": (15.0, 0.0)}, "CPUS_ALL_REGIONS"),
        (Demand(Machine("n1-standard-8"), 0, 100, None), {"INSTANCES": (0.0, 0.0), "CPUS": (0.0, 0.0)}, None),
        (Demand(Machine("n2-standard-8"), 2, 100, None), {"N2_CPUS": (15.0, 0.0), "CPUS": (99.0, 0.0)}, "N2_CPUS"),
        (Demand(Machine("n2-standard-8"), 2, 100, None), {"CPUS": (15.0, 0.0)}, "CPUS"),
        (
            Demand(Machine("g2-standard-8", "nvidia-l4", 1), 2, 9, None),
            {"NVIDIA_L4_GPUS": (1.0, 0.0)},
            "NVIDIA_L4_GPUS",
        ),
        (Demand(Machine("g2-standard-8", "nvidia-l4", 1), 2, 9, None), {"GPUS_ALL_REGIONS": (1.0, 0.0)}, "GPUS_ALL"),
    ],
)
def test_each_quota_is_compared_with_what_two_machines_take(
    demand: Demand, quotas: dict[str, tuple[float, float]], lacks: str | None
) -> None:
    found = quotas_of(**quotas)
    if lacks is None:
        found.check_quotas("us-east1", [demand], [8], {"NETWORKS": 0}, public_addresses=True)
        return
    with pytest.raises(CapacityError, match=lacks):
        found.check_quotas("us-east1", [demand], [8], {"NETWORKS": 0}, public_addresses=True)


@pytest.mark.parametrize(("limit", "is_enough"), [(8.0, True), (7.0, False)])
def test_networks_count_toward_their_quotas(limit: float, is_enough: bool) -> None:
    found, demands = quotas_of(NETWORKS=(limit, 0.0)), [Demand(Machine("n1-standard-8"), 1, 9, None)]
    if is_enough:
        assert found.check_quotas("us-east1", demands, [8], {"NETWORKS": 8}, public_addresses=True) == []
        return
    with pytest.raises(CapacityError, match="NETWORKS has 7 of 7 left, 8 needed"):
        found.check_quotas("us-east1", demands, [8], {"NETWORKS": 8}, public_addresses=True)
