"""What is known of a cluster: `mlbench status --cluster`, its price so far, and the steps of its making."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands._cluster_status import _show, show_cluster
from mlbench_cli.commands._cluster_status import cluster_document as document_of
from mlbench_cli.commands._clusters import StepPrinter, cluster_document, price, show_plan
from mlbench_cli.console import Format
from mlbench_cli.errors import UnreachableError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import timestamp
from providers import registry
from providers.base import Plan, PlanLine
from providers.lifecycle import Step
from providers.operation_lock import hold_operation_lock

Captured = pytest.CaptureFixture[str]


def times(name: str, began: float | None, ready: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "pool", "name": name, "adopted": False, "began": began, "accepted": began, "ready": ready, "waits": [],
        **fields,
    }  # fmt: skip


def gone(name: str, began: float | None, end: float | None) -> dict[str, Any]:
    return {"kind": "pool", "name": name, "began": began, "gone": end, "waits": []}


def ago(hours: float) -> str:
    return timestamp((datetime.now(UTC) - timedelta(hours=hours)).timestamp())


def line(what: str, each: float | None, count: int = 2) -> dict[str, Any]:
    return {"what": what, "count": count, "price_per_hour": each, "as_of": None}


def make_cluster(state: str = "ready", created: str = "", **details: Any) -> Cluster:
    return Cluster("lab-2", "kind", state, created, details)


FAILURE = {"code": "x", "message": "y", "hint": None}
HALF = [times("a", 1.0, 2.0), times("b", 1.0, None)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- documents --------------------------------------------------------------------------------------------------------


def test_a_cluster_of_which_nothing_is_known(store: Store) -> None:
    assert document_of(store, make_cluster()) == {
        "cluster": {
            "name": "lab-2",
            "provider": "kind",
            "state": "ready",
            "created": None,
            "removed": None,
            "owner": None,
            "expires": None,
            "location": None,
            "nodes": None,
            "machine_type": None,
            "gpu": None,
            "gpus_per_node": None,
            "functional_only": False,
        },
        "price": None,
        "provisioning_seconds": None,
        "removal_seconds": None,
        "resources": [],
        "findings": [],
    }


def test_a_removed_cluster_with_everything(store: Store) -> None:
    plan = {"price_per_hour": 1.5, "price_source": "list", "price_table": "t1", "lines": [line("worker x", 0.75)]}
    cluster = make_cluster(
        "removed",
        "2026-01-01T00:00:00.000Z",
        removed="2026-01-01T02:30:00.000Z",
        owner="eva",
        expires=1_767_225_600,
        location="here",
        nodes=2,
        machine_type="x",
        gpu="l4",
        gpus_per_node=1,
        functional_only=True,
        plan=plan,
        provisioning=[times("a", 1.0, 11.5), times("b", 2.0, 31.25)],
        removal=[gone("a", 100.0, 107.5)],
    )
    found = document_of(store, cluster)
    assert found["cluster"] == {
        "name": "lab-2",
        "provider": "kind",
        "state": "removed",
        "created": "2026-01-01T00:00:00.000Z",
        "removed": "2026-01-01T02:30:00.000Z",
        "owner": "eva",
        "expires": "2026-01-01T00:00:00.000Z",
        "location": "here",
        "nodes": 2,
        "machine_type": "x",
        "gpu": "l4",
        "gpus_per_node": 1,
        "functional_only": True,
    }
    assert found["price"] == {
        "per_hour": 1.5,
        "currency": "USD",
        "source": "list",
        "table": "t1",
        "lines": [line("worker x", 0.75)],
        "hours": 2.5,
        "amount": 3.75,
    }
    assert (found["provisioning_seconds"], found["removal_seconds"]) == (31.25, 107.5)
    assert found["resources"] == [
        {**times("a", 1.0, 11.5), "state": "gone", "seconds": 10.5, "removal": gone("a", 100.0, 107.5)},
        {**times("b", 2.0, 31.25), "state": "gone", "seconds": 29.25, "removal": None},
    ]
    assert found["findings"] == []  # it does not expire any more


def test_the_amount_grows_with_the_hours_of_a_cluster(store: Store) -> None:
    plan = {"price_per_hour": 3.0, "currency": "EUR"}
    found = document_of(store, make_cluster(created=ago(2), plan=plan))["price"]
    assert found is not None
    assert found["hours"] == pytest.approx(2.0, abs=0.01)
    assert found["amount"] == pytest.approx(6.0, abs=0.03)
    assert (found["currency"], found["source"], found["table"], found["lines"]) == ("EUR", None, None, [])


@pytest.mark.parametrize(
    ("created", "each", "amount"), [("", 3.0, None), ("2026-01-01T00:00:00Z", None, None), ("", 0.0, None)]
)
def test_without_a_price_or_a_beginning_there_is_no_amount(
    store: Store, created: str, each: float | None, amount: float | None
) -> None:
    found = document_of(store, make_cluster(created=created, plan={"price_per_hour": each, "lines": []}))["price"]
    assert found is not None
    assert (found["amount"], found["hours"] is None) == (amount, not created)


@pytest.mark.parametrize(
    ("details", "states"),
    [
        ({"provisioning": HALF}, {"a": "ready", "b": "being made"}),
        ({"scaling": [times("a", 1.0, None)]}, {"a": "being made"}),
        (
            {"provisioning": HALF, "failure": FAILURE},
            {"a": "ready", "b": "not finished"},
        ),
        ({"provisioning": [times("a", 1.0, 2.0)], "removal": [gone("a", 5.0, None)]}, {"a": "being removed"}),
        ({"provisioning": [times("a", 1.0, 2.0)], "removal": [gone("a", 5.0, 6.0)]}, {"a": "gone"}),
        (
            {
                "provisioning": [times("a", 1.0, 2.0)],
                "removal": [gone("a", 5.0, None)],
                "failure": FAILURE,
            },
            {"a": "not finished"},
        ),
        ({"removal": [gone("other", 5.0, 6.0)]}, {"other": "gone"}),
        ({"provisioning": HALF, "removed": "2026-01-01T00:00:00Z"}, {"a": "gone", "b": "gone"}),
    ],
)  # fmt: skip
def test_the_state_of_each_resource(store: Store, details: dict[str, Any], states: Mapping[str, str]) -> None:
    found = document_of(store, make_cluster(**details))["resources"]
    assert {item["name"]: item["state"] for item in found} == states


def test_a_resource_of_another_machine_is_known_from_its_removal_only(store: Store) -> None:
    (found,) = document_of(store, make_cluster(removal=[gone("other", 5.0, 6.5)]))["resources"]
    assert found == {
        "kind": "pool", "name": "other", "adopted": None, "began": None, "accepted": None, "ready": None, "waits": [],
        "seconds": None, "state": "gone", "removal": gone("other", 5.0, 6.5),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("made", "seconds"),
    [
        ([times("a", 1.0, 5.0), times("b", None, None)], 5.0),
        ([times("a", 1.0, 5.0), times("b", 1.0, None)], None),
        ([times("a", None, None)], None),
        ([times("a", 0.0, 0.0)], 0.0),
    ],
)
def test_a_cluster_is_ready_when_its_last_resource_is(
    store: Store, made: list[dict[str, Any]], seconds: float | None
) -> None:
    assert document_of(store, make_cluster(provisioning=made))["provisioning_seconds"] == seconds


def findings(store: Store, cluster: Cluster) -> list[tuple[str, str, str | None]]:
    return [(item["code"], item["summary"], item["hint"]) for item in document_of(store, cluster)["findings"]]


def test_a_failure_is_the_first_finding(store: Store) -> None:
    failure = {"code": "quota", "message": "No quota.", "hint": "Ask."}
    assert findings(store, make_cluster("creating", failure=failure)) == [("quota", "No quota.", "Ask.")]


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        ("creating", "repeat the create-cluster command to resume; mlbench delete-cluster kind lab-2"),
        ("deleting", "mlbench delete-cluster kind lab-2"),
    ],
)
def test_a_cluster_that_nobody_works_on_is_abandoned(store: Store, state: str, hint: str) -> None:
    words = f"It is {state}, but no mlbench process on this machine is working on it."
    assert findings(store, make_cluster(state)) == [("abandoned", words, hint)]
    with hold_operation_lock(store, "lab-2"):
        assert findings(store, make_cluster(state)) == []
    assert findings(store, make_cluster("ready")) == []


def test_a_cluster_that_has_expired_says_how_long_ago(store: Store) -> None:
    now = datetime.now(UTC).timestamp()
    ((code, words, hint),) = findings(store, make_cluster(expires=now - 7203))
    assert (code, words, hint) == ("expired", "It expired 2 h ago.", "mlbench gc --expired")
    assert findings(store, make_cluster(expires=now + 60)) == []
    assert findings(store, make_cluster("removed", expires=now - 7200)) == []


def test_warnings_of_the_plan_are_told_as_long_as_the_cluster_exists(store: Store) -> None:
    plan = {"price_per_hour": 0.0, "warnings": ["It is small."]}
    assert findings(store, make_cluster(plan=plan)) == [("planned", "It is small.", None)]
    assert findings(store, make_cluster("removed", plan=plan)) == []


def test_parts_without_a_price_are_named(store: Store) -> None:
    lines = [line("worker x", 1.0), line("GPU l4", None), line("disk", None)]
    ((code, words, hint),) = findings(store, make_cluster(plan={"price_per_hour": None, "lines": lines}))
    assert (code, words) == ("price_unknown", "No known price for: GPU l4, disk.")
    assert hint is not None
    assert re.fullmatch(r"Your price table takes precedence: .+\.\w+", hint)


class Cloud:
    """A provider whose resources are found as they are described; an error is raised."""

    def __init__(self, **found: Any) -> None:
        self._found = found

    def resources(self, cluster: Cluster) -> list[Any]:
        def make(name: str, answer: Any) -> Any:
            def find() -> Any:
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return SimpleNamespace(kind="pool", name=name, find=find, remove_command=f"rm {name}")

        return [make(name, answer) for name, answer in self._found.items()]


def seen(**fields: Any) -> Any:
    return SimpleNamespace(**{"state": "RUNNING", "ours": True, "broken": "", "differs": "", **fields})


def ask(store: Store, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, **found: Any) -> Any:
    monkeypatch.setattr(registry, "load", lambda name: Cloud(**found))
    return document_of(store, cluster, cloud=True)


def test_the_cloud_tells_what_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [times(name, 1.0, 2.0) for name in ("a", "b", "forgotten")]
    found = ask(
        store,
        monkeypatch,
        make_cluster(provisioning=made),
        a=seen(),
        b=UnreachableError("No answer.", hint="Wait."),
        c=seen(ours=False),
        d=None,
    )
    assert {item["name"]: (item["state"], item["found"]) for item in found["resources"]} == {
        "a": ("ready", "RUNNING"),
        "b": ("ready", "unknown"),
        "c": ("unknown here", "RUNNING"),
        "d": ("unknown here", None),
        "forgotten": ("ready", None),
    }
    assert found["findings"] == [
        {"code": "unreachable", "summary": "No answer.", "hint": "Wait."},
        {"code": "foreign", "summary": 'The pool "c" was not created by mlbench.', "hint": None},
    ]


def test_what_is_missing_or_broken_says_what_to_do(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [times("a", 1.0, 2.0), times("b", 1.0, None), times("c", 1.0, 2.0), times("d", 1.0, 2.0)]
    found = ask(
        store,
        monkeypatch,
        make_cluster(provisioning=made),
        a=None,
        b=None,
        c=seen(broken="it has failed", differs="another size"),
        d=seen(differs="another size"),
    )
    delete = "mlbench delete-cluster kind lab-2"
    assert found["findings"] == [
        {
            "code": "missing",
            "summary": 'The pool "a" no longer exists.',
            "hint": f"repeat the create-cluster command, or {delete}",
        },
        {
            "code": "broken",
            "summary": 'The pool "c" is not in the expected state: it has failed.',
            "hint": delete,
        },
        {
            "code": "broken",
            "summary": 'The pool "d" is not in the expected state: another size.',
            "hint": delete,
        },
    ]


def test_the_cloud_is_not_asked_for_a_removed_cluster_nor_without_being_asked_to(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(registry, "load", refuse)
    assert "found" not in document_of(store, make_cluster(provisioning=[times("a", 1.0, 2.0)]))["resources"][0]
    assert document_of(store, make_cluster("removed"), cloud=True)["resources"] == []


# --- text -------------------------------------------------------------------------------------------------------------


def text(captured: Captured, store: Store, cluster: Cluster) -> list[str]:
    _show(document_of(store, cluster))
    return captured.readouterr().out.splitlines()


def test_the_text_of_a_cluster(store: Store, capsys: Captured) -> None:
    waits = [{"reason": "quota", "seconds": 65.0}]
    cluster = make_cluster(
        created=ago(2.1),
        owner="eva",
        location="here",
        nodes=2,
        machine_type="x",
        gpu="l4",
        gpus_per_node=4,
        plan={"price_per_hour": 0.0, "price_source": "list"},
        provisioning=[times("a", 1.0, 66.0, waits=waits), times("b", 2.0, 3.0, adopted=True)],
        removal=[{**gone("a", 100.0, 107.5), "waits": [{"reason": "drain", "seconds": 2.0}]}],
    )
    assert text(capsys, store, cluster) == [
        "Cluster:  lab-2 (kind), ready, created 2 h ago by eva",
        "Where:    here",
        "Machines: 2 × x with 4 × l4 each",
        "Price:    free",
        "Ready:    after 1 min 6 s",
        "Removed:  after 1 min 48 s",
        "",
        "RESOURCE  NAME  STATE  BEGAN   TOOK       REMOVAL  WAITED FOR",
        "pool      a     gone   +1.0 s  1 min 5 s  7.5 s    quota (1 min 5 s); drain (2.0 s)",
        "pool      b     ready  +2.0 s  was there  -        -",
    ]


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        (make_cluster(), "Cluster:  lab-2 (kind), ready"),
        (make_cluster(nodes=3), "Machines: 3 × machines"),
        (make_cluster(nodes=0, machine_type="x"), "Machines: 0 × x"),
        (make_cluster(plan={"price_per_hour": None, "price_source": "list"}), "Price:    unknown"),
        (
            make_cluster(plan={"price_per_hour": 1.5, "price_source": "list of 2026"}),
            "Price:    1.50 USD an hour; list of 2026",
        ),
        (
            make_cluster(
                "removed",
                "2026-01-01T00:00:00Z",
                removed="2026-01-01T02:00:00Z",
                plan={"price_per_hour": 1.5, "currency": "EUR", "price_source": "list"},
            ),
            "Price:    1.50 EUR an hour, 3.00 EUR so far; list",
        ),
        (make_cluster(expires=946_684_800), "Expires:  overdue (2000-01-01T00:00:00.000Z)"),
    ],
)  # fmt: skip
def test_a_line_about_a_cluster(store: Store, capsys: Captured, cluster: Cluster, line: str) -> None:
    assert line in text(capsys, store, cluster)


def test_a_cluster_expires_in_the_future_unless_it_is_removed(store: Store, capsys: Captured) -> None:
    later = datetime.now(UTC).timestamp() + 7203
    (line,) = [each for each in text(capsys, store, make_cluster(expires=later)) if each.startswith("Expires")]
    assert line == f"Expires:  in 2 h ({timestamp(later)})"
    assert not any("Expires" in each for each in text(capsys, store, make_cluster("removed", expires=later)))


def test_findings_follow_the_facts_with_what_to_do(store: Store, capsys: Captured) -> None:
    failure = {"code": "quota", "message": "No quota.", "hint": "Ask."}
    cluster = make_cluster(failure=failure, plan={"price_per_hour": 0.0, "warnings": ["It is small."]})
    assert text(capsys, store, cluster)[-5:] == ["", "No quota.", "Next: Ask.", "", "It is small."]


def test_a_resource_has_the_clouds_view_if_it_was_asked(
    store: Store, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    _show(ask(store, monkeypatch, make_cluster(provisioning=[times("a", 1.0, 2.0)]), a=seen()))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "RESOURCE  NAME  STATE  BEGAN   TOOK   FOUND    WAITED FOR",
        "pool      a     ready  +1.0 s  1.0 s  RUNNING  -",
    ]


def test_a_recorded_cluster_is_shown_by_its_name(store: Store, capsys: Captured) -> None:
    store.record_cluster(make_cluster(location="here"))
    show_cluster(store, "lab-2", Format.text)
    assert capsys.readouterr().out == "Cluster:  lab-2 (kind), ready, created just now\nWhere:    here\n"
    show_cluster(store, "lab-2", Format.json)
    assert '"location": "here"' in capsys.readouterr().out


# --- what the cluster commands print ----------------------------------------------------------------------------------


def test_the_document_of_a_cluster_in_a_list() -> None:
    plain = {"name": "lab-2", "provider": "kind", "state": "ready"}
    assert cluster_document(make_cluster()) == {
        **plain, "account": None, "location": None, "created": None, "details": {}
    }  # fmt: skip
    known = Cluster("lab-2", "kind", "ready", "2026-01-01T00:00:00Z", {"expires": 0, "nodes": 2}, "me", "here")
    assert cluster_document(known) == {
        **plain,
        "account": "me",
        "location": "here",
        "created": "2026-01-01T00:00:00Z",
        "details": {"expires": "1970-01-01T00:00:00.000Z", "nodes": 2},
    }


@pytest.mark.parametrize(
    ("amount", "words"),
    [(None, "unknown"), (0.0, "free"), (0.004, "0.00400 EUR"), (0.5, "0.50 EUR"), (1240.0, "1,240 EUR")],
)
def test_an_amount_in_words(amount: float | None, words: str) -> None:
    assert price(amount, "EUR") == words


def plan_lines(captured: Captured, cluster: Cluster, plan: Plan) -> list[str]:
    show_plan(cluster, plan)
    return captured.readouterr().err.splitlines()


def test_a_plan_is_a_table_with_its_total(capsys: Captured) -> None:
    plan = Plan(
        (PlanLine("worker x", 4, 0.5, "2026-01-01"), PlanLine("control plane", 1, 0.1)),
        "here", source="list", table="t1", warnings=("It is small.",),
    )  # fmt: skip
    lines = plan_lines(capsys, make_cluster(), plan)
    assert lines[1].split() == ["4", "worker", "x", "0.50", "USD", "2.00", "USD", "2026-01-01"]
    assert lines[2].split() == ["1", "control", "plane", "0.10", "USD", "0.10", "USD", "-"]
    assert lines[3].split() == ["cluster", "lab-2", "in", "here", "2.10", "USD"]
    assert lines[4:] == ["Prices: list; version t1", "Warning: It is small."]


@pytest.mark.parametrize(
    ("provider", "location", "command"),
    [
        ("gke", "europe-west4-a", ["mlbench prices update gke --region europe-west4"]),
        ("gke", "europe-west4", ["mlbench prices update gke --region europe-west4"]),
        ("eks", "eu-west-1", ["mlbench prices update eks --region eu-west-1"]),
        ("aks", "westeurope", ["mlbench prices update aks --region westeurope"]),
        ("kind", "here", []),
    ],
)
def test_a_plan_without_a_price_says_how_to_get_it(
    capsys: Captured, provider: str, location: str, command: list[str]
) -> None:
    plan = Plan((PlanLine("worker x", 4, None), PlanLine("worker x", 1, None), PlanLine("disk", 2, 0.25)), location)
    lines = plan_lines(capsys, Cluster("lab-2", provider, location=location), plan)
    assert lines[5:] == [
        "mlbench does not know the price of worker x; the rest costs 0.50 USD/h.",
        *(f"To ask the cloud for prices: {each}" for each in command),
    ]
    assert lines[1].split()[3:] == ["unknown", "unknown", "-"]


def test_a_plan_without_any_price_has_no_rest(capsys: Captured) -> None:
    lines = plan_lines(capsys, make_cluster(), Plan((PlanLine("worker x", 4, None),), "here"))
    assert lines[-1] == "mlbench does not know the price of worker x."


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Step("c", "pool", "p", "ready", "", 65.0), "pool p is ready (1 min 5 s)"),
        (Step("c", "pool", "p", "kept", "it has images", 1.0), "pool p stays: it has images (1.0 s)"),
        (Step("c", "pool", "p", "deleted", "not told", 1.0), "pool p is deleted (1.0 s)"),
        (Step("c", "pool", "p", "creating", "", 5.0, 600.0), "creating pool p, elapsed 5 s of at most 10 min"),
        (Step("c", "pool", "p", "waiting", "3 of 4", 5.0), "creating pool p: 3 of 4, elapsed 5 s"),
        (Step("c", "pool", "p", "deleting", "", 5.0), "deleting pool p, elapsed 5 s"),
        (Step("c", "pool", "p", "retrying", "busy", 5.0), "pool p: retrying after an error: busy, elapsed 5 s"),
    ],
)
def test_a_step_in_words(capsys: Captured, step: Step, line: str) -> None:
    with StepPrinter() as report:
        report(step)
    assert capsys.readouterr().err == f"{line}\n"


def test_a_step_is_told_again_when_its_reason_changes_but_not_for_a_number(capsys: Captured) -> None:
    with StepPrinter() as report:
        for reason in ("3 of 4", "4 of 4", "no quota", "no quota"):
            report(Step("c", "pool", "p", "waiting", reason, 5.0))
    lines = capsys.readouterr().err.splitlines()
    assert [each.partition(": ")[2] for each in lines] == ["3 of 4, elapsed 5 s", "no quota, elapsed 5 s"]
