"""The official line in the original's words, or why there is none."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.judge import official_line, official_text
from mlbench_cli.results.archive.verify import find_problems
from task_images.methods.catalog import describe, find_class
from tests.unit.results.runs import sealed_run

SPENT = "(budget 7200, then the last validation)"


def result(**changes: Any) -> dict[str, Any]:
    """The fields of result.json that the line is made of, with the figures of a published archive."""
    fields: dict[str, Any] = {
        "outcome": "goal_reached",
        "exit_code": 0,
        "first_failed": None,
        "goal": {
            "metric": "Prec@1",
            "comparison": ">=",
            "threshold": 80.0,
            "value": 80.4,
            "last": 81.25,
            "reached": True,
            "wording": "80% Top 1 Validation Accuracy",
            "seconds": {"wall": 150.0, "training": 106.912},
        },
        "timings": {
            "forward": {"rank0": 52.0},
            "backward": {"rank0": 0.97764849662781},
            "communication": {"rank0": 45.482877254486084},
            "metrics": {"rank0": 1.5202581882476807},
            "preprocessing": {"rank0": 1.0818517208099365},
            "validation": {"rank0": 30.0},
        },
        "label": {"word": "performance", "reason": None},
        "division": {"word": "closed", "reason": None},
        "budget_seconds": None,
        "task_seconds": {"wall": 7200.125, "training": 7000.0},
        "synthetic": False,
        "data": "digits",
    }
    return {**fields, **changes}


def test_the_line_has_the_original_words_and_wall_clock_seconds() -> None:
    line = (
        "80% Top 1 Validation Accuracy reached in 150.000 seconds (training steps: 106.912), "
        "Compute: 52.978 seconds, "
        "Communication: 45.483 seconds, Metrics Computation: 1.520 seconds, "
        "Pre-processing: 1.082 seconds"
    )
    assert official_line(result()) == line
    assert official_text(result()) == line + "\n"


def test_waiting_for_data_counts_in_the_headline() -> None:
    """A run that waits 60 s for its data is slower by 60 s; the original left that out."""
    quick, waiting = ({"wall": 100.0 + wait, "training": 100.0} for wait in (0.0, 60.0))
    lines = [official_line(result(goal={**result()["goal"], "seconds": seconds})) for seconds in (quick, waiting)]
    assert [str(line).split(" (")[0] for line in lines] == [
        "80% Top 1 Validation Accuracy reached in 100.000 seconds",
        "80% Top 1 Validation Accuracy reached in 160.000 seconds",
    ]


def test_other_data_than_the_official_ones_are_said() -> None:
    identity = {"counts": {"images": 20}, "digest": "sha256:1", "official": False, "reason": "a part: 20 images"}
    given = result(task="x", data_identity=identity, division={"word": None, "reason": "a part: 20 images"})
    _, note = official_text(given).splitlines()
    assert note == "The data were not the official ones (a part: 20 images): not comparable with official results."


def test_accuracy_after_time_has_a_line_of_its_own() -> None:
    spent = result(outcome="budget_spent", budget_seconds=7200.0, timings={"forward": {"rank0": 5.0}})
    assert official_line(spent) == (
        f"81.25% Top 1 Validation Accuracy after 7200.125 seconds {SPENT}, Compute: 5.000 seconds"
    )
    plain = {**spent["goal"], "wording": "Prec@1 >= 80"}
    assert str(official_line({**spent, "goal": plain})).startswith("Prec@1 of 81.25 after 7200.125 seconds")
    assert official_line({**spent, "goal": None}) is None


def test_another_method_than_the_tasks_own_is_named(tmp_path: Path) -> None:
    folder = sealed_run(tmp_path / "run", method=describe(find_class("eftopk")()))
    assert Archive.open(folder).result["method"] == "eftopk"
    assert find_problems(folder) == []
    text = (folder / "official_result.txt").read_text("utf-8")
    assert "\nMethod of communication: eftopk, not the task's own.\n" in text
    assert "method" not in Archive.open(sealed_run(tmp_path / "own")).result


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"outcome": "goal_missed"}, 'the goal "80% Top 1 Validation Accuracy" was not reached, Prec@1 came to 80.4'),
        ({"outcome": "failed", "exit_code": 7, "first_failed": 2}, "the run failed with exit code 7, rank 2 first"),
        ({"outcome": "failed", "exit_code": 137}, "the run failed with exit code 137"),
        ({"outcome": "canceled"}, "the run was canceled"),
        ({"outcome": "deadline"}, "the run was stopped at its deadline"),
        ({"outcome": "never_started"}, "the run never started"),
        ({"outcome": "lost"}, "the run was lost: nothing of it could be observed any more"),
        ({"outcome": "completed", "goal": None}, "the run completed, and it has no goal"),
    ],
)
def test_without_a_line_the_file_says_why(changes: dict[str, object], text: str) -> None:
    assert official_line(result(**changes)) is None
    assert official_text(result(**changes)) == f"No official result: {text}.\n"


def test_synthetic_data_are_said(tmp_path: Path) -> None:
    archive = Archive.open(sealed_run(tmp_path / "run", synthetic=True, data="generated digits"))
    line, note = archive.read("official_result.txt").decode().splitlines()
    assert line == archive.result["official_line"]
    assert note == "The data were synthetic (generated digits): not comparable with figures on real data."


def test_figures_that_measure_no_performance_are_said_to_be_functional(tmp_path: Path) -> None:
    archive = Archive.open(sealed_run(tmp_path / "run", functional_only="all nodes are one machine"))
    line, _, note = archive.read("official_result.txt").decode().splitlines()
    assert line == archive.result["official_line"]
    assert note == "The result is functional, not a performance measurement: all nodes are one machine."
    assert archive.result["label"] == {"word": "functional", "reason": "all nodes are one machine"}
    assert find_problems(Path(archive.path)) == []
