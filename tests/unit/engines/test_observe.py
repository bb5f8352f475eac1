"""What follows from what the machines of a run have written: phases, ends and findings, from built snapshots."""

from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.agent.messages import pending_facts
from mlbench_cli.engines.observe import STALE_SECONDS, Facts, NodeReport, Snapshot, observe
from mlbench_cli.model.run import Ending, Observation, Phase
from mlbench_cli.model.spec import RunSpec

SPEC = RunSpec(
    name="m-2", cluster="c", engine="hosts", task="custom", preset="custom", argv=("true",), backend="gloo", workers=2
)
PACKED: dict[str, Any] = {"archive": None, "logs": {}, "problem": None}


def rank_facts(rank: int, phase: str = "running", **more: Any) -> dict[str, Any]:
    started = None if phase == "pending" else 100.0
    return {**pending_facts(rank), "phase": phase, "started": started, **more}


def succeeded(rank: int) -> dict[str, Any]:
    return rank_facts(rank, "succeeded", exit_code=0, finished=160.0)


def node_state(*ranks: Facts, ended: Ending | None = None, **more: Any) -> dict[str, Any]:
    return {
        "ranks": list(ranks),
        "started": 100.0,
        "ended": None if ended is None else str(ended),
        "node_name": f"m{ranks[0]['rank'] + 1}",
        "start_problem": None,
        "network_problem": None,
        "disk_full": False,
        "first": None,
        **more,
    }


def look(*reports: NodeReport, names: tuple[str | None, ...] = (), **more: Any) -> Observation:
    snapshot = Snapshot(1000.0, dict(enumerate(reports)), **more)
    return observe(SPEC, names, snapshot, lambda rank: [])


def codes(observation: Observation) -> list[str]:
    return [finding.code for finding in observation.findings]


RUNNING = NodeReport(node_state(rank_facts(0)), alive=True)
DONE = NodeReport(node_state(succeeded(0), ended=Ending.EXITED), PACKED, alive=False)
OTHER_DONE = NodeReport(node_state(succeeded(1), ended=Ending.EXITED), PACKED, alive=False)


def test_a_finished_rank_keeps_its_phase_when_its_supervisor_dies_before_it_has_packed() -> None:
    killed = NodeReport(node_state(succeeded(1)), alive=False)
    observation = look(RUNNING, killed)
    assert [worker.phase for worker in observation.workers] == [Phase.RUNNING, Phase.SUCCEEDED]
    assert observation.workers[1].exit_code == 0
    assert codes(observation) == ["node_lost"]


def test_a_running_rank_is_lost_with_its_supervisor() -> None:
    observation = look(RUNNING, NodeReport(node_state(rank_facts(1)), alive=False))
    assert [worker.phase for worker in observation.workers] == [Phase.RUNNING, Phase.LOST]
    assert observation.workers[1].reason == "the agent is gone"
    (finding,) = observation.findings
    assert finding.evidence["node"] == 1
    assert "m2" in finding.summary


@pytest.mark.parametrize(
    ("age", "phase"),
    [(0.0, Phase.RUNNING), (STALE_SECONDS - 0.1, Phase.RUNNING), (STALE_SECONDS, Phase.LOST), (1e6, Phase.LOST)],
)
def test_a_supervisor_that_cannot_be_seen_is_lost_when_its_beat_is_stale(age: float, phase: Phase) -> None:
    unseen = NodeReport(node_state(rank_facts(1)), beat_age=age)
    observation = look(RUNNING, unseen)
    assert observation.workers[1].phase is phase
    assert unseen.is_over is (phase is Phase.LOST)


def test_a_supervisor_that_is_seen_lives_whatever_its_beat_says() -> None:
    assert not NodeReport(node_state(rank_facts(1)), alive=True, beat_age=1e6).is_lost
    assert NodeReport(node_state(rank_facts(1)), alive=False, beat_age=0.0).is_lost


