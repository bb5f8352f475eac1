"""What providers decide without a cloud: rights and roles, reservations, tables of prices, times, words of errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UsageError
from mlbench_cli.kube.api import AccessDenied
from mlbench_cli.model.run import Cluster
from providers import attached, rights
from providers.attached import Right, check_rights, read_queue_facts, role_manifests
from providers.gke import reservations
from providers.gke.machines import Machine
from providers.gke.reservations import ReservationName, check_reservation, parse_reservation
from providers.machine_checks import Shortage, make_quota_error
from providers.operation_errors import delete_command, failure_record, incomplete_deletion_error
from providers.pricing import ANY_REGION, FetchedPrices, PriceTable, _format_table, _is_price


def test_the_role_of_runs_has_the_rights_that_are_checked_and_is_bound_to_a_user() -> None:
    role, binding = role_manifests("team")
    listed = [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in role["rules"]]  # type: ignore[attr-defined]
    assert listed == [
        (["batch"], ["jobs"], ["create", "get", "list", "watch", "patch", "delete"]),
        ([""], ["pods"], ["get", "list", "watch", "delete"]),
        ([""], ["pods/log"], ["get"]),
        ([""], ["pods/exec"], ["get", "create"]),
        ([""], ["configmaps"], ["create", "get", "list", "patch", "delete"]),
        ([""], ["services"], ["create", "get", "list", "patch", "delete"]),
        (["networking.k8s.io"], ["networkpolicies"], ["create", "get", "list", "patch", "delete"]),
        ([""], ["events"], ["get", "list"]),
        (["jobset.x-k8s.io"], ["jobsets"], ["create", "get", "list", "delete"]),
    ]
    metadata = {"name": "mlbench", "namespace": "team"}
    assert {**role, "rules": None} == {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata,
        "rules": None,
    }
    assert binding == {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "mlbench"},
        "subjects": [{"kind": "User", "name": "USER", "apiGroup": "rbac.authorization.k8s.io"}],
    }


def access(answers: dict[str, Any], sent: list[tuple[str, Any]]) -> Any:
    def get(path: str, **_: Any) -> Any:
        if path not in answers:
            raise AccessDenied("forbidden", status=403)
        return answers[path]

    def create(path: str, body: Any) -> Any:
        sent.append((path, body))
        return answers.get(f"POST {path}", {})

    return SimpleNamespace(client=lambda: SimpleNamespace(get=get, create=create), namespace="team")


REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def test_a_right_to_a_part_of_an_object_is_asked_about_by_its_subresource() -> None:
    sent: list[tuple[str, Any]] = []
    found = check_rights(access({f"POST {REVIEWS}": {"status": {"allowed": True, "reason": "by RBAC"}}}, sent))
    documents = [body for path, body in sent if path == REVIEWS]
    assert {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {
            "resourceAttributes": {
                "namespace": "team",
                "group": "",
                "resource": "pods",
                "verb": "get",
                "subresource": "log",
            }
        },
    } in documents
    assert documents[0]["spec"] == {
        "resourceAttributes": {"namespace": "team", "group": "batch", "resource": "jobs", "verb": "create"}
    }
    assert found[0] == Right("batch", "jobs", "create", needed=True, allowed=True, reason="by RBAC")


def test_rights_without_which_runs_are_possible_are_optional() -> None:
    found = check_rights(access({"/apis/jobset.x-k8s.io": {"preferredVersion": {"groupVersion": "x/v1"}}}, []))
    assert not any(right.allowed or right.reason for right in found)
    assert {right.resource for right in found if not right.needed} == {"networkpolicies", "events", "jobsets"}
    assert len(found) == 6 + 4 + 1 + 2 + 5 + 5 + 5 + 2 + 4


@pytest.mark.parametrize(
    ("right", "name"),
    [
        (Right("batch", "jobs", "create", needed=True, allowed=True), "create jobs.batch"),
        (Right("", "pods/log", "get", needed=True, allowed=True), "get pods/log"),
    ],
)
def test_a_right_is_named_as_kubectl_names_it(right: Right, name: str) -> None:
    assert right.name == name


def test_queues_are_listed_by_name_and_a_job_is_only_tried() -> None:
    sent: list[tuple[str, Any]] = []
    path = "/apis/batch/v1/namespaces/team/jobs?dryRun=All"
    items = [{"metadata": {"name": name}} for name in ("b", "a")]
    answers = {
        "/apis/kueue.x-k8s.io": {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}},
        "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/localqueues": {"items": items},
        f"POST {path}": {"spec": {"suspend": True}},
    }
    assert read_queue_facts(access(answers, sent)) == attached.QueueFacts(("a", "b"), needs_queue=True)
    ((where, job),) = sent
    assert where == path
    assert job == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "mlbench-dry-run"},
        "spec": {
            "suspend": False,
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "main",
                            "image": "none",
                            "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                            },
                        }
                    ],
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": 10001,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            },
        },
    }


def test_a_cluster_without_kueue_is_not_asked_for_queues() -> None:
    sent: list[tuple[str, Any]] = []
    assert read_queue_facts(access({}, sent)) == attached.QueueFacts((), needs_queue=False)
    assert sent == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train", ReservationName("train")),
        ("a", ReservationName("a")),
        ("train-1/reservationBlocks/block-2", ReservationName("train-1", None, "block-2")),
        ("projects/my-org.com:shared/reservations/train", ReservationName("train", "my-org.com:shared")),
        ("projects/shared/reservations/train/reservationBlocks/b", ReservationName("train", "shared", "b")),
        ("a" * 63, ReservationName("a" * 63)),
    ],
)
def test_a_reservation_is_named_alone_or_with_project_and_block(text: str, name: ReservationName) -> None:
    assert parse_reservation(text) == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "Train", "1train", "train-", "a" * 64, "projects/abcd/reservations/train", "reservations/train"),
        *("train/reservationBlocks/", "train/reservationSubBlocks/x", "projects/shared/train"),
    ],
)
def test_what_is_no_name_of_a_reservation_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a reservation") as caught:
        parse_reservation(text)
    assert "RESERVATION/reservationBlocks/BLOCK" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (ReservationName("train"), "train"),
        (ReservationName("train", "shared"), "projects/shared/reservations/train"),
        (ReservationName("train", None, "b"), "projects/mine/reservations/train/reservationBlocks/b"),
        (ReservationName("train", "shared", "b"), "projects/shared/reservations/train/reservationBlocks/b"),
    ],
)
def test_a_pool_consumes_the_reservation_by_its_path(name: ReservationName, value: str) -> None:
    assert name.affinity("mine") == {
        "consume_reservation_type": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [value],
    }


H200 = Machine("a3-ultragpu-8g", "nvidia-h200-141gb", 8)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compute Engine's answers by path."""
    answers: dict[str, Any] = {}

    class Compute:
        def __init__(self, project: str) -> None:
            self.project = project

        def get(self, path: str) -> Any:
            if f"{self.project}{path}" not in answers:
                raise NotFoundError("none")
            return answers[f"{self.project}{path}"]

    monkeypatch.setattr(reservations, "Compute", Compute)
    return answers


