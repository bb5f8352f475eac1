"""Accuracy after time, and commands of one's own that are held to a task's goal: what their archives say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.spec import OPEN, RunSpec
from mlbench_cli.results.archive.documents import GoalDocument, ResultDocument
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.judge import official_text
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.archive.verify import find_problems
from tests.unit.results.runs import event, new_run, observation_of, result_event, spec, timings

GOAL = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full"}
GOALS = {"goal_full": 80.0, "goal_light": 70.0}


def goal_of(result: ResultDocument) -> GoalDocument:
    assert result["goal"] is not None
    return result["goal"]


def metrics(*values: float) -> list[str]:
    """Rank 0's reports, ten seconds apart."""
    return [event("metric", at=10.0 * n, name="val_global_Prec@1", value=value) for n, value in enumerate(values, 1)]


def seal_archive(
    folder: Path, run_spec: RunSpec, log: list[str], outcome: str, codes: tuple[int, ...] = (0, 0)
) -> Archive:
    run = new_run(folder, run_spec, {0: log, 1: []})
    seal(run, observation_of(exit_codes=codes))
    assert find_problems(run.folder) == []
    return Archive.open(run.folder)


def spent(**goal: Any) -> str:
    whole = {**GOAL, "value": 82.0, "last": 81.25, **goal}
    passed = {"wall_seconds": 20.5, "training_seconds": 18.25}
    return result_event(
        60.0,
        "budget_spent",
        goal=whole,
        budget_seconds=60.0,
        timings=timings(60.0),
        details={"goals": {"full": passed}},
    )


def test_a_spent_budget_counts_by_what_it_ended_with(tmp_path: Path) -> None:
    asked = spec(task="cifar10_resnet20", parameters={**GOALS, "budget_seconds": 60.0})
    archive = seal_archive(tmp_path / "run", asked, [*metrics(70.0, 82.0, 81.25), spent()], "budget_spent")
    result = archive.result
    assert (result["outcome"], result["budget_seconds"]) == ("budget_spent", 60.0)
    assert goal_of(result)["last"] == 81.25
    assert goal_of(result)["reached"]
    assert goal_of(result)["seconds"] == {"wall": 20.5, "training": 18.25}
    assert str(result["official_line"]).startswith(
        "81.25% Top 1 Validation Accuracy after 60.000 seconds (budget 60, then the last validation), Com"
    )
    assert archive.read("official_result.txt").decode() == official_text(result)


def test_a_goal_that_was_not_reached_on_the_way_is_not_claimed(tmp_path: Path) -> None:
    asked = spec(task="cifar10_resnet20", parameters={**GOALS, "budget_seconds": 60.0})
    archive = seal_archive(
        tmp_path / "run", asked, [*metrics(70.0, 61.0), spent(value=70.0, last=61.0)], "budget_spent"
    )
    assert archive.result["outcome"] == "budget_spent"
    assert not goal_of(archive.result)["reached"]
    assert str(archive.result["official_line"]).startswith("61% Top 1")


def test_the_last_value_must_have_been_reported(tmp_path: Path) -> None:
    asked = spec(task="cifar10_resnet20", parameters={**GOALS, "budget_seconds": 60.0})
    archive = seal_archive(tmp_path / "run", asked, [*metrics(70.0, 82.0), spent()], "budget_spent")
    assert archive.result["outcome"] == "goal_missed"
    assert archive.findings[0]["code"] == "goal_not_proved"


OWN: Mapping[str, Any] = {
    "task": "cifar10_resnet20",
    "preset": OPEN,
    "argv": ("python", "mine.py"),
    "parameters": GOALS,
}


def test_a_command_is_judged_by_the_metric_that_it_reports(tmp_path: Path) -> None:
    archive = seal_archive(tmp_path / "run", spec(**OWN), metrics(70.0, 81.0, 85.0), "goal_reached")
    result = archive.result
    assert result["outcome"] == "goal_reached"
    assert result["division"] == {"word": "open", "reason": "a command of one's own"}
    assert (goal_of(result)["value"], goal_of(result)["last"]) == (81.0, 85.0)
    assert goal_of(result)["seconds"] == {"wall": 20.0, "training": None}  # since the workers' start
    assert archive.read("official_result.txt").decode().splitlines() == [
        "80% Top 1 Validation Accuracy reached in 20.000 seconds",
        "Division: open (a command of one's own), comparable with results of the open division only.",
    ]


@pytest.mark.parametrize(
    ("log", "codes", "outcome"),
    [
        (metrics(70.0, 79.0), (0, 0), "goal_missed"),
        (metrics(70.0, 81.0), (0, 1), "failed"),
        ([event("metric", rank=1, at=1, name="val_global_Prec@1", value=99.0)], (0, 0), "goal_missed"),
        (["nothing"], (0, 0), "goal_missed"),
    ],
)
def test_a_command_that_has_not_reached_the_goal(
    tmp_path: Path, log: list[str], codes: tuple[int, ...], outcome: str
) -> None:
    archive = seal_archive(tmp_path / "run", spec(**OWN), log, "goal_reached", codes)
    assert archive.result["outcome"] == outcome
    assert archive.result["official_line"] is None


def test_a_commands_own_result_goes_before_the_judgement(tmp_path: Path) -> None:
    log = [*metrics(81.0), result_event(5.0, goal={**GOAL, "value": 81.0})]
    archive = seal_archive(tmp_path / "run", spec(**OWN), log, "goal_reached")
    assert goal_of(archive.result)["seconds"] == {"wall": 5.0, "training": 4.3}
