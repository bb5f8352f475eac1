"""Commands on runs and clusters: rows and documents of lists, files of downloads, questions, and what gc deletes."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.clusters import changes, manage
from mlbench_cli.commands import gc as gc_module
from mlbench_cli.commands import wait as wait_module
from mlbench_cli.commands.cancel import _cancel, _Cancelled
from mlbench_cli.commands.cancel import _show as show_cancelled
from mlbench_cli.commands.delete import _question
from mlbench_cli.commands.download import _target
from mlbench_cli.commands.list_clusters import _document, _price, _row
from mlbench_cli.commands.prices import _amount, _show_ages
from mlbench_cli.console import Format
from mlbench_cli.errors import CleanupError, CredentialError, Interrupted, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster, Outcome
from mlbench_cli.storage.store import Store
from tests.unit.results.runs import spec

Captured = pytest.CaptureFixture[str]


# --- downloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "path", "output", "target", "as_json"),
    [
        (None, None, "text", None, False),
        (None, None, "json", None, True),
        ("x.zip", None, "json", "x.zip", True),
        (None, "x.zip", "text", "x.zip", False),
        (None, None, "x.zip", "x.zip", False),  # as the original took it
        (None, None, "out/x", "out/x", False),
    ],
)
def test_the_file_of_a_download(
    capsys: Captured, to: str | None, path: str | None, output: str, target: str | None, as_json: bool
) -> None:
    files = [None if name is None else Path(name) for name in (to, path, target)]
    assert _target("demo-2", files[0], files[1], output) == (files[2], as_json)
    is_path = output not in ("text", "json")
    assert ("-o is the format; to name the file, use --to" in capsys.readouterr().err) == is_path


@pytest.mark.parametrize(
    ("to", "path", "output", "message"),
    [
        (None, "json", "text", '--output is the file here, but "json" is a format'),
        (None, None, "yaml", '-o "yaml" is not a format; use text or json'),
        ("a.zip", "b.zip", "text", r"Two files are named: a\.zip and b\.zip"),
        ("a.zip", None, "b.zip", r"Two files are named: a\.zip and b\.zip"),
    ],
)
def test_words_that_contradict_each_other(to: str | None, path: str | None, output: str, message: str) -> None:
    files = [None if name is None else Path(name) for name in (to, path)]
    with pytest.raises(UsageError, match=message):
        _target("demo-2", files[0], files[1], output)


def test_an_existing_folder_is_a_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert _target("demo-2", None, None, "out") == (Path("out"), False)


# --- cancel, delete, wait ---------------------------------------------------------------------------------------------


def run(name: str, outcome: Outcome | None = None, *, started: bool = True) -> Any:
    finished = None if outcome is None else SimpleNamespace(outcome=outcome)
    canceled = SimpleNamespace(outcome=Outcome.CANCELLED, summary=f"{name} was stopped.")
    return SimpleNamespace(
        name=name, folder=Path("/data", name), finished=finished, is_started=started, cancel=lambda: canceled
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "is_whole", "outcome", "text"),
    [
        (run("a-1"), False, "cancelled", "a-1 was stopped."),
        (run("a-1", Outcome.FAILED), True, "failed", "a-1 had ended already: failed."),
        (run("a-1", started=False), True, None, "a-1 was not started."),
        (run("a-1", started=False), False, "cancelled", "a-1 was stopped."),
    ],
)
def test_what_becomes_of_a_run_that_is_canceled(found: Any, is_whole: bool, outcome: str | None, text: str) -> None:
    canceled = _cancel(found, is_whole=is_whole)
    assert (canceled.outcome, canceled.text) == (outcome, text)


def test_canceled_runs_say_what_is_next(capsys: Captured) -> None:
    show_cancelled([], [])
    assert capsys.readouterr().err == "Nothing to cancel: all these runs have already ended.\n"
    done = [_Cancelled(run("a-1"), None, "not started"), _Cancelled(run("b-1"), "cancelled", "stopped")]
    show_cancelled(done, ["a", "b"])
    printed = capsys.readouterr()
    assert printed.out == "not started\nstopped\n"
    assert printed.err.splitlines() == [
        "Next: mlbench run a, mlbench run b to resume",
        "Partial results are in /data/b-1.",
        "Next: mlbench logs b-1, or mlbench delete b-1",
    ]
    show_cancelled(done[:1], ["a"])
    assert capsys.readouterr().err == "Next: mlbench run a to resume\n"


@pytest.mark.parametrize(
    ("count", "question"),
    [
        (1, "Remove r-1 and its results in /data/r-1?"),
        (5, "Remove 5 runs and their results (r-1, r-2, r-3, r-4, r-5)?"),
        (6, "Remove 6 runs and their results (r-1, r-2, r-3, r-4, r-5, ...)?"),
    ],
)
def test_runs_to_be_deleted_are_named(count: int, question: str) -> None:
    assert _question([run(f"r-{number}") for number in range(1, count + 1)]) == question


class Waiting:
    """A run that is waited for."""

    def __init__(self, *, is_finished: bool = False, require_goal: bool = False, stops: bool = False) -> None:
        self.name, self.is_finished, self.stops = "demo-2", is_finished, stops
        self.run = SimpleNamespace(spec=spec(timeout=3600.0))
        self.experiment = SimpleNamespace(require_goal=require_goal)
        self.waited: list[float | None] = []

    def wait(self, seconds: float | None, *, report: Any) -> Any:
        self.waited.append(seconds)
        if self.stops:
            raise KeyboardInterrupt
        return SimpleNamespace(exit_code=lambda require_goal: 7 if require_goal else 0)


@pytest.mark.parametrize(
    ("options", "require_goal", "code"),
    [({}, False, 0), ({}, True, 7), ({"require_goal": True}, False, 7)],
)
def test_a_goal_is_required_by_whoever_waits_or_started_the_run(
    capsys: Captured, options: dict[str, bool], require_goal: bool, code: int
) -> None:
    found: Any = Waiting(**options)
    assert wait_module._wait_for(found, None, None, require_goal).exit_code == code
    assert found.waited == [None]
    assert capsys.readouterr().err == "demo-2 times out 1 h after its start; this command waits until then.\n"


def test_waiting_for_several_runs_shares_the_time(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    for deadline, left in ((130.0, 30.0), (90.0, 0.0)):
        found: Any = Waiting(is_finished=deadline == 90.0)
        wait_module._wait_for(found, 60.0, deadline, False)
        assert found.waited == [left]
    assert capsys.readouterr().err == ("demo-2 times out 1 h after its start; this command waits at most 1 min.\n")
    stopped: Any = Waiting(stops=True)
    with pytest.raises(Interrupted, match="Stopped waiting for demo-2; the run continues"):
        wait_module._wait_for(stopped, None, None, False)


# --- lists of clusters ------------------------------------------------------------------------------------------------


def test_a_cluster_in_a_list() -> None:
    plan = {"price_per_hour": 1.5, "currency": "EUR"}
    details = {"nodes": 2, "plan": plan, "expires": 0}
    cluster = Cluster("lab-2", "gke", "ready", "2026-01-01T00:00:00Z", details, "me", "near")
    assert _document(cluster, True, False) == {
        "name": "lab-2",
        "provider": "gke",
        "account": "me",
        "location": "near",
        "state": "ready",
        "created": "2026-01-01T00:00:00Z",
        "current": True,
        "known": False,
        "nodes": 2,
        "price_per_hour": 1.5,
        "currency": "EUR",
        "expires": "1970-01-01T00:00:00.000Z",
    }
    assert _row(cluster, True, False)[:7] == [
        *("lab-2 *", "gke", "near", "ready, unknown here", 2, "1.50 EUR", "overdue")
    ]
    plain = Cluster("lab", "kind")
    assert _row(plain, False, True) == ["lab", "kind", None, "ready", None, None, None, None]
    assert {name for name, value in _document(plain, False, True).items() if value is None} == {
        "account", "location", "created", "nodes", "price_per_hour", "currency", "expires"
    }  # fmt: skip
    later = datetime.now(UTC).timestamp() + 7203
    assert _row(Cluster("lab", "kind", details={"expires": later}), False, True)[6] == "in 2 h"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({}, None),
        ({"price_per_hour": None, "currency": "USD"}, "unknown"),
        ({"price_per_hour": 0.0, "currency": "USD"}, "free"),
        ({"price_per_hour": 0.126, "currency": "USD"}, "0.13 USD"),
    ],
)
def test_the_price_of_a_cluster_in_a_list(plan: dict[str, Any], text: str | None) -> None:
    assert _price(ClusterDetails(plan=cast(Any, plan))) == text


@pytest.mark.parametrize(("ages", "text"), [([], "unknown"), ([7], "7"), ([7, 7], "7"), ([9, 3, 7], "3 to 9")])
def test_the_ages_of_prices(ages: list[int], text: str) -> None:
    assert _show_ages(ages) == text


def test_amounts_of_published_prices() -> None:
    assert [_amount(price) for price in (None, 0.0, 0.12345)] == ["unknown", "0.0000", "0.1235"]


# --- gc ---------------------------------------------------------------------------------------------------------------


class Search:
    """A search that finds some clusters, which are deleted without a cloud."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self.found: list[Cluster] = []
        self.errors: dict[str, Any] = {}
        self.blind: list[str] = []
        self.deleted: list[str] = []
        self.again: dict[str, Cluster | None] = {}
        self.store = Store(home)
        monkeypatch.setenv("MLBENCH_HOME", str(home))
        monkeypatch.setattr("getpass.getuser", lambda: "eva")
        monkeypatch.setattr(manage, "search_everywhere", lambda store, names, scope: self)
        monkeypatch.setattr(changes, "find_again", lambda store, cluster: self.again.get(cluster.name, cluster))
        monkeypatch.setattr(gc_module, "find_orphans", lambda store, names: [])
        monkeypatch.setattr(gc_module, "delete_with_progress", self._delete)

    def _delete(self, store: Store, cluster: Cluster) -> str:
        if cluster.name.startswith("bad"):
            raise CredentialError("No right.", details={"a": 1})
        self.deleted.append(cluster.name)
        return f"{cluster.name} is deleted."

    def run(self, captured: Captured, **options: Any) -> tuple[dict[str, Any], CleanupError | None]:
        """The document, and the error that is raised behind it."""
        error = None
        try:
            gc_module.gc(**{"yes": True, "output": Format.json, **options})
        except CleanupError as caught:
            error = caught
        out = captured.readouterr().out
        return (json.loads(out) if out else {}), error


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    return Search(monkeypatch, tmp_path)