PATH = "shared/zones/us-east1-b/reservations/train"


def reserve(machine: str = "a3-ultragpu-8g", status: str | None = "READY", **counted: str) -> dict[str, Any]:
    return {"status": status, "specificReservation": {"instanceProperties": {"machineType": machine}, **counted}}


def check(name: ReservationName, count: int = 3) -> list[str]:
    return check_reservation(name, "mine", "us-east1-b", H200, count)


SHARED = ReservationName("train", "shared")


def test_a_reservation_of_another_project_is_looked_up_there(compute: dict[str, Any]) -> None:
    compute[PATH] = reserve(count="5", inUseCount="2")
    assert check(SHARED) == []
    with pytest.raises(UsageError, match=r"There is no reservation train in us-east1-b") as caught:
        check(ReservationName("train"))
    assert caught.value.hint == "gcloud compute reservations list --project mine"


def test_a_reservation_with_too_few_machines_says_how_many_it_has(compute: dict[str, Any]) -> None:
    compute[PATH] = reserve(count="5", inUseCount="3")
    with pytest.raises(CapacityError, match="The reservation train has 2 machines left in us-east1-b, 3 are") as caught:
        check(SHARED)
    assert caught.value.details == {"reason": "reservation", "left": 2, "needed": 3}
    assert "Use 2 workers" in str(caught.value.hint)


