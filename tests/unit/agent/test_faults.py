"""What the hands of an agent do with the ends of ranks, and which variables an attempt gives them."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import processes
from mlbench_cli.agent.faults import EXIT_LOST, FINAL_CODES, LONELY_SECONDS, SURVIVOR_SECONDS, FaultHands

Make = Callable[..., tuple[FaultHands, Any]]


def rank(number: int, running: bool = True) -> Any:
    return SimpleNamespace(number=number, pid=100 + number, running=running, environment={"NODE_RANK": str(number)})


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The groups of processes that got a signal; none of them arrives."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(processes, "signal_group", lambda pid, number: found.append((pid, number)))
    return found


@pytest.fixture
def make(tmp_path: Path, killed: list[tuple[int, int]]) -> Make:
    """Make the hands of node 1 and its agent, whose `sent` is what node 0 has heard."""

    def make(policy: str = "restart", **plan: Any) -> tuple[FaultHands, Any]:
        parameters = json.dumps({"batch_size": 8})
        agent = SimpleNamespace(
            folder=str(tmp_path),
            node=1,
            count=3,
            copies=None,
            network=None,
            state={"ended": None},
            ranks=[rank(0), rank(1), rank(2)],
            plan={"environment": {"MLBENCH_PARAMETERS": parameters, "MLBENCH_HOSTS": "a,b,c"}},
            sent=[],
        )
        agent.send_faults = lambda node, message: agent.sent.append((node, message))
        agent.abandon_ranks = lambda: agent.sent.append("abandoned")
        document = {"policy": policy, "checkpoint_every": 5, "detect_seconds": None, "ranks": 3, "workers": 3, **plan}
        return FaultHands(agent, document), agent

    return make


# --- ends of ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", FINAL_CODES)
def test_a_failure_that_another_attempt_would_repeat_is_final(make: Make, killed: list[Any], code: int) -> None:
    hands, agent = make()
    assert hands.take_end(agent.ranks[0], code, None) is False
    assert agent.sent == [(0, {"end": 0, "code": code, "why": "failed", "is_final": True})]
    assert killed == []


@pytest.mark.parametrize(
    ("code", "number", "why"), [(1, None, "failed"), (137, 9, "killed"), (EXIT_LOST, None, "failed")]
)
def test_any_other_failure_ends_the_attempt_of_all_ranks(
    make: Make, killed: list[Any], code: int, number: int | None, why: str
) -> None:
    hands, agent = make()
    agent.ranks[0].running = False
    assert hands.take_end(agent.ranks[0], code, number) is True
    assert agent.sent == [(0, {"end": 0, "code": code, "why": why, "is_final": False})]
    assert killed == [(101, signal.SIGKILL), (102, signal.SIGKILL)]
    assert hands.take_end(agent.ranks[1], 137, 9) is True  # one of those that were just killed
    assert len(agent.sent) == 1


def test_without_a_policy_every_failure_is_final(make: Make) -> None:
    hands, agent = make("fail")
    assert hands.take_end(agent.ranks[0], 1, None) is False
    assert agent.sent[0][1]["is_final"] is True
    assert not hands.waits


def test_ranks_that_can_go_on_are_not_killed_when_another_fails(make: Make, killed: list[Any]) -> None:
    hands, agent = make("replace")
    agent.ranks[0].running = False
    assert hands.take_end(agent.ranks[0], 1, None) is True
    assert killed == []


def test_a_machine_is_done_when_its_last_rank_has_ended_well(make: Make) -> None:
    hands, agent = make()
    for number in range(3):
        agent.ranks[number].running = False
        assert agent.sent == []
        assert hands.take_end(agent.ranks[number], 0, None) is False
    assert agent.sent == [(0, {"done": 0})]
    assert hands.waits  # another machine may need another attempt
    hands.obey({"over": True})
    assert not hands.waits


def test_after_the_end_of_the_run_no_end_of_a_rank_starts_anything(make: Make) -> None:
    hands, agent = make()
    agent.state["ended"] = "cancelled"
    assert hands.take_end(agent.ranks[0], 1, None) is False
    hands.obey({"over": True})
    assert (agent.sent, hands.waits) == ([], True)
    hands.on_time(0.0)
    assert not hands.waits


def test_ranks_that_wait_for_an_attempt_are_given_up_with_the_run(make: Make) -> None:
    hands, agent = make()
    hands.obey({"halt": True})
    assert hands.waits
    agent.state["ended"] = "cancelled"
    hands.on_time(0.0)
    assert (agent.sent, hands.waits) == (["abandoned"], False)


# --- ranks that notice a loss ---------------------------------------------------------------------------------------


def test_ranks_that_do_not_notice_a_loss_in_time_are_killed(make: Make, killed: list[Any]) -> None:
    hands, agent = make("replace")
    Path(hands.folder).mkdir(parents=True)
    hands.obey({"halt": True})
    now = time.monotonic()
    Path(hands.folder, "waiting-0-0").touch()
    hands.on_time(now)
    assert (killed, agent.sent) == ([], [])
    hands.on_time(now + SURVIVOR_SECONDS)
    assert killed == [(101, signal.SIGKILL), (102, signal.SIGKILL)]
    agent.ranks[1].running = agent.ranks[2].running = False
    Path(hands.folder, "5").mkdir()
    Path(hands.folder, "5/rank-0.pt").touch()
    hands.on_time(now + SURVIVOR_SECONDS)
    assert agent.sent == [(0, {"idle": {"5": ["rank-0.pt"]}})]


def test_a_rank_that_waits_although_no_other_has_ended_has_lost_its_connections(make: Make) -> None:
    hands, agent = make("replace")
    Path(hands.folder).mkdir(parents=True)
    hands.on_time(1000.0)
    Path(hands.folder, "waiting-0-1").touch()
    hands._look(1000.0 + LONELY_SECONDS - 0.1)
    assert agent.sent == []
    hands._look(1000.0 + LONELY_SECONDS)
    assert agent.sent[0] == (0, {"end": 1, "code": EXIT_LOST, "why": "failed", "is_final": False})


# --- variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "detect", "expected"),
    [
        ("fail", None, {}),
        ("restart", None, {"MLBENCH_CHECKPOINT_EVERY": "5"}),
        ("replace", 2.0, {"MLBENCH_CHECKPOINT_EVERY": "5", "MLBENCH_SURVIVE": "1", "MLBENCH_COLLECTIVE_SECONDS": "10"}),
        ("fail", 20.0, {"MLBENCH_COLLECTIVE_SECONDS": "60"}),
    ],
)
def test_the_first_attempt_gets_what_its_policy_needs(
    make: Make, policy: str, detect: float | None, expected: dict[str, str]
) -> None:
    hands, agent = make(policy, detect_seconds=detect)
    assert hands.environment(agent.ranks[0]) == {"MLBENCH_CHECKPOINT_DIR": hands.folder, **expected}


def attempt(hands: FaultHands, members: list[int], **more: Any) -> None:
    hands._attempt = {"number": 1, "members": members, "resume": None, "resumed_size": 3, "lost": [], **more}


@pytest.mark.parametrize(("resume", "folder"), [(None, ""), (40, "/40")])
def test_another_attempt_knows_its_number_and_where_it_resumes(make: Make, resume: int | None, folder: str) -> None:
    hands, agent = make()
    attempt(hands, [0, 1, 2], resume=resume)
    found = hands.environment(agent.ranks[2])
    assert (found["MLBENCH_ATTEMPT"], found["MLBENCH_RESUME"]) == ("1", folder and f"{hands.folder}{folder}")
    assert "WORLD_SIZE" not in found


def test_fewer_ranks_are_numbered_without_gaps_and_share_the_global_batch(make: Make) -> None:
    hands, agent = make("shrink")
    attempt(hands, [0, 2])
    found = hands.environment(agent.ranks[2])
    assert (found["WORLD_SIZE"], found["RANK"], found["NODE_RANK"], found["MLBENCH_FIRST_RANK"]) == ("2", "1", "1", "2")
    assert found["MLBENCH_HOSTS"] == "a,c"
    assert json.loads(found["MLBENCH_PARAMETERS"]) == {"batch_size": 12}
    assert found["MLBENCH_SHRUNK"] == "1"


def test_ranks_whose_numbers_stay_are_not_told_them_again(make: Make) -> None:
    hands, agent = make("shrink")
    attempt(hands, [0, 1], resumed_size=2)
    found = hands.environment(agent.ranks[1])
    assert found["WORLD_SIZE"] == "2"
    assert not {"RANK", "MLBENCH_HOSTS", "MLBENCH_FIRST_RANK", "MLBENCH_SHRUNK"} & found.keys()