def late(name: str, owner: str | None = "eva") -> Cluster:
    return Cluster(name, "gke", location="near", details={"expires": int(time.time()) - 7203, "owner": owner})


def test_what_has_expired_is_deleted(search: Search, capsys: Captured) -> None:
    search.found = [late("late-2"), Cluster("fine-2", "gke")]
    document, error = search.run(capsys)
    assert error is None
    assert search.deleted == ["late-2"]
    assert [(each["name"], each["why"]) for each in document["clusters"]] == [("late-2", "expired 2 h ago")]
    assert (document["removed"], document["not_searched"], document["processes"]) == (True, {}, [])


def test_a_dry_run_lists_and_deletes_nothing(search: Search, capsys: Captured) -> None:
    search.found = [late("late-2")]
    document, _ = search.run(capsys, dry_run=True)
    assert [each["name"] for each in document["clusters"]] == ["late-2"]
    assert (document["removed"], search.deleted) == (False, [])
    gc_module.gc(dry_run=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["CLUSTER", "PROVIDER", "LOCATION", "STATE", "WHY"],
        ["late-2", "gke", "near", "ready", "expired", "2", "h", "ago"],
    ]
    search.found = []
    gc_module.gc()
    assert capsys.readouterr().out == "Nothing to delete.\n"


