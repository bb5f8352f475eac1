"""What all providers share: options, tags, the choice of machines, and what errors say about what exists."""

from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster
from providers.aks.options import Machine
from providers.base import (
    check_tags,
    details_from_tags,
    identity_options,
    split_zones,
)
from providers.lifecycle import explain_error
from providers.machines import check_forced, settle_gpus

AWS_TAG = r"[\w .:/=+@-]{1,128}"
EXISTING = [{"kind": "node pool", "name": "workers", "state": "ready"}]


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("team=research", None),
        ("team=", None),
        ("team=a=b", None),
        ("team", "not a NAME=VALUE"),
        ("=research", "not a NAME=VALUE"),
        ("mlbench-owner=me", "reserved"),
        ("aws:cloudformation:stack-id=x", "reserved"),
    ],
)
def test_a_tag_has_a_name_that_nobody_else_uses(text: str, says: str | None) -> None:
    """AWS reserves the prefix aws:, mlbench its own. An empty value is a value."""
    if says is None:
        check_tags([text], AWS_TAG)
        return
    with pytest.raises(UsageError, match=says):
        check_tags([text], AWS_TAG)


@pytest.mark.parametrize(("text", "expires"), [("1790000000", 1790000000), ("", None), ("tomorrow", None)])
def test_only_a_number_is_the_end_of_a_cluster(text: str, expires: int | None) -> None:
    """Anybody can edit a tag: a listing must not fail on it."""
    assert details_from_tags({"mlbench-expires": text}).get("expires") == expires


@pytest.mark.parametrize(
    ("text", "zones"),
    [
        ("eu-west-1a, eu-west-1b", ("eu-west-1a", "eu-west-1b")),
        ("europe-west1-b,europe-west1-d", ("europe-west1-b", "europe-west1-d")),
        (None, ()),
        ("eu-west-1a,eu-west-1a", "different zones"),
        ("eu-west-1a,", "different zones"),
        ("eu-west-1a,eu-west-2a", "several regions"),
        ("europe-west1-b,europe-west4-b", "several regions"),
    ],
)
def test_zones_to_try_are_different_and_of_one_region(text: str | None, zones: tuple[str, ...] | str) -> None:
    if isinstance(zones, tuple):
        assert split_zones(text) == zones
        return
    with pytest.raises(UsageError, match=zones):
        split_zones(text)


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        (Cluster("a-1", "gke", account="p", location="europe-west1-b"), " --project p --zone europe-west1-b"),
        (Cluster("a-1", "gke", account="p", location="europe-west1"), " --project p --region europe-west1"),
        (Cluster("a-1", "eks", account="123456789012", location="eu-west-1"), " --region eu-west-1"),
        (Cluster("a-1", "eks", account="123456789012", location="eu-west-1a"), " --zone eu-west-1a"),
        (Cluster("a-1", "kind"), ""),
    ],
)
def test_commands_name_project_and_place_of_a_cluster_but_not_the_account_of_aws(
    cluster: Cluster, options: str
) -> None:
    assert identity_options(cluster) == options


# --- machines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "is_allowed"), [(None, True), (0, False), (1, True), (64, True), (65, False)])
def test_a_machine_is_said_to_have_1_to_64_gpus(gpus: int | None, is_allowed: bool) -> None:
    if is_allowed:
        check_forced(gpus)
        return
    with pytest.raises(UsageError, match="from 1 to 64"):
        check_forced(gpus)


@pytest.mark.parametrize(
    ("told", "more", "expected"),
    [
        (("h100", 8), {}, ("h100", 8)),
        (None, {}, ("t4", 1)),
        ((None, 0), {}, (None, 0)),
        (("h100", 8), {"forced": 4}, ("h100", 4)),
        ((None, 0), {"forced": 4}, ("t4", 4)),
        (("h100", 8), {"asked": 8}, ("h100", 8)),
        (("h100", 8), {"asked": 4}, "has 8 GPUs, not 4"),
        (("h100", 8), {"asked": 0}, "has 8 GPUs, not 0"),
        ((None, 0), {"is_gpu_family": True}, "their number is unknown"),
        ((None, 0), {"is_gpu_family": True, "forced": 2}, ("t4", 2)),
    ],
)
def test_what_the_cloud_tells_of_gpus_goes_before_the_table_and_the_person_before_the_cloud(
    told: Any, more: dict[str, Any], expected: Any
) -> None:
    given = {"forced": None, "asked": None, "is_gpu_family": False, **more}
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            settle_gpus(Machine("m", "t4", 1), told, **given)
        return
    found = settle_gpus(Machine("m", "t4", 1), told, **given)
    assert (found.gpu, found.gpus) == expected


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({}, None),
        ({"price_per_hour": None, "currency": "USD"}, "Their price is unknown."),
        ({"price_per_hour": 1.5, "currency": "USD"}, "They cost up to 1.50 USD an hour."),
        ({"price_per_hour": 0.0, "currency": "USD"}, None),
    ],
)
def test_the_price_of_what_exists_is_told_unless_it_is_free(plan: dict[str, Any], says: str | None) -> None:
    explained = str(explain_error(ValueError("x"), Cluster("rel-2", "kind", details={"plan": plan}), EXISTING))
    if says is None:
        assert "cost" not in explained
        assert "price" not in explained
    else:
        assert says in explained
