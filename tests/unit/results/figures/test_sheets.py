"""What is written on the sheets of `mlbench charts`: titles, subtitles, footnotes, warnings and messages."""

from typing import Any

import pytest

from mlbench_cli.results.analysis.series import Measurement, group_runs
from mlbench_cli.results.figures.charts import list_sheets
from mlbench_cli.results.figures.files import Sheet
from tests.unit.results.figures.test_scaling import run

BUDGET = {"outcome": "budget_spent", "budget": "60", "Prec@1": 75.0}


def sheets(*runs: Measurement) -> dict[str, Sheet]:
    return {sheet.name: sheet for sheet in list_sheets(group_runs(runs))}


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ([{}, {}], "Total time to the goal"),
        ([{}, {"goal": "", "metric": ""}], "Total time"),
        ([{}, BUDGET], "Total time"),
        ([{"goal": "", "metric": ""}], "Total time"),
    ],
)
def test_a_time_is_to_the_goal_only_where_all_runs_had_one(
    measured: Measurement, facts: list[dict[str, Any]], title: str
) -> None:
    found = sheets(*(run(measured, str(number), 1, 100.0, **each) for number, each in enumerate(facts)))
    assert found["total_time"].title == title


@pytest.mark.parametrize(
    ("facts", "marks"),
    [
        ([{"synthetic": "synthetic data"}], ("SYNTHETIC DATA",)),
        ([{"synthetic": "synthetic data"}, {}], ("PARTLY SYNTHETIC DATA",)),
        ([{"label": "functional only"}], ("FUNCTIONAL ONLY",)),
        (
            [{"label": "functional only", "synthetic": "synthetic data"}, {"label": "functional only"}],
            ("PARTLY SYNTHETIC DATA", "FUNCTIONAL ONLY"),
        ),
    ],
)
def test_sheets_are_marked_with_what_they_must_not_be_taken_for(
    measured: Measurement, facts: list[dict[str, Any]], marks: tuple[str, ...]
) -> None:
    found = sheets(*(run(measured, str(number), 1, 100.0, **each) for number, each in enumerate(facts)))
    assert {sheet.marks for sheet in found.values()} == {marks}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"processes_per_worker": 2}, "2 processes per worker"),
        ({"gpus_per_worker": 1}, "1 GPU per worker"),
        ({"label": "functional only"}, "functional only"),
    ],
)
def test_a_subtitle_names_what_is_not_usual(measured: Measurement, facts: dict[str, Any], words: str) -> None:
    common = sheets(run(measured, "a", 1, 100.0, **facts))["total_time"].subtitle
    assert words in common.split(" · ")
    apart = sheets(run(measured, "a", 1, 100.0, **facts), run(measured, "b", 1, 100.0))["total_time"].subtitle
    assert words not in apart
