"""The whole report of `mlbench doctor` for each cloud, line by line, from the cloud's answers."""

import datetime
import fnmatch
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers import doctor
from providers.aks import doctor as aks
from providers.aks import rights as aks_rights
from providers.checks import Check
from providers.doctor import Checklist, check_clusters, check_library, check_prices, check_program
from providers.eks import doctor as eks
from providers.gke import doctor as gke
from providers.gke import rights as gke_rights
from tests.fakes.aws_operations import check_operation

NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)
DATE = "Sat, 21 Nov 2026 12:00:00 GMT"
Line = tuple[str, str, str]


def lines(checks: Any) -> list[Line]:
    """What each line of the report says, without hints."""
    return [(check.what, check.state, check.found) for check in checks]


def line(checks: Any, what: str) -> Check:
    (found,) = [check for check in checks if check.what == what]
    assert isinstance(found, Check)
    return found


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the oldest libraries that work, the clouds' programs, and seven prices for every region."""
    versions = {"google-cloud-container": "2.65.0", "boto3": "1.40", "azure-identity": "1.25.0"}
    monkeypatch.setattr("providers.doctor.metadata.version", versions.__getitem__)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")

    def load_prices(cloud: str) -> Any:
        return SimpleNamespace(count_prices=lambda region: 7, source=f"a table of {cloud}")

    monkeypatch.setattr("providers.pricing.load_prices", load_prices)


# --- what all clouds share ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "module"), [("gcloud", gke), ("gke", gke), ("aws", eks), ("aks", aks)])
def test_the_clouds_own_name_selects_its_checks(monkeypatch: pytest.MonkeyPatch, name: str, module: Any) -> None:
    asked: list[tuple[str | None, str | None]] = []
    check = Check("x", "ok", "y")

    def run_checks(project: str | None, place: str | None) -> list[Check]:
        asked.append((project, place))
        return [check]

    monkeypatch.setattr(module, "run_checks", run_checks)
    assert list(doctor.run_checks(name, "p", "z")) == [check]
    assert asked == [("p", "z")]


@pytest.mark.parametrize(("name", "near"), [("gkee", "gke"), ("gclod", "gcloud")])
def test_a_cloud_without_checks_is_refused_with_those_that_have_some(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f'no checks for "{name}", only for gke, eks, aks.*"{near}"'):
        list(doctor.run_checks(name, None, None))


def test_a_provider_that_costs_nothing_has_no_checks() -> None:
    with pytest.raises(UsageError, match='no checks for "kind"'):
        list(doctor.run_checks("kind", None, None))


def ask(error: MlbenchError | None, **options: bool) -> tuple[list[Check], str | None]:
    def question() -> str:
        if error is not None:
            raise error
        return "answer"

    asking = Checklist("gke").ask("API x", question, **options)
    found: list[Check] = []
    try:
        while True:
            found.append(next(asking))
    except StopIteration as end:
        return found, end.value


def test_an_answer_adds_no_line_of_its_own() -> None:
    assert ask(None) == ([], "answer")


def test_an_error_is_a_line_with_its_hint_and_its_exit_code() -> None:
    error = CredentialError("denied", hint="ask")
    assert ask(error) == ([Check("gke API x", "failed", "denied", "ask", 3)], None)
    assert ask(error, optional=True) == ([Check("gke API x", "missing", "denied", "ask", 3)], None)
    assert ask(DeadlineError("late"))[0] == [Check("gke API x", "failed", "late", None, 124)]


def test_a_line_without_an_error_behind_it_fails_like_a_wrong_command_line() -> None:
    assert Checklist("eks").result("x", "y", "z", missing=True) == Check("eks x", "missing", "y", "z", 2)
    assert Checklist("eks").result("x", "y") == Check("eks x", "ok", "y", None, 2)


def test_missing_rights_come_with_the_commands_that_print_them() -> None:
    found = Checklist("aks").rights(["b", "a"], "all", "your roles lack")
    assert (found.what, found.state, found.found) == ("aks rights", "missing", "your roles lack b, a")
    assert "mlbench doctor aks --policy" in str(found.hint)
    assert Checklist("aks").rights([], "all", "your roles lack") == Check("aks rights", "ok", "all")


def test_twelve_missing_rights_are_ten_and_two_more() -> None:
    found = Checklist("aks").rights([str(number) for number in range(12)], "all", "lacks").found
    assert found == "lacks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


@pytest.mark.parametrize(
    ("version", "floor", "state"),
    [
        *(("1.40", "1.40", "ok"), ("1.40.0", "1.40", "ok"), ("1.39.9", "1.40", "failed"), ("2.0", "1.40", "ok")),
        *(("1.40rc1", "1.40", "failed"), ("1.41.dev3", "1.40", "ok"), ("1", "1.40", "failed")),
    ],
)
def test_a_library_is_old_if_its_version_is_below_the_floor(
    monkeypatch: pytest.MonkeyPatch, version: str, floor: str, state: str
) -> None:
    monkeypatch.setattr("providers.doctor.metadata.version", lambda package: version)
    found = check_library(Checklist("eks"), "boto3", floor, "eks")
    assert (found.what, found.state) == ("eks library", state)
    assert found.found == (f"boto3 {version}" if state == "ok" else f"boto3 {version}, older than {floor}")
    assert ("--upgrade" in str(found.hint)) == (state == "failed")