def test_clusters_of_others_are_kept_unless_they_are_included(search: Search, capsys: Captured) -> None:
    search.found = [late("own-2"), late("other-2", "ada"), late("nobody-2", None)]
    gc_module.gc(yes=True)
    assert "Warning: Clusters of other owners are kept: other-2 of ada." in capsys.readouterr().err
    assert search.deleted == ["own-2", "nobody-2"]
    search.run(capsys, everybody=True)
    assert search.deleted[2:] == ["own-2", "other-2", "nobody-2"]


def test_results_that_were_not_fetched_keep_a_cluster(search: Search, capsys: Captured) -> None:
    search.store.record_cluster(late("late-2"))
    search.store.record_run(spec("demo-2", cluster="late-2", engine="kubernetes"))
    search.found = [late("late-2"), late("free-2")]
    _, error = search.run(capsys)
    assert error is not None
    assert error.message == (
        "Not everything could be searched or deleted: late-2 has results that were not fetched (--force discards them)."
    )
    assert error.details == {"not_searched": [], "kept": ["late-2"]}
    assert search.deleted == ["free-2"]
    _, error = search.run(capsys, force=True)
    assert error is None
    assert search.deleted[1:] == ["late-2", "free-2"]


def test_a_cloud_that_could_not_be_searched_is_an_error_at_the_end(search: Search, capsys: Captured) -> None:
    search.found, search.blind = [late("late-2")], ["eks", "aks"]
    search.errors = {"eks": CredentialError("No login.")}
    document, error = search.run(capsys)
    assert error is not None
    assert error.exit_code == 8
    assert error.details == {"not_searched": ["aks", "eks"], "kept": []}
    assert document["not_searched"] == {"eks": "No login."}
    assert search.deleted == ["late-2"]


def test_a_cluster_is_looked_at_again_before_it_is_deleted(search: Search, capsys: Captured) -> None:
    search.found = [late("gone-2"), late("moved-2"), late("late-2")]
    search.again = {"gone-2": None, "moved-2": Cluster("moved-2", "gke", location="near")}
    gc_module.gc(yes=True)
    printed = capsys.readouterr()
    assert search.deleted == ["late-2"]
    assert printed.out.splitlines()[-1] == "late-2 is deleted."
    assert "gone-2 is gone." in printed.err
    assert "moved-2 has changed and is no longer eligible." in printed.err


def test_one_cluster_that_cannot_be_deleted_leaves_the_others_alone(search: Search, capsys: Captured) -> None:
    search.found = [late("bad-2"), late("late-2")]
    with pytest.raises(CleanupError) as caught:
        gc_module.gc(yes=True)
    assert caught.value.message == "bad-2@near: No right."
    assert caught.value.details == {"bad-2@near": {"a": 1}}
    assert search.deleted == ["late-2"]


@pytest.mark.parametrize(
    ("count", "question"),
    [(1, "Delete 1 cluster and everything in it"), (2, "Delete 2 clusters and everything in them")],
)
def test_a_deletion_is_confirmed(search: Search, count: int, question: str) -> None:
    search.found = [late(f"late-{number}") for number in range(count)]
    with pytest.raises(UsageError, match=question):
        gc_module.gc()
    assert search.deleted == []
