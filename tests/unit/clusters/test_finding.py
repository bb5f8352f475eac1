"""Which clusters a name means, where clouds are searched, and whose cluster it is."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.clusters import manage
from mlbench_cli.clusters.changes import find_again
from mlbench_cli.clusters.manage import (
    describe_search_error,
    discover_clusters,
    find_cluster,
    find_record,
    is_known,
    require_account,
    require_free_name,
    search_everywhere,
    search_scope,
)
from mlbench_cli.errors import CredentialError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.run import Cluster, ClusterIdentity
from mlbench_cli.storage.store import Store
from providers import registry
from providers.base import PartialSearchError

Scope = Mapping[str, str]


class Cloud:
    """A provider that finds some clusters wherever it is asked to look, or raises."""

    def __init__(self, *found: Cluster, error: MlbenchError | None = None) -> None:
        self.found, self.error = list(found), error
        self.scopes: list[dict[str, str]] = []

    def discover(self, scope: Scope) -> Sequence[Cluster]:
        self.scopes.append(dict(scope))
        if self.error is not None:
            raise self.error
        return self.found


class CloudOfAccounts(Cloud):
    """The same with today's account."""

    account = "111"

    def find_account(self, cluster: Cluster) -> str:
        if not self.account:
            raise CredentialError("No login.")
        return self.account


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def clouds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Cloud]:
    """The clouds gke, eks and aks, which find nothing."""
    made: dict[str, Cloud] = {name: Cloud() for name in ("gke", "eks", "aks")}

    def load(name: str) -> Cloud:
        return made[registry.ALIASES.get(name, name)]

    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(registry, "creators", lambda: made)
    return made


def gke(name: str = "lab-2", location: str = "near", account: str = "me", **details: Any) -> Cluster:
    return Cluster(name, "gke", account=account, location=location, details=details)


def eks(name: str = "aws-2", location: str = "eu-west-1", account: str = "111") -> Cluster:
    return Cluster(name, "eks", account=account, location=location)


UNUSED = {"configured": False}


# --- searching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("project", "location", "scope"),
    [
        (None, None, {}),
        ("me", None, {"project": "me"}),
        ("", "near", {"location": "near"}),
        ("me", "near", {"project": "me", "location": "near"}),
    ],
)
def test_the_scope_of_a_search(project: str | None, location: str | None, scope: dict[str, str]) -> None:
    assert search_scope(project, location) == scope


def test_all_clouds_are_searched_and_what_fails_is_told(clouds: dict[str, Cloud]) -> None:
    clouds["gke"].found = [gke()]
    clouds["eks"].error = CredentialError("No login.")
    clouds["aks"].error = PartialSearchError("Far does not answer.", [Cluster("part-2", "aks")])
    found, errors = discover_clusters(None, {"location": "near"})
    assert [cluster.name for cluster in found] == ["lab-2", "part-2"]
    assert errors == {"eks": clouds["eks"].error, "aks": clouds["aks"].error}
    assert clouds["gke"].scopes == [{"location": "near"}]
    assert [describe_search_error(name, error) for name, error in errors.items()] == [
        "eks was not searched: No login.",
        "aks was not searched as a whole: Far does not answer.",
    ]


def test_a_cloud_that_is_named_must_be_searchable(clouds: dict[str, Cloud]) -> None:
    clouds["eks"].error = CredentialError("No login.")
    with pytest.raises(CredentialError):
        discover_clusters(["gke", "eks"], {})
    assert discover_clusters(["gke"], {}) == ([], {})
    assert clouds["aks"].scopes == []


def test_without_any_cloud_there_is_nothing_to_search(clouds: dict[str, Cloud]) -> None:
    for cloud in clouds.values():
        cloud.error = CredentialError("No login.", details=UNUSED)
    with pytest.raises(
        UsageError, match=r"No provider can be searched: gke: No login\.; eks: No login\.; aks: "
    ) as caught:
        discover_clusters(None, {})
    assert caught.value.hint == "mlbench doctor"
    clouds["aks"].error = CredentialError("Expired.")  # it was set up
    assert set(discover_clusters(None, {})[1]) == {"gke", "eks", "aks"}