def test_a_library_that_is_not_installed_is_named() -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("providers.doctor.metadata.version", missing)
        found = check_library(Checklist("eks"), "boto3", "1.40", "eks")
    assert (found.state, found.found, found.exit_code) == ("failed", "no boto3", 2)
    assert "--upgrade" not in str(found.hint)


def test_a_program_that_hints_name_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_program(Checklist("gke"), "gcloud", "hints") == Check("gke gcloud", "ok", "/bin/gcloud")
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = check_program(Checklist("gke"), "gcloud", "hints name it")
    assert (found.state, found.found) == ("missing", "not on PATH")
    assert found.hint == "Not needed by mlbench; hints name it."


def test_prices_are_counted_with_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = check_prices(Checklist("gke"), "gke", "us-east1")
    assert (found.what, found.state, found.found) == ("gke prices", "ok", "7 known in us-east1; a table of gke")

    def damaged(provider: str) -> None:
        raise UsageError("the table is damaged")

    monkeypatch.setattr("providers.pricing.load_prices", damaged)
    assert lines(check_prices(Checklist("gke"), "gke", "us-east1")) == [
        ("gke prices", "failed", "the table is damaged")
    ]


def cluster(name: str, state: str = "ready", **details: Any) -> Cluster:
    return Cluster(name, "gke", state, details=details)


def test_clusters_are_listed_and_those_that_should_be_gone_are_named_once() -> None:
    found = [
        cluster("a-1"),
        cluster("late-2", expires=1),
        cluster("half-3", "failed"),
        cluster("both-4", "failed", expires=1),
    ]
    (check,) = check_clusters(Checklist("gke"), lambda: found)
    assert check.found == "4 of ours: a-1, late-2, half-3, both-4"
    assert check.state == "missing"
    assert check.hint == "mlbench gc   removes late-2, both-4, half-3"


def test_no_clusters_and_clusters_in_use_are_both_in_order() -> None:
    assert lines(check_clusters(Checklist("gke"), list)) == [("gke clusters", "ok", "0 of ours")]
    (check,) = check_clusters(Checklist("gke"), lambda: [cluster("a-1", "creating")])
    assert (check.state, check.found, check.hint) == ("ok", "1 of ours: a-1", None)


def test_a_cloud_that_does_not_list_clusters_is_a_failed_line() -> None:
    def refuse() -> list[Cluster]:
        raise CredentialError("denied")

    assert lines(check_clusters(Checklist("gke"), refuse)) == [("gke clusters", "failed", "denied")]


# --- GKE ------------------------------------------------------------------------------------------------------------


class Account:
    """Credentials as google-auth has them: the module names the kind."""

    __module__ = "google.oauth2.service_account"
    service_account_email = "me@demo.iam"


def channel(name: str, *versions: str, default: str = "") -> Any:
    return SimpleNamespace(channel=SimpleNamespace(name=name), valid_versions=versions, default_version=default)


class Google:
    """A project in which everything is allowed, and what the test changes of it."""

    def __init__(self) -> None:
        self.granted = {"a.get", "b.create"}
        self.bindings: Any = [
            {"role": "roles/editor", "members": ["serviceAccount:12-compute@developer.gserviceaccount.com", "user:x"]},
            {"role": "roles/viewer", "members": ["serviceAccount:12-compute@developer.gserviceaccount.com"]},
        ]
        self.config: Any = SimpleNamespace(
            channels=[
                channel("RAPID", "1.35.0"),
                channel("REGULAR", "1.34.1-gke.5", "1.34.0-gke.1", "1.33.6-gke.2", default="1.33.6-gke.2"),
            ],
            valid_master_versions=["1.32.9-gke.1"],
            default_cluster_version="1.31.1",
        )
        self.gpus: Any = ["nvidia-tesla-t4", "nvidia-l4"]
        self.quotas: Any = {
            "NVIDIA_L4_GPUS": {"limit": 8.0, "usage": 2.0},
            "PREEMPTIBLE_NVIDIA_L4_GPUS": {"limit": 0.0, "usage": 0.0},
            "GPUS_ALL_REGIONS": {"limit": 1.0, "usage": 0.0},
            "SSD_TOTAL_GB": {"limit": 500.0, "usage": 499.5},
            "CPUS": {"limit": 24.0, "usage": 24.0},
            "NETWORKS": {"limit": 5.0, "usage": 1.0},
        }
        self.asked: list[Any] = []

    def answer(self, found: Any, *what: Any) -> Any:
        self.asked.append(what)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Google:
    world = Google()

    class Gke:
        def __init__(self, project: str, location: str) -> None:
            self.project, self.location, self.parent = project, location, f"projects/{project}/locations/{location}"

        def call(self, method: str, **request: Any) -> Any:
            return world.answer(world.config, method, request)

    class Project:
        def __init__(self, found: Gke) -> None:
            self.name = found.project

        def list_granted(self, wanted: list[str]) -> Any:
            return world.answer(world.granted, "granted", wanted)

        def read_policy(self) -> Any:
            return world.answer(
                world.bindings if isinstance(world.bindings, Exception) else {"bindings": world.bindings}
            )

        def number(self) -> str:
            return "12"

    class Compute:
        date, asked = DATE, NOW.timestamp()

        def __init__(self, project: str) -> None:
            self.project = project

        def quotas(self, region: str) -> Any:
            return world.answer(world.quotas, "quotas", region)

        def gpus(self, place: str) -> Any:
            return world.answer(world.gpus, "gpus", place)

    for name, value in (("Gke", Gke), ("Project", Project), ("Compute", Compute)):
        monkeypatch.setattr(gke, name, value)
    monkeypatch.setattr("providers.gke.repository.Project", Project)
    monkeypatch.setattr(gke, "role_of", lambda command: {"includedPermissions": ["a.get", "b.create"]})
    monkeypatch.setattr(gke, "discover_clusters", lambda project, place: world.answer([], "clusters", project, place))
    monkeypatch.setattr("providers.gke.api.project_of", lambda project: project or "demo")
    monkeypatch.setattr("providers.gke.api.token", lambda: lambda: "token")
    monkeypatch.setattr("providers.gke.api.credentials", lambda: (Account(), "demo"))
    return world


