"""Image registries that are created with a cluster, access to subnets and to AKS' API, and Azure's price list."""

import base64
import json
import uuid
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import yaml

from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster
from providers.aks import prices as aks_prices
from providers.aks import repository as aks
from providers.aks.kubeconfig import access_to
from providers.aks.machines import MACHINES
from providers.aks.subnet import SubnetAccess
from providers.base import Readiness, ResourceStatus, TransientError, registry_details
from providers.eks import repository as eks
from providers.gke import repository as gke
from providers.gke.end_timer import Project
from tests.unit.providers.test_aks_requests import CLUSTER_PATH, GROUP, SUBNET, SUBSCRIPTION, FakeAzure
from tests.unit.providers.test_aks_requests import make_plane as make_aks_plane
from tests.unit.providers.test_eks_requests import FakeAws
from tests.unit.providers.test_gke_requests import make_plane as make_gke_plane

DENIED = CredentialError("denied")
KEPT = {"keeps_images": True}

# --- GKE ------------------------------------------------------------------------------------------------------------

PARENT = "https://artifactregistry.googleapis.com/v1/projects/demo-project/locations/europe-west1/repositories"
URL = f"{PARENT}/mlbench-demo-2"
MACHINES_OF_12 = "serviceAccount:12-compute@developer.gserviceaccount.com"