def test_a_cloud_that_was_never_set_up_hides_no_clusters(clouds: dict[str, Cloud], store: Store) -> None:
    clouds["eks"].error = CredentialError("No login.", details=UNUSED)
    clouds["aks"].error = CredentialError("Expired.")
    assert search_everywhere(store, None, {}).blind == ["aks"]
    store.record_cluster(eks())
    assert "eks" in search_everywhere(store, None, {}).blind


def test_other_projects_of_the_store_are_searched_too(clouds: dict[str, Cloud], store: Store) -> None:
    clouds["gke"].found = [gke()]
    for cluster in (gke(), gke("old-2", account="other"), gke("older-2", account="other"), eks()):
        store.record_cluster(cluster)
    found = search_everywhere(store, None, {"location": "near"})
    assert [cluster.name for cluster in found.found] == ["lab-2"]  # each cluster once
    assert clouds["gke"].scopes == [{"location": "near"}, {"location": "near", "project": "other"}]
    assert clouds["eks"].scopes == [{"location": "near"}]  # credentials of AWS are those of one account
    search_everywhere(store, ["eks"], {})
    assert len(clouds["gke"].scopes) == 2
    search_everywhere(store, None, {"project": "me"})
    assert clouds["gke"].scopes[2:] == [{"project": "me"}]


def test_a_project_that_does_not_answer_is_blind(clouds: dict[str, Cloud], store: Store) -> None:
    store.record_cluster(gke(account="other"))
    answers: list[Any] = [[], PartialSearchError("Far is silent.", [gke("part-2", account="other")])]

    def discover(scope: Scope) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    clouds["gke"].discover = discover  # type: ignore[method-assign]
    found = search_everywhere(store, ["gke"], {})
    assert found.blind == ["gke project other"]
    assert list(found.errors) == ["gke project other"]
    assert [cluster.name for cluster in found.found] == ["part-2"]


def test_a_cluster_that_has_ended_by_itself_is_still_listed(clouds: dict[str, Cloud], store: Store) -> None:
    late, early = int(time.time()) - 60, int(time.time()) + 60
    for cluster in (
        gke("late-2", expires=late),
        gke("early-2", expires=early),
        gke("never-2"),
        gke("there-2", expires=late),
    ):
        store.record_cluster(cluster)
    clouds["gke"].found = [gke("there-2", expires=late)]
    assert [cluster.name for cluster in search_everywhere(store, None, {}).found] == ["there-2", "late-2"]
    assert [cluster.name for cluster in search_everywhere(store, ["eks"], {}).found] == []
    clouds["gke"].error = CredentialError("No login.")  # it may well be there
    assert search_everywhere(store, None, {}).found == []


def test_accounts_that_todays_credentials_do_not_show_are_blind(clouds: dict[str, Cloud], store: Store) -> None:
    clouds["eks"] = cloud = CloudOfAccounts()
    for cluster in (eks(), eks("b-2", account="222"), eks("c-2", account="222"), eks("d-2", account="")):
        store.record_cluster(cluster)
    assert search_everywhere(store, None, {}).blind == ["eks account 222"]
    assert search_everywhere(store, ["gke"], {}).blind == []
    cloud.account = ""
    assert search_everywhere(store, ["eks"], {}).blind == ["eks account 111", "eks account 222"]


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_known_cluster_is_found_by_its_name(clouds: dict[str, Cloud], store: Store) -> None:
    store.record_cluster(gke())
    assert find_cluster(store, "lab-2", None, {}).identity == gke().identity
    assert find_cluster(store, "lab-2", "gcloud", {"location": "near"}).identity == gke().identity
    assert clouds["gke"].scopes == [{"project": "me"}]  # for others of the name, unless the place was given


def test_a_cluster_of_another_provider_is_not_meant(clouds: dict[str, Cloud], store: Store) -> None:
    store.record_cluster(gke())
    with pytest.raises(UsageError, match='The cluster "lab-2" is one of gke, not of aws') as caught:
        find_cluster(store, "lab-2", "aws", {})
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("mlbench delete-cluster gke lab-2")


