"""Outcomes, phases and what experiments derive of their members; documents of observations; cluster identities."""

from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import (
    Cluster,
    ClusterIdentity,
    Ending,
    Experiment,
    ExperimentState,
    Finding,
    NodeClock,
    Observation,
    Outcome,
    Phase,
    RunState,
    WorkerState,
)


@pytest.mark.parametrize(
    ("outcome", "is_success", "is_resumable", "code"),
    [
        (Outcome.GOAL_REACHED, True, False, 0),
        (Outcome.GOAL_MISSED, True, False, 0),
        (Outcome.BUDGET_SPENT, True, False, 0),
        (Outcome.COMPLETED, True, False, 0),
        (Outcome.FAILED, False, False, 7),
        (Outcome.CANCELLED, False, True, 7),
        (Outcome.DEADLINE, False, False, 124),
        (Outcome.NEVER_STARTED, False, True, 6),
        (Outcome.LOST, False, True, 7),
    ],
)
def test_what_follows_from_an_outcome(outcome: Outcome, is_success: bool, is_resumable: bool, code: int) -> None:
    assert (outcome.is_success, outcome.is_resumable, outcome.exit_code()) == (is_success, is_resumable, code)
    assert outcome.phrase


def test_outcomes_and_endings_have_the_words_of_archives_and_the_phrases_of_sentences() -> None:
    """Archives, stores and scripts of users hold these words."""
    assert {str(outcome): f"x-2 {outcome.phrase}." for outcome in Outcome} == {
        "goal_reached": "x-2 reached its goal.",
        "goal_missed": "x-2 ended without reaching its goal.",
        "budget_spent": "x-2 has spent its time budget.",
        "completed": "x-2 completed.",
        "failed": "x-2 failed.",
        "cancelled": "x-2 was cancelled.",
        "deadline": "x-2 was stopped at its deadline.",
        "never_started": "x-2 never started.",
        "lost": "x-2 was lost: nothing of it could be observed any more.",
    }
    assert list(map(str, Ending)) == [
        *("exited", "failed", "cancelled", "client_lost", "deadline", "never_started", "lost")
    ]
    assert list(map(str, RunState)) == ["created", "running", "finished"]
    assert list(map(str, Phase)) == ["pending", "starting", "running", "succeeded", "failed", "lost"]
    assert list(map(str, ExperimentState)) == ["pending", "running", "stopped", "completed", "failed"]


def test_runs_of_an_experiment_are_one_after_another_and_need_no_goal_by_default() -> None:
    plain = Experiment("id", "x", "2026", {})
    assert (plain.parallel, plain.require_goal, plain.members) == (1, False, ())


def test_exit_codes_of_runs_that_need_a_goal_or_have_no_archive() -> None:
    reached, missed = Outcome.GOAL_REACHED, Outcome.GOAL_MISSED
    assert reached.exit_code(require_goal=True, goal_reached=True) == 0
    assert missed.exit_code(require_goal=True, goal_reached=False) == 7
    assert Outcome.COMPLETED.exit_code(require_goal=True) == 7
    assert missed.exit_code(goal_reached=False) == 0
    assert reached.exit_code(sealed=False) == 8
    assert missed.exit_code(require_goal=True, sealed=False) == 7
    assert Outcome.DEADLINE.exit_code(require_goal=True, goal_reached=True, sealed=False) == 124


def test_endings_that_decide_the_outcome() -> None:
    assert {ending: ending.outcome for ending in Ending} == {
        Ending.EXITED: None,
        Ending.FAILED: None,
        Ending.CANCELLED: Outcome.CANCELLED,
        Ending.CLIENT_LOST: Outcome.CANCELLED,
        Ending.DEADLINE: Outcome.DEADLINE,
        Ending.NEVER_STARTED: Outcome.NEVER_STARTED,
        Ending.LOST: Outcome.LOST,
    }


def test_phases_after_which_nothing_comes() -> None:
    assert [phase for phase in Phase if phase.is_final] == [Phase.SUCCEEDED, Phase.FAILED, Phase.LOST]


# --- experiments ------------------------------------------------------------------------------------------------------