def test_a_reservation_is_for_one_type_of_machine(compute: dict[str, Any]) -> None:
    compute[PATH] = reserve("a4-highgpu-8g", count="9")
    with pytest.raises(UsageError, match="is for a4-highgpu-8g, not a3-ultragpu-8g") as caught:
        check(SHARED)
    assert caught.value.hint == "--machine-type a4-highgpu-8g"


def test_the_machines_of_a_block_are_counted_and_not_those_of_its_reservation(compute: dict[str, Any]) -> None:
    compute[PATH] = reserve(count="100")
    block = ReservationName("train", "shared", "b")
    with pytest.raises(UsageError, match="There is no block b of the reservation train"):
        check(block)
    compute[f"{PATH}/reservationBlocks/b"] = {"resource": {"count": 2}}
    with pytest.raises(CapacityError, match="The block b of the reservation train has 2 machines left"):
        check(block)
    assert check(block, 2) == []
    compute[f"{PATH}/reservationBlocks/b"] = {}
    assert check(block) == ["Google does not report how many machines the block b of the reservation train has left."]


@pytest.mark.parametrize(
    ("status", "warnings"),
    [("READY", []), (None, []), ("UPDATING", ["The reservation train is UPDATING."])],
)
def test_a_reservation_that_is_not_ready_is_warned_of(
    compute: dict[str, Any], status: str | None, warnings: list[str]
) -> None:
    compute[PATH] = reserve(status=status, count="3")
    assert check(SHARED) == warnings


def test_all_quotas_that_are_too_small_are_named_and_the_first_is_the_reason() -> None:
    error = make_quota_error(
        "us-east1", [Shortage("CPUS", 8.0, 24.0, 96), Shortage("SSD_TOTAL_GB", 0.5, 500, 400, " GB")], "Ask."
    )
    assert error.message == (
        "The quota of us-east1 is too small: CPUS has 8 of 24 left, 96 needed; "
        "SSD_TOTAL_GB has 0.5 of 500 GB left, 400 needed."
    )
    assert (error.hint, error.details) == ("Ask.", {"reason": "quota", "quota": "CPUS", "left": 8.0, "needed": 96})


def test_what_remains_of_a_cluster_is_listed_with_its_command() -> None:
    left = [
        {"kind": "disk", "name": "d", "reason": "in use", "command": "rm d"},
        {"kind": "network", "name": "n", "reason": "denied", "command": "rm n"},
    ]
    cluster = Cluster("demo", "kind", "ready", details={})
    error = incomplete_deletion_error(cluster, left)
    assert error.message == (
        'These resources of the cluster "demo" remain:\n  disk d: in use\n    rm d\n  network n: denied\n    rm n'
    )
    assert error.details == {"leftovers": left}
    assert str(error.hint).startswith(f"{delete_command(cluster)}   continues")
    assert delete_command(cluster) == "mlbench delete-cluster kind demo"


def test_a_failure_is_recorded_with_its_words_and_an_unexpected_one_with_its_type() -> None:
    quota = CapacityError("full", hint="ask")
    assert failure_record(quota) == {"code": quota.code, "message": "full", "hint": "ask"}
    assert failure_record(KeyError("x")) == {
        "code": MlbenchError("").code,
        "message": "Internal error: KeyError: 'x'",
        "hint": None,
    }
    assert failure_record(KeyboardInterrupt())["message"] == "Interrupted."