def test_an_unknown_name_says_how_to_find_others(clouds: dict[str, Cloud], store: Store) -> None:
    store.record_cluster(gke())
    with pytest.raises(NotFoundError, match=r'There is no cluster "lab-3"\. Did you mean "lab-2"') as caught:
        find_cluster(store, "lab-3", None, {})
    assert "put its provider's name before it" in (caught.value.hint or "")
    with pytest.raises(NotFoundError, match=r'There is no cluster "lab-2" in far, away\.'):
        find_cluster(store, "lab-2", None, {"project": "far", "location": "away"})


def test_a_cluster_of_another_machine_is_found_by_its_provider(clouds: dict[str, Cloud], store: Store) -> None:
    clouds["gke"].found = [gke("other-2"), gke("lab-2")]
    assert find_cluster(store, "lab-2", "gke", {}).identity == gke().identity
    with pytest.raises(NotFoundError, match='gke has no mlbench cluster "lab-9" in near, complete') as caught:
        find_cluster(store, "lab-9", "gke", {"location": "near"})
    assert caught.value.details == {"found": ["lab-2", "other-2"]}
    assert 'Did you mean "lab-2"' in caught.value.message


def test_a_search_that_was_not_complete_does_not_say_no(clouds: dict[str, Cloud], store: Store) -> None:
    clouds["gke"].error = PartialSearchError("Far is silent.", [gke("lab-2")])
    assert find_cluster(store, "lab-2", "gke", {}).name == "lab-2"
    with pytest.raises(PartialSearchError, match=r'It is not known whether there is a cluster "x-1"\. Far') as caught:
        find_cluster(store, "x-1", "gke", {})
    assert caught.value.hint == "Repeat the command, or specify the place: --zone ZONE, --region REGION"


def test_one_of_several_clusters_of_a_name_must_be_chosen(clouds: dict[str, Cloud], store: Store) -> None:
    store.record_cluster(gke())
    clouds["gke"].found = [gke(), gke(location="far"), gke("other-2")]
    with pytest.raises(UsageError) as caught:
        find_cluster(store, "lab-2", None, {})
    assert caught.value.message == '2 mlbench clusters are called "lab-2": gke in near of me; gke in far of me.'
    assert caught.value.hint is not None
    assert caught.value.hint.splitlines()[0] == "Specify which one:"
    assert len(caught.value.hint.splitlines()) == 3
    place = {"provider": "gke", "account": "me", "name": "lab-2"}
    assert caught.value.details == {"clusters": [{**place, "location": "near"}, {**place, "location": "far"}]}
    assert find_cluster(store, "lab-2", None, {"location": "near"}).location == "near"


@pytest.mark.parametrize("error", [CredentialError("No login."), PartialSearchError("Silent.", [])])
def test_a_known_cluster_is_found_although_its_cloud_is_silent(
    clouds: dict[str, Cloud], store: Store, error: MlbenchError
) -> None:
    store.record_cluster(gke())
    clouds["gke"].error = error
    assert find_cluster(store, "lab-2", None, {}).name == "lab-2"


def test_clusters_without_a_place_have_no_namesakes(clouds: dict[str, Cloud], store: Store) -> None:
    store.record_cluster(gke(location="", account=""))
    assert find_cluster(store, "lab-2", None, {}).location == ""
    assert clouds["gke"].scopes == []


def test_a_name_is_free_unless_another_cluster_bears_it(store: Store) -> None:
    store.record_cluster(gke())
    require_free_name(store, gke())
    require_free_name(store, gke("lab-3"))
    require_free_name(store, gke(account=""))  # an unknown account may be the same
    with pytest.raises(UsageError) as caught:
        require_free_name(store, gke(location="far"))
    assert caught.value.message == (
        'There is already a cluster "lab-2" in near of me (ready); its resources there cost money until it is deleted.'
    )
    with pytest.raises(UsageError, match='There is already a cluster "lab-2" of the provider gke'):
        require_free_name(store, Cluster("lab-2", "eks"))


@pytest.mark.parametrize("provider", ["attached", "slurm", "hosts"])
def test_an_attached_cluster_costs_nothing(store: Store, provider: str) -> None:
    store.record_cluster(Cluster("lab-2", provider, location="near"))
    with pytest.raises(UsageError, match=f'There is already a cluster "lab-2" of the provider {provider}'):
        require_free_name(store, Cluster("lab-2", provider, location="far"))