NEW, RUNNING = (RunState.CREATED, None), (RunState.RUNNING, None)
DONE, FAILED, LOST = ((RunState.FINISHED, word) for word in (Outcome.COMPLETED, Outcome.FAILED, Outcome.LOST))


@pytest.mark.parametrize(
    ("members", "queued", "idle"),
    [
        ([NEW], "pending", "stopped"),
        ([NEW, NEW], "pending", "stopped"),
        ([NEW, RUNNING], "running", "running"),
        ([NEW, DONE], "running", "stopped"),
        ([RUNNING, DONE], "running", "running"),
        ([DONE], "completed", "completed"),
        ([DONE, DONE], "completed", "completed"),
        ([DONE, FAILED], "failed", "failed"),
        ([DONE, LOST], "running", "stopped"),
        ([FAILED, LOST], "running", "stopped"),
        ([RUNNING, LOST], "running", "running"),
        ([NEW, LOST], "running", "stopped"),
    ],
)
def test_the_state_of_an_experiment_follows_from_its_members(members: list[Any], queued: str, idle: str) -> None:
    assert ExperimentState.derive(members, is_queued=True) == queued
    assert ExperimentState.derive(members, is_queued=False) == idle


def test_experiments_that_are_over() -> None:
    assert [state for state in ExperimentState if state.is_over] == [ExperimentState.COMPLETED, ExperimentState.FAILED]


# --- documents --------------------------------------------------------------------------------------------------------

WORKER = {
    "rank": 1,
    "phase": "running",
    "reason": None,
    "node": "n1",
    "exit_code": None,
    "started": 5.0,
    "finished": None,
    "restarts": 2,
    "image_digest": None,
}
FINDING = {"code": "c", "summary": "s", "hint": None, "retryable": False, "permanent": True, "evidence": {"a": 1}}
CLOCK = {"node": "n1", "stepped_seconds": 0.5, "start_ahead": 0.1, "end_ahead": None, "error": 0.01}


def test_an_observation_is_written_and_read() -> None:
    seen = Observation(
        time=9.0,
        workers=(WorkerState(1, Phase.RUNNING, node="n1", started=5.0, restarts=2),),
        findings=(Finding("c", "s", permanent=True, evidence={"a": 1}),),
    )
    document = {"time": 9.0, "workers": [WORKER], "findings": [FINDING], "ended": None, "first_failed": None}
    assert {**seen.to_dict(), "findings": [*seen.to_dict()["findings"]]} == document
    assert Observation.from_dict(document) == seen


def test_an_observation_with_all_that_is_known() -> None:
    seen = Observation(
        time=9.0,
        workers=(WorkerState(0, Phase.FAILED, "Error", exit_code=137, seconds=2.5),),
        ended=Ending.FAILED,
        first_failed=0,
        topology={"n1": {"zone": "a"}},
        seconds=3.5,
        clocks=(NodeClock("n1", 0.5, 0.1, None, 0.01),),
    )
    document = seen.to_dict()
    assert document["workers"][0]["seconds"] == 2.5
    assert (document["ended"], document["first_failed"], document["seconds"]) == ("failed", 0, 3.5)
    assert document["topology"] == {"n1": {"zone": "a"}}
    assert [*document["clocks"]] == [CLOCK]
    assert Observation.from_dict(document) == seen


@pytest.mark.parametrize(
    "changes", [{"ended": "bored"}, {"workers": [{"phase": "x"}]}, {"findings": [{"code": "c"}]}, {"more": 1}]
)
def test_a_damaged_observation_is_refused(changes: dict[str, Any]) -> None:
    document = {"time": 9.0, "workers": [], "findings": [], "ended": None}
    assert Observation.from_dict(document).ended is None
    with pytest.raises((TypeError, ValueError)):
        Observation.from_dict({**document, **changes})
    with pytest.raises(KeyError):
        Observation.from_dict({key: value for key, value in document.items() if key != "workers"})


# --- clusters ---------------------------------------------------------------------------------------------------------