def test_the_report_of_a_google_project(google: Google) -> None:
    assert lines(gke.run_checks(None, None)) == [
        ("gke library", "ok", "google-cloud-container 2.65.0"),
        ("gke credentials", "ok", "service account me@demo.iam, project demo"),
        ("gke rights", "ok", "IAM grants all 2 permissions"),
        ("gke default node account", "ok", "12-compute@developer.gserviceaccount.com has roles/editor"),
        ("gke API container", "ok", "enabled and responding for europe-west1-b"),
        ("gke Kubernetes", "ok", "1.34, 1.33 in the channel regular, 1.33.6-gke.2 by default"),
        ("gke clusters", "ok", "0 of ours"),
        ("gke API compute", "ok", "enabled"),
        ("gke clock", "ok", "right"),
        ("gke GPUs", "ok", "in europe-west1-b: nvidia-tesla-t4, nvidia-l4"),
        ("gke quota CPUS", "missing", "0 of 24 left"),
        ("gke quota SSD_TOTAL_GB", "ok", "0.5 of 500 left"),
        ("gke quota GPUS_ALL_REGIONS", "ok", "1 of 1 left"),
        ("gke quota NVIDIA_L4_GPUS", "ok", "6 of 8 left"),
        ("gke quota PREEMPTIBLE_NVIDIA_L4_GPUS", "missing", "0 of 0 left"),
        ("gke prices", "ok", "7 known in europe-west1; a table of gke"),
        ("gke gcloud", "ok", "/bin/gcloud"),
    ]
    assert ("get_server_config", {"name": "projects/demo/locations/europe-west1-b"}) in google.asked
    assert ("quotas", "europe-west1") in google.asked
    assert ("clusters", "demo", "-") in google.asked


def test_the_checks_of_gke_are_about_the_project_and_place_that_are_asked_for(google: Google) -> None:
    checks = list(gke.run_checks("other", "us-east1-c"))
    assert line(checks, "gke credentials").found.endswith("project other")
    assert line(checks, "gke GPUs").found.startswith("in us-east1-c: ")
    assert line(checks, "gke prices").found.startswith("7 known in us-east1;")
    assert "project=other" in str(line(checks, "gke quota CPUS").hint)


def test_what_a_google_project_lacks_is_missing_and_the_rest_is_checked(google: Google) -> None:
    google.granted = {"a.get"}
    google.bindings = [{"role": "roles/viewer", "members": ["serviceAccount:12-compute@developer.gserviceaccount.com"]}]
    google.gpus, google.quotas = [], {}
    checks = list(gke.run_checks(None, None))
    assert line(checks, "gke rights").found == "IAM would deny b.create"
    account = line(checks, "gke default node account")
    assert (account.state, account.found) == (
        "missing",
        "12-compute@developer.gserviceaccount.com has no node role",
    )
    assert "add-iam-policy-binding demo --member serviceAccount:12-compute@" in str(account.hint)
    assert lines([line(checks, "gke GPUs")]) == [("gke GPUs", "missing", "in europe-west1-b: none")]
    assert lines([line(checks, "gke quota of GPUs")]) == [("gke quota of GPUs", "missing", "the project has none")]
    assert checks[-1].what == "gke gcloud"


@pytest.mark.parametrize("role", ["roles/container.defaultNodeServiceAccount", "roles/owner"])
def test_a_role_with_which_machines_can_pull_images_is_enough(google: Google, role: str) -> None:
    google.bindings = [{"role": role, "members": ["serviceAccount:12-compute@developer.gserviceaccount.com"]}]
    account = line(gke.run_checks(None, None), "gke default node account")
    assert (account.state, account.hint) == ("ok", None)
    google.bindings[0]["members"] = ["user:me"]
    assert line(gke.run_checks(None, None), "gke default node account").state == "missing"


def test_without_the_channel_regular_the_zones_own_versions_count(google: Google) -> None:
    google.config.channels = []
    assert line(gke.run_checks(None, None), "gke Kubernetes").found == "1.32 in the channel regular, 1.31.1 by default"
    google.config.default_cluster_version = ""
    assert line(gke.run_checks(None, None), "gke Kubernetes").found == "1.32 in the channel regular"