def test_without_process_and_beat_a_supervisor_that_began_is_lost() -> None:
    assert NodeReport(node_state(rank_facts(1))).is_lost
    assert not NodeReport().is_lost


def test_a_run_whose_supervisors_are_all_dead_has_ended() -> None:
    """Otherwise a client waits for it until the run's deadline."""
    dead = [NodeReport(node_state(rank_facts(rank)), beat_age=STALE_SECONDS) for rank in (0, 1)]
    observation = look(*dead)
    assert observation.ended is Ending.LOST
    assert [worker.phase for worker in observation.workers] == [Phase.LOST, Phase.LOST]


def test_a_run_goes_on_as_long_as_one_node_does() -> None:
    assert look(DONE, NodeReport(node_state(rank_facts(1)), alive=True)).ended is None
    end: dict[str, Any] = {"ended": Ending.EXITED, "stepped_seconds": 0.0}
    first = node_state(succeeded(0), seconds=60.0, **end)
    other = node_state(succeeded(1), seconds=50.0, **{**end, "stepped_seconds": -3600.0})
    over = look(NodeReport(first, PACKED), NodeReport(other, PACKED))
    assert (over.ended, over.seconds) == (Ending.EXITED, 60.0)
    assert [clock.stepped_seconds for clock in over.clocks] == [0.0, -3600.0]


def test_an_end_counts_when_the_results_are_packed_or_nobody_is_left_to_pack_them() -> None:
    packing = replace(OTHER_DONE, results=None, alive=True)
    assert not packing.has_ended
    assert look(DONE, packing).ended is None
    assert replace(packing, alive=False).has_ended
    assert replace(packing, results=PACKED).has_ended


def test_a_run_whose_folder_is_gone_or_that_has_no_nodes_has_not_ended() -> None:
    assert look(DONE, OTHER_DONE, exists=False).ended is None
    assert look().ended is None


@pytest.mark.parametrize(
    ("first", "ended"),
    [
        ({"why": "failed", "rank": 1, "node": 1}, Ending.FAILED),
        ({"why": "deadline", "rank": None, "node": 0}, Ending.DEADLINE),
        ({"why": "lost", "rank": None, "node": 1}, Ending.LOST),
        ({"why": "canceled", "rank": None, "node": 0}, Ending.CANCELED),
    ],
)
def test_what_ended_the_run_first_decides_how_it_ended(first: dict[str, Any], ended: Ending) -> None:
    ranks = rank_facts(0, "failed", stopped=True), rank_facts(1, "failed", exit_code=3)
    hub = NodeReport(node_state(ranks[0], ended=Ending.FAILED, first=first), PACKED, alive=False)
    seen = {"why": "canceled", "rank": None, "node": 1}  # when node 0 stopped it
    other = NodeReport(node_state(ranks[1], ended=Ending.FAILED, first=seen), PACKED, alive=False)
    observation = look(hub, other)
    assert observation.ended is ended
    assert observation.first_failed == (1 if ended is Ending.FAILED else None)


def test_a_run_that_one_node_could_not_start_never_started_although_the_others_were_stopped_for_it() -> None:
    """On Kubernetes the others get SIGTERM as soon as one pod has failed."""
    first = {"why": "canceled", "rank": None, "node": 0}
    stopped = node_state(rank_facts(0, "pending"), started=None, ended=Ending.CANCELED, first=first)
    problem = node_state(rank_facts(1, "pending"), started=None, ended=Ending.NEVER_STARTED, start_problem="no index")
    observation = look(*(NodeReport(state, PACKED, alive=False) for state in (stopped, problem)))
    assert observation.ended is Ending.NEVER_STARTED
    assert "no index" in observation.findings[0].summary