ONE = ClusterIdentity("gke", "p", "europe-west1-b", "c")


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (ONE, True),
        (ClusterIdentity("gke", "", "europe-west1-b", "c"), True),
        (ClusterIdentity("gke", "q", "europe-west1-b", "c"), False),
        (ClusterIdentity("eks", "p", "europe-west1-b", "c"), False),
        (ClusterIdentity("gke", "p", "europe-west1-c", "c"), False),
        (ClusterIdentity("gke", "p", "europe-west1-b", "d"), False),
        (ClusterIdentity("gke", "", "europe-west1-b", "d"), False),
    ],
)
def test_an_unknown_account_may_be_any(other: ClusterIdentity, same: bool) -> None:
    assert ONE.matches(other) is other.matches(ONE) is same


def test_a_record_has_the_identity_of_its_cluster() -> None:
    cluster = Cluster("c", "gke", account="p", location="europe-west1-b")
    assert cluster.identity == ONE
    assert cluster.state == "ready"
    assert Cluster("c", "attached").identity == ClusterIdentity("attached", "", "", "c")


def details(**facts: Any) -> ClusterDetails:
    return ClusterDetails.of(Cluster("c", "gke", details=facts))


def test_a_record_without_facts_has_defaults() -> None:
    found = details()
    assert found == ClusterDetails() == details(nodes=None, arm=None, queues=None, newer="x")
    assert (found.nodes, found.arm, found.network_policies, found.job_sets) == (None, False, True, False)
    assert (found.needs_queue, found.autopilot, found.functional_only, found.registry_made) == (False,) * 4
    assert (found.queues, found.tolerations, found.plan, found.failure, found.expires) == ([], [], {}, None, None)
    assert found.price_per_hour is None


@pytest.mark.parametrize("value", [5, 5.5])
def test_a_time_may_be_whole_or_not(value: float) -> None:
    assert details(expires=value).expires == value


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"nodes": "2"}, "its nodes is '2', not int."),
        ({"nodes": True}, "its nodes is True, not int."),
        ({"nodes": 2.0}, "its nodes is 2.0, not int."),
        ({"expires": "soon"}, "its expires is 'soon', not int or float."),
        ({"arm": 1}, "its arm is 1, not bool."),
        ({"queues": {}}, "its queues is {}, not list."),
        ({"plan": []}, "its plan is [], not dict."),
        ({"charts": {}}, "its helm_charts is {}, not list."),
    ],
)
def test_a_damaged_record_is_named_with_its_fact(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        details(**facts)
    assert caught.value.message == f'The record of the cluster "c" is damaged: {words}'
    assert str(caught.value.hint).startswith("mlbench delete-cluster gke c ")


def test_the_former_name_of_helm_charts_is_read() -> None:
    charts: list[Any] = [{"release": "a"}]
    assert details(charts=charts).helm_charts == charts
    assert details(charts=[], helm_charts=charts).helm_charts == charts
    assert details(helm_charts=charts, charts=[]).helm_charts == charts


def line(what: str, count: int, price: float | None) -> dict[str, Any]:
    return {"what": what, "count": count, "price_per_hour": price, "as_of": None}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, ""),
        ({"lines": [line("worker m5", 2, 0.1), line("GPU L4", 2, 0.5)]}, ""),
        ({"lines": [line("worker m5", 2, 0.1), line("control plane", 1, 0.1)]}, " and cost up to 0.10 USD/h"),
        (
            {"lines": [line("disk", 3, 0.25), line("control plane", 1, 0.1)], "currency": "EUR"},
            " and cost up to 0.85 EUR/h",
        ),
        ({"lines": [line("disk", 3, None), line("control plane", 1, 0.1)]}, ""),
        ({"lines": [line("worker m5", 3, None), line("control plane", 1, 0.0)]}, " and cost up to 0.00 USD/h"),
    ],
)
def test_what_remains_without_workers_has_a_price_if_all_of_it_is_known(plan: dict[str, Any], words: str) -> None:
    assert details(plan=plan).describe_rest() == words


def test_the_planned_price() -> None:
    assert details(plan={"price_per_hour": 1.5}).price_per_hour == 1.5
