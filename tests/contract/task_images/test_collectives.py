"""What ranks do together, and how they part when one of them fails: real processes, real gloo."""

import os
import re
import signal
from pathlib import Path

from tests.contract.local_runs import until
from tests.contract.task_images import collectives
from tests.contract.task_images.ranks import RankServer

LOGISTIC = "task_images.run epsilon_logistic_regression"
SMALL = {"data": "synthetic", "training_rows": 600, "validation_rows": 100, "epochs": 5, "goal_full": 100.0}


def test_three_ranks_agree_in_everything(ranks: RankServer, tmp_path: Path) -> None:
    for one in ranks.run("tests.contract.task_images.collectives", 3, tmp_path, {}):
        assert one.stderr == ""
        assert [line for line in one.stdout.splitlines() if line.startswith("OK ")] == [
            f"OK {check.__name__}" for check in collectives.CHECKS
        ]
        assert one.code == 0


def test_a_diverging_training_fails_on_every_rank_with_the_same_words(ranks: RankServer, tmp_path: Path) -> None:
    # Overflow at a rate of 1e38: infinite weights, then NaN. Nothing of it may count as a goal.
    parameters = {**SMALL, "learning_rate": 1e38, "goal_full": 0.0, "goal_light": 0.0}
    ended = ranks.run(LOGISTIC, 2, tmp_path, parameters)
    assert [one.code for one in ended] == [1, 1]
    for rank, one in enumerate(ended):
        assert one.stderr.startswith(f"rank {rank}: the training loss is nan in epoch 1, at step 2")
        assert "Traceback" not in one.stderr
        assert not one.events("result")


def test_a_rank_that_never_comes_is_named(ranks: RankServer, tmp_path: Path) -> None:
    ended = ranks.wait(ranks.start("tests.contract.task_images.missing_rank", 3, tmp_path, {}, missing=1))
    assert [one.code for one in ended] == [75, 75]
    for one in ended:
        # Whoever gives up second may find the first one gone.
        assert re.search(r"of 3 ranks did not connect within 4 s: .*2|no rendezvous at", one.stderr)
        assert "Traceback" not in one.stderr
    assert any("did not connect" in one.stderr for one in ended)


def test_a_rank_that_dies_takes_the_others_with_it(ranks: RankServer, tmp_path: Path) -> None:
    started = ranks.start(LOGISTIC, 2, tmp_path, {**SMALL, "epochs": 100000})
    until(lambda: "epoch 2/" in (tmp_path / "out-0").read_text())
    os.kill(started.pids[1], signal.SIGKILL)
    first, second = ranks.wait(started)
    assert (first.code, second.code) == (75, -signal.SIGKILL)
    assert "lost another rank" in first.stderr
    assert "Traceback" not in first.stderr
    assert not first.events("result")


def test_missing_data_is_said_in_two_lines(ranks: RankServer, tmp_path: Path) -> None:
    [ended] = ranks.run(LOGISTIC, 1, tmp_path, {}, MLBENCH_DATA_DIR="")
    assert ended.code == 78
    assert len(ended.stderr.splitlines()) == 2
    assert "--set data=synthetic" in ended.stderr