def test_a_canceled_node_outweighs_those_that_exited_and_a_lost_one_all() -> None:
    canceled = NodeReport(node_state(rank_facts(1, "failed"), ended=Ending.CANCELED), PACKED, alive=False)
    lost = NodeReport(node_state(rank_facts(1)), alive=False)
    assert look(DONE, canceled).ended is Ending.CANCELED
    failed = NodeReport(node_state(rank_facts(0, "failed", exit_code=143), ended=Ending.FAILED), PACKED, alive=False)
    assert look(failed, canceled).ended is Ending.CANCELED  # its ranks failed because they were told to end
    assert look(DONE, lost).ended is Ending.LOST


def test_a_cancellation_from_outside_is_a_finding_and_the_users_own_is_none() -> None:
    canceled = NodeReport(node_state(rank_facts(1, "failed"), ended=Ending.CANCELED), PACKED, alive=False)
    assert "canceled_by_other" in codes(look(DONE, canceled))
    assert "canceled_by_other" not in codes(look(DONE, canceled, is_canceled=True))


def test_a_rank_that_was_stopped_names_the_one_that_failed() -> None:
    first = {"why": "failed", "rank": 1, "node": 1}
    hub = NodeReport(node_state(rank_facts(0, "failed", stopped=True, exit_code=143), first=first), alive=True)
    other = NodeReport(node_state(rank_facts(1, "failed", exit_code=3)), alive=True)
    reasons = [worker.reason for worker in look(hub, other).workers]
    assert reasons[0] == "stopped: rank 1 failed"
    assert "3" in (reasons[1] or "")


def test_a_rank_of_a_node_that_has_written_nothing_has_the_name_that_is_known_before() -> None:
    observation = look(RUNNING, NodeReport(), names=("known", "m9"))
    assert [worker.node for worker in observation.workers] == ["m1", "m9"]
    assert observation.workers[1].phase is Phase.PENDING


def test_output_that_could_not_be_packed_and_a_full_disk_are_findings() -> None:
    full = NodeReport(node_state(succeeded(1), ended=Ending.EXITED, disk_full=True), {**PACKED, "problem": "no space"})
    assert set(codes(look(DONE, full))) == {"disk_full", "output_incomplete"}


def test_why_a_rank_has_ended_or_does_nothing() -> None:
    cause = {"why": "deadline", "node": 0, "rank": None, "time": 1.0}
    facts = [
        rank_facts(0, "failed", exit_code=139, signal=11),
        rank_facts(1, "failed", exit_code=143, signal=15, stopped=True),
    ]
    end = look(NodeReport(node_state(*facts, ended=Ending.DEADLINE, first=cause), PACKED))
    assert [worker.reason for worker in end.workers] == ["was killed by SIGSEGV", "stopped: deadline"]
    launched = Snapshot(1000.0, {0: NodeReport(node_state(rank_facts(0), rank_facts(1, "pending")), alive=True)})
    seen = observe(replace(SPEC, run_on_all=False), (), launched, lambda rank: [])
    assert [worker.reason for worker in seen.workers] == [None, "only rank 0 runs the command"]


def test_a_run_may_hang_only_if_all_nodes_are_idle_and_the_longest_stall_counts() -> None:
    idle = NodeReport(node_state(rank_facts(0), idle_since=100.0), alive=True)
    busy, also_idle = (NodeReport(node_state(rank_facts(1), idle_since=since), alive=True) for since in (None, 130.0))
    assert "idle" not in codes(look(idle, busy))
    (finding,) = look(idle, also_idle).findings
    assert (finding.code, finding.evidence) == ("idle", {"idle_since": 130.0})
    stalled = NodeReport(node_state(succeeded(1), ended=Ending.EXITED, stalled_seconds=40.0), PACKED, alive=False)
    assert "40 s" in look(DONE, stalled).findings[0].summary


def test_a_full_disk_of_the_head_is_said_while_the_run_goes_on() -> None:
    assert codes(look(RUNNING, free_bytes=1000)) == ["head_disk_full"]
    assert codes(look(RUNNING, free_bytes=1 << 30)) == codes(look(DONE, OTHER_DONE, free_bytes=1000)) == []
