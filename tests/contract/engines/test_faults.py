"""Faults and attempts of runs on several machines: what node 0 decides happens on all of them, and leaves nothing."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Run
from mlbench_cli.runs.finalize import finalize
from tests import NIGHTLY
from tests.contract.engines.labs import EngineLab, install_commands
from tests.contract.engines.local.test_faults import SECOND_TRY, is_stopped, record_of
from tests.contract.local_runs import shell, until

# Slurm's machines have the same agents: by day only where a client must learn from Slurm what has happened.
BOTH = pytest.mark.parametrize("lab", ["hosts", "slurm"], indirect=True)


@pytest.fixture(params=["hosts", "slurm"] if NIGHTLY else ["hosts"])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLab]:
    for name, value in install_commands(tmp_path / "commands").items():
        monkeypatch.setenv(name, value)
    (tmp_path / "home").mkdir()
    opened = EngineLab(request.param, tmp_path / "home")
    yield opened
    opened.close()


def conclude(lab: EngineLab, run: Run) -> dict[str, Any]:
    """The result of a run that has ended."""
    finalize(run, lab.engine, lab.store)
    document: dict[str, Any] = json.loads((run.folder / "result.json").read_bytes())
    return document


@BOTH
def test_a_rank_killed_on_another_machine_starts_all_ranks_again(lab: EngineLab) -> None:
    words = f"echo $MLBENCH_ATTEMPT:$MASTER_PORT; {SECOND_TRY}"
    run = lab.start(shell(words), workers=3, faults="at 0.3s kill rank 2", on_failure="restart")
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.exit_code, worker.restarts) for worker in end.workers] == [(0, 1)] * 3
    result = conclude(lab, run)
    assert (result["faults"]["injected"], result["faults"]["attempts"]) == (1, 2)
    assert abs(sum(result["faults"]["seconds"].values()) - result["faults"]["wall_seconds"]) < 0.01
    attempts = record_of(run)["attempts"]
    assert [(attempt["rank"], attempt["why"]) for attempt in attempts] == [(2, "killed"), (None, None)]
    # The second attempt meets at one port, too. Rank 2 may have been killed before it printed that of the first.
    (met,) = {lab.log(run, rank).split()[-1] for rank in range(3)}
    assert met.startswith(b"1:")


def test_a_rank_that_has_ended_well_starts_again_with_the_others(lab: EngineLab) -> None:
    run = lab.start(
        shell(f"test $RANK = 1 && exit 0; {SECOND_TRY}"), workers=2, faults="at 1s kill rank 0", on_failure="restart"
    )
    end = lab.end(run)
    assert end.ended == "exited"
    assert [(worker.exit_code, worker.restarts) for worker in end.workers] == [(0, 1)] * 2


def test_each_attempt_goes_on_from_the_last_checkpoint_of_all_machines(lab: EngineLab, tmp_path: Path) -> None:
    script = (
        "number=${MLBENCH_ATTEMPT:-0}; echo from ${MLBENCH_RESUME##*/}; test $number = 2 && exit; "
        "cd $MLBENCH_CHECKPOINT_DIR; mkdir -p $number; touch $number/rank-$RANK.pt; "
        f"if test $RANK = 1; then touch {tmp_path}/$number; exec sleep 60; fi; touch $number/main.pt; "
        f"until test -e {tmp_path}/$number; do sleep 0.02; done; exit 3"
    )
    run = lab.start(shell(script), workers=2, on_failure="restart")
    assert lab.end(run).ended == "exited"
    assert lab.log(run, 0) == b"from\nfrom 0\nfrom 1\n"


def test_without_a_policy_the_run_fails_by_the_rank_that_was_killed(lab: EngineLab) -> None:
    run = lab.start(shell("sleep 60"), workers=2, faults="at 0.3s kill rank 1")
    end = lab.end(run)
    assert (end.ended, end.first_failed) == ("failed", 1)
    conclude(lab, run)
    (event,) = record_of(run)["events"]
    assert event["problem"] is None
    assert record_of(run)["attempts"][0]["rank"] == 1


def test_a_run_that_never_gets_further_is_given_up(lab: EngineLab) -> None:
    run = lab.start(shell("test $RANK = 1 && exit 3; exec sleep 60"), workers=2, on_failure="restart")
    end = lab.end(run)
    assert (end.ended, end.first_failed) == ("failed", 1)
    conclude(lab, run)
    assert len(record_of(run)["attempts"]) == 3
    assert "no new checkpoint" in record_of(run)["problem"]
    assert not lab.processes(run)


def test_a_stopped_rank_on_another_machine_is_found_in_seconds(lab: EngineLab) -> None:
    run = lab.start(
        shell(SECOND_TRY), workers=2, faults="at 0.3s stop rank 1", on_failure="restart", detect_seconds=1.0
    )
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    record = record_of(run)
    assert (record["attempts"][0]["why"], record["attempts"][0]["rank"]) == ("stopped", 1)
    assert 1 <= record["attempts"][0]["ended"] - record["events"][0]["at"] < 50  # the rank sleeps for 60


def test_a_node_that_leaves_while_node_0_packs_its_output_is_not_lost(lab: EngineLab, tmp_path: Path) -> None:
    """The ranks end together: the nodes tell each other so, and each is past listening when it is told."""
    os.mkfifo(tmp_path / "meet")
    words = (
        f'if test "$RANK" = 0; then head -c 200M /dev/zero > "$MLBENCH_OUTPUT_DIR/big"; echo > {tmp_path}/meet; '
        f"else read -r _ < {tmp_path}/meet; fi"
    )
    run = lab.start(shell(words), workers=2, faults="at 60s kill rank 1")
    assert lab.end(run).ended == "exited"


@pytest.mark.slow
def test_what_lasts_ends_on_the_machine_where_it_began(lab: EngineLab) -> None:
    script = "at 0.2s for 1s slow rank 1 to 30% cpu; at 0.3s for 1s stop rank 0"
    run = lab.start(shell("exec sleep 8"), workers=2, faults=script)
    assert lab.end(run).ended == "exited"
    conclude(lab, run)
    slowed, stopped = record_of(run)["events"]
    assert (slowed["problem"], stopped["problem"]) == (None, None)
    assert 0.4 <= slowed["stopped_share"] <= 0.9  # 0.7 on an idle machine; late turns move it
    assert 1 <= stopped["until"] - stopped["at"] < 30


@pytest.mark.slow
def test_a_canceled_run_is_not_started_again(lab: EngineLab) -> None:
    run = lab.start(shell("sleep 60"), workers=2, faults="at 0.2s for 60s stop rank 1", on_failure="restart")
    until(lambda: any(is_stopped(pid) for pid in lab.processes(run)))
    lab.engine.cancel(run)
    assert lab.end(run).ended == "canceled"
    until(lambda: not lab.processes(run))


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_whose_agent_is_killed_ends_the_run_everywhere(lab: EngineLab, node: int) -> None:
    run = lab.start(shell("sleep 77 & sleep 77"), workers=2, faults="at 0.2s for 60s stop rank 1", on_failure="restart")
    until(lambda: any(is_stopped(pid) for pid in lab.processes(run)))
    os.kill(lab.agents(run)[node], signal.SIGKILL)
    assert lab.end(run).ended in ("lost", "failed")
    until(lambda: not lab.processes(run))