class Registry:
    """Artifact Registry's answers by URL, without those to changes."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.changes: list[tuple[str, str, Any]] = []

    def ask(self, service: str, method: str, url: str, what: str, project: str, body: Any = None) -> Any:
        assert (service, project) == ("Artifact Registry", "demo-project")
        if method != "GET":
            self.changes.append((method, url, body))
        found = self.answers.get(f"{method} {url}", self.answers.get(url, NotFoundError("none")))
        if isinstance(found, list):
            found = found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    monkeypatch.delenv("MLBENCH_ARTIFACT_ENDPOINT", raising=False)
    monkeypatch.setattr("providers.gke.api.ask_rest", found.ask)
    monkeypatch.setattr(Project, "number", lambda self: "12")
    return found


def repository(details: Any = None, **options: Any) -> gke.ImageRepository:
    plane = make_gke_plane(**options)
    plane.cluster = Cluster("demo-2", "gke", details={"owner": "me", **(details or {})})
    return gke.ImageRepository(plane)


@pytest.mark.parametrize(
    ("labels", "details", "found"),
    [
        ({"mlbench-cluster": "demo-2"}, {}, ResourceStatus("there")),
        ({"mlbench-cluster": "other"}, {}, ResourceStatus("there", ours=False)),
        (None, {}, ResourceStatus("there", ours=False)),
        (
            {"mlbench-cluster": "demo-2"},
            KEPT,
            ResourceStatus(
                "there",
                kept="--keep-images; gcloud artifacts repositories delete mlbench-demo-2 --location europe-west1 "
                "--project demo-project   deletes it",
            ),
        ),
    ],
)
def test_a_repository_of_google_is_the_clusters_by_its_label(
    registry: Registry, labels: Any, details: Any, found: ResourceStatus
) -> None:
    assert repository(details).find() is None
    registry.answers[URL] = {"labels": labels}
    assert repository(details).find() == found


def test_the_request_of_a_repository_at_google(registry: Registry) -> None:
    registry.answers[f"{PARENT}?repositoryId=mlbench-demo-2"] = {}
    repository().create()
    labels = {"mlbench-cluster": "demo-2", "mlbench-owner": "me", "mlbench-location": "europe-west1-b"}
    body = {"format": "DOCKER", "description": "images of the mlbench cluster demo-2", "labels": labels}
    assert registry.changes == [("POST", f"{PARENT}?repositoryId=mlbench-demo-2", body)]


READER = {"role": "roles/artifactregistry.reader", "members": [MACHINES_OF_12]}
OTHER = {"role": "roles/artifactregistry.reader", "members": ["user:me"]}


@pytest.mark.parametrize(
    ("bindings", "written"),
    [
        ([READER], None),
        ([OTHER], [OTHER, READER]),
        ([{**READER, "role": "roles/viewer"}], [{**READER, "role": "roles/viewer"}, READER]),
        (None, [READER]),
    ],
)
def test_machines_may_read_the_repository_of_their_cluster(registry: Registry, bindings: Any, written: Any) -> None:
    assert repository().poll() == Readiness(False, "Google does not show it yet")
    registry.answers[URL] = {"labels": {}}
    registry.answers[f"{URL}:getIamPolicy"] = {} if bindings is None else {"bindings": list(bindings)}
    registry.answers[f"{URL}:setIamPolicy"] = {}
    assert repository().poll() == Readiness(True, facts={"registry_problem": None})
    expected = [("POST", f"{URL}:setIamPolicy", {"policy": {"bindings": written}})] if written else []
    assert registry.changes == expected


@pytest.mark.parametrize(
    ("options", "account"), [({}, "the machines' service account"), ({"service_account": "me@x"}, "me@x")]
)
def test_a_role_that_cannot_be_given_is_recorded_with_the_command(
    registry: Registry, options: Any, account: str
) -> None:
    registry.answers[URL] = {"labels": {}}
    registry.answers[f"{URL}:getIamPolicy"] = DENIED
    found = repository(**options).poll()
    assert found.ready
    problem = str(found.facts["registry_problem"])
    assert problem.startswith(f"denied Unless {account} has the role roles/artifactregistry.reader, pods cannot pull")
    assert "add-iam-policy-binding mlbench-demo-2 --location europe-west1 --project demo-project" in problem


def test_a_repository_that_is_kept_gets_a_label_beside_its_own(registry: Registry) -> None:
    registry.answers[URL] = {"labels": {"team": "x"}}
    registry.answers[f"PATCH {URL}?updateMask=labels"] = {}
    repository().keep()
    assert registry.changes == [
        ("PATCH", f"{URL}?updateMask=labels", {"labels": {"team": "x", "mlbench-kept": "true"}})
    ]
    repository().delete()  # absent is success
    assert registry.changes[-1] == ("DELETE", URL, None)


LOCATIONS = "https://artifactregistry.googleapis.com/v1/projects/demo-project/locations?pageSize=500"
OURS = {"name": "a", "labels": {"mlbench-cluster": "demo-2"}}


def test_repositories_of_all_regions_are_listed_but_those_that_are_kept(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [f"projects/demo-project/locations/{region}" for region in ("us-east1", "us-west1")]
    registry.answers[LOCATIONS] = {"locations": [{"name": place} for place in places]}
    kept = {"name": "b", "labels": {"mlbench-cluster": "demo-2", "mlbench-kept": "true"}}
    base = "https://artifactregistry.googleapis.com/v1"
    registry.answers[f"{base}/{places[0]}/repositories?pageSize=500"] = {"repositories": [OURS, kept, {"name": "c"}]}
    registry.answers[f"{base}/{places[1]}/repositories?pageSize=500"] = {}
    assert gke.list_repositories("demo-project") == [OURS]


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (CredentialError("SERVICE_DISABLED"), False),
        (CredentialError("Artifact Registry has not been used in project 12 before"), False),
        (DENIED, True),
        (MlbenchError("odd"), True),
    ],
)
def test_a_project_that_does_not_use_repositories_has_none(
    registry: Registry, error: Exception, is_raised: bool
) -> None:
    registry.answers[LOCATIONS] = error
    if not is_raised:
        assert gke.list_repositories("demo-project") == []
        return
    with pytest.raises(type(error)):
        gke.list_repositories("demo-project")


@pytest.mark.parametrize(("failures", "is_found"), [(1, True), (2, True), (3, False)])
def test_a_list_is_asked_for_three_times(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, failures: int, is_found: bool
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(gke, "time", SimpleNamespace(sleep=slept.append))
    registry.answers[LOCATIONS] = [*[TransientError("503")] * failures, {}]
    if is_found:
        assert gke.list_repositories("demo-project") == []
    else:
        with pytest.raises(TransientError):
            gke.list_repositories("demo-project")
    assert len(slept) == min(failures, 2)
    assert slept == sorted(slept)


# --- AKS ------------------------------------------------------------------------------------------------------------

IMAGES = f"{GROUP}-images"


def images(
    details: Any = None, answers: dict[str, Any] | None = None
) -> tuple[aks.ImageGroup, aks.ImageRegistry, FakeAzure]:
    azure = FakeAzure(answers)
    plane = make_aks_plane(azure)
    plane.cluster = plane.group.cluster = Cluster("demo-2", "aks", details=details or {}, location="eastus")
    group = aks.ImageGroup(plane.group)
    return group, aks.ImageRegistry(group, plane), azure


def test_the_name_of_a_registry_at_azure_is_unique_and_found_again() -> None:
    """Names of Azure's registries have 5 to 50 letters and digits, and are unique in the world."""
    name = aks.registry_name(SUBSCRIPTION, "eastus", "demo-2")
    assert name.isalnum()
    assert 5 <= len(name) <= 50
    assert name == aks.registry_name(SUBSCRIPTION.upper(), "EastUS", "Demo-2")
    text = f"{SUBSCRIPTION}/eastus/demo-2"
    assert name == "mlbench" + uuid.uuid5(uuid.NAMESPACE_URL, text).hex[:20]
    assert aks.registry_of(SUBSCRIPTION, "eastus", "demo-2") == f"{name}.azurecr.io/mlbench"
    assert len({aks.registry_name(SUBSCRIPTION, place, "demo-2") for place in ("eastus", "westus")}) == 2