@pytest.mark.parametrize("provider", ["aks", "eks", "gke"])
def test_rights_of_a_command_are_sorted_and_among_those_of_all(provider: str) -> None:
    table = rights.load_rights(provider)
    for command, names in table.items():
        assert rights.list_rights(provider, command, "rights") == sorted(names)
        assert set(names) <= set(rights.list_rights(provider, None, "rights"))
    with pytest.raises(UsageError, match='"create" is not a command that needs rights of X') as caught:
        rights.list_rights(provider, "create", "rights of X")
    assert caught.value.hint == f"--for: {', '.join(table)}"


FETCHED = FetchedPrices(
    "gke", "the catalog", {"b": {"m2": 2.0, "m1": 0.1}, "a": {"m1": 1.0}}, {"c": {"m1": 0.05}, "a": {}}
)


def test_fetched_prices_are_counted_over_regions_with_those_of_spot() -> None:
    assert FETCHED.count == 4
    assert FETCHED.regions == ["a", "b", "c"]


def test_a_table_of_prices_is_written_in_order_and_read_again() -> None:
    import tomllib

    text = _format_table(FETCHED)
    (found,) = tomllib.loads(text).values()
    assert len(found.pop("date")) == len("2026-01-31")
    assert found == {
        "currency": "USD",
        "source": "the catalog",
        "on-demand": {"a": {"m1": 1.0}, "b": {"m1": 0.1, "m2": 2.0}},
        "spot": {"a": {}, "c": {"m1": 0.05}},
    }
    assert text.index('"a"') < text.index('"b"') < text.index('"m2"') < text.index('"c"')
    assert text.endswith("\n")


OWN = {"on-demand": {ANY_REGION: {"m1": 3}}, "date": "2026-02-01", "as-of": {"m1": "2025"}}
SHIPPED = {"on-demand": {"a": {"m1": 1.0, "m2": 2.0}, ANY_REGION: {"disk": 0}}, "spot": {"a": {"m1": 0.5}}}
TABLE = PriceTable("USD", "source", "v", (OWN, SHIPPED))


@pytest.mark.parametrize(
    ("item", "region", "spot", "price"),
    [
        *(("m1", "a", False, 3.0), ("m1", "z", False, 3.0), ("m1", "a", True, 0.5), ("m1", "z", True, None)),
        *(("m2", "a", False, 2.0), ("m2", "a", True, None), ("disk", "z", False, 0.0), ("m3", "a", False, None)),
    ],
)
def test_a_price_of_ones_own_for_every_region_goes_before_a_shipped_one_of_the_region(
    item: str, region: str, spot: bool, price: float | None
) -> None:
    assert TABLE.price(item, region, spot=spot) == price


def test_regions_and_prices_are_counted_once_over_all_tables() -> None:
    assert TABLE.list_regions() == ["a"]
    assert TABLE.to_dict() == {"currency": "USD", "table": "v", "regions": {"a": 3}}
    assert TABLE.count_prices("z") == 2


def test_only_missing_prices_are_asked_for_and_those_of_a_table_stay() -> None:
    asked: list[tuple[str, bool]] = []

    def ask(item: str, spot: bool) -> float | None:
        asked.append((item, spot))
        return 7.0 if item == "m3" else None

    table = TABLE.ask_missing([("m1", False), ("m3", False), ("m3", True), ("m4", False)], "a", ask)
    assert asked == [("m3", False), ("m3", True), ("m4", False)]
    assert [table.price("m3", "a", spot=spot) for spot in (False, True)] == [7.0, 7.0]
    assert table.price("m1", "a") == 3.0
    assert TABLE.ask_missing([("m4", False)], "a", ask) is TABLE


@pytest.mark.parametrize(
    ("amount", "is_price"),
    [(0, True), (0.1, True), (999_999.99, True), (1e6, False), (-0.1, False), (True, False), ("1", False)],
)
def test_a_price_is_a_number_from_zero_to_below_a_million(amount: Any, is_price: bool) -> None:
    assert _is_price(amount) is is_price