def test_a_cluster_without_a_place_is_in_this_data_directory(store: Store) -> None:
    store.record_cluster(Cluster("lab-2", "gke", account="me"))
    with pytest.raises(UsageError, match='a cluster "lab-2" in this data directory of me '):
        require_free_name(store, Cluster("lab-2", "gke", account="me", location="far"))


def test_a_cluster_is_known_by_its_identity_and_an_unknown_account_matches_all() -> None:
    known = [ClusterIdentity("gke", "me", "near", "lab-2"), ClusterIdentity("eks", "", "eu-west-1", "aws-2")]
    assert is_known(gke(), known)
    assert is_known(gke(account=""), known)
    assert is_known(eks(account="999"), known)
    assert not is_known(gke(location="far"), known)
    assert not is_known(gke(account="you"), known)
    assert not is_known(gke(), [])


def test_the_record_of_a_deleted_cluster_is_found(store: Store) -> None:
    store.record_cluster(gke())
    assert find_record(store, "lab-2").identity == gke().identity
    with pytest.raises(NotFoundError):
        find_record(store, "lab-9")


def test_todays_credentials_must_be_those_of_the_cluster() -> None:
    cloud: Any = CloudOfAccounts()
    require_account(cloud, eks())
    require_account(cloud, eks(account=""))
    plain: Any = Cloud()
    require_account(plain, eks(account="222"))
    with pytest.raises(CredentialError) as caught:
        require_account(cloud, eks(account="222"))
    assert caught.value.message == (
        'The cluster "aws-2" is in the account 222; today\'s credentials are those of 111, so it cannot be found.'
    )
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Use credentials of 222, then repeat: mlbench delete-cluster eks aws-2")


def test_a_login_becomes_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "Eva.Müller" + "x" * 99)
    assert manage.owner_name() == "eva-m-ller" + "x" * 53

    def fail() -> str:
        raise KeyError("no such user")

    monkeypatch.setattr("getpass.getuser", fail)
    assert manage.owner_name() == "unknown"


def test_a_cluster_is_looked_at_again_in_its_own_place(clouds: dict[str, Cloud], store: Store) -> None:
    clouds["gke"].found = [gke("other-2"), gke(location="far"), gke(expires=7)]
    again = find_again(store, gke())
    assert again is not None
    assert again.details == {"expires": 7}
    assert clouds["gke"].scopes == [{"location": "near", "project": "me"}]
    clouds["gke"].found = []
    assert find_again(store, gke()) is None
    store.record_cluster(gke(expires=9))
    recorded = find_again(store, gke())
    assert recorded is not None
    assert recorded.details == {"expires": 9}
    clouds["gke"].error = PartialSearchError("Far is silent.", [gke(expires=7)])
    assert find_again(store, gke()) == gke(expires=7)
    clouds["gke"].error = PartialSearchError("Far is silent.", [])
    with pytest.raises(PartialSearchError):
        find_again(store, gke())


@pytest.mark.parametrize(
    ("cluster", "scope", "is_in"),
    [
        (gke(), {}, True),
        (gke(), {"project": "me", "location": "near"}, True),
        (gke(), {"project": "another"}, False),
        (gke(account=""), {"project": "another"}, True),  # a record of an older version
        (eks(), {"project": "another"}, True),  # AWS has accounts, which are numbers, and no projects
        (gke(), {"location": "far"}, False),
        (gke(location=""), {"location": "far"}, True),
        (
            Cluster("lab-2", "gke", location="europe-west4", details={"location": "europe-west4-a"}),
            {"location": "europe-west4-a"},
            True,
        ),
        (eks(), {"location": "eu-west-1a"}, True),  # a zone of its region
        (eks(), {"location": "eu-west-2a"}, False),
    ],
)
def test_a_scope_excludes_clusters_of_other_projects_and_places(cluster: Cluster, scope: Scope, is_in: bool) -> None:
    assert manage._in_scope(cluster, scope) is is_in