def test_images_of_azure_have_a_group_that_may_outlive_the_cluster() -> None:
    group, registry, azure = images(KEPT, {IMAGES: {"tags": {"mlbench-cluster": "demo-2", "team": "x"}}})
    command = f"az group delete --name mlbench-demo-2-eastus-images --subscription {SUBSCRIPTION}"
    found = group.find()
    assert found is not None
    assert (found.ours, found.kept) == (True, f"--keep-images; {command}   deletes it")
    group.keep()
    tags = {"mlbench-cluster": "demo-2", "team": "x", "mlbench-kept": "true"}
    assert azure.changes == [("PATCH", IMAGES, {"tags": tags})]
    assert registry.goes_with is group
    assert registry.find() is None
    azure.answers[registry.path] = {}
    assert registry.find() == ResourceStatus(
        "Succeeded",
        kept=f"--keep-images; az acr delete --name {registry.name} --subscription {SUBSCRIPTION}   deletes it",
    )


def test_the_request_of_a_registry_at_azure() -> None:
    _, registry, _ = images()
    assert registry.request() == {
        "location": "eastus",
        "tags": {"mlbench-cluster": "demo-2"},
        "sku": {"name": "Basic"},
        "properties": {"adminUserEnabled": False},
    }


PLANE = {"properties": {"identityProfile": {"kubeletidentity": {"objectId": "machines"}}}}


def test_machines_may_pull_from_the_registry_of_their_cluster() -> None:
    _, registry, azure = images()
    azure.done = False
    azure.answers = {registry.path: {"properties": {"loginServer": "x.azurecr.io"}}, CLUSTER_PATH: PLANE}
    assert not registry.poll().ready
    azure.done = True
    assert registry.poll() == Readiness(False, "Azure does not show the machines' role yet")
    ((method, path, body),) = azure.changes
    assert method == "PUT"
    role = "7f951dda-4ed3-4680-a7ca-43fe172d538d"  # AcrPull, in Microsoft's list of built-in roles
    assert body["properties"]["roleDefinitionId"].endswith(f"/roleDefinitions/{role}")
    assert body["properties"]["principalId"] == "machines"
    azure.answers[path] = {}
    assert registry.poll() == Readiness(True, facts={"registry": "x.azurecr.io/mlbench"})
    azure.answers[registry.path] = {"properties": {}}
    assert registry.poll() == Readiness(True)


@pytest.mark.parametrize("profile", [None, {}, {"kubeletidentity": {}}, {"kubeletidentity": None}])
def test_machines_without_an_identity_are_asked_about_again(profile: Any) -> None:
    _, registry, azure = images()
    azure.answers = {registry.path: {}, CLUSTER_PATH: {"properties": {"identityProfile": profile}}}
    with pytest.raises(TransientError, match="does not show the identity of the machines"):
        registry.poll()