def test_credentials_of_a_person_have_no_account(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    person = type("Credentials", (), {"__module__": "google.oauth2.credentials", "account": ""})
    monkeypatch.setattr("providers.gke.api.credentials", lambda: (person(), None))
    assert line(gke.run_checks(None, None), "gke credentials").found == "credentials, project demo"


DENIED = CredentialError("denied", hint="ask")


def test_google_is_checked_as_far_as_possible(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("granted", "bindings", "config", "quotas"):
        setattr(google, name, DENIED)
    assert lines(gke.run_checks(None, None))[2:] == [
        ("gke rights", "missing", "denied"),
        ("gke default node account", "missing", "denied"),
        ("gke API container", "failed", "denied"),
        ("gke API compute", "failed", "denied"),
        ("gke prices", "ok", "7 known in europe-west1; a table of gke"),
        ("gke gcloud", "ok", "/bin/gcloud"),
    ]


def test_a_zone_whose_gpus_are_unknown_has_its_quotas_all_the_same(google: Google) -> None:
    google.gpus = UsageError("us-east1 is a region.")
    checks = list(gke.run_checks(None, "us-east1"))
    assert line(checks, "gke GPUs").state == "missing"
    assert line(checks, "gke quota NVIDIA_L4_GPUS").state == "ok"


def test_without_library_or_credentials_google_is_not_asked(google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(project: str | None) -> str:
        raise DENIED

    monkeypatch.setattr("providers.gke.api.project_of", refuse)
    assert lines(gke.run_checks(None, None))[1:] == [("gke credentials", "failed", "denied")]
    monkeypatch.setattr("providers.doctor.metadata.version", lambda package: "2.64.9")
    (found,) = gke.run_checks(None, None)
    assert (found.what, found.state) == ("gke library", "failed")
    assert "mlbench-cli[gke]" in str(found.hint)
    assert google.asked == []


# --- AKS ------------------------------------------------------------------------------------------------------------

ROOT = "/subscriptions/s-1"


def offer(name: str, family: str, refused: str | None = None) -> Any:
    return SimpleNamespace(name=name, family=family, refused=refused)


class Azure:
    """A subscription: answers by path."""

    def __init__(self) -> None:
        states = {service: {"registrationState": "Registered"} for service in aks.SERVICES}
        self.answers: dict[str, Any] = {
            ROOT: {"displayName": "Demo", "state": "Enabled"},
            **{f"{ROOT}/providers/{service}": state for service, state in states.items()},
            f"{ROOT}/providers/Microsoft.Authorization/permissions": [{"actions": ["*"]}],
        }
        self.versions: Any = {"1.34": ["1.34.1"], "1.33": []}
        self.offers: Any = {
            "standard_nc4as_t4_v3": offer("Standard_NC4as_T4_v3", "standardNCASv3_T4Family"),
            "standard_nc24ads_a100_v4": offer(
                "Standard_NC24ads_A100_v4", "StandardNCADSA100v4Family", "NotAvailableForSubscription"
            ),
            "standard_d2s_v5": offer("Standard_D2s_v5", "standardDSv5Family"),
        }
        self.quotas: Any = {
            "cores": {"limit": 10, "currentValue": 4},
            "lowprioritycores": {"limit": "3", "currentValue": "3"},
            "standardncasv3_t4family": {"limit": 8, "currentValue": 0},
            "standarddsv5family": {"limit": 8, "currentValue": 0},
        }
        self.opened: list[tuple[str, str]] = []


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Azure:
    world = Azure()

    def answer(found: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    class Client:
        date, asked = DATE, NOW.timestamp()

        def __init__(self, subscription: str, location: str) -> None:
            world.opened.append((subscription, location))
            self.subscription, self.location, self.root = subscription, location, f"/subscriptions/{subscription}"

        def get(self, path: str, what: str) -> Any:
            return answer(world.answers[path.partition("?")[0]])

        list_all = get

    monkeypatch.setattr(aks, "Azure", Client)
    monkeypatch.setattr("providers.aks.api.subscription_of", lambda given: given or "s-1")
    monkeypatch.setattr(
        aks, "role_of", lambda command: {"Actions": ["Microsoft.Network/publicIPAddresses/read", "b/c"]}
    )
    monkeypatch.setattr(aks, "list_versions", lambda found: answer(world.versions))
    monkeypatch.setattr(aks, "list_offers", lambda found: answer(world.offers))
    monkeypatch.setattr(aks, "list_quotas", lambda found: answer(world.quotas))
    monkeypatch.setattr(aks, "discover_clusters", lambda subscription, place: [] if place is None else [cluster("x")])
    return world


def test_the_report_of_an_azure_subscription(azure: Azure) -> None:
    assert lines(aks.run_checks(None, None)) == [
        ("aks library", "ok", "azure-identity 1.25.0"),
        ("aks credentials", "ok", 'subscription s-1 "Demo", Enabled'),
        ("aks clock", "ok", "right"),
        ("aks rights", "ok", "your roles grant all 2 actions"),
        ("aks Microsoft.ContainerService", "ok", "Registered"),
        ("aks Microsoft.Compute", "ok", "Registered"),
        ("aks Microsoft.Network", "ok", "Registered"),
        ("aks Microsoft.ManagedIdentity", "ok", "Registered"),
        ("aks Microsoft.ContainerRegistry", "ok", "Registered"),
        ("aks Kubernetes", "ok", "1.34, 1.33 in eastus"),
        ("aks clusters", "ok", "0 of ours"),
        ("aks GPUs", "ok", "in eastus: Standard_NC4as_T4_v3; not for this subscription: Standard_NC24ads_A100_v4"),
        ("aks quota cores", "ok", "6 of 10 vCPUs left"),
        ("aks quota lowPriorityCores", "missing", "0 of 3 vCPUs left"),
        ("aks quota standardNCASv3_T4Family", "ok", "8 of 8 vCPUs left"),
        ("aks prices", "ok", "7 known in eastus; a table of aks"),
        ("aks az", "ok", "/bin/az"),
    ]
    assert azure.opened == [("s-1", "eastus")]


def test_what_a_subscription_lacks_is_missing_and_the_rest_is_checked(azure: Azure) -> None:
    azure.answers[ROOT] = {"displayName": "Demo", "state": "Disabled"}
    azure.answers[f"{ROOT}/providers/Microsoft.Compute"] = {"registrationState": "NotRegistered"}
    permissions = [{"actions": ["*/read", "b/*"], "notActions": ["b/c"]}]
    azure.answers[f"{ROOT}/providers/Microsoft.Authorization/permissions"] = permissions
    azure.versions, azure.offers = {}, {}
    checks = list(aks.run_checks(None, None))
    assert lines([line(checks, "aks credentials")]) == [
        ("aks credentials", "missing", 'subscription s-1 "Demo", Disabled')
    ]
    assert line(checks, "aks rights").found == "your roles lack b/c"
    service = line(checks, "aks Microsoft.Compute")
    assert (service.state, service.found) == ("missing", "NotRegistered")
    assert "Needed for machines: az provider register" in str(service.hint)
    assert lines([line(checks, "aks Kubernetes")]) == [("aks Kubernetes", "missing", "none in eastus")]
    assert lines([line(checks, "aks GPUs")]) == [("aks GPUs", "missing", "in eastus: none")]
    assert line(checks, "aks quota cores").state == "ok"


def test_a_subscription_without_a_state_is_enabled(azure: Azure) -> None:
    azure.answers[ROOT] = {"displayName": "Demo"}
    assert line(aks.run_checks(None, None), "aks credentials").state == "ok"


def test_azure_is_checked_as_far_as_possible(azure: Azure) -> None:
    azure.answers = {path: DENIED if path != ROOT else answer for path, answer in azure.answers.items()}
    azure.versions = azure.offers = DENIED
    services = [(f"aks {service}", "missing", "denied") for service in aks.SERVICES]
    assert lines(aks.run_checks(None, None))[3:] == [
        ("aks rights", "missing", "denied"),
        *services,
        ("aks Kubernetes", "failed", "denied"),
        ("aks clusters", "ok", "0 of ours"),
        ("aks GPUs", "missing", "denied"),
        ("aks prices", "ok", "7 known in eastus; a table of aks"),
        ("aks az", "ok", "/bin/az"),
    ]


def test_quotas_of_azure_that_may_not_be_read_are_one_line(azure: Azure) -> None:
    azure.quotas = DENIED
    checks = list(aks.run_checks("s-1", "westus"))
    assert lines([line(checks, "aks quotas")]) == [("aks quotas", "missing", "denied")]
    assert line(checks, "aks prices").found == "7 known in westus; a table of aks"


def test_without_credentials_the_checks_of_azure_end(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    azure.answers[ROOT] = DENIED
    assert lines(aks.run_checks(None, None))[1:] == [("aks credentials", "failed", "denied")]

    def refuse(given: str | None) -> str:
        raise UsageError("several subscriptions")

    monkeypatch.setattr("providers.aks.api.subscription_of", refuse)
    assert lines(aks.run_checks(None, None))[1:] == [("aks credentials", "failed", "several subscriptions")]
    monkeypatch.setattr("providers.doctor.metadata.version", lambda package: "1.24.9")
    (found,) = aks.run_checks(None, None)
    assert (found.what, found.state) == ("aks library", "failed")
    assert "mlbench-cli[aks]" in str(found.hint)


# --- EKS ------------------------------------------------------------------------------------------------------------

CALLER = "arn:aws:iam::123456789012:user/me"


class Aws:
    """An account: answers by operation. The simulator decides as IAM does, by the policies that the caller has."""

    region = "eu-west-1"

    def __init__(self) -> None:
        headers = {"HTTPHeaders": {"date": DATE}}
        self.answers: dict[str, Any] = {
            "get_caller_identity": {"Arn": CALLER, "Account": "123456789012", "ResponseMetadata": headers},
            "describe_stacks": {},
            "list_clusters": {},
            "describe_availability_zones": {},
            "describe_scaling_activities": {},
            "describe_cluster_versions": [
                {"clusterVersion": "1.35", "versionStatus": "STANDARD_SUPPORT", "defaultVersion": True},
                {"clusterVersion": "1.34", "versionStatus": "STANDARD_SUPPORT"},
                {"clusterVersion": "1.31", "versionStatus": "EXTENDED_SUPPORT"},
            ],
            "describe_instance_type_offerings": [
                {"InstanceType": name} for name in ("g5.xlarge", "g4dn.xlarge", "g5.2xlarge")
            ],
        }
        self.quotas: dict[str, Any] = {}
        self.policy: list[Any] = eks.load_policy()["Statement"]
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def call(self, service: str, operation: str, **parameters: Any) -> Any:
        check_operation(service, operation)
        self.calls.append((service, operation, parameters))
        if operation == "get_service_quota":
            found = self.quotas.get(parameters["QuotaCode"], 5.0)
            answer: Any = found if isinstance(found, Exception) else {"Quota": {"Value": found}}
        else:
            answer = self.answers[operation]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> list[Any]:
        if operation == "simulate_principal_policy":
            assert (service, key) == ("iam", "EvaluationResults")
            self.calls.append((service, operation, parameters))
            return [
                {"EvalActionName": name, "EvalDecision": self.decide(name, parameters)}
                for name in parameters["ActionNames"]
            ]
        return list(self.call(service, operation, **parameters))

    def decide(self, action: str, parameters: dict[str, Any]) -> str:
        context = {item["ContextKeyName"]: item["ContextKeyValues"] for item in parameters["ContextEntries"]}
        (resource,) = parameters["ResourceArns"]
        for statement in self.policy:
            actions = statement["Action"]
            needed = statement.get("Condition", {}).get("StringEquals", {})
            if (
                any(fnmatch.fnmatchcase(action, name) for name in ([actions] if isinstance(actions, str) else actions))
                and fnmatch.fnmatchcase(resource, statement["Resource"])
                and all(set(context.get(key, ())) & set(values) for key, values in needed.items())
            ):
                return "allowed"
        return "implicitDeny"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    world = Aws()

    def region_of(asked: str | None, zone: str | None = None) -> str:
        world.calls.append(("", "region_of", {"asked": asked, "zone": zone}))
        return "eu-west-1"

    monkeypatch.setattr(eks, "region_of", region_of)
    monkeypatch.setattr(eks, "aws_in", lambda region: world)
    monkeypatch.setattr(eks, "discover_clusters", lambda region: [] if region == "eu-west-1" else [cluster("x")])
    monkeypatch.setattr("time.time", NOW.timestamp)
    return world


def test_the_report_of_an_aws_account(aws: Aws) -> None:
    checks = lines(eks.run_checks(None, "eu-west-1"))
    count = len({name for item in aws.policy for name in eks.list_actions(item) if "*" not in name})
    assert [found for found in checks if not found[0].startswith("eks quota")] == [
        ("eks library", "ok", "boto3 1.40"),
        ("eks region", "ok", "eu-west-1"),
        ("eks credentials", "ok", f"{CALLER}, account 123456789012"),
        ("eks clock", "ok", "right"),
        ("eks API cloudformation", "ok", "allowed"),
        ("eks API eks", "ok", "allowed"),
        ("eks API ec2", "ok", "allowed"),
        ("eks API autoscaling", "ok", "allowed"),
        ("eks rights", "ok", f"IAM allows all {count} actions"),
        ("eks Kubernetes", "ok", "1.34, 1.35 with standard support, 1.35 by default"),
        ("eks GPUs", "ok", "machines of g4dn, g5"),
        ("eks clusters", "ok", "0 of ours"),
        ("eks prices", "ok", "7 known in eu-west-1; a table of eks"),
        ("eks aws", "ok", "/bin/aws"),
    ]


def test_the_quotas_of_an_account_are_asked_for_by_their_codes(aws: Aws) -> None:
    """The codes and units are those of Service Quotas: G and VT are counted in vCPUs, networks in VPCs."""
    aws.quotas = {"L-DB2E81BA": 0.0, "L-F678F1CE": 1.0, "L-1194D53C": 1234567.0, "L-3819A6DF": DENIED}
    checks = [found for found in eks.run_checks(None, None) if found.what.startswith("eks quota")]
    found = {check.what.removeprefix("eks quota "): (check.state, check.found) for check in checks}
    assert found["G and VT vCPUs"] == ("missing", "0 in all (L-DB2E81BA)")
    assert found["G and VT vCPUs spot"] == ("missing", "denied")
    assert found["VPCs"] == ("ok", "1 in all (L-F678F1CE)")
    assert found["EKS clusters"] == ("ok", "1.23457e+06 in all (L-1194D53C)")
    assert found["standard vCPUs spot"] == ("ok", "5 in all (L-34B43A08)")
    asked = {each["QuotaCode"]: each["ServiceCode"] for _, name, each in aws.calls if name == "get_service_quota"}
    assert asked["L-F678F1CE"] == "vpc"
    assert asked["L-1194D53C"] == "eks"
    assert asked["L-0263D0A3"] == "ec2"
    assert asked["L-1216C47A"] == "ec2"
    assert "servicequotas" in str(next(check.hint for check in checks if check.state == "missing"))


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        (None, {"asked": None, "zone": None}),
        ("eu-west-1", {"asked": "eu-west-1", "zone": None}),
        ("eu-west-1b", {"asked": None, "zone": "eu-west-1b"}),
    ],
)
def test_a_place_that_ends_with_a_letter_is_a_zone(aws: Aws, place: str | None, asked: dict[str, Any]) -> None:
    list(eks.run_checks(None, place))
    assert aws.calls[0] == ("", "region_of", asked)


def test_the_printed_policy_allows_all_that_is_simulated(aws: Aws) -> None:
    list(eks.run_checks(None, None))
    simulated = [each for _, name, each in aws.calls if name == "simulate_principal_policy"]
    assert {each["PolicySourceArn"] for each in simulated} == {CALLER}
    resources = {each["ResourceArns"][0] for each in simulated}
    assert resources == {
        "*",
        "arn:aws:ecr:eu-west-1:123456789012:repository/mlbench-doctor",
        "arn:aws:iam::123456789012:role/mlbench-doctor",
    }
    contexts = [each["ContextEntries"] for each in simulated if each["ContextEntries"]]
    assert [context[0]["ContextKeyValues"] for context in contexts] == [
        ["eks.amazonaws.com"],
        ["eks-nodegroup.amazonaws.com"],
        ["autoscaling.amazonaws.com"],
        ["spot.amazonaws.com"],
        ["elasticloadbalancing.amazonaws.com"],
    ]
    assert {context[0]["ContextKeyType"] for context in contexts} == {"string"}


@pytest.mark.parametrize(
    ("statement", "first"),
    [("Images", "ecr:BatchCheckLayerAvailability"), ("RolesOfServices", "iam:CreateServiceLinkedRole")],
)
def test_what_a_part_of_the_policy_would_allow_is_denied_without_it(aws: Aws, statement: str, first: str) -> None:
    aws.policy = [item for item in aws.policy if item["Sid"] != statement]
    found = line(eks.run_checks(None, None), "eks rights")
    assert found.state == "missing"
    assert found.found.startswith(f"IAM would deny {first}")
    assert str(found.hint).startswith("mlbench doctor eks --policy ")


def test_one_service_role_that_may_not_be_created_is_enough_to_be_denied(aws: Aws) -> None:
    role = next(item for item in aws.policy if item["Sid"] == "RolesOfServices")
    services = role["Condition"]["StringEquals"]["iam:AWSServiceName"]
    aws.policy = [
        *(item for item in aws.policy if item is not role),
        {**role, "Condition": {"StringEquals": {"iam:AWSServiceName": services[1:]}}},
    ]
    assert line(eks.run_checks(None, None), "eks rights").found == "IAM would deny iam:CreateServiceLinkedRole"


def test_actions_are_simulated_fifty_at_a_time(aws: Aws) -> None:
    actions = [f"ec2:Action{number:02}" for number in range(51)]
    statement: Any = {"Sid": "x", "Action": actions, "Resource": "*"}
    aws.policy = [{**statement, "Action": actions[:50]}]
    assert eks._simulate(aws, CALLER, [statement], CALLER) == {"ec2:Action50"}  # type: ignore[arg-type]
    assert [len(each["ActionNames"]) for _, _, each in aws.calls] == [50, 1]


SESSION = "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Dev_1/me"
ROLE = "arn:aws:iam::123456789012:role/aws-reserved/sso.amazonaws.com/eu-west-1/AWSReservedSSO_Dev_1"


@pytest.mark.parametrize(
    ("caller", "answer", "principal"),
    [
        (CALLER, None, CALLER),
        (SESSION, {"Role": {"Arn": ROLE}}, ROLE),
        (SESSION, DENIED, "arn:aws:iam::123456789012:role/AWSReservedSSO_Dev_1"),
        (SESSION, NotFoundError("none"), "arn:aws:iam::123456789012:role/AWSReservedSSO_Dev_1"),
        (
            "arn:aws-cn:sts::123456789012:assumed-role/dev/i-1",
            DENIED,
            "arn:aws-cn:iam::123456789012:role/dev",
        ),
        ("arn:aws:sts::123456789012:federated-user/me", None, "arn:aws:sts::123456789012:federated-user/me"),
    ],
)
def test_the_policies_of_a_session_are_those_of_its_role(aws: Aws, caller: str, answer: Any, principal: str) -> None:
    aws.answers["get_role"] = answer
    assert eks.find_principal(aws, caller) == principal  # type: ignore[arg-type]
    if answer is not None:
        assert aws.calls == [("iam", "get_role", {"RoleName": caller.split("/")[1]})]


@pytest.mark.parametrize(
    ("pattern", "example"),
    [
        ("*", "*"),
        ("arn:aws:iam::*:role/mlbench-*", "arn:aws-cn:iam::123456789012:role/mlbench-doctor"),
        ("arn:aws:ecr:*:*:repository/mlbench-*", "arn:aws-cn:ecr:cn-north-1:123456789012:repository/mlbench-doctor"),
    ],
)
def test_an_example_of_a_resource_is_in_the_callers_account_and_partition(pattern: str, example: str) -> None:
    """IAM has no regions: its ARNs have an empty one."""
    caller = "arn:aws-cn:iam::123456789012:user/me"
    assert eks._example_resource(pattern, "cn-north-1", caller) == example


def test_an_account_whose_rights_are_unknown_is_checked_further(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> list[Any]:
        raise DENIED

    monkeypatch.setattr(aws, "pages", refuse)
    aws.answers["describe_stacks"] = DENIED
    checks = {found.what: (found.state, found.found) for found in eks.run_checks(None, None)}
    assert checks["eks rights"] == ("missing", "denied")
    assert checks["eks API cloudformation"] == ("failed", "denied")
    assert checks["eks API eks"] == ("ok", "allowed")
    assert checks["eks Kubernetes"] == ("failed", "denied")
    assert checks["eks GPUs"] == ("missing", "denied")
    assert checks["eks aws"] == ("ok", "/bin/aws")


def test_a_region_without_gpus_and_versions_without_a_default(aws: Aws) -> None:
    aws.answers["describe_instance_type_offerings"] = []
    for item in aws.answers["describe_cluster_versions"]:
        item.pop("defaultVersion", None)
    checks = list(eks.run_checks(None, None))
    assert lines([line(checks, "eks GPUs")]) == [("eks GPUs", "missing", "machines of no family")]
    assert line(checks, "eks GPUs").hint == "Choose another --region."
    assert line(checks, "eks Kubernetes").found == "1.34, 1.35 with standard support"


def test_gpus_are_looked_for_by_the_names_of_the_table(aws: Aws) -> None:
    list(eks.run_checks(None, None))
    (asked,) = [each for _, name, each in aws.calls if name == "describe_instance_type_offerings"]
    (names,) = asked["Filters"]
    assert names["Name"] == "instance-type"
    assert {"g4dn.xlarge", "p5.48xlarge"} <= set(names["Values"])


def test_a_wrong_clock_is_told_by_the_answer_of_aws(aws: Aws) -> None:
    aws.answers["get_caller_identity"]["ResponseMetadata"]["HTTPHeaders"]["date"] = "Sat, 21 Nov 2026 11:58:59 GMT"
    found = line(eks.run_checks(None, None), "eks clock")
    assert (found.state, found.found, found.exit_code) == ("failed", "61 s ahead of the cloud's", 3)
    del aws.answers["get_caller_identity"]["ResponseMetadata"]
    assert line(eks.run_checks(None, None), "eks clock").found == "the cloud sent no date"


def test_without_a_region_or_credentials_aws_is_not_asked_further(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    aws.answers["get_caller_identity"] = DENIED
    assert lines(eks.run_checks(None, None))[1:] == [
        ("eks region", "ok", "eu-west-1"),
        ("eks credentials", "failed", "denied"),
    ]

    def refuse(asked: str | None, zone: str | None = None) -> str:
        raise UsageError("no region")

    monkeypatch.setattr(eks, "region_of", refuse)
    assert lines(eks.run_checks(None, None))[1:] == [("eks region", "failed", "no region")]
    monkeypatch.setattr("providers.doctor.metadata.version", lambda package: "1.39")
    (found,) = eks.run_checks(None, None)
    assert (found.what, found.state) == ("eks library", "failed")
    assert "mlbench-cli[eks]" in str(found.hint)


def test_the_policy_of_a_command_has_only_its_actions() -> None:
    """`ec2:Describe*` of the whole policy becomes the calls that the command makes."""
    whole, part = eks.load_policy(), eks.policy_of("list-clusters")
    assert part["Version"] == whole["Version"] == "2012-10-17"
    statements = {item["Sid"]: item for item in part["Statement"]}
    assert set(statements) == {"Look"}
    assert {**statements["Look"], "Action": None} == {
        "Sid": "Look", "Effect": "Allow", "Action": None, "Resource": "*",
    }  # fmt: skip
    assert "ec2:DescribeVpcs" in statements["Look"]["Action"]
    assert not any("*" in action for action in statements["Look"]["Action"])


# --- rights ---------------------------------------------------------------------------------------------------------


def test_the_role_of_a_command_is_a_document_that_gcloud_and_az_take() -> None:
    google = gke_rights.role_of("list-clusters")
    assert {**google, "includedPermissions": None} == {
        "title": "mlbench list-clusters",
        "description": "What mlbench list-clusters needs",
        "stage": "GA",
        "includedPermissions": None,
    }
    assert "container.clusters.list" in google["includedPermissions"]
    azure = aks_rights.role_of("list-clusters")
    assert {**azure, "Actions": None} == {
        "Name": "mlbench list-clusters",
        "Description": "What mlbench list-clusters needs",
        "AssignableScopes": ["/subscriptions/SUBSCRIPTION"],
        "Actions": None,
    }
    assert "Microsoft.ContainerService/managedClusters/read" in azure["Actions"]


def test_the_role_of_all_commands_has_no_command_in_its_name() -> None:
    google, azure = gke_rights.role_of(None), aks_rights.role_of(None)
    assert (google["title"], google["description"]) == ("mlbench", "What all commands of mlbench need")
    assert (azure["Name"], azure["Description"]) == ("mlbench", "What all commands of mlbench need")
    assert set(gke_rights.role_of("list-clusters")["includedPermissions"]) < set(google["includedPermissions"])
    with pytest.raises(UsageError, match="permissions of Google"):
        gke_rights.role_of("list-cluster")
    with pytest.raises(UsageError, match=r'rights at Azure.*"list-clusters"'):
        aks_rights.role_of("list-cluster")


@pytest.mark.parametrize(
    ("granted", "denied"),
    [
        ([], ["A/b/read", "A/c/write"]),
        ([{"actions": ["*"]}], []),
        ([{"actions": ["a/B/*"]}], ["A/c/write"]),
        ([{"actions": ["*/read"]}, {"actions": ["A/c/*"]}], []),
        ([{"actions": ["*"], "notActions": ["A/c/*"]}], ["A/c/write"]),
        ([{"actions": ["*"], "notActions": ["A/c/*"]}, {"actions": ["A/c/write"]}], []),
        ([{"actions": None, "notActions": None}], ["A/b/read", "A/c/write"]),
        ([{"dataActions": ["*"]}], ["A/b/read", "A/c/write"]),
    ],
)
def test_an_action_of_azure_is_allowed_by_any_role_that_does_not_take_it_away(granted: Any, denied: list[str]) -> None:
    """Azure RBAC is additive: notActions subtract only from the actions of the same role."""
    assert aks_rights.list_denied(["A/b/read", "A/c/write"], granted) == denied