def test_without_the_right_to_assign_roles_another_registry_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    _, registry, azure = images()
    azure.answers = {registry.path: {}, CLUSTER_PATH: PLANE}

    def refuse(*_: Any) -> None:
        raise DENIED

    monkeypatch.setattr(azure, "change", refuse)
    with pytest.raises(CredentialError, match="denied") as caught:
        registry.poll()
    assert "--registry PREFIX" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(200, None), (401, CredentialError), (403, CredentialError), (400, MlbenchError), (500, MlbenchError)],
)
def test_a_login_at_azures_registry_is_a_token_for_a_token(
    monkeypatch: pytest.MonkeyPatch, status: int, kind: type[MlbenchError] | None
) -> None:
    sent: list[Any] = []

    def send(request: Any, server: str) -> Any:
        sent.append((request.method, request.url, parse_qs(request.content), server))
        return SimpleNamespace(status_code=status, text=lambda: "no", json=lambda: {"refresh_token": "r"})

    monkeypatch.setattr("providers.aks.api.get_token", lambda: "azure's token")
    monkeypatch.setattr("providers.aks.api.send_unsigned", send)
    if kind is None:
        assert aks.fetch_login("x.azurecr.io/mlbench") == ("00000000-0000-0000-0000-000000000000", "r")
    else:
        with pytest.raises(MlbenchError, match=r"The registry x\.azurecr\.io") as caught:
            aks.fetch_login("x.azurecr.io/mlbench")
        assert type(caught.value) is kind
    form = {"grant_type": ["access_token"], "service": ["x.azurecr.io"], "access_token": ["azure's token"]}
    assert sent == [("POST", "https://x.azurecr.io/oauth2/exchange", form, "The registry x.azurecr.io")]


# --- AKS: subnet and kubeconfig -------------------------------------------------------------------------------------

NETWORK = f"{GROUP}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/mlbench-network"


def test_the_identity_of_a_cluster_gets_its_role_on_the_subnet_before_the_cluster() -> None:
    azure = FakeAzure({NETWORK: {"properties": {"principalId": "p-1"}}})
    access = SubnetAccess(make_aks_plane(azure).group, SUBNET)
    assert access.name == "mlbench-demo-2-eastus/n"
    assert access.find() is None
    assert access.describe_wait() is None
    access.create()
    assert access.describe_wait() == "its identity has no role on the subnet yet"
    assert access.poll() == Readiness(False, "Azure does not show its role yet")
    (_, (method, path, body)) = azure.changes
    assert (method, path.partition("/providers/Microsoft.Authorization")[0]) == ("PUT", SUBNET)
    role = "4d97b98b-1d4f-4787-a291-c67834d212e7"  # Network Contributor
    assert body["properties"]["roleDefinitionId"].endswith(f"/roleDefinitions/{role}")
    azure.answers[path] = {}
    assert access.find() == ResourceStatus("has its role")
    assert access.poll().ready
    assert access.describe_wait() is None
    access.delete()
    assert azure.changes[-1] == ("DELETE", path, None)
    assert access.remove_command == f"az role assignment delete --ids {path}"


def test_a_role_on_the_subnet_that_may_not_be_assigned_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    azure = FakeAzure({NETWORK: {"properties": {"principalId": "p-1"}}})
    access = SubnetAccess(make_aks_plane(azure).group, SUBNET)

    def change(method: str, path: str, what: str, body: Any = None) -> None:
        if "roleAssignments" in path:
            raise CredentialError("denied", details={"x": 1})

    monkeypatch.setattr(azure, "change", change)
    with pytest.raises(CredentialError, match="denied") as caught:
        access.create()
    assert "Network Contributor" in str(caught.value.hint)
    assert caught.value.details == {"x": 1}


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Sender(FakeAzure):
    """An AKS that gives out kubeconfigs, one after the other."""

    def __init__(self, *documents: Any) -> None:
        super().__init__()
        self.documents = list(documents)
        self.requests: list[tuple[str, str]] = []

    def send(self, method: str, path: str, what: str, body: Any = None) -> Any:
        self.requests.append((method, path))
        found = self.documents.pop(0)
        return {"kubeconfigs": [] if found is None else [{"value": encode(yaml.safe_dump(found))}]}, None


def kubeconfig(**user: str) -> Any:
    cluster = {"server": "https://demo.azmk8s.io", "certificate-authority-data": encode("ca")}
    return {"clusters": [{"cluster": cluster}], "users": [{"user": user}]}


def test_access_to_aks_is_by_the_certificate_or_the_token_of_its_kubeconfig() -> None:
    certificate = {"client-certificate-data": encode("cert"), "client-key-data": encode("key")}
    azure = Sender(kubeconfig(**certificate), kubeconfig(token="t"))
    access = access_to(azure, CLUSTER_PATH)
    assert access.server == "https://demo.azmk8s.io"
    assert azure.requests == [("POST", f"{CLUSTER_PATH}/listClusterUserCredential")]
    source: Any = access.token
    first = source.credential()
    assert source.credential() is first
    source.discard(first.pem)
    second = source.credential()
    assert (first.token, first.certificate, first.key) == (None, b"cert", b"key")
    assert (second.token, second.certificate, second.key) == ("t", None, None)
    assert len(azure.requests) == 2  # the first is used once


@pytest.mark.parametrize(
    ("document", "kind", "says"),
    [
        (None, NotFoundError, "no kubeconfig"),
        ({}, TransientError, "is not complete yet"),
        ({"clusters": [], "users": []}, TransientError, "is not complete yet"),
        ({"clusters": [{"cluster": {"server": "x"}}], "users": [{"user": {}}]}, TransientError, "is not complete yet"),
        ("text", TransientError, "is not complete yet"),
    ],
)
def test_a_kubeconfig_of_aks_that_is_not_complete_is_asked_for_again(
    document: Any, kind: type[MlbenchError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        access_to(Sender(document), CLUSTER_PATH)


def test_a_cluster_without_local_accounts_has_no_credentials_for_mlbench() -> None:
    access = access_to(Sender(kubeconfig(exec="kubelogin")), CLUSTER_PATH)
    source: Any = access.token
    with pytest.raises(CredentialError, match="local accounts are disabled"):
        source.credential()


# --- AKS: prices ----------------------------------------------------------------------------------------------------


def item(price: float, name: str = "D4s v5", size: str = "Standard_D4s_v5", **more: Any) -> dict[str, Any]:
    return {
        "type": "Consumption",
        "unitOfMeasure": "1 Hour",
        "productName": "Virtual Machines Dsv5 Series",
        "skuName": name,
        "armSkuName": size,
        "retailPrice": price,
        **more,
    }


@pytest.fixture
def price_list(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Azure's pages by URL; `asked` has the filters as a person reads them."""
    found: dict[str, Any] = {"asked": [], "first": {"Items": []}}

    def send(request: Any, server: str) -> Any:
        _, _, wanted = unquote(request.url).partition("$filter=")
        found["asked"].append(wanted)
        page = found["first"] if wanted else found[request.url]
        status = page if isinstance(page, int) else 200
        return SimpleNamespace(status_code=status, content=json.dumps(page), text=lambda: "busy")

    monkeypatch.delenv("MLBENCH_AZURE_PRICES_ENDPOINT", raising=False)
    monkeypatch.setattr("providers.aks.api.send_unsigned", send)
    return found


def test_the_price_of_a_machine_is_the_first_of_its_way_of_buying(price_list: dict[str, Any]) -> None:
    price_list["first"] = {
        "Items": [item(9.0, type="Reservation"), item(0.1, "D4s v5 Spot"), item(0.0), item(0.2)],
        "NextPageLink": "",
    }
    assert aks_prices.ask_price("Standard_D4s_v5", "eastus", False) == 0.2
    assert aks_prices.ask_price("Standard_D4s_v5", "eastus", True) == 0.1
    assert price_list["asked"][0] == (
        "serviceName eq 'Virtual Machines' and armRegionName eq 'eastus' and (armSkuName eq 'Standard_D4s_v5')"
    )


def test_further_pages_of_the_price_list_are_read(price_list: dict[str, Any]) -> None:
    price_list["first"] = {"Items": [], "NextPageLink": "https://prices.azure.com/2"}
    price_list["https://prices.azure.com/2"] = {"Items": [item(0.2)], "NextPageLink": None}
    assert aks_prices.ask_price("Standard_D4s_v5", "eastus", False) == 0.2


def test_a_price_list_that_does_not_answer_leaves_a_price_unknown(price_list: dict[str, Any]) -> None:
    price_list["first"] = 400
    assert aks_prices.ask_price("Standard_D4s_v5", "eastus", False) is None
    with pytest.raises(TransientError, match="status 400: busy"):
        aks_prices.fetch_prices(["eastus"])


def test_all_machines_of_the_table_are_asked_for_in_short_requests(price_list: dict[str, Any]) -> None:
    price_list["first"] = {"Items": [item(0.2), item(0.1, "D4s v5 Spot"), item(5.0, "D4s v5 Low Priority")]}
    found = aks_prices.fetch_prices(["eastus", "westus"])
    assert found.on_demand == {region: {"Standard_D4s_v5": 0.2} for region in ("eastus", "westus")}
    assert found.spot == {region: {"Standard_D4s_v5": 0.1} for region in ("eastus", "westus")}
    counts = [wanted.count("armSkuName eq") for wanted in price_list["asked"]]
    assert sum(counts) == 2 * len(MACHINES)
    assert max(counts) == 12
    # A URL that servers accept everywhere has up to 2,000 characters.
    assert max(map(len, price_list["asked"])) < 1500


# --- EKS ------------------------------------------------------------------------------------------------------------

ARN = "arn:aws:ecr:r-1:12:repository/mlbench-demo-2"


def ecr(details: Any = None, **answers: Any) -> tuple[eks.ImageRepository, FakeAws]:
    aws = FakeAws(**answers)
    cluster = Cluster("demo-2", "eks", details=details or {})
    return eks.ImageRepository(SimpleNamespace(aws=aws, cluster=cluster)), aws  # type: ignore[arg-type]


DESCRIBED = {"repositories": [{"repositoryArn": ARN, "repositoryUri": "12.dkr.ecr.r-1.amazonaws.com/mlbench-demo-2"}]}


@pytest.mark.parametrize(
    ("owner", "details", "found"),
    [
        ("demo-2", {}, ResourceStatus("there")),
        ("other", {}, ResourceStatus("there", ours=False)),
        (
            "demo-2",
            KEPT,
            ResourceStatus(
                "there",
                kept="--keep-images; aws ecr delete-repository --region r-1 --repository-name mlbench-demo-2 --force"
                "   deletes it",
            ),
        ),
    ],
)
def test_a_repository_of_aws_is_the_clusters_by_its_tag(owner: str, details: Any, found: ResourceStatus) -> None:
    tags = {"tags": [{"Key": "mlbench-cluster", "Value": owner}]}
    repository, aws = ecr(details, describe_repositories=DESCRIBED, list_tags_for_resource=tags)
    assert repository.find() == found
    assert aws.calls == [
        ("ecr", "describe_repositories", {"repositoryNames": ["mlbench-demo-2"]}),
        ("ecr", "list_tags_for_resource", {"resourceArn": ARN}),
    ]


def test_a_repository_of_aws_from_its_request_to_its_deletion() -> None:
    repository, aws = ecr(describe_repositories=NotFoundError("none"), delete_repository=NotFoundError("none"))
    assert repository.find() is None
    assert repository.poll() == Readiness(False, "AWS does not show it yet")
    repository.create()
    tags = [{"Key": "mlbench-cluster", "Value": "demo-2"}]
    assert aws.calls[-1] == ("ecr", "create_repository", {"repositoryName": "mlbench-demo-2", "tags": tags})
    repository.delete()
    assert aws.calls[-1] == ("ecr", "delete_repository", {"repositoryName": "mlbench-demo-2", "force": True})
    aws.answers["describe_repositories"] = DESCRIBED
    found = repository.poll()
    # Tasks are tags of the one repository.
    assert (found.ready, found.facts) == (True, {"registry": "12.dkr.ecr.r-1.amazonaws.com/mlbench-demo-2:"})


@pytest.mark.parametrize(("token", "login"), [("AWS:secret:x", ("AWS", "secret:x")), ("secret", None)])
def test_the_login_of_ecr_is_user_and_password(token: str, login: tuple[str, str] | None) -> None:
    aws = FakeAws(get_authorization_token={"authorizationData": [{"authorizationToken": encode(token)}]})
    if login is not None:
        assert eks.fetch_login(aws) == login
        return
    with pytest.raises(MlbenchError, match="USER:PASSWORD"):
        eks.fetch_login(aws)


def test_a_registry_that_is_no_prefix_is_refused() -> None:
    for registry in ("-x", "a b", "", "é"):
        with pytest.raises(UsageError, match="is not an image prefix"):
            registry_details(registry)
    assert registry_details("auto") == {"registry_made": True}
    assert registry_details(None) == {}
